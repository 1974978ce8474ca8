//! Decoder of one choice: tokens in, events out.
//!
//! ```text
//! token ── bytes ── characters ── stop strings ── reasoning ── tool calls ── events
//! ```
//!
//! Each stage holds back text that it cannot judge yet and releases it as soon as it can. All stages work on
//! characters, so events carry the same text, reasoning and calls whatever the token borders were.

use std::{collections::VecDeque, ops::Range, sync::Arc};

use penstock_proto::frames::{Token, TokenLogprobs};
use penstock_types::{ChatEvent, FinishReason, TokenLogprob, TokenPlace, event::StopCause};

use crate::{
    detokenize::Detokenizer,
    model::TextModel,
    piece::{Piece, Pieces},
    reasoning::ReasoningSplitter,
    stop::StopMatcher,
    tools::{CallableTool, Harmony, ToolFormat, ToolParser},
};

/// Most calls of an answer whose ids are the model's own.
const CALL_IDS_MAX: usize = 256;

/// Settings by which the tokens of one choice become text and events.
#[derive(Clone, Debug, Default)]
pub struct ChoiceOptions {
    /// Index of the choice in its answer, for the events.
    pub choice: u32,
    /// Stop strings: the text ends at the first one that is complete.
    pub stop: Vec<String>,
    /// True to leave the stop string or the client's stop token in the text.
    pub include_stop: bool,
    /// The client's stop tokens, reported as the cause of the end.
    pub stop_token_ids: Vec<u32>,
    /// True if the model's end tokens are text like others.
    pub ignore_eos: bool,
    /// Number of tokens before stop strings count, as in vLLM.
    pub min_tokens: u64,
    /// True to put control tokens into the text.
    pub keep_special: bool,
    /// True to attach log-probabilities to text.
    pub logprobs: bool,
    /// True to attach token ids to text.
    pub return_tokens: bool,
    /// True to look for tool calls, if the model's format is known.
    pub parse_tools: bool,
    /// Functions of the request: formats that write values without types take them from the schemas here.
    pub tools: Arc<[CallableTool]>,
    /// True if the answer ends with its first complete call.
    pub one_call: bool,
    /// True to separate reasoning from the text, if the model marks it.
    pub parse_reasoning: bool,
    /// True if the prompt ends inside reasoning ([`crate::ChatPrompt::opens_reasoning`]).
    pub starts_in_reasoning: bool,
    /// Random bytes that the ids of tool calls are made from; equal bytes give equal ids.
    pub call_ids: [u8; 16],
}

/// Result of decoding one token: the events it completes, and whether the choice is over.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decoded {
    /// Events that the token completes, in the order of the text.
    pub events: Vec<ChatEvent>,
    /// Set when a stop string, or the only allowed call, is complete: the caller cancels the choice and calls
    /// [`ChoiceDecoder::finish`]. The token counts as output, later ones do not.
    pub stopped: bool,
}

/// Reason why no more tokens come for a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The worker met a stop token, or the choice was cancelled after [`Decoded::stopped`].
    Stop {
        /// Id of the stop token; `None` where another condition ended the choice.
        token: Option<u32>,
    },
    /// The choice reached `max_tokens` or the end of the model's context.
    Length,
}

/// Decoder of one choice. Memory is bounded by the text of the choice: only held-back text is kept.
pub struct ChoiceDecoder {
    model: Arc<TextModel>,
    options: ChoiceOptions,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    stopped_by: Option<String>,
    reasoning: Option<ReasoningSplitter>,
    tools: Option<Box<dyn ToolParser>>,
    /// Bytes of text decoded in front of the stop matcher, and passed on behind it.
    decoded_bytes: usize,
    released_bytes: usize,
    logprobs: VecDeque<(usize, usize, TokenLogprob)>,
    tokens: Vec<u32>,
    calls: u32,
    calls_complete: u32,
    /// Ids that the model wrote for its calls.
    written_ids: Vec<String>,
    completion_tokens: u64,
    reasoning_tokens: u64,
}

