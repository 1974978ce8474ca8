//! One model of a provider as an [`Upstream`] of the request path.

use std::future::poll_fn;
use std::sync::Arc;

use async_trait::async_trait;
use http::{Method, header};
use penstock_dialects::{gemini, holds_call_signature, holds_foreign_signature, watch};
use penstock_proto::ErrorKind;
use penstock_types::ask::Variant;
use penstock_types::peek::Splice;
use penstock_types::{AnswerDecoder, FaultClass, ProviderFault, Surface, peek};
use penstock_types::{DetokenizeRequest, TokenizeRequest};
use tokio::time::Instant;

use super::ask::Asked;
use super::keys::Use;
use super::pace::Paced;
use super::passed::{Passed, Room, Stream, Whole};
use super::protocol::openai_path;
use super::translated::Translated;
use super::{Outcome, Protocol, Provider, fields, pace, protocol};
use penstock_base::error::Failure;
use penstock_base::percent_encoded;
use penstock_http::client::{Deadlines, Response};
use penstock_kv_feed::Feed;
use penstock_telemetry::trace::Kind;
use penstock_telemetry::{Gauge, OpenSpan, Trace};
use penstock_upstream::Forward;
use penstock_upstream::Forwarded;
use penstock_upstream::call::{Call, off_io};
use penstock_upstream::{Asker, Card, Events, Origin, Prepared, Sent, Upstream, Waited};

/// Most bytes of the answer to a token count.
const COUNT_BYTES_MAX: usize = 64 * 1024;

/// One model of a provider, under the name that clients use and the name that the provider knows.
pub(super) struct ProviderUpstream {
    pub(super) provider: Arc<Provider>,
    served: String,
    pub(super) model: String,
}

impl ProviderUpstream {
    pub(super) fn new(provider: Arc<Provider>, served: String, model: String) -> Self {
        Self { provider, served, model }
    }

    fn deadlines(&self, call: &Call, origin: &Origin) -> Deadlines {
        let config = &self.provider.config;
        Deadlines {
            connect: config.connect_timeout,
            head: if call.stream { config.first_token_timeout } else { config.answer_timeout },
            silence: config.idle_timeout,
            whole: origin.deadline.map(Instant::from_std),
        }
    }

    /// Returns true if the gateway requests token counts that the client did not ask for.
    fn adds_usage(&self, call: &Call) -> bool {
        let asked = call.peek.stream_options.as_ref().is_some_and(|(_, usage)| *usage);
        call.stream
            && !asked
            && self.provider.config.stream_usage
            && matches!(call.ask.surface, Surface::Chat | Surface::Completions)
    }

