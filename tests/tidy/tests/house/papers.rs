//! Mandatory contents of the papers, and words that no file may contain.

use penstock_tidy::{none, read, root, tracked};

/// Generated files, not written by hand.
const GENERATED: [&str; 3] = ["Cargo.lock", "package-lock.json", "tokenizer.json"];

#[test]
fn readme_has_its_two_commands() {
    let text = read("README.md");
    let mut commands = Vec::new();
    let mut shell = false;
    for line in text.lines() {
        match line.trim() {
            "```sh" | "```bash" | "```shell" | "```console" => shell = true,
            "```" => shell = false,
            command if shell && !command.is_empty() => {
                commands.push(command.split('#').next().unwrap_or_default().trim().to_owned());
            }
            _ => {}
        }
    }
    assert_eq!(commands, ["make serve", "make test"], "README.md shows exactly these two commands");
}

#[test]
fn the_papers_are_there() {
    let wanted =
        ["LICENSE", "CHANGELOG.md", "docs/architecture.md", "docs/glossary.md", "docs/benchmarks.md", ".ci/run"];
    let missing: Vec<String> = wanted.iter().filter(|path| !root().join(path).is_file()).map(|p| (*p).into()).collect();
    none("missing papers", &missing);
    assert!(read("CHANGELOG.md").contains("## [Unreleased]"), "CHANGELOG.md keeps an [Unreleased] section");
}

#[test]
fn architecture_names_every_crate() {
    let text = read("docs/architecture.md");
    let graph = penstock_tidy::graph::Graph::load();
    let folders = graph.members().map(|member| graph.folder(member)).filter(|folder| !folder.starts_with("tests/"));
    let missing: Vec<String> = folders.filter(|folder| !text.contains(&format!("`{folder}`"))).collect();
    none("crates that docs/architecture.md does not describe", &missing);
}

#[test]
fn decisions_follow_the_template() {
    let parts = ["## Context", "## Options", "## Decision", "## Consequences", "## How we would know"];
    let mut faults = Vec::new();
    for path in tracked().iter().filter(|path| path.starts_with("docs/adr/") && path.ends_with(".md")) {
        let text = read(path);
        let missing = parts.iter().filter(|part| !text.contains(**part));
        faults.extend(missing.map(|part| format!("{path}: no \"{part}\"")));
    }
    none("decisions without all their parts", &faults);
}

#[test]
fn no_file_mentions_a_machine() {
    // Written in halves so that this file does not contain the words either.
    let banned = [["/wo", "rk/"], ["/ro", "ot/"], ["/ho", "me/"], ["/Us", "ers/"]].map(|halves| halves.concat());
    let mut faults = Vec::new();
    for path in tracked().iter().filter(|path| !GENERATED.iter().any(|name| path.ends_with(name))) {
        let Ok(text) = std::fs::read_to_string(root().join(path)) else { continue };
        for (index, line) in text.lines().enumerate() {
            let found = banned.iter().find(|name| line.contains(name.as_str()));
            faults.extend(found.map(|name| format!("{path}:{}: {name}", index + 1)));
        }
    }
    none("files that mention paths of one machine", &faults);
}

#[test]
fn links_between_documents_lead_somewhere() {
    let mut faults = Vec::new();
    for path in tracked().iter().filter(|path| path.ends_with(".md")) {
        let folder = root().join(path).parent().expect("files lie in folders").to_owned();
        for target in relative_links(&read(path)) {
            if !folder.join(&target).exists() {
                faults.push(format!("{path}: {target}"));
            }
        }
    }
    none("links that lead nowhere", &faults);
}

/// Targets of `[text](target)` that are neither URLs nor anchors, anchors cut off.
fn relative_links(text: &str) -> Vec<String> {
    let starts = text.match_indices("](").map(|(at, _)| at + 2);
    let targets = starts.filter_map(|at| text[at..].split_once(')').map(|(target, _)| target));
    let local = targets.filter(|target| !target.contains("://") && !target.starts_with('#') && !target.contains(' '));
    local.map(|target| target.split('#').next().unwrap_or_default().to_owned()).collect()
}
