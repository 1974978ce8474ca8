//! Completion answers: as a stream of chunks ([`CompletionEncoder`]) or as one whole answer ([`CompletionCollector`]).
//!
//! Events number candidates as `prompt · best_of + k`. A stream has `best_of == n`, so its choices are the candidates;
//! a whole answer keeps the `n` best candidates of each prompt, numbered `prompt · n + k`.

use bytes::{BufMut, Bytes, BytesMut};

use super::functions::CallShape;
use super::legacy_logprobs::LegacyLogprobs;
use super::stream::{Frames, Identity, Phase, put_finish};
use penstock_types::ErrorShape;
use penstock_types::event::{ChatEvent, FinishReason, StopCause, TokenLogprob, Usage};
use penstock_types::request::{CompleteRequest, TokenNames};
use penstock_types::write;

/// Values that an answer to a completion request needs besides its events.
#[derive(Clone, Debug)]
pub struct CompletionMeta {
    /// Id of the answer, `cmpl-…`.
    pub id: String,
    /// Model name that the client asked for.
    pub model: String,
    /// Creation time in Unix seconds.
    pub created: u64,
    /// Name of the configuration that answers; answers with a seed repeat while it stays the same.
    pub system_fingerprint: Option<String>,
    /// Number of prompts in the request.
    pub prompts: u32,
    /// Number of choices returned per prompt.
    pub n: u32,
    /// Candidates per prompt, at least `n`; `n` when streamed.
    pub best_of: u32,
    /// True if the prompt is put in front of each choice.
    pub echo: bool,
    /// Text put behind each choice, not seen by the model.
    pub suffix: Option<String>,
    /// True if the stream ends with a chunk of usage and no choices.
    pub include_usage: bool,
    /// True if each chunk carries the usage last set by [`CompletionEncoder::set_usage`].
    pub continuous_usage: bool,
    /// True if log-probabilities were asked for.
    pub logprobs: bool,
    /// True if log-probabilities of the prompt (vLLM's shape) were asked for.
    pub prompt_logprobs: bool,
    /// True if the answer carries the ids of its tokens (`return_token_ids`).
    pub return_token_ids: bool,
    /// Form of the token names in log-probabilities.
    pub token_names: TokenNames,
}

impl CompletionMeta {
    /// Values for the answer to `request`.
    pub fn new(request: &CompleteRequest, id: String, created: u64, system_fingerprint: Option<String>) -> Self {
        let stream = request.stream.unwrap_or_default();
        Self {
            id,
            model: request.model.clone(),
            created,
            system_fingerprint,
            prompts: request.prompts.len() as u32,
            n: request.n,
            best_of: request.best_of,
            echo: request.echo,
            suffix: request.suffix.clone(),
            include_usage: stream.include_usage,
            continuous_usage: stream.continuous_usage_stats,
            logprobs: request.logprobs.is_some(),
            prompt_logprobs: request.prompt_logprobs.is_some(),
            return_token_ids: request.return_token_ids,
            token_names: request.token_names,
        }
    }

    fn identity(&self) -> Identity<'_> {
        Identity {
            id: &self.id,
            object: "text_completion",
            created: self.created,
            model: &self.model,
            system_fingerprint: self.system_fingerprint.as_deref(),
        }
    }
}

/// Encoder of events as server-sent chunks. Nothing is allocated per event except room in `out`.
pub struct CompletionEncoder {
    frames: Frames,
    n: u32,
    echo: bool,
    logprobs: bool,
    return_token_ids: bool,
    token_names: TokenNames,
    suffix: String,
    /// Characters sent so far by choice: the text offset of the next token.
    characters: Vec<u64>,
    scratch: LegacyLogprobs,
}

/// Content of one chunk: new text and tokens of one choice.
struct Piece<'a> {
    choice: u32,
    text: &'a str,
    logprobs: &'a [TokenLogprob],
    tokens: &'a [u32],
    prompt_tokens: Option<&'a [u32]>,
}

