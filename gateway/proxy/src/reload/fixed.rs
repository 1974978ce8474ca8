//! Keys that a running process cannot change, and the moment at which each key applies.

use std::sync::Arc;

use penstock_config::Snapshot;

/// Moment at which a changed key is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// In force with the next request, connection or turn.
    Now,
    /// In force when the pool's new workers are ready; the old ones answer until then.
    Workers,
    /// In force after an upgrade or a restart.
    Restart,
}

impl When {
    /// Text of the moment for people and the admin API: now, or the event that the change waits for.
    pub fn name(self) -> &'static str {
        match self {
            When::Now => "now",
            When::Workers => "when its workers are ready",
            When::Restart => "after an upgrade or a restart",
        }
    }
}

/// Keys, each with its table, that wait for an upgrade or a restart.
const FIXED: &[(&str, &str)] = &[
    ("admin", "listen"),
    ("admin", "unix"),
    ("endpoint_picker", "listen"),
    ("endpoint_picker", "certificate"),
    ("endpoint_picker", "key"),
    ("endpoint_picker", "client_ca"),
    ("auth", "pepper_file"),
    ("auth", "pepper_env"),
    ("server", "listen"),
    ("server", "unix"),
    ("server", "state_dir"),
    ("server", "threads"),
    ("server", "weights_cache_bytes_max"),
    ("server", "watch"),
    ("server.tls", "certificate"),
    ("server.tls", "key"),
    ("server.tls", "client_ca"),
    ("server.tls", "client_auth"),
    ("log", "access"),
    ("store", "url"),
    ("store", "url_env"),
    ("store", "password_file"),
    ("store", "ca_file"),
    ("store", "connections"),
    ("store", "path"),
    ("store", "bytes_max"),
];

/// Moment at which a key of a table applies.
pub fn when(table: &str, key: &str) -> When {
    if FIXED.contains(&(table, key)) || ["counters", "telemetry"].contains(&table) {
        When::Restart
    } else if table == "pools" {
        When::Workers
    } else {
        When::Now
    }
}

/// Resets keys that cannot change to their value `in_force`, and names the keys that differ from those with which the
/// process `began`.
pub(super) fn hold(began: &Snapshot, in_force: &Arc<Snapshot>, config: &mut Snapshot) -> Vec<String> {
    let mut pending = Vec::new();
    macro_rules! hold {
        ($name:literal, $($field:ident).+) => {
            if began.$($field).+ != config.$($field).+ {
                pending.push($name.to_owned());
            }
            config.$($field).+.clone_from(&in_force.$($field).+);
        };
    }
    hold!("admin.listen", admin.listen);
    hold!("admin.unix", admin.unix);
    let picker = |config: &Snapshot| config.endpoint_picker.clone().map(|picker| (picker.listen, picker.tls));
    if picker(began) != picker(config) {
        pending.push("endpoint_picker".to_owned());
        config.endpoint_picker.clone_from(&in_force.endpoint_picker);
    }
    hold!("auth.pepper", auth.pepper);
    hold!("server.listen", listen);
    hold!("server.unix", unix);
    hold!("server.state_dir", state_dir);
    hold!("server.threads", threads);
    hold!("server.weights_cache_bytes_max", weights_cache_bytes_max);
    hold!("server.watch", watch);
    hold!("server.tls", tls);
    hold!("telemetry", telemetry);
    hold!("log.access", access_log);
    hold!("store.url", store.postgres);
    hold!("store.path", store.path);
    hold!("store.bytes_max", store.bytes_max);
    hold!("counters", counters);
    pending
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_config::keys;

    /// The reference names every key that waits, and no other.
    #[test]
    fn the_reference_names_what_waits() {
        let place = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/operations.md");
        let page = std::fs::read_to_string(place).expect(place);
        let (row, _) = page
            .lines()
            .find_map(|line| line.split_once(" | apply after an [upgrade]"))
            .expect("the row of keys that wait");
        let named: Vec<&str> = row.split('`').skip(1).step_by(2).collect();
        let covers = |name: &str, (table, key): (&str, &str)| name == table || name == format!("{table}.{key}");
        for fixed in FIXED {
            assert!(named.iter().any(|name| covers(name, *fixed)), "{fixed:?} is not in {named:?}");
        }
        for name in named {
            let whole = ["counters", "telemetry"].contains(&name);
            let all_of = |table: &str| {
                let mut keys = keys::KEYS.iter().filter(|key| key.table == table);
                keys.all(|key| when(key.table, key.name) == When::Restart)
            };
            let one = FIXED.iter().any(|(table, key)| name == format!("{table}.{key}"));
            let table = FIXED.iter().any(|(table, _)| name == *table) && all_of(name);
            assert!(whole || one || table, "{name} does not wait");
        }
    }

    #[test]
    fn what_is_fixed_exists() {
        for (table, name) in FIXED {
            assert!(keys::KEYS.iter().any(|key| (key.table, key.name) == (*table, *name)), "{table}.{name}");
        }
    }
}
