//! The JSON Schema Test Suite against the grammars: `suite FOLDER` reads each `*.json` of a draft's folder (PyPI's source
//! package of `jsonschema` has them in `json/tests`) and prints by keyword file what becomes of its schemas and instances.
//!
//! - enforced: no instance that the suite calls invalid is accepted;
//! - named: the schema has keywords that are not enforced, and the audit names them (`strict` refuses it);
//! - refused: the schema does not compile;
//! - wrong: an invalid instance is accepted, and nothing was named. The program ends with 1 where there is one.
//!
//! An instance is read in the grammar's own form: compact, members in the order of the schema. A valid one that is not
//! accepted is counted as narrower.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use penstock_grammar::{Grammar, Source, TokenText, Vocabulary};
use serde_json::Value;

#[derive(Default)]
struct Counts {
    enforced: usize,
    named: usize,
    refused: usize,
    narrower: usize,
    wrong: Vec<String>,
}

fn main() {
    let folder = std::env::args().nth(1).expect("a folder of the suite's tests");
    let vocabulary = bytes();
    let mut all: BTreeMap<String, Counts> = BTreeMap::new();
    let mut files: Vec<_> = std::fs::read_dir(&folder).expect("a folder").flatten().map(|entry| entry.path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    for file in files {
        let name = file.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        look(&file, &vocabulary, all.entry(name).or_default());
    }
    println!("| keyword | enforced | named | refused | valid but narrower | wrong |\n|---|---|---|---|---|---|");
    let mut sum = Counts::default();
    for (name, counts) in &all {
        let Counts { enforced, named, refused, narrower, wrong } = counts;
        println!("| {name} | {enforced} | {named} | {refused} | {narrower} | {} |", wrong.len());
        sum.enforced += enforced;
        sum.named += named;
        sum.refused += refused;
        sum.narrower += narrower;
        sum.wrong.extend(wrong.iter().map(|what| format!("{name}: {what}")));
    }
    let Counts { enforced, named, refused, narrower, wrong } = sum;
    println!("| all | {enforced} | {named} | {refused} | {narrower} | {} |", wrong.len());
    wrong.iter().for_each(|what| println!("wrong: {what}"));
    std::process::exit(i32::from(!wrong.is_empty()));
}

/// A vocabulary of single bytes, so that any text can be followed.
fn bytes() -> Arc<Vocabulary> {
    let all: Vec<[u8; 1]> = (0..=255_u8).map(|byte| [byte]).collect();
    let end = TokenText { bytes: b"</s>", is_special: true };
    let tokens = all.iter().map(|byte| TokenText { bytes: byte, is_special: false }).chain([end]);
    Vocabulary::new(tokens, &[256], 257).expect("a vocabulary of bytes")
}

fn look(file: &Path, vocabulary: &Arc<Vocabulary>, counts: &mut Counts) {
    let text = std::fs::read_to_string(file).expect("readable");
    let groups: Vec<Value> = serde_json::from_str(&text).expect("a file of the suite");
    for group in groups {
        let source = Source::json_schema(group["schema"].to_string());
        match source.check() {
            Ok(unenforced) if !unenforced.is_empty() => counts.named += 1,
            Err(_) => counts.refused += 1,
            Ok(_) => match Grammar::compile(&source, vocabulary) {
                Err(_) => counts.refused += 1,
                Ok(grammar) => instances(&group, &grammar, counts),
            },
        }
    }
}

fn instances(group: &Value, grammar: &Grammar, counts: &mut Counts) {
    let mut is_enforced = true;
    for test in group["tests"].as_array().into_iter().flatten() {
        let data = test["data"].to_string();
        let (is_valid, is_accepted) = (test["valid"] == true, accepts(grammar, &data));
        if is_valid && !is_accepted {
            counts.narrower += 1;
        }
        if is_accepted && !is_valid {
            is_enforced = false;
            counts.wrong.push(format!(
                "{} accepts {data} of {:.200}",
                group["description"],
                group["schema"].to_string()
            ));
        }
    }
    counts.enforced += usize::from(is_enforced);
}

fn accepts(grammar: &Grammar, text: &str) -> bool {
    let mut matcher = grammar.matcher();
    for byte in text.bytes() {
        let is_allowed = matcher.mask().is_ok_and(|mask| mask.bits[usize::from(byte) / 32] >> (byte % 32) & 1 == 1);
        if !is_allowed || matcher.consume(u32::from(byte)).is_err() {
            return false;
        }
    }
    matcher.is_accepting().unwrap_or(false)
}