    /// Name of the field that bounds the answer, for a bound that the gateway adds.
    fn bound_name(&self, surface: Surface) -> &'static str {
        match surface {
            Surface::Responses => "max_output_tokens",
            Surface::Chat if protocol::is_strict(&self.provider.config) => "max_completion_tokens",
            _ => "max_tokens",
        }
    }

    /// Model resource for a Gemini body that names the model differently from the provider.
    fn renamed_resource(&self, named: &str) -> Option<String> {
        let (collection, name) = match named.strip_prefix("models/") {
            Some(name) => ("models/", name),
            None => ("", named),
        };
        (name != self.model).then(|| format!("{collection}{}", self.model))
    }

    /// Returns true if the body may go to the provider as the client sent it. A body with a signature of reasoning that
    /// another provider made, or this gateway's own models, is translated instead, which leaves the signature out: no
    /// provider accepts it. So is a body for OpenAI with the signature of a call.
    fn passes_on(&self, call: &Call) -> bool {
        let is_foreign = || {
            holds_foreign_signature(call.ask.surface, &call.body)
                || (protocol::is_strict(&self.provider.config) && holds_call_signature(call.ask.surface, &call.body))
        };
        self.provider.config.protocol.speaks(&call.ask) && !call.own && !is_foreign()
    }

    /// Request in the client's bytes, spliced where the model, a bound or the usage option changes.
    fn passed_on(&self, call: &Call, asker: Asker, deadlines: Deadlines) -> Asked {
        let bound = |name: &'static str| call.new_bound().map(|bound| (bound, name));
        let plain_counts = call.is_counted();
        let renamed = (call.peek.model.as_deref() != Some(&self.model)).then_some(self.model.as_str());
        let (path, body) = match call.ask.surface {
            // The path decides about the model; a name in the body must agree with it.
            Surface::Generate => {
                let method = if call.stream { "streamGenerateContent?alt=sse" } else { "generateContent" };
                let model = call.peek.model.as_deref().and_then(|named| self.renamed_resource(named));
                let change = Splice {
                    model: model.as_deref(),
                    max_tokens: bound("maxOutputTokens"),
                    plain_counts,
                    ..Splice::default()
                };
                (gemini::path(&self.model, method), peek::spliced(&call.body, &call.peek, change))
            }
            surface => {
                let change = Splice {
                    model: renamed,
                    include_usage: self.adds_usage(call),
                    max_tokens: bound(self.bound_name(surface)),
                    plain_counts,
                };
                (self.path(openai_path(surface, call.ask.variant)), peek::spliced(&call.body, &call.peek, change))
            }
        };
        Asked {
            asker,
            uses: Use::new(&self.model, &path),
            tokens: tokens_of(call),
            is_extra: false,
            wait_by: std::time::Instant::now() + self.provider.config.pacing.wait,
            method: Method::POST,
            path,
            headers: fields::with(fields::upwards(call.dialect(), &call.headers), &call.send),
            body,
            same_dialect: true,
            deadlines,
            sent: Sent::default(),
            waited: Waited::default(),
        }
    }

    /// Leaves the ids of calls out of a body in the client's bytes for Vertex AI, which refuses them.
    async fn leave_ids_out(&self, call: &Call, asked: &mut Asked) -> Result<(), Failure> {
        if call.ask.surface == Surface::Generate && self.provider.config.protocol == Protocol::Vertex {
            let body = std::mem::take(&mut asked.body);
            asked.body = off_io(call.body.len(), move || gemini::without_call_ids(body)).await?;
        }
        Ok(())
    }

    /// Request translated into the provider's dialect, and the decoder of its answer.
    async fn translated(
        &self,
        call: &Call,
        asker: Asker,
        deadlines: Deadlines,
    ) -> Result<(Asked, Option<Box<dyn AnswerDecoder>>), Failure> {
        let Some(codec) = &self.provider.codec else {
            let message = format!(
                "The model {:?} is served by a provider that speaks {:?} and cannot be asked this way.",
                self.served,
                self.provider.config.protocol.name()
            );
            return Err(Failure::new(ErrorKind::Unsupported, message).param("model"));
        };
        let decoded = call.decoded().await?;
        let request = codec.encode(&decoded.request, &self.model)?;
        let path = self.path(&request.path);
        let asked = Asked {
            asker,
            uses: Use::new(&self.model, &path),
            tokens: tokens_of(call),
            is_extra: false,
            wait_by: std::time::Instant::now() + self.provider.config.pacing.wait,
            method: Method::POST,
            path,
            headers: call.send.clone(),
            body: vec![request.body.into()],
            same_dialect: false,
            deadlines,
            sent: Sent::default(),
            waited: Waited::default(),
        };
        Ok((asked, Some(codec.decoder(&decoded.request))))
    }

    /// Client span of a request to this provider.
    pub(super) fn span(&self, trace: &Arc<Trace>, operation: &'static str) -> OpenSpan {
        let mut span = trace.child(format!("{operation} {}", self.model), Kind::Client);
        span.set("gen_ai.operation.name", operation);
        span.set("gen_ai.provider.name", self.provider.config.protocol.provider_name());
        span.set("gen_ai.request.model", self.model.clone());
        span.set("penstock.provider", self.provider.config.id.clone());
        span.set("server.address", self.provider.client.target().authority.clone());
        span
    }

    /// Sends a request; each request is counted once, also if it is cancelled.
    pub(super) async fn answered(&self, asked: &Asked) -> Result<(Response, Option<Paced>), Failure> {
        let mut waiting = Waiting(Some(&self.provider));
        let response = Box::pin(self.provider.ask(asked)).await;
        waiting.0 = None;
        response
    }

    /// Full path behind the provider's base URL; Azure has the model and API version in it.
    pub(super) fn path(&self, path: &str) -> String {
        let config = &self.provider.config;
        if config.protocol != Protocol::Azure {
            return path.to_owned();
        }
        let version = config.api_version.as_deref().unwrap_or("2024-10-21");
        format!("/openai/deployments/{}{path}?api-version={version}", percent(&self.model))
    }

    /// Begins to pass an answer through, after a check of its content type.
    fn begin(
        &self,
        call: &Call,
        response: Response,
        passed: Passed,
        first_by: Option<Instant>,
        room: Room,
    ) -> Result<Box<dyn Events>, Failure> {
        if !call.stream {
            return Ok(Box::new(Whole::new(call.ask.surface, response, passed, room.hold)));
        }
        let kind = response.headers.get(header::CONTENT_TYPE).map(|kind| kind.as_bytes().to_ascii_lowercase());
        if kind.is_some_and(|kind| !kind.starts_with(b"text/event-stream")) {
            let message = "The upstream answered a request for a stream with something else.";
            return Err(passed.failed(ProviderFault::new(FaultClass::Garbled, message)));
        }
        let watch = watch::Watch::new(call.ask.surface, self.adds_usage(call));
        Ok(Box::new(Stream::new(watch, response, passed, first_by, room)))
    }
}

