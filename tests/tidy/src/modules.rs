//! Sizes of crates, and imports between the top-level modules of a crate, from the source text.
//!
//! A module's imports are the `crate::name` paths in its program lines, where `name` is another top-level module, or an item that
//! `lib.rs` re-exports from one. Net lines are those of a program: no tests, benches or examples.

use std::collections::{BTreeMap, BTreeSet};

use crate::source::Source;

/// One top-level module of a crate: its file and everything below its folder.
#[derive(Debug, Default)]
pub struct Module {
    /// Net lines.
    pub lines: usize,
    /// Other top-level modules of the crate that the module names.
    pub imports: BTreeSet<String>,
}

/// Net lines of the crate in `folder`.
pub fn net_lines(folder: &str, sources: &[Source]) -> usize {
    of_crate(folder, sources).map(|(_, source)| source.program_lines()).sum()
}

/// Top-level modules of the crate in `folder`, by name. `lib.rs` and `main.rs` are the root and no modules.
pub fn modules(folder: &str, sources: &[Source]) -> BTreeMap<String, Module> {
    let mut modules: BTreeMap<String, Module> = BTreeMap::new();
    for (name, source) in of_crate(folder, sources).filter(|(name, _)| !is_root(name)) {
        modules.entry(name).or_default().lines += source.program_lines();
    }
    let names: BTreeSet<String> = modules.keys().cloned().collect();
    let exported = exports(folder, sources, &names);
    for (name, source) in of_crate(folder, sources).filter(|(name, _)| !is_root(name)) {
        let text: String = source.code().map(|(_, line)| line + "\n").collect();
        let found = imports(&text).into_iter().map(|import| exported.get(&import).cloned().unwrap_or(import));
        let others = found.filter(|import| *import != name && names.contains(import));
        modules.get_mut(&name).expect("counted above").imports.extend(others.collect::<Vec<_>>());
    }
    modules
}

/// Groups of two or more modules of which each reaches each other, largest (in lines) first.
pub fn knots(modules: &BTreeMap<String, Module>) -> Vec<Knot> {
    let reach: BTreeMap<&String, BTreeSet<&String>> =
        modules.keys().map(|name| (name, reached(name, modules))).collect();
    let mut knots: BTreeMap<Vec<&String>, usize> = BTreeMap::new();
    for name in modules.keys() {
        let group: Vec<&String> = reach[name].iter().filter(|other| reach[**other].contains(name)).copied().collect();
        if group.len() > 1 {
            let lines = group.iter().map(|name| modules[*name].lines).sum();
            knots.insert(group, lines);
        }
    }
    let mut knots: Vec<Knot> =
        knots.into_iter().map(|(names, lines)| Knot { names: names.into_iter().cloned().collect(), lines }).collect();
    knots.sort_by_key(|knot| std::cmp::Reverse(knot.lines));
    knots
}

/// Modules that import each other in a circle.
#[derive(Debug)]
pub struct Knot {
    /// Names, sorted.
    pub names: Vec<String>,
    /// Net lines of all together.
    pub lines: usize,
}

/// Modules that `name` reaches over imports; itself only if a circle leads back.
fn reached<'a>(name: &String, modules: &'a BTreeMap<String, Module>) -> BTreeSet<&'a String> {
    let mut seen = BTreeSet::new();
    let mut open: Vec<&String> = modules[name].imports.iter().collect();
    while let Some(next) = open.pop() {
        if let Some((key, module)) = modules.get_key_value(next)
            && seen.insert(key)
        {
            open.extend(&module.imports);
        }
    }
    seen
}

/// Program files of the crate in `folder`, each with the name of its top-level module.
fn of_crate<'a>(folder: &'a str, sources: &'a [Source]) -> impl Iterator<Item = (String, &'a Source)> {
    sources.iter().filter(|source| !source.is_test()).filter_map(move |source| {
        let path = source.path.strip_prefix(folder)?.strip_prefix("/src/")?;
        let name = path.split('/').next().unwrap_or(path);
        Some((name.trim_end_matches(".rs").to_owned(), source))
    })
}

fn is_root(name: &str) -> bool {
    ["lib", "main", "bin"].contains(&name)
}

/// Items that the crate's root re-exports (`pub use module::{A, B}`), with their module.
fn exports(folder: &str, sources: &[Source], names: &BTreeSet<String>) -> BTreeMap<String, String> {
    let mut exports = BTreeMap::new();
    for (_, source) in of_crate(folder, sources).filter(|(name, _)| is_root(name)) {
        let text: String = source.code().map(|(_, line)| line + " ").collect();
        for part in text.split("use ").skip(1) {
            let Some((path, _)) = part.split_once(';') else { continue };
            let path = path.trim().trim_start_matches("crate::");
            let Some((module, rest)) = path.split_once("::").filter(|(module, _)| names.contains(*module)) else {
                continue;
            };
            for item in rest.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|item| !item.is_empty()) {
                exports.insert(item.to_owned(), module.to_owned());
            }
        }
    }
    exports
}

/// First names after `crate::`, braces opened.
fn imports(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, path) in text.match_indices("crate::") {
        // `$crate::` of a macro, or a name that ends in `crate`.
        if text[..at].chars().next_back().is_some_and(|c| c.is_alphanumeric() || c == '_') {
            continue;
        }
        let rest = &text[at + path.len()..];
        match rest.strip_prefix('{') {
            Some(list) => found.extend(first_names(list)),
            None => found.push(word(rest).to_owned()),
        }
    }
    found
}

/// First name of each entry of a list whose opening brace is cut off.
fn first_names(list: &str) -> Vec<String> {
    let (mut depth, mut entry, mut names) = (0, true, Vec::new());
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => entry = true,
            c if entry && (c.is_alphanumeric() || c == '_') => {
                names.push(word(&list[at..]).to_owned());
                entry = false;
            }
            _ => {}
        }
    }
    names
}

fn word(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        Source { path: path.into(), lines: text.lines().map(str::to_owned).collect() }
    }

    #[test]
    fn imports_are_found_in_every_form() {
        let text = "use crate::{a::{X, Y}, b};\nfn f(x: crate::c::Z) {}\nmy_crate::d();";
        assert_eq!(imports(text), ["a", "b", "c"]);
    }

    #[test]
    fn a_circle_is_a_knot_and_a_chain_is_none() {
        let sources = [
            source("x/src/lib.rs", "pub mod a;\nmod b;\nmod c;\npub use b::Thing;"),
            source("x/src/a.rs", "use crate::Thing;"),
            source("x/src/b/inner.rs", "use crate::a;\n// crate::c"),
            source("x/src/c.rs", "use crate::a::f;"),
        ];
        let modules = modules("x", &sources);
        assert_eq!(modules["b"].imports.iter().collect::<Vec<_>>(), ["a"]);
        let knots = knots(&modules);
        assert_eq!(knots.len(), 1);
        assert_eq!(knots[0].names, ["a", "b"]);
        assert_eq!(knots[0].lines, 3);
    }
}
