//! top_k → top_p → min_p: selection of the candidate tokens without sorting the vocabulary.
//!
//! top_p first looks at the best 256 tokens, which hold the nucleus of nearly every real distribution. For a flat one it
//! sums the mass into buckets of 1/64 nat, takes every bucket above the one where the mass is reached whole, and sorts only
//! that one. Tokens at the edge of top_k and top_p fall to the lowest ids.
//!
//! A flat distribution costs one exponential per token and one pass without branches: about a millisecond for 151,936 tokens. A bucket
//! that holds thousands, as at a high temperature, is sorted by digits.

use crate::logits::{self, Candidate};
use crate::params::Params;

/// Number of best tokens examined first for top_p.
const NUCLEUS_START: usize = 256;
/// Number of buckets of 1/64 nat: they reach 32 nats down, the rest (10⁻¹⁴ of the best) shares the last.
const BUCKETS: usize = 2048;
const BUCKETS_PER_NAT: f32 = 64.0;
/// Number of tokens compared together without a branch for each.
const BLOCK: usize = 64;
/// Number of candidates from which a radix sort is faster than a comparison sort.
const DIGITS_FROM: usize = 1024;

/// Filter of a row's candidates by top-k, top-p and min-p, with buffers reused across calls.
#[derive(Debug, Default)]
pub(crate) struct Filter {
    candidates: Vec<Candidate>,
    weights: Vec<f32>,
    buckets: Vec<f64>,
    edge: Vec<Candidate>,
    /// Weight of each token, `[vocabulary]`; `bucket_of` has its bucket.
    all_weights: Vec<f32>,
    bucket_of: Vec<u16>,
    sorting: Vec<Candidate>,
}

impl Filter {
    /// Selects the remaining tokens, with weights `e^((v − max)·scale)`. `max` is the maximum of `values`.
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
            match self.narrow_nucleus(values, max, scale, wanted) {
                Some(kept) => self.truncate(kept),
                None => self.wide_nucleus(values, max, scale, wanted),
            }
        } else {
            // Only min_p: a threshold, slightly low because of rounding; the weights decide below.
            logits::at_least(values, max + (params.min_p.ln() - 1e-3) / scale, &mut self.candidates);
            self.weigh(max, scale);
        }
        if params.min_p > 0.0 {
            // The best candidate weighs 1, so min_p is the threshold itself.
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

    /// Puts the best tokens into the candidates and returns the size of the nucleus; `None` if the best tokens do not
    /// contain it all.
    fn narrow_nucleus(&mut self, values: &[f32], max: f32, scale: f32, wanted: f64) -> Option<usize> {
        // No token weighs more than 1.
        if wanted > NUCLEUS_START as f64 {
            return None;
        }
        logits::top(values, NUCLEUS_START, &mut self.candidates);
        self.weigh(max, scale);
        nucleus(&self.weights, wanted)
    }

    /// Collects the nucleus of a flat distribution.
    fn wide_nucleus(&mut self, values: &[f32], max: f32, scale: f32, wanted: f64) {
        self.fill_buckets(values, max, scale);
        let mut mass = 0.0;
        let crossing = self.buckets.iter().position(|bucket| {
            mass += bucket;
            mass >= wanted
        });
        let crossing = crossing.unwrap_or(BUCKETS - 1);
        self.take_above(values, crossing as u16);
        sort_best(&mut self.edge, &mut self.sorting);
        let mut mass: f64 = self.buckets[..crossing].iter().sum();
        for candidate in &self.edge {
            if mass >= wanted {
                break;
            }
            let weight = self.all_weights[candidate.1 as usize];
            mass += f64::from(weight);
            self.candidates.push(*candidate);
            self.weights.push(weight);
        }
    }

    /// Computes weight and bucket of every token, and the mass of every bucket.
    fn fill_buckets(&mut self, values: &[f32], max: f32, scale: f32) {
        self.buckets.clear();
        self.buckets.resize(BUCKETS, 0.0);
        self.all_weights.resize(values.len(), 0.0);
        self.bucket_of.resize(values.len(), 0);
        let weights = self.all_weights.chunks_mut(logits::CHUNK);
        let chunks = values.chunks(logits::CHUNK).zip(weights).zip(self.bucket_of.chunks_mut(logits::CHUNK));
        for ((values, weights), buckets) in chunks {
            for (weight, value) in weights.iter_mut().zip(values) {
                *weight = logits::exp((value - max) * scale);
            }
            for (bucket, value) in buckets.iter_mut().zip(values) {
                let down = ((max - value) * scale) * BUCKETS_PER_NAT;
                *bucket = if down < (BUCKETS - 1) as f32 { down as i32 as u16 } else { (BUCKETS - 1) as u16 };
            }
            for (bucket, weight) in buckets.iter().zip(weights.iter()) {
                self.buckets[usize::from(*bucket)] += f64::from(*weight);
            }
        }
    }

    /// Makes the tokens of the buckets above `crossing` candidates, by ascending token; those in the bucket itself
    /// become the edge.
    fn take_above(&mut self, values: &[f32], crossing: u16) {
        self.candidates.clear();
        self.weights.clear();
        self.edge.clear();
        let blocks = values.chunks(BLOCK).zip(self.all_weights.chunks(BLOCK)).zip(self.bucket_of.chunks(BLOCK));
        for (number, ((values, weights), buckets)) in blocks.enumerate() {
            let (mut above, mut above_weights, mut count) = ([(0.0, 0); BLOCK], [0.0; BLOCK], 0);
            let first = (number * BLOCK) as u32;
            let mut is_edge = false;
            for (((value, weight), bucket), token) in values.iter().zip(weights).zip(buckets).zip(first..) {
                (above[count % BLOCK], above_weights[count % BLOCK]) = ((*value, token), *weight);
                count += usize::from(*bucket < crossing);
                is_edge |= *bucket == crossing;
            }
            self.candidates.extend_from_slice(&above[..count]);
            self.weights.extend_from_slice(&above_weights[..count]);
            if is_edge {
                let all = values.iter().copied().zip(first..).zip(buckets);
                self.edge.extend(all.filter(|(_, bucket)| **bucket == crossing).map(|(candidate, _)| candidate));
            }
        }
    }
}

