//! Reasons why a GGUF file is refused.

use std::fmt;

/// Error of a GGUF file that is damaged, or that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufError {
    /// Name of the file, with its folder.
    pub file: String,
    /// Metadata key at fault, if it is one.
    pub key: Option<String>,
    /// Description of the fault, with the values found and expected.
    pub reason: String,
    /// Remedy for the operator, if one is known.
    pub help: Option<&'static str>,
}

impl GgufError {
    pub(crate) fn new(file: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { file: file.into(), key: None, reason: reason.into(), help: None }
    }

    pub(crate) fn field(file: impl Into<String>, key: &str, reason: impl Into<String>) -> Self {
        Self { key: Some(key.to_owned()), ..Self::new(file, reason) }
    }

    /// The error with a remedy.
    pub fn help(self, help: &'static str) -> Self {
        Self { help: Some(help), ..self }
    }
}

impl fmt::Display for GgufError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: ", self.file)?;
        if let Some(key) = &self.key {
            write!(out, "{}: ", shown(key))?;
        }
        write!(out, "{}", self.reason)?;
        self.help.map_or(Ok(()), |help| write!(out, " ({help})"))
    }
}

impl std::error::Error for GgufError {}

/// A text from an untrusted file: control characters escaped, cut after 120 characters.
pub(crate) fn shown(text: &str) -> String {
    const SHOWN: usize = 120;
    let mut out: String = text
        .chars()
        .take(SHOWN)
        .flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] })
        .collect();
    if text.chars().nth(SHOWN).is_some() {
        out.push('…');
    }
    out
}
