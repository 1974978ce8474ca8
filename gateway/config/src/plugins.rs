//! `[[plugins]]`: plugins for requests and answers, each with its scope and settings.

use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use penstock_plugins::{Plugin, Settings, Surroundings};
use serde_json::Value;

use super::raw::Reader;
use crate::registry;
use penstock_http::client::Target;

/// Entry of the config with the plugin that was built from it.
#[derive(Clone)]
pub struct PluginConfig {
    /// Name of this entry in logs and metrics; by default the plugin's name.
    pub id: Arc<str>,
    /// Kind of plugin, as the registry names it.
    pub name: String,
    /// URLs that the plugin is for: names, or prefixes that end in `*`; empty: all.
    pub routes: Vec<String>,
    /// Models that the plugin is for, written as `routes`.
    pub models: Vec<String>,
    /// Keys that the plugin is for, written as `routes`.
    pub keys: Vec<String>,
    /// Teams that the plugin is for, written as `routes`.
    pub teams: Vec<String>,
    /// Consequence of the plugin's failure: the request goes on or is refused.
    pub on_fail: OnFail,
    /// Time limit of one hook of the plugin; a longer one is a failure.
    pub timeout: Duration,
    /// Settings of the plugin as JSON; `None`: the entry has none.
    pub settings: Option<Value>,
    /// Plugin that was built from the settings; a reload without changes keeps it.
    pub plugin: Arc<dyn Plugin>,
}

/// Consequence of a plugin's failure for the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFail {
    /// Fail open: the request goes on without the plugin.
    Open,
    /// Fail closed: the request is refused, or its answer breaks off.
    Closed,
}

impl OnFail {
    /// Name of the value as the config writes it (`on_fail`).
    pub fn name(self) -> &'static str {
        match self {
            OnFail::Open => "open",
            OnFail::Closed => "closed",
        }
    }
}

impl PluginConfig {
    /// Returns true if `other` was built from the same id, name, settings and revision; a reload then keeps the running
    /// instance and its state.
    pub fn is_same(&self, other: &Self) -> bool {
        (&self.id, &self.name, &self.settings) == (&other.id, &other.name, &other.settings)
            && self.plugin.revision() == other.plugin.revision()
    }
}

impl fmt::Debug for PluginConfig {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, name, routes, models, keys, teams, on_fail, timeout, .. } = self;
        out.debug_struct("PluginConfig")
            .field("id", id)
            .field("name", name)
            .field("scope", &(routes, models, keys, teams))
            .field("on_fail", on_fail)
            .field("timeout", timeout)
            .finish_non_exhaustive()
    }
}

/// Access to the environment, files and URLs for a plugin's settings.
struct Named<'e> {
    env: &'e dyn Fn(&str) -> Option<String>,
    /// False if the plugin will not run in this process: an unset variable then reads as a placeholder.
    needs_variables: bool,
}

impl Surroundings for Named<'_> {
    fn env(&self, name: &str) -> Option<String> {
        (self.env)(name).or_else(|| (!self.needs_variables).then(|| "unset".to_owned()))
    }

    fn check_url(&self, url: &str) -> Result<(), String> {
        Target::parse(url).map(drop)
    }

    fn file(&self, path: &str, bytes_max: usize) -> Result<Bytes, String> {
        let mut bytes = Vec::new();
        let file = File::open(path).map_err(|error| error.to_string())?;
        file.take(bytes_max as u64 + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
        if bytes.len() > bytes_max {
            return Err(format!("has more than the {bytes_max} bytes that are allowed"));
        }
        Ok(bytes.into())
    }
}

/// Reads one `[[plugins]]` table and builds the plugin.
pub(super) fn plugin(table: &Reader<'_, '_>, env: &dyn Fn(&str) -> Option<String>) -> Option<PluginConfig> {
    let name = table.text("name");
    let id = table.text("id").or_else(|| name.clone());
    let on_fail = match table.text("on_fail").as_deref() {
        Some("open") => OnFail::Open,
        Some("closed") => OnFail::Closed,
        _ => {
            table.fault("on_fail", "must be \"open\" or \"closed\"");
            OnFail::Closed
        }
    };
    let lists = ["routes", "models", "keys", "teams"].map(|name| table.texts(name));
    super::identity::patterns(table, &lists[0]);
    let timeout = Duration::from_millis(table.number("timeout_ms", 1..=600_000));
    let settings = table.json("settings");
    let Some(name) = name else {
        table.fault("name", format!("is missing: {}", registry::names()));
        return None;
    };
    let kind = registry::find(&name).map_err(|message| table.fault("name", message)).ok()?;
    let named = Named { env, needs_variables: table.needs_variables() };
    let built = Settings::read(settings.as_ref(), &named, |settings| kind.build(settings));
    let plugin = built.map_err(|faults| {
        for fault in faults {
            table.fault_below("settings", &fault.path, fault.message);
        }
    });
    let [routes, models, keys, teams] = lists;
    let id = id.unwrap_or_default().into();
    Some(PluginConfig { id, name, routes, models, keys, teams, on_fail, timeout, settings, plugin: plugin.ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Overrides, Snapshot, load};

    fn read(text: &str) -> Result<Snapshot, Vec<String>> {
        load(Some(("p.toml", text)), &Overrides::default(), &|_| None)
            .map_err(|faults| faults.0.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn an_entry_is_read_with_its_settings() {
        let text = "[[plugins]]\nname = \"headers\"\nroutes = [\"/v1/chat/*\"]\non_fail = \"open\"\n\
                    [plugins.settings.request]\nset = { \"x-team\" = \"search\" }\n";
        let snapshot = read(text).expect("valid");
        let [plugin] = &snapshot.plugins[..] else { panic!("{:?}", snapshot.plugins) };
        assert_eq!((&*plugin.id, plugin.on_fail, plugin.timeout.as_millis()), ("headers", OnFail::Open, 5000));
        assert_eq!(
            plugin.settings.as_ref().map(ToString::to_string).as_deref(),
            Some(r#"{"request":{"set":{"x-team":"search"}}}"#)
        );
    }

    #[test]
    fn every_fault_of_it_has_its_line() {
        let text = "[[plugins]]\nname = \"header\"\n[[plugins]]\nname = \"headers\"\non_fail = \"maybe\"\n\
                    [plugins.settings.request]\nset = { \"x y\" = \"1\" }\nmore = 1\n[[plugins]]\nid = \"x\"\n\
                    [[plugins]]\nname = \"headers\"\nsettings = 3\n";
        let faults = read(text).expect_err("faults");
        let starts = [
            "p.toml:2: plugins[0].name: \"header\" is no plugin",
            "p.toml:5: plugins[1].on_fail: must be",
            "p.toml:7: plugins[1].settings.request.set.x y: is no header field",
            "p.toml:8: plugins[1].settings.request.more: unknown key",
            "p.toml:10: plugins[2].name: is missing",
            "p.toml:13: plugins[3].settings: must be a table",
        ];
        for start in starts {
            assert!(faults.iter().any(|fault| fault.starts_with(start)), "{start}: {faults:#?}");
        }
    }
}
