//! One request to a model: the client's bytes, the fields peeked from them, and, when somebody needs it, the decoded
//! request.
//!
//! An upstream that speaks the client's dialect sends the bytes on; the others ask for the decoded request, which is
//! made once and kept for the next attempt. All of it is dropped when the answer has begun.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use penstock_types::ask::Ask;
use penstock_types::codec::Elapsed;
use penstock_types::peek::{BoundLimits, Peek};
use penstock_types::{AnswerMeta, ApiError, Bounds, Decoded, Dialect, Prompt, Request, Surface, peek};
use tokio::sync::OnceCell;

use crate::answer_memory::Hold;
use crate::reasoning_signer::Signer;
use penstock_base::clock::unix_seconds;
use penstock_base::error::Failure;
use penstock_http::{Body, BodyLease};

/// Bytes of a message's frame in JSON: its role and its delimiters.
const MESSAGE_BYTES: usize = 32;

/// Bytes of all texts of a request, with an allowance per message for its role and delimiters.
fn text_bytes(request: &Request) -> u64 {
    let of = |text: &Option<String>| text.as_ref().map_or(0, String::len);
    let bytes: usize = match request {
        Request::Chat(chat) => {
            let messages = chat.messages.iter().map(|message| {
                let calls =
                    message.tool_calls.iter().map(|call| call.name.len() + call.arguments.len() + MESSAGE_BYTES);
                let own = [&message.content, &message.name, &message.reasoning].into_iter().map(of);
                MESSAGE_BYTES + own.sum::<usize>() + calls.sum::<usize>()
            });
            messages.sum::<usize>() + chat.tools.iter().map(|tool| tool.json.len()).sum::<usize>()
        }
        Request::Complete(complete) => complete
            .prompts
            .iter()
            .map(|prompt| match prompt {
                Prompt::Text(text) => text.len(),
                Prompt::Tokens(tokens) => tokens.len(),
            })
            .sum(),
        // Nothing is put in front of what they ask.
        Request::Embed(_) | Request::Rerank(_) => 0,
    };
    bytes as u64
}

/// Bodies above this are read off the I/O threads: about a millisecond of one core.
const INLINE_BODY_BYTES_MAX: usize = 256 * 1024;

/// Decoder of a body in the dialect that the operation names.
pub type Decode = fn(&Ask, &[u8]) -> Result<Decoded, ApiError>;

/// Decoder of bodies that plugins put in place of the client's, for a call whose request holds more than its body says.
pub type ReadEdit = Arc<dyn Fn(&[u8]) -> Result<Decoded, Failure> + Send + Sync>;

