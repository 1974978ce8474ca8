//! How much a body asks for: the bound of its output, answers at once, prompts.
//!
//! Readers differ about a number in quotes, a fraction, an exponent, a null, a negative number, and two names of one thing. Where no limit
//! counts on what stands there, it is the upstream's business and passes. Where one does ([`Peek::check_amounts`]), an amount must be one
//! that every reader reads alike: null and negative numbers are no bound, `16.0` is written `16` on its way, and everything else is
//! refused, so that what goes up says what was reserved.

use std::ops::Range;

use super::{Peek, names};
use crate::codec::Surface;
use crate::error::ApiError;
use crate::fields;
use crate::json::{Fault, Kind, Reader, Within, mismatch, short};

/// How amounts stand in a body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Amounts {
    /// Where the bound stands, or a negative number in its place.
    pub(super) bound_at: Option<Range<usize>>,
    /// The bound has another name than the one that every server of this API reads.
    is_unusual: bool,
    /// The bound is an integer, and not written in digits alone.
    is_odd: bool,
    /// Null in the place of a bound, by its name.
    pub(super) nulls: Vec<(&'static str, Range<usize>)>,
    /// Counts that are integers and not written in digits alone.
    pub(super) odd: Vec<(Range<usize>, u32)>,
    /// Gemini's `generationConfig`.
    pub(super) config: Option<Config>,
    /// Why an amount cannot be relied on.
    unclear: Option<Box<ApiError>>,
}

/// Where Gemini's `generationConfig` stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Config {
    pub(super) at: Range<usize>,
    pub(super) is_null: bool,
    pub(super) is_empty: bool,
}

/// Bounds of the output that limits put in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BoundLimits {
    /// Where the client names none.
    pub default: Option<u32>,
    /// At most.
    pub max: Option<u32>,
}

impl BoundLimits {
    /// What becomes of a bound, or of none.
    pub fn bounded(self, given: Option<u32>) -> Option<u32> {
        let given = given.or(self.default).or(self.max);
        given.map(|given| self.max.map_or(given, |max| given.min(max)))
    }
}

/// What stands in the place of an amount.
enum Said {
    Null,
    Negative,
    Number { value: u32, is_odd: bool },
    Unclear(Fault),
}

/// The name under which every server of an API reads the bound of an answer; `None`: the operation makes no text.
fn usual(surface: Surface) -> Option<&'static str> {
    match surface {
        Surface::Chat | Surface::Completions | Surface::Messages => Some("max_tokens"),
        Surface::Responses => Some("max_output_tokens"),
        Surface::Generate => Some("generationConfig.maxOutputTokens"),
        Surface::Embeddings | Surface::Rerank | Surface::Score | Surface::CountTokens | Surface::Embed => None,
    }
}

/// The name in the program's own memory, if it is one that bounds an answer in some API or at some server.
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

/// Reads a field if it is an amount; `false`: it is none, and nothing was read.
pub(super) fn field(out: &mut Peek, reader: &mut Reader<'_>, key: &str, surface: Surface) -> Result<bool, Fault> {
    let Some(usual) = usual(surface) else { return Ok(false) };
    if let Some(name) = bound_name(key) {
        let is_own = name == usual || (surface == Surface::Chat && name == "max_completion_tokens");
        if is_own {
            bound(out, reader, &[name], name)?;
        } else if reader.null()? {
            // As if it were not there.
        } else {
            reader.skip()?;
            out.amounts.unclear(&[name], Fault::invalid(format!("use {usual}")));
        }
        return Ok(true);
    }
    match key {
        "n" | "best_of" if surface != Surface::Generate => count(out, reader, &[key])?,
        "prompt" | "prompt_embeds" if reader.kind()? == Kind::Array => reader.array(|reader, _| {
            // Of a prompt that is token ids, every element is a number.
            out.prompts = out.prompts.saturating_add(u32::from(reader.kind()? != Kind::Number));
            reader.skip()
        })?,
        "generationConfig" | "generation_config" if surface == Surface::Generate => config(out, reader, key)?,
        _ => return Ok(false),
    }
    Ok(true)
}

/// Gemini's `generationConfig`, under one of its spellings.
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

/// The bound of an answer; its name is the last of `path`.
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

/// How many answers are asked for at once.
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

/// Reads what stands in the place of an amount, and where.
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
    /// Notes why an amount cannot be relied on; the first reason is the one that is told.
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
    /// One of them is read differently by different servers: the refusal.
    pub fn check_amounts(&self) -> Result<(), ApiError> {
        self.amounts.unclear.as_deref().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// The bound of each answer under limits.
    pub fn bound_under(&self, limits: BoundLimits) -> Option<u32> {
        limits.bounded(self.max_tokens)
    }

    /// The same, where it must be written into the body: it is another than the one that stands there, or a limit counts on it (after
    /// [`Peek::check_amounts`]) and it does not stand there in digits alone.
    pub fn new_bound(&self, limits: BoundLimits, is_counted: bool) -> Option<u32> {
        let is_odd = is_counted && self.amounts.is_odd;
        self.bound_under(limits).filter(|bound| is_odd || Some(*bound) != self.max_tokens)
    }

    /// Whether a bound that goes up is one that every server of the API reads: one that stands there under another name may be ignored.
    pub fn is_bound_usual(&self) -> bool {
        !self.amounts.is_unusual
    }

    /// What is asked is not what the body says, but this, and nothing of it is passed on as it stands.
    pub fn mean(&mut self, max_tokens: Option<u32>, choices: u32, prompts: u32) {
        (self.max_tokens, self.choices, self.prompts) = (max_tokens, choices, prompts);
        self.amounts = Amounts::default();
    }
}
