//! Conversion of pool events into the events of one answer: order within a choice, stop strings, usage, ranking.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderName, HeaderValue};
use penstock_proto::ErrorKind;
use penstock_proto::frames::{self, Output, TokenLogprobs};
use penstock_text::{ChoiceDecoder, ChoiceOptions, End, TextModel};
use penstock_types::{ChatEvent, FinishReason, TokenLogprob, TokenPlace, Usage};

use super::echo;
use super::plan::Plan;
use super::refused;
use super::wave::Wave;
use penstock_base::error::Failure;
use penstock_pool::{Pool, PoolEvent, Ticket};
use penstock_telemetry::OpenSpan;
use penstock_telemetry::trace::Kind;
use penstock_upstream::{Course, Events, Facts, Origin};

/// Most pool events taken before the resulting text is sent: bounds one write and keeps other streams' turns short.
pub(super) const BURST: usize = 64;

/// Events of one request, made from the outputs of its jobs in the pool.
pub(super) struct PoolEvents {
    plan: Plan,
    jobs: Vec<Running>,
    text: Arc<TextModel>,
    facts: Facts,
    wave: Wave,
    source: Source,
    /// Worker that answers; of several prompts, the last that was bound to one.
    worker: Option<Arc<str>>,
    span: Option<OpenSpan>,
    since: Instant,
    begun: bool,
    headers: Vec<(HeaderName, HeaderValue)>,
    /// Outputs of one token each that are still to be delivered one by one, for [`Plan::counts_on`]. At most the tokens
    /// of [`BURST`] events.
    held: VecDeque<(usize, Output)>,
}

/// Header field that asks which worker was chosen and why, and that answers it.
pub(super) const ROUTE: HeaderName = HeaderName::from_static("x-penstock-route");

/// Returns true if a request asks which worker was chosen and why.
pub fn asks_route(headers: &HeaderMap) -> bool {
    headers.get(ROUTE).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"explain"))
}

/// Pool that the request's jobs go to, and the tenant and trace that the jobs carry.
pub(super) struct Source {
    pub(super) pool: Pool,
    /// Name of the model that the request asks for.
    pub(super) model: String,
    pub(super) origin: Origin,
}

/// Job of one prompt in the pool: its ticket, and the decoders of its choices.
struct Running {
    /// Ticket in the pool; `None` before the job's turn and after its end.
    ticket: Option<Ticket>,
    /// True once the pool's report of a binding has been taken and the prompt's tokens are in the facts.
    is_counted: bool,
    /// Global index of the job's first choice.
    base: u32,
    choices: Vec<Choice>,
    prompt_told: bool,
    /// Outputs that came before the prompt's log-probabilities.
    early: VecDeque<Output>,
    open: usize,
}

/// Prompt tokens that came from the prefix cache, as this output of a job tells.
fn cached_tokens(output: &Output) -> u64 {
    if output.choice == 0 { u64::from(output.cached_tokens.unwrap_or(0)) } else { 0 }
}

struct Choice {
    /// Text to emit before the first token.
    echo: Option<String>,
    decoder: Option<Box<ChoiceDecoder>>,
    logprob_sum: f64,
    tokens: u32,
}

impl PoolEvents {
    /// Builds the jobs and decoders of a plan and submits the first jobs.
    pub(super) fn start(plan: Plan, source: Source, text: Arc<TextModel>) -> Result<Self, Failure> {
        let mut jobs = Vec::with_capacity(plan.prompts.len());
        for at in 0..plan.prompts.len() {
            let base = at as u32 * plan.choices;
            let choice = |index: u32| {
                let options = ChoiceOptions {
                    choice: base + index,
                    call_ids: distinct(plan.options.call_ids, base + index),
                    ..plan.options.clone()
                };
                Choice {
                    echo: plan.echo.clone(),
                    decoder: Some(Box::new(ChoiceDecoder::new(text.clone(), options))),
                    logprob_sum: 0.0,
                    tokens: 0,
                }
            };
            let choices: Vec<_> = (0..plan.choices).map(choice).collect();
            let (open, early) = (choices.len(), VecDeque::new());
            jobs.push(Running {
                ticket: None,
                is_counted: false,
                base,
                choices,
                prompt_told: !plan.tell_prompt,
                early,
                open,
            });
        }
        let prompt_tokens: u64 = plan.prompts.iter().map(|prompt| prompt.tokens.len() as u64).sum();
        let (wave, facts) = (Wave::new(jobs.len()), Facts::default());
        let mut span =
            source.origin.trace.as_ref().map(|trace| trace.child(format!("pool {}", source.model), Kind::Internal));
        span.iter_mut().for_each(|span| span.set("gen_ai.usage.input_tokens", prompt_tokens));
        let (worker, since, begun) = (None, Instant::now(), false);
        let (headers, held) = (Vec::new(), VecDeque::new());
        let mut events = Self { plan, jobs, text, facts, wave, source, worker, span, since, begun, headers, held };
        events.fill()?;
        Ok(events)
    }

