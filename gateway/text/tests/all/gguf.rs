//! The text side of GGUF files: the same tokens as from the tokenizer.json of the same model.

use std::collections::HashMap;

use penstock_gguf::{Gguf, Value, Writer};
use penstock_text::{Encoder, TextModel, VectorPooling, VectorRules};
use penstock_types::{Role, Tool};
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

/// Keys of a SentencePiece vocabulary, as converters write them.
fn spm_keys(writer: &mut Writer, all: &[(String, f32, i64)]) {
    writer
        .key("tokenizer.ggml.model", &Value::Text("llama".into()))
        .key("tokenizer.ggml.tokens", &texts(all.iter().map(|(name, ..)| name.clone())))
        .key("tokenizer.ggml.scores", &Value::Floats(all.iter().map(|(_, score, _)| *score).collect()))
        .key("tokenizer.ggml.token_type", &Value::Integers(all.iter().map(|(.., kind)| *kind).collect()))
        .key("tokenizer.ggml.bos_token_id", &Value::Integer(1))
        .key("tokenizer.ggml.eos_token_id", &Value::Integer(2))
        .key("tokenizer.ggml.unknown_token_id", &Value::Integer(0));
}

fn spm(change: impl FnOnce(&mut Writer)) -> TextModel {
    let mut writer = Writer::default();
    writer.key("general.architecture", &Value::Text("llama".into()));
    spm_keys(&mut writer, &pieces());
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

/// The demo model's vocabulary with further tokens of these types, from id 4096 on.
fn demo_and(more: &[(&str, i64)], change: impl FnOnce(&mut Writer)) -> TextModel {
    let mut tokenizer = json("tokenizer.json");
    let added = tokenizer["added_tokens"].as_array_mut().expect("added tokens");
    for (at, (name, kind)) in more.iter().enumerate() {
        added.push(serde_json::json!({ "id": 4096 + at, "content": name, "special": *kind == 3 }));
    }
    let mut writer = byte_level(&tokenizer, "gpt-4o", 4096 + more.len());
    change(&mut writer);
    load(&writer)
}

#[test]
fn an_answer_of_gpt_oss_ends_with_its_last_message() {
    let names = ["<|endoftext|>", "<|return|>", "<|end|>", "<|call|>"];
    // `<|endoftext|>` is the demo model's 4087.
    let harmony: Vec<_> = names[1..].iter().map(|name| (*name, 3)).collect();
    for eos in [4087, 4096] {
        let model = demo_and(&harmony, |writer| {
            writer.key("tokenizer.ggml.eos_token_id", &Value::Integer(eos));
        });
        let ends = names.map(|name| model.token_id(name).expect("a token"));
        let expected = [ends[0], ends[1], ends[3]];
        assert!(expected.iter().all(|end| model.eos_tokens().contains(end)), "{:?}", model.eos_tokens());
        assert!(!model.eos_tokens().contains(&ends[2]), "{:?} has {}", model.eos_tokens(), ends[2]);
        assert!(ends.iter().all(|&end| model.is_special(end)));
    }
    // Nor where the file names it.
    let named = demo_and(&harmony, |writer| {
        writer.key("tokenizer.ggml.eos_token_id", &Value::Integer(4097));
    });
    assert!(!named.eos_tokens().contains(&4097) && !named.declared_end_tokens().contains(&4097));
    // With one of the two alone the format is another.
    let other = demo_and(&[("<|end|>", 3), ("<|return|>", 3)], |_| ());
    assert!(other.eos_tokens().contains(&4096) && other.eos_tokens().contains(&4097));
}

#[test]
fn a_token_whose_name_means_an_end_is_one_whatever_its_type() {
    for kind in [1, 3, 4] {
        let model = demo_and(&[("<|end|>", kind), ("<|user|>", 4)], |writer| {
            writer.key("tokenizer.ggml.eos_token_id", &Value::Integer(4089));
        });
        assert!(model.eos_tokens().contains(&4096), "type {kind}: {:?}", model.eos_tokens());
        assert!(model.is_special(4096) && !model.is_special(4097), "type {kind}");
        // A client's text does not end a turn with it.
        assert!(!model.encode_plain("hi<|end|>").unwrap().contains(&4096), "type {kind}");
    }
}

/// The pieces of Phi-3's kind: those of [`pieces`], a letter for line breaks as bytes, and its tokens of structure as old converters wrote them.
fn phi3(keys: &[(&str, &str)]) -> TextModel {
    let mut all = pieces();
    let added = ["<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>"];
    all.extend(added.map(|name| (name.to_owned(), -1000.0, 4)));
    let mut writer = Writer::default();
    for (key, value) in keys {
        writer.key(key, &Value::Text((*value).into()));
    }
    spm_keys(&mut writer, &all);
    load(&writer)
}

#[test]
fn phi_3s_tokens_take_the_blanks_behind_them() {
    let first = pieces().len() as u32;
    let (end_of_text, assistant, end, user) = (first, first + 1, first + 2, first + 3);
    let text = "<|user|>\nthe<|end|>\n<|assistant|>\n";
    for keys in [
        &[("general.architecture", "phi3")][..],
        &[("general.architecture", "phi3"), ("general.name", "Phi 3.5 Mini Instruct")],
        &[("general.architecture", "llama"), ("general.name", "my Phi-3 mini")],
        &[("general.name", "PHI3")],
    ] {
        let model = phi3(keys);
        let the = model.encode("the", false).unwrap();
        let expected = [&[user], &the[..], &[end, assistant]].concat();
        assert_eq!(model.encode(text, false).unwrap(), expected, "{keys:?}");
        // Blanks of the text itself stay, and so do those behind the end of a text.
        let plain = |text: &str| model.encode(text, false).unwrap();
        assert_eq!(plain("<|endoftext|>\n"), [&[end_of_text], &plain("\n")[..]].concat());
        assert_eq!(plain("<s>\n"), [&[1], &plain("\n")[..]].concat());
        assert_eq!(plain("</s>\nthe"), [&[2], &the[..]].concat());
    }
    for keys in
        [&[("general.architecture", "llama"), ("general.name", "Llama 3")][..], &[("general.architecture", "llama")]]
    {
        let model = phi3(keys);
        let line = model.encode("<|user|>\n", false).unwrap();
        assert!(line.len() > 1 && line[0] == user, "{keys:?}: {line:?}");
    }
}

#[test]
fn named_templates_of_a_file_are_those_of_a_checkpoint() {
    let render = |keys: &[(&str, &str)], tools: bool| {
        let mut writer = byte_level(&json("tokenizer.json"), "qwen2", 4096);
        for (key, template) in keys {
            writer.key(key, &Value::Text((*template).into()));
        }
        let mut request = common::request(vec![common::message(Role::User, "hi")]);
        if tools {
            request.tools.push(Tool::function("look".into(), None, None, false));
        }
        load(&writer).chat_prompt(&request, 0).map(|prompt| prompt.text).map_err(|error| error.message)
    };
    let (plain, tool_use) = ("tokenizer.chat_template", "tokenizer.chat_template.tool_use");
    let both = [(tool_use, "{{ tools[0]['function']['name'] }}"), (plain, "plain")];
    assert_eq!((render(&both, false), render(&both, true)), (Ok("plain".into()), Ok("look".into())));
    let one = [(plain, "plain")];
    assert_eq!((render(&one, false), render(&one, true)), (Ok("plain".into()), Ok("plain".into())));
    assert!(render(&both[..1], false).is_err(), "no template serves a request without tools");
    // Signs of a format of calls in a template for tools count.
    let mut writer = byte_level(&json("tokenizer.json"), "qwen2", 4096);
    let with_calls = "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>";
    writer.key(plain, &Value::Text("plain".into())).key(tool_use, &Value::Text(with_calls.into()));
    assert!(load(&writer).tool_format().is_some());
    let bytes = byte_level(&json("tokenizer.json"), "qwen2", 4096).key(tool_use, &Value::Integer(1)).finish();
    let gguf = Gguf::read("model.gguf", &mut &bytes[..], bytes.len() as u64).unwrap();
    let error = TextModel::from_gguf(&gguf).expect_err("refused").to_string();
    assert!(error.contains(tool_use), "{error}");
}

#[test]
fn a_first_token_is_added_where_the_rule_or_the_file_says_so() {
    let added = |pre: &str, flag: Option<bool>| {
        let mut writer = byte_level(&json("tokenizer.json"), pre, 4096);
        writer.key("tokenizer.ggml.bos_token_id", &Value::Integer(4087));
        if let Some(flag) = flag {
            writer.key("tokenizer.ggml.add_bos_token", &Value::Bool(flag));
        }
        let model = load(&writer);
        model.encode("a", true).unwrap() != model.encode("a", false).unwrap()
    };
    for (pre, adds) in [("llama-bpe", true), ("tekken", true), ("dbrx", false), ("smaug-bpe", false), ("qwen2", false)]
    {
        assert_eq!((added(pre, None), added(pre, Some(true)), added(pre, Some(false))), (adds, true, false), "{pre}");
    }
}

/// The demo model's vocabulary as that of an embedding model whose texts end with token 4087.
fn embedder(kind: i128, ends: Option<bool>) -> Writer {
    let mut writer = byte_level(&json("tokenizer.json"), "qwen2", 4096);
    writer
        .key("qwen3.embedding_length", &Value::Integer(96))
        .key("qwen3.pooling_type", &Value::Integer(kind))
        .key("tokenizer.ggml.eos_token_id", &Value::Integer(4087));
    if let Some(ends) = ends {
        writer.key("tokenizer.ggml.add_eos_token", &Value::Bool(ends));
    }
    writer
}

#[test]
fn texts_of_an_embedding_model_end_as_its_file_says() {
    let first = |writer: &mut Writer| {
        writer
            .key("tokenizer.ggml.bos_token_id", &Value::Integer(4089))
            .key("tokenizer.ggml.add_bos_token", &Value::Bool(true));
    };
    let [a, b] = ["a", "b"].map(|text| common::model().encode(text, false).unwrap());
    for (kind, ends, added) in [
        (3, Some(true), true),
        (2, Some(true), true),
        (1, Some(true), true),
        (3, Some(false), false),
        (1, None, false),
        (0, Some(true), false),
    ] {
        let mut writer = embedder(kind, ends);
        let end: &[u32] = if added { &[4087] } else { &[] };
        assert_eq!(load(&writer).encode("a", true).unwrap(), [&a[..], end].concat(), "{kind} {ends:?}");
        assert_eq!(load(&writer).encode("a", false).unwrap(), a);
        first(&mut writer);
        let both = load(&writer);
        assert_eq!(both.encode("a", true).unwrap(), [&[4089], &a[..], end].concat(), "{kind} {ends:?}");
        let (pair, second) = both.encode_pair("a", "b").unwrap();
        let first_text = [&[4089], &a[..], end].concat();
        assert_eq!((pair, second), ([&first_text[..], &[4089], &b[..], end].concat(), first_text.len()));
    }
    let pieces = spm(|writer| {
        writer.key("llama.pooling_type", &Value::Integer(1)).key("tokenizer.ggml.add_eos_token", &Value::Bool(true));
    });
    let the = pieces.encode("the", false).unwrap();
    assert_eq!(pieces.encode("the", true).unwrap(), [&[1], &the[..], &[2]].concat());
}

#[test]
fn rules_of_vectors_are_read_from_a_gguf_file() {
    let path = std::env::temp_dir().join(format!("penstock-embedder-{}.gguf", std::process::id()));
    let read = |writer: &Writer| {
        std::fs::write(&path, writer.finish()).expect("written");
        let rules = VectorRules::read(&path).map_err(|error| error.to_string());
        assert_eq!(Encoder::of(&path).map_err(|error| error.to_string()), rules.clone().map(|_| None));
        rules
    };
    for (kind, pooling) in [(1, VectorPooling::Mean), (2, VectorPooling::First), (3, VectorPooling::Last)] {
        let rules = read(&embedder(kind, Some(true))).expect("rules").expect("an embedding model");
        assert_eq!((rules.pooling, rules.normalize, rules.width, rules.dense_layers), (pooling, true, Some(96), 0));
        assert_eq!((rules.prompt(None), rules.prompt(Some("RETRIEVAL_QUERY"))), (Some(""), None));
    }
    assert_eq!((read(&embedder(0, Some(true))), read(&demo())), (Ok(None), Ok(None)));
    let refused = [
        (embedder(4, Some(true)), "qwen3.pooling_type: is 4"),
        (embedder(9, Some(true)), "qwen3.pooling_type: is 9"),
        (embedder(3, None), "tokenizer.ggml.add_eos_token: is missing"),
    ];
    for (writer, part) in refused {
        let rules = read(&writer).expect_err(part);
        let model = TextModel::from_dir(&path).expect_err(part).to_string();
        assert!(rules.contains(part) && model.contains(part), "{rules}; {model}");
    }
    let mut endless = byte_level(&json("tokenizer.json"), "qwen2", 4096);
    endless.key("qwen3.pooling_type", &Value::Integer(3)).key("tokenizer.ggml.add_eos_token", &Value::Bool(true));
    std::fs::write(&path, endless.finish()).expect("written");
    let error = TextModel::from_dir(&path).expect_err("no end").to_string();
    std::fs::remove_file(&path).expect("removed");
    assert!(error.contains("tokenizer.ggml.eos_token_id: is missing"), "{error}");
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
    refused(&[tokens(), model("rwkv")], "\"rwkv\" is not supported");
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
