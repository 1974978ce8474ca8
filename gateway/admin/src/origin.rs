//! Checks of a request's host and origin: names that an attacker's DNS can point here are refused, and so are pages of
//! other sites.
//!
//! A page that rebinds its own name to 127.0.0.1 sends that name as `Host`; an address cannot be rebound, so addresses and `localhost`
//! are accepted, and names only if the config lists them. A page of another site sends its `Origin`, and browsers say
//! `Sec-Fetch-Site`.

use http::request::Parts;
use http::{HeaderMap, header};
use penstock_config::AdminConfig;
use penstock_proxy::web::is_own_host;

/// Reason why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stranger {
    Host,
    Origin,
}

/// Checks host and origin.
pub(crate) fn check(parts: &Parts, known: &AdminConfig) -> Result<(), Stranger> {
    let host = host(parts, known)?;
    if is_own_page(&parts.headers, &host, known) { Ok(()) } else { Err(Stranger::Origin) }
}

/// Host that the request names, in lower case, if it is one that is served here.
fn host(parts: &Parts, known: &AdminConfig) -> Result<String, Stranger> {
    let host = one(&parts.headers, header::HOST).filter(|host| !host.is_empty()).ok_or(Stranger::Host)?;
    let host = host.to_ascii_lowercase();
    let is_named_alike = parts.uri.authority().is_none_or(|authority| authority.as_str().eq_ignore_ascii_case(&host));
    if !is_named_alike || !is_own_host(&host, &known.hosts) {
        return Err(Stranger::Host);
    }
    Ok(host)
}

/// Checks the host alone: for files that hold no secret, and that a link of another page may lead to.
pub(crate) fn check_host(parts: &Parts, known: &AdminConfig) -> Result<(), Stranger> {
    host(parts, known).map(|_| ())
}

/// Whether a browser vouches that a page of this very origin sends the request. Pages in `admin.origins` are other origins.
pub(crate) fn is_sent_by_console(parts: &Parts) -> bool {
    let Some(host) = one(&parts.headers, header::HOST).map(str::to_ascii_lowercase) else { return false };
    if parts.headers.contains_key(header::ORIGIN) {
        return one(&parts.headers, header::ORIGIN).is_some_and(|origin| is_of_host(origin, &host));
    }
    parts.headers.get("sec-fetch-site").is_some_and(|site| site.as_bytes() == b"same-origin")
}

fn is_of_host(origin: &str, host: &str) -> bool {
    let origin = origin.to_ascii_lowercase();
    origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://")) == Some(host)
}

/// Value of a field that is sent once.
fn one(headers: &HeaderMap, name: header::HeaderName) -> Option<&str> {
    let mut all = headers.get_all(name).iter();
    let (Some(value), None) = (all.next(), all.next()) else { return None };
    value.to_str().ok()
}

fn is_own_page(headers: &HeaderMap, host: &str, known: &AdminConfig) -> bool {
    if headers.contains_key(header::ORIGIN) {
        let Some(origin) = one(headers, header::ORIGIN).map(str::to_ascii_lowercase) else { return false };
        return is_of_host(&origin, host) || known.origins.contains(&origin);
    }
    match headers.get("sec-fetch-site") {
        None => true,
        Some(site) => matches!(site.as_bytes(), b"same-origin" | b"none"),
    }
}

#[cfg(test)]
mod tests {
    use penstock_config::AdminListen;

    use super::*;

    #[track_caller]
    fn check(fields: &[(&str, &str)], expected: Result<(), Stranger>) {
        let known = AdminConfig {
            listen: AdminListen::Off,
            unix: None,
            hosts: vec!["gw.example".into()],
            origins: vec!["https://console.example".into()],
            console: true,
            playground: true,
            oidc: None,
            keys: Vec::new(),
        };
        let mut request = http::Request::builder().uri("/admin/v1/status");
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let (parts, ()) = request.body(()).expect("a request").into_parts();
        assert_eq!(super::check(&parts, &known), expected, "{fields:?}");
    }

    #[test]
    fn names_that_can_be_rebound_are_refused() {
        for host in [
            "127.0.0.1",
            "127.0.0.1:8081",
            "[::1]:8081",
            "[::1]",
            "localhost",
            "LOCALHOST:1",
            "10.1.2.3:80",
            "gw.example:8081",
        ] {
            check(&[("host", host)], Ok(()));
        }
        for host in [
            "evil.example",
            "evil.example:8081",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "[::1",
            "",
            "gw.example.evil",
        ] {
            check(&[("host", host)], Err(Stranger::Host));
        }
        check(&[], Err(Stranger::Host));
        check(&[("host", "localhost"), ("host", "localhost")], Err(Stranger::Host));
    }

    #[test]
    fn pages_of_others_are_refused() {
        let from = |origin: &str, expected| check(&[("host", "127.0.0.1:8081"), ("origin", origin)], expected);
        from("http://127.0.0.1:8081", Ok(()));
        from("https://console.example", Ok(()));
        for origin in [
            "http://127.0.0.1:3000",
            "http://127.0.0.1",
            "https://evil.example",
            "null",
            "",
            "file://",
            "https://console.example.evil",
        ] {
            from(origin, Err(Stranger::Origin));
        }
        let site = |site: &str, expected| check(&[("host", "localhost"), ("sec-fetch-site", site)], expected);
        site("same-origin", Ok(()));
        site("none", Ok(()));
        site("cross-site", Err(Stranger::Origin));
        site("same-site", Err(Stranger::Origin));
        let twice = [("host", "localhost"), ("origin", "http://localhost"), ("origin", "http://localhost")];
        check(&twice, Err(Stranger::Origin));
    }
}
