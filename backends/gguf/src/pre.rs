//! Rules by which texts are split into words before merges apply. A GGUF file has only their name (`tokenizer.ggml.pre`); the rules are
//! those of the tokenizer.json that the name stands for.

use serde_json::{Value, json};

/// Contractions, words, digits one by one or by threes, punctuation, line breaks, blanks: the rule of GPT-4 and its relatives.
macro_rules! words {
    ($digits:literal) => {
        concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|",
            $digits,
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    };
}

const LLAMA3: &str = words!(r"\p{N}{1,3}");
const QWEN2: &str = words!(r"\p{N}");
const SEED_CODER: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|",
    r"\s+(?!\S)|\s+"
);
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|",
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const DEEPSEEK_V3: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"##,
        r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
];
const DEEPSEEK_CODER: [&str; 4] = ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"];

/// Way in which words are split.
#[derive(Clone, Copy, Debug)]
enum Split {
    /// Regexes one after the other.
    Regexes(&'static [&'static str]),
    /// Regexes one after the other, then single digits.
    RegexesAndDigits(&'static [&'static str]),
    /// The rule of GPT-2, which the library has built in.
    Gpt2,
    /// Single digits, then the rule of GPT-2.
    DigitsAndGpt2,
}

/// Rules of one name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    split: Split,
    /// True if texts are normalized (NFC) first.
    pub(crate) nfc: bool,
    /// True if a word that is a token is taken whole, whatever merges say.
    pub(crate) ignore_merges: bool,
    /// True if prompts begin with the first token unless the file says otherwise.
    pub(crate) adds_bos: bool,
}

const fn rules(split: Split) -> Rules {
    Rules { split, nfc: false, ignore_merges: false, adds_bos: false }
}

/// Rules by name. Several names stand for one tokenizer.
const NAMES: [(&[&str], Rules); 11] = [
    (
        &["llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"],
        Rules { ignore_merges: true, adds_bos: true, ..rules(Split::Regexes(&[LLAMA3])) },
    ),
    (&["smaug-bpe", "dbrx"], rules(Split::Regexes(&[LLAMA3]))),
    (&["qwen2"], Rules { nfc: true, ..rules(Split::Regexes(&[QWEN2])) }),
    (&["deepseek-r1-qwen", "megrez"], rules(Split::Regexes(&[QWEN2]))),
    (&["tekken"], Rules { ignore_merges: true, adds_bos: true, ..rules(Split::Regexes(&[TEKKEN])) }),
    (&["gpt-4o", "llama4"], Rules { ignore_merges: true, ..rules(Split::Regexes(&[GPT4O])) }),
    (&["gpt-2", "olmo", "mpt", "phi-2", "roberta-bpe"], rules(Split::Gpt2)),
    (&["smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"], rules(Split::DigitsAndGpt2)),
    (&["deepseek-v3"], rules(Split::Regexes(&DEEPSEEK_V3))),
    (&["seed-coder"], rules(Split::Regexes(&[SEED_CODER]))),
    (&["deepseek-coder"], rules(Split::RegexesAndDigits(&DEEPSEEK_CODER))),
];

/// Rules of `name`; `None` if they are not known.
pub(crate) fn find(name: &str) -> Option<Rules> {
    NAMES.iter().find(|(names, _)| names.contains(&name)).map(|(_, rules)| *rules)
}

/// Every known name.
pub(crate) fn names() -> Vec<&'static str> {
    NAMES.iter().flat_map(|(names, _)| names.iter().copied()).collect()
}

impl Rules {
    /// The pre-tokenizer of tokenizer.json.
    pub(crate) fn pre_tokenizer(&self) -> Value {
        let bytes = |use_regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex });
        let digits = json!({ "type": "Digits", "individual_digits": true });
        let split = |regex: &&str| json!({ "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false });
        let stages: Vec<Value> = match self.split {
            Split::Gpt2 => return bytes(true),
            Split::DigitsAndGpt2 => vec![digits, bytes(true)],
            Split::Regexes(regexes) => regexes.iter().map(split).chain([bytes(false)]).collect(),
            Split::RegexesAndDigits(regexes) => regexes.iter().map(split).chain([digits, bytes(false)]).collect(),
        };
        json!({ "type": "Sequence", "pretokenizers": stages })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_found_once_and_unknown_ones_are_not() {
        let names = names();
        assert!(names.iter().all(|name| find(name).is_some()));
        assert_eq!(names.iter().collect::<std::collections::HashSet<_>>().len(), names.len());
        assert!(find("default").is_none() && find("").is_none());
    }
}
