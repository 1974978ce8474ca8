//! Bytes of each token of a tokenizer.json: what the gateway decodes with, and what a worker masks with.
//!
//! The decoder of tokenizer.json is a pipeline over token strings (byte-level alphabet, `▁` for space, `<0x0A>` for a
//! byte, `##` for the rest of a word). For text generation all of it, except for the very start of a text, depends on one token at a time; so it is
//! run once at load, and decoding is copying bytes. A decoder that does not fit this scheme (CTC, `</w>` suffixes) is refused.
//!
//! Deliberately absent: texts. Nothing here tokenizes or decodes more than one token.
#![forbid(unsafe_code)]

use std::collections::HashMap;

use serde_json::Value;
use tokenizers::Tokenizer;

/// Largest token id + 1, far above any published vocabulary; a larger id must not become a table of gigabytes.
const IDS_MAX: u32 = 1 << 22;

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
    /// Reads the table from the content of a tokenizer.json.
    ///
    /// # Errors
    /// [`VocabularyError`] if the content is not a tokenizer.json, or its decoder does not work token by token.
    pub fn from_json(bytes: &[u8]) -> Result<Self, VocabularyError> {
        // The library panics over some damaged files.
        let parsed = std::panic::catch_unwind(|| Tokenizer::from_bytes(bytes))
            .map_err(|_| VocabularyError::malformed("the tokenizer library panicked on it"))?;
        Self::new(&parsed.map_err(VocabularyError::malformed)?)
    }

    /// Runs the decoder of `tokenizer` over all of its tokens.
    ///
    /// # Errors
    /// [`VocabularyError`] if the ids are out of range, or the decoder does not work token by token.
    pub fn new(tokenizer: &Tokenizer) -> Result<Self, VocabularyError> {
        let (stages, start) = stages(tokenizer)?;
        let added = tokenizer.get_added_tokens_decoder();
        let model = tokenizer.get_vocab(false);
        let top = model.values().chain(added.keys()).copied().max();
        let count = top.map_or(0, |id| id.saturating_add(1));
        if count == 0 || count > IDS_MAX {
            return Err(VocabularyError::malformed(format!(
                "largest token id {top:?}, ids below {IDS_MAX} are served"
            )));
        }
        let mut names: Vec<Option<&str>> = vec![None; count as usize];
        for (name, &id) in &model {
            names[id as usize] = Some(name);
        }
        let mut special = vec![false; count as usize];
        for (&id, token) in &added {
            names[id as usize] = Some(&token.content);
            special[id as usize] = token.special;
        }
        let alphabet = byte_alphabet();
        let mut table = Self { bytes: Vec::new(), ends: Vec::with_capacity(count as usize), special, start };
        let joins_words = stages.iter().any(|stage| matches!(stage, Stage::WordPiece { .. }));
        for (id, name) in names.into_iter().enumerate() {
            if let Some(name) = name.filter(|_| joins_words && table.special[id]) {
                // No word, so no blank before it.
                table.bytes.extend(name.as_bytes());
            } else if let Some(name) = name {
                decode_token(name, &stages, &alphabet, &mut table.bytes);
            }
            table.ends.push(
                u32::try_from(table.bytes.len()).map_err(|_| VocabularyError::malformed("vocabulary too large"))?,
            );
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

/// Reads the tokenizer's decoder into stages that work on single tokens.
fn stages(tokenizer: &Tokenizer) -> Result<(Vec<Stage>, StartRule), VocabularyError> {
    let Some(decoder) = tokenizer.get_decoder() else {
        return Err(VocabularyError::unsupported("a tokenizer without a decoder"));
    };
    let json = serde_json::to_value(decoder).map_err(VocabularyError::malformed)?;
    let mut reading = Reading { stages: Vec::new(), start: StartRule::Keep, fused: false };
    reading.read(&json)?;
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

fn decode_token(name: &str, stages: &[Stage], alphabet: &HashMap<char, u8>, out: &mut Vec<u8>) {
    let mut text = name.to_owned();
    for stage in stages {
        match stage {
            // Either stage turns the token into raw bytes, so it must be the last.
            Stage::ByteLevel => {
                match text.chars().map(|c| alphabet.get(&c).copied()).collect::<Option<Vec<u8>>>() {
                    Some(bytes) => out.extend(bytes),
                    None => out.extend(text.as_bytes()),
                }
                return;
            }
            Stage::ByteFallback => {
                if let Some(byte) = byte_token(&text) {
                    out.push(byte);
                    return;
                }
            }
            Stage::Replace(from, to) => text = text.replace(from, to),
            Stage::WordPiece { prefix, cleanup } => {
                text = match text.strip_prefix(prefix.as_str()).filter(|_| !prefix.is_empty()) {
                    Some(rest) => rest.to_owned(),
                    None => format!(" {text}"),
                };
                if *cleanup && CLINGING.contains(&text.as_str()) {
                    text.remove(0);
                }
            }
            Stage::StripToken { blank, start } => {
                let cut: usize = text.chars().take(*start).take_while(|c| c == blank).map(char::len_utf8).sum();
                text.drain(..cut);
            }
        }
    }
    out.extend(text.as_bytes());
}

/// Byte that a byte-fallback token like `<0x0A>` stands for; `None` for other tokens.
fn byte_token(text: &str) -> Option<u8> {
    let hex = text.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2).then(|| u8::from_str_radix(hex, 16).ok())?
}

/// GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on.
fn byte_alphabet() -> HashMap<char, u8> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 256;
    (0..=255u8)
        .map(|byte| {
            let code = if printable(byte) {
                u32::from(byte)
            } else {
                next += 1;
                next - 1
            };
            (char::from_u32(code).expect("below U+0200"), byte)
        })
        .collect()
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

    #[test]
    fn other_content_is_refused() {
        for bytes in [&b""[..], b"{}", b"[1,2", b"\xff\xfe"] {
            let error = TokenBytes::from_json(bytes).expect_err("no tokenizer");
            assert!(matches!(error, VocabularyError::Malformed { .. }), "{error}");
        }
    }
}
