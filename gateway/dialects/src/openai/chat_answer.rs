//! Chat answers: as a stream of chunks ([`ChatEncoder`]) or as one whole answer ([`ChatCollector`]), with the same
//! content.

use bytes::{BufMut, Bytes, BytesMut};

use super::functions::CallShape;
use super::stream::{Frames, Identity, Phase, put_finish};
use penstock_types::ErrorShape;
use penstock_types::event::{ChatEvent, FinishReason, StopCause, TokenLogprob, Usage};
use penstock_types::request::{ChatRequest, TokenNames};
use penstock_types::write;

/// Field names under which reasoning is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReasoningNames {
    /// `reasoning` (vLLM) and `reasoning_content` (SGLang, llama.cpp, DeepSeek).
    #[default]
    Both,
    /// The field `reasoning` alone, as vLLM names it.
    Reasoning,
    /// The field `reasoning_content` alone, as SGLang, llama.cpp and DeepSeek name it.
    ReasoningContent,
}

/// Values that an answer to a chat request needs besides its events.
#[derive(Clone, Debug)]
pub struct ChatMeta {
    /// Id of the answer, `chatcmpl-…`.
    pub id: String,
    /// Model name that the client asked for.
    pub model: String,
    /// Creation time in Unix seconds.
    pub created: u64,
    /// Name of the configuration that answers; answers with a seed repeat while it stays the same.
    pub system_fingerprint: Option<String>,
    /// Number of choices, from 1.
    pub n: u32,
    /// True if the stream ends with a chunk of usage and no choices.
    pub include_usage: bool,
    /// True if each chunk carries the usage last set by [`ChatEncoder::set_usage`].
    pub continuous_usage: bool,
    /// True if log-probabilities were asked for.
    pub logprobs: bool,
    /// True if log-probabilities of the prompt were asked for.
    pub prompt_logprobs: bool,
    /// True if the answer carries the ids of its tokens (`return_token_ids`).
    pub return_token_ids: bool,
    /// Form of the token names in log-probabilities.
    pub token_names: TokenNames,
    /// Names of the fields in which reasoning is sent.
    pub reasoning: ReasoningNames,
    /// Shape of the calls.
    pub calls: CallShape,
}

impl ChatMeta {
    /// Values for the answer to `request`.
    pub fn new(request: &ChatRequest, id: String, created: u64, system_fingerprint: Option<String>) -> Self {
        let stream = request.stream.unwrap_or_default();
        Self {
            id,
            model: request.model.clone(),
            created,
            system_fingerprint,
            n: request.n,
            include_usage: stream.include_usage,
            continuous_usage: stream.continuous_usage_stats,
            logprobs: request.logprobs.is_some(),
            prompt_logprobs: request.prompt_logprobs.is_some(),
            return_token_ids: request.return_token_ids,
            token_names: request.token_names,
            reasoning: ReasoningNames::default(),
            calls: CallShape::default(),
        }
    }

    fn identity<'a>(&'a self, object: &'a str) -> Identity<'a> {
        Identity {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            system_fingerprint: self.system_fingerprint.as_deref(),
        }
    }
}

/// Encoder of events as server-sent chunks. Nothing is allocated per event except room in `out`.
pub struct ChatEncoder {
    frames: Frames,
    logprobs: bool,
    return_token_ids: bool,
    token_names: TokenNames,
    reasoning: ReasoningNames,
    calls: CallShape,
}

impl ChatEncoder {
    /// Creates the encoder for one request.
    pub fn new(meta: &ChatMeta) -> Self {
        let identity = meta.identity("chat.completion.chunk");
        Self {
            frames: Frames::new(&identity, meta.n as usize, meta.include_usage, meta.continuous_usage),
            logprobs: meta.logprobs,
            return_token_ids: meta.return_token_ids,
            token_names: meta.token_names,
            reasoning: meta.reasoning,
            calls: meta.calls,
        }
    }

