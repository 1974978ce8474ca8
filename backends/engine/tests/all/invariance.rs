//! Batch invariance of whole models: on one path, a token's logits are the same bits however its sequence was computed.
//!
//! Variants: whole, in chunks of any size, among fifteen others, after another sequence's pages, on scattered pages.

use crate::common;

use common::weights::Golden;
use common::{Sequence, cpu, cpu_paths, devices, load_as, load_with, logits_of, step};
use penstock_engine::models::Model;
use penstock_engine::{Forward, Geometry, Pages};
use penstock_kernels::cpu::CpuDevice;
use penstock_kernels::{KvFormat, PAGE_TOKENS};

const CASES: [&str; 32] = [
    "llama-long",
    "mistral-long-window",
    "qwen3-mixed-windows",
    "qwen2-upper-windows",
    "qwen2moe-plain",
    "qwen3moe-shares",
    "qwen3moe-some-dense",
    "mixtral-long",
    "deepseek2-groups",
    "deepseek3-plain",
    "deepseek3-long",
    "gptoss-long",
    "gptoss-mxfp4",
    "gemma2-plain",
    "gemma3-plain",
    "gemma3-long-window",
    "phi3-long",
    "olmo2-plain",
    "smollm3-windows",
    "olmo3-yarn",
    "exaone4-windows",
    "ernie-bias",
    "granite-plain",
    "granite4-nope",
    "glm-quarter",
    "glm4-plain",
    "qwen3moe-gptq4",
    "mistral-awq4",
    "deepseek3-fp8-blocks",
    "qwen2-packed4-order",
    "qwen3-packed8-rows",
    "llama-w8a8",
];

/// Cases that are run with keys and values of 8 bits, too.
const ROUNDED_KV: [&str; 4] = ["llama-long", "qwen3-mixed-windows", "gptoss-long", "gemma3-long-window"];

/// Runs `check` for each case on each path with the logits of the whole prefill.
fn each(check: impl Fn(&mut Model, &[u32], &[Vec<f32>])) {
    let rounded = ROUNDED_KV.map(|case| (case, KvFormat::Int8));
    let cases: Vec<_> = CASES.map(|case| (case, KvFormat::Own)).into_iter().chain(rounded).collect();
    for (path, make) in devices() {
        for (case, kv_format) in &cases {
            let golden = Golden::named(case);
            let mut model = load_as(&golden.checkpoint(), &*make, (400, *kv_format), 704, golden.context);
            let whole = logits_of(&mut model, &golden.tokens, golden.tokens.len());
            println!("{path}, {case}, {kv_format:?}");
            check(&mut model, &golden.tokens, &whole);
        }
    }
}

#[track_caller]
fn assert_bits(got: &[Vec<f32>], want: &[Vec<f32>], first: usize, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: rows");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let differ = got.iter().zip(want).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        assert_eq!(differ, 0, "{what}: {differ} logits of position {} differ", first + i);
    }
}

#[test]
fn chunks_of_any_size() {
    each(|model, tokens, whole| {
        for chunk in [1, 7, 32, 100] {
            assert_bits(&logits_of(model, tokens, chunk), whole, 0, &format!("chunks of {chunk}"));
        }
    });
}

#[test]
fn a_batch_of_sixteen() {
    each(|model, tokens, whole| {
        // Sixteen sequences of different lengths, each cut at its own places, all in the same steps.
        let lengths: Vec<usize> = (0..16).map(|i| tokens.len() - (i * tokens.len()) / 20).collect();
        let most = tokens.len().div_ceil(PAGE_TOKENS) as u32;
        let mut sequences: Vec<Sequence> =
            lengths.iter().zip(0..).map(|(&n, i)| Sequence::new(&tokens[..n], i * most)).collect();
        let mut logits = vec![Vec::new(); 16];
        for round in 0.. {
            let mut budget = 704;
            let mut work = Vec::new();
            for (i, sequence) in sequences.iter_mut().enumerate() {
                let left = sequence.tokens.len() - sequence.computed;
                let take = [1, 40, 3, 17][(i + round) % 4].min(left).min(budget);
                budget -= take;
                if take > 0 {
                    work.push((i, sequence, take));
                }
            }
            if work.is_empty() {
                break;
            }
            let order: Vec<(usize, usize)> = work.iter().map(|(i, _, take)| (*i, *take)).collect();
            let mut work: Vec<_> = work.into_iter().map(|(_, sequence, take)| (sequence, take)).collect();
            let mut rows = step(model, &mut work).into_iter();
            for (i, take) in order {
                logits[i].extend(rows.by_ref().take(take));
            }
        }
        for (i, logits) in logits.iter().enumerate() {
            assert_bits(logits, &whole[..lengths[i]], 0, &format!("sequence {i} of 16"));
        }
    });
}

