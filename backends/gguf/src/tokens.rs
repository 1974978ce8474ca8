//! Tokens of a GGUF vocabulary: names, kinds, those that the metadata names, and what is put around texts.

use std::collections::HashSet;

use serde_json::{Map, Value as Json, json};

use crate::error::shown;
use crate::{Gguf, GgufError, Value, pooling};

/// Key of the vocabulary's kind.
pub(crate) const MODEL: &str = "tokenizer.ggml.model";
/// Key of the names of all tokens.
pub(crate) const TOKENS: &str = "tokenizer.ggml.tokens";
const SCORES: &str = "tokenizer.ggml.scores";
const TYPES: &str = "tokenizer.ggml.token_type";

/// Longest token in bytes. The work for the merges of a token grows with the square of its length.
const NAME_BYTES_MAX: usize = 1024;

/// Names of tokens that end an answer in one of the known chat formats. Files name one end token, and templates use others. Such a token marks
/// structure whatever its type: converters have called Phi-3's `<|end|>` one that a user has added.
pub(crate) const ENDS: [&str; 15] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|eot|>",
    "<EOT>",
    "_<EOT>",
    "<|end_of_sentence|>",
    "<｜end▁of▁sentence｜>",
    "<|end_of_turn|>",
    "<|return|>",
    "<|call|>",
];

/// Names of Phi-3's tokens that leave the blanks behind them alone.
const LEAVING: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];

/// Kind of a token, `llama_token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// Vocabulary of a file.
pub(crate) struct Tokens<'a> {
    /// Names of all tokens, as the file has them.
    pub(crate) names: &'a [String],
    /// Kinds of all tokens, `[names]`.
    pub(crate) kinds: Vec<Kind>,
    /// True if tokens that mark structure take the blanks and line breaks behind them.
    take_blanks: bool,
}

impl<'a> Tokens<'a> {
    pub(crate) fn read(gguf: &'a Gguf) -> Result<Self, GgufError> {
        let Some(names) = gguf.texts(TOKENS)? else { return Err(gguf.refuse(TOKENS, "is missing")) };
        let mut kinds = match gguf.metadata.get(TYPES) {
            None => vec![Kind::Normal; names.len()],
            Some(Value::Integers(kinds)) if kinds.len() == names.len() => {
                kinds.iter().map(|kind| kind_of(*kind)).collect()
            }
            Some(other) => {
                let reason = format!("is {}, needs one integer for each of {} tokens", other.shown(), names.len());
                return Err(gguf.refuse(TYPES, reason));
            }
        };
        for (kind, name) in kinds.iter_mut().zip(names) {
            if *kind != Kind::Unused && ENDS.contains(&name.as_str()) {
                *kind = Kind::Control;
            }
        }
        let tokens = Self { names, kinds, take_blanks: take_blanks(gguf)? };
        let mut seen = HashSet::new();
        for (id, name) in tokens.used() {
            if name.len() > NAME_BYTES_MAX {
                return Err(gguf.refuse(TOKENS, format!("has a token {id} of {} bytes", name.len())));
            }
            if !seen.insert(name) {
                return Err(gguf.refuse(TOKENS, format!("has \"{}\" twice, again as token {id}", shown(name))));
            }
        }
        Ok(tokens)
    }

    /// Ids and names of all tokens but the unused ones.
    pub(crate) fn used(&self) -> impl Iterator<Item = (usize, &'a str)> {
        let used = self.names.iter().zip(&self.kinds).enumerate().filter(|(_, (_, kind))| **kind != Kind::Unused);
        used.map(|(id, (name, _))| (id, name.as_str()))
    }

    pub(crate) fn vocabulary(&self) -> Map<String, Json> {
        self.used().map(|(id, name)| (name.to_owned(), id.into())).collect()
    }

    /// Added tokens of tokenizer.json, in the order of their ids.
    pub(crate) fn added(&self) -> Vec<Json> {
        self.added_of(self.used())
    }

    /// Added tokens of tokenizer.json among `named`, ids and names in the order of their ids.
    pub(crate) fn added_of<'n>(&self, named: impl Iterator<Item = (usize, &'n str)>) -> Vec<Json> {
        let structure = |id: usize| match self.kinds[id] {
            Kind::Control | Kind::Unknown => Some(true),
            Kind::UserDefined => Some(false),
            _ => None,
        };
        let token = |id: usize, name: &str, special: bool| {
            let rstrip = self.take_blanks && !LEAVING.contains(&name);
            json!({
                "id": id, "content": name, "single_word": false, "lstrip": false, "rstrip": rstrip,
                "normalized": false, "special": special,
            })
        };
        named.filter_map(|(id, name)| Some(token(id, name, structure(id)?))).collect()
    }

    /// Scores of all tokens, `[names]`.
    pub(crate) fn scores<'g>(&self, gguf: &'g Gguf) -> Result<&'g [f32], GgufError> {
        match gguf.metadata.get(SCORES) {
            Some(Value::Floats(scores)) if scores.len() == self.names.len() => Ok(scores),
            Some(other) => {
                let reason = format!("is {}, needs one number for each of {} tokens", other.shown(), self.names.len());
                Err(gguf.refuse(SCORES, reason))
            }
            None => Err(gguf.refuse(SCORES, "is missing")),
        }
    }

    /// Id of the token for what is in no other; `None` if the file has none.
    pub(crate) fn unknown(&self, gguf: &Gguf) -> Result<Option<usize>, GgufError> {
        let named = named(gguf, self, "unknown_token_id")?.map(|(id, _)| id as usize);
        Ok(named.or_else(|| self.kinds.iter().position(|kind| *kind == Kind::Unknown)))
    }
}

