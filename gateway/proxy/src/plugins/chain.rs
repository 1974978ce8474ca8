//! Plugins of a config, and the choice of those that a request meets.

use std::sync::Arc;

use penstock_plugins::RequestInfo;

use super::hub::Hub;
use penstock_config::{PluginConfig, Snapshot};
use penstock_telemetry::{Metric, Metrics, Tally};

/// One plugin of a config, with the counters that every request moves.
pub(crate) struct Link {
    pub(super) entry: Arc<PluginConfig>,
    /// Histogram of the seconds that requests spend in the plugin's `on_request`.
    pub(super) seconds: Tally,
    /// Counter of requests that the plugin passed on unanswered.
    pub(super) passed: Tally,
}

/// Plugins of one config, in the order of the file.
pub(crate) struct Chain {
    pub(super) links: Vec<Link>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) hub: Arc<Hub>,
    pub(super) body_bytes_max: usize,
}

impl Chain {
    /// Plugins of `config`. A plugin that is the same in `before` keeps its state.
    pub(crate) fn new(config: &Snapshot, metrics: &Arc<Metrics>, hub: &Arc<Hub>, before: Option<&Self>) -> Self {
        let mut entries: Vec<_> = config.plugins.clone();
        for entry in &mut entries {
            let known = before
                .and_then(|before| before.links.iter().map(|link| &link.entry).find(|known| known.is_same(entry)));
            entry.plugin = known.map_or(entry.plugin.clone(), |known| known.plugin.clone());
        }
        let link = |entry: PluginConfig| {
            let labels = [("plugin", &*entry.id), ("hook", "request"), ("outcome", "pass")];
            let seconds = metrics.tally(Metric::PluginSeconds, &labels[..2]);
            Link { seconds, passed: metrics.tally(Metric::PluginCalls, &labels), entry: Arc::new(entry) }
        };
        let links = entries.into_iter().map(link).collect();
        Self { links, metrics: metrics.clone(), hub: hub.clone(), body_bytes_max: config.http.body_bytes_max }
    }

    /// Numbers that plugins count themselves, by plugin and name.
    pub(crate) fn values(&self, out: &mut dyn FnMut(String, f64)) {
        for Link { entry, .. } in &self.links {
            for (name, value) in entry.plugin.values() {
                out(format!("{}/{name}", entry.id), value);
            }
        }
    }

    /// Plugins whose routes, models, keys and teams cover the request, in the order of the file.
    pub(super) fn matching(&self, info: &RequestInfo) -> impl Iterator<Item = &Link> {
        self.links.iter().filter(|link| link.is_for(info))
    }
}

impl Link {
    /// Returns true if the entry's routes, models, keys and teams cover the request.
    pub(super) fn is_for(&self, info: &RequestInfo) -> bool {
        let entry = &self.entry;
        covers(&entry.routes, Some(info.route))
            && covers(&entry.models, Some(&info.model))
            && covers(&entry.keys, info.key.as_deref())
            && covers(&entry.teams, info.team.as_deref())
    }
}

/// Returns true if a list of names and prefixes covers a name. An empty list covers everybody; any other list covers no request
/// without a name.
fn covers(rules: &[String], name: Option<&str>) -> bool {
    rules.is_empty()
        || name.is_some_and(|name| {
            rules.iter().any(|rule| match rule.strip_suffix('*') {
                Some(prefix) => name.starts_with(prefix),
                None => rule == name,
            })
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_list_is_for_everybody() {
        let check = |rules: &[&str], name: Option<&str>, expected: bool| {
            let rules: Vec<_> = rules.iter().map(|rule| (*rule).to_owned()).collect();
            assert_eq!(covers(&rules, name), expected, "{rules:?} {name:?}");
        };
        check(&[], None, true);
        check(&[], Some("a"), true);
        check(&["a"], None, false);
        check(&["a", "team-*"], Some("team-b"), true);
        check(&["team-*"], Some("tea"), false);
        check(&["*"], None, false);
        check(&["*"], Some(""), true);
    }
}
