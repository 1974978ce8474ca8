//! How fast a worker is: one linear model of the time of a step, fitted online to what its steps report.
//!
//! ```text
//! step seconds = d + a·prefill tokens + b·Σ(prefill token × context) + e·decoding sequences + f·Σ context of decodes
//! ```
//! Least squares of the relative error, as noise is relative. Steps with prefill and steps without are remembered apart, each with
//! its own forgetting: a night of decodes does not wash out what is known of prefill. Steps far off the model (a page fault, a
//! neighbour's burst) count less. What data says nothing about stays near a prior in the same proportion: that of workers on an equal
//! device, else the shape of a transformer, scaled to what was seen. Coefficients are never negative.

use penstock_proto::frames::{Batch, EngineState};

/// d, a, b, e, f of the module header.
pub type Coefficients = [f64; 5];

/// Share of the past that a step leaves: about the last five hundred of a kind count.
const FORGET: f64 = 0.998;
/// The same while all steps are off to one side: the worker is not what it was.
const FORGET_FAST: f64 = 0.97;
/// Mean signed error, in usual errors, that says so.
const DRIFT: f64 = 0.6;
/// Relative noise that the prior's weight is counted in.
const NOISE: f64 = 0.1;
/// Relative error of the prior's proportions: anything goes, if data says so.
const PRIOR_ERROR: f64 = 1.0;
/// The same for a prior taken from equal workers.
const PEERS_ERROR: f64 = 0.3;
/// Steps of a kind before one is judged an outlier.
const JUDGED_AFTER: u32 = 32;
/// Errors above this many usual ones count less.
const OUTLIER: f64 = 2.5;
/// Steps with prefill after which a worker is known by itself, and before which it is taken for its equals.
const TELLING: u32 = 64;
/// After that, the equals that still learn are told of every so many steps.
const LESSON: u32 = 16;
/// Steps for which equals vouch, where they are known: a first step that is a lucky one, or a page fault, does not resize everything.
const VOUCHED: f64 = 4.0;
/// Seconds per prompt token that are assumed of a worker that nothing is known of.
const UNKNOWN: f64 = 1e-3;
/// Coefficients in units of a: a dense transformer, 12 ms, 71 µs, 1.35 ns, 40 µs, 16 ns.
const SHAPE: Coefficients = [170.0, 1.0, 1.9e-5, 0.56, 2.2e-4];
/// Rows of a step's prefill before any was seen, and the share of the longest seen that a step leaves.
const CHUNK: (f64, f64) = (512.0, 0.999);

/// Sums over past steps of one kind.
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

/// See the module header.
#[derive(Clone, Copy, Debug)]
pub struct Fit {
    prior: Coefficients,
    prior_error: f64,
    with_prefill: Memory,
    decode_only: Memory,
    now: Coefficients,
    /// Usual relative error, smoothed.
    error: f64,
    /// Signed relative error, smoothed.
    drift: f64,
    /// Rows of prefill that a step takes when there are enough.
    chunk: f64,
}

impl Default for Fit {
    fn default() -> Self {
        Self::shaped(UNKNOWN)
    }
}

impl Fit {
    /// A worker of which only the time per prompt token is known, or guessed.
    fn shaped(token_seconds: f64) -> Self {
        Self::with_prior(SHAPE.map(|unit| unit * token_seconds), PRIOR_ERROR)
    }

    fn with_prior(prior: Coefficients, prior_error: f64) -> Self {
        let (with_prefill, decode_only) = Default::default();
        Self { prior, prior_error, with_prefill, decode_only, now: prior, error: 0.3, drift: 0.0, chunk: CHUNK.0 }
    }

