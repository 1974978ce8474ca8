//! Scaling keys of `[[pools]]`: bounds of the number of workers, and the hook that starts and stops external ones.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::ReplicasConfig;
use super::raw::Reader;
use penstock_http::client::Target;
use penstock_pool::scaler::{Asked, Hook, Service};
use penstock_pool::{Follow, OnDemand};

/// Reads the scaling keys. `workers`: worker processes that this gateway starts; `addresses`: external workers in
/// `connect`.
pub(super) fn replicas(table: &Reader<'_, '_>, workers: usize, addresses: usize) -> ReplicasConfig {
    let follow = follow(table, "replicas");
    let there = if addresses > 0 { addresses } else { workers };
    let min = table.number("workers_min", 1..=128) as usize;
    let max = match table.number("workers_max", 0..=128) as usize {
        0 => there.max(min),
        max => max,
    };
    let idle = Duration::from_secs(table.number("replica_idle_seconds", 1..=86_400));
    let hook = hook(table).map(Arc::new);
    if follow != Follow::Off {
        if max < min {
            table.fault("workers_max", "must be at least workers_min");
        }
        if addresses > 0 && max > addresses {
            table.fault(
                "workers_max",
                "there are fewer addresses in connect: list those of all workers that there may be",
            );
        }
        if addresses == 0 && !(min..=max).contains(&workers) {
            table.fault("workers", "is how many are started at once: from workers_min to workers_max");
        }
        if addresses > 0 && hook.is_none() && follow == Follow::On {
            table.fault("replicas", "needs replica_command or replica_url: workers of connect are not started here");
        }
    }
    if hook.is_some() && addresses == 0 {
        table.fault("replica_command", "is for workers that are started elsewhere (connect)");
    }
    ReplicasConfig { follow, min, max, idle, hook }
}

/// Reads a key that says whether a number follows the load.
pub(super) fn follow(table: &Reader<'_, '_>, name: &'static str) -> Follow {
    match table.text(name).unwrap_or_default().as_str() {
        "fixed" => Follow::Off,
        "dry_run" => Follow::DryRun,
        "follow" => Follow::On,
        other => {
            table.fault(name, format!("{other:?} is not one of fixed, dry_run, follow"));
            Follow::Off
        }
    }
}

/// Reads the keys of workers on demand. `follow`: whether the number of workers follows the load; `connected`: the workers are started elsewhere.
pub(super) fn on_demand(table: &Reader<'_, '_>, follow: Follow, connected: bool) -> Option<OnDemand> {
    let text = table.text("keep_alive").unwrap_or_default();
    let keep_alive = keep_alive(&text).unwrap_or_else(|| {
        table.fault(
            "keep_alive",
            format!("{text:?} is no time: 30s, 5m, 1h, a number of seconds, 0 (at once), or -1 (never)"),
        );
        None
    });
    if !table.flag("on_demand") {
        return None;
    }
    if connected {
        table.fault("on_demand", "is for workers that are started here, not those of connect");
    }
    if follow != Follow::Off {
        table.fault("on_demand", "starts and stops all workers together: replicas must be \"fixed\"");
    }
    Some(OnDemand { keep_alive })
}

/// Time for which workers stay without requests: `Some(None)` is for ever.
fn keep_alive(text: &str) -> Option<Option<Duration>> {
    const SECONDS_MAX: u64 = 10 * 365 * 86_400;
    if let Some(digits) = text.strip_prefix('-') {
        return digits.parse::<u64>().ok().map(|_| None);
    }
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor_ms = match &text[digits.len()..] {
        "ms" => 1,
        "" | "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return None,
    };
    let time = Duration::from_millis(digits.parse::<u64>().ok()?.checked_mul(factor_ms)?);
    (time.as_secs() <= SECONDS_MAX).then_some(Some(time))
}