/// One request to a model, validated by the route and shared by all attempts.
pub struct Call {
    /// Operation asked for, with the facts that only the URL says.
    pub ask: Ask,
    /// Name of the model asked for, as the client or a plugin wrote it.
    pub model: String,
    /// True if the client wants a streamed answer.
    pub stream: bool,
    /// The field in which the client, and no plugin, names further models to the upstream.
    pub other_models: Option<&'static str>,
    /// Fields of the body's top level, read without decoding the whole request.
    pub peek: Peek,
    /// Body as the client sent it, or as plugins have replaced it.
    pub body: Bytes,
    /// Id of the request in the answer's `x-request-id` and the log.
    pub request_id: String,
    /// True where the client chose the id: another request may have had it before.
    pub id_is_clients: bool,
    /// Header fields of the client that an upstream of the same dialect may be given.
    pub headers: HeaderMap,
    /// Address of the client; `None` for a Unix socket, or where nobody is connected.
    pub client: Option<IpAddr>,
    /// Signer of the reasoning in the answer and in earlier turns, where the API has signatures.
    pub signer: Option<Signer>,
    /// True where nobody waits for the answer: live requests go first.
    pub background: bool,
    /// True where a plugin asks: no plugin is shown the call.
    pub asked_by_plugin: bool,
    /// Model that the client asked for, where a plugin chose another.
    pub asked_for: Option<String>,
    /// Header fields that plugins want providers to be sent.
    pub send: Vec<(HeaderName, HeaderValue)>,
    /// Names and values that plugins put into the access log and the ledger.
    pub tags: Vec<(String, String)>,
    /// True where the decoded request holds more than the body (a plugin's edits, earlier turns): the body is not
    /// passed on as it is.
    pub own: bool,
    /// Failure to resolve a stored response that the body refers to: returned to upstreams that need the decoded
    /// request; upstreams that get the body itself never see it.
    pub unresolved: Option<Box<Failure>>,
    /// Id and time of the answer, where they are not derived from the request: the stored copy says the same.
    pub answer_meta: Option<AnswerMeta>,
    /// Bounds of output tokens that limits set: the default where the client names none, and the maximum.
    bounds: BoundLimits,
    /// True where a limit counts on the body's bound and number of choices: they go upstream in the form that was
    /// counted.
    is_counted: bool,
    decode: Decode,
    /// Decoder of edited bodies; `None`: `decode` reads them too.
    read_edit: Option<ReadEdit>,
    decoded: OnceCell<Result<Arc<Decoded>, ApiError>>,
    /// Time at which the request was read.
    began: Instant,
    /// Memory of earlier turns, which are part of the decoded request.
    holds: Option<Hold>,
    /// Lease on the memory budget for the body, held as long as the call is.
    _lease: BodyLease,
}

impl Call {
    /// Peeks at the body, which `decode` reads in full when an upstream or a plugin needs it.
    ///
    /// # Errors
    /// The body is no JSON object, names a field twice, or names no model.
    pub async fn new(
        ask: Ask,
        body: Body,
        request_id: String,
        headers: HeaderMap,
        decode: Decode,
    ) -> Result<Self, Failure> {
        let (bytes, surface) = (body.bytes.clone(), ask.surface);
        let peek = off_io(bytes.len(), move || peek::peek(&bytes, Some(surface), &Bounds::default())).await??;
        let model = ask.model.clone().or_else(|| peek.model.clone());
        let model = model.ok_or_else(|| ApiError::invalid("model", "model: required, but missing"))?;
        // Gemini says it in the URL alone.
        let stream = ask.stream || (peek.stream && ask.surface.dialect() != Dialect::Gemini);
        let decoded = OnceCell::new();
        Ok(Self {
            ask,
            model,
            stream,
            other_models: peek.other_models,
            peek,
            body: body.bytes,
            request_id,
            // Asked before a plugin could change them.
            id_is_clients: headers.contains_key("x-request-id"),
            headers,
            client: None,
            signer: None,
            background: false,
            asked_by_plugin: false,
            asked_for: None,
            send: Vec::new(),
            tags: Vec::new(),
            own: false,
            unresolved: None,
            answer_meta: None,
            bounds: BoundLimits::default(),
            is_counted: false,
            decode,
            read_edit: None,
            decoded,
            began: Instant::now(),
            holds: None,
            _lease: body.lease,
        })
    }

    /// Keeps a memory hold for as long as the call lives.
    pub fn holds(&mut self, hold: Hold) {
        self.holds = Some(hold);
    }

    /// Dialect of the operation: the client's requests and answers are in it.
    pub fn dialect(&self) -> Dialect {
        self.ask.surface.dialect()
    }

    /// The decoded request; decoded once, on the first call.
    ///
    /// # Errors
    /// The body breaks a rule of the client's dialect.
    pub async fn decoded(&self) -> Result<Arc<Decoded>, Failure> {
        if let Some(failure) = &self.unresolved {
            return Err((**failure).clone());
        }
        let made = self.decoded.get_or_init(|| async {
            let (bytes, ask, bounds, decode) = (self.body.clone(), self.ask.clone(), self.bounds, self.decode);
            match off_io(self.body.len(), move || decode(&ask, &bytes)).await {
                Ok(decoded) => decoded.map(|mut decoded| {
                    bound(&mut decoded.request, bounds);
                    Arc::new(decoded)
                }),
                Err(failure) => Err(ApiError::malformed(failure.message)),
            }
        });
        Ok(made.await.clone()?)
    }

