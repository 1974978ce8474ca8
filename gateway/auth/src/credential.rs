//! Extraction of a request's credential and client address. No other module reads these headers.

use std::net::IpAddr;

use http::HeaderMap;
use ipnet::IpNet;

use crate::route::query_keys;
use penstock_http::Head;

/// Longest accepted credential in bytes; tokens with many groups reach some kilobytes.
pub(super) const CREDENTIAL_BYTES_MAX: usize = 16 * 1024;
/// Most addresses of an `X-Forwarded-For` that are read, from the last backwards.
const HOPS_MAX: usize = 32;

/// Credential as found in a request, not yet verified.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Given {
    /// The request has no credential.
    None,
    /// The request has exactly one credential: its bytes.
    One(Vec<u8>),
    /// The request has a credential that is empty, of an unknown scheme, too long, or given several times (two readers
    /// could take different ones).
    Unusable,
}

/// Finds the credential: `Authorization: Bearer KEY`, `x-api-key: KEY`, `x-goog-api-key: KEY` or, in URLs of the Gemini
/// API, `?key=KEY`. Exactly one of these, sent once, is accepted.
pub(super) fn given(target: &str, headers: &HeaderMap) -> Given {
    let bearer = headers.get_all(http::header::AUTHORIZATION).iter().map(|value| {
        let (scheme, key) = value.as_bytes().split_at_checked(7).unwrap_or_default();
        if scheme.eq_ignore_ascii_case(b"bearer ") { key.trim_ascii().to_vec() } else { Vec::new() }
    });
    let plain = ["x-api-key", "x-goog-api-key"].into_iter().flat_map(|name| headers.get_all(name));
    let mut given = bearer.chain(plain.map(|value| value.as_bytes().to_vec())).chain(query_keys(target));
    match (given.next(), given.next()) {
        (None, _) => Given::None,
        (Some(key), None) if !key.is_empty() && key.len() <= CREDENTIAL_BYTES_MAX => Given::One(key),
        _ => Given::Unusable,
    }
}

/// Returns true if the request carries anything meant as a credential in a header or the URL. A browser does not attach these
/// on its own, so a page that sends one knows it; a client certificate does not count.
pub fn has_credential(head: &Head) -> bool {
    given(&head.target, &head.headers) != Given::None
}

/// Address of the client: the peer, unless the peer is a trusted proxy; then the last address in `X-Forwarded-For` that
/// is not a trusted proxy. Addresses before that one were written by the client and are ignored.
pub(super) fn client(peer: Option<IpAddr>, headers: &HeaderMap, trusted: &[IpNet]) -> Option<IpAddr> {
    let is_proxy = |address: IpAddr| trusted.iter().any(|net| net.contains(&address.to_canonical()));
    let mut nearest = peer?;
    if trusted.is_empty() || !is_proxy(nearest) {
        return Some(nearest);
    }
    let lines: Vec<_> = headers.get_all("x-forwarded-for").iter().filter_map(|value| value.to_str().ok()).collect();
    let hops = lines.iter().rev().flat_map(|line| line.rsplit(','));
    for hop in hops.take(HOPS_MAX) {
        let Some(address) = address_of(hop.trim()) else { break };
        nearest = address;
        if !is_proxy(nearest) {
            break;
        }
    }
    Some(nearest)
}

/// Parses one entry of `X-Forwarded-For`: `192.0.2.1`, `192.0.2.1:1234`, `2001:db8::1`, `[2001:db8::1]` or
/// `[2001:db8::1]:1234`.
fn address_of(text: &str) -> Option<IpAddr> {
    let bare = || text.strip_prefix('[')?.strip_suffix(']')?.parse().ok();
    text.parse().ok().or_else(bare).or_else(|| text.parse().ok().map(|socket: std::net::SocketAddr| socket.ip()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(headers: &[(&str, &str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(http::HeaderName::from_bytes(name.as_bytes()).expect("name"), value.parse().expect("value"));
        }
        map
    }

    #[track_caller]
    fn check(target: &str, headers: &[(&str, &str)], expected: &Given) {
        assert_eq!(&given(target, &map(headers)), expected, "{target} {headers:?}");
    }

    #[test]
    fn a_credential_is_one_sent_once() {
        let one = |key: &str| Given::One(key.into());
        let models = "/v1/models";
        check(models, &[("authorization", "Bearer sk-a")], &one("sk-a"));
        check(models, &[("authorization", "bearer  sk-b ")], &one("sk-b"));
        check(models, &[("x-api-key", "sk-b")], &one("sk-b"));
        check(models, &[("x-goog-api-key", "sk-a")], &one("sk-a"));
        check(models, &[], &Given::None);
        for headers in [
            &[("authorization", "Bearer ")][..],
            &[("authorization", "Basic sk-a")],
            &[("authorization", "sk-a")],
            &[("authorization", "")],
            &[("authorization", "Bearer sk-a"), ("authorization", "Bearer sk-a")],
            &[("authorization", "Bearer sk-a"), ("x-api-key", "sk-a")],
            &[("x-goog-api-key", "sk-a"), ("x-api-key", "sk-a")],
        ] {
            check(models, headers, &Given::Unusable);
        }
        check("/v1beta/models?key=sk-a", &[], &one("sk-a"));
        check("/v1beta/models?key=sk%2Da", &[], &one("sk-a"));
        check("/v1beta/models?key=sk-a&key=sk-a", &[], &Given::Unusable);
        check("/v1beta/models?key=sk-a", &[("x-goog-api-key", "sk-a")], &Given::Unusable);
        check("/v1beta/models?key=", &[], &Given::Unusable);
        check("/v1/models?key=sk-a", &[], &Given::None);
        let long = "k".repeat(CREDENTIAL_BYTES_MAX + 1);
        check(models, &[("authorization", &format!("Bearer {long}"))], &Given::Unusable);
    }

    #[track_caller]
    fn from(peer: &str, forwarded: &[&str], expected: &str) {
        let trusted = ["10.0.0.0/8".parse().expect("a network"), "fd00::/8".parse().expect("a network")];
        let headers: Vec<_> = forwarded.iter().map(|value| ("x-forwarded-for", *value)).collect();
        let client = client(Some(peer.parse().expect("an address")), &map(&headers), &trusted);
        assert_eq!(client.expect("one").to_string(), expected, "{peer} {forwarded:?}");
    }

    #[test]
    fn only_trusted_proxies_say_who_the_client_is() {
        from("192.0.2.1", &["1.1.1.1"], "192.0.2.1");
        from("10.0.0.1", &[], "10.0.0.1");
        from("10.0.0.1", &["192.0.2.7"], "192.0.2.7");
        from("::ffff:10.0.0.1", &["192.0.2.7:4711"], "192.0.2.7");
        from("10.0.0.1", &["6.6.6.6, 192.0.2.7, 10.0.0.2"], "192.0.2.7");
        from("10.0.0.1", &["6.6.6.6", "[2001:db8::1], fd00::2"], "2001:db8::1");
        from("10.0.0.1", &["6.6.6.6, nonsense, 10.0.0.2"], "10.0.0.2");
        from("10.0.0.1", &["nonsense"], "10.0.0.1");
    }
}
