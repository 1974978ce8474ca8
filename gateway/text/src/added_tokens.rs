//! Added tokens that tokenizer_config.json lists (`added_tokens_decoder`) and tokenizer.json does not.
//!
//! transformers adds them when it loads a tokenizer, with the ids that follow. Here they go into a copy of tokenizer.json, which then is read as if it
//! had listed them. Few checkpoints have such tokens, and theirs are read twice.
//!
//! The library numbers added tokens itself. One that would not get the id of its entry is left out and named: the model was trained with another.

use std::collections::{BTreeMap, HashSet};

use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};
use tokenizers::{Model, Tokenizer};

use crate::error::{TextError, clip};

const FILE: &str = "tokenizer.json";

/// Tokens that tokenizer.json lacks.
#[derive(Debug, Default)]
pub(crate) struct Lacking {
    /// Entries of `added_tokens` of tokenizer.json, in the order of their ids.
    entries: Vec<Value>,
    /// Names of the tokens that cannot have the id of their entry.
    pub(crate) left_out: Vec<String>,
}

impl Lacking {
    /// Finds the tokens of `config`, a tokenizer_config.json, that are not in `tokenizer`. `rows`: tokens that the model has, if its config says so.
    pub(crate) fn of(config: &Value, tokenizer: &Tokenizer, rows: Option<u64>) -> Self {
        let listed = config["added_tokens_decoder"].as_object().into_iter().flatten();
        let listed = listed.filter_map(|(id, token)| Some((id.parse::<u32>().ok()?, token)));
        let known = tokenizer.get_added_tokens_decoder();
        // The library numbers those that its model lacks from the number of the model's tokens on.
        let beside = known.values().filter(|token| tokenizer.get_model().token_to_id(&token.content).is_none()).count();
        let mut next = u32::try_from(tokenizer.get_vocab_size(false) + beside).unwrap_or(u32::MAX);
        let (mut lacking, mut seen) = (Self::default(), HashSet::new());
        for (id, token) in listed.collect::<BTreeMap<_, _>>() {
            let Some(content) = token["content"].as_str().filter(|content| !content.is_empty()) else { continue };
            let is_next = match tokenizer.token_to_id(content) {
                // A token of the model that no text is searched for. One with another id is that of tokenizer.json.
                Some(known_id) if known_id == id && !known.contains_key(&id) => false,
                Some(_) => continue,
                None if seen.contains(content) => continue,
                None if id == next && rows.is_none_or(|rows| u64::from(id) < rows) => seen.insert(content),
                None => {
                    lacking.left_out.push(clip(content));
                    continue;
                }
            };
            next += u32::from(is_next);
            let flag = |name: &str, usual: bool| token[name].as_bool().unwrap_or(usual);
            let special = flag("special", false);
            lacking.entries.push(json!({
                "id": id, "content": content, "single_word": flag("single_word", false), "lstrip": flag("lstrip", false),
                "rstrip": flag("rstrip", false), "normalized": flag("normalized", !special), "special": special,
            }));
        }
        lacking
    }

    /// Content of a tokenizer.json with these tokens behind its own; `None` if it lacks none.
    pub(crate) fn merged(&self, json: &[u8]) -> Result<Option<Vec<u8>>, TextError> {
        if self.entries.is_empty() {
            return Ok(None);
        }
        let malformed = |error: serde_json::Error| TextError::malformed(FILE, error);
        let mut file: BTreeMap<String, &RawValue> = serde_json::from_slice(json).map_err(malformed)?;
        let own = file.get("added_tokens").map(|own| serde_json::from_str::<Vec<&RawValue>>(own.get()));
        let entries = self.entries.iter().map(to_raw_value).collect::<Result<Vec<_>, _>>().map_err(malformed)?;
        let mut all = own.transpose().map_err(malformed)?.unwrap_or_default();
        all.extend(entries.iter().map(AsRef::as_ref));
        let all = to_raw_value(&all).map_err(malformed)?;
        file.insert("added_tokens".into(), &all);
        serde_json::to_vec(&file).map(Some).map_err(malformed)
    }
}
