//! Facts gathered along one request, for its line in the access log.
//!
//! The fields are those of the gateway's own requests, as far as the proxy's messages tell them. The field `end` has two
//! values that the gateway's own requests do not have: a proxy that closes a stream in the middle of an answer does not say who broke it off (`cut`), and
//! one that sends no bodies of answers does not show their end (`unseen`).

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use penstock_base::clock;
use penstock_base::error::Failure;
use penstock_proto::ErrorKind;
use penstock_telemetry::access_log::{millis, told, tpot};
use penstock_telemetry::{Attempt, Record};
use penstock_types::FinishReason;

use crate::answer::Read;

/// Facts about one request, from its head on.
pub(crate) struct Trail {
    began: Instant,
    pub(crate) request_id: String,
    /// Bounded name of the route, or `-`.
    pub(crate) route: &'static str,
    pub(crate) client: Option<IpAddr>,
    /// Name of the model's entry; `None`: none was found.
    pub(crate) model: Option<Box<str>>,
    pub(crate) stream: Option<bool>,
    /// Reason of the choice or of the refusal; `None`: neither was made.
    pub(crate) reason: Option<&'static str>,
    /// Endpoints that the proxy was told; empty: none was chosen.
    pub(crate) endpoints: Vec<SocketAddr>,
    pub(crate) target: Option<Arc<str>>,
    pub(crate) attempts: Vec<Attempt>,
    /// Status of the answer; 0: the proxy has shown none.
    pub(crate) status: u16,
    pub(crate) read: Read,
    pub(crate) cost_usd: Option<f64>,
    /// True if a part of the answer was shown.
    pub(crate) is_answering: bool,
    /// Time at which the end of the answer was shown.
    pub(crate) ended: Option<Instant>,
    /// True if the proxy has ended the stream.
    pub(crate) has_left: bool,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    failure: Option<(ErrorKind, Option<Box<str>>)>,
}

impl Trail {
    /// Begins the record of a request whose head has come.
    pub(crate) fn new(request_id: String, route: &'static str, client: Option<IpAddr>) -> Self {
        Self {
            began: Instant::now(),
            request_id,
            route,
            client,
            model: None,
            stream: None,
            reason: None,
            endpoints: Vec::new(),
            target: None,
            attempts: Vec::new(),
            status: 0,
            read: Read::default(),
            cost_usd: None,
            is_answering: false,
            ended: None,
            has_left: false,
            first_token: None,
            last_token: None,
            failure: None,
        }
    }

    /// Notes a part of the answer with tokens in it.
    pub(crate) fn tokens(&mut self, now: Instant) {
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
    }

    /// Notes a failure; the first one stays.
    pub(crate) fn failed(&mut self, failure: &Failure) {
        self.failure.get_or_insert_with(|| (failure.kind, failure.log.clone()));
    }

    /// Returns true if nothing that comes can change how the request ended.
    pub(crate) fn is_decided(&self) -> bool {
        self.failure.is_some() || self.ended.is_some()
    }

    /// Outcome of the request. `is_shown`: the proxy sends bodies of answers.
    fn end(&self, is_shown: bool) -> &'static str {
        let is_complete = self.ended.is_some() || self.read.is_complete;
        match () {
            () if self.failure.is_some() => "failed",
            () if is_complete => "complete",
            () if !is_shown && !self.endpoints.is_empty() => "unseen",
            // An endpoint that fails before its answer begins shows as an answer of the proxy's own.
            () if self.has_left && !self.is_answering => "client_gone",
            () => "cut",
        }
    }

    /// Takes the record out. `is_shown`: the proxy sends bodies of answers.
    pub(crate) fn record(&mut self, is_shown: bool) -> Record<'_> {
        let end = self.end(is_shown);
        let since = |at: Instant| at.saturating_duration_since(self.began).as_secs_f64();
        let facts = self.read.facts;
        let tokens = facts.map_or(0, |facts| facts.completion_tokens);
        let between = self.first_token.zip(self.last_token).map(|(first, last)| last.saturating_duration_since(first));
        let (ttft_ms, duration_ms) =
            (self.first_token.map(|at| millis(since(at))), millis(since(self.ended.unwrap_or_else(Instant::now))));
        let (error, detail) = self.failure.take().map_or((None, None), |(kind, detail)| (Some(kind), detail));
        Record {
            time_ms: clock::since_epoch().as_millis() as u64,
            request_id: &self.request_id,
            client: self.client.map(|address| address.to_string()),
            protocol: "ext_proc",
            route: self.route,
            model: self.model.take().map(String::from),
            stream: self.stream,
            status: self.status,
            attempts: told(std::mem::take(&mut self.attempts), error.is_some()),
            error: error.map(|kind| format!("{kind:?}")),
            detail: detail.map(String::from),
            finish: self.read.finish.map(FinishReason::name).into_iter().collect(),
            ttft_ms,
            tpot_ms: tpot(between, tokens).map(millis),
            prompt_tokens: facts.map(|facts| facts.prompt_tokens),
            cached_tokens: facts.map(|facts| facts.cached_tokens),
            completion_tokens: facts.map(|facts| facts.completion_tokens),
            cost_usd: self.cost_usd,
            target: self.target.take(),
            reason: self.reason,
            endpoints: std::mem::take(&mut self.endpoints),
            end,
            client_gone: end == "client_gone",
            duration_ms,
            ..Record::default()
        }
    }
}