    /// Submits the jobs whose turn it is, at most a wave at once.
    fn fill(&mut self) -> Result<(), Failure> {
        let Self { plan, jobs, wave, source, .. } = self;
        let filled = wave.fill(|at| {
            let job = plan.job(&plan.prompts[at], &source.model, &source.origin);
            jobs[at].ticket = Some(source.pool.submit(job)?);
            Ok(())
        });
        filled.map_err(|error| refused(&error))
    }

    /// Takes an output of one token, so that the token count sent with it is exact. False: the answer is complete.
    fn deliver(&mut self, (at, output): (usize, Output), out: &mut Vec<ChatEvent>) -> Result<bool, Failure> {
        let open = self.wave.open();
        self.begin();
        self.output(at, output, out)?;
        if self.wave.open() < open {
            self.fill()?;
        }
        if self.wave.is_done() {
            self.held.clear();
            out.push(ChatEvent::Usage(self.usage()));
        }
        Ok(!self.wave.is_done())
    }

    /// Marks the first output: the trace span gets the milliseconds until the first token.
    fn begin(&mut self) {
        if let Some(span) = &mut self.span
            && !std::mem::replace(&mut self.begun, true)
        {
            span.set("penstock.first_token_ms", self.since.elapsed().as_secs_f64() * 1e3);
        }
    }

    /// Takes one event of the job at index `at`.
    fn take(&mut self, at: usize, event: PoolEvent, out: &mut Vec<ChatEvent>) -> Result<(), Failure> {
        match event {
            PoolEvent::Output(output) if self.plan.counts_on => {
                self.held.extend(single(output).map(|output| (at, output)));
                Ok(())
            }
            PoolEvent::Output(output) => {
                self.begin();
                self.output(at, output, out)
            }
            PoolEvent::Bound { worker, waited, route } => {
                if !std::mem::replace(&mut self.jobs[at].is_counted, true) {
                    self.facts.prompt_tokens += self.plan.prompts[at].tokens.len() as u64;
                }
                let route = route.and_then(|route| HeaderValue::from_str(&route).ok());
                self.headers.extend(route.filter(|_| self.headers.is_empty()).map(|route| (ROUTE, route)));
                if let Some(span) = &mut self.span {
                    span.set("penstock.worker", worker.to_string());
                    span.set("penstock.queue_ms", waited.as_secs_f64() * 1e3);
                }
                self.worker = Some(worker);
                Ok(())
            }
            PoolEvent::Resumed { exact } => {
                self.facts.resumes += 1;
                self.facts.inexact |= !exact;
                Ok(())
            }
            PoolEvent::Moved { worker } => {
                self.facts.moves += 1;
                self.worker = Some(worker);
                Ok(())
            }
            PoolEvent::Gap { time, .. } => {
                self.facts.gap_us = self.facts.gap_us.max(time.as_micros() as u64);
                Ok(())
            }
            PoolEvent::Failed { kind, message, retry_after } => Err(failure(kind, message, retry_after)),
        }
    }

    fn output(&mut self, at: usize, mut output: Output, out: &mut Vec<ChatEvent>) -> Result<(), Failure> {
        self.facts.cached_tokens += cached_tokens(&output);
        output.cached_tokens = None;
        if !self.jobs[at].prompt_told {
            if self.plan.prompt_logprobs && output.prompt_logprobs.is_empty() {
                if let Some(finish) = &output.finish {
                    // A refused prompt has no log-probabilities: its reason must not wait for them.
                    ended(finish)?;
                }
                // Bounded by the window: the pool waits for what is taken here to be granted again.
                self.jobs[at].early.push_back(output);
                return Ok(());
            }
            self.tell_prompt(at, &output.prompt_logprobs, out);
            self.speak(at, &output, out)?;
            while let Some(early) = self.jobs[at].early.pop_front() {
                self.speak(at, &early, out)?;
            }
            return Ok(());
        }
        self.speak(at, &output, out)
    }

