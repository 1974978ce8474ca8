//! How large a crate may be, and how far its modules may hang together.

use penstock_tidy::docs::openings;
use penstock_tidy::graph::Graph;
use penstock_tidy::modules::{knots, modules, net_lines};
use penstock_tidy::none;
use penstock_tidy::source::Source;

/// Share of all net lines that one crate may have.
const SHARE_MAX: f64 = 0.15;

/// Crates above [`SHARE_MAX`], with the share that they may have. The list only shrinks.
const LARGE: [(&str, f64); 0] = [];

/// Modules and net lines of one import knot.
const KNOT_MAX: (usize, usize) = (3, 2000);

/// Crates with a larger knot, with the modules and lines that it may have. The list only shrinks.
const KNOTTED: [(&str, usize, usize); 1] = [("backends/worker", 4, 3_100)];

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
        let listed = LARGE.iter().find(|(name, _)| name == folder);
        let most = listed.map_or(SHARE_MAX, |(_, most)| *most);
        if share > most {
            faults.push(format!("{folder} has {:.1} % of all lines, {:.1} % at most", share * 100.0, most * 100.0));
        }
        if listed.is_some() && share <= SHARE_MAX {
            faults.push(format!("{folder} is small enough: strike it from LARGE"));
        }
    }
    none("crates too large to be read or compiled alone", &faults);
}

#[test]
fn modules_of_a_crate_hang_together_loosely() {
    let sources = Source::all();
    let mut faults = Vec::new();
    for folder in product(&Graph::load()) {
        let listed = KNOTTED.iter().find(|(name, ..)| *name == folder);
        let most = listed.map_or(KNOT_MAX, |(_, names, lines)| (*names, *lines));
        let found = knots(&modules(&folder, &sources));
        for knot in found.iter().filter(|knot| knot.names.len() > most.0 || knot.lines > most.1) {
            let names = knot.names.join(", ");
            faults.push(format!(
                "{folder}: {} modules, {} lines import each other: {names}",
                knot.names.len(),
                knot.lines
            ));
        }
        let is_loose = found.iter().all(|knot| knot.names.len() <= KNOT_MAX.0 && knot.lines <= KNOT_MAX.1);
        if listed.is_some() && is_loose {
            faults.push(format!("{folder} has no large knot any more: strike it from KNOTTED"));
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
