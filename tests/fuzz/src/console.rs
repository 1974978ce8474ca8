//! Head of a request to the web console: host, cookies, path and conditions, a line each.

use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use penstock_console::{Files, cookie_name, read, set};

thread_local! {
    /// Packing the files takes longer than any input.
    static FILES: Files = Files::default();
}

pub(crate) fn run(bytes: &[u8]) {
    let mut lines = bytes.split(|byte| *byte == b'\n');
    let mut next = || lines.next().unwrap_or_default();
    let host = String::from_utf8_lossy(next()).into_owned();
    let path = String::from_utf8_lossy(next()).into_owned();
    let name = cookie_name(&host);
    assert!(name.len() <= 22 && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_'), "{name}");
    let mut headers = HeaderMap::new();
    for field in [header::IF_NONE_MATCH, header::ACCEPT_ENCODING, header::COOKIE, header::COOKIE] {
        if let Ok(value) = HeaderValue::from_bytes(next()) {
            headers.append(field, value);
        }
    }
    if let Some(id) = read(&headers, &name) {
        assert!(!id.is_empty() && !id.contains(';'), "{id}");
        assert!(set(&name, id, true).is_some_and(|field| field.to_str().is_ok()), "it was a field's before");
    }
    let response = FILES.with(|files| files.answer(&Method::GET, &path, &headers));
    let known = [StatusCode::OK, StatusCode::NOT_MODIFIED, StatusCode::NOT_FOUND];
    assert!(known.contains(&response.status()), "{path}");
    assert!(response.headers().contains_key("content-security-policy"));
    assert!(response.status() != StatusCode::NOT_MODIFIED || response.body().is_empty());
}
