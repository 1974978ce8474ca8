//! Bytes of each token of a tokenizer.json: what the gateway decodes with, and what a worker masks with.
//!
//! The decoder of tokenizer.json is a pipeline over token strings (byte-level alphabet, `▁` for space, `<0x0A>` for a
//! byte, `##` for the rest of a word). For text generation all of it, except for the very start of a text, depends on one token at a time; so it is
//! run once at load, and decoding is copying bytes. A decoder that does not fit this scheme (CTC, `</w>` suffixes) is refused.
//!
//! A worker is not ready before it has this table, so the file is read for the names of tokens alone (`file.rs`): the library that tokenizes
//! takes five times as long, since it also builds what merges tokens.
//!
//! Deliberately absent: texts. Nothing here tokenizes or decodes more than one token.
#![forbid(unsafe_code)]

mod file;

use std::borrow::Cow;

use serde_json::Value;
use tokenizers::DecoderWrapper;

use file::File;

/// Largest token id + 1, far above any published vocabulary; a larger id must not become a table of gigabytes.
const IDS_MAX: u32 = 1 << 22;

/// Most stages of a decoder. Published ones have six or fewer.
const STAGES_MAX: usize = 64;

/// Longest token, in bytes, that a replacement may make of a shorter one.
const REPLACED_BYTES_MAX: usize = 64 << 10;

/// Most bytes of all tokens together: a hundred times those of published vocabularies.
const TABLE_BYTES_MAX: usize = 256 << 20;

/// Longest message of a library that is repeated, in characters: the message may quote the file.
const MESSAGE_CHARS_MAX: usize = 300;

/// Reason why a tokenizer.json has no table of token bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VocabularyError {
    /// The content is not a valid tokenizer.json.
    #[error("{reason}")]
    Malformed {
        /// Description of the fault.
        reason: String,
    },
    /// The content is valid, but uses a feature that is not supported.
    #[error("{what} is not supported")]
    Unsupported {
        /// Name of the feature.
        what: String,
    },
}

impl VocabularyError {
    fn malformed(reason: impl std::fmt::Display) -> Self {
        let text = reason.to_string();
        let printed = text.chars().map(|c| if c.is_control() { ' ' } else { c });
        Self::Malformed { reason: printed.take(MESSAGE_CHARS_MAX).collect() }
    }

    fn unsupported(what: impl Into<String>) -> Self {
        Self::Unsupported { what: what.into() }
    }
}

/// Treatment of the blanks in front of a whole text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartRule {
    /// Blanks are kept, as byte-level vocabularies need it.
    Keep,
    /// Up to this many blanks are dropped (SentencePiece's dummy prefix).
    Strip(usize),
    /// Blanks of the first token are dropped (Metaspace).
    StripFirstToken,
}

/// Token bytes by id, in one allocation.
#[derive(Debug)]
pub struct TokenBytes {
    bytes: Vec<u8>,
    /// End of each id's bytes (`ends[id]`); the start is the end of the id before.
    ends: Vec<u32>,
    special: Vec<bool>,
    /// Treatment of blanks at the beginning of a text.
    pub start: StartRule,
}

/// One stage of the decoder, restricted to a single token.
enum Stage {
    ByteLevel,
    ByteFallback,
    Replace(String, String),
    StripToken { blank: char, start: usize },
    WordPiece { prefix: String, cleanup: bool },
}

impl TokenBytes {
    /// Reads the table from the content of a tokenizer.json. Takes some tens of milliseconds for a vocabulary of 150 thousand.
    ///
    /// The parts of the file that only tokenizing needs (merges, normalizer, splitting) are passed over, good or bad.
    ///
    /// # Errors
    /// [`VocabularyError`] if the content is not a tokenizer.json, the ids are out of range, or its decoder does not work token by token.
    pub fn from_json(bytes: &[u8]) -> Result<Self, VocabularyError> {
        let file = File::read(bytes)?;
        let (stages, start) = stages(&file.decoder)?;
        let names = file.names()?;
        let special = names.iter().map(|name| name.is_some_and(|(_, is_special)| is_special)).collect();
        let alphabet = byte_alphabet();
        let mut table = Self { bytes: Vec::new(), ends: Vec::with_capacity(names.len()), special, start };
        let joins_words = stages.iter().any(|stage| matches!(stage, Stage::WordPiece { .. }));
        for name in names {
            match name {
                // No word, so no blank before it.
                Some((name, true)) if joins_words => table.bytes.extend(name.as_bytes()),
                Some((name, _)) => decode_token(name, &stages, &alphabet, &mut table.bytes)?,
                None => {}
            }
            if table.bytes.len() > TABLE_BYTES_MAX {
                return Err(VocabularyError::malformed(format!(
                    "tokens of more than {TABLE_BYTES_MAX} bytes together"
                )));
            }
            table.ends.push(table.bytes.len() as u32);
        }
        Ok(table)
    }

