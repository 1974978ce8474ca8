//! `GenerateContentResponse` decoded into events: a chunk of a stream, a whole answer and an array of chunks share one
//! shape.

use crate::answer_body::{Answer, truncated};
use crate::answer_json as value;
use crate::gemini::signature::{Signed, kept};
use crate::openai::provider::fault;
use penstock_types::codec::{FaultClass, ProviderFault};
use penstock_types::event::{ChatEvent, FinishReason, TokenLogprob, TokenPlace, Usage};
use penstock_types::json::{self, Fault, Kind};
use penstock_types::json_text::compacted;

/// Most calls of one choice; an answer with more is refused as garbled.
const CALLS_MAX: u32 = 1_024;

/// Decoder of one Gemini answer, chunk by chunk.
pub(super) struct Reader {
    choices: Vec<Choice>,
    usage: Option<Usage>,
    /// The provider's id of the answer. Ids made for calls without one contain it, so that they differ between
    /// answers.
    id: String,
    complete: bool,
}

#[derive(Clone, Default)]
struct Choice {
    calls: u32,
    finished: bool,
}

impl Reader {
    /// Creates the decoder of an answer with `n` choices.
    pub(super) fn new(n: u32) -> Self {
        Self { choices: vec![Choice::default(); n as usize], usage: None, id: String::new(), complete: false }
    }

    fn chunk(&mut self, reader: &mut json::Reader<'_>, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        let (mut blocked, mut candidates) = (None, Vec::new());
        value::fields(reader, |reader, key| match key {
            "candidates" => value::items(reader, |reader, _| {
                candidates.push(Candidate::read(reader)?);
                Ok(())
            }),
            "usageMetadata" => {
                self.usage = Some(usage(reader)?);
                Ok(())
            }
            "responseId" => {
                let plain = |character: &char| character.is_ascii_alphanumeric() || matches!(character, '-' | '_');
                self.id = value::string(reader)?.unwrap_or_default().chars().filter(plain).take(32).collect();
                Ok(())
            }
            "promptFeedback" => {
                blocked = feedback(reader)?;
                Ok(())
            }
            _ => reader.skip(),
        })?;
        if let Some(reason) = blocked {
            let message = format!("The provider's policy blocked the prompt ({reason}).");
            return Err(ProviderFault::new(FaultClass::ContentPolicy, message).code(reason));
        }
        candidates.into_iter().try_for_each(|candidate| self.candidate(candidate, out))
    }

    fn candidate(&mut self, candidate: Candidate, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        let number = candidate.index;
        let Some(choice) = self.choices.get_mut(number as usize).filter(|choice| !choice.finished) else {
            return Ok(());
        };
        let Candidate { parts, mut logprobs, finish, .. } = candidate;
        let last_text = parts.iter().rposition(|part| matches!(part.piece, Piece::Text { thought: false, .. }));
        for (at, part) in parts.into_iter().enumerate() {
            match part.piece {
                Piece::Text { text, thought } => {
                    if thought && !text.is_empty() {
                        out.push(ChatEvent::Reasoning { choice: number, text });
                    } else if !thought {
                        let logprobs = if Some(at) == last_text { std::mem::take(&mut logprobs) } else { Vec::new() };
                        if !text.is_empty() || !logprobs.is_empty() {
                            out.push(ChatEvent::Text { choice: number, text, logprobs, tokens: Vec::new() });
                        }
                    }
                    if let Some(given) = part.signature {
                        let signature = kept(&given, Signed::Reasoning);
                        out.push(ChatEvent::ReasoningSignature { choice: number, signature });
                    }
                }
                Piece::Call { id, name, arguments } => {
                    let call = choice.calls;
                    if call == CALLS_MAX {
                        return Err(ProviderFault::new(
                            FaultClass::Garbled,
                            "The provider's answer has too many calls.",
                        ));
                    }
                    choice.calls += 1;
                    let id = id.unwrap_or_else(|| format!("call_{}_{number}_{call}", self.id));
                    let signature = part.signature.map(|given| kept(&given, Signed::Call));
                    out.push(ChatEvent::ToolCallStart { choice: number, call, id, name, signature });
                    out.push(ChatEvent::ToolCallArguments { choice: number, call, json: arguments });
                }
                Piece::Other => {}
            }
        }
        if let Some((word, message)) = finish {
            let reason = finish_reason(&word, message.as_deref(), choice.calls > 0)?;
            choice.finished = true;
            out.push(ChatEvent::Finish { choice: number, reason, stop: None });
        }
        Ok(())
    }
}

