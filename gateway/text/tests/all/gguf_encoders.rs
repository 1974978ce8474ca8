//! Vocabularies of encoders in GGUF files: the tokens that the tokenizer.json of the same model gives (tests/goldens/encoders), and what is refused.

use std::path::Path;

use penstock_gguf::{Gguf, Value, Writer};
use penstock_text::{Encoder, TextFiles, TextModel, VectorPooling, VectorRules};
use serde_json::{Value as Json, json};

/// Cases whose tokenizers llama.cpp converts.
const CASES: [&str; 9] = [
    "bert-cls",
    "bert-rank",
    "bert-long",
    "distilbert-mean",
    "nomic-mean",
    "roberta-mean",
    "xlmr-cls",
    "xlmr-rank",
    "camembert-mean",
];

fn case(name: &str) -> Json {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/goldens/encoders/{name}.json"));
    serde_json::from_slice(&std::fs::read(path).expect("a golden")).expect("a golden")
}

fn texts(list: impl IntoIterator<Item = String>) -> Value {
    Value::Texts(list.into_iter().collect())
}

fn ids(value: &Json) -> Vec<u32> {
    value.as_array().expect("a list").iter().map(|id| id.as_u64().expect("a number") as u32).collect()
}

fn text(value: &Json) -> String {
    value.as_str().expect("text").to_owned()
}

/// Name of a WordPiece token as converters write it.
fn phantom(name: &str, kind: i64) -> String {
    match name.strip_prefix("##") {
        _ if kind == 3 => name.to_owned(),
        Some(part) => part.to_owned(),
        None => format!("▁{name}"),
    }
}

/// Keys of the tokenizer.json of a case, as converters write them.
fn keys(case: &Json) -> Writer {
    let tokenizer = &case["files"]["tokenizer.json"];
    let model = &tokenizer["model"];
    let rows = case["config"]["vocab_size"].as_u64().expect("a size") as usize;
    let mut names: Vec<String> = (0..rows).map(|id| format!("[PAD{id}]")).collect();
    let (mut kinds, mut scores) = (vec![5i64; rows], vec![-10000f32; rows]);
    match &model["vocab"] {
        Json::Array(list) => {
            for (id, entry) in list.iter().enumerate() {
                (names[id], kinds[id], scores[id]) = (text(&entry[0]), 1, entry[1].as_f64().expect("a score") as f32);
            }
        }
        list => {
            for (name, id) in list.as_object().expect("a vocabulary") {
                let id = id.as_u64().expect("an id") as usize;
                (names[id], kinds[id]) = (name.clone(), 1);
            }
        }
    }
    for added in tokenizer["added_tokens"].as_array().expect("added tokens") {
        let id = added["id"].as_u64().expect("an id") as usize;
        (names[id], kinds[id]) = (text(&added["content"]), 3);
    }
    let id_of =
        |token: &str| names.iter().position(|name| *name == text(&case["files"]["tokenizer_config.json"][token]));
    let named = ["cls_token", "sep_token", "unk_token"].map(|token| id_of(token).expect("a token") as i128);
    let mut writer = Writer::default();
    match model["type"].as_str() {
        Some("WordPiece") => {
            writer.key("tokenizer.ggml.model", &Value::Text("bert".into()));
            names = names.iter().zip(&kinds).map(|(name, kind)| phantom(name, *kind)).collect();
        }
        Some("Unigram") => {
            kinds[named[2] as usize] = 2;
            writer
                .key("tokenizer.ggml.model", &Value::Text("t5".into()))
                .key("tokenizer.ggml.add_space_prefix", &Value::Bool(true))
                .key("tokenizer.ggml.scores", &Value::Floats(scores));
        }
        other => {
            assert_eq!(other, Some("BPE"));
            let pair = |merge: &Json| format!("{} {}", text(&merge[0]), text(&merge[1]));
            writer
                .key("tokenizer.ggml.model", &Value::Text("gpt2".into()))
                .key("tokenizer.ggml.pre", &Value::Text("roberta-bpe".into()))
                .key("tokenizer.ggml.merges", &texts(model["merges"].as_array().expect("merges").iter().map(pair)));
        }
    }
    let is_nomic = case["config"]["architectures"][0] == "NomicBertModel";
    writer
        .key("general.architecture", &Value::Text(if is_nomic { "nomic-bert" } else { "bert" }.into()))
        .key("tokenizer.ggml.tokens", &texts(names))
        .key("tokenizer.ggml.token_type", &Value::Integers(kinds))
        .key("tokenizer.ggml.cls_token_id", &Value::Integer(named[0]))
        .key("tokenizer.ggml.seperator_token_id", &Value::Integer(named[1]))
        .key("tokenizer.ggml.unknown_token_id", &Value::Integer(named[2]));
    writer
}

