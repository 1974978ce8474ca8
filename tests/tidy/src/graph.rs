//! Dependency graph of the workspace, from `cargo metadata`.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde::Deserialize;

/// One package of the graph.
#[derive(Debug, Deserialize)]
pub struct Package {
    /// Opaque id.
    pub id: String,
    /// Name.
    pub name: String,
    /// SPDX expression, if given.
    pub license: Option<String>,
    /// Path of the package's manifest.
    pub manifest_path: String,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
    workspace_members: Vec<String>,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dep>,
}

#[derive(Deserialize)]
struct Dep {
    pkg: String,
    dep_kinds: Vec<DepKind>,
}

#[derive(Deserialize)]
struct DepKind {
    /// Kind of the dependency; `None` for a normal one.
    kind: Option<String>,
}

/// The resolved graph of the workspace on Linux.
pub struct Graph {
    packages: BTreeMap<String, Package>,
    /// Normal and build dependencies by package id.
    edges: BTreeMap<String, BTreeSet<String>>,
    members: Vec<String>,
}

impl Graph {
    /// Loads the graph from cargo.
    ///
    /// # Panics
    /// If cargo fails or answers something unexpected.
    pub fn load() -> Self {
        let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
        let output = Command::new(cargo)
            .args(["metadata", "--format-version", "1", "--locked", "--filter-platform", "x86_64-unknown-linux-gnu"])
            .current_dir(crate::root())
            .output()
            .expect("cargo runs");
        assert!(output.status.success(), "cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr));
        let metadata: Metadata = serde_json::from_slice(&output.stdout).expect("cargo metadata is JSON of format 1");
        let built = |dep: &Dep| dep.dep_kinds.iter().any(|kind| kind.kind.as_deref() != Some("dev"));
        let targets = |node: &Node| node.deps.iter().filter(|dep| built(dep)).map(|dep| dep.pkg.clone()).collect();
        Self {
            edges: metadata.resolve.nodes.iter().map(|node| (node.id.clone(), targets(node))).collect(),
            packages: metadata.packages.into_iter().map(|package| (package.id.clone(), package)).collect(),
            members: metadata.workspace_members,
        }
    }

    /// The workspace's packages.
    pub fn members(&self) -> impl Iterator<Item = &Package> {
        self.members.iter().map(|id| &self.packages[id])
    }

    /// Returns true if `package` is a member of the workspace.
    pub fn is_member(&self, package: &Package) -> bool {
        self.members.contains(&package.id)
    }

    /// Packages that `package` names as normal or build dependencies.
    pub fn direct(&self, package: &Package) -> impl Iterator<Item = &Package> {
        self.edges[&package.id].iter().map(|id| &self.packages[id])
    }

    /// All packages that are compiled to build `package`, itself excluded.
    pub fn closure(&self, package: &Package) -> Vec<&Package> {
        let mut seen = BTreeSet::new();
        let mut open = vec![&package.id];
        while let Some(id) = open.pop() {
            for next in &self.edges[id] {
                if seen.insert(next) {
                    open.push(next);
                }
            }
        }
        seen.into_iter().map(|id| &self.packages[id]).collect()
    }

    /// Folder of a member, relative to the root: `gateway/cli`.
    pub fn folder(&self, member: &Package) -> String {
        let root = format!("{}/", crate::root().display());
        let path = member.manifest_path.strip_prefix(&root).expect("members lie in the repository");
        path.trim_end_matches("Cargo.toml").trim_end_matches('/').to_owned()
    }
}
