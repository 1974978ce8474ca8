//! Checks of requests from web pages.
//!
//! A browser sends what a page asks for from inside the network that its user is in, and asks nobody first as long as the request is
//! *simple*: a GET, or a POST whose body looks like a form's. So where a request needs no credential of its own, three things stand
//! between a page and the gateway:
//!
//! | a page | is stopped by |
//! |---|---|
//! | whose own name was pointed at this address (DNS rebinding), so that all of it is one origin | the name in `Host` ([`is_own_host`]) |
//! | that sends a simple POST, or opens a WebSocket, without being able to read the answer | its origin (`check`) |
//! | that wants to read answers, or to send JSON (a preflight) | CORS: only the origins of `[cors]` may (`preflight`) |
//!
//! Clients that are no browser send neither `Origin` nor `Sec-Fetch-Site` and notice none of it.

use std::net::IpAddr;

use http::Method;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use penstock_proto::ErrorKind;

use penstock_auth::route::Route;
use penstock_base::error::Failure;
use penstock_config::CorsConfig;
use penstock_http::{Field, Framing, Head};

/// The page that a request says it comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Page {
    /// From no page: a program, or what a person typed into a browser.
    None,
    /// Page of the gateway's own origin.
    Own,
    /// Page of an origin that `[cors]` lists.
    Listed,
    /// Page of any other origin.
    Foreign,
}

/// A body, by what the content type of its request makes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// JSON; a page needs a preflight to send it.
    Json,
    /// No type, plain text or an encoded form, as `curl -d` says of JSON: read as JSON. A page needs no preflight.
    Unsaid,
    /// `multipart/form-data`. A page needs no preflight.
    Multipart,
    /// Any other content type, or more than one.
    Other,
}

impl Content {
    /// Reads `Content-Type` of a request; a request with two of them is [`Content::Other`].
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        let mut values = headers.get_all(header::CONTENT_TYPE).iter();
        let value = match (values.next(), values.next()) {
            (None, _) => return Content::Unsaid,
            (Some(value), None) => value.as_bytes(),
            (Some(_), Some(_)) => return Content::Other,
        };
        let kind = value.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
        let is = |name: &str| kind.eq_ignore_ascii_case(name.as_bytes());
        let is_json = || kind.len() > 5 && kind[kind.len() - 5..].eq_ignore_ascii_case(b"+json");
        if is("application/json") || is_json() {
            Content::Json
        } else if is("") || is("text/plain") || is("application/x-www-form-urlencoded") {
            Content::Unsaid
        } else if is("multipart/form-data") {
            Content::Multipart
        } else {
            Content::Other
        }
    }

    /// True where the body is read as JSON.
    pub(crate) fn is_json(self) -> bool {
        matches!(self, Content::Json | Content::Unsaid)
    }
}

/// True if a value of `Host` names this gateway: by an address, which no DNS can point elsewhere, by `localhost`, or by
/// a name of `listed` (in lower case; `*.example` stands for every name below `example`).
pub fn is_own_host(host: &str, listed: &[String]) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map_or("", |(address, _)| address),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    if name.parse::<IpAddr>().is_ok() {
        return true;
    }
    let name = name.strip_suffix('.').unwrap_or(name);
    let is_below = |suffix: &str| {
        let dot = name.len().checked_sub(suffix.len() + 1).filter(|dot| *dot > 0);
        dot.is_some_and(|dot| name.is_char_boundary(dot) && name.as_bytes()[dot] == b'.')
            && name[name.len() - suffix.len()..].eq_ignore_ascii_case(suffix)
    };
    name.eq_ignore_ascii_case("localhost")
        || is_below("localhost")
        || listed.iter().any(|listed| match listed.strip_prefix("*.") {
            Some(suffix) => is_below(suffix),
            None => name.eq_ignore_ascii_case(listed),
        })
}

/// True if the request's `Host` names this gateway. A request without `Host` (HTTP/1.0) comes from no browser.
pub(crate) fn is_addressed(headers: &HeaderMap, hosts: &[String]) -> bool {
    headers.get_all(header::HOST).iter().all(|host| host.to_str().is_ok_and(|host| is_own_host(host, hosts)))
}