fn read(writer: &Writer) -> Result<TextModel, String> {
    let bytes = writer.finish();
    let gguf = Gguf::read("model.gguf", &mut &bytes[..], bytes.len() as u64).expect("a header");
    TextModel::from_gguf(&gguf).map_err(|error| error.to_string())
}

fn load(writer: &Writer) -> TextModel {
    read(writer).unwrap_or_else(|error| panic!("{error}"))
}

/// The case's own tokenizer. XLM-RoBERTa's splits texts at blanks, as published ones do, and normalizes nothing, as its file then says.
fn original(case: &Json) -> TextModel {
    let mut tokenizer = case["files"]["tokenizer.json"].clone();
    if tokenizer["model"]["type"] == "Unigram" {
        let split = json!([{ "type": "WhitespaceSplit" }, tokenizer["pre_tokenizer"]]);
        tokenizer["pre_tokenizer"] = json!({ "type": "Sequence", "pretokenizers": split });
        tokenizer["normalizer"] = Json::Null;
    }
    let tokenizer_json = serde_json::to_vec(&tokenizer).expect("json").into();
    TextModel::load(&TextFiles { tokenizer_json, ..TextFiles::default() }).expect("a tokenizer that is served")
}

const SAMPLES: [&str; 10] = [
    "",
    "  leading,  double and trailing \n",
    "Tabs\tand\r\nlines\u{a0}and\u{200b}more",
    "The CAT's naïve café; GRÖSSE, Maß, Å",
    "日本語とwords 中文",
    "a [SEP] b [CLS] <s> </s> <mask> [PAD]",
    "🎉 emoji ∑ ½ x²",
    "\u{0}\u{7f}\u{fffd}control",
    "##ed ▁the [unused1] [PAD95]",
    "unbelievably-long_word",
];

#[test]
fn an_encoders_vocabulary_gives_the_tokens_of_transformers() {
    let (mut singles, mut pairs) = (0, 0);
    for name in CASES {
        let case = case(name);
        let model = load(&keys(&case));
        // The Unigram tokenizers of the goldens have a token for a blank at the end, where published ones have none.
        let is_unigram = case["files"]["tokenizer.json"]["model"]["type"] == "Unigram";
        let is_told = |sample: &String| !(is_unigram && sample.ends_with(' '));
        let samples = case["texts"].as_array().into_iter().flatten().map(text);
        for (sample, want) in samples.zip(case["ids"].as_array().expect("ids")).filter(|(sample, _)| is_told(sample)) {
            singles += 1;
            assert_eq!(model.encode(&sample, true).expect("tokens"), ids(want), "{name}, {sample}");
        }
        for (at, pair) in case["pairs"].as_array().into_iter().flatten().enumerate() {
            if !is_told(&text(&pair[0])) || !is_told(&text(&pair[1])) {
                continue;
            }
            pairs += 1;
            let (tokens, begin) = model.encode_pair(&text(&pair[0]), &text(&pair[1])).expect("tokens");
            assert_eq!(tokens, ids(&case["ids"][at]), "{name}, {pair}");
            let types = ids(&case["types"][at]);
            assert_eq!(begin, types.iter().position(|kind| *kind == 1).unwrap_or(0), "{name}, {pair}: {types:?}");
        }
    }
    assert!(singles >= 30 && pairs >= 6, "{singles} texts, {pairs} pairs");
}

#[test]
fn an_encoders_vocabulary_is_that_of_its_tokenizer() {
    for name in CASES {
        let case = case(name);
        let (ours, theirs) = (load(&keys(&case)), original(&case));
        let long = "word".repeat(40);
        for sample in SAMPLES.into_iter().chain([long.as_str()]) {
            let tokens = ours.encode(sample, true).expect("tokens");
            assert_eq!(tokens, theirs.encode(sample, true).expect("tokens"), "{name}: {sample:?}");
            assert_eq!(ours.encode_plain(sample).unwrap(), theirs.encode_plain(sample).unwrap(), "{name}: {sample:?}");
            assert_eq!(ours.decode(&tokens, true), theirs.decode(&tokens, true), "{name}: {sample:?}");
        }
        for (_, id) in theirs_ids(&case) {
            let facts = |model: &TextModel| (model.token_name(id), model.is_special(id));
            assert_eq!(facts(&ours), facts(&theirs), "{name}, token {id}");
        }
    }
}

/// Names and ids of a case's vocabulary.
fn theirs_ids(case: &Json) -> Vec<(String, u32)> {
    match &case["files"]["tokenizer.json"]["model"]["vocab"] {
        Json::Array(list) => list.iter().zip(0..).map(|(entry, id)| (text(&entry[0]), id)).collect(),
        list => {
            let pairs = list.as_object().expect("a vocabulary").iter();
            pairs.map(|(name, id)| (name.clone(), id.as_u64().expect("an id") as u32)).collect()
        }
    }
}

