//! Reads a tokenizer.json for the library that tokenizes.
//!
//! The library reads the model inside of the file three times over: as parts whose type is not known yet, as JSON values, and as the model. With 150 thousand
//! tokens and as many merges that is most of a gateway's start. So where the file says that the model is BPE, the model is handed to the library by itself, and
//! the rest of the file with an empty one. Every other file is read whole.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use tokenizers::models::bpe::BPE;
use tokenizers::{AddedToken, Tokenizer};

use crate::bounds::{Bounded, DeclaredToken};
use crate::error::TextError;

const FILE: &str = "tokenizer.json";

/// Parses tokenizer.json. The library panics on some malformed files, and takes any memory for others; a model file must
/// not bring a gateway down.
pub(crate) fn parse(bytes: &[u8]) -> Result<Tokenizer, TextError> {
    let declared = Bounded::read(bytes)?.added_tokens;
    let parsed = std::panic::catch_unwind(|| in_parts(bytes).map_or_else(|| Tokenizer::from_bytes(bytes), Ok))
        .map_err(|_| TextError::malformed(FILE, "the tokenizer library panicked on it"))?;
    let mut tokenizer = parsed.map_err(|error| TextError::malformed(FILE, error))?;
    check_ids(declared, &tokenizer)?;
    // Truncation and padding are settings of a training run; prompts are never cut or padded here.
    tokenizer.with_truncation(None).map_err(|error| TextError::malformed(FILE, error))?;
    tokenizer.with_padding(None);
    // Some damage shows only in use, so one text is encoded on trial.
    let trial = std::panic::AssertUnwindSafe(|| tokenizer.encode_fast("Hello", true).is_ok());
    std::panic::catch_unwind(trial)
        .map_err(|_| TextError::malformed(FILE, "the tokenizer library panicked on a text"))?;
    Ok(tokenizer)
}

/// Tokenizer of a file with a BPE model; `None` if the file is another one, or bad: then the library reads it whole, and says what is wrong.
fn in_parts(bytes: &[u8]) -> Option<Tokenizer> {
    let Parts { mut rest, model, added } = serde_json::from_slice(bytes).ok()?;
    let Kind { is_bpe: true } = serde_json::from_str(model.get()).ok()? else { return None };
    let bpe: BPE = serde_json::from_str(model.get()).ok()?;
    rest.insert("model".into(), serde_json::json!({ "type": "BPE", "vocab": {}, "merges": [] }));
    let mut tokenizer: Tokenizer = serde_json::from_value(Value::Object(rest)).ok()?;
    tokenizer.with_model(bpe);
    // Their ids follow from the model's, so they come behind it.
    tokenizer.add_tokens(added).ok()?;
    Some(tokenizer)
}

/// A tokenizer.json without its model and its added tokens, and these.
struct Parts<'f> {
    rest: Map<String, Value>,
    model: &'f RawValue,
    added: Vec<AddedToken>,
}

impl<'de: 'f, 'f> Deserialize<'de> for Parts<'f> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Whole;
        impl<'de> Visitor<'de> for Whole {
            type Value = Parts<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the object of a tokenizer.json")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Parts<'de>, A::Error> {
                let (mut rest, mut model, mut added) = (Map::new(), None, Vec::new());
                while let Some(key) = map.next_key::<String>()? {
                    match key.as_str() {
                        "model" => model = Some(map.next_value()?),
                        "added_tokens" => added = map.next_value()?,
                        "version" | "truncation" | "padding" | "normalizer" | "pre_tokenizer" | "post_processor"
                        | "decoder" => {
                            rest.insert(key, map.next_value()?);
                        }
                        // The library refuses what it does not know, and says so.
                        other => return Err(serde::de::Error::unknown_field(other, &[])),
                    }
                }
                let model = model.ok_or_else(|| serde::de::Error::missing_field("model"))?;
                Ok(Parts { rest, model, added })
            }
        }
        from.deserialize_map(Whole)
    }
}

