//! Header fields that cross between client and provider. Both directions are allowlists, so that no other field can
//! pass.

use http::{HeaderMap, HeaderName, HeaderValue, header};
use penstock_types::Dialect;

/// Returns true if a client's field is forwarded to a provider of the same dialect.
fn goes_up(dialect: Dialect, name: &HeaderName) -> bool {
    match dialect {
        Dialect::OpenAi => matches!(name.as_str(), "openai-beta" | "idempotency-key"),
        Dialect::Anthropic => matches!(name.as_str(), "anthropic-version" | "anthropic-beta"),
        Dialect::Gemini | Dialect::Ollama => false,
    }
}

/// Name under which a provider's field is returned to the client; `None`: it is not returned.
fn comes_back(name: &HeaderName) -> Option<HeaderName> {
    let text = name.as_str();
    if matches!(text, "x-request-id" | "request-id" | "apim-request-id" | "x-amzn-requestid") {
        return Some(HeaderName::from_static("x-upstream-request-id"));
    }
    let same = text.starts_with("x-ratelimit-")
        || text.starts_with("anthropic-ratelimit-")
        || (text.starts_with("openai-") && text != "openai-processing-ms")
        || text == "retry-after-ms";
    same.then(|| name.clone())
}

/// Fields of the client's head that are forwarded to the provider.
pub(super) fn upwards(dialect: Dialect, client: &HeaderMap) -> Vec<(HeaderName, HeaderValue)> {
    let mut out = Vec::with_capacity(8);
    for (name, value) in client {
        if goes_up(dialect, name) {
            out.push((name.clone(), value.clone()));
        }
    }
    out
}

/// Forwarded fields with those that plugins add; a plugin's field replaces a forwarded one of the same name.
pub(super) fn with(
    mut fields: Vec<(HeaderName, HeaderValue)>,
    plugins: &[(HeaderName, HeaderValue)],
) -> Vec<(HeaderName, HeaderValue)> {
    fields.retain(|(name, _)| plugins.iter().all(|(other, _)| other != name));
    fields.extend_from_slice(plugins);
    fields
}

/// Fields of the provider's head that are returned to the client, at most 32.
pub(super) fn back(provider: &HeaderMap) -> Vec<(HeaderName, HeaderValue)> {
    let mut out: Vec<(HeaderName, HeaderValue)> = Vec::new();
    for (name, value) in provider {
        if let Some(name) = comes_back(name)
            && out.len() < 32
        {
            out.push((name, value.clone()));
        }
    }
    out
}

/// Parses `retry-after-ms` or `Retry-After` in seconds. Dates are ignored, since the clocks could differ.
pub(super) fn retry_after(provider: &HeaderMap) -> Option<std::time::Duration> {
    let number = |name: &str| provider.get(name)?.to_str().ok()?.trim().parse::<f64>().ok();
    let seconds = number("retry-after-ms").map(|ms| ms / 1000.0).or_else(|| number(header::RETRY_AFTER.as_str()))?;
    std::time::Duration::try_from_secs_f64(seconds).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        fields.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))).collect()
    }

    fn names(fields: &[(HeaderName, HeaderValue)]) -> Vec<&str> {
        let mut names: Vec<_> = fields.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn credentials_and_addresses_of_the_client_stay_here() {
        let client = map(&[
            ("authorization", "Bearer x"),
            ("x-api-key", "x"),
            ("cookie", "x"),
            ("x-forwarded-for", "x"),
            ("openai-beta", "y"),
            ("anthropic-beta", "z"),
        ]);
        assert_eq!(names(&upwards(Dialect::OpenAi, &client)), ["openai-beta"]);
        assert_eq!(names(&upwards(Dialect::Anthropic, &client)), ["anthropic-beta"]);
    }

    #[test]
    fn limits_and_ids_come_back() {
        let provider = map(&[
            ("x-request-id", "1"),
            ("set-cookie", "x"),
            ("server", "x"),
            ("x-ratelimit-remaining-tokens", "5"),
            ("openai-processing-ms", "9"),
            ("openai-version", "2"),
        ]);
        let back = back(&provider);
        assert_eq!(names(&back), ["openai-version", "x-ratelimit-remaining-tokens", "x-upstream-request-id"]);
        let ms = |fields: &[(&'static str, &'static str)]| retry_after(&map(fields)).map(|wait| wait.as_millis());
        assert_eq!(ms(&[("retry-after", "7")]), Some(7000));
        assert_eq!(ms(&[("retry-after", "7"), ("retry-after-ms", "250")]), Some(250));
        assert_eq!(ms(&[("retry-after", "Wed, 21 Oct 2026 07:28:00 GMT")]), None);
        assert_eq!(ms(&[("retry-after", "-1")]), None);
    }
}
