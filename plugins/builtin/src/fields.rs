//! Header fields that plugins may not set.

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

/// Returns true if a plugin may set or remove the field.
fn is_free(name: &HeaderName) -> bool {
    !KEPT.contains(&name.as_str())
}

/// Fields to set, from the table `name` of the settings.
pub(crate) fn to_set(settings: &Settings<'_>, name: &str) -> Vec<(HeaderName, HeaderValue)> {
    let fields = settings.headers(name);
    for (field, _) in fields.iter().filter(|(field, _)| !is_free(field)) {
        settings.fault(&format!("{name}.{field}"), "is the gateway's own to set");
    }
    fields
}

/// Fields to remove, from the list `name` of the settings.
pub(crate) fn to_remove(settings: &Settings<'_>, name: &str) -> Vec<HeaderName> {
    let fields = settings.header_names(name);
    for (at, _) in fields.iter().enumerate().filter(|(_, field)| !is_free(field)) {
        settings.fault(&format!("{name}[{at}]"), "is the gateway's own to remove");
    }
    fields
}