/// Failure of a request to a name that is not the gateway's.
pub(crate) fn misdirected() -> Failure {
    let message = "The Host header names a host that is not served here. A gateway that asks for no API key answers to its address, to \
                   localhost, and to the names of server.hosts.";
    Failure::new(ErrorKind::Forbidden, message)
}

/// Value of a header field that occurs exactly once; otherwise `None`.
fn one(headers: &HeaderMap, name: impl header::AsHeaderName) -> Option<&HeaderValue> {
    let mut all = headers.get_all(name).iter();
    all.next().filter(|_| all.next().is_none())
}

/// Page that a request comes from, by `Origin` and the fetch metadata of the browser.
pub(crate) fn page(headers: &HeaderMap, hosts: &[String], cors: &CorsConfig) -> Page {
    let site = headers.get("sec-fetch-site").map(HeaderValue::as_bytes);
    if headers.contains_key(header::ORIGIN) {
        let Some(origin) = one(headers, header::ORIGIN) else { return Page::Foreign };
        if cors.lists(origin.as_bytes()) {
            return Page::Listed;
        }
        let is_near = matches!(site, None | Some(b"same-origin"));
        return if is_near && is_own_origin(origin, headers, hosts) { Page::Own } else { Page::Foreign };
    }
    match site {
        None | Some(b"none") => Page::None,
        Some(b"same-origin") => Page::Own,
        Some(_) => Page::Foreign,
    }
}

/// True if an origin is that of the request's own URL. Only a proxy in front may know whether that URL begins with http or https.
fn is_own_origin(origin: &HeaderValue, headers: &HeaderMap, hosts: &[String]) -> bool {
    let text = |value: &HeaderValue| value.to_str().ok().map(str::to_ascii_lowercase);
    let (Some(origin), Some(host)) = (text(origin), one(headers, header::HOST).and_then(text)) else { return false };
    let rest = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
    rest == Some(host.as_str()) && is_own_host(&host, hosts)
}

/// Refuses requests that a page can make a browser send without a preflight. `ambient`: nothing in the request itself
/// shows the sender (no credential is needed, or a client certificate is, which browsers add by themselves).
///
/// # Errors
/// 403 for such a request of a foreign page.
pub(crate) fn check(route: &Route, head: &Head, page: Page, ambient: impl Fn() -> bool) -> Result<(), Failure> {
    if page != Page::Foreign {
        return Ok(());
    }
    let is_refused = match route {
        Route::Realtime => ambient(),
        _ if head.method != Method::POST => false,
        _ => match Content::of(&head.headers) {
            Content::Json => false,
            // Read as JSON, or a POST without a body.
            Content::Unsaid => head.framing != Framing::None || ambient(),
            Content::Multipart | Content::Other => ambient(),
        },
    };
    if !is_refused {
        return Ok(());
    }
    let message = "A web page of another origin may not send this. cors.origins lists the origins that may use this gateway; bodies are \
                   sent as \"Content-Type: application/json\".";
    Err(Failure::new(ErrorKind::Forbidden, message))
}

/// Request headers that pages may send besides those that need no permission: the SDKs' fields, and the fields that are
/// read here.
const REQUEST_HEADERS: [&str; 36] = [
    "accept",
    "accept-language",
    "anthropic-beta",
    "anthropic-dangerous-direct-browser-access",
    "anthropic-version",
    "api-key",
    "authorization",
    "baggage",
    "cache-control",
    "content-language",
    "content-type",
    "http-referer",
    "idempotency-key",
    "last-event-id",
    "openai-beta",
    "openai-organization",
    "openai-project",
    "pragma",
    "range",
    "traceparent",
    "tracestate",
    "user-agent",
    "x-api-key",
    "x-client-request-id",
    "x-goog-api-client",
    "x-goog-api-key",
    "x-goog-user-project",
    "x-litellm-timeout",
    "x-penstock-cost",
    "x-penstock-route",
    "x-request-id",
    "x-request-timeout-ms",
    "x-requested-with",
    "x-session-id",
    "x-should-retry",
    "x-title",
];
/// Prefix of further request headers that pages may send.
const REQUEST_HEADER_PREFIX: &str = "x-stainless-";

