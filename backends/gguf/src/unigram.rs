//! Unigram vocabularies (`t5`): those of XLM-RoBERTa (bge-m3, multilingual-e5).
//!
//! Texts are split at blanks, as these models' tokenizer.json has it and SentencePiece with `remove_extra_whitespaces`. The file's own key of this name
//! is not read: converters have written another setting of the tokenizer into it.

use serde_json::{Value as Json, json};

use crate::tokens::{Kind, Tokens, around};
use crate::{Gguf, GgufError, charsmap};

/// tokenizer.json of the vocabulary.
///
/// # Errors
/// [`GgufError`] with the key: scores that are no numbers, no token for unknown pieces or none around texts, damaged rules of normalization.
pub(crate) fn tokenizer(gguf: &Gguf, tokens: &Tokens<'_>) -> Result<Json, GgufError> {
    let scores = tokens.scores(gguf)?;
    if let Some(at) = scores.iter().position(|score| !score.is_finite()) {
        return Err(gguf.refuse("tokenizer.ggml.scores", format!("is {} for token {at}", scores[at])));
    }
    let Some(unknown) = tokens.unknown(gguf)? else {
        return Err(gguf.refuse("tokenizer.ggml.unknown_token_id", "is missing"));
    };
    let of_normal =
        scores.iter().zip(&tokens.kinds).filter(|(_, kind)| **kind == Kind::Normal).map(|(score, _)| *score);
    let least = of_normal.fold(0.0, f32::min);
    // The list is in the order of ids, so that unused places have an entry: a name with a blank, which no piece of a text has, and a score that leaves
    // that of unknown pieces (10 below the least) alone.
    let entry = |id: usize| match tokens.kinds[id] {
        Kind::Unused => json!([format!(" {id}"), f64::from(least)]),
        _ => json!([tokens.names[id], f64::from(scores[id])]),
    };
    let scheme = if gguf.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true) { "always" } else { "never" };
    let metaspace = json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true });
    let normalizer = charsmap::read(gguf)?
        .map(|map| json!({ "type": "Precompiled", "precompiled_charsmap": charsmap::base64(&map) }));
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": tokens.added(),
        "normalizer": normalizer,
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [{ "type": "WhitespaceSplit" }, metaspace] },
        "post_processor": around(gguf, tokens, true)?,
        "decoder": metaspace,
        "model": {
            "type": "Unigram", "unk_id": unknown, "byte_fallback": tokens.kinds.contains(&Kind::Byte),
            "vocab": (0..tokens.names.len()).map(entry).collect::<Vec<_>>(),
        },
    }))
}
