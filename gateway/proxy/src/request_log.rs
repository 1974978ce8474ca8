//! Record of one request: one log line and its metrics, written at one place however the request ends.

use std::net::IpAddr;
use std::sync::Arc;

use http::Method;
use penstock_types::{ChatEvent, FinishReason, ServiceTier};
use tokio::time::Instant;

use crate::gateway::Gateway;
use crate::live_requests::Entry;
use penstock_base::clock;
use penstock_base::error::Failure;
use penstock_govern::prices::Price;
use penstock_http::Exchange;
use penstock_relay::cost::cost;
use penstock_telemetry::access_log::{millis, told, tpot};
use penstock_telemetry::trace::{Attributes, Value};
use penstock_telemetry::{Metric, Record, Trace};
use penstock_upstream::{Course, Facts};

/// What the transport knows of a request when it has ended.
pub(crate) struct Carried<'a> {
    /// Id of the request in headers and logs.
    pub(crate) request_id: &'a str,
    /// Address of the client; `None`: a Unix socket.
    pub(crate) client: Option<IpAddr>,
    /// Protocol for the log: `h1`, `h2`, or `console`.
    pub(crate) protocol: &'static str,
    /// Method of the request.
    pub(crate) method: &'a Method,
    /// Status of the answer; 0: nothing went out.
    pub(crate) status: u16,
}

impl<'a> Carried<'a> {
    /// The request of an exchange.
    pub(crate) fn by(exchange: &'a Exchange) -> Self {
        Self {
            request_id: &exchange.request_id,
            client: exchange.client(),
            protocol: exchange.protocol,
            method: &exchange.head.method,
            status: exchange.status(),
        }
    }
}

/// Facts gathered along the path of one request, for its log line, metrics and trace.
pub struct Trail {
    started: Instant,
    /// Bounded name of the route, or `-` before it is known.
    pub route: &'static str,
    /// Id of the API key; `None`: none was given.
    pub key: Option<String>,
    /// Model asked for, once it is known to exist (labels stay bounded).
    pub model: Option<String>,
    /// Name of the operation in OpenTelemetry's terms, for the trace and metrics.
    pub operation: Option<&'static str>,
    /// Whether the answer is streamed; `None` before the body is read.
    pub stream: Option<bool>,
    /// Number of answers that the request asks for, choices times prompts.
    pub choices: u64,
    /// Tags that plugins put into the log.
    pub tags: Vec<(String, String)>,
    /// Names of request fields that were ignored.
    pub ignored: Vec<String>,
    /// Trace of the request, sampled or not; `None`: no collector is configured.
    pub trace: Option<Arc<Trace>>,
    /// Token counts of the answer; `None`: no model was asked.
    pub facts: Option<Facts>,
    /// Attempts, target, price and reserved amounts of the answer.
    pub course: Course,
    /// Registration among the requests in flight; `None`: not registered.
    pub live: Option<Entry>,
    /// Prices, where they do not depend on the target that answered.
    pub price: Option<Price>,
    /// Service tier that the request asks for.
    pub tier: ServiceTier,
    /// Finish reasons of the choices, in the order in which they finished.
    finish: Vec<&'static str>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    /// Number of batches of events with content.
    batches: u64,
    failure: Option<(String, Option<String>)>,
    /// Id of the limit that refused the request, with its measure.
    limit: Option<String>,
    client_gone: bool,
}

impl Trail {
    /// Begins the record of a request that began at `started`.
    pub fn new(started: Instant) -> Self {
        Self {
            started,
            route: "-",
            key: None,
            model: None,
            operation: None,
            stream: None,
            choices: 1,
            tags: Vec::new(),
            ignored: Vec::new(),
            trace: None,
            facts: None,
            course: Course::default(),
            live: None,
            price: None,
            tier: ServiceTier::Standard,
            finish: Vec::new(),
            first_token: None,
            last_token: None,
            batches: 0,
            failure: None,
            limit: None,
            client_gone: false,
        }
    }

    /// Notes a batch of events: first and last token, finish reasons.
    pub fn events(&mut self, events: &[ChatEvent]) {
        let (now, mut has_content) = (Instant::now(), false);
        for event in events {
            match event {
                ChatEvent::Finish { reason, .. } => self.finish.push(reason.name()),
                ChatEvent::Usage(_) | ChatEvent::Prompt { .. } | ChatEvent::Vector { .. } | ChatEvent::Score { .. } => {
                    continue;
                }
                _ => {}
            }
            has_content = true;
        }
        if has_content {
            self.first_token.get_or_insert(now);
            self.last_token = Some(now);
            self.batches += 1;
        }
    }

    /// TTFT and TPOT in seconds, as far as the events tell them: an answer that comes as a whole has no time of a first token,
    /// and no time between tokens. Tokens of several choices are generated at the same time.
    fn token_times(&self) -> (Option<f64>, Option<f64>) {
        let is_told = self.stream == Some(true) || self.batches > 1;
        let first = self.first_token.filter(|_| is_told);
        let between =
            self.first_token.zip(self.last_token).filter(|_| self.batches > 1).map(|(first, last)| last - first);
        let tokens = self.facts.map_or(0, |facts| facts.completion_tokens);
        (first.map(|first| (first - self.started).as_secs_f64()), tpot(between, tokens.div_ceil(self.choices.max(1))))
    }

