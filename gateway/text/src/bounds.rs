//! Bounds of a tokenizer.json, checked before the library that tokenizes sees the file.
//!
//! The library believes the file: a number in it becomes an allocation, an index that leads nowhere a panic, and what a
//! text becomes may be any multiple of it. Parts are found by their keys wherever they stand in a stage, as the library
//! finds those that lack a type. What is merely wrong is left to the library, which says so.
//!
//! | field | what it could do |
//! |---|---|
//! | `precompiled_charsmap` | 8 GiB by its first number; panics and long texts by its indices |
//! | `Replace`, `Prepend`, `Metaspace`, `ByteLevel` | texts multiplied by each stage |
//! | patterns | a compiler that recurses over groups |
//! | templates of `post_processor` | the tokens of a text, or a million others, any number of times |
//! | `max_input_chars_per_word`, affixes, `unk_token` | quadratic work, a long name for each letter |
//! | `merges` beside a `continuing_subword_prefix` | names cut within a letter |
//! | `added_tokens` | an automaton of all their texts |

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::error::{TextError, clip};

const FILE: &str = "tokenizer.json";

/// Most that the stages together may multiply the length of a text by. A SentencePiece model has 33 by its charsmap, 3 by
/// its mark for blanks, and 2 by each expression that it replaces.
const GROWTH_MAX: usize = 1024;
/// Most stages of all kinds. Published files have ten or fewer.
const STAGES_MAX: usize = 64;
/// Longest text that replaces another or is set in front, in bytes, as in a charsmap.
const REPLACED_BYTES_MAX: usize = 256;
/// Longest pattern in bytes; published ones have up to one thousand.
const PATTERN_BYTES_MAX: usize = 8 << 10;
/// Deepest nesting of a pattern's brackets, those within classes and behind backslashes included.
const PATTERN_LEVELS_MAX: usize = 256;
/// Most pieces of all templates, and most ids of one special token in them.
const PIECES_MAX: usize = 256;
/// Most pieces of all templates that stand for a text. One template for a text and for two has three.
const TEXTS_MAX: usize = 16;
/// Longest word in characters that WordPiece takes apart, in quadratic time; published files say 100.
const WORD_CHARS_MAX: u64 = 1024;
/// Longest mark of parts of words (`##`, `</w>`) and longest name of the unknown token, in bytes.
const AFFIX_BYTES_MAX: usize = 64;
const UNKNOWN_BYTES_MAX: usize = 256;
/// Most bytes of all added tokens together: published files stay below 2 MB.
const ADDED_BYTES_MAX: usize = 8 << 20;

/// Parts of the file that have bounds. A key that stands twice is refused: the library takes the last one.
#[derive(Deserialize)]
pub(crate) struct Bounded<'f> {
    #[serde(default)]
    pub(crate) added_tokens: Vec<DeclaredToken>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(borrow)]
    model: Option<Model<'f>>,
}

/// Token beside those of the model.
#[derive(Deserialize)]
pub(crate) struct DeclaredToken {
    pub(crate) id: u32,
    pub(crate) content: String,
}

#[derive(Deserialize)]
struct Model<'f> {
    #[serde(default)]
    max_input_chars_per_word: Value,
    #[serde(default)]
    continuing_subword_prefix: Value,
    #[serde(default)]
    end_of_word_suffix: Value,
    #[serde(default)]
    unk_token: Value,
    #[serde(borrow)]
    merges: Option<&'f RawValue>,
}

impl<'f> Bounded<'f> {
    /// Reads the file and checks its bounds.
    ///
    /// # Errors
    /// [`TextError::Malformed`] with the field that is out of its bound.
    pub(crate) fn read(bytes: &'f [u8]) -> Result<Self, TextError> {
        let file: Self = serde_json::from_slice(bytes).map_err(|error| TextError::malformed(FILE, error))?;
        file.check().map_err(|reason| TextError::malformed(FILE, reason))?;
        Ok(file)
    }

    fn check(&self) -> Result<(), String> {
        let added = self.added_tokens.iter().map(|token| token.content.len()).sum::<usize>();
        at_most("added_tokens", "bytes", added, ADDED_BYTES_MAX)?;
        let mut stages = Stages { growth: 1, count: 0 };
        stages.look("normalizer", &self.normalizer)?;
        stages.look("pre_tokenizer", &self.pre_tokenizer)?;
        let mut pieces = Pieces { all: 0, texts: 0 };
        pieces.look(&self.post_processor)?;
        self.model.as_ref().map_or(Ok(()), Model::check)
    }
}