/// Response headers that pages may read besides those that need no permission.
const RESPONSE_HEADERS: &str = "x-request-id, request-id, retry-after, x-should-retry, openai-processing-ms, x-upstream-request-id, \
     x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, \
     x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens, \
     anthropic-ratelimit-requests-limit, anthropic-ratelimit-requests-remaining, anthropic-ratelimit-requests-reset, \
     anthropic-ratelimit-tokens-limit, anthropic-ratelimit-tokens-remaining, anthropic-ratelimit-tokens-reset, \
     anthropic-ratelimit-input-tokens-limit, anthropic-ratelimit-input-tokens-remaining, anthropic-ratelimit-input-tokens-reset, \
     anthropic-ratelimit-output-tokens-limit, anthropic-ratelimit-output-tokens-remaining, \
     anthropic-ratelimit-output-tokens-reset, x-penstock-attempts, x-penstock-cost, x-penstock-error-source, \
     x-penstock-estimate, x-penstock-hedged, x-penstock-route, x-penstock-target";

/// CORS header fields for every answer to a page's browser: errors, streams and preflights alike. Empty where `[cors]`
/// lists nothing.
pub(crate) fn fields(headers: &HeaderMap, cors: &CorsConfig) -> Vec<Field> {
    if !cors.is_on() {
        return Vec::new();
    }
    let mut fields = Vec::with_capacity(3);
    let allowed = if cors.any {
        headers.contains_key(header::ORIGIN).then(|| HeaderValue::from_static("*"))
    } else {
        // Caches keep the answers to different origins apart, also those to none.
        fields.push((header::VARY, HeaderValue::from_static("origin")));
        one(headers, header::ORIGIN).filter(|origin| cors.lists(origin.as_bytes())).cloned()
    };
    if let Some(allowed) = allowed {
        fields.push((header::ACCESS_CONTROL_ALLOW_ORIGIN, allowed));
        fields.push((header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(RESPONSE_HEADERS)));
    }
    fields
}

/// Answer to a preflight, beside [`fields`].
#[derive(Debug)]
pub(crate) struct Preflight {
    /// Bounded name of the route that the preflight asks about.
    pub(crate) label: &'static str,
    /// Methods and header fields that may be sent to the route.
    pub(crate) fields: Vec<Field>,
}

/// Answer to a preflight, which a browser sends before a request that is not simple; `None`: the request is no
/// preflight. No credential is needed, since browsers send none with it.
pub(crate) fn preflight(head: &Head, cors: &CorsConfig) -> Option<Result<Preflight, Failure>> {
    const PRIVATE: &str = "access-control-request-private-network";
    let asks = head.method == Method::OPTIONS && head.headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    if !asks || !cors.is_on() || !head.headers.contains_key(header::ORIGIN) {
        return None;
    }
    let is_listed = one(&head.headers, header::ORIGIN).is_some_and(|origin| cors.lists(origin.as_bytes()));
    if !cors.any && !is_listed {
        let message = "Pages of this origin may not use this gateway; cors.origins lists those that may.";
        return Some(Err(Failure::new(ErrorKind::Forbidden, message)));
    }
    let methods = [Method::GET, Method::POST, Method::DELETE];
    let found: Vec<_> =
        methods.iter().filter_map(|method| Some((method.as_str(), Route::parse(method, &head.target).ok()?))).collect();
    let Some((_, route)) = found.first() else {
        return Some(Err(Failure::new(ErrorKind::NotFound, "There is no such URL here.")));
    };
    let methods: Vec<_> = found.iter().map(|(method, _)| *method).collect();
    let vary = "access-control-request-method, access-control-request-headers";
    let mut fields = vec![
        (header::VARY, HeaderValue::from_static(vary)),
        (header::ACCESS_CONTROL_MAX_AGE, cors.max_age_seconds.into()),
    ];
    let mut put =
        |name: HeaderName, value: &str| fields.extend(HeaderValue::from_str(value).ok().map(|value| (name, value)));
    put(header::ACCESS_CONTROL_ALLOW_METHODS, &methods.join(", "));
    let wanted = allowed_headers(&head.headers);
    if !wanted.is_empty() {
        put(header::ACCESS_CONTROL_ALLOW_HEADERS, &wanted);
    }
    if head.headers.contains_key(PRIVATE) {
        put(HeaderName::from_static("access-control-allow-private-network"), "true");
    }
    Some(Ok(Preflight { label: route.label(), fields }))
}

