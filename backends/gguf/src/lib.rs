//! GGUF files, read as hostile input: metadata, the list of tensors, and the tokenizer in Hugging Face's format.
//!
//! A GGUF file holds a whole model: sizes, vocabulary, chat template and weights. The gateway needs its text side, a worker its weights
//! and the bytes of its tokens; both read the header here, so that they agree on the tokenizer (and on its hash).
//!
//! - `header.rs`: the bytes of the header, bounded
//! - `files.rs`: where a model's files are, and models that are split over several
//! - `write.rs`: the other direction, for tests (feature `write`)
//! - `text.rs`, `tokens.rs`, `pre.rs`: the vocabulary as a tokenizer.json, with the splitting rules that the file only names
//! - `word_piece.rs`, `unigram.rs`, `charsmap.rs`: the vocabularies of encoders
//! - `pooling.rs`: how an embedding model makes its vectors, as sentence-transformers' files
//!
//! Deliberately absent: the weights themselves (a tensor is a name, a shape and a place), and what a model's sizes mean.
#![forbid(unsafe_code)]

mod charsmap;
mod error;
mod files;
mod header;
mod pooling;
mod pre;
mod text;
mod tokens;
mod unigram;
mod word_piece;
#[cfg(any(test, feature = "write"))]
mod write;

use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};

pub use charsmap::longest_of_charsmap;
pub use error::GgufError;
pub use files::{locate, model_name};
pub use pooling::sentence_files;
pub use text::{TextFiles, end_tokens, text_files};
#[cfg(any(test, feature = "write"))]
pub use write::Writer;

/// A value of the metadata. Numbers of all widths are kept as the widest of their kind.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Integer of any width, signed or not.
    Integer(i128),
    /// Floating-point number.
    Float(f64),
    /// Truth value.
    Bool(bool),
    /// Text in UTF-8.
    Text(String),
    /// List of texts.
    Texts(Vec<String>),
    /// List of integers or truth values.
    Integers(Vec<i64>),
    /// List of floating-point numbers.
    Floats(Vec<f32>),
    /// List of lists, which no known key has; its contents are not kept.
    Nested,
}

/// A tensor of a GGUF file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Shape, outermost dimension first (a GGUF file has it the other way round); at most four dimensions.
    pub shape: Vec<u64>,
    /// Number of the element type, as `ggml_type` has it.
    pub kind: u32,
    /// Index of the file that holds the data.
    pub file: usize,
    /// Index of the first byte of the data in that file.
    pub start: u64,
}

/// A file of a model, by its path for messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Path of the file; empty for a model in memory.
    pub path: PathBuf,
    /// Size of the file in bytes.
    pub size: u64,
}

/// Header of a model's files: metadata and tensors.
#[derive(Clone, Debug)]
pub struct Gguf {
    /// Path of the first file, for messages.
    pub shown: String,
    /// Metadata by key; that of the first file if there are several.
    pub metadata: HashMap<String, Value>,
    /// Tensors of all files by name.
    pub tensors: HashMap<String, Tensor>,
    /// Files of the model, in order.
    pub parts: Vec<Part>,
}

impl Gguf {
    /// Reads the headers of the model that `path` is a file of; the other files of a split model lie beside it.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        files::open(path)
    }

    /// Reads the header of a single file of `size` bytes; `shown` names it in errors.
    pub fn read(shown: &str, bytes: &mut dyn Read, size: u64) -> Result<Self, GgufError> {
        let header = header::read(shown, bytes, size)?;
        let gguf = Self {
            shown: shown.to_owned(),
            metadata: header.metadata,
            tensors: header.tensors,
            parts: vec![Part { path: PathBuf::new(), size }],
        };
        match gguf.integer("split.count", 0, u64::MAX)? {
            Some(count) if count > 1 => {
                Err(GgufError::new(shown, format!("is one of {count} files of a model, and the others are missing")))
            }
            _ => Ok(gguf),
        }
    }

    /// Error about the metadata key `key`.
    pub fn refuse(&self, key: &str, reason: impl Into<String>) -> GgufError {
        GgufError::field(&self.shown, key, reason)
    }

    /// Integer of a key in `least..=most`; `None` if the key is absent.
    pub fn integer(&self, key: &str, least: u64, most: u64) -> Result<Option<u64>, GgufError> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        let number = match value {
            Value::Integer(number) => u64::try_from(*number).ok().filter(|n| (least..=most).contains(n)),
            _ => None,
        };
        let refused = || self.refuse(key, format!("is {}, needs an integer from {least} to {most}", value.shown()));
        number.map(Some).ok_or_else(refused)
    }

    /// Number of a key; `None` if the key is absent.
    pub fn number(&self, key: &str) -> Result<Option<f64>, GgufError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Float(number)) if number.is_finite() => Ok(Some(*number)),
            Some(Value::Integer(number)) => Ok(Some(*number as f64)),
            Some(other) => Err(self.refuse(key, format!("is {}, needs a number", other.shown()))),
        }
    }

    /// Truth value of a key; `None` if the key is absent.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, GgufError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(self.refuse(key, format!("is {}, needs true or false", other.shown()))),
        }
    }

    /// Text of a key; `None` if the key is absent.
    pub fn text(&self, key: &str) -> Result<Option<&str>, GgufError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(other) => Err(self.refuse(key, format!("is {}, needs a text", other.shown()))),
        }
    }

    /// List of texts of a key; `None` if the key is absent.
    pub fn texts(&self, key: &str) -> Result<Option<&[String]>, GgufError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Texts(texts)) => Ok(Some(texts)),
            Some(other) => Err(self.refuse(key, format!("is {}, needs a list of texts", other.shown()))),
        }
    }
}

impl Value {
    /// Short form for a message.
    pub fn shown(&self) -> String {
        match self {
            Value::Integer(number) => number.to_string(),
            Value::Float(number) => number.to_string(),
            Value::Bool(flag) => flag.to_string(),
            Value::Text(text) => format!("\"{}\"", error::shown(text)),
            Value::Texts(list) => format!("a list of {} texts", list.len()),
            Value::Integers(list) => format!("a list of {} integers", list.len()),
            Value::Floats(list) => format!("a list of {} numbers", list.len()),
            Value::Nested => "a list of lists".into(),
        }
    }
}
