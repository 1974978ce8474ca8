//! Client of the chat API: one connection per answer, so that dropping the answer closes it.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::sse::Events;

const CONNECT: Duration = Duration::from_secs(10);
/// Timeout of the first byte: the model may have to prefill a long prompt before it.
const FIRST_BYTE: Duration = Duration::from_secs(600);
/// Timeout between two pieces: the gateway sends comments while nothing else happens, so longer silence means that it
/// is gone.
const SILENCE: Duration = Duration::from_secs(120);
/// Largest body that is no stream: model lists and errors.
const BODY_BYTES_MAX: usize = 4 << 20;

/// Advice where the gateway wants a key, or another one.
const SET_A_KEY: &str = "set PENSTOCK_API_KEY (for a gateway on this machine or at OPENAI_BASE_URL, OPENAI_API_KEY is read too), or \
                         name the variable that holds the key with --key-env";

/// One message of the conversation.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Message {
    role: &'static str,
    content: String,
}

impl Message {
    /// Message with instructions.
    pub(super) fn system(content: &str) -> Self {
        Self { role: "system", content: content.to_owned() }
    }

    /// Message of the person.
    pub(super) fn user(content: &str) -> Self {
        Self { role: "user", content: content.to_owned() }
    }

    /// Message of the model.
    pub(super) fn assistant(content: String) -> Self {
        Self { role: "assistant", content }
    }
}

/// Piece of an answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Delta {
    /// Text of the answer.
    Text(String),
    /// Text of the reasoning before the answer.
    Reasoning(String),
}

/// Fields of each request that stay the same in a conversation; those that are not set are left to the gateway.
#[derive(Clone, Copy, Default, Serialize)]
pub(super) struct Settings {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) max_completion_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) temperature: Option<f32>,
}

/// Address of the gateway, and the model to ask.
pub(super) struct Client {
    host: String,
    port: u16,
    tls: Option<tokio_rustls::TlsConnector>,
    base: String,
    key: Option<String>,
    model: String,
    settings: Settings,
}

impl Client {
    /// Checks `url`, and asks the gateway for its first model when none is named.
    pub(super) async fn connect(
        url: &str,
        key: Option<String>,
        model: Option<String>,
        settings: Settings,
    ) -> anyhow::Result<Self> {
        let uri: Uri = url.parse().with_context(|| format!("{url} is not a URL"))?;
        let secure = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => bail!("{url}: a URL begins with http:// or https://"),
        };
        let host = uri.host().with_context(|| format!("{url} names no host"))?.to_owned();
        let path = uri.path().trim_end_matches('/');
        let base = if path.ends_with("/v1") { path.to_owned() } else { format!("{path}/v1") };
        let tls = if secure { Some(tls_connector()?) } else { None };
        let port = uri.port_u16().unwrap_or(if secure { 443 } else { 80 });
        let mut client = Self { host, port, tls, base, key, model: String::new(), settings };
        client.model = match model {
            Some(model) => model,
            None => client.first_model().await?,
        };
        Ok(client)
    }

    /// Name of the model that answers.
    pub(super) fn model(&self) -> &str {
        &self.model
    }

    /// Sends `messages` and returns the answer, which comes piece by piece; dropping it closes its connection.
    pub(super) async fn ask(&self, messages: &[Message]) -> anyhow::Result<Answer> {
        let body = Body { model: &self.model, messages, stream: true, settings: self.settings };
        let body = serde_json::to_vec(&body).context("the conversation cannot be written as JSON")?;
        let response = self.send(Method::POST, "/chat/completions", body).await?;
        Ok(Answer { body: response.into_body(), events: Events::default(), ready: Vec::new(), end: End::Open })
    }

    async fn first_model(&self) -> anyhow::Result<String> {
        let response = self.send(Method::GET, "/models", Vec::new()).await?;
        let list: Models = serde_json::from_slice(&whole(response).await?).context("the list of models is not JSON")?;
        let first = list.data.into_iter().next().context("the gateway lists no model")?;
        Ok(first.id)
    }

    /// Sends one request on a connection of its own and fails unless the status is 200.
    async fn send(&self, method: Method, path: &str, body: Vec<u8>) -> anyhow::Result<Response<Incoming>> {
        let place = format!("{}:{}", self.host, self.port);
        let stream = timeout(CONNECT, TcpStream::connect((self.host.trim_matches(['[', ']']), self.port)))
            .await
            .map_err(|_| anyhow!("{place} did not answer within {CONNECT:?}"))?
            .with_context(|| format!("cannot reach {place}: is the gateway running? (penstock serve)"))?;
        stream.set_nodelay(true).context("cannot set TCP_NODELAY")?;
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base))
            .header(HOST, &place)
            .header(CONTENT_TYPE, "application/json")
            .header(ACCEPT, "text/event-stream, application/json");
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, format!("Bearer {key}"));
        }
        let request = request.body(Full::new(Bytes::from(body))).context("the request has an invalid header")?;
        let exchange = async {
            match &self.tls {
                None => exchange(stream, request).await,
                Some(tls) => {
                    let name = self.host.trim_matches(['[', ']']).to_owned();
                    let name = rustls::pki_types::ServerName::try_from(name).context("not a TLS host name")?;
                    exchange(tls.connect(name, stream).await.context("TLS handshake failed")?, request).await
                }
            }
        };
        let response =
            timeout(FIRST_BYTE, exchange).await.map_err(|_| anyhow!("no answer within {FIRST_BYTE:?}"))??;
        match response.status() {
            StatusCode::OK => Ok(response),
            StatusCode::UNAUTHORIZED => Err(anyhow!("{:#}\n{SET_A_KEY}", refusal(response).await)),
            _ => Err(refusal(response).await),
        }
    }
}

