//! Tokens that a device finds by itself are those that the host finds in the logits, whatever else is asked for.

use crate::lookup::{assert_same, engine_of, model, requests, run};
use penstock_engine::models::Model;
use penstock_engine::{AfterLayer, EngineConfig, Forward, Geometry, Pages};
use penstock_kernels::sampling::draw_from_all;
use penstock_kernels::{Found, KernelError, Pick, SampledRows, StepBatch};
use penstock_proto::frames::Generate;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Model on a device that finds tokens by itself, as plainly as can be; it returns logits of the other rows alone.
struct Picking {
    model: Model,
    logits: Vec<f32>,
    found: Vec<Found>,
    /// Rows whose logits were returned, and rows whose token was.
    rows: Arc<[AtomicU64; 2]>,
    /// Tokens that were drawn.
    drawn: Arc<AtomicU64>,
}

/// Token of the largest logit, if all logits are of use.
fn best(row: &[f32]) -> Option<u32> {
    let useless = |value: &f32| value.is_nan() || *value == f32::INFINITY;
    let mut tokens = (0..row.len()).filter(|token| row[*token] > f32::NEG_INFINITY);
    let first = tokens.next().filter(|_| !row.iter().any(useless))?;
    Some(tokens.fold(first, |best, token| if row[token] > row[best] { token } else { best }) as u32)
}

impl Forward for Picking {
    fn geometry(&self) -> Geometry {
        self.model.geometry()
    }

    fn forward(&mut self, batch: &StepBatch<'_>, after_layer: AfterLayer<'_>) -> Result<&[f32], KernelError> {
        self.model.forward(batch, after_layer)
    }

    fn sample(
        &mut self,
        batch: &StepBatch<'_>,
        after_layer: AfterLayer<'_>,
        picks: &[Pick],
    ) -> Result<SampledRows<'_>, KernelError> {
        assert_eq!(picks.len(), batch.sampled.len());
        let vocab = self.geometry().vocab_size;
        let logits = self.model.forward(batch, after_layer)?;
        self.logits.clear();
        self.found.clear();
        for (pick, row) in picks.iter().zip(logits.chunks_exact(vocab)) {
            self.rows[usize::from(*pick != Pick::Host)].fetch_add(1, Ordering::Relaxed);
            self.found.push(match pick {
                Pick::Host => {
                    self.logits.extend_from_slice(row);
                    Found::Logits(self.logits.len() / vocab - 1)
                }
                Pick::Best => Found::Token(best(row)),
                Pick::Draw { scale, uniform } => Found::Token(best(row).map(|best| {
                    self.drawn.fetch_add(1, Ordering::Relaxed);
                    draw_from_all(row, row[best as usize], *scale, *uniform, &mut Vec::new())
                })),
            });
        }
        Ok(SampledRows::new(&self.logits, vocab, &self.found))
    }

    fn pages(&self) -> &dyn Pages {
        self.model.pages()
    }

    fn write_page(&mut self, layer: usize, page: u32, bytes: &[u8]) {
        self.model.write_page(layer, page, bytes);
    }
}

/// Requests of every kind, a third of them with nothing that needs logits but what a grammar masks: greedy, or drawn from all tokens.
fn mixed() -> Vec<Generate> {
    let mut requests = requests();
    for request in requests.iter_mut().filter(|request| request.request % 3 == 0) {
        let sampling = request.sampling.as_mut().expect("set");
        sampling.temperature = if request.request % 2 == 0 { 0.0 } else { 0.8 };
        (sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty) = (0, 1.0, 0.0, 1.0);
        (sampling.presence_penalty, sampling.frequency_penalty) = (0.0, 0.0);
        (sampling.logprobs, sampling.min_tokens) = (-1, 0);
        sampling.logit_bias.clear();
        sampling.bad_words.clear();
    }
    requests
}

#[test]
fn two_hundred_requests_are_the_same_bits_whoever_finds_the_tokens() {
    for prompt_lookup in [0, 8] {
        let config = EngineConfig { waiting_max: 1000, prompt_lookup, ..EngineConfig::default() };
        let want = run(&mut engine_of(Box::new(model(600)), &config), mixed());
        let rows: Arc<[AtomicU64; 2]> = Arc::default();
        let drawn: Arc<AtomicU64> = Arc::default();
        let (logits, found) = (Vec::new(), Vec::new());
        let picking = Picking { model: model(600), logits, found, rows: Arc::clone(&rows), drawn: Arc::clone(&drawn) };
        let got = run(&mut engine_of(Box::new(picking), &config), mixed());
        assert_same(&got, &want, &format!("{prompt_lookup} drafts"));
        let [logits, tokens] = [0, 1].map(|at| rows[at].load(Ordering::Relaxed));
        let drawn = drawn.load(Ordering::Relaxed);
        println!("{prompt_lookup} drafts: {logits} rows of logits, {tokens} tokens, {drawn} of them drawn");
        assert!(drawn > 500, "{drawn} tokens are drawn");
        assert!(logits > 500 && tokens > 1000, "both kinds: {logits} rows of logits, {tokens} tokens");
    }
}
