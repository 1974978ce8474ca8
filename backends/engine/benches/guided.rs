//! Cost of grammars in the engine, without a model: `cargo bench -p penstock-engine --bench guided -- FILE`, where each line
//! of FILE is a token's bytes in hexadecimal, in the order of their ids.
//!
//! 32 sequences decode, each under a schema of its own, beside the same 32 without. The fake model returns at once, with
//! logits of noise, so the difference is what masks, forced tokens and sampling under a mask cost. Times are CPU time of one core.

use std::sync::Arc;
use std::time::Duration;

use penstock_engine::{AfterLayer, Engine, EngineConfig, Forward, Geometry, Pages};
use penstock_grammar::{CacheSizes, Grammars, TokenText, Vocabulary};
use penstock_kernels::{KernelError, StepBatch};
use penstock_proto::frames::{ChoiceStart, Generate, Guide, GuideKind, GuideState, Sampling};

/// Sequences that decode together.
const BATCH: usize = 32;
/// Steps that are timed.
const STEPS: usize = 400;

struct Noise {
    logits: Vec<f32>,
    rows: usize,
    vocab: usize,
    steps: usize,
}

impl Noise {
    fn new(vocab: usize) -> Self {
        let rows = 2 * BATCH;
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut unit = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 24) as f32
        };
        // The sum of four is close enough to a normal distribution.
        let logits = (0..rows * vocab).map(|_| 4.0 * ((0..4).map(|_| unit()).sum::<f32>() - 2.0)).collect();
        Self { logits, rows, vocab, steps: 0 }
    }
}

impl Forward for Noise {
    fn geometry(&self) -> Geometry {
        Geometry {
            vocab_size: self.vocab,
            context_tokens: 1 << 16,
            pages: 1 << 15,
            rows_max: 4096,
            sampled_max: BATCH,
            numerics: String::new(),
            layers: 0,
            page_bytes: 0,
            ..Geometry::default()
        }
    }

    fn forward(&mut self, batch: &StepBatch<'_>, _: AfterLayer<'_>) -> Result<&[f32], KernelError> {
        self.steps += 1;
        let first = self.steps * 7 % (self.rows - BATCH);
        Ok(&self.logits[first * self.vocab..][..batch.sampled.len() * self.vocab])
    }

    fn pages(&self) -> &dyn Pages {
        self
    }

    fn write_page(&mut self, _: usize, _: u32, _: &[u8]) {}
}

impl Pages for Noise {
    fn read_page(&self, _: usize, _: u32, _: &mut [u8]) {}
}

fn schema(number: u64) -> String {
    format!(
        r#"{{"type":"object","properties":{{"title_{number}":{{"type":"string","maxLength":400}},"count_of_items":{{"type":"integer","minimum":{number},"maximum":5000}},
        "state":{{"enum":["open","closed","waiting for an answer"]}},"notes":{{"type":"array","items":{{"type":"string","maxLength":{}}},"maxItems":9}},
        "owner":{{"type":"object","properties":{{"name":{{"type":"string","pattern":"^[A-Z][a-z]{{2,40}}$"}},"mail":{{"type":"string","format":"email"}}}},
        "required":["name","mail"],"additionalProperties":false}}}},"required":["title_{number}","count_of_items","state","notes","owner"],"additionalProperties":false}}"#,
        100 + number
    )
}

/// Mean CPU time of a step, tokens that were jumped over, and masks.
fn decode(grammars: &Arc<Grammars>, guided: bool) -> (Duration, GuideState) {
    let vocab = grammars.vocabulary().rows();
    let config = EngineConfig {
        sequences_max: BATCH,
        batch_tokens: 4096,
        chunk_tokens: 4096,
        waiting_max: 4096,
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(Box::new(Noise::new(vocab)), &config);
    engine.set_grammars(Arc::clone(grammars));
    for request in 0..2048_u64 {
        let text = schema(request % BATCH as u64);
        let grammar = guided.then(|| Guide { kind: GuideKind::JsonSchema as i32, text, begins_after: Vec::new() });
        let sampling = Sampling {
            temperature: 1.0,
            seed: request,
            top_p: 1.0,
            repetition_penalty: 1.0,
            max_tokens: 150,
            logprobs: -1,
            prompt_logprobs: -1,
            ..Default::default()
        };
        let choices = vec![ChoiceStart::default()];
        let prompt = (0..20_u64).map(|at| ((at * 7 + request * 13) % vocab as u64) as u32).collect();
        engine.submit(Generate { request, prompt, choices, sampling: Some(sampling), grammar, ..Default::default() });
    }
    let clock = || Duration::ZERO;
    (0..8).for_each(|_| drop(engine.step(&clock)));
    let began = cpu_time();
    (0..STEPS).for_each(|_| drop(engine.step(&clock)));
    let spent = (cpu_time() - began) / STEPS as u32;
    (spent, engine.state().guides.unwrap_or_default())
}

/// CPU time of this process so far: on a machine that others use, the clock on the wall says more about them.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn main() {
    let Some(path) = std::env::args().skip(1).find(|word| !word.starts_with('-')) else {
        // Benches are also run without a file, to see that they start.
        return;
    };
    let text = std::fs::read_to_string(path).expect("a readable file");
    let digit = |c: u8| (c as char).to_digit(16).expect("a hexadecimal digit") as u8;
    let bytes = |line: &str| -> Vec<u8> {
        line.as_bytes().chunks_exact(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
    };
    let tokens: Vec<Vec<u8>> = text.lines().map(bytes).collect();
    let words = tokens.iter().map(|bytes| TokenText { bytes, is_special: false });
    let vocabulary = Vocabulary::new(words, &[], tokens.len()).expect("a vocabulary");
    let grammars = Arc::new(Grammars::new(vocabulary, CacheSizes::default()));
    for _ in 0..3 {
        let (plain, _) = decode(&grammars, false);
        let (guided, GuideState { jumped_tokens, masks, mask_seconds, mask_seconds_max, .. }) = decode(&grammars, true);
        let more = guided.saturating_sub(plain);
        println!(
            "{BATCH} sequences, {} tokens of vocabulary: a step {plain:.2?} without, {guided:.2?} with grammars ({more:.2?} more); \
             {jumped_tokens} tokens jumped, {masks} masks in {mask_seconds:.3} s of the clock, longest {mask_seconds_max:.4}",
            tokens.len()
        );
    }
}
