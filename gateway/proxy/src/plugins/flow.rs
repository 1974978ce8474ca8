//! Answer side of plugins: an upstream's events, through every plugin that looks at them.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use penstock_plugins::{After, Answer, AnswerHead, BoxFuture, Flow, Outcome, PluginError, Sees, event_bytes};
use penstock_types::{ChatEvent, FinishReason};
use tokio::time::{Sleep, sleep};

use super::convert::{Converter, usage_of};
use super::shell::{AnswerShape, Broke, Shell, Stage, refused};
use penstock_base::error::Failure;
use penstock_config::OnFail;
use penstock_upstream::answer_memory::Hold;
use penstock_upstream::{Course, Events, Facts};

/// Events of an answer that a plugin gave in place of a model's: all at once, free of cost.
pub(super) struct Replay(Answer);

impl Replay {
    pub(super) fn new(answer: Answer) -> Self {
        Self(answer)
    }
}

impl Events for Replay {
    fn poll_events(&mut self, _: &mut Context<'_>, out: &mut Vec<ChatEvent>) -> Poll<Result<bool, Failure>> {
        out.append(&mut self.0.events);
        Poll::Ready(Ok(false))
    }

    fn facts(&self) -> Facts {
        // No model was asked: the answer costs nothing, whatever usage it repeats.
        Facts::default()
    }

    fn headers(&self) -> &[(HeaderName, HeaderValue)] {
        &self.0.headers
    }
}

/// Events of an upstream with the stages of the plugins around them.
pub(super) struct Around {
    /// Plugins' stages, in the order in which events pass them.
    shell: Shell,
    /// Shape of the answer; `None`: no plugin looks at the events.
    shape: Option<Arc<AnswerShape>>,
    /// Events of the upstream; `None`: the upstream was told to stop.
    inner: Option<Box<dyn Events>>,
    /// Outcome that the plugins are told when the answer is complete.
    outcome: Outcome,
    /// Converter behind the last stage, to the form that the client gets.
    last: Converter,
    waiting: Option<Waiting>,
    headers: Option<Vec<(HeaderName, HeaderValue)>>,
    /// Memory of the key's answers that is charged for what plugins and converters hold.
    hold: Hold,
    /// Facts and course of an upstream that was told to stop.
    stopped: (Facts, Course),
    done: bool,
}

/// Plugin that waits for work of its own (a model, an endpoint) before the answer goes on.
struct Waiting {
    stage: usize,
    work: BoxFuture<Result<After, PluginError>>,
    timer: Pin<Box<Sleep>>,
    /// Events that go on before the result of the work.
    held: Vec<ChatEvent>,
    /// Memory of these events.
    held_bytes: usize,
    end: bool,
}

/// Outcome of passing a batch of events through the stages.
enum Passed {
    /// The batch goes to the client; with true, nothing follows.
    On(bool),
    /// A stage waits for work of its own (a model, an endpoint), and the batch with it.
    Waits,
}

impl Around {
    pub(super) fn new(
        shell: Shell,
        shape: Option<Arc<AnswerShape>>,
        inner: Box<dyn Events>,
        hold: Hold,
        outcome: Outcome,
    ) -> Self {
        Self {
            hold,
            shell,
            shape,
            inner: Some(inner),
            outcome,
            last: Converter::Open,
            waiting: None,
            headers: None,
            stopped: (Facts::default(), Course::default()),
            done: false,
        }
    }

    /// Shows the header fields to the stages, once they are known. A stage that refuses the answer ends it.
    fn head(&mut self) -> Result<(), Failure> {
        if self.headers.is_some() {
            return Ok(());
        }
        let mut head = AnswerHead { headers: self.inner.as_ref().map_or(Vec::new(), |inner| inner.headers().to_vec()) };
        let Shell { stages, metrics, .. } = &mut self.shell;
        let mut refusal = None;
        for stage in stages.iter_mut().filter(|stage| stage.sees >= Sees::Head && !stage.left_out) {
            let before = head.clone();
            match guarded(|| stage.hooks.on_head(&mut head)) {
                Ok(None) => {}
                Ok(Some(rejection)) => {
                    stage.outcome = "rejected";
                    refusal = Some(rejection);
                    break;
                }
                Err(broke) => {
                    head = before;
                    broke.handled(&stage.entry, "head", metrics)?;
                }
            }
        }
        self.headers = Some(head.headers);
        match refusal {
            Some(rejection) => Err(self.shell.rejected(refused(rejection))),
            None => Ok(()),
        }
    }

    /// Next batch, the stage at which it enters, and whether it is the last.
    fn next(&mut self, context: &mut Context<'_>, batch: &mut Vec<ChatEvent>) -> Poll<Result<(usize, bool), Failure>> {
        if self.waiting.is_some() {
            return self.resume(context, batch);
        }
        let Some(inner) = &mut self.inner else { return Poll::Ready(Ok((0, true))) };
        match ready!(inner.poll_events(context, batch)) {
            Ok(more) => Poll::Ready(self.head().inspect_err(|_| batch.clear()).map(|()| (0, !more))),
            Err(failure) => {
                // Events before the failure go to the client; events that plugins hold back do not.
                let passed = if batch.is_empty() { Ok(Passed::On(false)) } else { self.pass(0, batch, false) };
                Poll::Ready(Err(passed.err().unwrap_or(failure)))
            }
        }
    }