    fn tell_prompt(&mut self, at: usize, logprobs: &[TokenLogprobs], out: &mut Vec<ChatEvent>) {
        let mut entries: Vec<TokenLogprob> =
            self.plan.prompts[at].tokens.iter().zip(logprobs).map(|(token, said)| self.entry(*token, said)).collect();
        let (text, tokens) = (self.plan.prompts[at].text.clone(), self.plan.prompts[at].tokens.to_vec());
        if self.plan.repeats_prompt {
            echo::place(&mut entries, &text, |token| self.text.is_special(token));
        }
        let job = &mut self.jobs[at];
        job.prompt_told = true;
        out.push(ChatEvent::Prompt { choice: job.base, text, logprobs: entries, tokens });
    }

    fn entry(&self, token: u32, said: &TokenLogprobs) -> TokenLogprob {
        let top = said.top_tokens.iter().zip(&said.top_logprobs);
        TokenLogprob {
            token,
            bytes: self.text.token_bytes(token),
            logprob: Some(said.logprob).filter(|value| !value.is_nan()),
            top: top.map(|(id, logprob)| (*id, self.text.token_bytes(*id), *logprob)).collect(),
            place: TokenPlace::Text,
        }
    }

    /// Decodes the tokens, and the end, of one choice.
    fn speak(&mut self, at: usize, output: &Output, out: &mut Vec<ChatEvent>) -> Result<(), Failure> {
        let prompt_only = self.plan.prompt_only;
        let job = &mut self.jobs[at];
        let Some(choice) = job.choices.get_mut(output.choice as usize) else {
            return Err(Failure::internal(format!("a worker spoke of choice {}", output.choice)));
        };
        // Late outputs of a choice whose text is complete.
        let Some(decoder) = choice.decoder.as_mut() else { return Ok(()) };
        if let Some(text) = choice.echo.take() {
            let choice = job.base + output.choice;
            out.push(ChatEvent::Text { choice, text, logprobs: Vec::new(), tokens: Vec::new() });
        }
        let mut end = None;
        if prompt_only {
            if let Some(finish) = &output.finish {
                // The token behind the prompt is nobody's, its failure is the request's.
                ended(finish)?;
            }
            let choice = job.base + output.choice;
            out.push(ChatEvent::Finish { choice, reason: FinishReason::Length, stop: None });
            end = Some(Vec::new());
        } else {
            for token in &output.tokens {
                let decoded = decoder.push(token);
                choice.tokens += 1;
                choice.logprob_sum += token.logprobs.as_ref().map_or(0.0, |said| f64::from(said.logprob));
                out.extend(decoded.events);
                if decoded.stopped {
                    end = Some(decoder.finish(End::Stop { token: None }));
                    break;
                }
            }
        }
        let end = match (end, &output.finish) {
            (Some(events), _) => {
                if output.finish.is_none()
                    && let Some(ticket) = &job.ticket
                {
                    ticket.cancel_choice(output.choice);
                }
                events
            }
            (None, None) => return Ok(()),
            (None, Some(finish)) => decoder.finish(ended(finish)?),
        };
        self.facts.completion_tokens += decoder.completion_tokens();
        self.facts.reasoning_tokens += decoder.reasoning_tokens();
        out.extend(end);
        choice.decoder = None;
        job.open -= 1;
        if job.open == 0 {
            job.ticket = None;
            self.wave.end_one();
        }
        Ok(())
    }

    fn usage(&self) -> Usage {
        let facts = self.facts();
        Usage {
            prompt_tokens: facts.prompt_tokens,
            cached_tokens: facts.cached_tokens,
            cache_write_tokens: 0,
            completion_tokens: facts.completion_tokens,
            reasoning_tokens: facts.reasoning_tokens,
        }
    }
}

