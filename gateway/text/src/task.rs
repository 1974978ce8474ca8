//! Task of a model: text that goes on, vectors of texts, or scores of documents.
//!
//! An embedding model says in sentence-transformers' files how its vectors are made (`modules.json`,
//! `1_Pooling/config.json`, `config_sentence_transformers.json`, `sentence_bert_config.json`); the reader of GGUF files makes them. An encoder
//! is known by its architecture. A reranker that answers in words looks like any other decoder, so the operator names it.

mod ranks;
mod vectors;

use std::borrow::Cow;
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::error::TextError;
use crate::model::{CONFIG_BYTES_MAX, read};

pub use ranks::{AnswerRules, HeadRules, HeadScore, Question, RankRules};
pub use vectors::{VectorPooling, VectorRules};

const CONFIG: &str = "config.json";

/// Task of a model, with the rules of its result.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Task {
    /// Text that continues a prompt or a conversation.
    #[default]
    Generate,
    /// Vectors of texts.
    Embed(VectorRules),
    /// Scores of documents for a query.
    Rerank(RankRules),
}

impl Task {
    /// Name of the task, as the config and the lists of models have it.
    pub fn name(&self) -> &'static str {
        match self {
            Task::Generate => "generate",
            Task::Embed(_) => "embed",
            Task::Rerank(_) => "rerank",
        }
    }
}

/// Result of an encoder, a model whose tokens see all others of their text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoder {
    /// States of tokens, of which vectors are made.
    States,
    /// One value of two texts, by a classification head.
    Head,
}

impl Encoder {
    /// Reads the architecture of the checkpoint folder or GGUF file `dir`; `None` if it is that of a decoder.
    ///
    /// # Errors
    /// [`TextError`] of a config that cannot be read.
    pub fn of(dir: &Path) -> Result<Option<Self>, TextError> {
        Self::read(&TaskFiles::open(dir)?)
    }

    /// Reads the architecture as [`Encoder::of`] does, from files that are open.
    ///
    /// # Errors
    /// [`TextError`] of a config that cannot be read.
    pub fn read(files: &TaskFiles<'_>) -> Result<Option<Self>, TextError> {
        Ok(files.parse::<Config>(CONFIG)?.and_then(|config| Self::named(config.architecture())))
    }

    /// Result of the architecture with this name: that of an encoder's family, and what is built around it.
    fn named(architecture: &str) -> Option<Self> {
        let around = ENCODERS.iter().find_map(|family| architecture.strip_prefix(family))?;
        match around {
            "Model" | MASKED => Some(Self::States),
            "ForSequenceClassification" => Some(Self::Head),
            _ => None,
        }
    }
}

/// Families of encoders, as the names of their architectures begin.
const ENCODERS: [&str; 8] =
    ["Bert", "Camembert", "DistilBert", "MPNet", "ModernBert", "NomicBert", "Roberta", "XLMRoberta"];

/// End of the name of an encoder with a head for masked tokens, which vectors are made without.
const MASKED: &str = "ForMaskedLM";

#[derive(Default, Deserialize)]
#[serde(default)]
struct Config {
    architectures: Option<Vec<String>>,
    sentence_transformers: Option<CrossEncoder>,
    /// Name of the same field in older files.
    sbert_ce_default_activation_function: Option<String>,
}

impl Config {
    /// First of the architectures; empty if there is none.
    fn architecture(&self) -> &str {
        self.architectures.iter().flatten().next().map_or("", String::as_str)
    }
}

/// Part of a config that sentence-transformers' CrossEncoder writes.
#[derive(Default, Deserialize)]
#[serde(default)]
struct CrossEncoder {
    activation_fn: Option<String>,
}

/// Files of a checkpoint that say what it makes: those of a folder, or what a GGUF file says in their place. A GGUF file is read once, when it is opened.
#[derive(Debug)]
pub struct TaskFiles<'a> {
    dir: &'a Path,
    /// Names and contents that stand for a GGUF file; `None` of a folder.
    made: Option<Vec<(&'static str, Vec<u8>)>>,
}

impl<'a> TaskFiles<'a> {
    /// Opens the checkpoint folder or GGUF file `dir`.
    ///
    /// # Errors
    /// [`TextError`] of a GGUF file that cannot be read, or that says something which is not served.
    pub fn open(dir: &'a Path) -> Result<Self, TextError> {
        let located = penstock_gguf::locate(dir).map_err(TextError::gguf)?;
        let made = |file: &Path| penstock_gguf::Gguf::open(file).and_then(|gguf| penstock_gguf::sentence_files(&gguf));
        Ok(Self { dir, made: located.as_deref().map(made).transpose().map_err(TextError::gguf)? })
    }

    /// Returns true for a GGUF file.
    pub fn is_gguf(&self) -> bool {
        self.made.is_some()
    }

    fn parse<T: DeserializeOwned>(&self, file: &'static str) -> Result<Option<T>, TextError> {
        let bytes = match &self.made {
            None => read(self.dir, file, CONFIG_BYTES_MAX)?.map(Cow::Owned),
            Some(made) => made.iter().find(|(name, _)| *name == file).map(|(_, bytes)| Cow::Borrowed(bytes.as_slice())),
        };
        let Some(bytes) = bytes else { return Ok(None) };
        serde_json::from_slice(&bytes).map(Some).map_err(|error| TextError::malformed(file, error))
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    /// Folder of a checkpoint with these files, which is removed at the end.
    pub(super) struct Dir(pub(super) PathBuf);

    impl Dir {
        pub(super) fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let dir = std::env::temp_dir().join(format!("penstock-task-{name}-{}", std::process::id()));
            std::fs::create_dir_all(dir.join("1_Pooling")).expect("a folder");
            files.iter().for_each(|(file, text)| std::fs::write(dir.join(file), text).expect("written"));
            Self(dir)
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}
