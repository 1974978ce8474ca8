//! Header fields that are not a plugin's to set.

use http::{HeaderName, HeaderValue};
use penstock_plugins::Settings;

/// Fields that frame a message, describe its body, or carry the gateway's own credentials.
const KEPT: [&str; 17] = [
    "accept-encoding",
    "authorization",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "expect",
    "host",
    "keep-alive",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-api-key",
    "x-goog-api-key",
    "x-request-id",
];

/// Whether a plugin may set or remove it.
fn is_free(name: &HeaderName) -> bool {
    !KEPT.contains(&name.as_str())
}

/// The table `name` of fields to be set.
pub(crate) fn to_set(settings: &Settings<'_>, name: &str) -> Vec<(HeaderName, HeaderValue)> {
    let fields = settings.headers(name);
    for (field, _) in fields.iter().filter(|(field, _)| !is_free(field)) {
        settings.fault(&format!("{name}.{field}"), "is the gateway's own to set");
    }
    fields
}

/// The list `name` of fields to be removed.
pub(crate) fn to_remove(settings: &Settings<'_>, name: &str) -> Vec<HeaderName> {
    let fields = settings.header_names(name);
    for (at, _) in fields.iter().enumerate().filter(|(_, field)| !is_free(field)) {
        settings.fault(&format!("{name}[{at}]"), "is the gateway's own to remove");
    }
    fields
}