/// Type of a model, as its part of the file names it.
struct Kind {
    /// True if the type is `BPE`.
    is_bpe: bool,
}

impl<'de> Deserialize<'de> for Kind {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Whole;
        impl<'de> Visitor<'de> for Whole {
            type Value = Kind;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a tokenizer's model")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Kind, A::Error> {
                let mut kind = String::new();
                while let Some(key) = map.next_key::<String>()? {
                    match key.as_str() {
                        "type" => kind = map.next_value()?,
                        _ => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                Ok(Kind { is_bpe: kind == "BPE" })
            }
        }
        from.deserialize_map(Whole)
    }
}

/// Checks the ids of added tokens. The library numbers them itself and only warns where the file says otherwise: such
/// a model would read other tokens than it was trained on.
fn check_ids(declared: Vec<DeclaredToken>, tokenizer: &Tokenizer) -> Result<(), TextError> {
    for DeclaredToken { id, content } in declared {
        let read = tokenizer.token_to_id(&content);
        if read != Some(id) {
            return Err(TextError::malformed(
                FILE,
                format!("added token {content:?} has id {id}, but comes out as {read:?}"),
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEMO: &str = include_str!("../../../models/penstock-demo/tokenizer.json");

    /// A part of the file replaced by another.
    fn other(part: &str, instead: &str) -> String {
        let json = DEMO.replacen(part, instead, 1);
        assert_ne!(json, DEMO, "{part}");
        json
    }

    #[track_caller]
    fn check(json: &str) {
        let (ours, library) =
            (in_parts(json.as_bytes()).expect("BPE"), Tokenizer::from_bytes(json).expect("a good file"));
        let written = [&ours, &library].map(|tokenizer| tokenizer.to_string(false).expect("JSON"));
        assert_eq!(written[0], written[1]);
        for text in ["What is the capital of France?", "<|im_start|>user\nä 漢 😀\t  <|im_end|>", ""] {
            let ids =
                [&ours, &library].map(|tokenizer| tokenizer.encode(text, true).expect("a text").get_ids().to_vec());
            assert_eq!(ids[0], ids[1], "{text}");
        }
    }

    #[test]
    fn a_file_in_parts_is_the_same_tokenizer() {
        check(DEMO);
        let demo: Value = serde_json::from_str(DEMO).expect("JSON");
        let mut edits: Vec<Value> = vec![demo.clone(), demo.clone(), demo];
        // Merges as older files write them.
        let merges = edits[0]["model"]["merges"].as_array_mut().expect("a list");
        for merge in merges {
            if let Some([left, right]) = merge.as_array().map(Vec::as_slice) {
                *merge = Value::from(format!("{} {}", left.as_str().expect("a name"), right.as_str().expect("a name")));
            }
        }
        let mut far = serde_json::json!({"single_word": false, "lstrip": true, "rstrip": false, "normalized": true, "special": false});
        (far["id"], far["content"]) = (4096.into(), "<far>".into());
        edits[1]["added_tokens"].as_array_mut().expect("a list").push(far);
        edits[1]["normalizer"] = serde_json::json!({"type": "Lowercase"});
        edits[2]["truncation"] =
            serde_json::json!({"max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right"});
        edits[2]["added_tokens"] = Value::Array(Vec::new());
        edits.iter().for_each(|edit| check(&edit.to_string()));
    }

    #[test]
    fn what_is_not_bpe_or_not_good_is_left_to_the_library() {
        let broken = [
            other("\"BPE\"", "\"Unigram\""),
            other("\"BPE\"", "null"),
            other("\"merges\"", "\"merged\""),
            other("\"decoder\"", "\"decoders\""),
            DEMO[..1000].to_owned(),
        ];
        for json in broken {
            assert!(in_parts(json.as_bytes()).is_none());
            assert!(matches!(parse(json.as_bytes()), Err(TextError::Malformed { .. })));
        }
    }
}
