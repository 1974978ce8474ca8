//! Speed of a worker: a linear model of the step time, fitted online to the steps that the worker reports.
//!
//! ```text
//! step seconds = d + a·prefill tokens + b·Σ(prefill token × context) + e·decoding sequences + f·Σ context of decodes
//! ```
//! Least squares of the relative error, because noise is relative. Steps with and without prefill are remembered apart,
//! each kind with its own forgetting: a night of decodes does not wash out what is known of prefill. Outliers (a page
//! fault, a neighbour's burst) count less. Coefficients that the data says nothing about stay near a prior in equal
//! proportion: the fit of workers on an equal device, or else the shape of a transformer, scaled to the steps seen.
//! Coefficients are never negative.

use penstock_proto::frames::{Batch, EngineState};

/// Coefficients d, a, b, e, f of the module header.
pub type Coefficients = [f64; 5];

/// Weight of the past after each further step: about the last five hundred of a kind count.
const FORGET: f64 = 0.998;
/// Weight of the past while all steps are off to one side, because the worker has changed.
const FORGET_FAST: f64 = 0.97;
/// Drift that means such a change: mean signed error, in units of the usual error.
const DRIFT: f64 = 0.6;
/// Relative noise of a step, the unit of the prior's weight.
const NOISE: f64 = 0.1;
/// Relative error assumed of the default prior: data may override it entirely.
const PRIOR_ERROR: f64 = 1.0;
/// Relative error assumed of a prior taken from equal workers.
const PEERS_ERROR: f64 = 0.3;
/// Steps of a kind before a step can be judged an outlier.
const JUDGED_AFTER: u32 = 32;
/// Errors of more than this many usual errors count less.
const OUTLIER: f64 = 2.5;
/// Steps with prefill after which a worker's own fit is relied on; before, it is assumed to be like its equals.
const TELLING: u32 = 64;
/// Interval, in steps with prefill, at which a known worker updates equals that still learn.
const LESSON: u32 = 16;
/// Weight of an equals' prior, in steps: a single lucky first step, or a page fault, does not rescale everything.
const VOUCHED: f64 = 4.0;
/// Seconds per prompt token assumed of a worker without any information.
const UNKNOWN: f64 = 1e-3;
/// Default proportions, in units of a: a dense transformer with 12 ms, 71 µs, 1.35 ns, 40 µs, 16 ns.
const SHAPE: Coefficients = [170.0, 1.0, 1.9e-5, 0.56, 2.2e-4];
/// Prefill rows of a full step before any was seen; and the decay of the largest number seen, per step.
const CHUNK: (f64, f64) = (512.0, 0.999);

/// Weighted sums over past steps of one kind, from which coefficients are fitted.
#[derive(Clone, Copy, Debug, Default)]
struct Memory {
    products: [[f64; 5]; 5],
    targets: [f64; 5],
    steps: u32,
}

impl Memory {
    fn add(&mut self, features: &[f64; 5], seconds: f64, weight: f64, forget: f64) {
        for (row, feature) in self.products.iter_mut().zip(features) {
            for (sum, other) in row.iter_mut().zip(features) {
                *sum = *sum * forget + weight * feature * other;
            }
        }
        for (sum, feature) in self.targets.iter_mut().zip(features) {
            *sum = *sum * forget + weight * feature * seconds;
        }
        self.steps = self.steps.saturating_add(1);
    }
}

/// Fitted speed of a worker's steps (prefill and decode), with its errors; see the module header.
#[derive(Clone, Copy, Debug)]
pub struct Fit {
    prior: Coefficients,
    prior_error: f64,
    with_prefill: Memory,
    decode_only: Memory,
    now: Coefficients,
    /// Mean absolute relative error of the predicted step time, exponentially smoothed.
    error: f64,
    /// Mean signed relative error of the predicted step time, exponentially smoothed.
    drift: f64,
    /// Prompt tokens that a step prefills when enough are waiting.
    chunk: f64,
}

impl Default for Fit {
    fn default() -> Self {
        Self::shaped(UNKNOWN)
    }
}

impl Fit {
    /// Fit of a worker of which only the time per prompt token is known or guessed.
    fn shaped(token_seconds: f64) -> Self {
        Self::with_prior(SHAPE.map(|unit| unit * token_seconds), PRIOR_ERROR)
    }

    fn with_prior(prior: Coefficients, prior_error: f64) -> Self {
        let (with_prefill, decode_only) = Default::default();
        Self { prior, prior_error, with_prefill, decode_only, now: prior, error: 0.3, drift: 0.0, chunk: CHUNK.0 }
    }

