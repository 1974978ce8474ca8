//! The text side of a GGUF file in Hugging Face's files: tokenizer.json, tokenizer_config.json, generation_config.json.
//!
//! Two kinds of vocabularies are read. `gpt2`: byte-level BPE; tokens and merges are in the file, the rule that splits texts into words is
//! named (`pre.rs`). `llama`: SentencePiece BPE; the file has scores instead of merges, from which merges follow as in Hugging Face's own
//! conversion: each way to put a token together from two others, best score first.
//!
//! Tokens that mark structure become added tokens. All tokens keep their ids; unused places of the vocabulary stay empty.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value as Json, json};

use crate::error::shown;
use crate::{Gguf, GgufError, Value, pooling, pre};

/// Files of a checkpoint that concern text.
#[derive(Clone, Debug)]
pub struct TextFiles {
    /// Content of tokenizer.json. The same file gives the same bytes in every process, and so the same hash.
    pub tokenizer_json: Vec<u8>,
    /// Content of tokenizer_config.json: named tokens, chat template, length.
    pub tokenizer_config_json: Vec<u8>,
    /// Content of generation_config.json: the tokens that end an answer.
    pub generation_config_json: Vec<u8>,
}

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";
const TYPES: &str = "tokenizer.ggml.token_type";

/// Longest token in bytes. The work for the merges of a token grows with the square of its length.
const NAME_BYTES_MAX: usize = 1024;
/// Most merges of a vocabulary with scores; one of 262 thousand tokens has 0.6 million.
const MERGES_MAX: usize = 1 << 21;
/// Most bytes of the tokens that merges make, one count per merge; a vocabulary of 262 thousand tokens has 5 MB.
const MERGES_BYTES_MAX: usize = 64 << 20;
/// Most bytes that are looked up to find merges: every token once for each of its characters. A vocabulary of 262 thousand tokens takes 30 MB.
const LOOKUP_BYTES_MAX: usize = 1 << 30;

/// Names of tokens that end an answer in one of the known chat formats. Files name one end token, and templates use others. Such a token marks
/// structure whatever its type: converters have called Phi-3's `<|end|>` one that a user has added.
const ENDS: [&str; 15] = [
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
/// Name of the token that ends an answer in most formats. In that of GPT-OSS, known by [`FINAL`], it ends one of an answer's messages.
const END: &str = "<|end|>";
/// Names of the tokens that end an answer of GPT-OSS.
const FINAL: [&str; 2] = ["<|return|>", "<|call|>"];

/// Key of the chat template. Templates for a purpose have its name behind the key and a dot.
const TEMPLATE: &str = "tokenizer.chat_template";
/// Names of Phi-3's tokens that leave the blanks behind them alone.
const LEAVING: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];

/// Kind of a token, `llama_token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

struct Tokens<'a> {
    names: &'a [String],
    kinds: Vec<Kind>,
    /// True if tokens that mark structure take the blanks and line breaks behind them.
    take_blanks: bool,
}

