//! `[[providers]]`: external services, and the sources of their keys.

use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderName, HeaderValue};

use super::raw::Reader;
use penstock_base::Secret;
use penstock_http::client::{Place, Target};
use penstock_kv_feed::{Endpoint, KvEventsConfig};
use penstock_provider::{PacingConfig, Protocol, ProviderConfig, keys_in};

/// Reads one `[[providers]]` table; `None` after a fault, which the document has recorded.
pub(super) fn provider(table: &Reader<'_, '_>, env: &dyn Fn(&str) -> Option<String>) -> Option<ProviderConfig> {
    let id = table.text("id");
    if id.as_deref().is_none_or(|id| id.contains('/')) {
        table.fault("id", "is needed, without a slash in it");
    }
    let name = table.text("protocol").unwrap_or_default();
    let protocol = Protocol::parse(&name);
    if protocol.is_none() {
        table.fault("protocol", format!("{name:?} is not a protocol: {}", Protocol::names()));
    }
    let millis = |name| Duration::from_millis(table.number(name, 1..=86_400_000));
    let (region, project) = (table.text("region"), table.text("project"));
    let target = target(table, protocol, region.as_deref(), project.as_deref());
    let keys = keys(table, env);
    let headers = sendable(table, "headers", table.map("headers"));
    let api_version = table.text("api_version");
    let is_usable = target.is_some();
    // A bad address must not hide other faults: read the rest of the table with a placeholder.
    let target = target.or_else(|| Target::parse("http://localhost").ok())?;
    let out = ProviderConfig {
        id: id.unwrap_or_default(),
        protocol: protocol.unwrap_or(Protocol::OpenAi),
        target: target.clone(),
        keys,
        key_file: table.text("key_file").map(PathBuf::from),
        models: table.texts("models"),
        resolve: resolve(table, &target),
        discover: table.flag("discover"),
        headers,
        ca_file: table.text("ca_file").map(PathBuf::from),
        connect_timeout: millis("connect_timeout_ms"),
        first_token_timeout: millis("first_token_timeout_ms"),
        idle_timeout: millis("idle_timeout_ms"),
        answer_timeout: millis("answer_timeout_ms"),
        api_version,
        region,
        project,
        health_path: health_path(table),
        health_interval: millis("health_interval_ms"),
        in_flight_max: table.number("in_flight_max", 1..=1_000_000) as usize,
        pacing: PacingConfig {
            requests_per_minute: table.number("requests_per_minute", 0..=10_000_000) as u32,
            tokens_per_minute: table.number("tokens_per_minute", 0..=1_000_000_000_000),
            wait: Duration::from_millis(table.number("pace_wait_ms", 0..=600_000)),
            gateways: table.number("pace_gateways", 1..=10_000) as u32,
        },
        stream_usage: table.flag("stream_usage"),
        kv_events: kv_events(table),
    };
    is_usable.then_some(out)
}

fn kv_events(table: &Reader<'_, '_>) -> Option<KvEventsConfig> {
    let endpoint = |name| {
        let text = table.text(name)?;
        Endpoint::parse(&text).map_err(|message| table.fault(name, message)).ok()
    };
    let (events, replay, tokenizer) = (endpoint("kv_events"), endpoint("kv_replay"), table.text("tokenizer"));
    if events.is_none() && table.text("kv_events").is_none() && (replay.is_some() || tokenizer.is_some()) {
        table.fault("kv_events", "is missing: kv_replay and tokenizer go with it");
    }
    let endpoint = events?;
    let Some(tokenizer) = tokenizer.map(PathBuf::from) else {
        table.fault(
            "tokenizer",
            "is needed with kv_events: the model's folder with tokenizer.json, as the server has it",
        );
        return None;
    };
    Some(KvEventsConfig { endpoint, replay, tokenizer })
}