impl Events for PoolEvents {
    fn poll_events(&mut self, context: &mut Context<'_>, out: &mut Vec<ChatEvent>) -> Poll<Result<bool, Failure>> {
        if let Some(held) = self.held.pop_front() {
            return Poll::Ready(self.deliver(held, out));
        }
        let mut taken = 0;
        for at in 0..self.jobs.len() {
            let open = self.wave.open();
            // Nothing overtakes what is held: an end or a failure comes behind the outputs in front of it.
            while taken < BURST && self.held.is_empty() {
                let Some(ticket) = self.jobs[at].ticket.as_mut() else { break };
                match ticket.poll_next(context) {
                    Poll::Pending => break,
                    Poll::Ready(None) => {
                        return Poll::Ready(Err(Failure::internal("the pool ended a request before its choices")));
                    }
                    Poll::Ready(Some(event)) => {
                        taken += 1;
                        self.take(at, event, out)?;
                    }
                }
            }
            // The jobs that take the place of an ended one come behind it: this loop gets to them.
            if self.wave.open() < open {
                self.fill()?;
            }
        }
        if let Some(held) = self.held.pop_front() {
            return Poll::Ready(self.deliver(held, out));
        }
        if self.wave.is_done() {
            out.push(ChatEvent::Usage(self.usage()));
            return Poll::Ready(Ok(false));
        }
        if taken == 0 { Poll::Pending } else { Poll::Ready(Ok(true)) }
    }

    fn facts(&self) -> Facts {
        let live = self.jobs.iter().flat_map(|job| &job.choices).filter_map(|choice| choice.decoder.as_ref());
        let mut facts = self.facts;
        // A prompt is computed from its binding on, and what waits in the queue costs nothing. An answer that is dropped
        // in prefill is not polled any more, so prompts bound since the last poll are found at the tickets.
        let is_fresh = |job: &Running| !job.is_counted && job.ticket.as_ref().is_some_and(Ticket::is_bound);
        let fresh = self.jobs.iter().zip(&self.plan.prompts).filter(|(job, _)| is_fresh(job));
        facts.prompt_tokens += fresh.map(|(_, prompt)| prompt.tokens.len() as u64).sum::<u64>();
        for decoder in live {
            facts.completion_tokens += decoder.completion_tokens();
            facts.reasoning_tokens += decoder.reasoning_tokens();
        }
        facts
    }

    fn facts_at_end(&self) -> Facts {
        let mut facts = Events::facts(self);
        let mut arrived = |job: &Running, output: &Output| {
            facts.cached_tokens += cached_tokens(output);
            // What came behind the end of a choice counts no more than in an answer that is read to its end.
            let is_open = |choice: &Choice| choice.decoder.is_some() && !self.plan.prompt_only;
            if job.choices.get(output.choice as usize).is_some_and(is_open) {
                facts.completion_tokens += output.tokens.len() as u64;
            }
        };
        self.held.iter().for_each(|(at, output)| arrived(&self.jobs[*at], output));
        for job in &self.jobs {
            job.early.iter().for_each(|output| arrived(job, output));
            job.ticket.iter().for_each(|ticket| ticket.see_waiting(|output| arrived(job, output)));
        }
        facts
    }

    fn headers(&self) -> &[(HeaderName, HeaderValue)] {
        &self.headers
    }

    fn course(&self) -> Course {
        Course { worker: self.worker.clone(), ..Course::default() }
    }

    fn score(&self, choice: u32) -> Option<f32> {
        if !self.plan.rank {
            return None;
        }
        let job = self.jobs.get((choice / self.plan.choices) as usize)?;
        let choice = job.choices.get((choice % self.plan.choices) as usize)?;
        Some((choice.logprob_sum / f64::from(choice.tokens.max(1))) as f32)
    }
}

impl Drop for PoolEvents {
    fn drop(&mut self) {
        let facts = self.facts_at_end();
        if let Some(span) = &mut self.span {
            span.set("gen_ai.usage.output_tokens", facts.completion_tokens);
            span.set("penstock.cached_tokens", facts.cached_tokens);
            span.set("penstock.resumes", u64::from(facts.resumes));
            span.set("penstock.moves", u64::from(facts.moves));
        }
    }
}

