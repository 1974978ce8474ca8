//! How large a crate may be, and how far its modules may hang together.

use penstock_tidy::docs::openings;
use penstock_tidy::graph::Graph;
use penstock_tidy::modules::{knots, modules, net_lines};
use penstock_tidy::none;
use penstock_tidy::source::Source;

/// Share of all net lines that one crate may have.
const SHARE_MAX: f64 = 0.15;

/// Modules and net lines of one import knot.
const KNOT_MAX: (usize, usize) = (3, 2000);

/// Share of doc comments that may begin with a pronoun.
const PRONOUNS_MAX: f64 = 0.005;

/// Folders of the product's crates: tests are none.
fn product(graph: &Graph) -> Vec<String> {
    graph.members().map(|member| graph.folder(member)).filter(|folder| !folder.starts_with("tests/")).collect()
}

#[test]
fn no_crate_is_most_of_the_house() {
    let (folders, sources) = (product(&Graph::load()), Source::all());
    let total: usize = folders.iter().map(|folder| net_lines(folder, &sources)).sum();
    let mut faults = Vec::new();
    for folder in &folders {
        let share = net_lines(folder, &sources) as f64 / total as f64;
        if share > SHARE_MAX {
            let (share, most) = (share * 100.0, SHARE_MAX * 100.0);
            faults.push(format!("{folder} has {share:.1} % of all lines, {most:.1} % at most"));
        }
    }
    none("crates too large to be read or compiled alone", &faults);
}

#[test]
fn modules_of_a_crate_hang_together_loosely() {
    let sources = Source::all();
    let mut faults = Vec::new();
    for folder in product(&Graph::load()) {
        let found = knots(&modules(&folder, &sources));
        for knot in found.iter().filter(|knot| knot.names.len() > KNOT_MAX.0 || knot.lines > KNOT_MAX.1) {
            let (count, lines, names) = (knot.names.len(), knot.lines, knot.names.join(", "));
            faults.push(format!("{folder}: {count} modules, {lines} lines import each other: {names}"));
        }
    }
    none("knots of imports", &faults);
}

#[test]
fn docs_begin_with_their_subject() {
    let openings = openings(&Source::all());
    let faults: Vec<String> = openings
        .iter()
        .filter(|opening| opening.is_pronoun())
        .map(|opening| format!("{}:{}: {}", opening.path, opening.number, opening.text))
        .collect();
    if faults.len() as f64 > openings.len() as f64 * PRONOUNS_MAX {
        none("doc comments that begin with a pronoun: each is read alone, so name the subject", &faults);
    }
}