    /// Appends the chunks of `event`. The first chunk of each choice carries the role.
    pub fn event(&mut self, event: &ChatEvent, out: &mut BytesMut) {
        match event {
            ChatEvent::Text { choice, text, logprobs, tokens } => self.text(*choice, text, logprobs, tokens, out),
            ChatEvent::Reasoning { choice, text } if !text.is_empty() => {
                self.delta(*choice, out, |this, out| {
                    put_reasoning(out, this.reasoning, |out| write::string(out, text))
                });
            }
            ChatEvent::Reasoning { .. } => {}
            ChatEvent::Refusal { choice, text } => {
                self.delta(*choice, out, |_, out| {
                    out.put_slice(b"\"refusal\":");
                    write::string(out, text);
                });
            }
            // The older shape holds one call.
            ChatEvent::ToolCallStart { call: 1.., .. } | ChatEvent::ToolCallArguments { call: 1.., .. }
                if self.calls == CallShape::Function => {}
            ChatEvent::ToolCallStart { choice, call, id, name, signature } => {
                self.role(*choice, "null", None, out);
                self.delta(*choice, out, |this, out| match this.calls {
                    CallShape::Tools => put_call_start(out, *call, id, name, signature.as_deref()),
                    CallShape::Function => put_function_call(out, Some(name), ""),
                });
            }
            ChatEvent::ToolCallArguments { choice, json, .. }
                if self.calls == CallShape::Function && !json.is_empty() =>
            {
                self.delta(*choice, out, |_, out| put_function_call(out, None, json));
            }
            ChatEvent::ToolCallArguments { choice, call, json } if !json.is_empty() => {
                self.delta(*choice, out, |_, out| put_call_arguments(out, *call, json));
            }
            ChatEvent::ToolCallArguments { .. } => {}
            ChatEvent::Finish { choice, reason, stop } => self.finish(*choice, *reason, stop.as_ref(), out),
            ChatEvent::Prompt { choice, tokens, .. } => {
                let tokens = self.return_token_ids.then_some(tokens.as_slice());
                self.role(*choice, "\"\"", tokens, out);
            }
            ChatEvent::Usage(usage) => {
                self.frames.set_usage(*usage);
                self.frames.usage_chunk(out);
            }
            // Chat completions have no place for these.
            ChatEvent::ReasoningSignature { .. }
            | ChatEvent::Vector { .. }
            | ChatEvent::Score { .. }
            | ChatEvent::Raw(_) => {}
        }
    }

    /// Sets the counts so far, for `continuous_usage_stats`.
    pub fn set_usage(&mut self, usage: Usage) {
        self.frames.set_usage(usage);
    }

    /// Ends the stream: `[DONE]` after a complete answer, an error event otherwise. Later calls add nothing.
    pub fn done(&mut self, out: &mut BytesMut) {
        self.frames.done(out);
    }

    /// Ends the stream with an error event. Later calls add nothing.
    pub fn fail(&mut self, shape: ErrorShape, message: &str, out: &mut BytesMut) {
        self.frames.fail(shape, message, out);
    }

    fn text(&mut self, choice: u32, text: &str, logprobs: &[TokenLogprob], tokens: &[u32], out: &mut BytesMut) {
        let logprobs = if self.logprobs { logprobs } else { &[] };
        let tokens = if self.return_token_ids { tokens } else { &[] };
        if (text.is_empty() && logprobs.is_empty() && tokens.is_empty()) || self.frames.live(choice).is_none() {
            return;
        }
        self.role(choice, "\"\"", None, out);
        self.frames.open(choice, out);
        out.put_slice(b",\"delta\":{\"content\":");
        write::string(out, text);
        out.put_slice(b"},\"logprobs\":");
        put_logprobs(out, !logprobs.is_empty(), |out| put_entries(out, logprobs, self.token_names));
        out.put_slice(b",\"finish_reason\":null");
        if !tokens.is_empty() {
            out.put_slice(b",\"token_ids\":");
            write::integers(out, tokens);
        }
        self.frames.close(None, out);
    }

    fn delta(&mut self, choice: u32, out: &mut BytesMut, put: impl FnOnce(&Self, &mut BytesMut)) {
        if self.frames.live(choice).is_none() {
            return;
        }
        self.role(choice, "\"\"", None, out);
        self.frames.open(choice, out);
        out.put_slice(b",\"delta\":{");
        put(self, out);
        out.put_slice(b"},\"logprobs\":null,\"finish_reason\":null");
        self.frames.close(None, out);
    }

