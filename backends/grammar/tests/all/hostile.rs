//! Every hostile text in a process of its own: refused or compiled within a second of CPU and 64 MB, and then followed
//! without a long mask.

use crate::hostile_corpus::corpus;
use crate::measure::measure;
use std::process::Command;

/// Names the text for the process that measures it.
const VARIABLE: &str = "PENSTOCK_HOSTILE_TEXT";

/// CPU seconds of one text. The library is built with little optimization here; a release takes a third.
const SECONDS_MAX: f64 = 1.0;
const BYTES_MAX: u64 = 64 << 20;
/// CPU seconds of one mask, in the same build.
const MASK_SECONDS_MAX: f64 = 0.1;

#[test]
fn every_text_costs_little() {
    let program = std::env::current_exe().expect("this test");
    for (name, _) in corpus() {
        let run = Command::new(&program)
            .args(["hostile::one_text_alone", "--exact", "--nocapture"])
            .env(VARIABLE, name)
            .output()
            .expect("started");
        let text = String::from_utf8_lossy(&run.stdout);
        assert!(
            run.status.success() && text.contains("cost of"),
            "{name}: {text}{}",
            String::from_utf8_lossy(&run.stderr)
        );
    }
}

/// Measures the text that the environment names; does nothing in an ordinary run.
#[test]
fn one_text_alone() {
    let Ok(wanted) = std::env::var(VARIABLE) else { return };
    let corpus = corpus();
    let (name, source) = corpus.iter().find(|(name, _)| *name == wanted).expect("a name of the corpus");
    let cost = measure(source);
    println!("cost of {name}: {cost}");
    assert!(
        cost.seconds < SECONDS_MAX && cost.bytes < BYTES_MAX && cost.mask_seconds < MASK_SECONDS_MAX,
        "{name}: {cost}"
    );
}
