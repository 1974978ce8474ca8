//! Plugins of one request that want something of its answer, or of its end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_plugins::{
    Answer, EndFacts, Hooks, Limited, Outcome, PluginError, Rejection, RejectionKind, RequestInfo, Sees,
};
use penstock_proto::ErrorKind;
use penstock_types::{AnswerMeta, Decoded, FaultClass, Surface};

use super::convert::{Converter, usage_of};
use super::flow::{Around, Replay};
use penstock_base::error::{Failure, LimitRefusal, UpstreamAnswer};
use penstock_config::{OnFail, PluginConfig};
use penstock_telemetry::{Metric, Metrics};
use penstock_types::ask::Variant;
use penstock_upstream::answer_memory::Hold;
use penstock_upstream::call::Call;
use penstock_upstream::{Events, Facts};

/// One plugin in the course of an answer: its hooks, its converter and its outcome.
pub(super) struct Stage {
    pub(super) entry: Arc<PluginConfig>,
    pub(super) hooks: Box<dyn Hooks>,
    /// Interest of the plugin in the answer, never none: such a plugin has no stage.
    pub(super) sees: Sees,
    /// Converter in front of the plugin, to the form that it wants.
    pub(super) converter: Converter,
    /// True where the plugin failed and the answer goes on without it.
    pub(super) left_out: bool,
    /// Time spent in `on_event` of the plugin over the whole answer.
    pub(super) spent: Duration,
    /// Choices that have finished behind the plugin, by index.
    pub(super) finished: Vec<u32>,
    pub(super) outcome: &'static str,
}

impl Stage {
    pub(super) fn new(entry: Arc<PluginConfig>, hooks: Box<dyn Hooks>, sees: Sees) -> Self {
        Self {
            entry,
            hooks,
            sees,
            converter: Converter::Open,
            left_out: false,
            spent: Duration::ZERO,
            finished: Vec::new(),
            outcome: "go",
        }
    }
}

/// Kind of a plugin's failure in a hook: an error, a panic, or too much time.
pub(super) enum Broke {
    Error(PluginError),
    Panic(String),
    Timeout,
}

impl Broke {
    /// Reason in one word, and detail for the log.
    pub(super) fn told(self, entry: &PluginConfig) -> (&'static str, String) {
        match self {
            Broke::Error(error) => ("error", error.text),
            Broke::Panic(panic) => ("panic", panic),
            Broke::Timeout => ("timeout", format!("no end within {} ms", entry.timeout.as_millis())),
        }
    }

    /// Returns true if a limit refuses what the plugin asked of a model: the plugin has not failed.
    pub(super) fn is_refusal(&self) -> bool {
        matches!(self, Broke::Error(error) if error.limited.is_some())
    }

    /// Counts and logs the failure; an error where the request must not go on without the plugin. A limit's refusal of what
    /// the plugin asked of a model is the request's: no judge has seen it.
    pub(super) fn handled(
        mut self,
        entry: &PluginConfig,
        hook: &'static str,
        metrics: &Metrics,
    ) -> Result<(), Failure> {
        if let Broke::Error(error) = &mut self
            && let Some(limited) = error.limited.take()
        {
            return Err(limited_by(*limited, &entry.id, hook));
        }
        let (reason, detail) = self.told(entry);
        metrics.count(Metric::PluginFailures, &[("plugin", &*entry.id), ("hook", hook), ("reason", reason)]);
        let id = &*entry.id;
        tracing::warn!(plugin = id, hook, reason, detail, on_fail = entry.on_fail.name(), "a plugin failed");
        match entry.on_fail {
            OnFail::Open => Ok(()),
            OnFail::Closed => Err(closed(id).log(format!("{reason} in {hook}: {detail}"))),
        }
    }
}

/// Shape of an answer, as converters need it: dialect, surface, stream and ids.
pub(super) struct AnswerShape {
    pub(super) decoded: Arc<Decoded>,
    pub(super) surface: Surface,
    pub(super) stream: bool,
    pub(super) meta: AnswerMeta,
    /// True where the answer is stored: its events are needed, bytes are not enough.
    pub(super) kept: bool,
}

impl AnswerShape {
    fn of(call: &Call) -> Option<Self> {
        Some(Self {
            decoded: call.decoded_before()?,
            surface: call.ask.surface,
            stream: call.stream,
            meta: call.meta(),
            kept: call.answer_meta.is_some(),
        })
    }
}