    /// Prior for a new worker on a device like that of `peers`: their mean, weighted by the steps seen of each. Even a
    /// single step counts, because it tells how large an error the default prior has.
    pub fn like<'a>(peers: impl Iterator<Item = &'a Fit>) -> Option<Self> {
        let (mut sum, mut chunk, mut seen) = ([0.0; 5], 0.0, 0.0);
        for peer in peers {
            let steps = f64::from(peer.with_prefill.steps.min(TELLING));
            sum.iter_mut().zip(peer.now).for_each(|(sum, more)| *sum += steps * more);
            chunk += steps * peer.chunk;
            seen += steps;
        }
        // A lower bound keeps coefficients alive that a peer's few steps showed as 0.
        let prior = std::array::from_fn(|at| (sum[at] / seen).max(SHAPE[at] * sum[1] / seen * 1e-3));
        let error = if seen >= f64::from(TELLING) { PEERS_ERROR } else { PRIOR_ERROR };
        (seen > 0.0).then(|| Self { chunk: chunk / seen, ..Self::with_prior(prior, error) })
    }

    /// Returns true if the worker's own steps suffice, so that its own fit is relied on.
    pub fn is_telling(&self) -> bool {
        self.with_prefill.steps >= TELLING
    }

    /// Returns true if the last step with prefill should update the equals.
    pub fn is_lesson(&self) -> bool {
        let steps = self.with_prefill.steps;
        steps > 0 && (steps < TELLING || steps.is_multiple_of(LESSON))
    }

    /// Takes over the prior of equal workers, unless the own fit is relied on. Otherwise an unused worker would count
    /// as slow because it gets no requests, and get none because it counts as slow.
    pub fn take_after(&mut self, equals: &Fit) {
        if !self.is_telling() {
            (self.prior, self.prior_error) = (equals.prior, equals.prior_error);
            self.chunk = self.chunk.max(equals.chunk);
            self.solve();
        }
    }

    /// Takes in a worker's own summary of its speed; used until steps with prefill were seen.
    pub fn observe_state(&mut self, state: &EngineState) {
        let told = state.prefill_tokens_per_second;
        if self.with_prefill.steps == 0 && self.prior_error == PRIOR_ERROR && (1e-3..1e9).contains(&told) {
            self.prior = SHAPE.map(|unit| unit / told);
            let step = state.step_seconds;
            if self.decode_only.steps == 0 && (1e-7..1e5).contains(&step) {
                // The reported step may have held prefill.
                self.prior[0] = self.prior[0].min(step);
            }
            self.solve();
        }
    }

    /// Takes in one step: its tokens and its duration, unless its figures are implausible.
    pub fn observe(&mut self, batch: &Batch) {
        let features = features(batch);
        let seconds = batch.seconds;
        let is_sane = features.iter().all(|value| (0.0..1e15).contains(value)) && (1e-7..1e5).contains(&seconds);
        if !is_sane || batch.prefill_tokens == 0 && batch.decodes == 0 {
            return;
        }
        let expected = dot(&self.now, &features);
        let signed = (seconds / expected - 1.0).clamp(-1.0, 1.0);
        let error = signed.abs();
        if batch.prefill_tokens > 0 {
            self.chunk = (self.chunk * CHUNK.1).max(f64::from(batch.prefill_tokens)).max(1.0);
        }
        let memory = if batch.prefill_tokens > 0 { &mut self.with_prefill } else { &mut self.decode_only };
        let usual = (1.25 * self.error).max(0.02);
        let trust = if memory.steps < JUDGED_AFTER { 1.0 } else { (OUTLIER * usual / error.max(1e-9)).min(1.0) };
        if memory.steps >= JUDGED_AFTER {
            self.error += (error - self.error) / 64.0;
            self.drift += (signed - self.drift) / 32.0;
        }
        let scale = seconds.max(expected);
        let forget = if self.drift.abs() > DRIFT * usual { FORGET_FAST } else { FORGET };
        memory.add(&features, seconds, trust / (scale * scale), forget);
        self.solve();
    }

    /// Seconds to compute `uncached` prompt tokens after `context` cached ones.
    pub fn prefill_seconds(&self, uncached: usize, context: usize) -> f64 {
        let rows = uncached as f64;
        self.work_seconds(rows, rows * (context as f64 + rows / 2.0))
    }

    /// Seconds to compute `tokens` prompt tokens that attend to `attended` tokens in sum.
    pub fn work_seconds(&self, tokens: f64, attended: f64) -> f64 {
        let [base, token, pair, ..] = self.now;
        tokens * (token + base / self.chunk) + pair * attended
    }

    /// Seconds of a step with `decoding` sequences in decode that have `context_tokens` tokens in sum.
    pub fn step_seconds(&self, decoding: f64, context_tokens: f64) -> f64 {
        let [base, _, _, sequence, context] = self.now;
        base + sequence * decoding + context * context_tokens
    }

    /// Prompt tokens that a full step of the worker prefills (chunk), as observed.
    pub fn chunk(&self) -> f64 {
        self.chunk
    }

    /// Present coefficients: d, a, b, e, f of the module header.
    pub fn coefficients(&self) -> Coefficients {
        self.now
    }

    /// Returns true if there is more than a guess: steps of the worker or of equals, or a summary by the worker.
    pub fn is_known(&self) -> bool {
        self.steps() > 0 || self.prior != SHAPE.map(|unit| unit * UNKNOWN)
    }

    /// Number of steps that the fit has taken in.
    pub fn steps(&self) -> u32 {
        self.with_prefill.steps.saturating_add(self.decode_only.steps)
    }

    /// Solves for the coefficients that explain the memory best, with a ridge towards the prior. In units of the prior.
    fn solve(&mut self) {
        let mut products = [[0.0; 5]; 5];
        let mut targets = [0.0; 5];
        let (with, without) = (&self.with_prefill, &self.decode_only);
        for (i, row) in products.iter_mut().enumerate() {
            targets[i] = (with.targets[i] + without.targets[i]) * self.prior[i];
            for (j, product) in row.iter_mut().enumerate() {
                *product = (with.products[i][j] + without.products[i][j]) * self.prior[i] * self.prior[j];
            }
        }
        // A prior of the right shape and the wrong size is only rescaled.
        let all: f64 = products.iter().flatten().sum();
        let vouched = if self.prior_error < PRIOR_ERROR { VOUCHED } else { 0.0 };
        let size = (targets.iter().sum::<f64>() + vouched) / (all + vouched);
        let size = if all > 0.0 { size.max(1e-6) } else { 1.0 };
        let ridge = (NOISE / (self.prior_error * size)).powi(2);
        for i in 0..5 {
            products[i][i] += ridge;
            targets[i] += ridge * size;
        }
        let solved = non_negative(&products, &targets);
        self.now = std::array::from_fn(|at| solved[at] * self.prior[at]);
    }
}

