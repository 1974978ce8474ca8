//! Ten thousand draws per case against a naive sampler: f64, a full sort, no shortcuts. Chi-square decides.

use penstock_engine::Params;
use penstock_engine::random::Draw;
use penstock_engine::sampler::{History, Sampler};
use penstock_sim::Random;
use std::collections::{HashMap, HashSet};

const DRAWS: u32 = 10_000;

fn plain() -> Params {
    Params {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        repetition_penalty: 1.0,
        logit_bias: Vec::new(),
        seed: 42,
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

/// Logits spread like a model's: a few favourites over a wide floor.
fn row(vocab: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    let mut uniform = || random.between(0, 1 << 20) as f32 / (1 << 20) as f32;
    (0..vocab).map(|_| 6.0 * uniform().powi(3) - 2.0).collect()
}

/// Earlier tokens, for the penalties: prompt 1, 2, 3 and output 3, 3, 4, 5.
fn said() -> (HashSet<u32>, HashMap<u32, u32>) {
    (HashSet::from([1, 2, 3]), HashMap::from([(3, 2), (4, 1), (5, 1)]))
}

/// Probabilities from a straightforward implementation.
fn naive(row: &[f32], params: &Params) -> Vec<f64> {
    let (prompt, counts) = said();
    let mut logits: Vec<f64> = row.iter().copied().map(f64::from).collect();
    for (token, bias) in &params.logit_bias {
        logits[*token as usize] += f64::from(*bias);
    }
    for (token, logit) in logits.iter_mut().enumerate() {
        let token = token as u32;
        let allowed = params.allowed_tokens.is_empty() || params.allowed_tokens.contains(&token);
        let early_stop = counts.values().sum::<u32>() < params.min_tokens as u32 && params.stop_tokens.contains(&token);
        if !allowed || early_stop {
            *logit = f64::NEG_INFINITY;
        }
        let penalty = f64::from(params.repetition_penalty);
        if prompt.contains(&token) || counts.contains_key(&token) {
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
        if let Some(count) = counts.get(&token) {
            *logit -= f64::from(params.frequency_penalty) * f64::from(*count) + f64::from(params.presence_penalty);
        }
        *logit /= f64::from(params.temperature);
    }
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    let keep = |order: &mut Vec<usize>, kept: usize| order.truncate(kept.max(1));
    if params.top_k > 0 {
        keep(&mut order, params.top_k as usize);
    }
    let weight = |token: usize| (logits[token] - logits[order[0]]).exp();
    let total: f64 = order.iter().map(|token| weight(*token)).sum();
    let mut mass = 0.0;
    let nucleus = order.iter().take_while(|token| {
        let inside = mass < f64::from(params.top_p) * total;
        mass += weight(**token);
        inside
    });
    let nucleus = if params.top_p < 1.0 { nucleus.count() } else { order.len() };
    let floor = order.iter().take_while(|token| weight(**token) >= f64::from(params.min_p)).count();
    let kept = &order[..nucleus.min(floor).max(1)];
    let total: f64 = kept.iter().map(|token| weight(*token)).sum();
    let mut probabilities = vec![0.0; row.len()];
    kept.iter().for_each(|token| probabilities[*token] = weight(*token) / total);
    probabilities
}

/// Distance of the draws from the probabilities: (statistic − degrees) / √(2·degrees), about normal when they agree.
fn distance(row: &[f32], params: &Params, probabilities: &[f64]) -> f64 {
    let (prompt, counts) = said();
    let history = History { prompt: &prompt, counts: &counts, output_tokens: 4, output: &[], allowed: None };
    let mut sampler = Sampler::default();
    let mut drawn = vec![0_u32; row.len()];
    for position in 0..DRAWS {
        let draw = Draw { seed: params.seed, choice: 0, position, draw: 0 };
        drawn[sampler.sample(row, params, history, draw).expect("a usable row") as usize] += 1;
    }
    let (mut statistic, mut bins) = (0.0, 0);
    let (mut rest_expected, mut rest_drawn) = (0.0, 0.0);
    for (count, probability) in drawn.iter().zip(probabilities) {
        let expected = probability * f64::from(DRAWS);
        assert!(*probability > 0.0 || *count == 0, "a token that is filtered out was drawn");
        if expected >= 8.0 {
            statistic += (f64::from(*count) - expected).powi(2) / expected;
            bins += 1;
        } else {
            rest_expected += expected;
            rest_drawn += f64::from(*count);
        }
    }
    if rest_expected >= 8.0 {
        statistic += (rest_drawn - rest_expected).powi(2) / rest_expected;
        bins += 1;
    }
    let degrees = f64::from((bins - 1).max(1));
    (statistic - degrees) / (2.0 * degrees).sqrt()
}

#[track_caller]
fn check(vocab: usize, change: impl Fn(&mut Params)) {
    for seed in [1, 2, 3] {
        let (row, mut params) = (row(vocab, seed), plain());
        params.seed = seed;
        change(&mut params);
        let distance = distance(&row, &params, &naive(&row, &params));
        assert!(distance < 4.5, "seed {seed}: {distance} sigma from the naive sampler");
    }
}

#[test]
fn temperature() {
    for temperature in [0.3, 0.7, 1.0, 1.8] {
        check(32, |p| p.temperature = temperature);
    }
    // More than one partial sum.
    check(3000, |p| p.temperature = 0.8);
}

#[test]
fn top_k() {
    for top_k in [1, 2, 5, 31, 100] {
        check(32, |p| p.top_k = top_k);
    }
    check(3000, |p| p.top_k = 400);
}

#[test]
fn top_p() {
    for top_p in [0.0, 0.1, 0.5, 0.8, 0.95, 0.999] {
        check(32, |p| p.top_p = top_p);
    }
    // The nucleus is far larger than the first guess of the fast path.
    check(3000, |p| (p.top_p, p.temperature) = (0.6, 2.0));
    check(3000, |p| (p.top_p, p.temperature) = (0.97, 2.0));
}

#[test]
fn min_p() {
    for min_p in [0.01, 0.1, 0.5, 1.0] {
        check(32, |p| p.min_p = min_p);
    }
    check(3000, |p| (p.min_p, p.temperature) = (0.02, 0.6));
}

#[test]
fn filters_together() {
    check(32, |p| (p.top_k, p.top_p, p.min_p, p.temperature) = (10, 0.9, 0.05, 0.8));
    check(3000, |p| (p.top_k, p.top_p, p.min_p, p.temperature) = (400, 0.95, 0.02, 1.3));
}

#[test]
fn penalties() {
    check(16, |p| p.repetition_penalty = 1.5);
    check(16, |p| p.repetition_penalty = 0.7);
    check(16, |p| p.presence_penalty = 1.2);
    check(16, |p| p.frequency_penalty = 0.9);
    check(16, |p| (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) = (1.2, -0.5, 0.4));
}

#[test]
fn biases_and_masks() {
    check(16, |p| p.logit_bias = vec![(3, 2.5), (7, -100.0)]);
    check(16, |p| p.allowed_tokens = vec![2, 3, 5, 7, 11]);
    check(16, |p| (p.stop_tokens, p.min_tokens) = (vec![0, 5, 9], 5));
    check(16, |p| (p.stop_tokens, p.min_tokens) = (vec![0, 5, 9], 4));
}

/// Check of the test itself: draws at one temperature are far from the probabilities of another.
#[test]
fn a_wrong_sampler_is_noticed() {
    let (row, mut params) = (row(32, 1), plain());
    params.temperature = 1.1;
    assert!(distance(&row, &params, &naive(&row, &plain())) > 6.0);
}

#[test]
fn ties_fall_to_the_lowest_ids() {
    let mut row = vec![1.0_f32; 40];
    (row[0], row[17]) = (0.5, 1.0);
    let (prompt, counts) = said();
    let history = History { prompt: &prompt, counts: &counts, output_tokens: 4, output: &[], allowed: None };
    let mut sampler = Sampler::default();
    let mut drawn = |params: &Params| -> HashSet<u32> {
        let draw = |position| Draw { seed: 1, choice: 0, position, draw: 0 };
        (0..500).map(|position| sampler.sample(&row, params, history, draw(position)).unwrap()).collect()
    };
    assert_eq!(drawn(&Params { temperature: 0.0, ..plain() }), HashSet::from([1]));
    assert_eq!(drawn(&Params { top_k: 3, ..plain() }), HashSet::from([1, 2, 3]));
    assert_eq!(drawn(&Params { top_p: 0.05, ..plain() }), HashSet::from([1, 2]));
}

#[test]
fn logprobs_are_raw_and_ranked() {
    let row = [0.0_f32, 2.0, 1.0, 2.0, -1.0];
    let total: f64 = row.iter().map(|v| f64::from(*v).exp()).sum();
    let want = |token: usize| (f64::from(row[token]) - total.ln()) as f32;
    let got = Sampler::default().logprobs(&row, 2, 4, &[]).unwrap();
    assert_eq!((got.rank, got.top_tokens.as_slice()), (3, [1, 3, 2, 0].as_slice()));
    assert!((got.logprob - want(2)).abs() < 1e-6);
    for (token, logprob) in got.top_tokens.iter().zip(&got.top_logprobs) {
        assert!((logprob - want(*token as usize)).abs() < 1e-6);
    }
    assert_eq!(Sampler::default().logprobs(&row, 3, 0, &[]).unwrap().rank, 2);
}

#[test]
fn named_tokens_take_the_place_of_the_best() {
    let row = [0.0, 1.0, f32::NEG_INFINITY, 3.0];
    let mut sampler = Sampler::default();
    let all = sampler.logprobs(&row, 3, 4, &[]).expect("finite");
    let named = sampler.logprobs(&row, 3, 4, &[1, 2, 0]).expect("finite");
    assert_eq!((named.logprob, named.rank), (all.logprob, all.rank));
    assert_eq!(named.top_tokens, [1, 0], "in their order, without what the model excludes");
    for (token, logprob) in named.top_tokens.iter().zip(&named.top_logprobs) {
        let at = all.top_tokens.iter().position(|other| other == token).expect("among the best four");
        assert_eq!(*logprob, all.top_logprobs[at]);
    }
}

#[test]
fn unusable_rows_are_errors() {
    let (prompt, counts) = said();
    let history = History { prompt: &prompt, counts: &counts, output_tokens: 4, output: &[], allowed: None };
    let draw = Draw { seed: 1, choice: 0, position: 0, draw: 0 };
    let bad = [
        (vec![0.0, f32::NAN, 0.0, 0.0, 0.0, 0.0], plain()),
        (vec![0.0, f32::INFINITY, 0.0, 0.0, 0.0, 0.0], plain()),
        (vec![f32::NEG_INFINITY; 6], plain()),
        (vec![1.0, f32::NEG_INFINITY, 0.0, 0.0, 0.0, 0.0], Params { allowed_tokens: vec![1], ..plain() }),
    ];
    for (row, params) in bad {
        assert!(Sampler::default().sample(&row, &params, history, draw).is_err(), "{row:?}");
    }
}

#[test]
fn a_bad_word_is_not_completed() {
    let (prompt, counts) = said();
    let draw = Draw { seed: 1, choice: 0, position: 0, draw: 0 };
    let row = [0.0, 1.0, 5.0, 3.0, 2.0, 4.0];
    let best = |output: &[u32], bad_words: &[&[u32]]| {
        let history = History { prompt: &prompt, counts: &counts, output_tokens: output.len(), output, allowed: None };
        let bad_words = bad_words.iter().map(|word| word.to_vec()).collect();
        let params = Params { temperature: 0.0, bad_words, ..plain() };
        Sampler::default().sample(&row, &params, history, draw)
    };
    assert_eq!(best(&[], &[&[2]]), Ok(5), "a word of one token");
    assert_eq!(best(&[], &[&[1, 2]]), Ok(2), "its last token alone is none");
    assert_eq!(best(&[7, 1], &[&[1, 2]]), Ok(5));
    assert_eq!(best(&[1, 7], &[&[1, 2]]), Ok(2), "the others stand right before it");
    assert_eq!(best(&[3, 1], &[&[3, 1, 2], &[1, 5], &[4, 3]]), Ok(3));
    assert_eq!(best(&[1], &[&[9, 9, 1, 2]]), Ok(2), "longer than what was said");
    let all: Vec<[u32; 1]> = (0..6).map(|token| [token]).collect();
    let all: Vec<&[u32]> = all.iter().map(|word| &word[..]).collect();
    assert!(best(&[], &all).is_err(), "nothing is left");
}
