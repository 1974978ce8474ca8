//! `pools.adapters`: the low-rank adapters of a pool's model, each a model of its own for requests.

use std::collections::BTreeSet;

use penstock_proto::ADAPTERS_MAX;

use super::raw::{Document, Reader};
use super::{AdapterConfig, PoolConfig};

/// Reads the adapters of a pool's model.
pub(super) fn adapters(table: &Reader<'_, '_>) -> Vec<AdapterConfig> {
    let adapters: Vec<_> =
        table.map("adapters").into_iter().map(|(name, path)| AdapterConfig { name, path: path.into() }).collect();
    if let Some(fault) = faulty(&adapters) {
        table.fault("adapters", fault);
    }
    adapters
}

/// Fault of a pool's list of adapters; whether the names are taken is checked with those of all models.
pub(super) fn faulty(adapters: &[AdapterConfig]) -> Option<String> {
    if adapters.len() > ADAPTERS_MAX {
        return Some(format!("has {} adapters; a pool has at most {ADAPTERS_MAX}", adapters.len()));
    }
    let is_bad = |name: &str| name.is_empty() || name.contains('=') || name.contains(char::is_control);
    let bad = adapters.iter().find(|adapter| is_bad(&adapter.name))?;
    Some(format!("{:?} is no name of an adapter: it must not be empty or contain = or control characters", bad.name))
}

/// Checks that pools and adapters have different names: a request must mean one of them.
pub(super) fn unique(document: &Document<'_>, pools: &[PoolConfig]) {
    let mut seen: BTreeSet<&str> = pools.iter().map(|pool| pool.id.as_str()).collect();
    for adapter in pools.iter().flat_map(|pool| &pool.adapters) {
        if !seen.insert(&adapter.name) {
            document.fault_at(
                "pools",
                "adapters",
                format!("{:?} is the name of another pool or adapter", adapter.name),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Overrides, Snapshot, load};

    fn read(text: &str, overrides: &Overrides) -> Result<Snapshot, String> {
        load(Some(("p.toml", text)), overrides, &|_| None).map_err(|faults| faults.to_string())
    }

    #[test]
    fn adapters_have_names_of_their_own() {
        let pool = |keys: &str| read(&format!("[[pools]]\nid = \"base\"\n{keys}\n"), &Overrides::default());
        let names = |text: &str| {
            let pools = pool(text).map(|snapshot| snapshot.pools);
            pools.map(|pools| pools[0].adapters.iter().map(|adapter| adapter.name.clone()).collect::<Vec<_>>())
        };
        assert_eq!(names(""), Ok(vec![]));
        assert_eq!(names("adapters = { sql = \"/a\", \"org/b\" = \"/b\" }"), Ok(vec!["org/b".into(), "sql".into()]));
        assert_eq!(names("[pools.adapters]\nsql = \"/a\""), Ok(vec!["sql".into()]), "as a table of its own");
        let many: String = (0..65).map(|at| format!("a{at} = \"/a\"\n")).collect();
        for (keys, part) in [
            ("adapters = { base = \"/a\" }", "\"base\" is the name of another pool or adapter"),
            ("adapters = { a = \"/a\" }\n[[pools]]\nid = \"b\"\nadapters = { a = \"/b\" }", "\"a\" is the name of"),
            ("adapters = [\"/a\"]", "must be a table of texts"),
            ("adapters = { a = 1 }", "must be a table of texts"),
            ("adapters = { \"\" = \"/a\" }", "is no name of an adapter"),
            ("adapters = { \"a=b\" = \"/a\" }", "is no name of an adapter"),
            (&format!("[pools.adapters]\n{many}"), "has 65 adapters"),
        ] {
            let faults = pool(keys).expect_err(keys);
            assert!(faults.contains("pools") && faults.contains(part), "{faults}");
        }
        let named = "adapters = { sql = \"/a\" }\n[[models]]\nname = \"m\"\nto = [{ pool = \"sql\" }]";
        assert!(pool(named).is_ok(), "a name of [[models]] may stand for one");
    }

    #[test]
    fn adapters_of_the_command_line_join_those_of_the_file() {
        let adapter = |name: &str, path: &str| AdapterConfig { name: name.into(), path: path.into() };
        let with = |text: &str, adapters| read(text, &Overrides { adapters, ..Overrides::default() });
        let text = "[[pools]]\nid = \"base\"\nadapters = { a = \"/a\", b = \"/b\" }\n";
        let snapshot = with(text, vec![adapter("a", "/c"), adapter("d", "/d")]).expect("valid");
        assert_eq!(snapshot.pools[0].adapters, [adapter("b", "/b"), adapter("a", "/c"), adapter("d", "/d")]);
        let faults = with(text, vec![adapter("base", "/c")]).expect_err("taken");
        assert!(faults.contains("\"base\" is the name of another"), "{faults}");
        assert!(with("[[pools]]\nid = \"x\"\n[[pools]]\nid = \"y\"\n", vec![adapter("a", "/a")]).is_err());
    }
}