/// Splits an output into outputs of one token each at most; only the last has the end.
fn single(mut output: Output) -> impl Iterator<Item = Output> {
    let tokens = std::mem::take(&mut output.tokens);
    let (first, count) = (output.at, tokens.len());
    let mut whole = Some(output);
    let mut tokens = tokens.into_iter();
    (0..count.max(1)).map_while(move |n| {
        let last = n + 1 >= count;
        let mut one = if last { whole.take()? } else { Output { finish: None, ..whole.clone()? } };
        (one.at, one.tokens) = (first + n as u32, tokens.next().into_iter().collect());
        if let Some(rest) = &mut whole {
            // Said once.
            (rest.cached_tokens, rest.prompt_logprobs) = (None, Vec::new());
        }
        Some(one)
    })
}

pub(super) fn ended(finish: &frames::Finish) -> Result<End, Failure> {
    match frames::FinishReason::try_from(finish.reason) {
        Ok(frames::FinishReason::Stop) => Ok(End::Stop { token: finish.stop_token }),
        Ok(frames::FinishReason::Length) => Ok(End::Length),
        Ok(frames::FinishReason::Failed) => {
            let kind = ErrorKind::from_wire(finish.error_kind);
            Err(Failure::new(kind, client_message(kind, &finish.message)).log(finish.message.as_str()))
        }
        Ok(frames::FinishReason::Cancelled) | Err(_) => {
            Err(Failure::internal("a worker ended a choice that nobody cancelled"))
        }
    }
}

/// Failure of a request that the pool has given up.
pub(super) fn failure(kind: ErrorKind, message: String, retry_after: Option<Duration>) -> Failure {
    let failure = Failure::new(kind, client_message(kind, &message)).log(message);
    match retry_after {
        Some(after) => failure.retry_after(after),
        None => failure,
    }
}

/// Message for the client: the original where the client can act on it; otherwise the detail stays in the log.
fn client_message(kind: ErrorKind, message: &str) -> String {
    match kind {
        ErrorKind::InvalidRequest | ErrorKind::Unsupported | ErrorKind::ContextLength => message.to_owned(),
        ErrorKind::WorkerFailed => "The worker that made this answer failed, and it could not go on elsewhere.".into(),
        ErrorKind::ModelFailed => {
            "The model has no answer to this text: its logits are not finite (NaN or infinity). The same text fails \
             the same way; another may not."
                .into()
        }
        ErrorKind::Unavailable => "No worker is ready to take the request.".into(),
        ErrorKind::Overloaded => "Too many requests are waiting. Try again shortly.".into(),
        ErrorKind::DeadlineExceeded => "The answer took longer than this server allows.".into(),
        ErrorKind::Draining => "The server is shutting down.".into(),
        _ => "The server had an internal error.".into(),
    }
}