/// Plugins around one answer. Each of them is told of the end exactly once.
pub(crate) struct Shell {
    /// Stages in the order of the answer: the last plugin of the file first.
    pub(super) stages: Vec<Stage>,
    pub(super) info: Arc<RequestInfo>,
    pub(super) metrics: Arc<Metrics>,
    /// Model that a plugin wants asked in place of the client's; `None`: the client's.
    pub(super) model: Option<String>,
    pub(super) began: Instant,
    ended: bool,
}

impl Shell {
    pub(super) fn new(info: Arc<RequestInfo>, metrics: Arc<Metrics>) -> Self {
        Self { stages: Vec::new(), info, metrics, model: None, began: Instant::now(), ended: false }
    }

    /// Returns true if any plugin looks at the events of the answer.
    pub(super) fn reads(&self) -> bool {
        self.stages.iter().any(|stage| stage.sees >= Sees::Events)
    }

    /// The shell, if any plugin has a stage; otherwise `None`.
    pub(super) fn wanted(mut self) -> Option<Self> {
        self.ended = self.stages.is_empty();
        (!self.ended).then_some(self)
    }

    /// Takes the shell and leaves an ended one, whose end no plugin is told.
    pub(crate) fn take(&mut self) -> Self {
        let (info, metrics, model) = (self.info.clone(), self.metrics.clone(), self.model.take());
        let (stages, began, ended) = (std::mem::take(&mut self.stages), self.began, self.ended);
        self.ended = true;
        Self { stages, info, metrics, model, began, ended }
    }

    /// Reports a failure before the answer began.
    pub(crate) fn failed(&mut self, failure: Failure) -> Failure {
        self.end(Outcome::Failed, Facts::default(), None);
        failure
    }

    /// Reports a request that ended without a model's answer: its tokens were counted.
    pub(crate) fn counted(&mut self) {
        self.end(Outcome::Complete, Facts::default(), None);
    }

    pub(super) fn rejected(&mut self, failure: Failure) -> Failure {
        self.end(Outcome::Rejected, Facts::default(), None);
        failure
    }

    /// Tells every plugin the outcome of the answer, once.
    pub(super) fn end(&mut self, outcome: Outcome, facts: Facts, target: Option<Arc<str>>) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let model = self.model.take().unwrap_or_else(|| self.info.model.clone());
        let facts = EndFacts { outcome, model, target, usage: usage_of(facts), duration: self.began.elapsed() };
        for stage in &mut self.stages {
            let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| stage.hooks.on_end(&facts)));
            if told.is_err() {
                // Nothing is left that could go wrong for the request.
                let labels = [("plugin", &*stage.entry.id), ("hook", "end"), ("reason", "panic")];
                self.metrics.count(Metric::PluginFailures, &labels);
            }
            if stage.spent > Duration::ZERO {
                let labels = [("plugin", &*stage.entry.id), ("hook", "event")];
                self.metrics.observe(Metric::PluginSeconds, &labels, stage.spent.as_secs_f64());
                self.metrics.count(Metric::PluginCalls, &[labels[0], labels[1], ("outcome", stage.outcome)]);
            }
        }
    }

    /// Puts the plugins around an upstream's events; `hold` is charged for what they hold of the answer.
    pub(crate) fn around(self, call: &Call, events: Box<dyn Events>, hold: Hold) -> Result<Box<dyn Events>, Failure> {
        self.wrap(call, events, hold, Outcome::Complete)
    }

    /// Puts the plugins that run before the answering one around its answer.
    pub(crate) fn around_answer(
        shell: Option<Self>,
        call: &Call,
        answer: Answer,
        hold: Hold,
    ) -> Result<Box<dyn Events>, Failure> {
        let events = Box::new(Replay::new(answer));
        match shell {
            Some(shell) => shell.wrap(call, events, hold, Outcome::Answered),
            None => Ok(events),
        }
    }

    fn wrap(
        mut self,
        call: &Call,
        events: Box<dyn Events>,
        hold: Hold,
        outcome: Outcome,
    ) -> Result<Box<dyn Events>, Failure> {
        let shape = self.reads().then(|| AnswerShape::of(call));
        if matches!(shape, Some(None)) {
            return Err(self.failed(Failure::internal("events for a request nobody read")));
        }
        let array = call.ask.variant == Variant::Array;
        if array && self.stages.iter().any(|stage| stage.sees == Sees::Bytes) {
            let message = "A plugin looks at this answer, which it cannot as a JSON array: ask with alt=sse.";
            return Err(self.failed(Failure::new(ErrorKind::Unsupported, message)));
        }
        Ok(Box::new(Around::new(self, shape.flatten().map(Arc::new), events, hold, outcome)))
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        self.end(Outcome::Gone, Facts::default(), None);
    }
}

