//! Texts that no log, no error and no page may show.

/// A text that is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Keeps it.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text, to be sent and not to be shown.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("[secret]")
    }
}
