//! `[telemetry]`: destination of traces, and the selection of traced requests.

use std::path::PathBuf;

use super::providers::sendable;
use super::raw::Reader;
use penstock_http::client::Target;
use penstock_telemetry::{OtlpConfig, TelemetryConfig};

/// Reads the table `[telemetry]`; `env` gives the variables that it names.
pub(super) fn telemetry(table: &Reader<'_, '_>, env: &dyn Fn(&str) -> Option<String>) -> TelemetryConfig {
    let mut headers = sendable(table, "otlp_headers", table.map("otlp_headers"));
    if let Some(variable) = table.text("otlp_headers_env") {
        match env(&variable) {
            Some(text) => headers.extend(sendable(table, "otlp_headers_env", pairs(&text))),
            None => table.unset("otlp_headers_env", &variable),
        }
    }
    let (ca_file, service_name) = (table.text("otlp_ca_file").map(PathBuf::from), table.text("service_name"));
    let target = table.text("otlp_url").and_then(|url| {
        if cfg!(not(feature = "otel")) {
            table.fault("otlp_url", "this build sends no traces: build with the feature otel");
        }
        Target::parse(&url).map_err(|message| table.fault("otlp_url", message)).ok()
    });
    let otlp =
        target.map(|target| OtlpConfig { target, headers, ca_file, service_name: service_name.unwrap_or_default() });
    let sample_ratio = table.decimal("sample_ratio").unwrap_or(1.0);
    if sample_ratio > 1.0 {
        table.fault("sample_ratio", "must be a number from 0 to 1");
    }
    TelemetryConfig { otlp, sample_ratio, follow_clients: table.flag("follow_clients") }
}

/// Parses OpenTelemetry's notation of header fields: `name=value,name=value`.
fn pairs(text: &str) -> Vec<(String, String)> {
    let pairs = text.split(',').filter_map(|pair| pair.split_once('='));
    pairs.map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use crate::{Overrides, Snapshot, load};

    fn read(text: &str) -> Result<Snapshot, String> {
        let env = |name: &str| (name == "SET").then(|| "authorization=Bearer s3cret,x-team=a".to_owned());
        let text = format!("[telemetry]\n{text}\n");
        load(Some(("t.toml", &text)), &Overrides::default(), &env).map_err(|faults| faults.to_string())
    }

    #[test]
    #[cfg(feature = "otel")]
    fn a_collector_is_a_url_and_fields() {
        let config = read("otlp_url = \"http://127.0.0.1:4318\"\notlp_headers_env = \"SET\"").expect("valid");
        let otlp = config.telemetry.otlp.clone().expect("a collector");
        assert_eq!((otlp.headers.len(), otlp.headers[0].1.expose()), (2, "Bearer s3cret"));
        assert!(!format!("{config:?}").contains("s3cret"));
        assert!(read("").expect("valid").telemetry.otlp.is_none());
    }

    #[test]
    fn faults_are_named() {
        for (text, part) in [
            ("otlp_url = \"collector\"", "otlp_url"),
            ("otlp_headers_env = \"UNSET\"", "UNSET is not set"),
            ("otlp_headers = { host = \"x\" }", "cannot be sent"),
            ("sample_ratio = 2", "from 0 to 1"),
        ] {
            let faults = read(text).expect_err(text);
            assert!(faults.contains(part), "{part:?} in {faults}");
        }
    }
}
