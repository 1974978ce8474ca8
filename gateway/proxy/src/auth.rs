//! Who asks: API keys from the config, compared in constant time.
//!
//! A route can only be served with a [`Principal`], and only [`authorize`] makes one.

use std::sync::Arc;

use http::HeaderMap;
use penstock_govern::Scope;
use penstock_proto::ErrorKind;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::error::Failure;
use crate::route::{AuthClass, query_keys};

/// Longest key that is looked at.
const KEY_BYTES_MAX: usize = 512;

/// One configured key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// Shows in logs.
    pub id: String,
    /// SHA-256 of the key. Keys are long random strings, so no slow hash is needed.
    pub digest: [u8; 32],
    /// What it may do.
    pub scope: Arc<Scope>,
}

impl Key {
    fn principal(&self) -> Principal {
        Principal { key: Some(self.id.clone()), scopes: vec![self.scope.clone()], ..Principal::default() }
    }
}

/// Who asks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Principal {
    /// Id of the key; `None` where no keys are configured or the route is open.
    pub key: Option<String>,
    /// The team that it belongs to.
    pub team: Option<String>,
    /// The person or service behind it.
    pub user: Option<String>,
    /// Ids of the limits that it is under.
    pub limits: Vec<String>,
    /// What it may do; with several (a key's and its team's), all must allow it.
    scopes: Vec<Arc<Scope>>,
}

impl Principal {
    /// Whether the principal may use that model.
    pub fn may_use(&self, model: &str) -> bool {
        self.scopes.iter().all(|scope| scope.has_model(model))
    }

    /// What separates this principal's prefix cache from the others'.
    pub fn tenant(&self) -> &str {
        self.key.as_deref().unwrap_or_default()
    }
}

/// Checks the credentials of a request. Without configured keys everybody may use everything (the default listens on loopback only).
///
/// `target` is the request's: a URL of the Gemini API may carry the key in its query. It is read here and nowhere else.
pub fn authorize(class: AuthClass, target: &str, headers: &HeaderMap, keys: &[Key]) -> Result<Principal, Failure> {
    if class == AuthClass::Open || keys.is_empty() {
        return Ok(Principal::default());
    }
    let denied = |message: &str| Failure::new(ErrorKind::Unauthorized, message);
    let given = credential(target, headers)
        .ok_or_else(|| denied("An API key is needed: send it as \"Authorization: Bearer KEY\"."))?;
    if given.len() > KEY_BYTES_MAX {
        return Err(denied("Incorrect API key provided."));
    }
    let digest: [u8; 32] = Sha256::digest(given).into();
    // Every key is compared, and each in constant time: the time taken tells nothing about which one nearly matched.
    let mut found = None;
    for key in keys {
        if bool::from(key.digest.ct_eq(&digest)) {
            found = Some(key);
        }
    }
    let key = found.ok_or_else(|| denied("Incorrect API key provided."))?;
    Ok(key.principal())
}

/// Who a key of that id is, for what it left to be done; `None`: it is not configured any more.
pub(crate) fn by_id(keys: &[Key], id: &str) -> Option<Principal> {
    if keys.is_empty() {
        return id.is_empty().then(Principal::default);
    }
    keys.iter().find(|key| key.id == id).map(Key::principal)
}

/// `Authorization: Bearer KEY`, `x-api-key: KEY`, `x-goog-api-key: KEY` or, in URLs of the Gemini API, `?key=KEY`: exactly one of
/// them, sent once, so that no two readers take different ones.
fn credential(target: &str, headers: &HeaderMap) -> Option<Vec<u8>> {
    let bearer = headers.get_all(http::header::AUTHORIZATION).iter().map(|value| {
        let (scheme, key) = value.as_bytes().split_at_checked(7).unwrap_or_default();
        if scheme.eq_ignore_ascii_case(b"bearer ") { key.trim_ascii().to_vec() } else { Vec::new() }
    });
    let plain = ["x-api-key", "x-goog-api-key"].into_iter().flat_map(|name| headers.get_all(name));
    let mut given = bearer.chain(plain.map(|value| value.as_bytes().to_vec())).chain(query_keys(target));
    match (given.next(), given.next()) {
        (Some(key), None) if !key.is_empty() => Some(key),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(id: &str, secret: &str, models: &[&str]) -> Key {
        Key {
            id: id.into(),
            digest: Sha256::digest(secret).into(),
            scope: Arc::new(Scope { models: models.iter().map(|m| (*m).into()).collect(), ..Scope::default() }),
        }
    }

    #[track_caller]
    fn check(headers: &[(&str, &str)], expected: Option<&str>) {
        check_at("/v1/models", headers, expected);
    }

    #[track_caller]
    fn check_at(target: &str, headers: &[(&str, &str)], expected: Option<&str>) {
        let keys = [key("a", "sk-a", &[]), key("b", "sk-b", &["chat-*", "x"])];
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(http::HeaderName::from_bytes(name.as_bytes()).expect("name"), value.parse().expect("value"));
        }
        let principal = authorize(AuthClass::Key, target, &map, &keys).ok();
        assert_eq!(principal.as_ref().and_then(|p| p.key.as_deref()), expected, "{headers:?}");
    }

    #[test]
    fn keys_are_denied_by_default() {
        check(&[("authorization", "Bearer sk-a")], Some("a"));
        check(&[("authorization", "bearer sk-b")], Some("b"));
        check(&[("x-api-key", "sk-b")], Some("b"));
        for headers in [
            &[][..],
            &[("authorization", "Bearer sk-c")],
            &[("authorization", "Bearer ")],
            &[("authorization", "Basic sk-a")],
            &[("authorization", "sk-a")],
            &[("authorization", "Bearer sk-a"), ("authorization", "Bearer sk-a")],
            &[("authorization", "Bearer sk-a"), ("x-api-key", "sk-a")],
        ] {
            check(headers, None);
        }
        check(&[("x-goog-api-key", "sk-a")], Some("a"));
        check(&[("x-goog-api-key", "sk-a"), ("x-api-key", "sk-a")], None);
        check_at("/v1beta/models?key=sk-a", &[], Some("a"));
        check_at("/v1beta/models?key=sk%2Da", &[], Some("a"));
        check_at("/v1beta/models?key=sk-a&key=sk-a", &[], None);
        check_at("/v1beta/models?key=sk-a", &[("x-goog-api-key", "sk-a")], None);
        check_at("/v1beta/models?key=", &[], None);
        check_at("/v1/models?key=sk-a", &[], None);
        let long = "k".repeat(4000);
        check(&[("authorization", &format!("Bearer {long}"))], None);
    }
}