/// Reads `resolve`, and checks that the host name can be followed.
fn resolve(table: &Reader<'_, '_>, target: &Target) -> bool {
    if !table.flag("resolve") {
        return false;
    }
    let Place::Tcp { host, tls: false, .. } = &target.place else {
        table.fault("resolve", "goes with a base_url of http://HOST: a certificate names no address");
        return true;
    };
    if !table.texts("models").is_empty() || table.flag("discover") {
        table.fault("resolve", "the models go into [[models]], which share requests among the addresses");
    }
    for name in ["kv_events", "kv_replay"] {
        let endpoint = table.text(name).and_then(|text| Endpoint::parse(&text).ok());
        if endpoint.is_some_and(|endpoint| endpoint.host() != host) {
            table.fault(name, "must have the host of base_url, with resolve: each address publishes its own events");
        }
    }
    true
}

fn health_path(table: &Reader<'_, '_>) -> Option<String> {
    let path = table.text("health_path")?;
    if !path.starts_with('/') {
        table.fault("health_path", "must begin with a slash; it stands behind base_url");
    }
    Some(path)
}

fn target(
    table: &Reader<'_, '_>,
    protocol: Option<Protocol>,
    region: Option<&str>,
    project: Option<&str>,
) -> Option<Target> {
    let url = table.text("base_url").or_else(|| protocol?.base_url(region, project));
    let Some(url) = url else {
        table.fault("base_url", "is missing (some protocols make it from region and project)");
        return None;
    };
    let target = Target::parse(&url).map_err(|message| table.fault("base_url", message)).ok()?;
    if protocol == Some(Protocol::Azure) && has_azure_path(&target.base) {
        let message = "must end before /openai, as https://NAME.openai.azure.com: the gateway adds /openai/deployments/MODEL itself \
                       (an address that ends in /openai/v1 is for protocol = \"openai\")";
        table.fault("base_url", message);
    }
    Some(target)
}

/// Returns true if a base path ends with a part of the path that requests to Azure get.
fn has_azure_path(base: &str) -> bool {
    ["/openai", "/openai/v1", "/openai/deployments"].iter().any(|end| base.ends_with(end))
        || base.contains("/openai/deployments/")
}

/// Reads the provider's keys: from one variable, several variables, or a file with one key per line.
fn keys(table: &Reader<'_, '_>, env: &dyn Fn(&str) -> Option<String>) -> Vec<Secret> {
    let (one, several, file) = (table.text("key_env"), table.texts("keys_env"), table.text("key_file"));
    if usize::from(one.is_some()) + usize::from(!several.is_empty()) + usize::from(file.is_some()) > 1 {
        table.fault("key_env", "at most one of key_env, keys_env and key_file");
    }
    let mut out = Vec::new();
    let mut add = |name: &str, text: &str| {
        let text = text.trim();
        if text.is_empty() || HeaderValue::from_str(text).is_err() {
            table.fault(name, "holds no key that can be sent");
        } else {
            out.push(Secret::new(text));
        }
    };
    let (name, variables) = if one.is_some() { ("key_env", one.into_iter().collect()) } else { ("keys_env", several) };
    for variable in variables {
        match env(&variable) {
            Some(text) => add(name, &text),
            None => table.unset(name, &variable),
        }
    }
    if let Some(path) = file {
        match std::fs::read_to_string(&path) {
            Ok(text) if text.trim_start().starts_with('{') => {
                let message = "holds JSON, not a key (for Google Cloud: a file with an access token, written anew before it expires)";
                table.fault("key_file", message);
            }
            Ok(text) => match keys_in(&text).as_slice() {
                [] => table.fault("key_file", "holds no key that can be sent"),
                found => out.extend_from_slice(found),
            },
            Err(error) => table.fault("key_file", format!("{path}: {error}")),
        }
    }
    out
}

