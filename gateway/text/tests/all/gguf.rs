//! The text side of GGUF files: the same tokens as from the tokenizer.json of the same model.

use std::collections::HashMap;

use penstock_gguf::{Gguf, Value, Writer};
use penstock_text::TextModel;
use proptest::prelude::*;
use serde_json::Value as Json;

use crate::common;

fn texts(list: impl IntoIterator<Item = String>) -> Value {
    Value::Texts(list.into_iter().collect())
}

/// Keys of a byte-level tokenizer.json, as converters write them.
fn byte_level(tokenizer: &Json, pre: &str, rows: usize) -> Writer {
    let mut tokens: Vec<String> = (0..rows).map(|id| format!("[PAD{id}]")).collect();
    let mut kinds = vec![5i64; rows];
    for (name, id) in tokenizer["model"]["vocab"].as_object().expect("a vocabulary") {
        let id = id.as_u64().expect("an id") as usize;
        (tokens[id], kinds[id]) = (name.clone(), 1);
    }
    for added in tokenizer["added_tokens"].as_array().expect("added tokens") {
        let id = added["id"].as_u64().expect("an id") as usize;
        tokens[id] = added["content"].as_str().expect("a name").to_owned();
        kinds[id] = if added["special"] == true { 3 } else { 4 };
    }
    let pair = |merge: &Json| format!("{} {}", merge[0].as_str().expect("a part"), merge[1].as_str().expect("a part"));
    let merges = tokenizer["model"]["merges"].as_array().expect("merges").iter().map(pair);
    let mut writer = Writer::default();
    writer
        .key("general.architecture", &Value::Text("qwen3".into()))
        .key("qwen3.context_length", &Value::Integer(8192))
        .key("tokenizer.ggml.model", &Value::Text("gpt2".into()))
        .key("tokenizer.ggml.pre", &Value::Text(pre.into()))
        .key("tokenizer.ggml.tokens", &texts(tokens))
        .key("tokenizer.ggml.token_type", &Value::Integers(kinds))
        .key("tokenizer.ggml.merges", &texts(merges));
    writer
}

fn json(file: &str) -> Json {
    serde_json::from_slice(&std::fs::read(common::dir().join(file)).expect("a file")).expect("JSON")
}

fn load(writer: &Writer) -> TextModel {
    let bytes = writer.finish();
    let gguf = Gguf::read("model.gguf", &mut &bytes[..], bytes.len() as u64).unwrap_or_else(|error| panic!("{error}"));
    TextModel::from_gguf(&gguf).unwrap_or_else(|error| panic!("{error}"))
}

fn demo() -> Writer {
    let mut writer = byte_level(&json("tokenizer.json"), "qwen2", 4096);
    let config = json("tokenizer_config.json");
    writer
        .key("tokenizer.ggml.eos_token_id", &Value::Integer(4089))
        .key("tokenizer.ggml.padding_token_id", &Value::Integer(4087))
        .key("tokenizer.ggml.add_bos_token", &Value::Bool(false))
        .key("tokenizer.chat_template", &Value::Text(config["chat_template"].as_str().expect("a template").into()));
    writer
}

const SAMPLES: [&str; 12] = [
    "",
    "Hello, world!",
    " leading and  double   blanks \n\n\nlines\r\n",
    "it's we'LL I'M they've 12345 1,000.5 x²",
    "Grüße aus Köln, Ünïcödé; e\u{301} decomposed",
    "日本語とカタカナ, 中文, 한국어, עברית, العربية",
    "🎉👩‍👩‍👧 emoji",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "fn main() { println!(\"{:?}\", vec![1, 2]); }\n\t\tindent",
    "<tool_call>\n{\"name\": \"f\"}\n</tool_call>",
    "\u{0}\u{7f}\u{a0}\u{200b}",
    "<|endoftext|><|endoftext|>",
];

