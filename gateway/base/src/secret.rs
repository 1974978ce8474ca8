//! Texts that no log, no error and no page may show.

/// Secret text; its `Debug` output hides the value.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a text so that `Debug` output no longer shows it.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Secret text, to be sent and never shown.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("[secret]")
    }
}