/// Records in the span why there was no answer.
pub(super) fn refused(span: &mut OpenSpan, failure: &Failure) {
    span.set("error.type", format!("{:?}", failure.kind));
    if let Some(upstream) = &failure.upstream {
        span.set("http.response.status_code", u64::from(upstream.status));
    }
    // The message may repeat a prompt in the provider's words, so only the kind is recorded.
    span.fail(format!("{:?}", failure.kind));
}

#[async_trait]
impl Upstream for ProviderUpstream {
    fn card(&self) -> Card {
        Card { id: self.served.clone(), created: 0, context_tokens: 0, task: None, parent: None }
    }

    fn unready(&self) -> Option<String> {
        None
    }

    async fn open(&self, call: Arc<Call>, origin: Origin) -> Result<Box<dyn Events>, Failure> {
        let started = Instant::now();
        let provider = &self.provider;
        let place = provider.places.clone().try_acquire_owned().map_err(|_| provider.crowded())?;
        let deadlines = self.deadlines(&call, &origin);
        let mut span = origin.trace.as_ref().map(|trace| self.span(trace, call.ask.surface.operation()));
        let (mut asked, decoder) = match self.passes_on(&call) {
            true => (self.passed_on(&call, origin.asker(&call), deadlines), None),
            false => self.translated(&call, origin.asker(&call), deadlines).await?,
        };
        if decoder.is_none() {
            self.leave_ids_out(&call, &mut asked).await?;
        }
        (asked.sent, asked.waited) = (origin.sent.clone(), origin.waited.clone());
        asked.is_extra = origin.is_extra;
        // A wait for the pace is kept short against the time to the first token, which does not run meanwhile.
        let first_by = call.stream.then(|| (started + provider.config.first_token_timeout).into_std());
        let first_by = first_by.into_iter().chain(origin.first_by).min();
        let began = started.into_std();
        asked.wait_by = began + pace::patience(provider.config.pacing.wait, first_by, origin.deadline, began);
        asked.headers.extend(span.iter().flat_map(OpenSpan::fields));
        let (response, paced) = self
            .answered(&asked)
            .await
            .inspect_err(|failure| span.iter_mut().for_each(|span| refused(span, failure)))?;
        let passed = Passed::new(provider.clone(), place, span).paced(paced);
        let first_by = call.stream.then(|| started + provider.config.first_token_timeout + asked.waited.get());
        let images = provider.config.protocol.sends_images();
        let event_bytes_max = if call.stream { origin.memory.event_bytes_max(images) } else { usize::MAX };
        let room = Room { hold: origin.memory.hold(), event_bytes_max };
        match decoder {
            Some(decoder) => Ok(Box::new(Translated::new(decoder, response, passed, first_by, room))),
            None => self.begin(&call, response, passed, first_by, room),
        }
    }

