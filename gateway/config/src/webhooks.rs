//! `[[webhooks]]`: places that are told of state changes of the gateway, signed.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use super::raw::{Document, Reader};
use penstock_base::Secret;
use penstock_http::client::{Client, Target};

/// Shortest secret, in bytes; Standard Webhooks asks for 24 and takes 64 at most.
const SECRET_BYTES_MIN: usize = 24;
/// Most entries of `[[webhooks]]`.
const WEBHOOKS_MAX: usize = 32;

/// Kind of state change that webhooks are told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WebhookEvent {
    /// Budget that is used up to a threshold.
    Budget,
    /// Provider whose targets take no requests.
    ProviderDown,
    /// Worker that is started again and again.
    RestartLoop,
    /// Key that is about to expire.
    KeyExpiring,
}

impl WebhookEvent {
    /// All kinds, in the order of the reference page.
    pub const ALL: [Self; 4] = [Self::Budget, Self::ProviderDown, Self::RestartLoop, Self::KeyExpiring];

    /// Name of the kind in the config and in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Budget => "budget.threshold",
            Self::ProviderDown => "provider.down",
            Self::RestartLoop => "worker.restart_loop",
            Self::KeyExpiring => "key.expiring",
        }
    }
}

/// Entry of `[[webhooks]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebhookConfig {
    /// Name in logs and metrics.
    pub name: String,
    /// Server that is told.
    pub target: Target,
    /// Path and query of the URL.
    pub path: Secret,
    /// Secret that signs messages, as it is used by the signature.
    pub secret: Secret,
    /// Kinds of state changes that are told.
    pub events: Vec<WebhookEvent>,
    /// Percent of a budget at which it is told, besides 100.
    pub budget_percent: u64,
    /// Time before its end from which a key counts as about to expire.
    pub expiring: Duration,
    /// Interval at which a condition that lasts is told again; `None`: never.
    pub repeat: Option<Duration>,
    /// Longest time of one attempt.
    pub timeout: Duration,
    /// Certificates (PEM) to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
}

/// Reads all `[[webhooks]]` tables.
pub(super) fn read(document: &Document<'_>, env: &dyn Fn(&str) -> Option<String>) -> Vec<WebhookConfig> {
    let tables = document.tables("webhooks");
    if let Some(table) = tables.get(WEBHOOKS_MAX) {
        table.fault("name", format!("at most {WEBHOOKS_MAX} entries of [[webhooks]]"));
    }
    let mut names = BTreeSet::new();
    for (table, name) in tables.iter().filter_map(|table| Some((table, table.text("name")?))) {
        if !names.insert(name.clone()) {
            table.fault("name", format!("{name:?} is used twice"));
        }
    }
    tables.iter().filter_map(|table| webhook(table, env)).collect()
}

fn webhook(table: &Reader<'_, '_>, env: &dyn Fn(&str) -> Option<String>) -> Option<WebhookConfig> {
    let name = table.text("name");
    if name.is_none() {
        table.fault("name", "is missing");
    }
    let place = place(table, env);
    let secret = secret(table, env);
    let days = Duration::from_secs(table.number("expiring_days", 1..=365) * 86_400);
    let minutes = table.number("repeat_minutes", 0..=43_200);
    let (events, percent) = (events(table), table.number("budget_percent", 1..=100));
    let timeout = Duration::from_millis(table.number("timeout_ms", 100..=60_000));
    let ca_file = table.text("ca_file").map(PathBuf::from);
    let (target, path) = place?;
    if let Err(why) = Client::new(target.clone(), ca_file.as_deref()) {
        table.fault(if ca_file.is_some() { "ca_file" } else { "url" }, why);
    }
    Some(WebhookConfig {
        name: name?,
        target,
        path,
        secret: secret?,
        events,
        budget_percent: percent,
        expiring: days,
        repeat: Some(Duration::from_secs(minutes * 60)).filter(|repeat| !repeat.is_zero()),
        timeout,
        ca_file,
    })
}

/// Server and path of the URL; `None` after a fault. The URL itself may be a secret, so no fault quotes it.
fn place(table: &Reader<'_, '_>, env: &dyn Fn(&str) -> Option<String>) -> Option<(Target, Secret)> {
    let (url, variable, may_be_plain) = (table.text("url"), table.text("url_env"), table.flag("allow_http"));
    let (key, url) = match (url, variable) {
        (Some(url), None) => ("url", url),
        (None, Some(variable)) => match env(&variable) {
            Some(url) => ("url_env", url.trim().to_owned()),
            None => {
                table.unset("url_env", &variable);
                return None;
            }
        },
        _ => {
            table.fault("url", "give either url or url_env");
            return None;
        }
    };
    let scheme = url.find("://").map(|at| at + 3).filter(|_| url.starts_with("http://") || url.starts_with("https://"));
    let Some(scheme) = scheme else {
        table.fault(key, "must begin with https://, or http:// for this machine");
        return None;
    };
    let path_at = url[scheme..].find(['/', '?', '#']).map_or(url.len(), |at| scheme + at);
    let (server, path) = url.split_at(path_at);
    let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
    // A message of the parser names the server alone, and a server with a password in it is none.
    let target = Target::parse(server).ok().filter(|_| !server.contains('@'));
    match target {
        Some(target)
            if path.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#')
                && (target.is_private() || may_be_plain) =>
        {
            Some((target, Secret::new(path)))
        }
        Some(target) if !target.is_private() && !may_be_plain => {
            table
                .fault(key, "must be https://: messages name keys and budgets (allow_http = true sends them in clear)");
            None
        }
        _ => {
            table.fault(key, "is no URL of a server: https://HOST[:PORT]/PATH");
            None
        }
    }
}