impl Answer for Reader {
    fn take(&mut self, _: &[u8], json: &[u8], out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        if is_error(json)? {
            return Err(super::reclassed(fault::fault_text(json), json));
        }
        let mut reader = json::Reader::new(json)?;
        match reader.kind()? {
            Kind::Array => {
                // A stream without `alt=sse`, read as a whole.
                let mut failed = Ok(());
                reader.array(|reader, _| {
                    if failed.is_ok() {
                        let text = reader.raw()?.text;
                        failed = self.take(b"", text.as_bytes(), out);
                        return Ok(());
                    }
                    reader.skip()
                })?;
                failed?;
            }
            _ => self.chunk(&mut reader, out)?,
        }
        reader.end()?;
        Ok(())
    }

    fn done(&mut self, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        if self.complete {
            return Ok(());
        }
        if self.choices.iter().any(|choice| !choice.finished) {
            return Err(truncated());
        }
        self.complete = true;
        out.extend(self.usage.map(ChatEvent::Usage));
        Ok(())
    }

    /// Handles the end of a stream. Gemini sends no end marker: the stream is complete when every choice has finished.
    fn cut(&mut self, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        self.done(out)
    }

    fn usage(&self) -> Option<Usage> {
        self.usage
    }
}

/// Whether a chunk is an error object.
fn is_error(json: &[u8]) -> Result<bool, Fault> {
    let mut found = false;
    let mut reader = json::Reader::new(json)?;
    if reader.kind()? == Kind::Object {
        reader.object(|reader, key| {
            found |= key == "error";
            reader.skip()
        })?;
    }
    Ok(found)
}

/// Finish reason of Google's word; some words mean that there is no answer and become a fault.
fn finish_reason(word: &str, message: Option<&str>, calls: bool) -> Result<FinishReason, ProviderFault> {
    Ok(match word {
        "STOP" if calls => FinishReason::ToolCalls,
        "STOP" | "FINISH_REASON_UNSPECIFIED" | "CONTINUATION" => FinishReason::Stop,
        "MAX_TOKENS" => FinishReason::Length,
        "SAFETY"
        | "RECITATION"
        | "LANGUAGE"
        | "BLOCKLIST"
        | "PROHIBITED_CONTENT"
        | "SPII"
        | "MODEL_ARMOR"
        | "ESCALATION"
        | "IMAGE_SAFETY"
        | "IMAGE_PROHIBITED_CONTENT"
        | "IMAGE_RECITATION" => FinishReason::ContentFilter,
        // MALFORMED_FUNCTION_CALL, UNEXPECTED_TOOL_CALL, OTHER…: the model failed, and another attempt can succeed.
        other => {
            let what = message.unwrap_or("the model gave no answer");
            let message = format!("The provider ended the answer with {}: {}.", json::short(other), json::short(what));
            return Err(ProviderFault::new(FaultClass::Server, message).code(json::short(other)));
        }
    })
}

