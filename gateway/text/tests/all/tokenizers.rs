//! Tokenizers of the byte-level and the SentencePiece kind, against Hugging Face's results for the same texts
//! (goldens/make_tokenizers.py).

use crate::common;

use std::path::{Path, PathBuf};

use common::dir;
use penstock_text::{Detokenizer, TextFiles, TextModel};
use serde_json::Value;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/tokenizers")
}

fn load(tokenizer: &Path) -> TextModel {
    TextModel::load(&TextFiles { tokenizer_json: std::fs::read(tokenizer).unwrap().into(), ..TextFiles::default() })
        .unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn incremental(model: &TextModel, ids: &[u32], keep_special: bool) -> String {
    let (mut detokenizer, mut text) = (Detokenizer::new(keep_special, true), String::new());
    ids.iter().for_each(|&id| detokenizer.push(model, id, &mut text));
    detokenizer.finish(&mut text);
    text
}

#[track_caller]
fn check(name: &str, model: &TextModel) {
    let cases: Value =
        serde_json::from_slice(&std::fs::read(folder().join(format!("{name}.cases.json"))).unwrap()).unwrap();
    for case in cases.as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let (all, bare) = (ids(&case["ids"]), ids(&case["bare"]));
        assert_eq!(model.encode(text, true).unwrap(), all, "{name} {text:?}");
        assert_eq!(model.encode(text, false).unwrap(), bare, "{name} {text:?}");
        assert_eq!(model.decode(&bare, true), case["kept"].as_str().unwrap(), "{name} {text:?}");
        assert_eq!(model.decode(&all, false), case["shown"].as_str().unwrap(), "{name} {text:?}");
        for length in 0..=all.len() {
            for keep_special in [false, true] {
                let whole = model.decode(&all[..length], keep_special);
                assert_eq!(incremental(model, &all[..length], keep_special), whole, "{name} {text:?} {length}");
            }
        }
        let plain = model.encode_plain(text).unwrap();
        assert!(!plain.iter().any(|&id| model.is_special(id)), "{name} {text:?}");
        if !text.contains(['<', '|']) {
            assert_eq!(plain, bare, "{name} {text:?}: the same without control tokens");
        }
    }
}

#[test]
fn byte_level() {
    check("penstock-demo", &load(&dir().join("tokenizer.json")));
}

#[test]
fn sentencepiece_with_a_blank_before_every_piece() {
    check("sentencepiece-normalizer", &load(&folder().join("sentencepiece-normalizer.json")));
}

#[test]
fn sentencepiece_with_a_blank_before_the_text() {
    check("sentencepiece-metaspace", &load(&folder().join("sentencepiece-metaspace.json")));
}

#[test]
fn sentencepiece_without_a_blank() {
    check("sentencepiece-none", &load(&folder().join("sentencepiece-none.json")));
}

#[test]
fn control_tokens_as_text_get_no_blanks_of_their_own() {
    for name in ["sentencepiece-normalizer", "sentencepiece-metaspace", "sentencepiece-none"] {
        let model = load(&folder().join(format!("{name}.json")));
        let text = "say </s> twice:</s><s>";
        assert_eq!(model.decode(&model.encode_plain(text).unwrap(), true), text, "{name}");
    }
}

#[test]
fn an_answer_keeps_the_blank_that_parts_it_from_its_prompt() {
    let model = load(&folder().join("sentencepiece-normalizer.json"));
    let (mut detokenizer, mut text) = (Detokenizer::new(false, false), String::new());
    model.encode("Hello", false).unwrap().iter().for_each(|&id| detokenizer.push(&model, id, &mut text));
    assert_eq!(text, " Hello");
}