/// Refuses a number above its bound.
fn at_most(field: &str, what: &str, number: usize, most: usize) -> Result<(), String> {
    if number > most { Err(format!("{field}: {number} {what}, at most {most} are taken")) } else { Ok(()) }
}

/// Stages that a text goes through before it is tokenized.
struct Stages {
    growth: usize,
    count: usize,
}

impl Stages {
    fn look(&mut self, field: &str, value: &Value) -> Result<(), String> {
        let map = match value {
            Value::Array(list) => return list.iter().try_for_each(|value| self.look(field, value)),
            Value::Object(map) => map,
            _ => return Ok(()),
        };
        self.count += 1;
        at_most(field, "stages", self.count, STAGES_MAX)?;
        let text = |key: &str| map.get(key).and_then(Value::as_str);
        if let Some(base64) = text("precompiled_charsmap") {
            let longest = penstock_gguf::longest_of_charsmap(base64).ok_or_else(|| {
                format!(
                    "{field}: precompiled_charsmap is damaged: an index leads out of the rules, or a text is too long"
                )
            })?;
            self.grow(field, longest)?;
        }
        for key in ["content", "prepend", "replacement"] {
            at_most(field, &format!("bytes of `{key}`"), text(key).map_or(0, str::len), REPLACED_BYTES_MAX)?;
        }
        let content = text("content").map_or(0, str::len);
        match map.get("pattern") {
            Some(Value::Object(pattern)) => {
                for (kind, pattern) in pattern {
                    let Some(pattern) = pattern.as_str() else { continue };
                    at_most(field, "bytes of one pattern", pattern.len(), PATTERN_BYTES_MAX)?;
                    let is_regex = kind != "String";
                    if is_regex {
                        at_most(field, "levels of brackets in a pattern", levels(pattern), PATTERN_LEVELS_MAX)?;
                    }
                    // An expression may match the empty text beside each letter.
                    let growth = match is_regex || pattern.is_empty() {
                        true if content > 0 => 1 + content,
                        true => 1,
                        false => content.div_ceil(pattern.len()),
                    };
                    self.grow(field, growth)?;
                }
            }
            _ => self.grow(field, content)?,
        }
        self.grow(field, text("replacement").map_or(1, str::len))?;
        // Each writes two letters for some; which stage has no type is for the library to find.
        if matches!(text("type"), None | Some("ByteLevel" | "BertNormalizer")) {
            self.grow(field, 2)?;
        }
        map.iter().filter(|(key, _)| *key != "pattern").try_for_each(|(_, value)| self.look(field, value))
    }

    fn grow(&mut self, field: &str, times: usize) -> Result<(), String> {
        self.growth = self.growth.saturating_mul(times.max(1));
        if self.growth > GROWTH_MAX {
            return Err(format!("{field}: its stages can make a text more than {GROWTH_MAX} times as long"));
        }
        Ok(())
    }
}

