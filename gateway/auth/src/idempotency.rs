//! Namespacing of clients' `Idempotency-Key` headers by tenant, before they reach a provider.
//!
//! A provider has one name space for all requests with the same provider key: two tenants that choose the same value
//! would get each other's answers. The provider is sent a keyed hash of tenant and value instead. The hash is the same
//! for every retry, at every gateway with the same `auth.pepper_file` or `auth.pepper_env`. A pepper in the state
//! folder belongs to one gateway only, so then the hash is keyed by a constant: that keeps tenants apart just as well,
//! but does not hide a value that can be guessed.

use std::fmt::Write;

use http::{HeaderMap, HeaderName, HeaderValue};

use super::pepper::{Pepper, PepperPlace, PepperSource};

const NAME: HeaderName = HeaderName::from_static("idempotency-key");
/// Domain separation from digests of API keys; also the HMAC secret where gateways share no pepper.
const PURPOSE: &[u8] = b"penstock: idempotency keys, by tenant";

/// Rewriter of clients' idempotency keys; `None` inside: the pepper cannot be used, and the header is removed.
pub struct Idempotency(Option<Pepper>);

impl Idempotency {
    /// Creates the rewriter with the pepper of a config.
    pub fn new(place: &PepperPlace) -> Self {
        let pepper = match place.source {
            PepperSource::State => Pepper::new(PURPOSE),
            PepperSource::File(_) | PepperSource::Given(_) => Pepper::of(place, false),
        };
        if let Err(error) = &pepper {
            tracing::error!(error, "idempotency keys are not sent to providers: the pepper cannot be read");
        }
        Self(pepper.ok())
    }

    /// Replaces the tenant's `Idempotency-Key` values in `headers` by keyed hashes.
    pub fn separate(&self, tenant: &str, headers: &mut HeaderMap) {
        if !headers.contains_key(NAME) {
            return;
        }
        let Some(pepper) = &self.0 else {
            headers.remove(NAME);
            return;
        };
        for (_, value) in headers.iter_mut().filter(|(name, _)| **name == NAME) {
            *value = keyed(pepper, tenant, value.as_bytes());
        }
    }
}

/// Hash of tenant and value. Each part is preceded by its length, so that no two pairs give the same bytes.
fn keyed(pepper: &Pepper, tenant: &str, value: &[u8]) -> HeaderValue {
    let mut said = PURPOSE.to_vec();
    for part in [tenant.as_bytes(), value] {
        said.extend_from_slice(&(part.len() as u64).to_le_bytes());
        said.extend_from_slice(part);
    }
    let mut text = String::with_capacity(64);
    for byte in pepper.digest(&said).0 {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    HeaderValue::from_str(&text).unwrap_or_else(|_| HeaderValue::from_static("-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(secret: &[u8], tenant: &str, value: &str) -> String {
        let mut headers = HeaderMap::new();
        headers.insert(NAME, HeaderValue::from_str(value).expect("a value"));
        headers.insert("openai-beta", HeaderValue::from_static("kept"));
        Idempotency(Some(Pepper::new(secret).expect("long"))).separate(tenant, &mut headers);
        assert_eq!(headers["openai-beta"], "kept");
        headers[NAME].to_str().expect("text").to_owned()
    }

    #[test]
    fn tenants_have_name_spaces_of_their_own() {
        let secret = [7; 32];
        let one = sent(&secret, "a", "order-1");
        assert_eq!(one, sent(&secret, "a", "order-1"), "a retry is the same, at whichever gateway");
        assert_eq!(one.len(), 64);
        for (tenant, value) in [("b", "order-1"), ("a", "order-2"), ("", "aorder-1"), ("aorder-1", "-"), ("a", &*one)] {
            assert_ne!(one, sent(&secret, tenant, value), "{tenant} {value}");
        }
        assert_ne!(one, sent(&[8; 32], "a", "order-1"), "and is not known without the secret");
    }

    #[test]
    fn nothing_goes_up_that_is_not_the_tenants_own() {
        let mut headers = HeaderMap::new();
        headers.append(NAME, HeaderValue::from_static("x"));
        headers.append(NAME, HeaderValue::from_static("y"));
        let mut both = headers.clone();
        Idempotency(Pepper::new(PURPOSE).ok()).separate("a", &mut both);
        assert!(both.get_all(NAME).iter().all(|value| value.len() == 64) && both.get_all(NAME).iter().count() == 2);
        Idempotency(None).separate("a", &mut headers);
        assert!(headers.is_empty());
    }
}
