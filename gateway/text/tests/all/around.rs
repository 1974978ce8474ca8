//! Additions of tokenizer_config.json to a tokenizer.json: tokens around texts, and tokens that tokenizer.json does not list.

use std::path::Path;

use penstock_text::{Task, TextFiles, TextModel, VectorPooling, VectorRules};
use serde_json::{Value, json};

use crate::common::{dir, model};

/// A tokenizer.json whose texts begin with `<s>`, as those of Llama and Mistral.
fn beginning() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/tokenizers/sentencepiece-normalizer.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The demo model's tokenizer.json, which puts nothing around texts.
fn bare() -> Value {
    serde_json::from_slice(&std::fs::read(dir().join("tokenizer.json")).unwrap()).unwrap()
}

/// [`bare`] with a template that ends texts with `<|endoftext|>`, as Qwen3-Embedding has it.
fn ending() -> Value {
    let (text, end) = (|id: &str| json!({"Sequence": {"id": id, "type_id": 0}}), "<|endoftext|>");
    let special = json!({"SpecialToken": {"id": end, "type_id": 0}});
    let mut json = bare();
    json["post_processor"] = json!({
        "type": "TemplateProcessing", "single": [text("A"), special], "pair": [text("A"), special, text("B"), special],
        "special_tokens": {end: {"id": end, "ids": [4087], "tokens": [end]}},
    });
    json
}

fn files<'f>(tokenizer: &Value, config: &Value) -> TextFiles<'f> {
    TextFiles {
        tokenizer_json: serde_json::to_vec(tokenizer).unwrap().into(),
        tokenizer_config_json: Some(serde_json::to_vec(config).unwrap().into()),
        ..TextFiles::default()
    }
}

fn load(tokenizer: &Value, config: &Value) -> TextModel {
    TextModel::load(&files(tokenizer, config)).unwrap()
}

fn vectors(pooling: VectorPooling) -> Task {
    let mut rules = VectorRules::default();
    rules.pooling = pooling;
    Task::Embed(rules)
}

/// Tokens before and behind a text, for prompts and for vectors of the last token and of all.
#[track_caller]
fn check(tokenizer: &Value, config: &Value, prompts: [&[u32]; 2], [last, mean]: [[&[u32]; 2]; 2]) {
    let by_task =
        [(Task::Generate, prompts), (vectors(VectorPooling::Last), last), (vectors(VectorPooling::Mean), mean)];
    for (task, [before, behind]) in by_task {
        let model = load(tokenizer, config).with_task(task.clone()).unwrap();
        for text in ["Hello", "of the", "a"] {
            let plain = model.encode(text, false).unwrap();
            let want = [before, &plain, behind].concat();
            assert_eq!(model.encode(text, true).unwrap(), want, "{task:?} {config}");
            assert_eq!(model.with_special_tokens(plain).unwrap(), want, "{task:?} {config}");
        }
        assert_eq!(model.tokenizer_hash(), load(tokenizer, &json!({})).tokenizer_hash(), "workers hash the file");
    }
}

const BARE: [&[u32]; 2] = [&[], &[]];

#[test]
fn texts_of_vectors_end_as_the_config_says() {
    let config = |class: &str, begins: bool, ends: bool, eos: &str| json!({"tokenizer_class": class, "add_bos_token": begins, "add_eos_token": ends, "bos_token": "<s>", "eos_token": eos});
    // e5-mistral.
    let (begun, whole): ([&[u32]; 2], [&[u32]; 2]) = ([&[1], &[]], [&[1], &[2]]);
    check(&beginning(), &config("LlamaTokenizer", true, true, "</s>"), begun, [whole; 2]);
    check(&beginning(), &config("LlamaTokenizer", true, false, "</s>"), begun, [begun; 2]);
    // gte-Qwen2, whose class comes with the checkpoint.
    let end = "<|endoftext|>";
    check(&bare(), &config("Qwen2Tokenizer", false, true, end), BARE, [[&[], &[4087]], BARE]);
    check(&bare(), &config("Qwen2Tokenizer", false, false, end), BARE, [BARE; 2]);
    // Qwen3-Embedding: one end is enough, whichever it is.
    let ended: [&[u32]; 2] = [&[], &[4087]];
    for eos in [end, "<|im_end|>"] {
        check(&ending(), &config("Qwen2Tokenizer", false, true, eos), ended, [ended; 2]);
    }
}

#[test]
fn an_end_without_an_id_is_refused_where_texts_need_it() {
    for (eos, words) in [(json!("<gone>"), "\"<gone>\""), (Value::Null, "no eos_token is named")] {
        let model = || load(&bare(), &json!({"add_eos_token": true, "eos_token": eos}));
        let error = model().with_task(vectors(VectorPooling::Last)).expect_err("refused").to_string();
        assert!(error.contains("tokenizer_config.json: add_eos_token is true") && error.contains(words), "{error}");
        assert!(model().with_task(Task::Generate).is_ok() && model().with_task(vectors(VectorPooling::Mean)).is_ok());
    }
}