    fn resume(
        &mut self,
        context: &mut Context<'_>,
        batch: &mut Vec<ChatEvent>,
    ) -> Poll<Result<(usize, bool), Failure>> {
        let Some(waiting) = &mut self.waiting else { return Poll::Pending };
        let after = match catch_unwind(AssertUnwindSafe(|| waiting.work.as_mut().poll(context))) {
            Ok(Poll::Ready(Ok(after))) => Ok(after),
            Ok(Poll::Ready(Err(error))) => Err(Broke::Error(error)),
            Err(_) => Err(Broke::Panic("in what it waits for".into())),
            Ok(Poll::Pending) => {
                ready!(waiting.timer.as_mut().poll(context));
                Err(Broke::Timeout)
            }
        };
        let Some(waiting) = self.waiting.take() else { return Poll::Pending };
        let (at, mut end) = (waiting.stage, waiting.end);
        *batch = waiting.held;
        match after {
            Ok(After::Go(events)) => batch.extend(events),
            Ok(After::Stop(events, reason)) => {
                batch.extend(events);
                self.stop(at, batch, reason);
                end = true;
            }
            Ok(After::Reject(rejection)) => {
                batch.clear();
                self.shell.stages[at].outcome = "rejected";
                return Poll::Ready(Err(self.shell.rejected(refused(rejection))));
            }
            Err(broke) => {
                let Shell { stages, metrics, .. } = &mut self.shell;
                broke.handled(&stages[at].entry, "event", metrics).inspect_err(|_| batch.clear())?;
                leave_out(&mut stages[at], batch);
            }
        }
        note_finishes(&mut self.shell.stages[at], batch);
        Poll::Ready(Ok((at + 1, end)))
    }

    /// Takes a batch through the stages from `from` on. A batch that comes with a failure holds only events that every
    /// stage passed on.
    fn pass(&mut self, from: usize, batch: &mut Vec<ChatEvent>, mut end: bool) -> Result<Passed, Failure> {
        let Some(shape) = self.shape.clone() else { return Ok(Passed::On(end)) };
        for at in from..self.shell.stages.len() {
            let sees = self.shell.stages[at].sees;
            if sees < Sees::Events {
                continue;
            }
            let facts = self.facts();
            let score = |choice| self.inner.as_ref().and_then(|inner| inner.score(choice));
            let bytes = sees == Sees::Bytes;
            let converted = self.shell.stages[at].converter.convert(batch, end, bytes, &shape, facts, &score);
            converted.inspect_err(|_| batch.clear())?;
            if self.shell.stages[at].left_out || (batch.is_empty() && !end) {
                continue;
            }
            match self.call(at, batch, end).inspect_err(|_| batch.clear())? {
                Flow::Go => {}
                Flow::Wait(work) => {
                    let timer = Box::pin(sleep(self.shell.stages[at].entry.timeout));
                    let held = std::mem::take(batch);
                    let held_bytes = held.iter().map(event_bytes).sum();
                    self.waiting = Some(Waiting { stage: at, work, timer, held, held_bytes, end });
                    return Ok(Passed::Waits);
                }
                Flow::Stop(reason) => {
                    self.stop(at, batch, reason);
                    end = true;
                }
                Flow::Reject(rejection) => {
                    self.shell.stages[at].outcome = "rejected";
                    // Events before the refusal go to the client, as far as the outer plugins let them pass.
                    if !matches!(self.pass(at + 1, batch, false), Ok(Passed::On(_))) {
                        batch.clear();
                    }
                    return Err(self.shell.rejected(refused(rejection)));
                }
            }
            note_finishes(&mut self.shell.stages[at], batch);
        }
        if shape.kept {
            let (facts, inner) = (self.facts(), &self.inner);
            let score = |choice| inner.as_ref().and_then(|inner| inner.score(choice));
            let converted = self.last.convert(batch, end, false, &shape, facts, &score);
            converted.inspect_err(|_| batch.clear())?;
        }
        Ok(Passed::On(end))
    }

    /// Calls `on_event` of the plugin at stage `at` with a batch of events.
    fn call(&mut self, at: usize, batch: &mut Vec<ChatEvent>, end: bool) -> Result<Flow, Failure> {
        let Shell { stages, metrics, .. } = &mut self.shell;
        let stage = &mut stages[at];
        // A copy of the batch, for a plugin that is left out after a failure: no event may be lost.
        let before = (stage.entry.on_fail == OnFail::Open).then(|| batch.clone());
        let began = Instant::now();
        let flow = guarded(|| stage.hooks.on_event(batch, end));
        stage.spent += began.elapsed();
        flow.or_else(|broke| {
            stage.outcome = "failed";
            broke.handled(&stage.entry, "event", metrics)?;
            batch.clear();
            leave_out(stage, batch);
            batch.extend(before.unwrap_or_default());
            Ok(Flow::Go)
        })
    }