impl CompletionEncoder {
    /// Creates the encoder for one request.
    pub fn new(meta: &CompletionMeta) -> Self {
        let choices = meta.prompts as usize * meta.n as usize;
        Self {
            frames: Frames::new(&meta.identity(), choices, meta.include_usage, meta.continuous_usage),
            n: meta.n,
            echo: meta.echo,
            logprobs: meta.logprobs,
            return_token_ids: meta.return_token_ids,
            token_names: meta.token_names,
            suffix: meta.suffix.clone().unwrap_or_default(),
            characters: vec![0; choices],
            scratch: LegacyLogprobs::default(),
        }
    }

    /// Appends the chunks of `event`.
    pub fn event(&mut self, event: &ChatEvent, out: &mut BytesMut) {
        match event {
            ChatEvent::Text { choice, text, logprobs, tokens } => {
                self.piece(&Piece { choice: *choice, text, logprobs, tokens, prompt_tokens: None }, out);
            }
            // A completion has no field for reasoning, so it is sent as text.
            ChatEvent::Reasoning { choice, text } | ChatEvent::Refusal { choice, text } => {
                self.piece(&Piece { choice: *choice, text, logprobs: &[], tokens: &[], prompt_tokens: None }, out);
            }
            // Events that a plain continuation cannot express.
            ChatEvent::ToolCallStart { .. }
            | ChatEvent::ToolCallArguments { .. }
            | ChatEvent::ReasoningSignature { .. }
            | ChatEvent::Vector { .. }
            | ChatEvent::Score { .. }
            | ChatEvent::Raw(_) => {}
            ChatEvent::Finish { choice, reason, stop } => self.finish(*choice, *reason, stop.as_ref(), out),
            ChatEvent::Prompt { choice, text, logprobs, tokens } => {
                let (text, logprobs) = if self.echo { (text.as_str(), logprobs.as_slice()) } else { ("", &[][..]) };
                let prompt_tokens = self.return_token_ids.then_some(tokens.as_slice());
                for choice in *choice..choice.saturating_add(self.n) {
                    self.piece(&Piece { choice, text, logprobs, tokens: &[], prompt_tokens }, out);
                }
            }
            ChatEvent::Usage(usage) => {
                self.frames.set_usage(*usage);
                self.frames.usage_chunk(out);
            }
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

    fn piece(&mut self, piece: &Piece<'_>, out: &mut BytesMut) {
        let logprobs = if self.logprobs { piece.logprobs } else { &[] };
        let tokens = if self.return_token_ids { piece.tokens } else { &[] };
        if piece.text.is_empty() && logprobs.is_empty() && tokens.is_empty() && piece.prompt_tokens.is_none() {
            return;
        }
        let Some(phase) = self.frames.live(piece.choice) else { return };
        *phase = Phase::Open;
        self.frames.open(piece.choice, out);
        out.put_slice(b",\"text\":");
        write::string(out, piece.text);
        out.put_slice(b",\"logprobs\":");
        if logprobs.is_empty() {
            out.put_slice(b"null");
        } else {
            let characters = &mut self.characters[piece.choice as usize];
            self.scratch.restart(*characters);
            self.scratch.extend(logprobs, self.token_names);
            self.scratch.put(None, out);
            *characters = self.scratch.characters();
        }
        out.put_slice(b",\"finish_reason\":null,\"stop_reason\":null");
        if !tokens.is_empty() {
            out.put_slice(b",\"token_ids\":");
            write::integers(out, tokens);
        }
        if let Some(tokens) = piece.prompt_tokens {
            out.put_slice(b",\"prompt_token_ids\":");
            write::integers(out, tokens);
        }
        self.frames.close(None, out);
    }

    fn finish(&mut self, choice: u32, reason: FinishReason, stop: Option<&StopCause>, out: &mut BytesMut) {
        let Some(phase) = self.frames.live(choice) else { return };
        *phase = Phase::Finished;
        self.frames.open(choice, out);
        out.put_slice(b",\"text\":");
        write::string(out, &self.suffix);
        out.put_slice(b",\"logprobs\":null");
        put_finish(out, reason, stop, CallShape::Tools);
        self.frames.close(None, out);
    }
}

/// Collector of events into one whole answer.
pub struct CompletionCollector {
    meta: CompletionMeta,
    prompts: Vec<CollectedPrompt>,
    candidates: Vec<Candidate>,
    usage: Usage,
}

/// Text and log-probabilities of a prompt, once for all of its choices; texts are kept escaped.
#[derive(Default)]
struct CollectedPrompt {
    text: BytesMut,
    logprobs: LegacyLogprobs,
    prompt_logprobs: BytesMut,
    tokens: Vec<u32>,
}

#[derive(Default)]
struct Candidate {
    text: BytesMut,
    logprobs: LegacyLogprobs,
    tokens: Vec<u32>,
    logprob_sum: f64,
    logprob_count: u32,
    score: Option<f32>,
    finish: Option<(FinishReason, Option<StopCause>)>,
}

impl CompletionCollector {
    /// Creates the collector for one request.
    pub fn new(meta: CompletionMeta) -> Self {
        let prompts = (0..meta.prompts).map(|_| CollectedPrompt::default()).collect();
        let candidates = (0..meta.prompts * meta.best_of).map(|_| Candidate::default()).collect();
        Self { meta, prompts, candidates, usage: Usage::default() }
    }

    /// Adds the content of `event`.
    pub fn event(&mut self, event: &ChatEvent) {
        match event {
            ChatEvent::Text { choice, text, logprobs, tokens } => {
                let (wanted, names) = (self.meta.logprobs, self.meta.token_names);
                if let Some(candidate) = self.live(*choice) {
                    candidate.logprobs.extend(if wanted { logprobs } else { &[] }, names);
                    candidate.add(text, tokens);
                    candidate.count(logprobs);
                }
            }
            ChatEvent::Reasoning { choice, text } | ChatEvent::Refusal { choice, text } => {
                if let Some(candidate) = self.live(*choice) {
                    candidate.add(text, &[]);
                }
            }
            // Events that a plain continuation cannot express.
            ChatEvent::ToolCallStart { .. }
            | ChatEvent::ToolCallArguments { .. }
            | ChatEvent::ReasoningSignature { .. }
            | ChatEvent::Vector { .. }
            | ChatEvent::Score { .. }
            | ChatEvent::Raw(_) => {}
            ChatEvent::Finish { choice, reason, stop } => {
                if let Some(candidate) = self.live(*choice) {
                    candidate.finish = Some((*reason, stop.clone()));
                }
            }
            ChatEvent::Prompt { choice, text, logprobs, tokens } => self.prompt(*choice, text, logprobs, tokens),
            ChatEvent::Usage(usage) => self.usage = *usage,
        }
    }

    /// Sets a candidate's mean log-probability, by which the best are chosen. Without a score the mean is taken over
    /// the log-probabilities in the candidate's events.
    pub fn score(&mut self, choice: u32, mean_logprob: f32) {
        if let Some(candidate) = self.candidates.get_mut(choice as usize) {
            candidate.score = Some(mean_logprob);
        }
    }

    /// Bytes held. A whole answer grows with the generated text, so the caller bounds it.
    pub fn bytes(&self) -> usize {
        let prompts = self.prompts.iter().map(|prompt| {
            prompt.text.len() + prompt.logprobs.bytes() + prompt.prompt_logprobs.len() + 4 * prompt.tokens.len()
        });
        let candidates = self
            .candidates
            .iter()
            .map(|candidate| candidate.text.len() + candidate.logprobs.bytes() + 4 * candidate.tokens.len());
        prompts.sum::<usize>() + candidates.sum::<usize>()
    }

    /// Body of the answer; `None` if a candidate has not finished.
    pub fn finish(self) -> Option<Bytes> {
        let mut out = BytesMut::with_capacity(1_024 + self.bytes());
        self.meta.identity().put(&mut out);
        let best_of = self.meta.best_of as usize;
        let mut index = 0;
        for (prompt, candidates) in self.prompts.iter().zip(self.candidates.chunks(best_of.max(1))) {
            for chosen in self.chosen(candidates) {
                if index > 0 {
                    out.put_u8(b',');
                }
                candidates[chosen].put(index, prompt, &self.meta, &mut out)?;
                index += 1;
            }
        }
        if self.candidates.iter().any(|candidate| candidate.finish.is_none()) {
            return None;
        }
        out.put_slice(b"],\"usage\":");
        write::usage(&mut out, &self.usage);
        out.put_u8(b'}');
        Some(out.freeze())
    }

    fn chosen(&self, candidates: &[Candidate]) -> Vec<usize> {
        let n = self.meta.n as usize;
        if candidates.len() <= n {
            return (0..candidates.len()).collect();
        }
        let means: Vec<f32> = candidates.iter().map(Candidate::mean_logprob).collect();
        best_of(&means, n)
    }

    fn live(&mut self, choice: u32) -> Option<&mut Candidate> {
        self.candidates.get_mut(choice as usize).filter(|candidate| candidate.finish.is_none())
    }

    fn prompt(&mut self, choice: u32, text: &str, logprobs: &[TokenLogprob], tokens: &[u32]) {
        let Some(number) = choice.checked_div(self.meta.best_of) else { return };
        let Some(prompt) = self.prompts.get_mut(number as usize) else { return };
        *prompt = CollectedPrompt { tokens: tokens.to_vec(), ..CollectedPrompt::default() };
        if self.meta.prompt_logprobs {
            write::prompt_logprobs(&mut prompt.prompt_logprobs, logprobs);
        }
        if !self.meta.echo {
            return;
        }
        write::escaped(&mut prompt.text, text);
        if self.meta.logprobs {
            prompt.logprobs.extend(logprobs, self.meta.token_names);
        }
        let characters = prompt.logprobs.characters();
        let first = (number * self.meta.best_of) as usize;
        for candidate in self.candidates.iter_mut().skip(first).take(self.meta.best_of as usize) {
            candidate.logprobs = LegacyLogprobs::after(characters);
        }
    }
}

impl Candidate {
    fn add(&mut self, text: &str, tokens: &[u32]) {
        write::escaped(&mut self.text, text);
        self.tokens.extend_from_slice(tokens);
    }

    fn count(&mut self, logprobs: &[TokenLogprob]) {
        for logprob in logprobs.iter().filter_map(|token| token.logprob) {
            self.logprob_sum += f64::from(logprob);
            self.logprob_count += 1;
        }
    }

    /// Mean log-probability of the candidate; minus infinity when unknown, so that unknown candidates come last.
    fn mean_logprob(&self) -> f32 {
        match self.score {
            Some(score) => score,
            None if self.logprob_count == 0 => f32::NEG_INFINITY,
            None => (self.logprob_sum / f64::from(self.logprob_count)) as f32,
        }
    }

    fn put(&self, index: usize, prompt: &CollectedPrompt, meta: &CompletionMeta, out: &mut BytesMut) -> Option<()> {
        let (reason, stop) = self.finish.as_ref()?;
        out.put_slice(b"{\"index\":");
        write::integer(out, index as u64);
        out.put_slice(b",\"text\":\"");
        out.put_slice(&prompt.text);
        out.put_slice(&self.text);
        write::escaped(out, meta.suffix.as_deref().unwrap_or_default());
        out.put_slice(b"\",\"logprobs\":");
        if meta.logprobs {
            self.logprobs.put(meta.echo.then_some(&prompt.logprobs), out);
        } else {
            out.put_slice(b"null");
        }
        put_finish(out, *reason, stop.as_ref(), CallShape::Tools);
        // vLLM's clients read these keys even where they did not ask for them.
        out.put_slice(b",\"prompt_logprobs\":");
        out.put_slice(if prompt.prompt_logprobs.is_empty() { b"null" } else { &prompt.prompt_logprobs });
        out.put_slice(b",\"token_ids\":");
        write::asked_integers(out, meta.return_token_ids, &self.tokens);
        out.put_slice(b",\"prompt_token_ids\":");
        write::asked_integers(out, meta.return_token_ids, &prompt.tokens);
        out.put_u8(b'}');
        Some(())
    }
}

/// Indexes of the `n` best mean log-probabilities, best first; of equals the earlier comes first, and not-a-number
/// comes last.
pub fn best_of(means: &[f32], n: usize) -> Vec<usize> {
    let rank = |index: usize| if means[index].is_nan() { f32::NEG_INFINITY } else { means[index] };
    let mut order: Vec<usize> = (0..means.len()).collect();
    order.sort_by(|&left, &right| rank(right).total_cmp(&rank(left)));
    order.truncate(n);
    order
}
