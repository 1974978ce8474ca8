//! Reasons why a checkpoint is refused: file, tensor or field, fault, and a remedy where one is known.

use std::fmt;

/// Error of a checkpoint that is damaged, or that this engine cannot serve. Nothing has been loaded when it is
/// returned.
#[derive(Debug)]
pub struct CheckpointError {
    /// Name of the file, with the folder if there is one.
    pub file: String,
    /// Tensor, field or other place inside the file that is at fault.
    pub at: Place,
    /// Description of the fault, with the values found and expected.
    pub reason: String,
    /// Remedy for the operator, if one is known.
    pub help: Option<&'static str>,
}

/// Part of a file that is at fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// The file as a whole, as when it is missing or cannot be parsed.
    File,
    /// A field of a JSON file, as a dotted path.
    Field(String),
    /// A tensor, by its name in the checkpoint.
    Tensor(String),
}

impl CheckpointError {
    pub(crate) fn file(file: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { file: file.into(), at: Place::File, reason: reason.into(), help: None }
    }

    pub(crate) fn field(file: impl Into<String>, field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { at: Place::Field(field.into()), ..Self::file(file, reason) }
    }

    pub(crate) fn tensor(file: impl Into<String>, tensor: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { at: Place::Tensor(tensor.into()), ..Self::file(file, reason) }
    }

    pub(crate) fn help(self, help: &'static str) -> Self {
        Self { help: Some(help), ..self }
    }
}

impl fmt::Display for CheckpointError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: ", self.file)?;
        match &self.at {
            Place::File => {}
            Place::Field(name) => write!(out, "{}: ", Shown(name))?,
            Place::Tensor(name) => write!(out, "tensor {}: ", Shown(name))?,
        }
        write!(out, "{}", self.reason)?;
        self.help.map_or(Ok(()), |help| write!(out, " ({help})"))
    }
}

impl std::error::Error for CheckpointError {}

/// A name from an untrusted file: control characters escaped, cut after 120 characters.
pub(crate) struct Shown<'a>(pub(crate) &'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 120;
        for c in self.0.chars().take(SHOWN) {
            if c.is_control() { write!(out, "{}", c.escape_default())? } else { write!(out, "{c}")? }
        }
        if self.0.chars().nth(SHOWN).is_some() { write!(out, "…") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_where_why_and_what_helps() {
        let error = CheckpointError::tensor("m/model.safetensors", "a\nb", "shape [2], needs [3]").help("get it again");
        assert_eq!(error.to_string(), "m/model.safetensors: tensor a\\nb: shape [2], needs [3] (get it again)");
        let long = CheckpointError::field("config.json", "x".repeat(500), "no");
        assert!(long.to_string().len() < 200);
    }
}
