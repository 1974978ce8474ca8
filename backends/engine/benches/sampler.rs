//! Cost of one sampled token at Qwen3's vocabulary of 151,936: `cargo bench -p penstock-engine --bench sampler`.
//!
//! Two rows: *peaked*, like a trained model's (few tokens above a wide floor), and *flat*, like random weights'. Times are the
//! medians of 51 draws on one core.

use penstock_engine::Params;
use penstock_engine::random::{Draw, philox4x32};
use penstock_engine::sampler::{History, Sampler};
use std::collections::{HashMap, HashSet};
use std::hint::black_box;
use std::time::{Duration, Instant};

const VOCAB: usize = 151_936;

fn uniform(n: usize) -> f32 {
    philox4x32([n as u32, 0, 0, 0], [1, 2])[0] as f32 / u32::MAX as f32
}

fn params() -> Params {
    Params {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        repetition_penalty: 1.0,
        logit_bias: Vec::new(),
        seed: 1,
        max_tokens: 1,
        min_tokens: 0,
        stop_tokens: Vec::new(),
        logprobs: None,
        prompt_logprobs: None,
        allowed_tokens: Vec::new(),
        bad_words: Vec::new(),
        logprob_tokens: Vec::new(),
    }
}

fn median(mut work: impl FnMut(u32)) -> Duration {
    let mut times: Vec<Duration> = (0..51)
        .map(|position| {
            let start = Instant::now();
            work(position);
            start.elapsed()
        })
        .collect();
    times.sort();
    times[25]
}

fn main() {
    let peaked: Vec<f32> = (0..VOCAB).map(|n| 30.0 * uniform(n).powi(2000) + 2.0 * uniform(n + VOCAB)).collect();
    let flat: Vec<f32> = (0..VOCAB).map(|n| 4.0 * uniform(n) - 2.0).collect();
    let cases = [
        ("greedy", Params { temperature: 0.0, ..params() }),
        ("temperature", params()),
        ("top_k 20", Params { top_k: 20, ..params() }),
        ("top_p 0.95", Params { top_p: 0.95, ..params() }),
        ("min_p 0.05", Params { min_p: 0.05, ..params() }),
        ("0.6, 20, 0.95 (Qwen3)", Params { temperature: 0.6, top_k: 20, top_p: 0.95, ..params() }),
        ("the same, penalties", Params { temperature: 0.6, top_k: 20, top_p: 0.95, presence_penalty: 1.0, ..params() }),
    ];
    let (prompt, counts) = (HashSet::new(), HashMap::from([(1, 1), (2, 2)]));
    let history = History { prompt: &prompt, counts: &counts, output_tokens: 3, output: &[], allowed: None };
    println!("{:24} {:>12} {:>12}", "", "peaked", "flat");
    let mut sampler = Sampler::default();
    for (name, params) in &cases {
        let mut time = |row: &[f32]| {
            median(|position| {
                let draw = Draw { seed: 1, choice: 0, position, draw: 0 };
                black_box(sampler.sample(black_box(row), params, history, draw).expect("a usable row"));
            })
        };
        println!("{name:24} {:>12?} {:>12?}", time(&peaked), time(&flat));
    }
    let mut time = |row: &[f32]| median(|_| drop(black_box(sampler.logprobs(black_box(row), 7, 20, &[]))));
    println!("{:24} {:>12?} {:>12?}", "logprobs, 20 best", time(&peaked), time(&flat));
}