#[test]
fn prompts_begin_as_the_config_says() {
    let config = |class: &str, begins: Value| json!({"tokenizer_class": class, "add_bos_token": begins, "bos_token": {"content": "<|im_start|>"}});
    let begun: [&[u32]; 2] = [&[4088], &[]];
    // DeepSeek.
    for class in ["LlamaTokenizerFast", "LlamaTokenizer", "GemmaTokenizer"] {
        check(&bare(), &config(class, json!(true)), begun, [begun; 2]);
    }
    // Classes that pass over the key (Llama 3), and a key that says nothing.
    check(&bare(), &config("PreTrainedTokenizerFast", json!(true)), BARE, [BARE; 2]);
    for says_nothing in [json!(false), Value::Null, json!("true")] {
        check(&bare(), &config("LlamaTokenizerFast", says_nothing), BARE, [BARE; 2]);
    }
    // One first token is enough.
    let own: [&[u32]; 2] = [&[1], &[]];
    let llama = json!({"tokenizer_class": "LlamaTokenizer", "add_bos_token": true, "bos_token": "<s>"});
    check(&beginning(), &llama, own, [own; 2]);
}

/// A tokenizer_config.json that lists tokens, each with its id.
fn listing(tokens: &[(u32, &str)]) -> Value {
    let entry = |(id, content): &(u32, &str)| {
        let flags = json!({"content": content, "lstrip": false, "rstrip": false, "normalized": false, "single_word": false, "special": true});
        (id.to_string(), flags)
    };
    json!({"added_tokens_decoder": tokens.iter().map(entry).collect::<serde_json::Map<_, _>>()})
}

#[test]
fn tokens_that_only_the_config_lists_are_tokens() {
    // The order of a JSON object is not that of the ids.
    let read = load(&bare(), &listing(&[(4097, "<|second|>"), (4096, "<|first|>"), (4087, "<|endoftext|>")]));
    assert_eq!(
        (read.vocab_size(), read.token_id("<|first|>"), read.token_id("<|second|>")),
        (4098, Some(4096), Some(4097))
    );
    let text = "on<|second|>e<|first|>";
    let tokens = read.encode(text, false).unwrap();
    assert!(tokens.contains(&4097) && tokens.ends_with(&[4096]), "{tokens:?}");
    assert_eq!((read.decode(&tokens, true), read.decode(&tokens, false)), (text.into(), "one".into()));
    assert!(read.is_special(4096) && read.tokens_left_out().is_empty());
    let plain = read.encode_plain(text).unwrap();
    assert_eq!((plain.iter().all(|id| *id < 4087), read.decode(&plain, true)), (true, text.into()), "a client's text");
    assert_eq!(read.tokenizer_hash(), load(&bare(), &json!({})).tokenizer_hash(), "workers hash the file");
    // SentencePiece, with two added tokens that its model lacks.
    let read = load(&beginning(), &listing(&[(455, "<|new|>")]));
    assert_eq!((read.token_id("<|new|>"), read.token_id("<tool>")), (Some(455), Some(454)));
}

#[test]
fn a_token_of_the_model_that_the_config_lists_is_found_in_texts() {
    let [id] = model().encode("the", false).unwrap()[..] else { panic!("one token") };
    let read = load(&bare(), &listing(&[(id, "the")]));
    assert!(read.is_special(id) && !model().is_special(id));
    assert!(
        read.encode("bathe", false).unwrap().contains(&id) && !model().encode("bathe", false).unwrap().contains(&id)
    );
    assert_eq!(read.vocab_size(), 4096);
}

#[test]
fn tokens_whose_ids_do_not_follow_are_left_out_by_name() {
    let left_out = |tokens: &[(u32, &str)], rows: Option<u32>| {
        let mut files = files(&bare(), &listing(tokens));
        files.config_json = rows.map(|rows| json!({"vocab_size": rows}).to_string().into_bytes().into());
        let read = TextModel::load(&files).unwrap();
        assert!(read.tokens_left_out().iter().all(|token| read.token_id(token).is_none()));
        (read.vocab_size(), read.tokens_left_out().join(" "))
    };
    assert_eq!(left_out(&[(4096, "<a>"), (4098, "<far>")], None), (4097, "<far>".into()));
    assert_eq!(left_out(&[(4000, "<within>")], None), (4096, "<within>".into()));
    assert_eq!(
        left_out(&[(4096, "<a>"), (4097, "<b>")], Some(4097)),
        (4097, "<b>".into()),
        "the model has no row for it"
    );
    assert_eq!(left_out(&[(4096, "<a>"), (4097, "<a>")], None).0, 4097, "a name that comes twice");
    assert_eq!(left_out(&[(4095, "<|im_end|>"), (4096, "")], None), (4096, String::new()), "tokenizer.json counts");
}
