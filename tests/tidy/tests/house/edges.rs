//! Edges between crates point down only, and async ends at the two processes.

use penstock_tidy::graph::{Graph, Package};
use penstock_tidy::none;

/// Floors of the house from the ground up; a crate may link only crates on lower floors.
const FLOORS: [&[&str]; 13] = [
    &[
        "backends/gguf",
        "backends/grammar",
        "backends/machine",
        "backends/proto",
        "backends/shm",
        "backends/vocabulary",
        "gateway/allocator",
        "gateway/types",
        "kernels",
        "kernels/kernelc",
    ],
    &["backends/kv", "gateway/base", "gateway/console", "gateway/dialects", "gateway/text"],
    &["gateway/router", "gateway/govern", "backends/engine", "plugins/api"],
    &["gateway/store", "backends/link", "plugins/builtin", "plugins/wasm", "sim"],
    &["gateway/http"],
    &["gateway/kv-feed", "gateway/models", "gateway/pool", "gateway/telemetry"],
    &["gateway/upstream"],
    &["gateway/auth", "gateway/generate", "gateway/provider"],
    &["gateway/relay"],
    &["gateway/config", "gateway/governed", "gateway/picker"],
    &["gateway/proxy", "backends/worker"],
    &["gateway/admin"],
    &["gateway/cli"],
];

/// Forbidden downward edges: text lives in the gateway, tokens live in workers.
const APART: [(&str, &[&str]); 2] = [
    ("gateway/", &["backends/engine", "kernels"]),
    (
        "backends/",
        &["gateway/types", "gateway/dialects", "gateway/text", "gateway/router", "gateway/govern", "gateway/store"],
    ),
];

/// Crates that may wait: the processes and what serves them.
const ASYNC: [&str; 19] = [
    "gateway/picker",
    "gateway/config",
    "gateway/governed",
    "gateway/auth",
    "gateway/provider",
    "gateway/relay",
    "gateway/generate",
    "gateway/kv-feed",
    "gateway/upstream",
    "gateway/cli",
    "gateway/models",
    "gateway/pool",
    "gateway/telemetry",
    "gateway/http",
    "gateway/proxy",
    "gateway/admin",
    "gateway/store",
    "backends/link",
    "backends/worker",
];

/// Crates that start threads for I/O or poll: their presence means async.
const RUNTIMES: [&str; 6] = ["tokio", "mio", "async-std", "smol", "hyper", "pingora-core"];

fn floor(folder: &str) -> Option<usize> {
    FLOORS.iter().position(|floor| floor.contains(&folder))
}

fn is_house(folder: &str) -> bool {
    !folder.starts_with("tests/") && !folder.starts_with("bench") && !folder.starts_with("fuzz")
}

fn houses(graph: &Graph) -> impl Iterator<Item = (&Package, String)> {
    graph.members().map(|member| (member, graph.folder(member))).filter(|(_, folder)| is_house(folder))
}

#[test]
fn every_crate_has_a_floor() {
    let graph = Graph::load();
    let homeless: Vec<String> = houses(&graph).map(|(_, folder)| folder).filter(|f| floor(f).is_none()).collect();
    none("crates without a floor: add them to FLOORS", &homeless);
}

#[test]
fn edges_point_down() {
    let graph = Graph::load();
    let mut faults = Vec::new();
    for (from, from_folder) in houses(&graph) {
        for to in graph.direct(from).filter(|to| graph.is_member(to)) {
            let to_folder = graph.folder(to);
            if floor(&to_folder) >= floor(&from_folder) {
                faults.push(format!("{from_folder} links {to_folder}"));
            }
        }
    }
    none("edges that do not point down", &faults);
}

#[test]
fn text_and_tokens_stay_apart() {
    let graph = Graph::load();
    let mut faults = Vec::new();
    for (from, from_folder) in houses(&graph).filter(|(_, folder)| folder != "gateway/cli") {
        let linked: Vec<String> =
            graph.closure(from).into_iter().filter(|to| graph.is_member(to)).map(|to| graph.folder(to)).collect();
        for (side, banned) in APART.iter().filter(|(side, _)| from_folder.starts_with(side)) {
            let found = linked.iter().filter(|folder| banned.contains(&folder.as_str()));
            faults.extend(found.map(|folder| format!("{from_folder} (of {side}) reaches {folder}")));
        }
    }
    none("crates that reach across the contract", &faults);
}

#[test]
fn no_async_below_the_processes() {
    let graph = Graph::load();
    let mut faults = Vec::new();
    for (member, folder) in houses(&graph).filter(|(_, folder)| !ASYNC.contains(&folder.as_str())) {
        let found = graph.closure(member).into_iter().filter(|package| RUNTIMES.contains(&package.name.as_str()));
        faults.extend(found.map(|package| format!("{folder} reaches {}", package.name)));
    }
    none("pure crates that reach a runtime", &faults);
}