    /// Number of ids: the largest token id + 1.
    pub fn count(&self) -> u32 {
        self.ends.len() as u32
    }

    /// Bytes of a token; empty for an id without a token.
    pub fn token(&self, id: u32) -> &[u8] {
        let Some(&end) = self.ends.get(id as usize) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id as usize - 1] };
        &self.bytes[start as usize..end as usize]
    }

    /// Returns true if the token is a control token: left out of texts unless asked for.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// Bytes of a token at the beginning of a text.
    pub fn first_token(&self, id: u32) -> &[u8] {
        let bytes = self.token(id);
        let blanks = bytes.iter().take_while(|&&byte| byte == b' ').count();
        match self.start {
            StartRule::Keep => bytes,
            StartRule::Strip(most) => &bytes[blanks.min(most)..],
            StartRule::StripFirstToken => &bytes[blanks..],
        }
    }
}

/// Tokens of WordPiece that have no blank before them in a text.
const CLINGING: [&str; 5] = [" .", " ?", " !", " ,", " n't"];

/// Reads the decoder of a tokenizer.json into stages that work on single tokens.
fn stages(decoder: &Value) -> Result<(Vec<Stage>, StartRule), VocabularyError> {
    if decoder.is_null() {
        return Err(VocabularyError::unsupported("a tokenizer without a decoder"));
    }
    // The library writes out what a file leaves open, and what older files write in other words.
    let read = std::panic::catch_unwind(|| -> Result<Value, serde_json::Error> {
        serde_json::to_value(serde_json::from_value::<DecoderWrapper>(decoder.clone())?)
    });
    let json = read.map_err(|_| VocabularyError::malformed("the tokenizer library panicked on the decoder"))?;
    let mut reading = Reading { stages: Vec::new(), start: StartRule::Keep, fused: false };
    reading.read(&json.map_err(VocabularyError::malformed)?)?;
    if reading.stages.len() > STAGES_MAX {
        let reason = format!("a decoder of {} stages, {STAGES_MAX} at most", reading.stages.len());
        return Err(VocabularyError::malformed(reason));
    }
    Ok((reading.stages, reading.start))
}

struct Reading {
    stages: Vec<Stage>,
    start: StartRule,
    fused: bool,
}

impl Reading {
    fn read(&mut self, json: &Value) -> Result<(), VocabularyError> {
        let text = |key: &str| json[key].as_str().unwrap_or_default().to_owned();
        let kind = text("type");
        match kind.as_str() {
            "Sequence" => {
                for stage in json["decoders"].as_array().into_iter().flatten() {
                    self.read(stage)?;
                }
            }
            "ByteLevel" => self.stages.push(Stage::ByteLevel),
            "ByteFallback" => self.stages.push(Stage::ByteFallback),
            "Fuse" => self.fused = true,
            "Replace" => {
                let Some(pattern) = json["pattern"]["String"].as_str().filter(|pattern| !pattern.is_empty()) else {
                    return Err(VocabularyError::unsupported("a decoder that replaces by regex"));
                };
                self.stages.push(Stage::Replace(pattern.to_owned(), text("content")));
            }
            "Strip" => self.read_strip(json)?,
            "WordPiece" => {
                let cleanup = json["cleanup"].as_bool().unwrap_or(true);
                self.stages.push(Stage::WordPiece { prefix: text("prefix"), cleanup });
                self.start = StartRule::StripFirstToken;
            }
            "Metaspace" => {
                self.stages.push(Stage::Replace(text("replacement"), " ".into()));
                if text("prepend_scheme") != "never" {
                    self.start = StartRule::StripFirstToken;
                }
            }
            _ => return Err(VocabularyError::unsupported(format!("a {kind} decoder"))),
        }
        Ok(())
    }