/// Secret of the signature: text, or `whsec_` and base64 as Standard Webhooks writes it.
fn secret(table: &Reader<'_, '_>, env: &dyn Fn(&str) -> Option<String>) -> Option<Secret> {
    let (key, text) = match (table.text("secret_env"), table.text("secret_file")) {
        (Some(variable), None) => {
            let text = env(&variable);
            if text.is_none() {
                table.unset("secret_env", &variable);
            }
            ("secret_env", text?)
        }
        (None, Some(path)) => {
            let text = std::fs::read_to_string(&path);
            let text = text.map_err(|error| table.fault("secret_file", format!("{path}: {error}")));
            ("secret_file", text.ok()?)
        }
        _ => {
            table.fault("secret_env", "give either secret_env or secret_file: receivers check the signature with it");
            return None;
        }
    };
    let text = text.trim();
    let is_base64 = |text: &str| {
        let digits = text.trim_end_matches('=');
        text.len().is_multiple_of(4) && text.len() - digits.len() <= 2 && digits.bytes().all(is_base64_digit)
    };
    if text.strip_prefix("whsec_").is_some_and(|text| !is_base64(text)) {
        table.fault(key, "is not base64 behind whsec_");
        return None;
    }
    if text.len() < SECRET_BYTES_MIN {
        table.fault(key, format!("is too short: at least {SECRET_BYTES_MIN} bytes"));
        return None;
    }
    Some(Secret::new(text))
}

fn is_base64_digit(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/')
}

fn events(table: &Reader<'_, '_>) -> Vec<WebhookEvent> {
    if !table.has("events") {
        return WebhookEvent::ALL.to_vec();
    }
    let mut out = Vec::new();
    for name in table.texts("events") {
        match WebhookEvent::ALL.into_iter().find(|event| event.name() == name) {
            Some(event) => out.push(event),
            None => {
                let known = WebhookEvent::ALL.map(WebhookEvent::name).join(", ");
                table.fault("events", format!("{name:?} is not one of {known}"));
            }
        }
    }
    if out.is_empty() {
        table.fault("events", "names none: leave the key out for all");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Overrides, Snapshot, load};

    fn read(text: &str) -> Result<Snapshot, String> {
        let env = |name: &str| match name {
            "SECRET" => Some("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".to_owned()),
            "SHORT" => Some("short".to_owned()),
            "ODD" => Some("whsec_not%base64%at%all%at%all".to_owned()),
            "URL" => Some("https://hooks.example/services/T0/secret-path?x=1\n".to_owned()),
            _ => None,
        };
        let text = format!("[[webhooks]]\n{text}\n");
        load(Some(("w.toml", &text)), &Overrides::default(), &env).map_err(|faults| faults.to_string())
    }

    #[test]
    fn an_entry_is_read_and_shows_no_secret() {
        let config = read("name = \"ops\"\nurl_env = \"URL\"\nsecret_env = \"SECRET\"").expect("valid");
        let [hook] = config.webhooks.as_slice() else { panic!("one") };
        assert_eq!(
            (hook.path.expose(), hook.target.authority.as_str()),
            ("/services/T0/secret-path?x=1", "hooks.example")
        );
        assert_eq!((hook.events.len(), hook.budget_percent, hook.repeat), (4, 80, Some(Duration::from_secs(3600))));
        let shown = format!("{config:?}");
        assert!(!shown.contains("secret-path") && !shown.contains("whsec_"), "{shown}");
    }

    #[test]
    fn faults_are_named() {
        let good = "name = \"a\"\nsecret_env = \"SECRET\"\n";
        for (text, part) in [
            (format!("{good}url = \"http://hooks.example/x\""), "must be https://"),
            (format!("{good}url = \"ftp://hooks.example/x\""), "must begin with https://"),
            (format!("{good}url = \"https://user:pw@h/x\""), "is no URL"),
            (format!("{good}url = \"https://h/x#y\""), "is no URL"),
            (good.to_owned(), "give either url or url_env"),
            (format!("{good}url_env = \"UNSET\""), "UNSET is not set"),
            (format!("{good}url = \"https://h\"\nevents = [\"all\"]"), "\"all\" is not one of budget.threshold"),
            (format!("{good}url = \"https://h\"\nevents = []"), "names none"),
            ("name = \"a\"\nurl = \"https://h\"".into(), "give either secret_env or secret_file"),
            ("name = \"a\"\nurl = \"https://h\"\nsecret_env = \"SHORT\"".into(), "too short"),
            ("name = \"a\"\nurl = \"https://h\"\nsecret_env = \"ODD\"".into(), "is not base64"),
            (format!("{good}url = \"https://h\"\nca_file = \"/nowhere.pem\""), "/nowhere.pem"),
            ("name = \"a\"\nurl = \"https://h\"\nsecret_file = \"/nowhere\"".into(), "/nowhere"),
            ("url = \"https://h\"\nsecret_env = \"SECRET\"".into(), "webhooks[0].name: is missing"),
            (format!("{good}url = \"https://h\"\n[[webhooks]]\n{good}url = \"https://h\""), "used twice"),
        ] {
            let faults = read(&text).expect_err(&text);
            assert!(faults.contains(part) && !faults.contains("pw@"), "{part:?} in {faults}");
        }
        assert!(read(&format!("{good}url = \"http://hooks.example/x\"\nallow_http = true")).is_ok());
        assert!(read(&format!("{good}url = \"http://127.0.0.1:9/x\"")).is_ok());
    }
}