/// Deepest nesting of brackets in a pattern, whatever they mean there.
fn levels(pattern: &str) -> usize {
    let (mut open, mut deepest) = (0_usize, 0);
    for c in pattern.chars() {
        match c {
            '(' | '[' => open += 1,
            ')' | ']' => open = open.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(open);
    }
    deepest
}

/// Pieces of the templates in which the tokens of a text stand.
struct Pieces {
    all: usize,
    texts: usize,
}

impl Pieces {
    fn look(&mut self, value: &Value) -> Result<(), String> {
        const FIELD: &str = "post_processor";
        match value {
            Value::Array(list) => list.iter().try_for_each(|value| self.look(value)),
            Value::Object(map) => map.iter().try_for_each(|(key, value)| match key.as_str() {
                "single" | "pair" => self.template(value),
                "ids" | "tokens" => {
                    at_most(FIELD, &format!("`{key}`"), value.as_array().map_or(0, Vec::len), PIECES_MAX)
                }
                _ => self.look(value),
            }),
            _ => Ok(()),
        }
    }

    fn template(&mut self, template: &Value) -> Result<(), String> {
        let (pieces, texts) = match template {
            Value::String(text) => {
                (text.split(' ').count(), text.split(' ').filter(|piece| piece.starts_with('$')).count())
            }
            Value::Array(list) => {
                let is_text = |piece: &&Value| {
                    piece.get("Sequence").is_some() || piece.as_str().is_some_and(|text| text.starts_with('$'))
                };
                (list.len(), list.iter().filter(is_text).count())
            }
            _ => (0, 0),
        };
        self.all += pieces;
        self.texts += texts;
        at_most("post_processor", "pieces of templates", self.all, PIECES_MAX)?;
        at_most("post_processor", "texts in templates", self.texts, TEXTS_MAX)
    }
}

impl Model<'_> {
    fn check(&self) -> Result<(), String> {
        let longest = self.max_input_chars_per_word.as_u64().unwrap_or(0);
        if longest > WORD_CHARS_MAX {
            return Err(format!("model: max_input_chars_per_word is {longest}, at most {WORD_CHARS_MAX} are taken"));
        }
        for (name, value, most) in [
            ("continuing_subword_prefix", &self.continuing_subword_prefix, AFFIX_BYTES_MAX),
            ("end_of_word_suffix", &self.end_of_word_suffix, AFFIX_BYTES_MAX),
            ("unk_token", &self.unk_token, UNKNOWN_BYTES_MAX),
        ] {
            at_most("model", &format!("bytes of `{name}`"), value.as_str().map_or(0, str::len), most)?;
        }
        let Some(prefix) = self.continuing_subword_prefix.as_str().filter(|prefix| !prefix.is_empty()) else {
            return Ok(());
        };
        let Some(merges) = self.merges else { return Ok(()) };
        // The library cuts as many bytes as the prefix has off the right part of each merge, whatever they are.
        let merges: Vec<Merge> =
            serde_json::from_str(merges.get()).map_err(|error| format!("model: merges: {error}"))?;
        let right = |merge: &Merge| match merge {
            Merge::Pair(_, right) => Some(right.clone()),
            Merge::Line(line) => line.split_once(' ').map(|(_, right)| right.to_owned()),
        };
        match merges.iter().filter_map(right).find(|right| !right.starts_with(prefix)) {
            None => Ok(()),
            Some(right) => {
                Err(format!("model: merges: {:?} does not begin with continuing_subword_prefix", clip(&right)))
            }
        }
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(IgnoredAny, String),
    Line(String),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer;
    use serde_json::json;

    const DEMO: &str = include_str!("../../../models/penstock-demo/tokenizer.json");

    /// Parses the demo model's file with one part replaced; `wanted`: words of the refusal, `None`: the file is taken.
    #[track_caller]
    fn check(pointer: &str, part: Value, wanted: Option<&str>) {
        let mut file: Value = serde_json::from_str(DEMO).expect("JSON");
        let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
        file.pointer_mut(parent).expect("a part of the file")[key] = part;
        let parsed = tokenizer::parse(file.to_string().as_bytes());
        match (parsed, wanted) {
            (Ok(_), None) => {}
            (Err(error), Some(words)) => assert!(error.to_string().contains(words), "{pointer}: {error}"),
            (Ok(_), Some(_)) => panic!("{pointer} was taken"),
            (Err(error), None) => panic!("{pointer}: {error}"),
        }
    }

    fn sequence(stages: Vec<Value>) -> Value {
        json!({"type": "Sequence", "normalizers": Value::Array(stages)})
    }

    fn replace(kind: &str, pattern: &str, content: &str) -> Value {
        json!({"type": "Replace", "pattern": {kind: pattern}, "content": content})
    }

    #[test]
    fn charsmaps_are_sound() {
        let charsmap = |base64: &str| json!({"type": "Precompiled", "precompiled_charsmap": base64});
        // A trie of 4 GiB, and one of four bytes whose root has children behind its end.
        for damaged in ["/////w==", "BAAAAAAEAAAA", "no base64!", ""] {
            check("/normalizer", charsmap(damaged), Some("precompiled_charsmap is damaged"));
            check("/normalizer", sequence(vec![charsmap(damaged)]), Some("precompiled_charsmap is damaged"));
            // The library takes a stage without its type, too.
            check("/normalizer", json!({"precompiled_charsmap": damaged}), Some("precompiled_charsmap is damaged"));
        }
    }

    #[test]
    fn texts_do_not_grow_without_bound() {
        // The demo model's own stages count as 2.
        check("/normalizer", sequence(vec![replace("String", "a", "aa"); 9]), None);
        check("/normalizer", sequence(vec![replace("String", "a", "aa"); 10]), Some("1024 times"));
        check("/normalizer", sequence(vec![replace("Regex", "", "a"); 11]), Some("1024 times"));
        check("/normalizer", sequence(vec![replace("Regex", "\\s+", ""); 40]), None);
        check("/normalizer", sequence(vec![replace("String", "   ", "▁"); 40]), None);
        check("/normalizer", replace("String", "a", &"a".repeat(256)), None);
        check("/normalizer", replace("String", "a", &"a".repeat(257)), Some("bytes of `content`"));
        check("/normalizer", json!({"type": "Prepend", "prepend": "a".repeat(257)}), Some("bytes of `prepend`"));
        check("/normalizer", sequence(vec![json!({"type": "ByteLevel"}); 11]), Some("1024 times"));
        check("/normalizer", sequence(vec![json!({"type": "Lowercase"}); 64]), Some("stages"));
        let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        let levels = json!({"type": "Sequence", "pretokenizers": vec![level; 11]});
        check("/pre_tokenizer", levels, Some("1024 times"));
        // Both kinds of stages follow each other.
        check("/normalizer", sequence(vec![replace("String", "a", "aaaa"); 5]), Some("pre_tokenizer"));
    }

    #[test]
    fn patterns_are_short_and_flat() {
        let split = |pattern: String| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
        check("/pre_tokenizer", split("(".repeat(256) + "a" + &")".repeat(256)), None);
        check("/pre_tokenizer", split("(".repeat(257) + "a" + &")".repeat(257)), Some("levels of brackets"));
        check("/pre_tokenizer", split("a".repeat(8193)), Some("bytes of one pattern"));
        check("/normalizer", replace("Regex", &"(".repeat(257), ""), Some("levels of brackets"));
        // What is no pattern is the library's to say.
        check("/pre_tokenizer", split("(".into()), Some("tokenizer.json"));
    }

    #[test]
    fn templates_are_short() {
        let template = |single: Vec<Value>, ids: usize| {
            let special = json!({"id": "x", "ids": vec![0; ids], "tokens": vec!["!"; ids]});
            json!({"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {"x": special}})
        };
        let (text, special) =
            (json!({"Sequence": {"id": "A", "type_id": 0}}), json!({"SpecialToken": {"id": "x", "type_id": 0}}));
        let with = |count: usize| [vec![special.clone(); count], vec![text.clone()]].concat();
        check("/post_processor", template(with(255), 2), None);
        check("/post_processor", template(with(256), 2), Some("pieces of templates"));
        check("/post_processor", template(with(1), 257), Some("`ids`"));
        check("/post_processor", template(vec![text.clone(); 17], 1), Some("texts in templates"));
        let twice = json!({"type": "Sequence", "processors": vec![template(with(200), 1); 2]});
        check("/post_processor", twice, Some("pieces of templates"));
    }

    #[test]
    fn words_and_names_are_short() {
        check("/model/max_input_chars_per_word", json!(1_u64 << 60), Some("max_input_chars_per_word"));
        check("/model/unk_token", json!("a".repeat(257)), Some("`unk_token`"));
        check("/model/end_of_word_suffix", json!("a".repeat(65)), Some("`end_of_word_suffix`"));
        check("/model/continuing_subword_prefix", json!("a".repeat(65)), Some("`continuing_subword_prefix`"));
    }

    #[test]
    fn merges_have_the_prefix_that_is_cut_off() {
        let model = |prefix: &str, right: &str| {
            json!({
                "type": "BPE", "continuing_subword_prefix": prefix, "vocab": {"a": 0, right: 1, "ab": 2}, "merges": [["a", right]]
            })
        };
        check("/model", model("##", "##b"), Some("added token"));
        // The prefix is longer than the name; it ends within a letter of it.
        check("/model", model("##", "b"), Some("does not begin with continuing_subword_prefix"));
        check("/model", model("#", "éb"), Some("does not begin with continuing_subword_prefix"));
    }

    #[test]
    fn added_tokens_have_a_bound_together() {
        let token = json!({"id": 4096, "content": "a".repeat(ADDED_BYTES_MAX), "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true});
        check("/added_tokens", json!([token, {"id": 4097, "content": "b"}]), Some("added_tokens: 8388609 bytes"));
    }

    #[test]
    fn a_key_that_stands_twice_is_refused() {
        let twice = DEMO.replacen("\"normalizer\"", "\"normalizer\": {\"type\": \"NFC\"}, \"normalizer\"", 1);
        assert_ne!(twice, DEMO);
        assert!(tokenizer::parse(twice.as_bytes()).is_err());
    }
}
