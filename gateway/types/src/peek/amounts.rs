//! Amounts that a body asks for: the bound of its output, answers at once, prompts.
//!
//! Readers differ about a number in quotes, a fraction, an exponent, a null, a negative number, and two names of one
//! field. Where no limit counts on the amount, the upstream judges it, and the body passes. Where a limit does
//! ([`Peek::check_amounts`]), an amount must be one that every reader reads alike: null and negative numbers are no
//! bound, `16.0` is rewritten as `16`, and everything else is refused, so that the forwarded body asks for exactly the
//! reserved amount.

use std::ops::Range;

use super::{Peek, names};
use crate::codec::{Dialect, Surface};
use crate::error::ApiError;
use crate::fields;
use crate::json::{Fault, Kind, Reader, Within, mismatch, short};

/// Notation of the amounts in a body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Amounts {
    /// Byte range of the bound, or of a negative number in its place.
    pub(super) bound_at: Option<Range<usize>>,
    /// True if the bound has another name than the usual one, which every server of this API reads.
    is_unusual: bool,
    /// True if the bound is an integer not written in digits alone.
    is_odd: bool,
    /// Null values in the place of a bound, by field name.
    pub(super) nulls: Vec<(&'static str, Range<usize>)>,
    /// Counts that are integers not written in digits alone.
    pub(super) odd: Vec<(Range<usize>, u32)>,
    /// Gemini's `generationConfig`, where its API puts the bound; `None` if absent.
    pub(super) config: Option<Config>,
    /// Reason why an amount cannot be relied on.
    unclear: Option<Box<ApiError>>,
}

/// Position and fields of Gemini's `generationConfig`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Config {
    pub(super) at: Range<usize>,
    pub(super) is_null: bool,
    pub(super) is_empty: bool,
}

/// Bounds that limits impose on the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BoundLimits {
    /// Bound used where the client names none.
    pub default: Option<u32>,
    /// Largest bound that a request may have; `None` means no limit.
    pub max: Option<u32>,
}

impl BoundLimits {
    /// Bound that results for the client's bound `given`, or for none.
    pub fn bounded(self, given: Option<u32>) -> Option<u32> {
        let given = given.or(self.default).or(self.max);
        given.map(|given| self.max.map_or(given, |max| given.min(max)))
    }
}

/// Value found in the place of an amount.
enum Said {
    Null,
    Negative,
    Number { value: u32, is_odd: bool },
    Unclear(Fault),
}

/// Usual name of an API's output bound, which every server of the API reads; `None` for an operation that generates no
/// text.
fn usual(surface: Surface) -> Option<&'static str> {
    match surface {
        Surface::Chat | Surface::Completions | Surface::Messages => Some("max_tokens"),
        Surface::Responses => Some("max_output_tokens"),
        Surface::Generate => Some("generationConfig.maxOutputTokens"),
        Surface::OllamaChat | Surface::OllamaGenerate => Some("options.num_predict"),
        Surface::Embeddings
        | Surface::Rerank
        | Surface::Score
        | Surface::CountTokens
        | Surface::Embed
        | Surface::OllamaEmbed => None,
    }
}

/// Static copy of `key`, if it is a name of the output bound in some API or at some server.
fn bound_name(key: &str) -> Option<&'static str> {
    Some(match key {
        "max_tokens" => "max_tokens",
        "max_completion_tokens" => "max_completion_tokens",
        "max_output_tokens" => "max_output_tokens",
        "max_new_tokens" => "max_new_tokens",
        "max_length" => "max_length",
        "max_tokens_to_sample" => "max_tokens_to_sample",
        "n_predict" => "n_predict",
        "num_predict" => "num_predict",
        _ => return None,
    })
}