impl<'a> Tokens<'a> {
    fn read(gguf: &'a Gguf) -> Result<Self, GgufError> {
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
    fn used(&self) -> impl Iterator<Item = (usize, &'a str)> {
        let used = self.names.iter().zip(&self.kinds).enumerate().filter(|(_, (_, kind))| **kind != Kind::Unused);
        used.map(|(id, (name, _))| (id, name.as_str()))
    }

    fn vocabulary(&self) -> Map<String, Json> {
        self.used().map(|(id, name)| (name.to_owned(), id.into())).collect()
    }

    /// Added tokens of tokenizer.json, in the order of their ids.
    fn added(&self) -> Vec<Json> {
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
        self.used().filter_map(|(id, name)| Some(token(id, name, structure(id)?))).collect()
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

/// The text side of the file.
///
/// # Errors
/// [`GgufError`] with the key: a kind of vocabulary or a splitting rule that is not known, lists that do not fit each other.
pub fn text_files(gguf: &Gguf) -> Result<TextFiles, GgufError> {
    let tokens = Tokens::read(gguf)?;
    let tokenizer = match gguf.text(MODEL)? {
        Some("gpt2") => byte_level(gguf, &tokens)?,
        Some("llama") => sentence_piece(gguf, &tokens)?,
        Some(other) => {
            let reason = format!("\"{}\" is not supported; supported: gpt2 and llama", shown(other));
            return Err(gguf.refuse(MODEL, reason).help("serve the original checkpoint with its tokenizer.json"));
        }
        None => return Err(gguf.refuse(MODEL, "is missing")),
    };
    let ends = ends_of(gguf, &tokens)?;
    let bytes = |value: &Json| serde_json::to_vec(value).expect("a JSON value of texts and numbers");
    Ok(TextFiles {
        tokenizer_json: bytes(&tokenizer),
        tokenizer_config_json: bytes(&tokenizer_config(gguf, &tokens, &ends)?),
        generation_config_json: bytes(&json!({ "eos_token_id": ends })),
    })
}

/// Token that a key of the metadata names; `None` if it names none, or one that does not exist.
fn named<'a>(gguf: &Gguf, tokens: &Tokens<'a>, key: &str) -> Result<Option<(u64, &'a str)>, GgufError> {
    let id = gguf.integer(&format!("tokenizer.ggml.{key}"), 0, u64::from(u32::MAX))?;
    Ok(id.and_then(|id| Some((id, tokens.names.get(usize::try_from(id).ok()?)?.as_str()))))
}

/// First token of prompts, if the tokenizer adds one.
fn bos<'a>(gguf: &Gguf, tokens: &Tokens<'a>, default: bool) -> Result<Option<(u64, &'a str)>, GgufError> {
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

fn template(first: Option<(u64, &str)>, last: Option<(u64, &str)>) -> Json {
    if first.or(last).is_none() {
        return Json::Null;
    }
    let special = |token: Option<(u64, &str)>, kind: u32| {
        token.map(|(_, name)| json!({ "SpecialToken": { "id": name, "type_id": kind } }))
    };
    let text = |id: &str, kind: u32| {
        let sequence = json!({ "Sequence": { "id": id, "type_id": kind } });
        special(first, kind).into_iter().chain([sequence]).chain(special(last, kind)).collect::<Vec<_>>()
    };
    let of = |(id, name): (u64, &str)| (name.to_owned(), json!({ "id": name, "ids": [id], "tokens": [name] }));
    let tokens: Map<String, Json> = first.into_iter().chain(last).map(of).collect();
    let pair = [text("A", 0), text("B", 1)].concat();
    json!({
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": pair,
        "special_tokens": tokens,
    })
}

fn byte_level(gguf: &Gguf, tokens: &Tokens<'_>) -> Result<Json, GgufError> {
    let Some(pre) = gguf.text(PRE)? else {
        let help = "convert the model again with a newer llama.cpp: without the rule, texts become other tokens";
        return Err(gguf.refuse(PRE, "is missing").help(help));
    };
    let Some(rules) = pre::find(pre) else {
        let known = pre::names().join(", ");
        let reason = format!("\"{}\" is not known; known: {known}", shown(pre));
        return Err(gguf.refuse(PRE, reason).help("serve the original checkpoint with its tokenizer.json"));
    };
    let Some(lines) = gguf.texts(MERGES)? else { return Err(gguf.refuse(MERGES, "is missing")) };
    let mut merges = Vec::with_capacity(lines.len());
    let vocabulary = tokens.vocabulary();
    for line in lines {
        // The first part has at least one character, which may be a blank.
        let blank = line.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(at, _)| at);
        let Some(at) = blank else {
            return Err(gguf.refuse(MERGES, format!("\"{}\" is not two parts", shown(line))));
        };
        let (left, right) = (&line[..at], &line[at + 1..]);
        // A merge of or to something that is no token makes nothing that could be encoded.
        if [left, right, &format!("{left}{right}")].iter().all(|part| vocabulary.contains_key(*part)) {
            merges.push(json!([left, right]));
        }
    }
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
    let around = template(bos(gguf, tokens, rules.adds_bos)?, last(gguf, tokens)?);
    let post = if around.is_null() { bytes } else { json!({ "type": "Sequence", "processors": [bytes, around] }) };
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": tokens.added(),
        "normalizer": if rules.nfc { json!({ "type": "NFC" }) } else { Json::Null },
        "pre_tokenizer": rules.pre_tokenizer(),
        "post_processor": post,
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": rules.ignore_merges, "vocab": vocabulary, "merges": merges,
        },
    }))
}

