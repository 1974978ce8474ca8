//! Names of models: `ORG/REPO`, with a quantization (`:Q4_K_M`) and a revision (`@main`, a tag or a commit) behind it.

use std::fmt;

/// Longest organisation or repository name, in bytes; hubs allow 96.
const WORD_BYTES_MAX: usize = 96;
/// Longest revision in bytes.
const REVISION_BYTES_MAX: usize = 200;

/// Name of a model on a hub and in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelName {
    /// User or organisation that publishes the model.
    pub org: String,
    /// Repository of the model.
    pub repo: String,
    /// Quantization of a GGUF model, or the name of its file; `None`: the repository's checkpoint, or its usual GGUF file.
    pub quant: Option<String>,
    /// Branch, tag or commit; `None`: the branch `main`.
    pub revision: Option<String>,
}

/// Text that is no name of a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is no model of a hub ({reason}): give ORG/REPO, ORG/REPO:QUANT as in :Q4_K_M, and @REVISION behind it for another than main"
)]
pub struct NameError {
    text: String,
    reason: &'static str,
}

impl ModelName {
    /// Parses a name; the host of the hub may stand before it (`hf.co/`, `https://huggingface.co/`).
    ///
    /// # Errors
    /// The text has another form, or a part of it has characters that hubs do not allow.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        let refuse = |reason| NameError { text: text.chars().take(200).collect(), reason };
        let mut rest = text.trim();
        for prefix in ["https://", "http://"] {
            rest = rest.strip_prefix(prefix).unwrap_or(rest);
        }
        for host in ["huggingface.co/", "hf.co/"] {
            rest = rest.strip_prefix(host).unwrap_or(rest);
        }
        let at = rest.find([':', '@']).unwrap_or(rest.len());
        let (path, mut marks) = rest.split_at(at);
        let Some((org, repo)) = path.trim_end_matches('/').split_once('/') else {
            return Err(refuse("it has no slash"));
        };
        if !is_word(org) || !is_word(repo) {
            return Err(refuse("ORG and REPO are letters, digits, '-', '_' and '.'"));
        }
        let mut name = Self { org: org.to_owned(), repo: repo.to_owned(), quant: None, revision: None };
        while let Some(mark) = marks.chars().next() {
            let value = &marks[1..];
            let end = value.find([':', '@']).unwrap_or(value.len());
            let (value, next) = value.split_at(end);
            marks = next;
            let (place, fits) = match mark {
                ':' => (&mut name.quant, is_word(value)),
                _ => (&mut name.revision, is_revision(value)),
            };
            if place.is_some() || !fits {
                return Err(refuse("behind ':' stands one quantization, behind '@' one revision"));
            }
            *place = Some(value.to_owned());
        }
        Ok(name)
    }

    /// Name of the repository, `ORG/REPO`.
    pub fn repository(&self) -> String {
        format!("{}/{}", self.org, self.repo)
    }

    /// Revision to ask a hub for.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.org, self.repo)?;
        self.quant.as_ref().map_or(Ok(()), |quant| write!(out, ":{quant}"))?;
        self.revision.as_ref().map_or(Ok(()), |revision| write!(out, "@{revision}"))
    }
}

/// Returns true for one path component of letters, digits, `-`, `_` and `.` that does not begin with a dot.
pub(crate) fn is_word(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    !text.is_empty() && text.len() <= WORD_BYTES_MAX && !text.starts_with(['.', '-']) && text.bytes().all(plain)
}

fn is_revision(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./+".contains(&byte);
    let parts = || text.split('/').all(|part| !part.is_empty() && !part.starts_with('.'));
    text.len() <= REVISION_BYTES_MAX && text.bytes().all(plain) && parts()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: Option<(&str, Option<&str>, Option<&str>)>) {
        let name = ModelName::parse(text).ok();
        let parts = name.as_ref().map(|name| (name.repository(), name.quant.as_deref(), name.revision.as_deref()));
        let parts = parts.as_ref().map(|(repository, quant, revision)| (repository.as_str(), *quant, *revision));
        assert_eq!(parts, expected, "{text}");
    }

    #[test]
    fn names_are_read() {
        check("Qwen/Qwen3-0.6B", Some(("Qwen/Qwen3-0.6B", None, None)));
        check("hf.co/Qwen/Qwen3-0.6B-GGUF:Q4_K_M", Some(("Qwen/Qwen3-0.6B-GGUF", Some("Q4_K_M"), None)));
        check("https://huggingface.co/a/b/", Some(("a/b", None, None)));
        check("a/b@v1.0", Some(("a/b", None, Some("v1.0"))));
        check("a/b@refs/pr/1:Q8_0", Some(("a/b", Some("Q8_0"), Some("refs/pr/1"))));
        check("a/b:Q8_0@main", Some(("a/b", Some("Q8_0"), Some("main"))));
        check("a/b:b-Q8_0.gguf", Some(("a/b", Some("b-Q8_0.gguf"), None)));
    }

    #[test]
    fn what_is_no_name_is_refused() {
        for text in [
            "",
            "b",
            "/b",
            "a/",
            "a/b/c",
            "../b",
            "a/..",
            "a/.b",
            "a/b:",
            "a/b@",
            "a/b:x:y",
            "a/b@x@y",
            "a/b@..",
            "a/b@x/../y",
            "a/b@/x",
            "a/b:x/y",
            "a b/c",
            "a/b\0",
            "a/b?x",
            "a/%2e",
            "-a/b",
            "ä/b",
        ] {
            check(text, None);
        }
        let error = ModelName::parse("./x").expect_err("a path").to_string();
        assert!(error.contains("ORG/REPO:QUANT"), "{error}");
    }

    #[test]
    fn a_name_is_written_as_it_is_read() {
        for text in ["a/b", "a/b:Q8_0", "a/b:Q8_0@refs/pr/1", "a/b@main"] {
            assert_eq!(ModelName::parse(text).expect(text).to_string(), text);
        }
    }
}
