//! Throughput of an encoder on this machine: texts of equal length through the whole engine.
//!
//! `encoder-bench FOLDER THREADS LENGTH,LENGTH… [ROUNDS]` loads a checkpoint, and for each length computes texts of as many synthetic tokens, 4096 tokens in all or
//! 16 texts, in steps of 512 tokens or of the longest text, ROUNDS times (3). Prints one JSON line: texts and tokens per second, the best round of each.
#![forbid(unsafe_code)]

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use penstock_engine::checkpoint::Checkpoint;
use penstock_engine::models::{KvBudget, Model, ModelLimits};
use penstock_engine::{Engine, EngineConfig};
use penstock_kernels::cpu::{CpuDevice, CpuOptions};
use penstock_kernels::{Held, KvFormat, Limits};
use penstock_proto::frames::{ChoiceStart, Generate, Pooling};
use serde_json::json;

/// Tokens of all texts of one length, and least number of texts.
const TOKENS: usize = 4096;
const TEXTS_MIN: usize = 16;
/// Rows of a step, unless a text is longer.
const ROWS: usize = 512;

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [folder, threads, lengths, rest @ ..] = words.as_slice() else {
        return Err("encoder-bench FOLDER THREADS LENGTH,LENGTH… [ROUNDS]".into());
    };
    let lengths = lengths.split(',').map(str::parse).collect::<Result<Vec<usize>, _>>()?;
    let rounds: usize = rest.first().map_or(Ok(3), |rounds| rounds.parse())?;
    let rows = lengths.iter().copied().fold(ROWS, usize::max);
    let checkpoint = Checkpoint::open(Path::new(folder))?;
    let options = CpuOptions { threads: threads.parse()?, ..CpuOptions::default() };
    let device = CpuDevice::new(options, Limits { rows_max: rows, sampled_max: 32 })?;
    let limits = ModelLimits {
        context_tokens: None,
        kv: KvBudget::Pages(rows / 32 + 32),
        rows_max: rows,
        sampled_max: 32,
        held: Held::Stored,
        kv_format: KvFormat::Own,
    };
    let model = Model::load(&checkpoint, Box::new(device), limits, &mut |_| {})?;
    let name = model.device().info().name;
    let config = EngineConfig { batch_tokens: rows, ..EngineConfig::default() };
    let mut engine = Engine::new(Box::new(model), &config);
    let started = Instant::now();
    let clock = move || started.elapsed();
    let mut found = Vec::new();
    for length in lengths {
        let (mut best, count) = (f64::INFINITY, (TOKENS / length.max(1)).max(TEXTS_MIN));
        for _ in 0..rounds {
            let began = Instant::now();
            (0..count as u64).for_each(|text| engine.submit(request(text, length, checkpoint.config().vocab_size)));
            let mut ended = 0;
            while engine.has_work() {
                let outputs = engine.step(&clock).outputs;
                ended += outputs.iter().filter(|output| !output.vector.is_empty()).count();
            }
            if ended != count {
                return Err(format!("{ended} of {count} texts have a vector").into());
            }
            best = best.min(began.elapsed().as_secs_f64());
        }
        let (texts, tokens) = (count as f64 / best, (count * length) as f64 / best);
        found.push(json!({"length": length, "texts_per_second": texts, "tokens_per_second": tokens}));
    }
    println!("{}", json!({"device": name, "rows": rows, "found": found}));
    Ok(())
}

fn request(text: u64, length: usize, vocab: usize) -> Generate {
    Generate {
        request: text + 1,
        prompt: (0..length).map(|at| ((text as usize * 31 + at * 7) % (vocab - 10) + 5) as u32).collect(),
        choices: vec![ChoiceStart::default()],
        pooling: Pooling::Mean as i32,
        ..Generate::default()
    }
}