    /// Writes the chunk that opens a choice, if the choice is not open yet. `content` is null in front of a call.
    ///
    /// Choices open in ascending order, whichever has content first: the official SDKs insert them into a list at
    /// their index as they come.
    fn role(&mut self, choice: u32, content: &str, prompt_tokens: Option<&[u32]>, out: &mut BytesMut) {
        let Some(Phase::Fresh) = self.frames.live(choice) else { return };
        for earlier in 0..choice {
            self.open_choice(earlier, "\"\"", None, out);
        }
        self.open_choice(choice, content, prompt_tokens, out);
    }

    fn open_choice(&mut self, choice: u32, content: &str, prompt_tokens: Option<&[u32]>, out: &mut BytesMut) {
        let Some(phase @ Phase::Fresh) = self.frames.live(choice) else { return };
        *phase = Phase::Open;
        self.frames.open(choice, out);
        out.put_slice(b",\"delta\":{\"role\":\"assistant\",\"content\":");
        out.put_slice(content.as_bytes());
        out.put_slice(b"},\"logprobs\":null,\"finish_reason\":null");
        self.frames.close_opening(prompt_tokens, out);
    }

    fn finish(&mut self, choice: u32, reason: FinishReason, stop: Option<&StopCause>, out: &mut BytesMut) {
        self.role(choice, "\"\"", None, out);
        let Some(phase) = self.frames.live(choice) else { return };
        *phase = Phase::Finished;
        self.frames.open(choice, out);
        out.put_slice(b",\"delta\":{},\"logprobs\":null");
        put_finish(out, reason, stop, self.calls);
        self.frames.close(None, out);
    }
}

/// Collector of events into one whole answer.
pub struct ChatCollector {
    meta: ChatMeta,
    choices: Vec<Collected>,
    prompt_logprobs: BytesMut,
    prompt_tokens: Vec<u32>,
    usage: Usage,
}

/// One choice; texts are kept as escaped JSON text.
#[derive(Default)]
struct Collected {
    content: BytesMut,
    reasoning: BytesMut,
    refusal: BytesMut,
    calls: Vec<CollectedCall>,
    logprobs: BytesMut,
    tokens: Vec<u32>,
    finish: Option<(FinishReason, Option<StopCause>)>,
}

struct CollectedCall {
    id: String,
    name: String,
    arguments: BytesMut,
    signature: Option<String>,
}

impl ChatCollector {
    /// Creates the collector for one request.
    pub fn new(meta: ChatMeta) -> Self {
        let choices = (0..meta.n).map(|_| Collected::default()).collect();
        Self { meta, choices, prompt_logprobs: BytesMut::new(), prompt_tokens: Vec::new(), usage: Usage::default() }
    }

    /// Adds the content of `event`.
    pub fn event(&mut self, event: &ChatEvent) {
        match event {
            ChatEvent::Text { choice, text, logprobs, tokens } => {
                let (wants_logprobs, names) = (self.meta.logprobs, self.meta.token_names);
                let Some(choice) = self.live(*choice) else { return };
                write::escaped(&mut choice.content, text);
                choice.tokens.extend_from_slice(tokens);
                if wants_logprobs && !logprobs.is_empty() {
                    if !choice.logprobs.is_empty() {
                        choice.logprobs.put_u8(b',');
                    }
                    put_entries(&mut choice.logprobs, logprobs, names);
                }
            }
            ChatEvent::Reasoning { choice, text } => {
                if let Some(choice) = self.live(*choice) {
                    write::escaped(&mut choice.reasoning, text);
                }
            }
            ChatEvent::Refusal { choice, text } => {
                if let Some(choice) = self.live(*choice) {
                    write::escaped(&mut choice.refusal, text);
                }
            }
            ChatEvent::ToolCallStart { choice, id, name, signature, .. } => {
                if let Some(choice) = self.live(*choice) {
                    let (id, name, signature) = (id.clone(), name.clone(), signature.clone());
                    choice.calls.push(CollectedCall { id, name, arguments: BytesMut::new(), signature });
                }
            }
            ChatEvent::ToolCallArguments { choice, call, json } => {
                if let Some(call) = self.live(*choice).and_then(|choice| choice.calls.get_mut(*call as usize)) {
                    write::escaped(&mut call.arguments, json);
                }
            }
            ChatEvent::Finish { choice, reason, stop } => {
                if let Some(choice) = self.live(*choice) {
                    choice.finish = Some((*reason, stop.clone()));
                }
            }
            ChatEvent::Prompt { logprobs, tokens, .. } => {
                if self.meta.prompt_logprobs {
                    self.prompt_logprobs.clear();
                    write::prompt_logprobs(&mut self.prompt_logprobs, logprobs);
                }
                self.prompt_tokens.clone_from(tokens);
            }
            ChatEvent::Usage(usage) => self.usage = *usage,
            ChatEvent::ReasoningSignature { .. }
            | ChatEvent::Vector { .. }
            | ChatEvent::Score { .. }
            | ChatEvent::Raw(_) => {}
        }
    }