#[test]
fn cached_pages_of_another_sequence() {
    each(|model, tokens, whole| {
        let mut first = Sequence::new(tokens, 7);
        step(model, &mut [(&mut first, tokens.len())]);
        // The second sequence has the first's full pages of the common prefix, and pages of its own for the rest.
        for shared in [1, 2, (tokens.len() - 1) / PAGE_TOKENS] {
            let computed = shared * PAGE_TOKENS;
            let mut second = Sequence::new(tokens, 200);
            second.pages[..shared].copy_from_slice(&first.pages[..shared]);
            second.computed = computed;
            let rest = tokens.len() - computed;
            let logits = step(model, &mut [(&mut second, rest)]);
            assert_bits(&logits, &whole[computed..], computed, &format!("{shared} cached pages"));
        }
    });
}

#[test]
fn pages_that_were_carried_over() {
    each(|model, tokens, whole| {
        let mut first = Sequence::new(tokens, 7);
        step(model, &mut [(&mut first, tokens.len())]);
        // All full pages go out as bytes and come back as other pages: logits computed on them have the same bits.
        let shared = (tokens.len() - 1) / PAGE_TOKENS;
        let mut second = Sequence::new(tokens, 200);
        let Geometry { layers, page_bytes, .. } = model.geometry();
        for (from, to) in first.pages.iter().zip(&second.pages).take(shared) {
            for layer in 0..layers {
                let mut bytes = vec![0; page_bytes];
                model.read_page(layer, *from, &mut bytes);
                model.write_page(layer, *to, &bytes);
            }
        }
        second.computed = shared * PAGE_TOKENS;
        let rest = tokens.len() - second.computed;
        let logits = step(model, &mut [(&mut second, rest)]);
        assert_bits(&logits, &whole[tokens.len() - rest..], tokens.len() - rest, "carried pages");
    });
}

#[test]
fn scattered_pages() {
    each(|model, tokens, whole| {
        let mut sequence = Sequence::new(tokens, 0);
        for (i, page) in sequence.pages.iter_mut().enumerate() {
            *page = (i as u32 * 37 + 11) % 401 % 400;
        }
        let logits = step(model, &mut [(&mut sequence, tokens.len())]);
        assert_bits(&logits, whole, 0, "scattered pages");
    });
}

#[test]
fn any_number_of_threads() {
    for case in [
        "llama-long",
        "mixtral-long",
        "deepseek3-long",
        "gptoss-long",
        "gemma3-long-window",
        "gemma2-plain",
        "olmo2-bias",
    ] {
        any_number_of_threads_for(&Golden::named(case));
    }
}

fn any_number_of_threads_for(golden: &Golden) {
    let checkpoint = golden.checkpoint();
    for (path, one) in CpuDevice::paths_available().into_iter().zip(cpu_paths().into_iter().map(|(_, make)| make)) {
        let run = |make: &common::MakeDevice| {
            let mut model = load_with(&checkpoint, &**make, 32, 704, None);
            (logits_of(&mut model, &golden.tokens, 300), logits_of(&mut model, &golden.tokens[..40], 1))
        };
        let (whole, single) = run(&one);
        for threads in [2, 3] {
            let (threaded, threaded_single) = run(&cpu(path, threads));
            assert_bits(&threaded, &whole, 0, &format!("{} on {threads} threads", path.name()));
            assert_bits(&threaded_single, &single, 0, &format!("{} on {threads} threads, one by one", path.name()));
        }
    }
}
