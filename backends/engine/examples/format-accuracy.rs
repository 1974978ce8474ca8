//! How far a CPU's logprobs are from those of the same weights in f32, for checkpoints in several formats.
//!
//!     cargo run --release -p penstock-engine --example format-accuracy -- TOKENS.json MODEL... [--int8] [--int4] [--kv-int8]
//!
//! `TOKENS.json` is a list of lists of token ids. For each model: perplexity in f32 (reference device, weights as stored) and on the CPU, and the mean |Δ logprob| over the
//! whole distribution and of the next token. `--int8` and `--int4` add each model with its matrices rounded at load, compared with f32 weights as they are stored,
//! `--kv-int8` with keys and values of 8 bits.

use std::path::Path;

use penstock_engine::Forward;
use penstock_engine::checkpoint::Checkpoint;
use penstock_engine::models::{KvBudget, Model, ModelLimits};
use penstock_kernels::cpu::{CpuDevice, CpuOptions};
use penstock_kernels::reference::ReferenceDevice;
use penstock_kernels::{Device, Held, KvFormat, Limits, PAGE_TOKENS, Span, StepBatch};

/// Most tokens of one text.
const TOKENS_MAX: usize = 512;

fn load(
    checkpoint: &Checkpoint,
    device: impl FnOnce(Limits) -> Box<dyn Device>,
    (held, kv_format): (Held, KvFormat),
) -> Model {
    let limits = ModelLimits {
        context_tokens: None,
        kv: KvBudget::Pages(TOKENS_MAX / PAGE_TOKENS),
        rows_max: TOKENS_MAX,
        sampled_max: TOKENS_MAX,
        held,
        kv_format,
    };
    let device = device(Limits { rows_max: TOKENS_MAX, sampled_max: TOKENS_MAX });
    Model::load(checkpoint, device, limits, &mut |_| {}).expect("the checkpoint loads")
}

/// Logprobs at every position of a text but the last, `[positions][vocab]`.
fn logprobs(model: &mut Model, tokens: &[u32]) -> Vec<Vec<f64>> {
    let table: Vec<u32> = (0..tokens.len().div_ceil(PAGE_TOKENS) as u32).collect();
    let spans = [Span { rows: 0..tokens.len(), context: tokens.len(), block_table: &table, adapter: None }];
    let sampled: Vec<usize> = (0..tokens.len() - 1).collect();
    let vocab = model.geometry().vocab_size;
    let logits = model
        .forward(&StepBatch { tokens, spans: &spans, sampled: &sampled, ..Default::default() }, None)
        .expect("a valid batch");
    let softmax = |row: &[f32]| {
        let highest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let total = row.iter().map(|&l| f64::from(l - highest).exp()).sum::<f64>().ln();
        row.iter().map(|&l| f64::from(l - highest) - total).collect()
    };
    logits.chunks_exact(vocab).map(softmax).collect()
}

fn main() {
    let (options, words): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|word| word.starts_with("--"));
    let [texts, models @ ..] = words.as_slice() else { panic!("TOKENS.json MODEL... [--int8] [--int4] [--kv-int8]") };
    let texts = std::fs::read(texts).expect("the token ids");
    let mut texts: Vec<Vec<u32>> = serde_json::from_slice(&texts).expect("a list of lists of ids");
    texts.iter_mut().for_each(|text| text.truncate(TOKENS_MAX));
    texts.retain(|text| text.len() > 1);
    println!("{:<28} {:>10} {:>10} {:>12} {:>12}", "model", "ppl f32", "ppl cpu", "mean all", "mean next");
    let asked = options.iter().map(|option| match option.as_str() {
        "--int8" => (Held::Int8, KvFormat::Own),
        "--int4" => (Held::Int4, KvFormat::Own),
        "--kv-int8" => (Held::Stored, KvFormat::Int8),
        other => panic!("{other} is none of the options --int8, --int4 and --kv-int8"),
    });
    let plain = (Held::Stored, KvFormat::Own);
    let forms: Vec<_> = std::iter::once(plain).chain(asked).collect();
    for (path, form) in models.iter().flat_map(|path| forms.iter().map(move |form| (path, *form))) {
        let checkpoint = Checkpoint::open(Path::new(path)).expect("a checkpoint");
        let mut exact = load(&checkpoint, |limits| Box::new(ReferenceDevice::new(limits)), plain);
        let cpu = |limits| -> Box<dyn Device> {
            Box::new(CpuDevice::new(CpuOptions::default(), limits).expect("the CPU's device"))
        };
        let mut rounded = load(&checkpoint, cpu, form);
        let (mut all, mut values, mut next, mut sums, mut count) = (0.0, 0usize, 0.0, [0.0; 2], 0usize);
        for text in &texts {
            let (want, got) = (logprobs(&mut exact, text), logprobs(&mut rounded, text));
            for (i, (want, got)) in want.iter().zip(&got).enumerate() {
                all += want.iter().zip(got).map(|(a, b)| (a - b).abs()).sum::<f64>();
                values += want.len();
                let token = text[i + 1] as usize;
                next += (want[token] - got[token]).abs();
                sums = [sums[0] - want[token], sums[1] - got[token]];
                count += 1;
            }
        }
        let [exact, rounded] = sums.map(|sum| (sum / count as f64).exp());
        let name = Path::new(path).file_name().map_or_else(|| path.clone(), |name| name.to_string_lossy().into_owned());
        let name = form.0.name().map_or(name.clone(), |held| format!("{name} {held}"));
        let name = if form.1 == KvFormat::Int8 { format!("{name} kv-int8") } else { name };
        let (all, next) = (all / values as f64, next / count as f64);
        println!("{name:<28} {exact:>10.4} {rounded:>10.4} {all:>12.5} {next:>12.5}");
    }
}