/// Returns true for Phi-3 and Phi-3.5 with the vocabulary of Llama 2, whose tokens that mark structure take the blanks behind them (`rstrip`). Files
/// do not say so: the architecture or, as in llama.cpp, the name does.
fn take_blanks(gguf: &Gguf) -> Result<bool, GgufError> {
    if gguf.text(MODEL)? != Some("llama") {
        return Ok(false);
    }
    let name = gguf.text("general.name")?.unwrap_or_default().to_lowercase();
    Ok(gguf.text("general.architecture")? == Some("phi3") || ["phi-3", "phi3"].iter().any(|part| name.contains(part)))
}

fn kind_of(number: i64) -> Kind {
    match number {
        2 => Kind::Unknown,
        3 => Kind::Control,
        4 => Kind::UserDefined,
        5 => Kind::Unused,
        6 => Kind::Byte,
        _ => Kind::Normal,
    }
}

/// Token that a key of the metadata names; `None` if it names none, or one that does not exist.
pub(crate) fn named<'a>(gguf: &Gguf, tokens: &Tokens<'a>, key: &str) -> Result<Option<(u64, &'a str)>, GgufError> {
    let id = gguf.integer(&format!("tokenizer.ggml.{key}"), 0, u64::from(u32::MAX))?;
    Ok(id.and_then(|id| Some((id, tokens.names.get(usize::try_from(id).ok()?)?.as_str()))))
}

/// First token of prompts, if the tokenizer adds one.
fn first<'a>(gguf: &Gguf, tokens: &Tokens<'a>, default: bool) -> Result<Option<(u64, &'a str)>, GgufError> {
    if !gguf.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(default) {
        return Ok(None);
    }
    named(gguf, tokens, "bos_token_id")
}

/// Last token of the texts of an embedding model, if the file has one put there. Texts that are to go on get none.
fn last<'a>(gguf: &Gguf, tokens: &Tokens<'a>) -> Result<Option<(u64, &'a str)>, GgufError> {
    const ID: &str = "eos_token_id";
    if pooling::pooling(gguf)?.is_none() || gguf.flag(pooling::ADD_END)? != Some(true) {
        return Ok(None);
    }
    let missing =
        || gguf.refuse(&format!("tokenizer.ggml.{ID}"), "is missing, or names no token that could end a text");
    named(gguf, tokens, ID)?.map(Some).ok_or_else(missing)
}

/// Post-processor that puts tokens around texts as the file says; null if it puts none. `first`: whether prompts begin with a token unless the file
/// says otherwise. An encoder's texts have both tokens, whatever it says.
pub(crate) fn around(gguf: &Gguf, tokens: &Tokens<'_>, first: bool) -> Result<Json, GgufError> {
    if pooling::encoder(gguf)?.is_some() {
        let ids = ends(gguf, tokens, ["<s>", "</s>"])?;
        let [first, last] = ids.map(|id| (id as u64, tokens.names[id].as_str()));
        return Ok(template(Some(first), Some(last), Pair::Ended));
    }
    Ok(template(self::first(gguf, tokens, first)?, last(gguf, tokens)?, Pair::Alike))
}

/// Ids of the tokens before and behind an encoder's texts: those that the metadata names, or those with these names.
pub(crate) fn ends(gguf: &Gguf, tokens: &Tokens<'_>, names: [&str; 2]) -> Result<[usize; 2], GgufError> {
    // The spelling is the format's.
    let keys = [["cls_token_id", "bos_token_id"], ["seperator_token_id", "eos_token_id"]];
    let find = |[key, other]: [&str; 2], name: &str| {
        let found = match named(gguf, tokens, key)? {
            Some(found) => Some(found),
            None => named(gguf, tokens, other)?,
        };
        let by_name = || tokens.used().find(|(_, token)| *token == name).map(|(id, _)| id);
        let missing = || {
            let reason =
                format!("is missing, and so are {other} and a token {name}: every text of an encoder has one there");
            gguf.refuse(&format!("tokenizer.ggml.{key}"), reason)
        };
        found.map(|(id, _)| id as usize).or_else(by_name).ok_or_else(missing)
    };
    Ok([find(keys[0], names[0])?, find(keys[1], names[1])?])
}

/// Way in which two texts are put together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pair {
    /// Each text as it is alone; the second has another type.
    Alike,
    /// Second text without the first token, and of another type (BERT).
    Typed,
    /// The last token twice between the texts, all of one type (RoBERTa).
    Ended,
}

/// Post-processor that puts tokens, ids and names, before and behind texts; null if there are none.
pub(crate) fn template(first: Option<(u64, &str)>, last: Option<(u64, &str)>, pair: Pair) -> Json {
    if first.or(last).is_none() {
        return Json::Null;
    }
    let special = |token: Option<(u64, &str)>, kind: u32| {
        token.map(|(_, name)| json!({ "SpecialToken": { "id": name, "type_id": kind } }))
    };
    let text = |first: Option<(u64, &str)>, id: &str, kind: u32| {
        let sequence = json!({ "Sequence": { "id": id, "type_id": kind } });
        special(first, kind).into_iter().chain([sequence]).chain(special(last, kind)).collect::<Vec<_>>()
    };
    let of = |(id, name): (u64, &str)| (name.to_owned(), json!({ "id": name, "ids": [id], "tokens": [name] }));
    let tokens: Map<String, Json> = first.into_iter().chain(last).map(of).collect();
    let second = match pair {
        Pair::Alike => text(first, "B", 1),
        Pair::Typed => text(None, "B", 1),
        Pair::Ended => text(last, "B", 0),
    };
    let single = text(first, "A", 0);
    let pair = [single.clone(), second].concat();
    json!({
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": tokens,
    })
}