    /// Number of choices of the answer that have finished so far.
    pub fn finished(&self) -> usize {
        self.finish.len()
    }

    /// Notes a failure: its kind, its detail and the limit behind it.
    pub fn failed(&mut self, failure: &Failure) {
        self.limit = failure.refusal.as_ref().map(|refusal| refusal.rule.clone());
        self.failure = Some((format!("{:?}", failure.kind), failure.log.as_deref().map(str::to_owned)));
    }

    /// Notes that the client left before the end.
    pub fn gone(&mut self) {
        self.client_gone = true;
    }

    /// Writes the access log line, the metrics and the trace of the request.
    pub(crate) fn end(mut self, gateway: &Gateway, carried: &Carried<'_>) {
        let seconds = self.started.elapsed().as_secs_f64();
        let (ttft, tpot) = self.token_times();
        self.measure(gateway, carried.status, seconds, ttft, tpot);
        if self.finish.is_empty() {
            self.finish.extend(self.course.finish.map(FinishReason::name));
        }
        let cost_usd = self.cost_usd();
        if let Some(trace) = self.trace.take() {
            self.traced(gateway, carried, &trace, cost_usd, ttft);
        }
        let end = match (&self.failure, self.client_gone) {
            (_, true) => "client_gone",
            (Some(_), false) => "failed",
            (None, false) => "complete",
        };
        let account = self.course.account;
        let usd = |nano: u64| Some(nano as f64 / 1e9).filter(|usd| *usd > 0.0);
        let (error, detail) = self.failure.map_or((None, None), |(kind, detail)| (Some(kind), detail));
        gateway.access_log.write(&Record {
            time_ms: clock::since_epoch().as_millis() as u64,
            request_id: carried.request_id,
            client: carried.client.map(|address| address.to_string()),
            protocol: carried.protocol,
            route: self.route,
            key: self.key,
            model: self.model,
            stream: self.stream,
            status: carried.status,
            attempts: told(self.course.attempts, error.is_some()),
            error,
            detail,
            finish: self.finish,
            ttft_ms: ttft.map(millis),
            tpot_ms: tpot.map(millis),
            prompt_tokens: self.facts.map(|facts| facts.prompt_tokens),
            cached_tokens: self.facts.map(|facts| facts.cached_tokens),
            completion_tokens: self.facts.map(|facts| facts.completion_tokens),
            cost_usd,
            reserved_tokens: account.map(|account| account.reserved_tokens).filter(|tokens| *tokens > 0),
            charged_tokens: account.map(|account| account.tokens).filter(|tokens| *tokens > 0),
            reserved_usd: account.and_then(|account| usd(account.reserved_nano_usd)),
            charged_usd: account.and_then(|account| usd(account.nano_usd)),
            estimated: account.is_some_and(|account| account.estimated),
            limit: self.limit,
            target: self.course.target,
            worker: self.course.worker,
            reason: None,
            endpoints: Vec::new(),
            end,
            hedged: self.course.hedged,
            resumes: self.facts.map_or(0, |facts| facts.resumes),
            inexact: self.facts.is_some_and(|facts| facts.inexact),
            moves: self.facts.map_or(0, |facts| facts.moves),
            gap_ms: self.facts.filter(|facts| facts.gap_us > 0).map(|facts| facts.gap_us as f64 / 1e3),
            client_gone: self.client_gone,
            tags: self.tags,
            ignored: self.ignored,
            duration_ms: millis(seconds),
        });
    }

    /// Cost in dollars, where the prices of the target that answered are known.
    fn cost_usd(&self) -> Option<f64> {
        let facts = self.facts?;
        cost(facts, self.course.price.or(self.price)?, self.tier)
    }

