//! top_k → top_p → min_p: which tokens stay, without sorting the vocabulary.
//!
//! top_p first looks at the best 256 tokens, which hold the nucleus of nearly every real distribution. For a flat one it
//! sums the mass into buckets of 1/64 nat, takes every bucket above the one where the mass is reached whole, and sorts only
//! that one. Tokens at the edge of top_k and top_p fall to the lowest ids.

use crate::logits::{self, Candidate};
use crate::request::Params;

/// Best tokens looked at for top_p at first.
const NUCLEUS_START: usize = 256;
/// Buckets of 1/64 nat: they reach 32 nats down, the rest (10⁻¹⁴ of the best) shares the last.
const BUCKETS: usize = 2048;
const BUCKETS_PER_NAT: f32 = 64.0;

/// Reused buffers.
#[derive(Debug, Default)]
pub(crate) struct Filter {
    candidates: Vec<Candidate>,
    weights: Vec<f32>,
    buckets: Vec<f64>,
    edge: Vec<Candidate>,
}

impl Filter {
    /// The tokens that stay, with weights `e^((v − max)·scale)`. `values` has a maximum of `max`.
    pub(crate) fn select(&mut self, values: &[f32], max: f32, scale: f32, params: &Params) -> (&[Candidate], &[f32]) {
        let top_p = f64::from(params.top_p);
        if params.top_k > 0 {
            logits::top(values, params.top_k as usize, &mut self.candidates);
            self.weigh(max, scale);
            if params.top_p < 1.0 {
                let total: f64 = self.weights.iter().copied().map(f64::from).sum();
                self.truncate(nucleus(&self.weights, top_p * total).unwrap_or(self.weights.len()));
            }
        } else if params.top_p < 1.0 {
            let wanted = top_p * logits::sum_exp(values, max, scale);
            logits::top(values, NUCLEUS_START, &mut self.candidates);
            self.weigh(max, scale);
            match nucleus(&self.weights, wanted) {
                Some(kept) => self.truncate(kept),
                None => self.wide_nucleus(values, max, scale, wanted),
            }
        } else {
            // Only min_p: a bar, a little low because of rounding; the weights decide below.
            logits::at_least(values, max + (params.min_p.ln() - 1e-3) / scale, &mut self.candidates);
            self.weigh(max, scale);
        }
        if params.min_p > 0.0 {
            // The best candidate weighs 1, so min_p is the bar itself.
            let mut weights = self.weights.iter();
            self.candidates.retain(|_| weights.next().is_some_and(|weight| *weight >= params.min_p));
            self.weights.retain(|weight| *weight >= params.min_p);
        }
        (&self.candidates, &self.weights)
    }

    fn weigh(&mut self, max: f32, scale: f32) {
        self.weights.clear();
        self.weights.extend(self.candidates.iter().map(|(value, _)| logits::exp((value - max) * scale)));
    }

    fn truncate(&mut self, kept: usize) {
        self.candidates.truncate(kept);
        self.weights.truncate(kept);
    }

    /// The nucleus of a flat distribution.
    fn wide_nucleus(&mut self, values: &[f32], max: f32, scale: f32, wanted: f64) {
        let bucket = |value: f32| ((((max - value) * scale) * BUCKETS_PER_NAT) as usize).min(BUCKETS - 1);
        self.buckets.clear();
        self.buckets.resize(BUCKETS, 0.0);
        for value in values {
            self.buckets[bucket(*value)] += f64::from(logits::exp((value - max) * scale));
        }
        let mut mass = 0.0;
        let crossing = self.buckets.iter().position(|bucket| {
            mass += bucket;
            mass >= wanted
        });
        let crossing = crossing.unwrap_or(BUCKETS - 1);
        self.candidates.clear();
        self.edge.clear();
        for (candidate, bucket) in values.iter().copied().zip(0..).map(|c| (c, bucket(c.0))) {
            match bucket.cmp(&crossing) {
                std::cmp::Ordering::Less => self.candidates.push(candidate),
                std::cmp::Ordering::Equal => self.edge.push(candidate),
                std::cmp::Ordering::Greater => {}
            }
        }
        self.edge.sort_unstable_by(logits::better);
        let mut mass: f64 = self.buckets[..crossing].iter().sum();
        for candidate in &self.edge {
            if mass >= wanted {
                break;
            }
            mass += f64::from(logits::exp((candidate.0 - max) * scale));
            self.candidates.push(*candidate);
        }
        self.weigh(max, scale);
    }
}

/// How many weights, in order, reach `wanted`, at least one: a token stays while the mass before it is less. `None`: more
/// than there are.
fn nucleus(weights: &[f32], wanted: f64) -> Option<usize> {
    let mut mass = 0.0;
    for (n, weight) in weights.iter().enumerate() {
        mass += f64::from(*weight);
        if mass >= wanted {
            return Some(n + 1);
        }
    }
    None
}