impl std::fmt::Debug for ChoiceDecoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChoiceDecoder").field("choice", &self.options.choice).finish_non_exhaustive()
    }
}

impl ChoiceDecoder {
    /// Creates a decoder for the first token of an answer.
    pub fn new(model: Arc<TextModel>, options: ChoiceOptions) -> Self {
        let channels = model.tool_format() == Some(ToolFormat::Harmony);
        let markers = model.reasoning_markers().filter(|_| options.parse_reasoning && !channels);
        let (calls, reasoning) = (options.parse_tools, options.parse_reasoning);
        let tools: Option<Box<dyn ToolParser>> = match model.tool_format() {
            Some(_) if channels && (calls || reasoning) => {
                Some(Box::new(Harmony::new(calls, reasoning, options.starts_in_reasoning)))
            }
            Some(format) if calls && !channels => Some(format.parser(&options.tools)),
            _ => None,
        };
        Self {
            // The detokenizer keeps special tokens, since marks of reasoning and calls may be special; this decoder
            // judges them.
            detokenizer: Detokenizer::new(true, false),
            stops: StopMatcher::new(&options.stop),
            stopped_by: None,
            reasoning: markers.map(|markers| ReasoningSplitter::new(markers, options.starts_in_reasoning)),
            tools,
            decoded_bytes: 0,
            released_bytes: 0,
            logprobs: VecDeque::new(),
            tokens: Vec::new(),
            calls: 0,
            calls_complete: 0,
            written_ids: Vec::new(),
            completion_tokens: 0,
            reasoning_tokens: 0,
            model,
            options,
        }
    }

    /// Takes the next token. After [`Decoded::stopped`] tokens are ignored.
    pub fn push(&mut self, token: &Token) -> Decoded {
        if self.is_over() {
            return Decoded { events: Vec::new(), stopped: true };
        }
        self.completion_tokens += 1;
        if self.options.return_tokens {
            self.tokens.push(token.id);
        }
        let reasoned = self.in_reasoning();
        let mut pieces = Pieces::default();
        if self.is_text(token.id) {
            let mut text = String::new();
            self.detokenizer.push(&self.model, token.id, &mut text);
            let start = self.decoded_bytes;
            self.decoded_bytes += text.len();
            self.keep_logprob(token, start..self.decoded_bytes.max(start + 1), TokenPlace::Text);
            self.through_stops(&text, &mut pieces);
        } else {
            self.keep_logprob(token, self.decoded_bytes..self.decoded_bytes, TokenPlace::Control);
        }
        if self.stopped_by.is_some() {
            self.flush(&mut pieces);
        }
        self.reasoning_tokens += u64::from(reasoned && self.in_reasoning());
        let mut events = self.events(pieces);
        if self.in_reasoning() || self.tools.as_ref().is_some_and(|tools| tools.in_call()) {
            // Log-probabilities that still wait belong to no text that may follow.
            self.tell_apart(&mut events);
        }
        Decoded { events, stopped: self.is_over() }
    }

    /// Returns true if the choice has ended, so that later tokens are ignored.
    fn is_over(&self) -> bool {
        self.stopped_by.is_some() || self.has_its_call()
    }

    fn has_its_call(&self) -> bool {
        self.options.one_call && self.calls_complete > 0
    }

    /// Ends the choice: returns the held-back text, and one [`ChatEvent::Finish`].
    pub fn finish(&mut self, end: End) -> Vec<ChatEvent> {
        let mut pieces = Pieces::default();
        if !self.is_over() {
            let mut text = String::new();
            self.detokenizer.finish(&mut text);
            self.decoded_bytes += text.len();
            self.through_stops(&text, &mut pieces);
            self.flush(&mut pieces);
        }
        let mut events = self.events(pieces);
        self.tell_apart(&mut events);
        if !self.tokens.is_empty() {
            let tokens = std::mem::take(&mut self.tokens);
            events.push(self.text_event(String::new(), Vec::new(), tokens));
        }
        let (reason, stop) = match (&self.stopped_by, end) {
            (Some(stop), _) => (FinishReason::Stop, Some(StopCause::Text(stop.clone()))),
            (None, End::Length) => (FinishReason::Length, None),
            (None, End::Stop { token }) => {
                let client = token.filter(|token| self.options.stop_token_ids.contains(token));
                let reason = if self.calls_complete > 0 { FinishReason::ToolCalls } else { FinishReason::Stop };
                (reason, client.map(StopCause::Token))
            }
        };
        events.push(ChatEvent::Finish { choice: self.options.choice, reason, stop });
        events
    }