    /// Ends the trace. Text that a client or a provider wrote is not in it.
    fn traced(
        &self,
        gateway: &Gateway,
        carried: &Carried<'_>,
        trace: &Trace,
        cost_usd: Option<f64>,
        ttft: Option<f64>,
    ) {
        let name = match (self.operation, self.model.as_deref()) {
            (Some(operation), Some(model)) => format!("{operation} {model}"),
            _ => format!("{} {}", carried.method, self.route),
        };
        let mut out: Attributes = vec![
            ("http.request.method", carried.method.to_string().into()),
            ("http.route", self.route.into()),
            ("http.response.status_code", u64::from(carried.status).into()),
            ("penstock.request_id", carried.request_id.to_owned().into()),
        ];
        let texts = [
            ("gen_ai.operation.name", self.operation.map(str::to_owned)),
            ("gen_ai.request.model", self.model.clone()),
            ("penstock.key", self.key.clone()),
            ("penstock.target", self.course.target.as_deref().map(str::to_owned)),
            ("error.type", self.failure.as_ref().map(|(kind, _)| kind.clone())),
        ];
        out.extend(texts.into_iter().filter_map(|(name, text)| Some((name, text?.into()))));
        if let Some(facts) = self.facts {
            out.push(("gen_ai.usage.input_tokens", facts.prompt_tokens.into()));
            out.push(("gen_ai.usage.output_tokens", facts.completion_tokens.into()));
            out.push(("penstock.cached_tokens", facts.cached_tokens.into()));
            out.push(("gen_ai.response.finish_reasons", Value::Texts(self.finish.clone())));
        }
        let numbers = [("penstock.cost_usd", cost_usd), ("penstock.first_token_ms", ttft.map(millis))];
        out.extend(numbers.into_iter().filter_map(|(name, number)| Some((name, number?.into()))));
        out.extend(self.client_gone.then_some(("penstock.client_gone", Value::Bool(true))));
        let error =
            self.failure.as_ref().filter(|_| carried.status >= 500 || carried.status == 0 || self.operation.is_some());
        gateway.tracer.end(trace, name, out, error.map(|(kind, _)| kind.clone()));
    }

    fn measure(&self, gateway: &Gateway, status: u16, seconds: f64, ttft: Option<f64>, tpot: Option<f64>) {
        let metrics = &gateway.metrics;
        metrics.count(Metric::Requests, &[("route", self.route), ("status", &status.to_string())]);
        if self.client_gone {
            metrics.count(Metric::ClientsGone, &[("route", self.route)]);
        }
        let Some(model) = self.model.as_deref() else { return };
        let operation = self.operation.unwrap_or("forward");
        let labels = [("gen_ai_operation_name", operation), ("gen_ai_request_model", model)];
        let error = self.failure.as_ref().map(|(kind, _)| ("error_type", kind.as_str()));
        let with_error: Vec<_> = labels.into_iter().chain(error).collect();
        metrics.observe(Metric::RequestDuration, &with_error, seconds);
        ttft.into_iter().for_each(|value| metrics.observe(Metric::TimeToFirstToken, &labels, value));
        tpot.into_iter().for_each(|value| metrics.observe(Metric::TimePerOutputToken, &labels, value));
        if let Some(facts) = self.facts {
            if facts.gap_us > 0 {
                let why = if facts.resumes > 0 { "lost" } else { "moved" };
                metrics.observe(Metric::WorkerGap, &[labels[1], ("why", why)], facts.gap_us as f64 / 1e6);
            }
            for (kind, count) in [("input", facts.prompt_tokens), ("output", facts.completion_tokens)] {
                let labels = [labels[0], labels[1], ("gen_ai_token_type", kind)];
                metrics.observe(Metric::TokenUsage, &labels, count as f64);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn text() -> ChatEvent {
        ChatEvent::Text { choice: 0, text: "a".into(), logprobs: Vec::new(), tokens: Vec::new() }
    }

    /// TTFT and TPOT of an answer of nine tokens whose batches come a second apart, the first after a second.
    fn times(stream: bool, choices: u64, batches: Vec<Vec<ChatEvent>>) -> (Option<f64>, Option<f64>) {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
        runtime.block_on(async {
            let mut trail = Trail::new(Instant::now());
            trail.facts = Some(Facts { completion_tokens: 9, ..Facts::default() });
            (trail.stream, trail.choices) = (Some(stream), choices);
            for batch in batches {
                tokio::time::advance(Duration::from_secs(1)).await;
                trail.events(&batch);
            }
            trail.token_times()
        })
    }

    #[test]
    fn an_answer_that_comes_as_a_whole_has_no_time_of_its_first_token() {
        let finish = || ChatEvent::Finish { choice: 0, reason: FinishReason::Stop, stop: None };
        assert_eq!(times(false, 1, vec![vec![ChatEvent::Raw("{}".into())]]), (None, None));
        assert_eq!(times(false, 1, vec![vec![text(), finish()]]), (None, None));
        assert_eq!(times(true, 1, vec![vec![text(), finish()]]), (Some(1.0), None));
        assert_eq!(times(true, 1, vec![vec![text()], vec![finish()]]), (Some(1.0), Some(0.125)));
        // Our own pools tell their tokens as they come, whatever the client has asked for.
        assert_eq!(times(false, 1, vec![vec![text()], vec![text()], vec![finish()]]), (Some(1.0), Some(0.25)));
        assert_eq!(times(true, 3, vec![vec![text()], vec![text()]]), (Some(1.0), Some(0.5)));
    }

    #[test]
    fn vectors_and_scores_are_no_tokens() {
        let vector = || ChatEvent::Vector { index: 0, values: vec![1.0] };
        let score = || ChatEvent::Score { index: 0, score: 1.0 };
        assert_eq!(times(false, 1, vec![vec![vector()], vec![vector()]]), (None, None));
        assert_eq!(times(true, 1, vec![vec![score()], vec![score()]]), (None, None));
    }
}
