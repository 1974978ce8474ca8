//! The house in figures: net lines of each crate, import knots, lines that a change makes the compiler read again,
//! openings of doc comments, and type names that occur more than once.
//!
//! `cargo run -p penstock-tidy --example house [BASE]`: the cost of a change is weighted by the 200 commits before
//! BASE (default: HEAD), whose paths are mapped to the files' present paths, so that two trees are compared by the
//! same changes.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use penstock_tidy::docs::openings;
use penstock_tidy::graph::{Graph, Package};
use penstock_tidy::modules::{knots, modules, net_lines};
use penstock_tidy::source::Source;

/// Commits whose changes are weighed.
const COMMITS: &str = "200";

fn main() {
    let base = std::env::args().nth(1).unwrap_or_else(|| "HEAD".into());
    let (graph, sources) = (Graph::load(), Source::all());
    let product: Vec<(&Package, String, usize)> = graph
        .members()
        .map(|member| (member, graph.folder(member)))
        .filter(|(_, folder)| !folder.starts_with("tests/"))
        .map(|(member, folder)| (member, folder.clone(), net_lines(&folder, &sources)))
        .collect();
    let total: usize = product.iter().map(|(_, _, lines)| lines).sum();
    crates(&product, total, &sources);
    changes(&graph, &product, &base);
    words(&sources);
}

fn crates(product: &[(&Package, String, usize)], total: usize, sources: &[Source]) {
    println!("| crate | net lines | share | largest knot |\n|---|--:|--:|---|");
    let mut rows: Vec<_> = product.iter().collect();
    rows.sort_by_key(|(_, _, lines)| std::cmp::Reverse(*lines));
    for (_, folder, lines) in rows {
        let knot = knots(&modules(folder, sources)).into_iter().next();
        let knot = knot.map_or("none".into(), |knot| format!("{} modules, {} lines", knot.names.len(), knot.lines));
        println!("| `{folder}` | {lines} | {:.1} % | {knot} |", 100.0 * *lines as f64 / total as f64);
    }
    println!("| all | {total} | | |\n");
}

/// Net lines of all crates that are compiled again after a change, per crate and as a mean over commits.
fn changes(graph: &Graph, product: &[(&Package, String, usize)], base: &str) {
    let lines: BTreeMap<&str, usize> =
        product.iter().map(|(member, _, lines)| (member.name.as_str(), *lines)).collect();
    let mut above: BTreeMap<&str, BTreeSet<&str>> = lines.keys().map(|name| (*name, BTreeSet::from([*name]))).collect();
    for (member, _, _) in product {
        for below in graph.closure(member) {
            if let Some(users) = above.get_mut(below.name.as_str()) {
                users.insert(&member.name);
            }
        }
    }
    let cost = |names: &BTreeSet<&str>| -> usize {
        let touched: BTreeSet<&str> = names.iter().flat_map(|name| above[name].iter().copied()).collect();
        touched.iter().map(|name| lines[name]).sum()
    };
    println!("| a line changed in | lines read again |\n|---|--:|");
    let mut rows: Vec<_> =
        product.iter().map(|(member, folder, _)| (folder, cost(&BTreeSet::from([member.name.as_str()])))).collect();
    rows.sort_by_key(|(_, cost)| std::cmp::Reverse(*cost));
    for (folder, cost) in rows {
        println!("| `{folder}` | {cost} |");
    }
    let renamed = renames(base);
    let crate_of = |path: &str| {
        let now = renamed.get(path).map_or(path, String::as_str);
        let at = |place: &str| product.iter().find(|(_, folder, _)| place.starts_with(&format!("{folder}/src/")));
        at(now).map(|(member, _, _)| member.name.as_str())
    };
    let mut costs: Vec<usize> = Vec::new();
    for files in commits(base) {
        let touched: BTreeSet<&str> = files.iter().filter_map(|path| crate_of(path)).collect();
        if !touched.is_empty() {
            costs.push(cost(&touched));
        }
    }
    costs.sort_unstable();
    let mean = costs.iter().sum::<usize>() / costs.len().max(1);
    println!(
        "| a change, mean over {} of {COMMITS} commits before {base} that touch a program | {mean} |\n| a change, p50 | {} |\n",
        costs.len(),
        costs.get(costs.len() / 2).unwrap_or(&0)
    );
}

fn git(args: &[&str]) -> String {
    let output = Command::new("git").args(args).current_dir(penstock_tidy::root()).output().expect("git runs");
    assert!(output.status.success(), "git {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("paths are UTF-8")
}

/// Files that each of the commits before `base` changed.
fn commits(base: &str) -> Vec<Vec<String>> {
    let log = git(&["log", "--no-merges", "-n", COMMITS, "--name-only", "--format=tformat:commit", base, "--"]);
    log.split("commit\n")
        .map(|files| files.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect())
        .collect()
}

/// Maps files of `base` to their present paths. A file that was cut into several maps to the folder that got most of
/// them.
fn renames(base: &str) -> BTreeMap<String, String> {
    let diff = git(&["diff", "--name-status", "--find-renames=30%", "-l0", base]);
    let mut renamed = BTreeMap::new();
    for line in diff.lines() {
        let mut parts = line.split('\t');
        if let (Some(kind), Some(from), Some(to)) = (parts.next(), parts.next(), parts.next())
            && kind.starts_with('R')
        {
            renamed.insert(from.to_owned(), to.to_owned());
        }
    }
    renamed
}

fn words(sources: &[Source]) {
    let all = openings(sources);
    let pronouns = all.iter().filter(|opening| opening.is_pronoun()).count();
    println!(
        "doc comments: {}, begin with a pronoun: {pronouns} ({:.2} %)",
        all.len(),
        100.0 * pronouns as f64 / all.len() as f64
    );
    let mut types: BTreeMap<String, usize> = BTreeMap::new();
    for source in sources.iter().filter(|source| !source.is_test()) {
        for (_, line) in source.code() {
            let mut words = line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty());
            while let Some(word) = words.next() {
                if ["struct", "enum", "trait", "union"].contains(&word)
                    && let Some(name) = words.next().filter(|name| name.starts_with(|c: char| c.is_uppercase()))
                {
                    *types.entry(name.to_owned()).or_default() += 1;
                }
            }
        }
    }
    let (all, thrice): (usize, usize) = (types.values().sum(), types.values().filter(|count| **count >= 3).sum());
    println!(
        "types: {all}, whose name stands three times or more: {thrice} ({:.1} %)",
        100.0 * thrice as f64 / all as f64
    );
    let mut most: Vec<_> = types.into_iter().filter(|(_, count)| *count >= 3).collect();
    most.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let most: Vec<String> = most.into_iter().map(|(name, count)| format!("{name} {count}")).collect();
    println!("{}", most.join(", "));
}
