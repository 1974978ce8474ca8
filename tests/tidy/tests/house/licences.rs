//! Licences: everything compiled into penstock has one that an Apache-2.0 program may carry.

use penstock_tidy::graph::Graph;
use penstock_tidy::licence::satisfied;
use penstock_tidy::none;

/// Permissive licences (CDLA: of data, the root certificates), and MPL-2.0 (file-level: we change none of its files).
const ALLOWED: [&str; 15] = [
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "MIT",
    "MIT-0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "Zlib",
    "0BSD",
    "BSL-1.0",
    "CC0-1.0",
    "Unlicense",
    "Unicode-3.0",
    "MPL-2.0",
    "CDLA-Permissive-2.0",
];

#[test]
fn dependencies_have_allowed_licences() {
    let graph = Graph::load();
    let binary = graph.members().find(|member| member.name == "penstock").expect("the binary is a member");
    let mut faults = Vec::new();
    for package in graph.closure(binary) {
        match package.license.as_deref() {
            Some(licence) if satisfied(licence, &ALLOWED) => {}
            licence => faults.push(format!("{}: {}", package.name, licence.unwrap_or("no licence given"))),
        }
    }
    none("dependencies with other licences", &faults);
}