fn hook(table: &Reader<'_, '_>) -> Option<Hook> {
    let words = table.texts("replica_command");
    let url = table.text("replica_url");
    let token_file = table.text("replica_token_file").map(PathBuf::from);
    let ca_file = table.text("replica_ca_file").map(PathBuf::from);
    let is_kubernetes = match table.text("replica_api").as_deref() {
        Some("kubernetes") => true,
        Some("post") | None => false,
        Some(other) => {
            table.fault("replica_api", format!("{other:?} is not one of post, kubernetes"));
            false
        }
    };
    let deadline = Duration::from_millis(table.number("replica_timeout_ms", 100..=600_000));
    let asked = match (words.is_empty(), url) {
        (true, None) => return None,
        (false, None) if words[0].is_empty() => {
            table.fault("replica_command", "begins with a program");
            return None;
        }
        (false, None) => Asked::Command(words),
        (false, Some(_)) => {
            table.fault("replica_url", "give either replica_command or replica_url");
            return None;
        }
        (true, Some(url)) => {
            let url = Target::parse(&url).map_err(|why| table.fault("replica_url", why)).ok()?;
            if token_file.is_some() && !url.is_private() {
                table.fault("replica_url", "must be https://: a token is sent there");
            }
            let service = Service { url, token_file, ca_file };
            if is_kubernetes { Asked::Kubernetes(service) } else { Asked::Service(service) }
        }
    };
    Some(Hook { asked, deadline })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Overrides, load};

    fn read(keys: &str) -> Result<ReplicasConfig, Vec<String>> {
        let text = format!("[[pools]]\n{keys}");
        let read = load(Some(("p.toml", &text)), &Overrides::default(), &|_| None);
        read.map(|snapshot| snapshot.pools[0].replicas.clone())
            .map_err(|faults| faults.0.iter().map(ToString::to_string).collect())
    }

    const TWO: &str = "connect = [\"unix:/a\", \"unix:/b\"]\nreplicas = \"follow\"\n";

    #[test]
    fn the_bounds_have_defaults() {
        let bounds = |keys: &str| read(keys).map(|read| (read.follow, read.min, read.max));
        assert_eq!(bounds("workers = 3\n"), Ok((Follow::Off, 1, 3)));
        assert_eq!(bounds("workers = 2\nworkers_max = 4\nreplicas = \"follow\"\n"), Ok((Follow::On, 1, 4)));
        assert_eq!(bounds(&format!("{TWO}replica_command = [\"scale\"]\n")), Ok((Follow::On, 1, 2)));
    }

    #[test]
    fn workers_on_demand_have_a_time() {
        let of = |keys: &str| {
            let text = format!("[[pools]]\n{keys}");
            let read = load(Some(("p.toml", &text)), &Overrides::default(), &|_| None);
            read.map(|snapshot| snapshot.pools[0].on_demand.map(|rule| rule.keep_alive))
                .map_err(|faults| faults.to_string())
        };
        assert_eq!(of(""), Ok(None));
        assert_eq!(of("on_demand = true\n"), Ok(Some(Some(Duration::from_secs(300)))));
        for (text, expected) in [
            ("0", Some(Duration::ZERO)),
            ("-1", None),
            ("90", Some(Duration::from_secs(90))),
            ("1500ms", Some(Duration::from_millis(1500))),
            ("2h", Some(Duration::from_secs(7200))),
        ] {
            assert_eq!(of(&format!("on_demand = true\nkeep_alive = \"{text}\"\n")), Ok(Some(expected)), "{text}");
        }
        for (keys, part) in [
            ("on_demand = true\nkeep_alive = \"soon\"\n", "is no time"),
            ("keep_alive = \"99999999999h\"\n", "is no time"),
            ("on_demand = true\nreplicas = \"follow\"\n", "replicas must be"),
            ("on_demand = true\nconnect = [\"unix:/a\"]\n", "started here"),
        ] {
            let faults = of(keys).expect_err(keys);
            assert!(faults.contains(part), "{faults}");
        }
    }

    #[test]
    fn what_contradicts_itself_is_named() {
        let check = |keys: &str, start: &str| {
            let faults = read(keys).expect_err(keys);
            assert!(faults.iter().any(|fault| fault.contains(start)), "{start}: {faults:?}");
        };
        check("replicas = \"yes\"\n", "pools[0].replicas: \"yes\" is not one of");
        check("workers = 3\nworkers_max = 2\nreplicas = \"follow\"\n", "pools[0].workers: is how many");
        check("workers_min = 3\nworkers_max = 2\nreplicas = \"follow\"\n", "workers_max: must be at least");
        check(TWO, "replicas: needs replica_command");
        check(&format!("{TWO}replica_command = [\"a\"]\nworkers_max = 3\n"), "workers_max: there are fewer addresses");
        check("replica_command = [\"a\"]\n", "replica_command: is for workers");
        check(&format!("{TWO}replica_url = \"ftp://x\"\n"), "replica_url: ");
        let token = "replica_url = \"http://scale.internal\"\nreplica_token_file = \"/t\"\n";
        check(&format!("{TWO}{token}"), "replica_url: must be https://");
        check(&format!("{TWO}replica_command = [\"a\"]\nreplica_url = \"https://x\"\n"), "replica_url: give either");
        check(&format!("{TWO}replica_url = \"https://x\"\nreplica_api = \"helm\"\n"), "replica_api: \"helm\"");
    }

    #[test]
    fn kubernetes_changes_its_end() {
        let url = "replica_url = \"https://kubernetes.default.svc/apis/apps/v1/namespaces/ai/statefulsets/w/scale\"\n";
        let hook = |more: &str| read(&format!("{TWO}{url}{more}")).expect("valid").hook.expect("a hook");
        assert!(hook("replica_api = \"kubernetes\"\n").is_in_order() && !hook("").is_in_order());
    }
}