fn features(batch: &Batch) -> [f64; 5] {
    let (prefill, decodes) = (f64::from(batch.prefill_tokens), f64::from(batch.decodes));
    [1.0, prefill, batch.prefill_context, decodes, batch.decode_context as f64]
}

fn dot(a: &[f64; 5], b: &[f64; 5]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>().max(1e-9)
}

/// Solves `products · x = targets` with `x ≥ 0`: negative results are held at 0, the most negative first.
fn non_negative(products: &[[f64; 5]; 5], targets: &[f64; 5]) -> [f64; 5] {
    let mut held = [false; 5];
    loop {
        let x = solve_symmetric(products, targets, &held);
        let worst = (0..5).filter(|at| x[*at] < 0.0).min_by(|a, b| x[*a].total_cmp(&x[*b]));
        match worst {
            Some(at) => held[at] = true,
            None => return x,
        }
    }
}

/// Cholesky over the coefficients not held at 0; the matrix is positive definite by its ridge.
fn solve_symmetric(products: &[[f64; 5]; 5], targets: &[f64; 5], held: &[bool; 5]) -> [f64; 5] {
    let mut lower = [[0.0; 5]; 5];
    let mut x = [0.0; 5];
    for i in 0..5 {
        for j in 0..=i {
            let entry = if held[i] || held[j] { f64::from(u8::from(i == j)) } else { products[i][j] };
            let rest = entry - (0..j).map(|k| lower[i][k] * lower[j][k]).sum::<f64>();
            lower[i][j] = if i == j { rest.max(f64::MIN_POSITIVE).sqrt() } else { rest / lower[j][j] };
        }
        let target = if held[i] { 0.0 } else { targets[i] };
        x[i] = (target - (0..i).map(|k| lower[i][k] * x[k]).sum::<f64>()) / lower[i][i];
    }
    for i in (0..5).rev() {
        x[i] = (x[i] - (i + 1..5).map(|k| lower[k][i] * x[k]).sum::<f64>()) / lower[i][i];
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use proptest::prelude::*;

    /// 12 ms + 71 µs per prefill token + 1.35 ns per (token × context) + 40 µs per decoding sequence + 16 ns per context token.
    const ENGINE: Coefficients = [0.012, 71e-6, 1.35e-9, 40e-6, 16e-9];

    fn seconds(engine: &Coefficients, batch: &Batch) -> f64 {
        dot(engine, &features(batch))
    }

    /// Chat-like steps: 5 to 60 sequences decode at 1k to 20k tokens; two of three steps prefill a part of a prompt.
    fn step(random: &mut Random, engine: &Coefficients, noise: f64) -> Batch {
        let decodes = 5 + random.below(56) as u32;
        let decode_context = u64::from(decodes) * (1000 + random.below(19_000));
        let prefill_tokens = if random.below(3) < 2 { 100 + random.below(8000) as u32 } else { 0 };
        let context = f64::from(prefill_tokens) / 2.0 + random.below(40_000) as f64;
        let prefill_context = f64::from(prefill_tokens) * context;
        let mut batch = Batch { prefill_tokens, prefill_context, decodes, decode_context, seconds: 0.0 };
        batch.seconds = seconds(engine, &batch) * (1.0 + noise * random.normal()).max(0.3);
        batch
    }

    #[track_caller]
    fn close(fit: &Fit, engine: &Coefficients, tolerance: f64) {
        let near = |what: &str, got: f64, truth: f64| {
            assert!((got / truth - 1.0).abs() < tolerance, "{what}: {got} for {truth}, {:?}", fit.coefficients());
        };
        for (uncached, context) in [(500, 0), (4000, 8000), (12_000, 0), (2000, 80_000), (60_000, 20_000)] {
            let rows = uncached as f64;
            let truth = rows * (engine[1] + engine[0] / fit.chunk()) + engine[2] * rows * (context as f64 + rows / 2.0);
            near("prefill", fit.prefill_seconds(uncached, context), truth);
        }
        for (decoding, tokens) in [(8.0, 80_000.0), (20.0, 200_000.0), (60.0, 900_000.0)] {
            let truth = engine[0] + engine[3] * decoding + engine[4] * tokens;
            near("step", fit.step_seconds(decoding, tokens), truth);
        }
    }

    #[test]
    fn an_engine_is_recovered_under_noise() {
        for seed in 1..=5 {
            let (mut random, mut fit) = (Random::new(seed), Fit::default());
            (0..2000).for_each(|_| fit.observe(&step(&mut random, &ENGINE, 0.1)));
            close(&fit, &ENGINE, 0.05);
        }
    }

    #[test]
    fn outliers_are_not_believed() {
        let (mut random, mut fit) = (Random::new(7), Fit::default());
        for at in 0..3000 {
            let mut batch = step(&mut random, &ENGINE, 0.1);
            batch.seconds *= if at % 50 == 49 { 20.0 } else { 1.0 };
            fit.observe(&batch);
        }
        close(&fit, &ENGINE, 0.1);
    }

    #[test]
    fn a_worker_that_slows_down_is_followed() {
        let (mut random, mut fit) = (Random::new(3), Fit::default());
        (0..1000).for_each(|_| fit.observe(&step(&mut random, &ENGINE, 0.1)));
        let slow = ENGINE.map(|coefficient| 2.0 * coefficient);
        (0..3000).for_each(|_| fit.observe(&step(&mut random, &slow, 0.1)));
        close(&fit, &slow, 0.1);
    }

    #[test]
    fn decodes_do_not_wash_out_what_is_known_of_prefill() {
        let (mut random, mut fit) = (Random::new(5), Fit::default());
        (0..1500).for_each(|_| fit.observe(&step(&mut random, &ENGINE, 0.1)));
        let before = fit.prefill_seconds(12_000, 0);
        for _ in 0..20_000 {
            let mut batch = Batch { prefill_tokens: 0, prefill_context: 0.0, ..step(&mut random, &ENGINE, 0.0) };
            batch.seconds = seconds(&ENGINE, &batch) * (1.0 + 0.1 * random.normal()).max(0.3);
            fit.observe(&batch);
        }
        let after = fit.prefill_seconds(12_000, 0);
        assert!((after / before - 1.0).abs() < 0.05, "{before} then {after}");
    }

    #[test]
    fn a_newcomer_is_taken_for_its_equals() {
        let (mut random, mut fit) = (Random::new(9), Fit::default());
        assert!(Fit::like([&fit].into_iter()).is_none(), "who has seen nothing tells nothing");
        (0..2000).for_each(|_| fit.observe(&step(&mut random, &ENGINE, 0.1)));
        let newcomer = Fit::like([&fit, &Fit::default()].into_iter()).expect("one tells");
        close(&newcomer, &ENGINE, 0.06);
    }

    #[test]
    fn one_that_nobody_uses_is_not_taken_for_slow() {
        let (mut random, mut used, mut idle) = (Random::new(9), Fit::default(), Fit::default());
        (0..200).for_each(|_| used.observe(&step(&mut random, &ENGINE, 0.1)));
        idle.take_after(&Fit::like([&used].into_iter()).expect("one tells"));
        close(&idle, &ENGINE, 0.15);
        let before = used.coefficients();
        used.take_after(&Fit::default());
        assert_eq!(used.coefficients(), before, "who knows himself does not ask");
    }

    #[test]
    fn the_first_step_of_one_tells_of_its_equals() {
        let (mut random, mut used, mut idle) = (Random::new(2), Fit::default(), Fit::default());
        used.observe(&step(&mut random, &ENGINE, 0.1));
        assert!(used.is_lesson());
        idle.take_after(&Fit::like([&used, &idle].into_iter()).expect("one tells"));
        let (near, truth) = (idle.prefill_seconds(4000, 0), 4000.0 * (ENGINE[1] + ENGINE[0] / idle.chunk()));
        assert!((0.5..2.0).contains(&(near / truth)), "{near} for {truth}");
        assert!((0.2..5.0).contains(&(idle.step_seconds(8.0, 80_000.0) / used.step_seconds(8.0, 80_000.0))));
    }

    #[test]
    fn one_odd_step_does_not_make_an_equal_slow() {
        let (mut random, mut used, mut idle) = (Random::new(6), Fit::default(), Fit::default());
        (0..200).for_each(|_| used.observe(&step(&mut random, &ENGINE, 0.1)));
        idle.take_after(&Fit::like([&used].into_iter()).expect("one tells"));
        let mut odd = step(&mut random, &ENGINE, 0.1);
        odd.seconds *= 4.0;
        idle.observe(&odd);
        assert!(idle.prefill_seconds(4000, 0) < 2.5 * used.prefill_seconds(4000, 0));
        // A slow worker is found out all the same.
        let slow = ENGINE.map(|coefficient| 4.0 * coefficient);
        (0..300).for_each(|_| idle.observe(&step(&mut random, &slow, 0.1)));
        close(&idle, &slow, 0.15);
    }

    /// The first step that a worker ever reports may take a second.
    #[test]
    fn a_first_step_with_prefill_does_not_pass_for_one_without() {
        let (mut random, mut fit) = (Random::new(4), Fit::default());
        let state = EngineState { prefill_tokens_per_second: 9000.0, step_seconds: 1.1, ..Default::default() };
        fit.observe_state(&state);
        // Mostly decodes of few sequences, as under load from agents.
        for at in 0..3000 {
            let mut batch = step(&mut random, &ENGINE, 0.0);
            batch.decodes = 1 + batch.decodes / 8;
            batch.decode_context = u64::from(batch.decodes) * 80_000;
            if at % 20 != 0 {
                (batch.prefill_tokens, batch.prefill_context) = (0, 0.0);
            }
            batch.seconds = seconds(&ENGINE, &batch) * (1.0 + 0.1 * random.normal()).max(0.3);
            fit.observe(&batch);
        }
        close(&fit, &ENGINE, 0.15);
    }

    #[test]
    fn a_summary_counts_until_steps_do() {
        let mut fit = Fit::default();
        assert!((fit.prefill_seconds(500, 0) / 0.67 - 1.0).abs() < 0.05, "{}", fit.prefill_seconds(500, 0));
        fit.observe_state(&EngineState { prefill_tokens_per_second: 250.0, step_seconds: 0.08, ..Default::default() });
        fit.observe_state(&EngineState { prefill_tokens_per_second: f64::NAN, ..Default::default() });
        assert!((2.0..2.3).contains(&fit.prefill_seconds(500, 0)), "{}", fit.prefill_seconds(500, 0));
        assert!((fit.step_seconds(0.0, 0.0) - 0.08).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn nonsense_makes_no_nonsense(batches in prop::collection::vec((any::<f64>(), any::<f64>(), any::<u32>(), any::<u32>(), any::<u64>()), 0..80)) {
            let mut fit = Fit::default();
            for (seconds, prefill_context, prefill_tokens, decodes, decode_context) in batches {
                fit.observe(&Batch { prefill_tokens, prefill_context, decodes, decode_context, seconds });
                for coefficient in fit.coefficients() {
                    prop_assert!(coefficient.is_finite() && coefficient >= 0.0, "{:?}", fit.coefficients());
                }
            }
        }
    }
}
