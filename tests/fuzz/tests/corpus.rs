//! Replays the kept corpus of every target, then mutates it: the number of mutations and the seed are fixed, so that
//! each run is the same. `PENSTOCK_FUZZ_SEED` chooses another seed.

use std::path::PathBuf;
use std::time::Duration;

use mutatis::check::{Check, CheckError};
use mutatis::mutators;

/// Mutated inputs of a target. All targets together take about 15 s in a debug build on one core; the bound is 60 s.
const MUTATIONS: usize = 5_000;

/// Targets that read their input several times, or compile it, with the mutated inputs of each.
const SLOW: [(&str, usize); 4] =
    [("anthropic_answer", 1_000), ("gemini", 1_000), ("grammar", 400), ("openai_answers", 500)];

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name)
}

/// Kept inputs of a target, in the order of their names.
fn kept(name: &str) -> Vec<Vec<u8>> {
    let entries = std::fs::read_dir(folder(name)).expect("every target has a corpus");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("a readable folder").path()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).expect("a readable file")).collect()
}

fn check(name: &str) {
    let run = penstock_fuzz::target(name).expect("a target");
    let inputs = kept(name);
    assert!(!inputs.is_empty(), "the corpus of {name} is empty");
    inputs.iter().for_each(|input| run(input));
    let seed = std::env::var("PENSTOCK_FUZZ_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let mutations = SLOW.iter().find(|(slow, _)| *slow == name).map_or(MUTATIONS, |(_, mutations)| *mutations);
    let property = |input: &Vec<u8>| {
        run(input);
        Ok::<_, String>(())
    };
    let outcome = Check::new().iters(mutations).max_shrink_duration(Duration::from_secs(10)).seed(seed).run_with(
        mutators::default::<Vec<u8>>(),
        inputs,
        property,
    );
    match outcome {
        Ok(()) => {}
        Err(CheckError::Failed(failure)) => {
            panic!("{name}: b\"{}\": {}", failure.value.escape_ascii(), failure.message)
        }
        Err(error) => panic!("{name}: {error}"),
    }
}

macro_rules! replay {
    ($name:ident) => {
        #[test]
        fn $name() {
            check(stringify!($name));
        }
    };
}

penstock_fuzz::for_each_target!(replay);

#[test]
fn every_corpus_has_a_target() {
    let entries = std::fs::read_dir(folder("")).expect("the corpus");
    for entry in entries {
        let name = entry.expect("a readable folder").file_name().into_string().expect("UTF-8");
        let apart = cfg!(not(feature = "wasm")) && name.starts_with("plugin_");
        assert!(apart || penstock_fuzz::target(&name).is_some(), "{name} is no target");
    }
}
