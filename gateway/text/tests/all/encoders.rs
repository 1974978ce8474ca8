//! Tokenizers of encoders against Hugging Face's results for texts and pairs of texts (tests/goldens/encoders).

use std::path::Path;

use penstock_text::{TextFiles, TextModel};
use serde_json::Value;

fn cases() -> Vec<Value> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens/encoders");
    let entries = std::fs::read_dir(folder).expect("goldens").map(|entry| entry.expect("an entry").path());
    entries.map(|path| serde_json::from_slice(&std::fs::read(path).expect("a golden")).expect("a golden")).collect()
}

fn model(case: &Value) -> TextModel {
    let tokenizer_json = serde_json::to_vec(&case["files"]["tokenizer.json"]).expect("json").into();
    TextModel::load(&TextFiles { tokenizer_json, ..TextFiles::default() }).expect("a tokenizer that is served")
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().expect("a list").iter().map(|id| id.as_u64().expect("a number") as u32).collect()
}

#[test]
fn texts_and_pairs_have_the_tokens_of_transformers() {
    let (mut texts, mut pairs) = (0, 0);
    for case in cases() {
        let (name, model) = (&case["case"], model(&case));
        for (text, want) in case["texts"].as_array().into_iter().flatten().zip(case["ids"].as_array().expect("ids")) {
            texts += 1;
            assert_eq!(model.encode(text.as_str().expect("text"), true).expect("tokens"), ids(want), "{name}, {text}");
        }
        for (at, pair) in case["pairs"].as_array().into_iter().flatten().enumerate() {
            let [first, second] = [0, 1].map(|side| pair[side].as_str().expect("text"));
            let (tokens, begin) = model.encode_pair(first, second).expect("tokens");
            pairs += 1;
            assert_eq!(tokens, ids(&case["ids"][at]), "{name}, {pair}");
            let types = ids(&case["types"][at]);
            let want = types.iter().position(|kind| *kind == 1).unwrap_or(0);
            assert_eq!(begin, want, "{name}, {pair}: {types:?}");
        }
    }
    assert!(texts >= 35 && pairs >= 15, "{texts} texts, {pairs} pairs");
}

#[test]
fn names_of_control_tokens_are_text_in_pairs() {
    let case = cases().into_iter().find(|case| case["case"] == "bert-rank").expect("the case");
    let model = model(&case);
    let end = model.token_id("[SEP]").expect("a token");
    let count = |first: &str, second: &str| {
        let (tokens, begin) = model.encode_pair(first, second).expect("tokens");
        (tokens.iter().filter(|token| **token == end).count(), begin)
    };
    assert_eq!(count("a", "b"), (2, 3));
    assert_eq!(count("a [SEP]", "[CLS] b [SEP]").0, 2);
    assert_eq!(model.decode(&model.encode("A dog barked!", true).expect("tokens"), false), "a dog barked!");
}