    /// Upper bound of the prompt's text tokens, in bytes: those of the body, or, where the request holds more than the
    /// body (a plugin's edits, earlier turns), at least those of the request's texts.
    pub fn prompt_bytes(&self) -> u64 {
        let body = self.body.len() as u64;
        match self.decoded.get() {
            Some(Ok(decoded)) if self.own => body.max(text_bytes(&decoded.request)),
            _ => body,
        }
    }

    /// Id and time in the answer. The id is the request's, so that logs and answers can be joined, unless the answer is
    /// stored under another.
    pub fn meta(&self) -> AnswerMeta {
        let from_request = || {
            let id = self.request_id.strip_prefix("req_").unwrap_or(&self.request_id).to_owned();
            let mut meta = AnswerMeta::new(id, unix_seconds());
            if self.dialect() == Dialect::Ollama {
                let began = self.began;
                meta.elapsed = Elapsed::new(move || began.elapsed());
            }
            meta
        };
        self.answer_meta.clone().unwrap_or_else(from_request)
    }

    /// Replaces the decoded request and names the answer: for stored responses, whose earlier turns go in front.
    pub fn answer_as(&mut self, meta: AnswerMeta, decoded: Decoded) {
        self.answer_meta = Some(meta);
        self.decoded = OnceCell::new_with(Some(Ok(Arc::new(decoded))));
    }

    /// Sets the decoder of bodies that plugins put in place of the client's: earlier turns that the body does not hold stay
    /// part of the request.
    pub fn read_edits_with(&mut self, read: ReadEdit) {
        self.read_edit = Some(read);
    }

    /// Drops the decoder of edited bodies, and the earlier turns with it: no plugin edits the call any more.
    pub fn end_edits(&mut self) {
        self.read_edit = None;
    }

    /// Decodes a body that a plugin puts in place of the client's. The client's own body of a call with
    /// [`Call::unresolved`] is decoded here too, without the turns that only its provider has.
    ///
    /// # Errors
    /// The body breaks a rule of the client's dialect.
    pub async fn decode_edit(&self, body: Bytes) -> Result<Arc<Decoded>, Failure> {
        let (ask, decode, read, bytes) = (self.ask.clone(), self.decode, self.read_edit.clone(), body.len());
        let work = move || match read {
            Some(read) => read(&body),
            None => Ok(decode(&ask, &body)?),
        };
        Ok(Arc::new(off_io(bytes, work).await??))
    }

    /// Replaces the body, which the caller may have decoded already ([`Call::decode_edit`]). A model named in it is asked
    /// from now on; whether the answer is streamed cannot change.
    ///
    /// # Errors
    /// The bytes are no valid body, or change whether the answer is streamed.
    pub async fn set_body(&mut self, body: Bytes, mut decoded: Option<Arc<Decoded>>) -> Result<(), Failure> {
        let (bytes, surface) = (body.clone(), self.ask.surface);
        let peek = off_io(body.len(), move || peek::peek(&bytes, Some(surface), &Bounds::default())).await??;
        if peek.stream != self.peek.stream {
            return Err(Failure::internal("a plugin changed whether the answer is streamed"));
        }
        if let Some(model) = peek.model.clone().filter(|model| self.peek.model.as_ref() != Some(model)) {
            let before = std::mem::replace(&mut self.model, model);
            self.asked_for.get_or_insert(before);
        }
        if decoded.is_none() && self.read_edit.is_some() && self.unresolved.is_none() {
            decoded = match self.decode_edit(body.clone()).await {
                // Without earlier turns nothing is lost: a provider may know what is not known here, and whoever decodes the
                // body later refuses it.
                Err(_) if !self.own => None,
                read => Some(read?),
            };
        }
        (self.body, self.peek) = (body, peek);
        self.decoded = OnceCell::new_with(decoded.map(Ok));
        Ok(())
    }

