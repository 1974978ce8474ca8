//! The text side of a GGUF file in Hugging Face's files: tokenizer.json, tokenizer_config.json, generation_config.json.
//!
//! Four kinds of vocabularies are read. `gpt2`: byte-level BPE; tokens and merges are in the file, the rule that splits texts into words is
//! named (`pre.rs`). `llama`: SentencePiece BPE; the file has scores instead of merges, from which merges follow as in Hugging Face's own
//! conversion: each way to put a token together from two others, best score first. `bert` (`word_piece.rs`) and `t5` (`unigram.rs`) are those of
//! encoders.
//!
//! Tokens that mark structure become added tokens. All tokens keep their ids; unused places of the vocabulary stay empty.

use std::collections::HashMap;

use serde_json::{Map, Value as Json, json};

use crate::error::shown;
use crate::tokens::{ENDS, Kind, MODEL, TOKENS, Tokens, around, named};
use crate::{Gguf, GgufError, pre, unigram, word_piece};

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

const PRE: &str = "tokenizer.ggml.pre";
const MERGES: &str = "tokenizer.ggml.merges";

/// Most merges of a vocabulary with scores; one of 262 thousand tokens has 0.6 million.
const MERGES_MAX: usize = 1 << 21;
/// Most bytes of the tokens that merges make, one count per merge; a vocabulary of 262 thousand tokens has 5 MB.
const MERGES_BYTES_MAX: usize = 64 << 20;
/// Most bytes that are looked up to find merges: every token once for each of its characters. A vocabulary of 262 thousand tokens takes 30 MB.
const LOOKUP_BYTES_MAX: usize = 1 << 30;

/// Name of the token that ends an answer in most formats. In that of GPT-OSS, known by [`FINAL`], it ends one of an answer's messages.
const END: &str = "<|end|>";
/// Names of the tokens that end an answer of GPT-OSS.
const FINAL: [&str; 2] = ["<|return|>", "<|call|>"];

/// Key of the chat template. Templates for a purpose have its name behind the key and a dot.
const TEMPLATE: &str = "tokenizer.chat_template";

/// The text side of the file.
///
/// # Errors
/// [`GgufError`] with the key: a kind of vocabulary or a splitting rule that is not known, lists that do not fit each other.
pub fn text_files(gguf: &Gguf) -> Result<TextFiles, GgufError> {
    let tokens = Tokens::read(gguf)?;
    let tokenizer = match gguf.text(MODEL)? {
        Some("gpt2") => byte_level(gguf, &tokens)?,
        Some("llama") => sentence_piece(gguf, &tokens)?,
        Some("bert") => word_piece::tokenizer(gguf, &tokens)?,
        Some("t5") => unigram::tokenizer(gguf, &tokens)?,
        Some(other) => {
            let reason = format!("\"{}\" is not supported; supported: gpt2, llama, bert and t5", shown(other));
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
    let around = around(gguf, tokens, rules.adds_bos)?;
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
    let scores = tokens.scores(gguf)?;
    let unknown = tokens.unknown(gguf)?.map(|id| tokens.names[id].as_str());
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
        "post_processor": around(gguf, tokens, true)?,
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
