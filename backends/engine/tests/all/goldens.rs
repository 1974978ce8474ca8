//! The four families against Hugging Face transformers, on small random models of odd shapes (`tests/goldens`).
//!
//! bf16, every CPU path: no further from its f32 than 1.5 times its own bf16 run is, in mean and in maximum.
//! f32: within 1e-3 of its f32 logprobs at every position, and the same best token at every position, so the same greedy text.

use crate::common;

use common::weights::Golden;
use common::{argmax, cpu_paths, load, load_with, log_softmax, logits_of, reference, repository};
use penstock_engine::checkpoint::Checkpoint;
use penstock_kernels::{Device, Limits};

/// Mean and maximum of |Δ logprob| from transformers' f32 over the values of a golden, and whether every best token agrees.
struct Distance {
    mean: f64,
    max: f64,
    wrong: Vec<usize>,
}

fn distance(golden: &Golden, make: &dyn Fn(Limits) -> Box<dyn Device>) -> Distance {
    let tokens = &golden.tokens;
    let mut model = load_with(&golden.checkpoint(), make, 32, tokens.len(), golden.context);
    let logits = logits_of(&mut model, tokens, tokens.len());
    let mut errors = Vec::new();
    for (i, &position) in golden.positions.iter().enumerate() {
        let logprobs = log_softmax(&logits[position]);
        let pairs = golden.tokens_at(i).into_iter().zip(&golden.logprobs[i]);
        errors.extend(pairs.map(|(token, want)| (logprobs[token] - want).abs()));
    }
    Distance {
        mean: errors.iter().sum::<f64>() / errors.len() as f64,
        max: errors.iter().copied().fold(0.0, f64::max),
        wrong: (0..tokens.len()).filter(|&p| argmax(&logits[p]) != golden.argmax[p]).collect(),
    }
}

#[test]
fn f32_agrees_with_transformers() {
    let goldens = Golden::all();
    assert_eq!(goldens.len(), 14);
    for golden in goldens {
        let Distance { mean, max, wrong } = distance(&golden, &reference);
        println!("{}: f32 mean {mean:.1e} max {max:.1e}", golden.case);
        // The promise is 1e-3; a bound ten times smaller leaves no room for a wrong constant.
        assert!(max < 1e-4, "{}: {max:e}", golden.case);
        assert!(wrong.is_empty(), "{}: other tokens at {wrong:?}", golden.case);
        let greedy = golden.prompt..golden.tokens.len();
        assert!(greedy.clone().all(|p| golden.argmax[p - 1] == golden.tokens[p]), "{}: greedy text", golden.case);
    }
}

#[test]
fn bf16_is_as_close_as_transformers_own() {
    let paths = cpu_paths();
    assert!(!paths.is_empty());
    for golden in Golden::all() {
        for (path, make) in &paths {
            let Distance { mean, max, .. } = distance(&golden, &**make);
            let (case, want) = (&golden.case, &golden.bf16);
            println!("{case}, {path}: mean {:.2} max {:.2} of transformers' own", mean / want.mean, max / want.max);
            assert!(mean <= 1.5 * want.mean, "{case}, {path}: mean {mean:.4}, transformers {:.4}", want.mean);
            assert!(max <= 1.5 * want.max, "{case}, {path}: maximum {max:.4}, transformers {:.4}", want.max);
        }
    }
}

#[test]
fn a_folder_that_transformers_wrote() {
    #[derive(serde::Deserialize)]
    struct Expected {
        tokens: Vec<u32>,
        logprobs: Vec<f64>,
    }
    let folder = repository("tests/goldens/saved");
    let text = std::fs::read(folder.join("expected.json")).expect("the logprobs");
    let Expected { tokens, logprobs } = serde_json::from_slice(&text).expect("the logprobs");
    let checkpoint = Checkpoint::open(&folder).expect("the folder opens");
    assert!(checkpoint.ignored().is_empty());
    let mut model = load(&checkpoint, &reference, 4, 64);
    let logits = logits_of(&mut model, &tokens, 64);
    let got = log_softmax(&logits[tokens.len() - 1]);
    assert_eq!(got.len(), logprobs.len());
    for (token, (got, want)) in got.iter().zip(&logprobs).enumerate() {
        assert!((got - want).abs() < 1e-4, "token {token}: {got} {want}");
    }
}