/// A small WordPiece vocabulary: tokens for structure, and `words`.
fn words(words: &[&str], change: impl FnOnce(&mut Writer)) -> Writer {
    let names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
        .into_iter()
        .map(|name| (name, 3))
        .chain(words.iter().map(|word| (*word, 1)));
    let (names, kinds): (Vec<String>, Vec<i64>) = names.map(|(name, kind)| (phantom(name, kind), kind)).unzip();
    let mut writer = Writer::default();
    writer
        .key("general.architecture", &Value::Text("bert".into()))
        .key("tokenizer.ggml.model", &Value::Text("bert".into()))
        .key("tokenizer.ggml.tokens", &texts(names))
        .key("tokenizer.ggml.token_type", &Value::Integers(kinds));
    change(&mut writer);
    writer
}

#[test]
fn a_vocabulary_with_capital_letters_is_cased() {
    let (cased, uncased) = (["A", "Cat", "cat", "café", "cafe", "##s"], ["a", "Cat", "cat", "café", "cafe", "##s"]);
    let flag = |name: &'static str, value: bool| {
        move |writer: &mut Writer| {
            writer.key(&format!("tokenizer.ggml.normalizer.{name}"), &Value::Bool(value));
        }
    };
    let tokens = |writer: Writer, text: &str| load(&writer).encode(text, false).expect("tokens");
    assert_eq!(tokens(words(&cased, |_| ()), "Cats café"), [5, 9, 7]);
    assert_eq!(tokens(words(&uncased, |_| ()), "Cats Café"), [6, 9, 8], "no accents, too");
    assert_eq!(tokens(words(&cased, flag("lowercase", true)), "Cats café"), [6, 9, 8]);
    assert_eq!(tokens(words(&uncased, flag("lowercase", false)), "Cats café"), [5, 9, 7]);
    assert_eq!(tokens(words(&cased, flag("strip_accents", true)), "Cats café"), [5, 9, 8]);
    assert_eq!(tokens(words(&uncased, flag("strip_accents", false)), "Cats café"), [6, 9, 7]);
}

#[test]
fn tokens_of_structure_are_found_by_their_names() {
    // No keys, as in the oldest files; the types of the tokens are absent, too.
    let mut writer = Writer::default();
    writer
        .key("general.architecture", &Value::Text("bert".into()))
        .key("tokenizer.ggml.model", &Value::Text("bert".into()))
        .key("tokenizer.ggml.tokens", &texts(["[UNK]", "[CLS]", "[SEP]", "▁a", "b"].map(str::to_owned)));
    let model = load(&writer);
    assert_eq!(model.encode("ab x", true).expect("tokens"), [1, 3, 4, 0, 2]);
    // Files of RoBERTa's kind name them as those of decoders do.
    let case = case("xlmr-cls");
    let mut writer = keys(&case);
    let model = load(&writer);
    writer
        .key("tokenizer.ggml.eos_token_id", &Value::Integer(1))
        .key("tokenizer.ggml.bos_token_id", &Value::Integer(1));
    assert_eq!(load(&writer).encode("a", true).unwrap(), model.encode("a", true).unwrap(), "the own keys count");
}

/// Rules of normalization that make the letters of the alphabet small.
fn small_letters() -> Vec<i64> {
    let mut units = vec![0u32; 1024];
    units[0] = 256 << 10;
    let mut texts = Vec::new();
    for letter in b'A'..=b'Z' {
        let node = 256 ^ usize::from(letter);
        units[node] = 512 << 10 | 1 << 8 | u32::from(letter);
        units[node ^ 512] = 1 << 31 | texts.len() as u32;
        texts.extend([letter.to_ascii_lowercase(), 0]);
    }
    let bytes = 4096u32.to_le_bytes().into_iter().chain(units.into_iter().flat_map(u32::to_le_bytes)).chain(texts);
    bytes.map(i64::from).collect()
}