/// Reads a field if it is an amount; `false`, with nothing read, if it is not.
pub(super) fn field(out: &mut Peek, reader: &mut Reader<'_>, key: &str, surface: Surface) -> Result<bool, Fault> {
    let Some(usual) = usual(surface) else { return Ok(false) };
    if let Some(name) = bound_name(key) {
        let is_own = name == usual || (surface == Surface::Chat && name == "max_completion_tokens");
        if is_own {
            bound(out, reader, &[name], name)?;
        } else if reader.null()? {
            // Treated as absent.
        } else {
            reader.skip()?;
            out.amounts.unclear(&[name], Fault::invalid(format!("use {usual}")));
        }
        return Ok(true);
    }
    match key {
        "n" | "best_of" if !matches!(surface.dialect(), Dialect::Gemini | Dialect::Ollama) => {
            count(out, reader, &[key])?;
        }
        "prompt" | "prompt_embeds" if reader.kind()? == Kind::Array => reader.array(|reader, _| {
            // A prompt given as token ids has numbers as elements, and they are not prompts.
            out.prompts = out.prompts.saturating_add(u32::from(reader.kind()? != Kind::Number));
            reader.skip()
        })?,
        "generationConfig" | "generation_config" if surface == Surface::Generate => config(out, reader, key)?,
        "options" if surface.dialect() == Dialect::Ollama => options(out, reader)?,
        _ => return Ok(false),
    }
    Ok(true)
}

/// Reads Gemini's `generationConfig`, under one of its spellings.
fn config(out: &mut Peek, reader: &mut Reader<'_>, key: &str) -> Result<(), Fault> {
    let kind = reader.kind()?;
    let from = reader.position();
    let is_second = out.amounts.config.is_some();
    let mut is_empty = true;
    let mut seen = [false; names::CONFIG.len()];
    if kind == Kind::Object {
        reader.object(|reader, name| {
            is_empty = false;
            names::check(&name, &names::CONFIG, true)?;
            let Some(at) = names::CONFIG.iter().position(|have| *have == name) else { return reader.skip() };
            let other = seen[at ^ 1];
            if std::mem::replace(&mut seen[at], true) {
                return Err(Fault::invalid("this field is given twice")).within(&name);
            }
            let path = [key, names::CONFIG[at]];
            if at < 2 {
                bound(out, reader, &path, names::CONFIG[at])?;
            } else {
                count(out, reader, &path)?;
            }
            if other {
                out.amounts.unclear(&path, Fault::invalid("this field is given in both of its spellings"));
            }
            Ok(())
        })?;
    } else if !reader.null()? {
        reader.skip()?;
        out.amounts.unclear(&[key], mismatch("an object", kind));
    }
    if is_second {
        out.amounts.unclear(&[key], Fault::invalid("this field is given in both of its spellings"));
    }
    let config = Config { at: from..reader.position(), is_null: kind == Kind::Null, is_empty };
    out.amounts.config.get_or_insert(config);
    Ok(())
}

/// Reads Ollama's `options`. Bodies of this API are never forwarded as they are, so that only what they mean counts: 0 and
/// negative numbers are no bound.
fn options(out: &mut Peek, reader: &mut Reader<'_>) -> Result<(), Fault> {
    let mut seen = false;
    if reader.kind()? != Kind::Object {
        // The decoder refuses it.
        return reader.skip();
    }
    reader.object(|reader, name| {
        names::check(&name, &names::OPTIONS, false)?;
        if name != names::OPTIONS[0] {
            return reader.skip();
        }
        if std::mem::replace(&mut seen, true) {
            return Err(Fault::invalid("this field is given twice")).within(&name);
        }
        let path = ["options", names::OPTIONS[0]];
        match said(reader)?.1 {
            Said::Number { value: 1.., .. } if out.max_tokens.is_some() => {
                out.amounts.unclear(&path, Fault::invalid("given together with another bound: send one of them"));
            }
            Said::Number { value: value @ 1.., .. } => out.max_tokens = Some(value),
            Said::Number { .. } | Said::Null | Said::Negative => {}
            Said::Unclear(fault) => out.amounts.unclear(&path, fault),
        }
        Ok(())
    })
}