    fn read_strip(&mut self, json: &Value) -> Result<(), VocabularyError> {
        let count = |key: &str| json[key].as_u64().unwrap_or(0) as usize;
        let blank = json["content"].as_str().and_then(|text| text.chars().next()).unwrap_or(' ');
        if count("stop") != 0 || (self.fused && blank != ' ') {
            return Err(VocabularyError::unsupported("a decoder that strips the end of a text"));
        }
        if self.fused {
            self.start = StartRule::Strip(count("start"));
        } else {
            self.stages.push(Stage::StripToken { blank, start: count("start") });
        }
        Ok(())
    }
}

/// Appends the bytes of the token called `name`.
fn decode_token(name: &str, stages: &[Stage], alphabet: &Alphabet, out: &mut Vec<u8>) -> Result<(), VocabularyError> {
    let mut text = Cow::Borrowed(name);
    for stage in stages {
        match stage {
            // Either stage turns the token into raw bytes, so it must be the last.
            Stage::ByteLevel => {
                let begin = out.len();
                out.extend(text.chars().map_while(|c| alphabet.get(c as usize).copied().flatten()));
                if out.len() - begin < text.chars().count() {
                    out.truncate(begin);
                    out.extend(text.as_bytes());
                }
                return Ok(());
            }
            Stage::ByteFallback => {
                if let Some(byte) = byte_token(&text) {
                    out.push(byte);
                    return Ok(());
                }
            }
            Stage::Replace(from, _) if !text.contains(from.as_str()) => {}
            Stage::Replace(from, to) => text = Cow::Owned(replaced(&text, from, to)?),
            Stage::WordPiece { prefix, cleanup } => {
                let mut joined = match text.strip_prefix(prefix.as_str()).filter(|_| !prefix.is_empty()) {
                    Some(rest) => rest.to_owned(),
                    None => format!(" {text}"),
                };
                if *cleanup && CLINGING.contains(&joined.as_str()) {
                    joined.remove(0);
                }
                text = Cow::Owned(joined);
            }
            Stage::StripToken { blank, start } => {
                let cut: usize = text.chars().take(*start).take_while(|c| c == blank).map(char::len_utf8).sum();
                text.to_mut().drain(..cut);
            }
        }
    }
    out.extend(text.as_bytes());
    Ok(())
}

/// `text` with `to` in place of each `from`. Stages follow each other, so that a few that each make a text longer would fill the memory.
fn replaced(text: &str, from: &str, to: &str) -> Result<String, VocabularyError> {
    let added = text.matches(from).count().saturating_mul(to.len().saturating_sub(from.len()));
    if added > 0 && text.len().saturating_add(added) > REPLACED_BYTES_MAX {
        let reason = format!("a decoder that makes a token longer than {REPLACED_BYTES_MAX} bytes");
        return Err(VocabularyError::malformed(reason));
    }
    Ok(text.replace(from, to))
}

/// Byte that a byte-fallback token like `<0x0A>` stands for; `None` for other tokens.
fn byte_token(text: &str) -> Option<u8> {
    let hex = text.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2).then(|| u8::from_str_radix(hex, 16).ok())?
}

/// Byte by the code of the character that stands for it.
type Alphabet = [Option<u8>; 512];

/// GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on.
fn byte_alphabet() -> Alphabet {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut alphabet = [None; 512];
    let mut others = 256..;
    for byte in 0..=255_u8 {
        let code = if printable(byte) { Some(usize::from(byte)) } else { others.next() };
        alphabet[code.expect("an endless range")] = Some(byte);
    }
    alphabet
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEMO: &[u8] = include_bytes!("../../../models/penstock-demo/tokenizer.json");

    #[test]
    fn the_demo_vocabulary_is_read() {
        let table = TokenBytes::from_json(DEMO).expect("a good file");
        assert_eq!(table.count(), 4096);
        let specials = (0..table.count()).filter(|id| table.is_special(*id)).count();
        assert!(specials > 0 && specials < 64, "{specials}");
        let mut single: Vec<u8> = (0..table.count())
            .filter(|id| !table.is_special(*id))
            .flat_map(|id| match table.token(id) {
                [byte] => Some(*byte),
                _ => None,
            })
            .collect();
        single.sort_unstable();
        single.dedup();
        assert_eq!(single.len(), 256, "every byte is a token");
        assert!(table.token(9999).is_empty() && !table.is_special(9999));
    }

    #[test]
    fn wordpiece_joins_the_parts_of_words() {
        let json = br###"{"version": "1.0", "added_tokens": [{"id": 0, "content": "[CLS]", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}], "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true}, "model":
            {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab":
            {"[CLS]": 0, "[UNK]": 1, "bark": 2, "##ed": 3, ".": 4, "dog": 5}}}"###;
        let table = TokenBytes::from_json(json).expect("a good file");
        let text: Vec<u8> =
            table.first_token(5).iter().chain([2, 3, 4].iter().flat_map(|id| table.token(*id))).copied().collect();
        assert_eq!(text, b"dog barked.");
        assert_eq!((table.token(0), table.is_special(0)), (&b"[CLS]"[..], true));
    }

    /// Names and marks of all tokens as the library reads them, which tokenizes by the same file.
    fn by_library(json: &[u8]) -> Vec<Option<(String, bool)>> {
        let tokenizer = tokenizers::Tokenizer::from_bytes(json).expect("a good file");
        let mut names: Vec<(u32, String, bool)> =
            tokenizer.get_vocab(false).into_iter().map(|(name, id)| (id, name, false)).collect();
        let added = tokenizer.get_added_tokens_decoder();
        names.extend(added.into_iter().map(|(id, token)| (id, token.content, token.special)));
        let count = names.iter().map(|(id, ..)| id + 1).max().expect("a token");
        let mut table = vec![None; count as usize];
        names.into_iter().for_each(|(id, name, special)| table[id as usize] = Some((name, special)));
        table
    }

    #[track_caller]
    fn check_names(json: &str) {
        let file = File::read(json.as_bytes()).expect("a good file");
        let names = file.names().expect("good ids");
        let ours: Vec<_> =
            names.into_iter().map(|name| name.map(|(name, special)| (name.to_owned(), special))).collect();
        assert_eq!(ours, by_library(json.as_bytes()), "{json}");
    }

    /// A tokenizer.json with a byte-level decoder.
    fn file_of(model: &str, added: &[(u32, &str, bool)]) -> String {
        let added = added.iter().map(|(id, content, special)| {
            serde_json::json!({"id": id, "content": content, "special": special, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false})
        });
        let added = Value::from(added.collect::<Vec<_>>());
        format!(
            r#"{{"version": "1.0", "added_tokens": {added}, "decoder": {{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}}, "model": {model}}}"#
        )
    }

    #[test]
    fn names_are_those_of_the_library_for_every_kind_of_model() {
        check_names(std::str::from_utf8(DEMO).expect("a text"));
        let bpe = |vocab: &str| format!(r#"{{"type": "BPE", "merges": [], "vocab": {vocab}}}"#);
        let models = [
            bpe(r#"{"a": 0, "b": 1, "\"\\\u00e9\ud83d\ude00": 2, "ab": 3}"#),
            // Holes, an order that is not that of the ids, and a name that comes twice.
            bpe(r#"{"z": 9, "a": 4, "b": 1, "a": 2}"#),
            bpe(r#"{"a": 5, "b": 0, "a": 0, "c": 1}"#).replace(r#""b": 0, "#, ""),
            r#"{"vocab": {"a": 0, "b": 1}, "merges": ["a b"], "unk_token": null, "type": "BPE"}"#.replace(r#""b": 1"#, r#""b": 1, "ab": 2"#),
            r###"{"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab": {"[UNK]": 0, "##a": 1}}"###.into(),
            r#"{"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"[UNK]": 0, "word": 1}}"#.into(),
            r#"{"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["▁a", -1.5], ["<0x0A>", -2], ["▁a", -3e1]], "byte_fallback": true}"#.into(),
            // Files of old versions have no type.
            bpe(r#"{"a": 0, "b": 1}"#).replace(r#""type": "BPE", "#, ""),
            r#"{"unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.5]]}"#.into(),
        ];
        let added: [&[(u32, &str, bool)]; 5] = [
            &[],
            &[(50, "<s>", true), (51, "</s>", true)],
            // One of the model's own, one that comes twice with other marks, one that is empty.
            &[(0, "a", true), (7, "<s>", true), (7, "<s>", false), (8, "", true), (9, "<e>", false)],
            // Ids of the file that are not those of the names.
            &[(100_000, "<far>", true), (1, "b", false)],
            &[(3, "[UNK]", true), (4, "▁a", false)],
        ];
        for model in &models {
            added.iter().for_each(|added| check_names(&file_of(model, added)));
        }
    }

    #[test]
    fn parts_that_only_tokenizing_needs_are_passed_over() {
        let model = r#"{"type": "BPE", "merges": [["no", "tokens"], 7], "vocab": {"a": 0}}"#;
        let json = file_of(model, &[]).replacen('{', r#"{"normalizer": {"type": "of tomorrow"}, "#, 1);
        let table = TokenBytes::from_json(json.as_bytes()).expect("bytes of tokens");
        assert_eq!((table.count(), table.token(0)), (1, &b"a"[..]));
    }

    #[test]
    fn damaged_files_are_refused() {
        let good = file_of(r#"{"type": "BPE", "merges": [], "vocab": {"a": 0}}"#, &[(1, "<s>", true)]);
        assert!(TokenBytes::from_json(good.as_bytes()).is_ok());
        let broken = [
            ("\"BPE\"", "\"Unigram\""),
            ("\"BPE\"", "\"Trigram\""),
            ("\"merges\": [], ", ""),
            ("\"a\": 0", "\"a\": -1"),
            ("\"a\": 0", "\"a\": 4194304"),
            ("\"a\": 0", "\"a\": 0.5"),
            ("{\"a\": 0}", "[[\"a\"]]"),
            ("{\"a\": 0}", "[[\"a\", 1.0, 2]]"),
            ("{\"a\": 0}", "\"a\""),
            ("\"1.0\"", "\"9.0\""),
            ("\"model\"", "\"module\""),
            ("\"vocab\"", "\"words\""),
            ("\"ByteLevel\"", "\"OfTomorrow\""),
        ];
        for (part, instead) in broken {
            let json = good.replacen(part, instead, 1);
            assert_ne!(json, good, "{part}");
            let error = TokenBytes::from_json(json.as_bytes()).expect_err(instead);
            assert!(matches!(error, VocabularyError::Malformed { .. }), "{instead}: {error}");
        }
        for length in 0..good.len() {
            assert!(TokenBytes::from_json(&good.as_bytes()[..length]).is_err(), "cut at {length}");
        }
        assert!(TokenBytes::from_json(format!("{good}{{").as_bytes()).is_err());
    }

    #[test]
    fn decoders_that_make_tokens_longer_and_longer_are_refused() {
        let grow = r#"{"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaaaaaaaa"}"#;
        let decoder =
            |stages: usize| format!(r#"{{"type": "Sequence", "decoders": [{}]}}"#, vec![grow; stages].join(", "));
        let model = r#"{"type": "BPE", "merges": [], "vocab": {"a": 0, "b": 1}}"#;
        let json = |stages| format!(r#"{{"version": "1.0", "decoder": {}, "model": {model}}}"#, decoder(stages));
        let table = TokenBytes::from_json(json(4).as_bytes()).expect("16^4 bytes are as many as may be");
        assert_eq!((table.token(0).len(), table.token(1)), (1 << 16, &b"b"[..]));
        for (stages, reason) in [(5, "longer than 65536 bytes"), (STAGES_MAX + 1, "a decoder of 65 stages")] {
            let error = TokenBytes::from_json(json(stages).as_bytes()).expect_err(reason).to_string();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn byte_level_names_become_bytes_or_stay() {
        let json = file_of(
            r#"{"type": "BPE", "merges": [], "vocab": {"Ġa": 0, "Ã©": 1, "漢": 2, "Ċ": 3}}"#,
            &[(4, "<é>", false)],
        );
        let table = TokenBytes::from_json(json.as_bytes()).expect("a good file");
        let tokens: Vec<&[u8]> = (0..5).map(|id| table.token(id)).collect();
        assert_eq!(tokens, [" a".as_bytes(), "é".as_bytes(), "漢".as_bytes(), b"\n", b"<\xe9>"]);
    }

    #[test]
    fn other_content_is_refused() {
        for bytes in [&b""[..], b"{}", b"[1,2", b"\xff\xfe"] {
            let error = TokenBytes::from_json(bytes).expect_err("no tokenizer");
            assert!(matches!(error, VocabularyError::Malformed { .. }), "{error}");
        }
    }
}