/// Id of a tool call, made different for each choice.
fn distinct(mut ids: [u8; 16], choice: u32) -> [u8; 16] {
    for (byte, mixed) in ids.iter_mut().zip(choice.to_le_bytes()) {
        *byte ^= mixed;
    }
    ids
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AnswerRules;
    use penstock_dialects::openai::decode_completion;
    use penstock_pool::{FleetRuntime, PoolConfig};
    use penstock_proto::Address;
    use penstock_proto::frames::{Finish, Token};
    use penstock_text::TextFiles;
    use penstock_types::{Bounds, Request, Surface};
    use std::path::Path;

    /// Events of a completion at a pool that has no worker, with a model whose texts begin with `<s>` and a blank.
    fn completion(keys: &str) -> (PoolEvents, FleetRuntime) {
        let tokenizer = "../text/tests/goldens/tokenizers/sentencepiece-normalizer.json";
        let tokenizer = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(tokenizer)).expect("a tokenizer");
        let files = TextFiles { tokenizer_json: tokenizer.into(), ..TextFiles::default() };
        let model = TextModel::load(&files).expect("a model");
        let request = decode_completion(format!(r#"{{"model":"m",{keys}}}"#).as_bytes(), &Bounds::default());
        let request = Request::Complete(Box::new(request.expect("a request")));
        let plan = Plan::new(&request, &model, 100, Surface::Completions, AnswerRules::default()).expect("a plan");
        let runtime = FleetRuntime::start().expect("a thread");
        let connect = vec![Address::Unix("/nowhere/worker.sock".into())];
        let pool = Pool::start(&runtime, PoolConfig { connect, ..PoolConfig::new("a") }).expect("a pool");
        let source = Source { pool, model: "m".into(), origin: Origin::default() };
        (PoolEvents::start(plan, source, Arc::new(model)).expect("it waits for a worker"), runtime)
    }

    /// Output with log-probabilities for the whole prompt.
    fn told(events: &PoolEvents) -> Output {
        let said = TokenLogprobs { logprob: -1.0, ..TokenLogprobs::default() };
        Output { prompt_logprobs: vec![said; events.plan.prompts[0].tokens.len()], ..Output::default() }
    }

    #[test]
    fn a_prompt_alone_has_no_answer_where_its_worker_failed() {
        for keys in [r#""echo":true"#, r#""echo":true,"logprobs":1"#] {
            let keys = format!(r#""prompt":"Hello","max_tokens":0,{keys}"#);
            let finish = |reason: frames::FinishReason, message: &str| {
                let error_kind = ErrorKind::InvalidRequest as i32;
                Some(Finish { reason: reason as i32, error_kind, message: message.into(), ..Finish::default() })
            };
            let (mut events, _runtime) = completion(&keys);
            let failed = Output { finish: finish(frames::FinishReason::Failed, "no"), ..told(&events) };
            let failure = events.output(0, failed, &mut Vec::new()).expect_err("it failed");
            assert_eq!((failure.status(), &*failure.message), (400, "no"), "{keys}");
            let (mut events, _runtime) = completion(&keys);
            let ended = Output { finish: finish(frames::FinishReason::Length, ""), ..told(&events) };
            let mut out = Vec::new();
            events.output(0, ended, &mut out).expect("it ended");
            let reason = FinishReason::Length;
            assert_eq!(out.last(), Some(&ChatEvent::Finish { choice: 0, reason, stop: None }), "{keys}");
        }
    }

    #[test]
    fn tokens_of_a_repeated_prompt_stand_in_its_text() {
        for (prompt, text, first) in [
            (r#""Hello""#, "Hello", TokenPlace::Control),
            (r#"" of the é漢""#, " of the é漢", TokenPlace::Control),
            (r#""<s>of""#, "<s>of", TokenPlace::Control),
            ("[1,300,301]", "", TokenPlace::Text),
            ("[300,301]", "", TokenPlace::Text),
        ] {
            let (mut events, _runtime) =
                completion(&format!(r#""prompt":{prompt},"max_tokens":1,"echo":true,"logprobs":0"#));
            let (output, mut out) = (told(&events), Vec::new());
            events.output(0, output, &mut out).expect("the prompt is told");
            let Some(ChatEvent::Prompt { text: said, logprobs, tokens, .. }) = out.first() else {
                panic!("no prompt: {out:?}")
            };
            assert!(text.is_empty() || said == text, "{said:?}");
            assert_eq!((logprobs.len(), logprobs[0].place), (tokens.len(), first), "{said:?}");
            let mut rest = said.as_bytes();
            for entry in logprobs.iter().filter(|entry| entry.place == TokenPlace::Text) {
                rest = rest.strip_prefix(entry.bytes.as_slice()).expect("the token's text stands at its offset");
            }
            assert!(rest.is_empty(), "{said:?}");
        }
    }

    #[test]
    fn an_output_is_told_token_by_token() {
        let finish = Some(Finish { reason: frames::FinishReason::Length as i32, ..Finish::default() });
        let token = |id| Token { id, logprobs: None };
        let output = Output {
            at: 7,
            tokens: vec![token(1), token(2), token(3)],
            cached_tokens: Some(32),
            finish: finish.clone(),
            ..Output::default()
        };
        let said: Vec<Output> = single(output).collect();
        let places: Vec<_> = said.iter().map(|one| (one.at, one.tokens[0].id, one.tokens.len())).collect();
        assert_eq!(places, [(7, 1, 1), (8, 2, 1), (9, 3, 1)]);
        assert_eq!(said.iter().filter_map(|one| one.cached_tokens).collect::<Vec<_>>(), [32], "once, with the first");
        assert!(said[0].cached_tokens.is_some() && said[..2].iter().all(|one| one.finish.is_none()));
        assert_eq!(said[2].finish, finish);
        let end = Output { finish, ..Output::default() };
        assert_eq!(single(end.clone()).collect::<Vec<_>>(), [end], "an end without a token");
    }
}