/// Sorts candidates, which come by ascending token, in the order of [`logits::better`].
fn sort_best(candidates: &mut Vec<Candidate>, spare: &mut Vec<Candidate>) {
    if candidates.len() < DIGITS_FROM {
        return candidates.sort_unstable_by(logits::better);
    }
    let mut counts = [[0u32; 256]; 4];
    for (value, _) in candidates.iter() {
        let key = descending(*value);
        (0..4).for_each(|digit| counts[digit][usize::from(key.to_le_bytes()[digit])] += 1);
    }
    spare.clear();
    spare.resize(candidates.len(), (0.0, 0));
    // Least significant digit first; each pass is stable, so tokens stay ascending.
    for (digit, counts) in counts.iter_mut().enumerate() {
        if counts.iter().any(|count| *count as usize == candidates.len()) {
            continue;
        }
        let mut place = 0;
        counts.iter_mut().for_each(|count| place += std::mem::replace(count, place));
        for candidate in candidates.iter() {
            let place = &mut counts[usize::from(descending(candidate.0).to_le_bytes()[digit])];
            spare[*place as usize] = *candidate;
            *place += 1;
        }
        std::mem::swap(candidates, spare);
    }
}

/// Sort key that is the smaller the larger `value` is in the total order of f32.
fn descending(value: f32) -> u32 {
    let bits = value.to_bits();
    if bits >> 31 == 0 { !bits & 0x7fff_ffff } else { bits }
}

/// Number of weights, in order, that reach `wanted`, at least one: a token stays while the mass before it is less.
/// `None` if all weights together do not reach it.
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Reference: the whole vocabulary sorted, and its first tokens until the mass is reached.
    fn plain(values: &[f32], max: f32, scale: f32, top_p: f32) -> Vec<u32> {
        let mut sorted: Vec<Candidate> = values.iter().copied().zip(0..).collect();
        sorted.sort_by(logits::better);
        let wanted = f64::from(top_p) * logits::sum_exp(values, max, scale);
        let mut mass = 0.0;
        let stays = |(value, _): &&Candidate| {
            let before = mass;
            mass += f64::from(logits::exp((value - max) * scale));
            before < wanted
        };
        let mut kept: Vec<u32> = sorted.iter().take_while(stays).map(|(_, token)| *token).collect();
        kept.sort_unstable();
        kept
    }

    fn params(top_p: f32) -> Params {
        Params { temperature: 1.0, top_p, ..Params::silent() }
    }

    #[track_caller]
    fn check(values: &[f32], scale: f32, top_p: f32) {
        let max = logits::max(values).expect("a usable row");
        let mut filter = Filter::default();
        // Twice, since state left over from the first call must not matter.
        for _ in 0..2 {
            let (candidates, weights) = filter.select(values, max, scale, &params(top_p));
            assert_eq!(candidates.len(), weights.len());
            for ((value, token), weight) in candidates.iter().zip(weights) {
                assert_eq!((*value, *weight), (values[*token as usize], logits::exp((value - max) * scale)));
            }
            let mut got: Vec<u32> = candidates.iter().map(|(_, token)| *token).collect();
            got.sort_unstable();
            assert_eq!(got, plain(values, max, scale, top_p));
        }
    }

    proptest! {
        #[test]
        fn the_nucleus_is_that_of_a_sort(
            seed: u32,
            count in 1..6000_usize,
            // Over fractions of a bucket, or over hundreds of them.
            spread in prop_oneof![Just(0.0_f32), Just(1e-3), Just(0.01), 0.1..8.0_f32],
            steps in prop_oneof![Just(4.0_f32), Just(65536.0)],
            top_p in 0.01..0.999_f32,
        ) {
            let value = |n: usize| {
                let random = crate::random::philox4x32([n as u32, 0, 0, 0], [seed, 2])[0] as f32 / u32::MAX as f32;
                if n % 97 == 5 { f32::NEG_INFINITY } else { (random * steps).floor() / steps * spread - spread / 2.0 }
            };
            check(&(0..count).map(value).collect::<Vec<_>>(), 1.0, top_p);
        }
    }

    #[test]
    fn a_bucket_of_thousands_is_sorted_by_digits() {
        let value = |n: u32| crate::random::philox4x32([n, 0, 0, 0], [7, 2])[0] as f32 / u32::MAX as f32 - 0.5;
        let mut got: Vec<Candidate> = (0..5000).map(|n| ((value(n) * 50.0).round() * 0.3, n)).collect();
        let mut want = got.clone();
        want.sort_by(logits::better);
        sort_best(&mut got, &mut Vec::new());
        assert_eq!(got, want);
    }
}
