//! Tokens around texts that tokenizer_config.json asks for and the template of tokenizer.json does not put there.
//!
//! transformers' tokenizers for Llama, Gemma and Cohere replace the template of the file by their own: `bos_token` before a text where `add_bos_token`
//! is true, `eos_token` behind it where `add_eos_token` is. So DeepSeek's files need no template, and e5-mistral's has the first token alone. Classes
//! that are published with a checkpoint do the same (gte-Qwen2, for the end). Other classes pass over both keys (Llama 3's tokenizer has its first token
//! from the template).
//!
//! A key that is false or absent leaves the template as it is, and so does a template that puts any token at that end of a text. An end is for
//! vectors alone: a prompt that ends with it would not go on.
//!
//! The tokens are put around the library's result. As a second template behind the file's they would go wrong: the library hands the parts of one
//! template to the next, which takes a first token and a text for two texts.
//!
//! Deliberately absent: pairs of texts, which encoders alone are given.

use serde_json::Value;

use crate::error::TextError;

const FILE: &str = "tokenizer_config.json";

/// Classes of transformers' tokenizers that follow both keys.
const FOLLOWING: [&str; 4] = ["CodeLlamaTokenizer", "CohereTokenizer", "GemmaTokenizer", "LlamaTokenizer"];

/// Tokens that stand before and behind each text beside those of the tokenizer's template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Around {
    pub(crate) first: Option<u32>,
    pub(crate) last: Option<u32>,
}

impl Around {
    /// Tokens of a text with those around it.
    pub(crate) fn put(self, tokens: Vec<u32>) -> Vec<u32> {
        if self == Self::default() {
            return tokens;
        }
        self.first.into_iter().chain(tokens).chain(self.last).collect()
    }
}

/// Tokens that tokenizer_config.json wants around texts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Asked {
    first: bool,
    last: bool,
    /// True for a class of tokenizers that follows both keys.
    is_following: bool,
}

impl Asked {
    pub(crate) fn read(config: &Value) -> Self {
        let is_true = |key: &str| config[key].as_bool() == Some(true);
        let class = config["tokenizer_class"].as_str().unwrap_or_default();
        Self {
            first: is_true("add_bos_token"),
            last: is_true("add_eos_token"),
            is_following: FOLLOWING.contains(&class.strip_suffix("Fast").unwrap_or(class)),
        }
    }

    /// True if each text begins with `bos_token`.
    pub(crate) fn begins(&self) -> bool {
        self.first && self.is_following
    }

    /// True if each text ends with `eos_token` when vectors are made of it. `reads_last`: vectors are made of the last token alone; then the key holds for
    /// tokenizers of every class.
    pub(crate) fn ends(&self, reads_last: bool) -> bool {
        self.last && (self.is_following || reads_last)
    }
}

/// Error for a model whose texts must end with a token that has no id.
pub(crate) fn no_end(name: Option<&str>) -> TextError {
    let named = name
        .map_or("no eos_token is named".to_owned(), |name| format!("eos_token {name:?} is no token of tokenizer.json"));
    TextError::malformed(
        FILE,
        format!("add_eos_token is true, but {named}: this model makes its vectors of texts that end with eos_token"),
    )
}