#[test]
fn the_demo_models_vocabulary_gives_the_same_tokens() {
    let (ours, theirs) = (load(&demo()), common::model());
    for text in SAMPLES {
        for special in [false, true] {
            assert_eq!(ours.encode(text, special).unwrap(), theirs.encode(text, special).unwrap(), "{text:?}");
        }
        assert_eq!(ours.encode_plain(text).unwrap(), theirs.encode_plain(text).unwrap(), "{text:?} plain");
    }
    for id in 0..4096 {
        assert_eq!(
            (ours.token_bytes(id), ours.token_name(id), ours.is_special(id)),
            (theirs.token_bytes(id), theirs.token_name(id), theirs.is_special(id)),
            "token {id}"
        );
    }
    assert_eq!(ours.eos_tokens(), theirs.eos_tokens());
    let ends =
        |model: &TextModel| model.declared_end_tokens().iter().copied().collect::<std::collections::BTreeSet<_>>();
    assert_eq!(ends(&ours), ends(&theirs));
    assert_eq!((ours.vocab_size(), ours.text_bytes_max()), (theirs.vocab_size(), theirs.text_bytes_max()));
    assert_eq!((ours.has_chat_template(), ours.tool_format()), (true, theirs.tool_format()));
    assert_eq!(ours.reasoning_markers().is_some(), theirs.reasoning_markers().is_some());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_text_has_the_same_tokens(text in "(\\PC|[ \\n\\t'a-z0-9]){0,60}") {
        static OURS: std::sync::OnceLock<TextModel> = std::sync::OnceLock::new();
        let ours = OURS.get_or_init(|| load(&demo()));
        let tokens = ours.encode(&text, false).unwrap();
        prop_assert_eq!(&tokens, &common::model().encode(&text, false).unwrap());
        prop_assert_eq!(ours.decode(&tokens, true), common::model().decode(&tokens, true));
    }
}

#[test]
fn every_known_rule_splits_and_an_unknown_one_is_refused() {
    let tokenizer = json("tokenizer.json");
    let refused = |pre: &str| {
        let bytes = byte_level(&tokenizer, pre, 4096).finish();
        let gguf = Gguf::read("model.gguf", &mut &bytes[..], bytes.len() as u64).unwrap();
        TextModel::from_gguf(&gguf).err().map(|error| error.to_string())
    };
    let error = refused("klingon").expect("refused");
    assert!(error.contains("tokenizer.ggml.pre: \"klingon\" is not known"), "{error}");
    let known = error.split("known: ").nth(1).expect("a list").split(" (").next().expect("names").split(", ");
    let mut count = 0;
    for pre in known {
        let model = load(&byte_level(&tokenizer, pre, 4096));
        for text in SAMPLES {
            // NFC changes a text; no other rule does.
            let same = model.decode(&model.encode(text, false).unwrap(), true);
            assert!(same == text || text.contains('\u{301}'), "{pre}: {text:?} {same:?}");
        }
        count += 1;
    }
    assert!(count >= 20, "{count}");
}

#[test]
fn digits_are_split_as_the_rule_says() {
    let tokenizer = json("tokenizer.json");
    // A merge of two digits shows in what groups digits may be merged at all.
    let groups = |pre: &str| {
        let model = load(&byte_level(&tokenizer, pre, 4096));
        let tokens = model.encode("1234567", false).unwrap();
        tokens.iter().map(|&id| model.token_bytes(id).len()).max().expect("tokens")
    };
    assert_eq!((groups("qwen2"), groups("smollm")), (1, 1));
}

/// Tokens of SentencePiece's own algorithm: the pair whose merge has the best score first, the leftmost of equals; bytes for what is left.
fn sentence_piece(text: &str, ids: &HashMap<String, (u32, f32)>) -> Vec<u32> {
    let mut pieces: Vec<String> = format!("▁{}", text.replace(' ', "▁")).chars().map(String::from).collect();
    loop {
        let score = |i: usize| ids.get(&format!("{}{}", pieces[i], pieces[i + 1])).map(|(_, score)| *score);
        let mut best: Option<(f32, usize)> = None;
        for i in 0..pieces.len().saturating_sub(1) {
            if let Some(score) = score(i)
                && best.is_none_or(|(top, _)| score > top)
            {
                best = Some((score, i));
            }
        }
        let Some((_, i)) = best else { break };
        let right = pieces.remove(i + 1);
        pieces[i].push_str(&right);
    }
    let bytes = |piece: &String| match ids.get(piece) {
        Some((id, _)) => vec![*id],
        None => piece.bytes().map(|byte| ids[&format!("<0x{byte:02X}>")].0).collect(),
    };
    pieces.iter().flat_map(bytes).collect()
}

/// A vocabulary as SentencePiece makes them: control tokens, bytes, merged pieces with falling scores, letters.
fn pieces() -> Vec<(String, f32, i64)> {
    let mut all = vec![("<unk>".to_owned(), 0.0, 2), ("<s>".to_owned(), 0.0, 3), ("</s>".to_owned(), 0.0, 3)];
    all.extend((0..256).map(|byte| (format!("<0x{byte:02X}>"), 0.0, 6)));
    let merged = "▁t he er in ▁a on re ▁the nd ▁s at ou en ▁w or ▁b an it is ar es ▁c ed ing ▁o ▁and ello ▁h ▁hello lo el ll llo ell";
    let letters = "▁etaoinsrhldcumfpgwybvk,.!";
    let of = |(i, piece): (usize, String)| (piece, -(i as f32), 1);
    let names = merged.split(' ').map(str::to_owned).chain(letters.chars().map(String::from));
    all.extend(names.enumerate().map(of));
    all
}