    /// Caches the decoded request of a caller that has read the body already.
    pub fn put_decoded(&mut self, decoded: Arc<Decoded>) {
        self.decoded = OnceCell::new_with(Some(Ok(decoded)));
    }

    /// Replaces the request by `decoded`: the body is not passed on any more.
    pub fn mean(&mut self, decoded: Decoded) {
        let (max_tokens, choices, prompts) = match &decoded.request {
            Request::Chat(chat) => (chat.sampling.max_tokens, chat.n, 1),
            Request::Complete(complete) => {
                let choices = complete.best_of.max(complete.n);
                (complete.sampling.max_tokens, choices, complete.prompts.len() as u32)
            }
            Request::Embed(_) | Request::Rerank(_) => (None, 1, 1),
        };
        self.peek.mean(max_tokens, choices, prompts);
        self.own = true;
        self.put_decoded(Arc::new(decoded));
    }

    /// Marks the body's amounts (output bound, number of choices) as counted by a limit. `is_read`: no upstream is
    /// passed the body, all get the decoded request.
    ///
    /// # Errors
    /// Servers read the amounts of the body differently.
    pub fn count_on_amounts(&mut self, is_read: bool) -> Result<(), Failure> {
        if !is_read {
            self.peek.check_amounts()?;
        }
        self.is_counted = true;
        Ok(())
    }

    /// Returns true if a limit counts on the amounts of the body, so that they go upstream in a form that every server reads
    /// alike.
    pub fn is_counted(&self) -> bool {
        self.is_counted
    }

    /// Sets the bounds of output tokens: the default where the client names none, and the maximum.
    pub fn bound_output(&mut self, bounds: BoundLimits) {
        self.bounds = bounds;
        if let Some(Ok(decoded)) = self.decoded.get_mut()
            && let Some(decoded) = Arc::get_mut(decoded)
        {
            bound(&mut decoded.request, bounds);
        }
    }

    /// Output token bound of each choice, the client's or a limit's.
    pub fn output_bound(&self) -> Option<u32> {
        self.peek.bound_under(self.bounds)
    }

    /// Output token bound to write into the body, where it differs from the client's or is to be written under another
    /// name.
    pub fn new_bound(&self) -> Option<u32> {
        self.peek.new_bound(self.bounds, self.is_counted).filter(|_| makes_text(self.ask.surface))
    }

    /// Returns true if every server obeys the bound as the body writes it, if there is one: some do not know
    /// `max_completion_tokens`.
    pub fn is_bound_obeyed(&self) -> bool {
        self.own || self.peek.is_bound_usual()
    }

    /// The result of an earlier [`Call::decoded`], if that has succeeded.
    pub fn decoded_before(&self) -> Option<Arc<Decoded>> {
        self.decoded.get()?.as_ref().ok().cloned()
    }
}

fn bound(request: &mut Request, bounds: BoundLimits) {
    let sampling = match request {
        Request::Chat(chat) => &mut chat.sampling,
        Request::Complete(complete) => &mut complete.sampling,
        Request::Embed(_) | Request::Rerank(_) => return,
    };
    sampling.max_tokens = bounds.bounded(sampling.max_tokens);
}

/// Returns true if the operation makes text, which can be bounded.
fn makes_text(surface: Surface) -> bool {
    matches!(
        surface,
        Surface::Chat
            | Surface::Completions
            | Surface::Responses
            | Surface::Messages
            | Surface::Generate
            | Surface::OllamaChat
            | Surface::OllamaGenerate
    )
}

/// Runs `work` on this thread if `bytes` is small, else on the blocking pool.
pub async fn off_io<T: Send + 'static>(bytes: usize, work: impl FnOnce() -> T + Send + 'static) -> Result<T, Failure> {
    if bytes <= INLINE_BODY_BYTES_MAX {
        return Ok(work());
    }
    tokio::task::spawn_blocking(work).await.map_err(|error| Failure::internal(format!("decoding: {error}")))
}