    /// A worker of which nothing was seen yet, on a device like that of `peers`: their mean, by what was seen of each. The first step
    /// of the first of them tells more than nothing: how large a guess about all of them is wrong.
    pub fn like<'a>(peers: impl Iterator<Item = &'a Fit>) -> Option<Self> {
        let (mut sum, mut chunk, mut seen) = ([0.0; 5], 0.0, 0.0);
        for peer in peers {
            let steps = f64::from(peer.with_prefill.steps.min(TELLING));
            sum.iter_mut().zip(peer.now).for_each(|(sum, more)| *sum += steps * more);
            chunk += steps * peer.chunk;
            seen += steps;
        }
        // Nothing is excluded by a peer whose step showed no cost of something.
        let prior = std::array::from_fn(|at| (sum[at] / seen).max(SHAPE[at] * sum[1] / seen * 1e-3));
        let error = if seen >= f64::from(TELLING) { PEERS_ERROR } else { PRIOR_ERROR };
        (seen > 0.0).then(|| Self { chunk: chunk / seen, ..Self::with_prior(prior, error) })
    }

    /// Whether this worker is known by itself.
    pub fn is_telling(&self) -> bool {
        self.with_prefill.steps >= TELLING
    }

    /// Whether its last step with prefill is one that its equals are told of.
    pub fn is_lesson(&self) -> bool {
        let steps = self.with_prefill.steps;
        steps > 0 && (steps < TELLING || steps.is_multiple_of(LESSON))
    }

    /// A worker that has not told much itself is taken to be as fast as its equals: else it would be taken for slow because nobody
    /// sends it anything, and be sent nothing because it is taken for slow.
    pub fn take_after(&mut self, equals: &Fit) {
        if !self.is_telling() {
            (self.prior, self.prior_error) = (equals.prior, equals.prior_error);
            self.chunk = self.chunk.max(equals.chunk);
            self.solve();
        }
    }

    /// Takes in a worker's own summary; used as long as no steps with prefill were seen.
    pub fn observe_state(&mut self, state: &EngineState) {
        let told = state.prefill_tokens_per_second;
        if self.with_prefill.steps == 0 && self.prior_error == PRIOR_ERROR && (1e-3..1e9).contains(&told) {
            self.prior = SHAPE.map(|unit| unit / told);
            let step = state.step_seconds;
            if self.decode_only.steps == 0 && (1e-7..1e5).contains(&step) {
                // The step may have had prefill in it.
                self.prior[0] = self.prior[0].min(step);
            }
            self.solve();
        }
    }

    /// Takes in one step.
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

    /// Seconds to compute `uncached` prompt tokens after `context` that are there.
    pub fn prefill_seconds(&self, uncached: usize, context: usize) -> f64 {
        let rows = uncached as f64;
        self.work_seconds(rows, rows * (context as f64 + rows / 2.0))
    }

    /// Seconds to compute so many prompt tokens that attend to so many in sum.
    pub fn work_seconds(&self, tokens: f64, attended: f64) -> f64 {
        let [base, token, pair, ..] = self.now;
        tokens * (token + base / self.chunk) + pair * attended
    }

    /// Seconds of a step in which so many sequences decode, with so many tokens in sum.
    pub fn step_seconds(&self, decoding: f64, context_tokens: f64) -> f64 {
        let [base, _, _, sequence, context] = self.now;
        base + sequence * decoding + context * context_tokens
    }

    /// Rows of prefill in a full step.
    pub fn chunk(&self) -> f64 {
        self.chunk
    }

    /// As fitted now: d, a, b, e, f of the module header.
    pub fn coefficients(&self) -> Coefficients {
        self.now
    }

    /// Whether it is more than a guess: steps were seen, of its own or of equals, or the worker has said how fast it is.
    pub fn is_known(&self) -> bool {
        self.steps() > 0 || self.prior != SHAPE.map(|unit| unit * UNKNOWN)
    }

    /// Steps seen.
    pub fn steps(&self) -> u32 {
        self.with_prefill.steps.saturating_add(self.decode_only.steps)
    }

    /// The coefficients that explain the memory best, near the prior where it says nothing. In units of the prior.
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
        // A prior of the right shape and the wrong size is only resized.
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

/// Solves `products · x = targets` with `x ≥ 0`: what comes out negative is held at 0, the most negative first.
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

/// Cholesky over what is not held at 0; the matrix is positive definite by its ridge.
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
        // One that is slow is found out all the same.
        let slow = ENGINE.map(|coefficient| 4.0 * coefficient);
        (0..300).for_each(|_| idle.observe(&step(&mut random, &slow, 0.1)));
        close(&idle, &slow, 0.15);
    }

    /// The first thing that a worker ever says may be about a step of a second.
    #[test]
    fn a_first_step_with_prefill_does_not_pass_for_one_without() {
        let (mut random, mut fit) = (Random::new(4), Fit::default());
        let state = EngineState { prefill_tokens_per_second: 9000.0, step_seconds: 1.1, ..Default::default() };
        fit.observe_state(&state);
        // Mostly decodes of few sequences, as in front of agents.
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