fn sentence_piece(gguf: &Gguf, tokens: &Tokens<'_>) -> Result<Json, GgufError> {
    let scores = match gguf.metadata.get(SCORES) {
        Some(Value::Floats(scores)) if scores.len() == tokens.names.len() => scores,
        Some(other) => {
            let reason = format!("is {}, needs one number for each of {} tokens", other.shown(), tokens.names.len());
            return Err(gguf.refuse(SCORES, reason));
        }
        None => return Err(gguf.refuse(SCORES, "is missing")),
    };
    let unknown = named(gguf, tokens, "unknown_token_id")?.map(|(_, name)| name);
    let unknown =
        unknown.or_else(|| tokens.used().find(|(id, _)| tokens.kinds[*id] == Kind::Unknown).map(|(_, name)| name));
    let prefix = gguf.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let blank = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
    let normalizers = if prefix { vec![json!({ "type": "Prepend", "prepend": "▁" }), blank] } else { vec![blank] };
    let mut decoders = vec![
        json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if prefix {
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": tokens.added(),
        "normalizer": { "type": "Sequence", "normalizers": normalizers },
        "pre_tokenizer": null,
        "post_processor": template(bos(gguf, tokens, true)?, last(gguf, tokens)?),
        "decoder": { "type": "Sequence", "decoders": decoders },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": tokens.vocabulary(), "merges": merges_of(gguf, tokens, scores)?,
        },
    }))
}

/// Merges of a SentencePiece vocabulary: for each token every pair that makes it, the best score first; pairs of one token in the order of
/// their parts' ids, then shorter parts first.
///
/// Errors: more merges than any real vocabulary has. A small file can have very many, since long tokens that repeat one character are cut
/// into two others in as many ways as they have characters.
fn merges_of(gguf: &Gguf, tokens: &Tokens<'_>, scores: &[f32]) -> Result<Vec<Json>, GgufError> {
    let ids: HashMap<&str, usize> =
        tokens.used().filter(|(id, _)| tokens.kinds[*id] == Kind::Normal).map(|(id, name)| (name, id)).collect();
    let mut merges: Vec<(f32, usize, usize, &str, &str)> = Vec::new();
    let mut normal: Vec<(&str, usize)> = ids.iter().map(|(name, id)| (*name, *id)).collect();
    normal.sort_unstable_by_key(|(_, id)| *id);
    let (mut bytes, mut looked_up) = (0, 0);
    for (name, id) in normal {
        looked_up += name.len().saturating_mul(name.len());
        let cuts = name.char_indices().skip(1).map(|(at, _)| name.split_at(at));
        let mut own: Vec<_> =
            cuts.filter_map(|(left, right)| Some((*ids.get(left)?, *ids.get(right)?, left, right))).collect();
        own.sort_unstable_by_key(|&(left, right, ..)| (left, right));
        bytes += own.len() * name.len();
        if merges.len() + own.len() > MERGES_MAX || bytes > MERGES_BYTES_MAX || looked_up > LOOKUP_BYTES_MAX {
            let reason = format!(
                "has more merges than any known vocabulary: {} of {bytes} bytes up to token {id}, of {looked_up} bytes looked up; at most \
                 {MERGES_MAX}, {MERGES_BYTES_MAX} and {LOOKUP_BYTES_MAX} are allowed",
                merges.len() + own.len()
            );
            return Err(gguf.refuse(TOKENS, reason).help("the file is damaged: fetch it again"));
        }
        let lengths = |left: &str, right: &str| (left.chars().count(), right.chars().count());
        merges.extend(own.into_iter().map(|(_, _, left, right)| {
            let (first, second) = lengths(left, right);
            (scores[id], first, second, left, right)
        }));
    }
    // As in the original, longer parts first among equal scores. The sort is stable.
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then((b.1, b.2).cmp(&(a.1, a.2))));
    Ok(merges.into_iter().map(|(_, _, _, left, right)| json!([left, right])).collect())
}