/// Failure for the client where a plugin failed that the request may not go without.
pub(super) fn closed(id: &str) -> Failure {
    let message = format!("The plugin {id:?} failed, and this request is not served without the plugin.");
    Failure::new(ErrorKind::Internal, message)
}

/// Failure for the client where a limit refuses what a plugin asked of a model in that hook. An answer that was made before
/// is not asked for again by itself, since each repetition may be billed.
fn limited_by(limited: Limited, id: &str, hook: &'static str) -> Failure {
    let Limited { rule, message, kind, shape, retry, retry_after, fields } = limited;
    let log = format!("limit {rule} refused what the plugin {id:?} asked of a model in {hook}");
    let refusal = Some(Box::new(LimitRefusal { rule, retry: retry && hook == "request", fields }));
    Failure { shape: Some(Box::new(shape)), retry_after, refusal, ..of_kind(kind, message) }.log(log)
}

fn of_kind(kind: RejectionKind, message: String) -> Failure {
    match kind {
        RejectionKind::Content => Failure::content(message),
        RejectionKind::Invalid => Failure::new(ErrorKind::InvalidRequest, message),
        RejectionKind::Forbidden => Failure::new(ErrorKind::Forbidden, message),
        RejectionKind::RateLimited => Failure::new(ErrorKind::RateLimited, message),
        RejectionKind::Unavailable => Failure::new(ErrorKind::Unavailable, message),
        RejectionKind::Internal => Failure::new(ErrorKind::Internal, message),
    }
}

/// Failure for the client, made of a plugin's refusal.
pub(super) fn refused(rejection: Rejection) -> Failure {
    let Rejection { kind, status, message, body, headers, log } = rejection;
    let mut failure = of_kind(kind, message);
    if let Some(log) = log {
        failure = failure.log(log);
    }
    if let Some(status) = status {
        failure = failure.with_status(status);
    }
    if body.is_some() || !headers.is_empty() {
        let answer = UpstreamAnswer { body, headers, plugin: true, ..UpstreamAnswer::new(FaultClass::Invalid) };
        failure.upstream = Some(Box::new(answer));
    }
    failure
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http::{HeaderName, HeaderValue};
    use penstock_plugins::HostError;
    use penstock_types::error_shape::RATE_LIMIT_TOKENS;

    use super::super::tests::entry_of;
    use super::*;

    /// Plugin that does nothing.
    struct Idle;

    impl penstock_plugins::Plugin for Idle {
        fn begin(&self) -> Box<dyn Hooks> {
            Box::new(Self)
        }
    }

    impl Hooks for Idle {}

    /// A judge that may not be asked has judged nothing: neither is the plugin broken, nor does the request go on unjudged.
    #[test]
    fn a_limit_that_refuses_what_a_plugin_asks_refuses_the_request() {
        let field = (HeaderName::from_static("retry-after-ms"), HeaderValue::from_static("7000"));
        for (hook, retry) in [("request", true), ("event", false)] {
            for on_fail in [OnFail::Open, OnFail::Closed] {
                let limited = Limited {
                    rule: "l: tokens_per_minute".into(),
                    message: "The limit is reached.".into(),
                    kind: RejectionKind::RateLimited,
                    shape: RATE_LIMIT_TOKENS,
                    retry: true,
                    retry_after: Some(Duration::from_secs(7)),
                    fields: vec![field.clone()],
                };
                let broke = Broke::Error(HostError::Limited(Box::new(limited)).into());
                assert!(broke.is_refusal());
                let (metrics, entry) = (Metrics::default(), entry_of("judge", Arc::new(Idle), on_fail));
                let failure = broke.handled(&entry, hook, &metrics).expect_err("refused");
                assert_eq!((failure.shape(), &*failure.message), (RATE_LIMIT_TOKENS, "The limit is reached."));
                assert_eq!((failure.should_retry(), failure.retry_after_seconds()), (retry, Some(7)), "{hook}");
                let refusal = failure.refusal.expect("a limit's");
                assert_eq!(
                    (refusal.rule.as_str(), refusal.fields.as_slice()),
                    ("l: tokens_per_minute", &[field.clone()][..])
                );
                assert!(!metrics.render(&[]).contains("penstock_plugin_failures_total{"), "the plugin has not failed");
            }
        }
    }
}