fn feedback(reader: &mut json::Reader<'_>) -> Result<Option<String>, Fault> {
    let mut reason = None;
    value::fields(reader, |reader, key| {
        match key {
            "blockReason" => reason = value::string(reader)?.map(|word| json::short(&word)),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    Ok(reason.filter(|word| word != "BLOCKED_REASON_UNSPECIFIED" && word != "BLOCK_REASON_UNSPECIFIED"))
}

fn usage(reader: &mut json::Reader<'_>) -> Result<Usage, Fault> {
    let mut usage = Usage::default();
    let (mut said, mut tools) = (0, 0);
    value::fields(reader, |reader, key| {
        let field = match key {
            "promptTokenCount" => &mut usage.prompt_tokens,
            "candidatesTokenCount" => &mut said,
            "thoughtsTokenCount" => &mut usage.reasoning_tokens,
            "cachedContentTokenCount" => &mut usage.cached_tokens,
            // Tokens brought in by Google's own tools are billed as input.
            "toolUsePromptTokenCount" => &mut tools,
            _ => return reader.skip(),
        };
        *field = value::count(reader)?.unwrap_or_default();
        Ok(())
    })?;
    usage.prompt_tokens = usage.prompt_tokens.saturating_add(tools);
    usage.completion_tokens = said.saturating_add(usage.reasoning_tokens);
    Ok(usage)
}

#[derive(Default)]
struct Candidate {
    index: u32,
    parts: Vec<Part>,
    logprobs: Vec<TokenLogprob>,
    /// Finish word and the provider's message about it.
    finish: Option<(String, Option<String>)>,
}

struct Part {
    piece: Piece,
    signature: Option<String>,
}

enum Piece {
    Text {
        text: String,
        thought: bool,
    },
    Call {
        id: Option<String>,
        name: String,
        arguments: String,
    },
    /// A part of Google's own tools, which are never asked for.
    Other,
}

impl Candidate {
    fn read(reader: &mut json::Reader<'_>) -> Result<Self, Fault> {
        let (mut out, mut word, mut message) = (Self::default(), None, None);
        value::fields(reader, |reader, key| {
            match key {
                "index" => out.index = value::count(reader)?.and_then(|at| u32::try_from(at).ok()).unwrap_or(u32::MAX),
                "finishReason" => word = value::string(reader)?.map(String::from),
                "finishMessage" => message = value::string(reader)?.map(String::from),
                "logprobsResult" => out.logprobs = logprobs(reader)?,
                "content" => value::fields(reader, |reader, key| match key {
                    "parts" => value::items(reader, |reader, _| {
                        out.parts.push(Part::read(reader)?);
                        Ok(())
                    }),
                    _ => reader.skip(),
                })?,
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        out.finish = word.filter(|word| !word.is_empty()).map(|word| (word, message));
        Ok(out)
    }
}

impl Part {
    fn read(reader: &mut json::Reader<'_>) -> Result<Self, Fault> {
        let (mut piece, mut thought, mut signature) = (Piece::Other, false, None);
        value::fields(reader, |reader, key| {
            match key {
                "text" => {
                    let text = value::string(reader)?.unwrap_or_default().into_owned();
                    piece = Piece::Text { text, thought: false };
                }
                "thought" => thought = reader.kind()? == Kind::Bool && reader.boolean()?,
                "thoughtSignature" => signature = value::string(reader)?.map(String::from),
                "functionCall" => piece = call(reader)?,
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        if signature.is_some() && matches!(piece, Piece::Other) {
            piece = Piece::Text { text: String::new(), thought };
        }
        if let Piece::Text { thought: is, .. } = &mut piece {
            *is = thought;
        }
        Ok(Self { piece, signature })
    }
}

fn call(reader: &mut json::Reader<'_>) -> Result<Piece, Fault> {
    let (mut id, mut name, mut arguments) = (None, String::new(), "{}".to_owned());
    value::fields(reader, |reader, key| {
        match key {
            "id" => id = value::string(reader)?.map(String::from).filter(|id| !id.is_empty()),
            "name" => name = value::string(reader)?.unwrap_or_default().into_owned(),
            "args" => arguments = compacted(reader.raw()?.text),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    Ok(Piece::Call { id, name, arguments })
}

/// Reads a `logprobsResult`: `{topCandidates:[{candidates:[…]}], chosenCandidates:[…]}`.
fn logprobs(reader: &mut json::Reader<'_>) -> Result<Vec<TokenLogprob>, Fault> {
    let (mut chosen, mut tops) = (Vec::new(), Vec::new());
    value::fields(reader, |reader, key| match key {
        "chosenCandidates" => value::items(reader, |reader, _| {
            let (token, bytes, logprob) = token(reader)?;
            chosen.push(TokenLogprob { token, bytes, logprob, top: Vec::new(), place: TokenPlace::Text });
            Ok(())
        }),
        "topCandidates" => value::items(reader, |reader, _| {
            let mut top = Vec::new();
            value::fields(reader, |reader, key| match key {
                "candidates" => value::items(reader, |reader, _| {
                    let (token, bytes, logprob) = token(reader)?;
                    top.extend(logprob.map(|logprob| (token, bytes, logprob)));
                    Ok(())
                }),
                _ => reader.skip(),
            })?;
            tops.push(top);
            Ok(())
        }),
        _ => reader.skip(),
    })?;
    for (token, top) in chosen.iter_mut().zip(tops) {
        token.top = top;
    }
    Ok(chosen)
}

fn token(reader: &mut json::Reader<'_>) -> Result<(u32, Vec<u8>, Option<f32>), Fault> {
    let (mut id, mut bytes, mut logprob) = (0, Vec::new(), None);
    value::fields(reader, |reader, key| {
        match key {
            "token" => bytes = value::string(reader)?.unwrap_or_default().as_bytes().to_vec(),
            "tokenId" => id = value::count(reader)?.and_then(|id| u32::try_from(id).ok()).unwrap_or_default(),
            "logProbability" => logprob = value::number(reader)?.map(|value| value as f32),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    Ok((id, bytes, logprob))
}
