//! Ids: unguessable, with a prefix that names the kind of object.

use std::fmt;

/// Random bytes of an id, enough to prevent guessing.
const RANDOM_BYTES: usize = 18;
/// Longest id in bytes that is looked up.
const ID_BYTES_MAX: usize = 128;

/// Owner of stored objects: the id of an API key; empty if no keys are configured.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tenant(String);

impl Tenant {
    /// Tenant that owns the objects made with the key of this id.
    pub fn new(key: &str) -> Self {
        Self(key.to_owned())
    }

    /// Id of the key; empty if no keys are configured.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Random text of 144 bits behind `prefix`, for ids of parts of objects.
///
/// # Panics
/// The system has no random numbers.
pub fn random(prefix: &str) -> String {
    const DIGITS: &[u8; 64] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-";
    let mut bytes = [0; RANDOM_BYTES];
    getrandom::fill(&mut bytes).expect("the system has random numbers");
    let mut out = String::with_capacity(prefix.len() + RANDOM_BYTES * 4 / 3);
    out.push_str(prefix);
    for group in bytes.chunks_exact(3) {
        let bits = u32::from(group[0]) << 16 | u32::from(group[1]) << 8 | u32::from(group[2]);
        for shift in [18, 12, 6, 0] {
            out.push(char::from(DIGITS[(bits >> shift & 63) as usize]));
        }
    }
    out
}

pub(crate) fn is_id(text: &str, prefix: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    text.len() > prefix.len() && text.len() <= ID_BYTES_MAX && text.starts_with(prefix) && text.bytes().all(plain)
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(String);

        impl $name {
            /// Generates a new id from random bytes, behind the prefix of its kind.
            pub fn random() -> Self {
                Self(random($prefix))
            }

            /// Parses a client's text; `None` if it cannot be such an id.
            pub fn parse(text: &str) -> Option<Self> {
                is_id(text, $prefix).then(|| Self(text.to_owned()))
            }

            /// Returns true if the id has the form of those that [`random`](Self::random) makes; another service's seldom has.
            pub fn is_own_form(&self) -> bool {
                self.0.len() == $prefix.len() + RANDOM_BYTES * 4 / 3
            }

            /// Id as clients see it, prefix included.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str(&self.0)
            }
        }
    };
}

id!(
    /// Id of a file: `file-` and random characters.
    FileId,
    "file-"
);
id!(
    /// Id of a batch: `batch_` and random characters.
    BatchId,
    "batch_"
);
id!(
    /// Id of a stored response: `resp_` and random characters.
    ResponseId,
    "resp_"
);
id!(
    /// Id of an issued key, which is not secret: `key_` and random characters.
    KeyId,
    "key_"
);
id!(
    /// Id of an audit event: `audit_` and random characters.
    AuditId,
    "audit_"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_random_and_read_back() {
        let (first, second) = (FileId::random(), FileId::random());
        assert_ne!(first, second);
        assert_eq!(first.as_str().len(), "file-".len() + 24);
        assert!(first.is_own_form() && !FileId::parse("file-68e5f2d1c0b4819a").expect("an id").is_own_form());
        assert_eq!(FileId::parse(first.as_str()), Some(first));
    }

    #[test]
    fn what_cannot_be_an_id_is_none() {
        let long = format!("file-{}", "a".repeat(200));
        for text in ["", "file-", "batch_abc", "file-a/b", "file-a b", "file-\0", long.as_str()] {
            assert_eq!(FileId::parse(text), None, "{text:?}");
        }
    }
}