    /// Tokens taken, through the one that completed a stop string.
    pub fn completion_tokens(&self) -> u64 {
        self.completion_tokens
    }

    /// Part of the completion tokens that lies inside reasoning.
    pub fn reasoning_tokens(&self) -> u64 {
        self.reasoning_tokens
    }

    /// Returns true if the last token left the choice inside its reasoning.
    pub fn in_reasoning(&self) -> bool {
        self.reasoning.as_ref().is_some_and(ReasoningSplitter::is_reasoning)
            || self.tools.as_ref().is_some_and(|tools| tools.in_reasoning())
    }

    /// Returns true if the token's text belongs to the visible stream, as text or as a mark.
    fn is_text(&self, id: u32) -> bool {
        let options = &self.options;
        let ends = options.stop_token_ids.contains(&id);
        if ends && !options.include_stop || !options.ignore_eos && !ends && self.model.eos_tokens().contains(&id) {
            return false;
        }
        options.keep_special || !self.model.is_special(id) || self.is_mark(id)
    }

    /// Returns true if a special token is a mark that one of the parsers waits for.
    fn is_mark(&self, id: u32) -> bool {
        let Ok(name) = std::str::from_utf8(self.model.vocabulary().token(id)) else { return false };
        let markers = self.model.reasoning_markers().filter(|_| self.reasoning.is_some());
        let format = self.model.tool_format().filter(|_| self.tools.is_some());
        markers.is_some_and(|markers| markers.contain(name))
            || format.is_some_and(|format| format.marks().contains(&name))
    }

    /// Keeps the log-probability of a token until the place of its bytes (`raw`, in the raw text) is known.
    fn keep_logprob(&mut self, token: &Token, raw: Range<usize>, place: TokenPlace) {
        if let Some(logprobs) = token.logprobs.as_ref().filter(|_| self.options.logprobs) {
            let entry = self.logprob(token.id, logprobs, place);
            self.logprobs.push_back((raw.start, raw.end, entry));
        }
    }

    fn logprob(&self, id: u32, logprobs: &TokenLogprobs, place: TokenPlace) -> TokenLogprob {
        let top = logprobs.top_tokens.iter().zip(&logprobs.top_logprobs);
        TokenLogprob {
            place,
            token: id,
            bytes: self.model.token_bytes(id),
            logprob: Some(logprobs.logprob).filter(|value| !value.is_nan()),
            top: top.map(|(&id, &logprob)| (id, self.model.token_bytes(id), logprob)).collect(),
        }
    }

    fn through_stops(&mut self, text: &str, pieces: &mut Pieces) {
        if self.completion_tokens <= self.options.min_tokens {
            return self.through_parsers(text, pieces);
        }
        let mut released = String::new();
        self.stopped_by = self.stops.push(text, self.options.include_stop, &mut released);
        self.through_parsers(&released, pieces);
    }

    fn through_parsers(&mut self, text: &str, pieces: &mut Pieces) {
        let start = self.released_bytes;
        self.released_bytes += text.len();
        let tools = &mut self.tools;
        let mut answer = |at: usize, c: char, out: &mut Pieces| match tools {
            Some(tools) => tools.push(at, c, out),
            None => out.text(at, c.encode_utf8(&mut [0; 4])),
        };
        match &mut self.reasoning {
            Some(reasoning) => {
                text.char_indices().for_each(|(at, c)| reasoning.push(start + at, c, pieces, &mut answer))
            }
            None => text.char_indices().for_each(|(at, c)| answer(start + at, c, pieces)),
        }
    }