    async fn count(&self, call: Arc<Call>) -> Result<Option<u64>, Failure> {
        let provider = &self.provider;
        // Changes by plugins are not in the client's bytes, so the caller counts such a request itself.
        let counts = matches!(call.ask.surface, Surface::CountTokens | Surface::Responses);
        if !(counts && self.passes_on(&call)) {
            return Ok(None);
        }
        let _place = provider.places.clone().try_acquire_owned().map_err(|_| provider.crowded())?;
        let deadlines = self.deadlines(&call, &Origin::default());
        let (mut response, _paced) =
            self.answered(&self.passed_on(&call, Origin::default().asker(&call), deadlines)).await?;
        let mut bytes = Vec::new();
        while bytes.len() <= COUNT_BYTES_MAX {
            match poll_fn(|context| response.body.poll_chunk(context, &mut bytes)).await {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => return Err(provider.unanswered(&error)),
            }
        }
        provider.counts.add(Outcome::Complete);
        Ok(penstock_dialects::anthropic::watch::input_tokens(&bytes))
    }

    async fn measure(self: Arc<Self>, _: &Call) -> Result<Prepared, Failure> {
        Ok(Prepared::default())
    }

    async fn forward(&self, forward: Arc<Forward>) -> Result<Forwarded, Failure> {
        Box::pin(self.pass_on(&forward)).await
    }

    async fn tokenize(&self, _: TokenizeRequest) -> Result<Vec<u8>, Failure> {
        Err(Failure::new(ErrorKind::Unsupported, "The tokens of this model are the provider's own.").param("model"))
    }

    async fn detokenize(&self, _: DetokenizeRequest) -> Result<Vec<u8>, Failure> {
        Err(Failure::new(ErrorKind::Unsupported, "The tokens of this model are the provider's own.").param("model"))
    }

    fn feed(&self) -> Option<Arc<Feed>> {
        self.provider.feed().cloned()
    }

    fn gauges(&self, _: &mut dyn FnMut(Gauge, f64)) {}
}

/// Guard that counts a request as cancelled if it is dropped before its answer began.
struct Waiting<'a>(Option<&'a Provider>);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some(provider) = self.0 {
            provider.counts.add(Outcome::Cancelled);
        }
    }
}

/// Estimated bytes of a request body per token.
const BYTES_PER_TOKEN: usize = 4;
/// Estimated output tokens of a request without a bound.
const OUTPUT_TOKENS: u64 = 500;

/// Estimated tokens of a request, for pacing; corrected by the usage of the answer.
fn tokens_of(call: &Call) -> u64 {
    let output = match call.ask.surface {
        Surface::CountTokens => return 0,
        _ if call.ask.variant == Variant::Count => return 0,
        Surface::Embeddings | Surface::Embed | Surface::OllamaEmbed | Surface::Rerank | Surface::Score => 0,
        _ => call.peek.max_tokens.map_or(OUTPUT_TOKENS, u64::from),
    };
    (call.body.len() / BYTES_PER_TOKEN) as u64 + output
}

/// Percent-encodes a name as one path segment.
pub(super) fn percent(name: &str) -> String {
    percent_encoded(name, b"")
}

#[cfg(test)]
mod tests {
    use http::HeaderMap;
    use penstock_http::client::Target;
    use penstock_http::{Body, BodyBudget};
    use penstock_types::ask::Ask;

    use super::*;
    use crate::ProviderConfig;

    /// Upstream of a model at this address.
    fn at(url: &str, protocol: Protocol) -> ProviderUpstream {
        let config = ProviderConfig { protocol, ..ProviderConfig::at(Target::parse(url).expect("a target")) };
        ProviderUpstream::new(Provider::new(&config).expect("a provider"), "m".into(), "m".into())
    }