/// Header fields that may be sent; the others, such as those the client sets itself, are faults of the key `key`.
pub(super) fn sendable(
    table: &Reader<'_, '_>,
    key: &'static str,
    fields: Vec<(String, String)>,
) -> Vec<(HeaderName, Secret)> {
    const OURS: [&str; 8] = [
        "host",
        "content-length",
        "transfer-encoding",
        "connection",
        "accept-encoding",
        "content-encoding",
        "upgrade",
        "expect",
    ];
    let mut out = Vec::new();
    for (name, value) in fields {
        match (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_str(&value)) {
            (Ok(name), Ok(_)) if !OURS.contains(&name.as_str()) => out.push((name, Secret::new(value))),
            _ => table.fault(key, format!("{name:?} cannot be sent")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use crate::{Overrides, Snapshot, load};

    fn read(text: &str) -> Result<Snapshot, String> {
        let env = |name: &str| (name == "SET").then(|| "s3cret".to_owned());
        load(Some(("p.toml", text)), &Overrides::default(), &env).map_err(|faults| faults.to_string())
    }

    #[test]
    fn five_lines_are_enough() {
        let text = "[[providers]]\nid = \"acme\"\nbase_url = \"http://127.0.0.1:9000/v1\"\nkey_env = \"SET\"\nmodels = [\"big\"]\n";
        let snapshot = read(text).expect("valid");
        let [provider] = snapshot.providers.as_slice() else { panic!("one provider") };
        assert_eq!((provider.keys[0].expose(), provider.models.as_slice()), ("s3cret", &["big".to_owned()][..]));
        assert!(snapshot.pools.is_empty(), "no demo model beside a provider");
        assert!(!format!("{snapshot:?}").contains("s3cret"));
    }

    #[test]
    fn a_fault_brings_no_false_ones_along() {
        let text =
            "[[providers]]\nid = \"a\"\nbase_url = \"ftp://x\"\nmodels = [\"m\"]\nin_flight_max = 0\nmodel = 1\n";
        let faults = read(text).expect_err("an address of no use");
        let lines: Vec<_> = faults.lines().map(|line| line.split(": ").nth(1).unwrap_or_default()).collect();
        assert_eq!(lines, ["providers[0].base_url", "providers[0].in_flight_max", "providers[0].model"], "{faults}");
        let plugin =
            read("[[plugins]]\nname = \"nobody's\"\n[plugins.settings]\nfile = \"x\"\n").expect_err("no such plugin");
        assert_eq!(plugin.lines().count(), 1, "{plugin}");
    }

    #[test]
    fn azure_may_be_behind_a_path() {
        for base in ["https://n.openai.azure.com", "https://n.openai.azure.com/", "https://proxy.example/openai-eu"] {
            let text =
                format!("[[providers]]\nid = \"a\"\nprotocol = \"azure\"\nbase_url = \"{base}\"\nmodels = [\"m\"]\n");
            assert_eq!(read(&text).map(|snapshot| snapshot.providers.len()), Ok(1), "{base}");
        }
    }

    #[test]
    fn faults_are_named() {
        for (text, part) in [
            ("id = \"a\"\nbase_url = \"ftp://x\"", "base_url"),
            ("id = \"a/b\"", "without a slash"),
            ("id = \"a\"\nprotocol = \"soap\"", "not a protocol"),
            ("id = \"a\"\nkey_env = \"UNSET\"", "UNSET is not set"),
            ("id = \"a\"\nkey_env = \"SET\"\nkeys_env = [\"SET\"]", "at most one"),
            ("id = \"a\"\nheaders = { host = \"x\" }", "cannot be sent"),
            ("id = \"a\"\nheaders = [1]", "name = \"text\""),
            ("id = \"a\"\n[[providers]]\nid = \"a\"", "used twice"),
            ("id = \"a\"\nprotocol = \"azure\"", "base_url: is missing"),
            ("id = \"a\"\nprotocol = \"azure\"\nbase_url = \"https://n.openai.azure.com/openai\"", "must end before"),
            (
                "id = \"a\"\nprotocol = \"azure\"\nbase_url = \"https://n.openai.azure.com/openai/v1/\"",
                "must end before",
            ),
            ("id = \"a\"\nprotocol = \"azure\"\nbase_url = \"https://n/openai/deployments/gpt\"", "must end before"),
            ("id = \"a\"\nkv_events = \"tcp://*:5557\"\ntokenizer = \"/m\"", "of the server that publishes"),
            ("id = \"a\"\nkv_events = \"tcp://h:5557\"", "tokenizer: is needed with kv_events"),
            ("id = \"a\"\nkv_replay = \"tcp://h:5558\"", "kv_events: is missing"),
        ] {
            let faults = read(&format!("[[providers]]\n{text}\n")).expect_err(text);
            assert!(faults.contains(part), "{part:?} in {faults}");
        }
    }
}