/// Reads the bound of an answer; the last element of `path` is its name.
fn bound(out: &mut Peek, reader: &mut Reader<'_>, path: &[&str], name: &'static str) -> Result<(), Fault> {
    let (at, said) = said(reader)?;
    let (tokens, is_odd) = match said {
        Said::Null => {
            out.amounts.nulls.push((name, at));
            return Ok(());
        }
        Said::Negative => (None, false),
        Said::Number { value: 0, .. } => {
            out.amounts.unclear(path, Fault::invalid("must be at least 1, got 0: servers differ about what 0 means"));
            return Ok(());
        }
        Said::Number { value, is_odd } => (Some(value), is_odd),
        Said::Unclear(fault) => {
            out.amounts.unclear(path, fault);
            return Ok(());
        }
    };
    if out.amounts.bound_at.is_some() {
        out.amounts.unclear(path, Fault::invalid("given together with another bound of the output: send one of them"));
        return Ok(());
    }
    out.max_tokens = tokens;
    (out.amounts.bound_at, out.amounts.is_odd) = (Some(at), is_odd);
    out.amounts.is_unusual = name == "max_completion_tokens";
    Ok(())
}

/// Reads the number of answers asked for at once.
fn count(out: &mut Peek, reader: &mut Reader<'_>, path: &[&str]) -> Result<(), Fault> {
    let (at, said) = said(reader)?;
    match said {
        Said::Null => {}
        Said::Negative | Said::Number { value: 0, .. } => {
            out.amounts.unclear(path, Fault::invalid("must be at least 1"));
        }
        Said::Number { value, is_odd } => {
            out.choices = out.choices.max(value);
            if is_odd {
                out.amounts.odd.push((at, value));
            }
        }
        Said::Unclear(fault) => out.amounts.unclear(path, fault),
    }
    Ok(())
}

/// Reads a value in the place of an amount, and its byte range.
fn said(reader: &mut Reader<'_>) -> Result<(Range<usize>, Said), Fault> {
    let kind = reader.kind()?;
    let from = reader.position();
    let said = match kind {
        Kind::Null => reader.null().map(|_| Said::Null)?,
        Kind::Number => number(reader.number()?),
        kind => {
            reader.skip()?;
            Said::Unclear(mismatch("an integer", kind))
        }
    };
    Ok((from..reader.position(), said))
}

fn number(lexeme: &str) -> Said {
    match fields::whole(lexeme) {
        None => Said::Unclear(Fault::invalid(format!("expected an integer, got {}", short(lexeme)))),
        Some(..0) => Said::Negative,
        Some(value) => match u32::try_from(value) {
            Ok(value) => Said::Number { value, is_odd: !lexeme.bytes().all(|byte| byte.is_ascii_digit()) },
            Err(_) => Said::Unclear(Fault::invalid(format!("must be at most {}, got {}", u32::MAX, short(lexeme)))),
        },
    }
}

impl Amounts {
    /// Records why an amount cannot be relied on; the first reason is reported.
    fn unclear(&mut self, path: &[&str], fault: Fault) {
        if self.unclear.is_none() {
            let mut refused = Err::<(), _>(fault);
            for name in path.iter().rev() {
                refused = refused.within(name);
            }
            self.unclear = refused.err().map(|fault| Box::new(fault.into_error()));
        }
    }
}

impl Peek {
    /// Whether limits can count on the amounts that the body asks for.
    ///
    /// # Errors
    /// An amount is read differently by different servers: the refusal.
    pub fn check_amounts(&self) -> Result<(), ApiError> {
        self.amounts.unclear.as_deref().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Bound of each answer under `limits`.
    pub fn bound_under(&self, limits: BoundLimits) -> Option<u32> {
        limits.bounded(self.max_tokens)
    }

    /// Bound that must be written into the body: it differs from the one in the body, or a limit counts on it (after
    /// [`Peek::check_amounts`]) and the body does not write it in digits alone. `None` if the body can stay.
    pub fn new_bound(&self, limits: BoundLimits, is_counted: bool) -> Option<u32> {
        let is_odd = is_counted && self.amounts.is_odd;
        self.bound_under(limits).filter(|bound| is_odd || Some(*bound) != self.max_tokens)
    }

    /// Returns true if the body's bound has the usual name, which every server of the API reads; a bound under another name
    /// may be ignored.
    pub fn is_bound_usual(&self) -> bool {
        !self.amounts.is_unusual
    }

    /// Replaces the amounts by others, for a body that is rewritten instead of forwarded.
    pub fn mean(&mut self, max_tokens: Option<u32>, choices: u32, prompts: u32) {
        (self.max_tokens, self.choices, self.prompts) = (max_tokens, choices, prompts);
        self.amounts = Amounts::default();
    }
}