    async fn call(surface: Surface, more: &str) -> Call {
        let messages =
            format!(r#"[{{"role":"user","content":"hi"}},{{"role":"assistant","tool_calls":[{{"id":"c"{more}}}]}}]"#);
        let name = if surface == Surface::Chat { "messages" } else { "input" };
        let bytes = format!(r#"{{"model":"m","{name}":{messages}}}"#).into();
        let body = Body { bytes, lease: BodyBudget::new(1 << 20, 1 << 20).lease() };
        let made = Call::new(Ask::new(surface), body, "r".into(), HeaderMap::new(), penstock_dialects::decode).await;
        made.expect("a call")
    }

    #[tokio::test]
    async fn openai_is_told_from_compatible_servers() {
        const CALLED: &str = r#","type":"function","function":{"name":"f","arguments":"{}"}"#;
        const SIGNED: &str = r#","extra_content":{"google":{"thought_signature":"c2ln"}}"#;
        for (url, protocol, is_openais) in [
            ("https://api.openai.com:443/v1", Protocol::OpenAi, true),
            ("https://eu.api.openai.com/v1", Protocol::OpenAi, true),
            ("https://acme.openai.azure.com/openai/v1", Protocol::OpenAi, true),
            ("https://acme.example.com", Protocol::Azure, true),
            ("https://generativelanguage.googleapis.com/v1beta/openai", Protocol::OpenAi, false),
        ] {
            let upstream = at(url, protocol);
            let name = if is_openais { "max_completion_tokens" } else { "max_tokens" };
            assert_eq!(upstream.bound_name(Surface::Chat), name, "{url}");
            assert!(upstream.passes_on(&call(Surface::Chat, "").await), "{url}");
            // Gemini's signature of a call, which OpenAI refuses, goes back to Gemini alone.
            assert_eq!(upstream.passes_on(&call(Surface::Chat, SIGNED).await), !is_openais, "{url}");
        }
        for (url, is_openais) in [("https://eu.api.openai.com/v1", true), ("https://api.example.com/v1", false)] {
            let upstream = at(url, Protocol::OpenAiResponses);
            assert!(upstream.passes_on(&call(Surface::Responses, "").await), "{url}");
            assert_eq!(upstream.passes_on(&call(Surface::Responses, SIGNED).await), !is_openais, "{url}");
            // Translated too.
            let signed = call(Surface::Chat, &format!("{CALLED}{SIGNED}")).await;
            let (asked, _) = upstream
                .translated(&signed, Asker::default(), upstream.deadlines(&signed, &Origin::default()))
                .await
                .expect("translated");
            let has_signature = String::from_utf8_lossy(&asked.body.concat()).contains("thought_signature");
            assert_eq!(has_signature, !is_openais, "{url}");
        }
    }

    #[tokio::test]
    async fn vertex_is_sent_no_ids_of_calls() {
        let bytes = r#"{"contents":[{"role":"model","parts":[{"functionCall":{"id":"c1","name":"f","args":{"id":7}}}]}],"generationConfig":{}}"#;
        for (protocol, has_ids) in [(Protocol::Gemini, true), (Protocol::Vertex, false)] {
            let upstream = at("https://example.com/v1", protocol);
            let body = Body { bytes: bytes.into(), lease: BodyBudget::new(1 << 20, 1 << 20).lease() };
            let ask = Ask { model: Some("m".into()), ..Ask::new(Surface::Generate) };
            let made = Call::new(ask, body, "r".into(), HeaderMap::new(), penstock_dialects::decode).await;
            let made = made.expect("a call");
            assert!(upstream.passes_on(&made), "{protocol:?}");
            let mut asked = upstream.passed_on(&made, Asker::default(), upstream.deadlines(&made, &Origin::default()));
            upstream.leave_ids_out(&made, &mut asked).await.expect("read");
            let expected = if has_ids { bytes.to_owned() } else { bytes.replace(r#""id":"c1","#, "") };
            assert_eq!(String::from_utf8_lossy(&asked.body.concat()), expected, "{protocol:?}");
        }
    }
}
