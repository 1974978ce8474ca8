//! WordPiece vocabularies (`bert`): those of BERT, DistilBERT and NomicBERT.
//!
//! llama.cpp's converter writes `▁word` for a word and `part` for a word's further part, `##part` in the original. A file seldom says whether texts are
//! made lower case; then the vocabulary does: one that has capital letters is cased.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value as Json, json};

use crate::error::shown;
use crate::tokens::{Kind, Pair, TOKENS, Tokens, ends, template};
use crate::{Gguf, GgufError};

/// Mark of a token that begins a word.
const BEGIN: char = '▁';
/// Mark of a word's further part in tokenizer.json.
const FURTHER: &str = "##";
/// Token for a word that cannot be put together.
const UNKNOWN: &str = "[UNK]";

/// tokenizer.json of the vocabulary.
///
/// # Errors
/// [`GgufError`] with the key: no token for unknown words, or none before or behind texts; two tokens of one name.
pub(crate) fn tokenizer(gguf: &Gguf, tokens: &Tokens<'_>) -> Result<Json, GgufError> {
    let around = ends(gguf, tokens, ["[CLS]", "[SEP]"])?;
    let unknown = match tokens.unknown(gguf)? {
        Some(id) => id,
        None => tokens.used().find(|(_, name)| *name == UNKNOWN).map(|(id, _)| id).ok_or_else(|| {
            let reason = format!("is missing, and so is a token {UNKNOWN}");
            gguf.refuse("tokenizer.ggml.unknown_token_id", reason)
        })?,
    };
    let named = HashSet::from([around[0], around[1], unknown]);
    let names: Vec<(usize, String)> = tokens
        .used()
        .map(|(id, name)| (id, if named.contains(&id) { name.to_owned() } else { original(name, tokens.kinds[id]) }))
        .collect();
    let mut vocabulary = Map::new();
    for (id, name) in &names {
        if vocabulary.insert(name.clone(), (*id).into()).is_some() {
            return Err(gguf.refuse(TOKENS, format!("has \"{}\" twice, again as token {id}", shown(name))));
        }
    }
    let of_id: HashMap<usize, &str> = names.iter().map(|(id, name)| (*id, name.as_str())).collect();
    let name = |id: usize| {
        let unused =
            || gguf.refuse(TOKENS, format!("token {id} is named by the metadata, and of the type of unused ones"));
        of_id.get(&id).copied().ok_or_else(unused)
    };
    let [first, last] = [around[0], around[1]].map(|id| name(id).map(|name| (id as u64, name)));
    let is_cased = ('A'..='Z').any(|letter| vocabulary.contains_key(&letter.to_string()));
    let lowercases = gguf.flag("tokenizer.ggml.normalizer.lowercase")?.unwrap_or(!is_cased);
    let normalizer = json!({
        "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
        // Without a value, accents go where texts are made lower case.
        "strip_accents": gguf.flag("tokenizer.ggml.normalizer.strip_accents")?, "lowercase": lowercases,
    });
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": tokens.added_of(names.iter().map(|(id, name)| (*id, name.as_str()))),
        "normalizer": normalizer,
        "pre_tokenizer": { "type": "BertPreTokenizer" },
        "post_processor": template(Some(first?), Some(last?), Pair::Typed),
        "decoder": { "type": "WordPiece", "prefix": FURTHER, "cleanup": true },
        "model": {
            "type": "WordPiece", "unk_token": name(unknown)?, "continuing_subword_prefix": FURTHER,
            "max_input_chars_per_word": 100, "vocab": vocabulary,
        },
    }))
}

/// Name of a token before it was converted.
fn original(name: &str, kind: Kind) -> String {
    // Some converters have left all names in brackets as they are.
    let is_bracketed = name.len() > 2 && name.starts_with('[') && name.ends_with(']');
    if kind == Kind::Control || is_bracketed {
        return name.to_owned();
    }
    match name.strip_prefix(BEGIN) {
        // The mark alone is the further part `##▁`: no word is empty.
        None | Some("") => format!("{FURTHER}{name}"),
        Some(word) => word.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_from_before_the_conversion() {
        let convert = |name: &str| name.strip_prefix(FURTHER).map_or_else(|| format!("{BEGIN}{name}"), str::to_owned);
        for name in ["the", "##ing", "▁", "##▁", "▁x", "#", "##", "###", "[unused3]", "日", "##日"] {
            assert_eq!(original(&convert(name), Kind::Normal), name);
        }
        assert_eq!(original("[CLS]", Kind::Control), "[CLS]");
        assert_eq!(original("▁[X]", Kind::UserDefined), "[X]");
        assert_eq!(
            ["[unused1]", "[", "]", "[]"].map(|name| original(name, Kind::Normal)),
            ["[unused1]", "##[", "##]", "##[]"]
        );
    }
}