    /// Releases the held-back text of every stage, at the end of the text.
    fn flush(&mut self, pieces: &mut Pieces) {
        let mut rest = String::new();
        self.stops.finish(&mut rest);
        self.through_parsers(&rest, pieces);
        let end = self.released_bytes;
        let tools = &mut self.tools;
        if let Some(reasoning) = &mut self.reasoning {
            reasoning.finish(end, pieces, &mut |at, c, out| match tools {
                Some(tools) => tools.push(at, c, out),
                None => out.text(at, c.encode_utf8(&mut [0; 4])),
            });
        }
        if let Some(tools) = tools {
            tools.finish(end, pieces);
        }
    }

    fn events(&mut self, pieces: Pieces) -> Vec<ChatEvent> {
        let choice = self.options.choice;
        let mut events: Vec<ChatEvent> = Vec::with_capacity(pieces.0.len());
        for piece in pieces.0 {
            if self.has_its_call() {
                break;
            }
            match piece {
                Piece::Text { at, text } => self.text_piece(at, text, &mut events),
                Piece::Reasoning(text) => events.push(ChatEvent::Reasoning { choice, text }),
                Piece::CallStart { name, id } => {
                    let id = self.call_id(id);
                    events.push(ChatEvent::ToolCallStart { choice, call: self.calls, id, name, signature: None });
                    self.calls += 1;
                }
                Piece::CallArguments(json) => {
                    events.push(ChatEvent::ToolCallArguments { choice, call: self.calls.saturating_sub(1), json });
                }
                Piece::CallEnd => self.calls_complete += 1,
            }
        }
        events
    }

    /// Appends a piece of text, with the tokens that made it, and joins it to text just before.
    fn text_piece(&mut self, at: usize, new: String, events: &mut Vec<ChatEvent>) {
        let end = at + new.len();
        let mut found = Vec::new();
        while let Some(&(from, to, _)) = self.logprobs.front()
            && from < end
        {
            let (_, _, entry) = self.logprobs.pop_front().expect("looked at");
            found.push(if to > at { entry } else { apart(entry) });
        }
        let ids = std::mem::take(&mut self.tokens);
        if let Some(ChatEvent::Text { text, logprobs, tokens, .. }) = events.last_mut() {
            text.push_str(&new);
            logprobs.extend(found);
            tokens.extend(ids);
        } else {
            events.push(self.text_event(new, found, ids));
        }
    }

    /// Emits the waiting log-probabilities of tokens that are in no text.
    fn tell_apart(&mut self, events: &mut Vec<ChatEvent>) {
        if !self.logprobs.is_empty() {
            let waiting = std::mem::take(&mut self.logprobs);
            let (entries, ids) =
                (waiting.into_iter().map(|(_, _, entry)| apart(entry)).collect(), std::mem::take(&mut self.tokens));
            events.push(self.text_event(String::new(), entries, ids));
        }
    }

    fn text_event(&self, text: String, logprobs: Vec<TokenLogprob>, tokens: Vec<u32>) -> ChatEvent {
        ChatEvent::Text { choice: self.options.choice, text, logprobs, tokens }
    }

    /// Id of the next call: the one that the model wrote, if it wrote one that is new in this answer; otherwise `call_`
    /// and 24 hexadecimal digits.
    fn call_id(&mut self, written: Option<String>) -> String {
        if let Some(id) = written.filter(|id| !self.written_ids.contains(id) && self.written_ids.len() < CALL_IDS_MAX) {
            self.written_ids.push(id.clone());
            return id;
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.options.call_ids);
        hasher.update(&self.options.choice.to_le_bytes());
        hasher.update(&self.calls.to_le_bytes());
        format!("call_{}", &hasher.finalize().to_hex()[..24])
    }
}

/// Log-probability entry of a token whose text is outside the answer's text.
fn apart(entry: TokenLogprob) -> TokenLogprob {
    let place = if entry.place == TokenPlace::Text { TokenPlace::Apart } else { entry.place };
    TokenLogprob { place, ..entry }
}