#[test]
fn texts_are_normalized_by_the_rules_of_the_file() {
    let charsmap = |list: Vec<i64>| {
        let mut writer = keys(&case("xlmr-cls"));
        writer.key("tokenizer.ggml.precompiled_charsmap", &Value::Integers(list));
        writer
    };
    let (plain, small) = (load(&keys(&case("xlmr-cls"))), load(&charsmap(small_letters())));
    for sample in ["The CAT", "A DOG Barked!", "no letters: 日本語"] {
        let want = plain.encode(&sample.to_ascii_lowercase(), true).expect("tokens");
        assert_eq!(small.encode(sample, true).expect("tokens"), want);
    }
    assert_ne!(plain.encode("CAT", true).unwrap(), small.encode("CAT", true).unwrap());
    // Bytes with a sign.
    let signed = small_letters().into_iter().map(|byte| if byte > 127 { byte - 256 } else { byte }).collect();
    assert_eq!(load(&charsmap(signed)).encode("CAT", true).unwrap(), small.encode("CAT", true).unwrap());
    assert_eq!(load(&charsmap(Vec::new())).encode("CAT", true).unwrap(), plain.encode("CAT", true).unwrap());
    let damaged = |change: fn(&mut Vec<i64>)| {
        let mut list = small_letters();
        change(&mut list);
        read(&charsmap(list)).expect_err("damaged")
    };
    let changes: [fn(&mut Vec<i64>); 4] = [
        |list| list.truncate(1000),
        |list| list[7] = 100,
        |list| list[4 + 4 * (256 ^ 512 ^ 65)] = 200,
        |list| {
            list[9] = 256;
        },
    ];
    for change in changes {
        let error = damaged(change);
        assert!(error.contains("tokenizer.ggml.precompiled_charsmap: is damaged"), "{error}");
    }
}

#[test]
fn vocabularies_of_encoders_that_say_too_little_are_refused() {
    let wordless = |names: &[&str], keys: &[(&str, Value)]| {
        let mut writer = Writer::default();
        writer
            .key("general.architecture", &Value::Text("bert".into()))
            .key("tokenizer.ggml.model", &Value::Text("bert".into()))
            .key("tokenizer.ggml.tokens", &texts(names.iter().map(|name| (*name).to_owned())));
        for (key, value) in keys {
            writer.key(&format!("tokenizer.ggml.{key}"), value);
        }
        read(&writer).expect_err("refused")
    };
    let of_structure = ["[UNK]", "[CLS]", "[SEP]"];
    for (missing, key) in [("[UNK]", "unknown_token_id"), ("[CLS]", "cls_token_id"), ("[SEP]", "seperator_token_id")] {
        let names: Vec<&str> = of_structure.into_iter().filter(|name| *name != missing).collect();
        let error = wordless(&names, &[]);
        assert!(error.contains(&format!("tokenizer.ggml.{key}: is missing")) && error.contains(missing), "{error}");
    }
    let unused = ("token_type", Value::Integers(vec![3, 5, 3]));
    let error = wordless(&of_structure, &[unused, ("cls_token_id", Value::Integer(1))]);
    assert!(error.contains("token 1 is named by the metadata, and of the type of unused ones"), "{error}");
    let twice = ("token_type", Value::Integers(vec![3, 3, 3, 3, 1]));
    let error = wordless(&["[UNK]", "[CLS]", "[SEP]", "word", "▁word"], &[twice]);
    assert!(error.contains("has \"word\" twice, again as token 4"), "{error}");
    let mut writer = keys(&case("xlmr-cls"));
    assert!(read(writer.key("tokenizer.ggml.precompiled_charsmap", &Value::Text("x".into()))).is_err());
    let scores = |score: f32| {
        let mut writer = Writer::default();
        writer
            .key("tokenizer.ggml.model", &Value::Text("t5".into()))
            .key("tokenizer.ggml.tokens", &texts(["<unk>", "a"].map(str::to_owned)))
            .key("tokenizer.ggml.token_type", &Value::Integers(vec![2, 1]))
            .key("tokenizer.ggml.scores", &Value::Floats(vec![0.0, score]));
        read(&writer).map(|_| ())
    };
    assert_eq!(scores(-1.0), Ok(()));
    assert!(scores(f32::NAN).expect_err("no number").contains("tokenizer.ggml.scores: is NaN for token 1"));
}

#[test]
fn an_encoders_file_is_an_embedding_model() {
    let path = std::env::temp_dir().join(format!("penstock-encoder-{}.gguf", std::process::id()));
    for (kind, pooling) in [
        (None, VectorPooling::Mean),
        (Some(1), VectorPooling::Mean),
        (Some(2), VectorPooling::First),
        (Some(3), VectorPooling::Last),
    ] {
        let writer = words(&["a"], |writer| {
            writer.key("bert.embedding_length", &Value::Integer(96));
            if let Some(kind) = kind {
                writer.key("bert.pooling_type", &Value::Integer(kind));
            }
        });
        std::fs::write(&path, writer.finish()).expect("written");
        assert_eq!(Encoder::of(&path).expect("a file"), Some(Encoder::States));
        let rules = VectorRules::read(&path).expect("rules").expect("an embedding model");
        assert_eq!((rules.pooling, rules.normalize, rules.lowercases), (pooling, true, false), "{kind:?}");
    }
    std::fs::remove_file(&path).expect("removed");
}