/// Answer on its way.
pub(super) struct Answer {
    body: Incoming,
    events: Events,
    /// Payloads that were received and not read yet, oldest last.
    ready: Vec<String>,
    end: End,
}

/// Progress of an answer: complete once a finish reason was given, over after `[DONE]`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Open,
    Complete,
    Over,
}

impl Answer {
    /// Next piece; `None` once the answer is complete.
    ///
    /// Errors: the connection broke or fell silent, the gateway reported a failure, or the answer ended without a finish reason.
    pub(super) async fn next(&mut self) -> anyhow::Result<Option<Delta>> {
        loop {
            while let Some(payload) = self.ready.pop() {
                if let Some(delta) = self.read(&payload)? {
                    return Ok(Some(delta));
                }
            }
            if self.end == End::Over {
                return Ok(None);
            }
            let frame = timeout(SILENCE, self.body.frame()).await.map_err(|_| anyhow!("silent for {SILENCE:?}"))?;
            match frame {
                Some(frame) => {
                    let frame = frame.context("the connection broke")?;
                    let Some(bytes) = frame.data_ref() else { continue };
                    self.events.push(bytes, &mut self.ready).map_err(|_| anyhow!("an event is too long"))?;
                    self.ready.reverse();
                }
                None if self.end == End::Complete => return Ok(None),
                None => bail!("the answer broke off"),
            }
        }
    }

    fn read(&mut self, payload: &str) -> anyhow::Result<Option<Delta>> {
        if payload == "[DONE]" {
            if self.end == End::Open {
                bail!("the answer ended without a reason");
            }
            self.end = End::Over;
            return Ok(None);
        }
        let chunk: Chunk = serde_json::from_str(payload).context("the gateway sent an event that is not understood")?;
        if let Some(error) = chunk.error {
            bail!("{}", error.message);
        }
        let Some(choice) = chunk.choices.into_iter().next() else { return Ok(None) };
        if choice.finish_reason.is_some() {
            self.end = End::Complete;
        }
        let full = |text: Option<String>| text.filter(|text| !text.is_empty());
        let reasoning = full(choice.delta.reasoning).or(full(choice.delta.reasoning_content));
        Ok(reasoning.map(Delta::Reasoning).or(full(choice.delta.content).map(Delta::Text)))
    }
}

async fn exchange<S>(stream: S, request: Request<Full<Bytes>>) -> anyhow::Result<Response<Incoming>>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.context("no HTTP connection")?;
    // Ends by itself: hyper closes the connection when the sender and the response's body are dropped.
    tokio::spawn(async move {
        let _closed = connection.await;
    });
    sender.send_request(request).await.context("the gateway closed the connection")
}

async fn whole(response: Response<Incoming>) -> anyhow::Result<Bytes> {
    let body = Limited::new(response.into_body(), BODY_BYTES_MAX).collect();
    let body = timeout(SILENCE, body).await.map_err(|_| anyhow!("silent for {SILENCE:?}"))?;
    Ok(body.map_err(|error| anyhow!("the answer cannot be read: {error}"))?.to_bytes())
}

/// Error made of the gateway's refusal.
async fn refusal(response: Response<Incoming>) -> anyhow::Error {
    let status = response.status();
    let said = whole(response).await.ok().and_then(|body| serde_json::from_slice::<Chunk>(&body).ok()?.error);
    match said {
        Some(error) => anyhow!("{} ({status})", error.message),
        None => anyhow!("the gateway answered {status}"),
    }
}

/// TLS with the system's trusted certificates.
fn tls_connector() -> anyhow::Result<tokio_rustls::TlsConnector> {
    let config = penstock_link::public_client().context("TLS cannot be set up")?;
    Ok(Arc::new(config).into())
}

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    messages: &'a [Message],
    stream: bool,
    #[serde(flatten)]
    settings: Settings,
}

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
}

/// Chunk of a stream, or an error in place of one.
#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    error: Option<ErrorBody>,
}

#[derive(Deserialize)]
struct Choice {
    delta: DeltaBody,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct DeltaBody {
    content: Option<String>,
    reasoning: Option<String>,
    reasoning_content: Option<String>,
}

#[derive(Deserialize)]
struct ErrorBody {
    message: String,
}