    /// Charges the memory for answers for what the plugins and the conversions hold now.
    fn cover(&mut self) -> Result<(), Failure> {
        if self.shape.is_none() {
            return Ok(());
        }
        let of = |stage: &Stage| stage.converter.held() + if stage.left_out { 0 } else { stage.hooks.held_bytes() };
        let stages: usize = self.shell.stages.iter().filter(|stage| stage.sees >= Sees::Events).map(of).sum();
        let waiting = self.waiting.as_ref().map_or(0, |waiting| waiting.held_bytes);
        self.hold.cover(stages + self.last.held() + waiting).map_err(|failure| self.course().not_held(failure))
    }

    /// Ends the answer behind a stage: open choices finish with `reason`, and the upstream is told to stop.
    fn stop(&mut self, at: usize, batch: &mut Vec<ChatEvent>, reason: FinishReason) {
        if let Some(inner) = self.inner.take() {
            self.stopped = (inner.facts_at_end(), inner.course());
        }
        let facts = self.stopped.0;
        let stage = &mut self.shell.stages[at];
        stage.outcome = "stopped";
        if stage.sees != Sees::Events {
            return;
        }
        note_finishes(stage, batch);
        let choices = self.shape.as_ref().map_or(0, |shape| shape.decoded.form.choices());
        let open = (0..choices as u32).filter(|choice| !stage.finished.contains(choice));
        batch.extend(open.map(|choice| ChatEvent::Finish { choice, reason, stop: None }));
        if !batch.iter().any(|event| matches!(event, ChatEvent::Usage(_))) {
            batch.push(ChatEvent::Usage(usage_of(facts)));
        }
    }
}

/// Runs a hook; a panic fails that plugin and nothing else.
fn guarded<T>(hook: impl FnOnce() -> Result<T, PluginError>) -> Result<T, Broke> {
    match catch_unwind(AssertUnwindSafe(hook)) {
        Ok(done) => done.map_err(Broke::Error),
        Err(payload) => {
            let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
            Err(Broke::Panic(text.unwrap_or_else(|| "panic without a message".into())))
        }
    }
}

/// Takes a failed plugin out of the rest of the answer; the events that it holds back go first.
fn leave_out(stage: &mut Stage, batch: &mut Vec<ChatEvent>) {
    stage.left_out = true;
    let mut held = Vec::new();
    if catch_unwind(AssertUnwindSafe(|| stage.hooks.release(&mut held))).is_ok() {
        batch.append(&mut held);
    }
}

fn note_finishes(stage: &mut Stage, batch: &[ChatEvent]) {
    stage.finished.extend(batch.iter().filter_map(|event| match event {
        ChatEvent::Finish { choice, .. } => Some(*choice),
        _ => None,
    }));
}

impl Events for Around {
    fn poll_events(&mut self, context: &mut Context<'_>, out: &mut Vec<ChatEvent>) -> Poll<Result<bool, Failure>> {
        if self.done {
            return Poll::Ready(Ok(false));
        }
        loop {
            let mut batch = Vec::new();
            let passed = match ready!(self.next(context, &mut batch)) {
                Ok((from, end)) => self.pass(from, &mut batch, end),
                Err(failure) => Err(failure),
            };
            out.append(&mut batch);
            match passed.and_then(|passed| self.cover().map(|()| passed)) {
                Ok(Passed::Waits) => {}
                Ok(Passed::On(true)) => {
                    self.done = true;
                    let (outcome, facts, target) = (self.outcome, self.facts(), self.course().target);
                    self.shell.end(outcome, facts, target);
                    return Poll::Ready(Ok(false));
                }
                Ok(Passed::On(false)) if out.is_empty() => {}
                Ok(Passed::On(false)) => return Poll::Ready(Ok(true)),
                Err(failure) => {
                    self.done = true;
                    let (facts, target) = (self.facts_at_end(), self.course().target);
                    self.shell.end(Outcome::Failed, facts, target);
                    return Poll::Ready(Err(failure));
                }
            }
        }
    }

    fn facts(&self) -> Facts {
        self.inner.as_ref().map_or(self.stopped.0, |inner| inner.facts())
    }

    fn facts_at_end(&self) -> Facts {
        self.inner.as_ref().map_or(self.stopped.0, |inner| inner.facts_at_end())
    }

    fn score(&self, choice: u32) -> Option<f32> {
        self.inner.as_ref().and_then(|inner| inner.score(choice))
    }

    fn course(&self) -> Course {
        self.inner.as_ref().map_or_else(|| self.stopped.1.clone(), |inner| inner.course())
    }

    fn epilogue(&self) -> Option<Bytes> {
        self.inner.as_ref().and_then(|inner| inner.epilogue())
    }

    fn headers(&self) -> &[(HeaderName, HeaderValue)] {
        self.headers.as_deref().unwrap_or_default()
    }
}

impl Drop for Around {
    fn drop(&mut self) {
        // The shell would not know what there was until then.
        let (facts, target) = (self.facts_at_end(), self.course().target);
        self.shell.end(Outcome::Gone, facts, target);
    }
}