/// Headers asked for in a preflight that may be sent.
fn allowed_headers(headers: &HeaderMap) -> String {
    let asked = headers.get_all(header::ACCESS_CONTROL_REQUEST_HEADERS).iter().filter_map(|value| value.to_str().ok());
    let names = asked.flat_map(|value| value.split(',')).map(|name| name.trim().to_ascii_lowercase());
    let is_allowed = |name: &String| {
        REQUEST_HEADERS.contains(&name.as_str())
            || name
                .strip_prefix(REQUEST_HEADER_PREFIX)
                .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(is_name))
    };
    names.filter(is_allowed).collect::<Vec<_>>().join(", ")
}

fn is_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'-'
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_http::head;

    fn head(request: &str) -> Head {
        head::parse(format!("{request}\r\n\r\n").replace('\n', "\r\n").replace("\r\r", "\r").as_bytes()).expect(request)
    }

    fn cors(origins: &[&str]) -> CorsConfig {
        let any = origins == ["*"];
        let origins = origins.iter().filter(|origin| **origin != "*").map(|origin| (*origin).to_owned()).collect();
        CorsConfig { origins, any, max_age_seconds: 600 }
    }

    #[test]
    fn addresses_and_local_names_are_our_own() {
        let listed = ["gw.example".to_owned(), "*.corp.example".to_owned()];
        for host in [
            "127.0.0.1",
            "10.1.2.3:80",
            "[::1]:8080",
            "[::1]",
            "localhost",
            "LOCALHOST:1",
            "localhost.:1",
            "penstock.localhost",
            "gw.example:8080",
            "GW.Example.",
            "a.b.corp.example",
        ] {
            assert!(is_own_host(host, &listed), "{host}");
        }
        for host in [
            "evil.test",
            "evil.test:8080",
            "localhost.evil.test",
            "127.0.0.1.evil.test",
            "evillocalhost",
            ".localhost",
            "corp.example",
            "evilcorp.example",
            "a.gw.example",
            "0x7f.1",
            "2130706433",
            "127.1",
            "[::1",
            "::1",
            "",
            ":80",
            ".",
        ] {
            assert!(!is_own_host(host, &listed), "{host}");
        }
    }

    #[test]
    fn a_page_is_known_by_what_its_browser_says() {
        let of = |fields: &str| {
            let head = head(&format!("POST /v1/models HTTP/1.1\nHost: 127.0.0.1:8080{fields}"));
            page(&head.headers, &[], &cors(&["https://app.example"]))
        };
        for (fields, expected) in [
            ("", Page::None),
            ("\nSec-Fetch-Site: none", Page::None),
            ("\nSec-Fetch-Site: same-origin", Page::Own),
            ("\nSec-Fetch-Site: same-site", Page::Foreign),
            ("\nSec-Fetch-Site: cross-site", Page::Foreign),
            ("\nSec-Fetch-Site: something-new", Page::Foreign),
            ("\nOrigin: http://127.0.0.1:8080", Page::Own),
            ("\nOrigin: http://127.0.0.1:8080\nSec-Fetch-Site: same-origin", Page::Own),
            ("\nOrigin: http://127.0.0.1:8080\nSec-Fetch-Site: cross-site", Page::Foreign),
            ("\nOrigin: http://127.0.0.1", Page::Foreign),
            ("\nOrigin: http://127.0.0.1:3000", Page::Foreign),
            ("\nOrigin: https://app.example", Page::Listed),
            ("\nOrigin: https://app.example\nSec-Fetch-Site: cross-site", Page::Listed),
            ("\nOrigin: https://app.example:8443", Page::Foreign),
            ("\nOrigin: http://app.example", Page::Foreign),
            ("\nOrigin: https://app.example.evil.test", Page::Foreign),
            ("\nOrigin: https://a.app.example", Page::Foreign),
            ("\nOrigin: null", Page::Foreign),
            ("\nOrigin:", Page::Foreign),
            ("\nOrigin: https://app.example\nOrigin: https://app.example", Page::Foreign),
        ] {
            assert_eq!(of(fields), expected, "{fields:?}");
        }
    }

    /// A request of a foreign page: `Ok`, or a 403; where nothing in the request shows who sends it, and where a key does.
    #[track_caller]
    fn sent(request: &str, ambient: bool, keyed: bool) {
        let head = head(&format!("{request}\nHost: localhost\nOrigin: https://evil.test"));
        let route = Route::parse(&head.method, &head.target).expect("a route");
        for (is_ambient, expected) in [(true, ambient), (false, keyed)] {
            let checked = check(&route, &head, Page::Foreign, || is_ambient);
            assert_eq!(
                checked.map_err(|failure| failure.status()),
                if expected { Ok(()) } else { Err(403) },
                "{request}"
            );
            for page in [Page::None, Page::Own, Page::Listed] {
                assert!(check(&route, &head, page, || is_ambient).is_ok(), "{page:?} {request}");
            }
        }
    }

    #[test]
    fn a_foreign_page_sends_nothing_that_needs_no_preflight() {
        let chat = "POST /v1/chat/completions HTTP/1.1\nContent-Length: 2";
        sent(&format!("{chat}\nContent-Type: application/json"), true, true);
        for simple in [
            "",
            "\nContent-Type:",
            "\nContent-Type: text/plain",
            "\nContent-Type: text/plain;charset=UTF-8",
            "\nContent-Type: Text/Plain; application/json",
            "\nContent-Type: application/x-www-form-urlencoded",
        ] {
            sent(&format!("{chat}{simple}"), false, false);
        }
        let two = "\nContent-Type: application/json\nContent-Type: text/plain";
        sent(&format!("{chat}{two}"), false, true);
        for url in ["/v1/files", "/v1/audio/transcriptions", "/v1/images/edits"] {
            let form = "Content-Length: 2\nContent-Type: multipart/form-data; boundary=b";
            sent(&format!("POST {url} HTTP/1.1\n{form}"), false, true);
        }
        sent("POST /v1/batches/b/cancel HTTP/1.1", false, true);
        let socket = "Connection: Upgrade\nUpgrade: websocket\nSec-WebSocket-Version: 13";
        sent(&format!("GET /v1/realtime?model=m HTTP/1.1\n{socket}"), false, true);
        sent("GET /v1/models HTTP/1.1", true, true);
    }

    #[test]
    fn curl_says_json_is_a_form() {
        let of = |kind: &str| Content::of(&head(&format!("POST / HTTP/1.1\nHost: a\nContent-Type: {kind}")).headers);
        for kind in
            ["application/x-www-form-urlencoded", "text/plain; charset=utf-8", "TEXT/PLAIN", "", "application/json"]
        {
            assert!(of(kind).is_json(), "{kind}");
        }
        for kind in ["text/html", "multipart/form-data; boundary=b", "application/octet-stream", "json"] {
            assert!(!of(kind).is_json(), "{kind}");
        }
        assert_eq!(of("application/vnd.api+json;x=y"), Content::Json);
    }

    fn text(fields: &[Field]) -> String {
        let lines: Vec<_> =
            fields.iter().map(|(name, value)| format!("{name}: {}", value.to_str().expect("text"))).collect();
        lines.join("\n")
    }

    #[test]
    fn every_answer_says_which_page_may_read_it() {
        let of = |origin: &str, origins: &[&str]| {
            let head = head(&format!("GET /v1/models HTTP/1.1\nHost: a{origin}"));
            text(&fields(&head.headers, &cors(origins)))
        };
        let app = ["https://app.example"];
        assert_eq!(of("\nOrigin: https://app.example", &[]), "");
        assert_eq!(of("", &app), "vary: origin");
        for other in ["null", "https://evil.test", "https://APP.example", "*"] {
            assert_eq!(of(&format!("\nOrigin: {other}"), &app), "vary: origin", "{other}");
        }
        let allowed = of("\nOrigin: https://app.example", &app);
        assert!(allowed.starts_with("vary: origin\naccess-control-allow-origin: https://app.example\n"), "{allowed}");
        for exposed in ["x-request-id", "retry-after", "x-ratelimit-reset-tokens", "anthropic-ratelimit-requests-limit"]
        {
            assert!(allowed.contains(exposed), "{exposed}");
        }
        assert!(!allowed.contains("credentials"), "cookies and certificates stay where they are");
        assert!(of("\nOrigin: https://evil.test", &["*"]).starts_with("access-control-allow-origin: *\n"));
        assert_eq!(of("", &["*"]), "");
    }

    #[track_caller]
    fn asked(request: &str, origins: &[&str]) -> Option<Result<String, u16>> {
        let head = head(&format!("{request}\nHost: a"));
        let answer = preflight(&head, &cors(origins))?;
        Some(answer.map(|preflight| text(&preflight.fields)).map_err(|failure| failure.status()))
    }

    #[test]
    fn a_preflight_is_answered_for_what_there_is() {
        let app = ["https://app.example"];
        let ask = |url: &str, more: &str| {
            let head = "Origin: https://app.example\nAccess-Control-Request-Method: POST";
            asked(&format!("OPTIONS {url} HTTP/1.1\n{head}{more}"), &app)
        };
        let sdk =
            "\nAccess-Control-Request-Headers: Authorization, content-type,x-stainless-os, x-evil,x-stainless-,cookie";
        assert_eq!(
            ask("/v1/chat/completions", sdk),
            Some(Ok("vary: access-control-request-method, access-control-request-headers\n\
                     access-control-max-age: 600\n\
                     access-control-allow-methods: GET, POST\n\
                     access-control-allow-headers: authorization, content-type, x-stainless-os"
                .into()))
        );
        let methods = |url: &str| ask(url, "").expect("a preflight").expect("allowed");
        assert!(
            methods("/v1/files").contains("access-control-allow-methods: GET, POST\n")
                || methods("/v1/files").ends_with("GET, POST")
        );
        assert!(methods("/v1/files/f").ends_with("access-control-allow-methods: GET, DELETE"));
        assert!(methods("/v1beta/models/m:generateContent").ends_with("access-control-allow-methods: POST"));
        assert_eq!(ask("/nothing", ""), Some(Err(404)));
        let network =
            ask("/v1/models", "\nAccess-Control-Request-Private-Network: true").expect("one").expect("allowed");
        assert!(network.ends_with("access-control-allow-private-network: true"), "{network}");
        let stranger = "OPTIONS /v1/models HTTP/1.1\nOrigin: null\nAccess-Control-Request-Method: GET";
        assert_eq!(asked(stranger, &app), Some(Err(403)));
        assert_eq!(asked(stranger, &[]), None, "without [cors] nothing is said");
        assert!(asked(stranger, &["*"]).is_some_and(|answer| answer.is_ok()));
        assert_eq!(asked("OPTIONS /v1/models HTTP/1.1\nOrigin: https://app.example", &app), None);
    }

    #[test]
    fn the_headers_of_the_sdks_may_be_sent() {
        assert!(REQUEST_HEADERS.is_sorted(), "easier to read");
        for name in
            ["anthropic-dangerous-direct-browser-access", "openai-organization", "x-goog-api-key", "idempotency-key"]
        {
            assert!(REQUEST_HEADERS.contains(&name), "{name}");
        }
    }
}
