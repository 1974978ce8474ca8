//! Cost of the engine itself per step, without a model: `cargo bench -p penstock-engine --bench step`.
//!
//! The fake model returns at once, with the same logits for each row, so only scheduling, sampling (greedy, 64 tokens
//! of vocabulary) and publishing are timed. Medians of 301 steps on one core.

use penstock_engine::{AfterLayer, Engine, EngineConfig, Forward, Geometry, Pages};
use penstock_kernels::{KernelError, StepBatch};
use penstock_proto::frames::{ChoiceStart, Generate, Sampling};
use std::time::{Duration, Instant};

const VOCAB: usize = 64;

struct Instantly(Vec<f32>);

impl Forward for Instantly {
    fn geometry(&self) -> Geometry {
        Geometry {
            vocab_size: VOCAB,
            context_tokens: 1 << 16,
            pages: 1 << 15,
            rows_max: 4096,
            sampled_max: 512,
            numerics: String::new(),
            layers: 0,
            page_bytes: 0,
            ..Geometry::default()
        }
    }

    fn forward(&mut self, batch: &StepBatch<'_>, _: AfterLayer<'_>) -> Result<&[f32], KernelError> {
        Ok(&self.0[..batch.sampled.len() * VOCAB])
    }

    fn pages(&self) -> &dyn Pages {
        self
    }

    fn write_page(&mut self, _: usize, _: u32, _: &[u8]) {}
}

impl Pages for Instantly {
    fn read_page(&self, _: usize, _: u32, _: &mut [u8]) {}
}

/// Median of a step in which `running` sequences of `context` tokens decode and `waiting` more wait.
fn decode(running: usize, context: usize, waiting: usize) -> Duration {
    let config = EngineConfig {
        sequences_max: running,
        batch_tokens: 4096,
        chunk_tokens: 4096,
        waiting_max: running + waiting,
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(Box::new(Instantly(vec![0.5; 512 * VOCAB])), &config);
    for request in 0..(running + waiting) as u64 {
        let prompt =
            (0..context as u64).map(|i| ((i * 7 + request * 13 + i * request) % VOCAB as u64) as u32).collect();
        let sampling = Sampling {
            top_p: 1.0,
            repetition_penalty: 1.0,
            max_tokens: 10_000,
            logprobs: -1,
            prompt_logprobs: -1,
            ..Default::default()
        };
        let choices = vec![ChoiceStart::default()];
        engine.submit(Generate { request, prompt, choices, sampling: Some(sampling), ..Default::default() });
    }
    let clock = || Duration::ZERO;
    while engine.state().prefill_tokens_pending > (waiting * context) as u64 {
        engine.step(&clock);
    }
    let mut times: Vec<Duration> = (0..301)
        .map(|_| {
            let start = Instant::now();
            engine.step(&clock);
            start.elapsed()
        })
        .collect();
    times.sort();
    times[150]
}

fn main() {
    for (running, context, waiting) in [(1, 100, 0), (32, 100, 0), (32, 4000, 0), (32, 4000, 200), (256, 4000, 0)] {
        println!("{running:4} decode at {context:5} tokens, {waiting:4} wait: {:?}", decode(running, context, waiting));
    }
}
