//! Operations that are forwarded to a provider without being decoded.

use bytes::Bytes;
use http::{Method, header};
use penstock_proto::ErrorKind;
use penstock_types::{Dialect, FaultClass, peek};

use super::ask::Asked;
use super::keys::Use;
use super::passed::Passed;
use super::upstream::{ProviderUpstream, percent, refused};
use super::{Protocol, fields};
use penstock_base::error::Failure;
use penstock_http::client::{Deadlines, Sent};
use penstock_telemetry::OpenSpan;
use penstock_upstream::Waited;
use penstock_upstream::forward::{Forward, Forwarded, handshake};

impl ProviderUpstream {
    /// Forwards an operation. An operation without a body is a WebSocket handshake.
    pub(super) async fn pass_on(&self, forward: &Forward) -> Result<Forwarded, Failure> {
        let provider = &self.provider;
        let config = &provider.config;
        if !matches!(config.protocol, Protocol::OpenAi | Protocol::OpenAiResponses | Protocol::Azure) {
            let message = format!("A provider that speaks {:?} has no such operation.", config.protocol.name());
            return Err(Failure::new(ErrorKind::Unsupported, message).param("model"));
        }
        let place = provider.places.clone().try_acquire_owned().map_err(|_| provider.crowded())?;
        let mut headers = fields::upwards(Dialect::OpenAi, &forward.headers);
        let deadlines = Deadlines {
            connect: config.connect_timeout,
            head: config.answer_timeout,
            silence: config.idle_timeout,
            whole: forward.deadline.map(tokio::time::Instant::from_std),
        };
        let wait_by = std::time::Instant::now() + config.pacing.wait;
        let wait_by = forward.deadline.map_or(wait_by, |deadline| deadline.min(wait_by));
        let mut asked = match &forward.body {
            Some(body) => {
                let kind = forward.headers.get(header::CONTENT_TYPE).cloned();
                headers.extend(kind.map(|kind| (header::CONTENT_TYPE, kind)));
                let body = self.renamed(body, forward);
                let path = self.path(&forward.path);
                Asked {
                    asker: forward.asker,
                    uses: Use::new(&self.model, &path),
                    // The tokens of an undecoded operation are unknown.
                    tokens: 0,
                    is_extra: false,
                    wait_by,
                    method: Method::POST,
                    path,
                    headers,
                    body,
                    same_dialect: true,
                    deadlines,
                    sent: Sent::default(),
                    waited: Waited::default(),
                }
            }
            None => {
                headers.extend(handshake(&forward.headers));
                let path = format!("{}?model={}", forward.path, percent(&self.model));
                Asked {
                    asker: forward.asker,
                    uses: Use::new(&self.model, &path),
                    // The tokens of an undecoded operation are unknown.
                    tokens: 0,
                    is_extra: false,
                    wait_by,
                    method: Method::GET,
                    path,
                    headers,
                    body: Vec::new(),
                    same_dialect: true,
                    deadlines,
                    sent: Sent::default(),
                    waited: Waited::default(),
                }
            }
        };
        let mut span = forward.trace.as_ref().map(|trace| self.span(trace, "forward"));
        asked.headers.extend(span.iter().flat_map(OpenSpan::fields));
        let (response, paced) = self
            .answered(&asked)
            .await
            .inspect_err(|failure| span.iter_mut().for_each(|span| refused(span, failure)))?;
        if forward.body.is_some() == response.upgraded.is_some() {
            let message = "The upstream answered with another protocol than it was asked in.";
            let fault = penstock_types::ProviderFault::new(FaultClass::Garbled, message);
            return Err(Passed::new(provider.clone(), place, span).paced(paced).failed(fault));
        }
        let fields = fields::back(&response.headers);
        Ok(Forwarded { response, fields, passage: Box::new(Passed::new(provider.clone(), place, span).paced(paced)) })
    }

    /// Body with the model's name replaced by the provider's.
    fn renamed(&self, body: &Bytes, forward: &Forward) -> Vec<Bytes> {
        let Some((at, json)) = &forward.model_at else { return vec![body.clone()] };
        if *json && body[at.clone()] == *format!("\"{}\"", self.model).as_bytes() {
            return vec![body.clone()];
        }
        if *json {
            return peek::renamed(body, at, &self.model);
        }
        vec![body.slice(..at.start), Bytes::from(self.model.clone()), body.slice(at.end..)]
    }
}