fn spm(change: impl FnOnce(&mut Writer)) -> TextModel {
    let all = pieces();
    let mut writer = Writer::default();
    writer
        .key("general.architecture", &Value::Text("llama".into()))
        .key("tokenizer.ggml.model", &Value::Text("llama".into()))
        .key("tokenizer.ggml.tokens", &texts(all.iter().map(|(name, ..)| name.clone())))
        .key("tokenizer.ggml.scores", &Value::Floats(all.iter().map(|(_, score, _)| *score).collect()))
        .key("tokenizer.ggml.token_type", &Value::Integers(all.iter().map(|(.., kind)| *kind).collect()))
        .key("tokenizer.ggml.bos_token_id", &Value::Integer(1))
        .key("tokenizer.ggml.eos_token_id", &Value::Integer(2))
        .key("tokenizer.ggml.unknown_token_id", &Value::Integer(0));
    change(&mut writer);
    load(&writer)
}

#[test]
fn sentence_piece_vocabularies_give_sentence_pieces_tokens() {
    let model = spm(|_| ());
    let ids: HashMap<String, (u32, f32)> =
        pieces().into_iter().enumerate().map(|(id, (name, score, _))| (name, (id as u32, score))).collect();
    for text in ["hello", "the end, and other things", "Zürich 123", "a  b", "the then there", "日本 the", "llolello"]
    {
        let tokens = model.encode(text, false).unwrap();
        assert_eq!(tokens, sentence_piece(text, &ids), "{text:?}");
        assert_eq!(model.encode(text, true).unwrap(), [&[1], &tokens[..]].concat(), "{text:?}");
        assert_eq!(model.decode(&tokens, false), text);
    }
    assert_eq!(model.eos_tokens(), [2]);
    assert!(model.is_special(1) && model.is_special(0) && !model.is_special(300));
    let bare = spm(|writer| {
        writer.key("tokenizer.ggml.add_bos_token", &Value::Bool(false));
    });
    assert_eq!(bare.encode("the", true).unwrap(), bare.encode("the", false).unwrap());
    let flat = spm(|writer| {
        writer.key("tokenizer.ggml.add_space_prefix", &Value::Bool(false));
    });
    assert_eq!(flat.decode(&flat.encode(" the", false).unwrap(), false), " the");
}

#[test]
fn damaged_vocabularies_are_refused() {
    let refused = |keys: &[(&str, Value)], part: &str| {
        let mut writer = Writer::default();
        for (key, value) in keys {
            writer.key(&format!("tokenizer.ggml.{key}"), value);
        }
        let bytes = writer.finish();
        let gguf = Gguf::read("model.gguf", &mut &bytes[..], bytes.len() as u64).unwrap();
        let error = TextModel::from_gguf(&gguf).expect_err("refused").to_string();
        assert!(error.contains(part), "{error}; expected {part}");
    };
    let model = |name: &str| ("model", Value::Text(name.into()));
    let tokens = || ("tokens", texts(["a".to_owned(), "b".to_owned()]));
    refused(&[], "tokenizer.ggml.tokens: is missing");
    refused(&[tokens(), model("bert")], "\"bert\" is not supported");
    refused(&[tokens(), model("gpt2")], "tokenizer.ggml.pre: is missing");
    refused(&[tokens(), model("llama")], "tokenizer.ggml.scores: is missing");
    refused(&[("tokens", texts(["a".to_owned(), "a".to_owned()]))], "has \"a\" twice");
    refused(&[tokens(), ("token_type", Value::Integers(vec![1]))], "needs one integer for each of 2 tokens");
    refused(&[("tokens", texts(["a".repeat(2000)]))], "of 2000 bytes");
    // Half a megabyte of tokens, each of which can be put together in as many ways as it has letters.
    let chain: Vec<String> = (1..=1024).map(|length| "a".repeat(length)).collect();
    let scores = ("scores", Value::Floats(vec![0.0; chain.len()]));
    refused(&[("tokens", texts(chain)), scores, model("llama")], "more merges than any known vocabulary");
    let many: Vec<String> = (0..1100).map(|id| format!("{id:04}{}", "a".repeat(1020))).collect();
    let scores = ("scores", Value::Floats(vec![0.0; many.len()]));
    refused(&[("tokens", texts(many)), scores, model("llama")], "bytes looked up");
    let merges = ("merges", texts(["ab".to_owned()]));
    refused(&[tokens(), model("gpt2"), ("pre", Value::Text("qwen2".into())), merges], "is not two parts");
}