    /// Bytes held. A whole answer grows with the generated text, so the caller bounds it.
    pub fn bytes(&self) -> usize {
        self.choices.iter().map(Collected::bytes).sum::<usize>() + self.prompt_logprobs.len()
    }

    /// Body of the answer; `None` if a choice has not finished.
    pub fn finish(self) -> Option<Bytes> {
        let mut out = BytesMut::with_capacity(512 + 256 * self.choices.len() + self.bytes());
        self.meta.identity("chat.completion").put(&mut out);
        for (index, choice) in self.choices.iter().enumerate() {
            if index > 0 {
                out.put_u8(b',');
            }
            choice.put(index, &self.meta, &mut out)?;
        }
        out.put_slice(b"],\"usage\":");
        write::usage(&mut out, &self.usage);
        // vLLM's clients read these keys even where they did not ask for them.
        out.put_slice(b",\"prompt_logprobs\":");
        out.put_slice(if self.prompt_logprobs.is_empty() { b"null" } else { &self.prompt_logprobs });
        out.put_slice(b",\"prompt_token_ids\":");
        write::asked_integers(&mut out, self.meta.return_token_ids, &self.prompt_tokens);
        out.put_u8(b'}');
        Some(out.freeze())
    }

    fn live(&mut self, choice: u32) -> Option<&mut Collected> {
        self.choices.get_mut(choice as usize).filter(|choice| choice.finish.is_none())
    }
}

impl Collected {
    fn bytes(&self) -> usize {
        let calls = self.calls.iter().map(|call| call.id.len() + call.name.len() + call.arguments.len());
        let texts = self.content.len() + self.reasoning.len() + self.refusal.len();
        texts + self.logprobs.len() + 4 * self.tokens.len() + calls.sum::<usize>()
    }

    fn put(&self, index: usize, meta: &ChatMeta, out: &mut BytesMut) -> Option<()> {
        let (reason, stop) = self.finish.as_ref()?;
        out.put_slice(b"{\"index\":");
        write::integer(out, index as u64);
        out.put_slice(b",\"message\":{\"role\":\"assistant\",\"content\":");
        // Beside calls, missing text is null: clients distinguish "said nothing" from "said the empty string".
        if self.content.is_empty() && !(self.calls.is_empty() && self.refusal.is_empty()) {
            out.put_slice(b"null");
        } else {
            put_quoted(out, &self.content);
        }
        out.put_slice(b",\"refusal\":");
        match self.refusal.is_empty() {
            true => out.put_slice(b"null"),
            false => put_quoted(out, &self.refusal),
        }
        out.put_slice(b",\"annotations\":[]");
        if !self.reasoning.is_empty() {
            out.put_u8(b',');
            put_reasoning(out, meta.reasoning, |out| put_quoted(out, &self.reasoning));
        }
        match (meta.calls, self.calls.first()) {
            (CallShape::Function, Some(call)) => call.put_function(out),
            _ => self.put_calls(out),
        }
        out.put_slice(b"},\"logprobs\":");
        put_logprobs(out, meta.logprobs, |out| out.put_slice(&self.logprobs));
        put_finish(out, *reason, stop.as_ref(), meta.calls);
        out.put_slice(b",\"token_ids\":");
        write::asked_integers(out, meta.return_token_ids, &self.tokens);
        out.put_u8(b'}');
        Some(())
    }

