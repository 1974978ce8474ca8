//! Limit of file descriptors of this process, and the share of it that clients get.
//!
//! Each connection of a client takes one descriptor, and a request that is passed on takes another. A process without
//! free descriptors accepts no connection, reaches no provider and writes no file, so clients get those that are left
//! when everything else has its share.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use penstock_config::Snapshot;
use penstock_http::places::{LEAVING_MAX, REFUSALS_MAX};

/// Descriptors of the process itself: listeners, logs, event loops, the admin API's connections (256 at most), files
/// that are open for a moment.
const OWN: usize = 384;
/// Descriptors per worker: sessions, pipes and shared memory.
const OF_WORKER: usize = 8;
/// Descriptors of the store, and of connections to shared counters.
const OF_STORE: usize = 32;

/// Division of the process's file descriptors between client connections and everything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Descriptors that the process may have; `None`: no limit.
    pub limit: Option<usize>,
    /// Descriptors kept for upstreams, the store, workers and the endpoint picker.
    pub reserved: usize,
    /// Most client connections that the descriptors allow at once.
    pub connections: usize,
}

/// Soft limit of this process's descriptors; `None`: no limit.
#[must_use]
pub fn limit() -> Option<usize> {
    as_count(getrlimit(Resource::Nofile).current)
}

/// Hard limit of this process's descriptors, in force after [`raise`]; `None`: no limit.
#[must_use]
pub fn limit_max() -> Option<usize> {
    as_count(getrlimit(Resource::Nofile).maximum)
}

fn as_count(limit: Option<u64>) -> Option<usize> {
    limit.map(|limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

/// Raises the soft limit of this process (most shells and systemd set 1,024) to the hard limit. Workers inherit it.
pub fn raise() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!(%error, ?current, ?maximum, "the limit of file descriptors could not be raised");
    }
}

/// Share of clients in `limit` under a config: never more than `server.connections_max`, and at least half of the
/// limit.
#[must_use]
pub fn share(config: &Snapshot, limit: Option<usize>) -> Share {
    let workers: usize =
        config.pools.iter().map(|pool| pool.replicas.max.max(pool.workers).max(pool.connect.len())).sum();
    let upstreams = config.providers.iter().map(|provider| provider.in_flight_max).fold(0, usize::saturating_add);
    let store = config.store.postgres.as_ref().map_or(0, |postgres| postgres.connections) + OF_STORE;
    // Connections of the proxies that ask for endpoints.
    let picker = config.endpoint_picker.as_ref().map_or(0, |_| penstock_picker::CONNECTIONS_MAX);
    let own = OWN + LEAVING_MAX + REFUSALS_MAX + OF_WORKER * workers + store + picker;
    let wanted = own.saturating_add(upstreams);
    let connections = config.http.connections_max;
    let Some(all) = limit else { return Share { limit, reserved: wanted, connections } };
    let reserved = wanted.min(all / 2);
    Share { limit, reserved, connections: connections.min(all - reserved).max(1) }
}

/// Logs how the file descriptors are divided, or that they do not suffice.
pub fn say(config: &Snapshot) {
    let Share { limit, reserved, connections } = share(config, limit());
    let Some(limit) = limit else { return };
    let connections_max = config.http.connections_max;
    if connections < connections_max {
        tracing::warn!(
            limit,
            reserved,
            connections,
            connections_max,
            "fewer connections than server.connections_max: the hard limit of file descriptors (ulimit -Hn, LimitNOFILE) is too low for \
             them and for upstreams, store and workers"
        );
    } else {
        tracing::info!(limit, reserved, connections, "file descriptors shared out");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_config::{Overrides, load};

    fn read(text: &str) -> Snapshot {
        load(Some(("p.toml", text)), &Overrides::default(), &|_| Some("key".into())).expect("valid")
    }

    #[test]
    fn clients_get_what_upstreams_and_workers_leave() {
        let plain = read("");
        let own = OWN + LEAVING_MAX + REFUSALS_MAX + OF_WORKER + OF_STORE;
        let of = |config: &Snapshot, limit| share(config, limit);
        assert_eq!(of(&plain, None), Share { limit: None, reserved: own, connections: 16_384 });
        assert_eq!(of(&plain, Some(1 << 20)), Share { limit: Some(1 << 20), reserved: own, connections: 16_384 });
        assert_eq!(of(&plain, Some(10_000)).connections, 10_000 - own);
        assert_eq!(of(&plain, Some(1024)), Share { limit: Some(1024), reserved: 512, connections: 512 });
        assert_eq!(of(&plain, Some(0)).connections, 1, "it starts, and says why it serves nobody else");
        let provider = "[server]\nconnections_max = 9000\n[[providers]]\nid = \"a\"\nkey_env = \"K\"\nmodels = [\"m\"]\n\
                        base_url = \"http://127.0.0.1:1/v1\"\nin_flight_max = 4000\n";
        let relay = read(provider);
        let picker = read("[endpoint_picker]\nlisten = \"127.0.0.1:0\"\n");
        assert_eq!(share(&picker, Some(10_000)).connections, 10_000 - own - penstock_picker::CONNECTIONS_MAX);
        assert_eq!(of(&relay, Some(20_000)).connections, 9000);
        assert_eq!(of(&relay, Some(10_000)).connections, 10_000 - (own - OF_WORKER) - 4000);
    }
}
