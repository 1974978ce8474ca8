//! Arbitrary frames: the engine does not panic, every choice of a request ends, and all pages are freed.

use penstock_engine::{Engine, EngineConfig, Geometry};
use penstock_proto::frames::{BadWord, Cancel, ChoiceStart, Generate, LogitBias, Sampling, Window};
use penstock_sim::FakeForward;
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::time::Duration;

fn float() -> impl Strategy<Value = f32> {
    prop_oneof![
        30 => prop::sample::select(vec![0.0, 0.5, 1.0]),
        1 => prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MIN_POSITIVE, -0.0, 1e30, -1e30]),
    ]
}

fn token() -> impl Strategy<Value = u32> {
    prop_oneof![60 => 0..40_u32, 1 => any::<u32>()]
}

fn count() -> impl Strategy<Value = u32> {
    prop_oneof![10 => 0..30_u32, 1 => any::<u32>()]
}

fn list_size() -> impl Strategy<Value = i32> {
    prop_oneof![20 => Just(-1), 20 => 0..5_i32, 1 => any::<i32>()]
}

prop_compose! {
    fn sampling()(
        (temperature, top_p, min_p, presence_penalty, frequency_penalty) in (float(), float(), float(), float(), float()),
        repetition_penalty in prop_oneof![4 => Just(1.0_f32), 4 => Just(1.3_f32), 1 => float()],
        (top_k, max_tokens, min_tokens, seed) in (count(), count(), count(), any::<u64>()),
        (logprobs, prompt_logprobs) in (list_size(), list_size()),
        logit_bias in vec((token(), float()).prop_map(|(token, bias)| LogitBias { token, bias }), 0..4),
        (stop_tokens, allowed_tokens) in (vec(token(), 0..4), vec(token(), 0..4)),
        logprob_tokens in vec(token(), 0..3),
        bad_words in vec(vec(token(), 0..3).prop_map(|tokens| BadWord { tokens }), 0..3),
    ) -> Sampling {
        Sampling {
            temperature, top_k, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty, logit_bias, seed,
            max_tokens, min_tokens, stop_tokens, logprobs, prompt_logprobs, allowed_tokens, bad_words, logprob_tokens,
            reasoning: None,
        }
    }
}

prop_compose! {
    fn generate()(
        (request, attempt, priority, window) in (0..4_u64, 0..3_u32, any::<i32>(), count()),
        prompt in prop_oneof![9 => vec(0..40_u32, 0..200), 1 => vec(token(), 0..200)],
        choices in vec((0..5_u32, vec(token(), 0..6)).prop_map(|(index, emitted)| ChoiceStart { index, emitted }), 0..4),
        sampling in prop::option::weighted(0.95, sampling()),
        salt in vec(any::<u8>(), 0..8),
        prefill_at in prop_oneof![20 => Just(""), 1 => Just("elsewhere")],
    ) -> Generate {
        let prefill_at = prefill_at.to_owned();
        Generate { request, attempt, prompt, choices, sampling, salt, priority, window, prefill_at, ..Default::default() }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn no_frame_breaks_the_engine(frames in vec((generate(), 0..4_usize, any::<u32>()), 1..8)) {
        let geometry = Geometry {
            vocab_size: 40, context_tokens: 160, pages: 9, rows_max: 64, sampled_max: 5, numerics: String::new(),
            ..Geometry::default()
        };
        let config = EngineConfig { choices_max: 4, waiting_max: 6, ..EngineConfig::default() };
        let mut engine = Engine::new(Box::new(FakeForward::new(geometry, 0)), &config);
        let mut open = BTreeSet::new();
        let mut rest = frames.into_iter();
        for number in 0.. {
            let frame = rest.next();
            let done = frame.is_none();
            if let Some((generate, steps, tokens)) = frame {
                let (request, choice) = (generate.request, generate.choices.first().map_or(0, |choice| choice.index));
                open.extend(generate.choices.iter().map(|choice| (request, choice.index)));
                engine.submit(generate);
                engine.window(&Window { request, choice, tokens });
                if steps == 3 {
                    engine.cancel(&Cancel { request, choices: vec![choice] });
                }
                (0..steps).for_each(|_| ended(&mut engine, &mut open));
            } else {
                (0..4).flat_map(|request| (0..5).map(move |choice| (request, choice)))
                    .for_each(|(request, choice)| engine.window(&Window { request, choice, tokens: u32::MAX }));
                ended(&mut engine, &mut open);
            }
            if done && engine.is_empty() {
                break;
            }
            prop_assert!(number < 20_000, "no end: {:?}", engine.state());
        }
        let state = engine.state();
        prop_assert_eq!((state.blocks_free, state.running, state.waiting), (state.blocks_total, 0, 0));
    }
}

fn ended(engine: &mut Engine, open: &mut BTreeSet<(u64, u32)>) {
    for output in engine.step(&|| Duration::ZERO).outputs {
        if output.finish.is_some() {
            open.remove(&(output.request, output.choice));
        }
    }
}