    fn put_calls(&self, out: &mut BytesMut) {
        for (index, call) in self.calls.iter().enumerate() {
            out.put_slice(if index == 0 { b",\"tool_calls\":[" } else { b"," });
            out.put_slice(b"{\"id\":");
            write::string(out, &call.id);
            out.put_slice(b",\"type\":\"function\",\"function\":{\"name\":");
            write::string(out, &call.name);
            out.put_slice(b",\"arguments\":");
            put_quoted(out, &call.arguments);
            out.put_u8(b'}');
            put_signature(out, call.signature.as_deref());
            out.put_u8(b'}');
        }
        if !self.calls.is_empty() {
            out.put_u8(b']');
        }
    }
}

impl CollectedCall {
    /// Writes the call in the older shape.
    fn put_function(&self, out: &mut BytesMut) {
        out.put_slice(b",\"function_call\":{\"name\":");
        write::string(out, &self.name);
        out.put_slice(b",\"arguments\":");
        put_quoted(out, &self.arguments);
        out.put_u8(b'}');
    }
}

fn put_quoted(out: &mut BytesMut, escaped: &[u8]) {
    out.put_u8(b'"');
    out.put_slice(escaped);
    out.put_u8(b'"');
}

fn put_reasoning(out: &mut BytesMut, names: ReasoningNames, mut put: impl FnMut(&mut BytesMut)) {
    if names != ReasoningNames::ReasoningContent {
        out.put_slice(b"\"reasoning\":");
        put(out);
    }
    if names == ReasoningNames::Both {
        out.put_u8(b',');
    }
    if names != ReasoningNames::Reasoning {
        out.put_slice(b"\"reasoning_content\":");
        put(out);
    }
}

fn put_call_start(out: &mut BytesMut, call: u32, id: &str, name: &str, signature: Option<&str>) {
    out.put_slice(b"\"tool_calls\":[{\"index\":");
    write::integer(out, u64::from(call));
    out.put_slice(b",\"id\":");
    write::string(out, id);
    out.put_slice(b",\"type\":\"function\",\"function\":{\"name\":");
    write::string(out, name);
    out.put_slice(b",\"arguments\":\"\"}");
    put_signature(out, signature);
    out.put_slice(b"}]");
}

/// Writes a thought's signature at the place of Gemini's own OpenAI endpoint; clients that know it send it back.
fn put_signature(out: &mut BytesMut, signature: Option<&str>) {
    let Some(signature) = signature else { return };
    out.put_slice(b",\"extra_content\":{\"google\":{\"thought_signature\":");
    write::string(out, signature);
    out.put_slice(b"}}");
}

fn put_call_arguments(out: &mut BytesMut, call: u32, json: &str) {
    out.put_slice(b"\"tool_calls\":[{\"index\":");
    write::integer(out, u64::from(call));
    out.put_slice(b",\"function\":{\"arguments\":");
    write::string(out, json);
    out.put_slice(b"}}]");
}

/// Writes a piece of a call in the older shape; the first one has the name.
fn put_function_call(out: &mut BytesMut, name: Option<&str>, arguments: &str) {
    out.put_slice(b"\"function_call\":{");
    if let Some(name) = name {
        out.put_slice(b"\"name\":");
        write::string(out, name);
        out.put_u8(b',');
    }
    out.put_slice(b"\"arguments\":");
    write::string(out, arguments);
    out.put_u8(b'}');
}

/// Writes the log-probabilities that `put` makes, `{"content":[…],"refusal":null}`, or null if none are `present`.
fn put_logprobs(out: &mut BytesMut, present: bool, put: impl FnOnce(&mut BytesMut)) {
    if !present {
        return out.put_slice(b"null");
    }
    out.put_slice(b"{\"content\":[");
    put(out);
    out.put_slice(b"],\"refusal\":null}");
}

fn put_entries(out: &mut BytesMut, tokens: &[TokenLogprob], names: TokenNames) {
    for (index, token) in tokens.iter().enumerate() {
        if index > 0 {
            out.put_u8(b',');
        }
        write::chat_logprob(out, token, names);
    }
}