fn tokenizer_config(gguf: &Gguf, tokens: &Tokens<'_>, ends: &[u64]) -> Result<Json, GgufError> {
    let mut config = Map::new();
    for (name, key) in [
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("unk_token", "unknown_token_id"),
        ("pad_token", "padding_token_id"),
    ] {
        // An end token that ends no answer is none of the tokenizer's either.
        let is_none = |id| name == "eos_token" && !ends.contains(&id);
        if let Some((_, token)) = named(gguf, tokens, key)?.filter(|(id, _)| !is_none(*id)) {
            config.insert(name.into(), token.into());
        }
    }
    if let Some(template) = templates(gguf)? {
        config.insert("chat_template".into(), template);
    }
    if let Some(architecture) = gguf.text("general.architecture")?
        && let Some(length) = gguf.integer(&format!("{architecture}.context_length"), 0, u64::MAX)?
    {
        config.insert("model_max_length".into(), length.into());
    }
    Ok(config.into())
}

/// Chat template as tokenizer_config.json has it: a text, or a list of templates by name where there are some for a purpose (`tool_use`).
fn templates(gguf: &Gguf) -> Result<Option<Json>, GgufError> {
    let default = gguf.text(TEMPLATE)?;
    let purpose = |key: &'_ String| key.strip_prefix(TEMPLATE)?.strip_prefix('.').map(str::to_owned);
    let mut purposes: Vec<String> = gguf.metadata.keys().filter_map(purpose).collect();
    if purposes.is_empty() {
        return Ok(default.map(Json::from));
    }
    purposes.sort_unstable();
    let one = |name: &str, template: &str| json!({ "name": name, "template": template });
    let mut list: Vec<Json> = default.iter().map(|template| one("default", template)).collect();
    for name in purposes {
        list.extend(gguf.text(&format!("{TEMPLATE}.{name}"))?.map(|template| one(&name, template)));
    }
    Ok(Some(list.into()))
}

/// Tokens that end an answer, ascending: those that the metadata names, and those with a name that means an end. None if the file has no vocabulary.
///
/// # Errors
/// [`GgufError`] with the key, if the vocabulary's lists do not fit each other.
pub fn end_tokens(gguf: &Gguf) -> Result<Vec<u64>, GgufError> {
    if gguf.metadata.contains_key(TOKENS) { ends_of(gguf, &Tokens::read(gguf)?) } else { Ok(Vec::new()) }
}

fn ends_of(gguf: &Gguf, tokens: &Tokens<'_>) -> Result<Vec<u64>, GgufError> {
    let mut ends = Vec::new();
    for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        ends.extend(named(gguf, tokens, key)?.map(|(id, _)| id));
    }
    let by_name: Vec<_> = tokens.used().filter(|(_, name)| ENDS.contains(name)).collect();
    ends.extend(by_name.iter().map(|(id, _)| *id as u64));
    // As in llama.cpp, also where the metadata names it.
    if FINAL.iter().all(|last| by_name.iter().any(|(_, name)| name == last)) {
        ends.retain(|&end| !by_name.contains(&(end as usize, END)));
    }
    ends.sort_unstable();
    ends.dedup();
    Ok(ends)
}
