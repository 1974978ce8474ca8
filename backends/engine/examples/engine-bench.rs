//! Throughput of the engine on this machine: the line of penstock in `bench/engine.sh`.
//!
//! `engine-bench FOLDER [--threads N] [--path NAME] [--batch-tokens N] [--decode N,N…]` loads a checkpoint and drives the whole engine
//! (scheduler, forward, sampler) with synthetic token ids, greedily, without prefix reuse. Prints one JSON line: prefill of 512 and 2048
//! tokens (median of three), decode at batch 1, 8 and 32, or those given, on a context of 128 (median step), load time, peak memory.
#![forbid(unsafe_code)]

use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

use penstock_engine::checkpoint::Checkpoint;
use penstock_engine::measure::Measure;
use penstock_engine::models::{KvBudget, Model, ModelLimits};
use penstock_kernels::cpu::{CpuDevice, CpuOptions, Path};
use penstock_kernels::{Device, Held, Limits};
use serde_json::json;

/// Context tokens in front of every decoding sequence.
const CONTEXT: usize = 128;
/// Lengths of the prompts whose prefill is timed.
const PROMPTS: [usize; 2] = [512, 2048];
/// Default batch sizes of decode.
const BATCHES: [usize; 3] = [1, 8, 32];

struct Args {
    folder: PathBuf,
    threads: usize,
    path: Path,
    batch_tokens: usize,
    batches: Vec<usize>,
}

impl Args {
    fn parse() -> Result<Self, Box<dyn Error>> {
        let (folder, batches) = (PathBuf::new(), BATCHES.to_vec());
        let mut args = Self { folder, threads: 0, path: Path::Auto, batch_tokens: 512, batches };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} needs a value"));
            match word.as_str() {
                "--threads" => args.threads = value()?.parse()?,
                "--batch-tokens" => args.batch_tokens = value()?.parse()?,
                "--decode" => args.batches = value()?.split(',').map(str::parse).collect::<Result<_, _>>()?,
                "--path" => {
                    let name = value()?;
                    let known = CpuDevice::paths_available();
                    args.path = known.into_iter().find(|path| path.name() == name).ok_or(format!("no path {name}"))?;
                }
                _ if word.starts_with('-') => return Err(format!("unknown option {word}").into()),
                _ => args.folder = word.into(),
            }
        }
        if args.folder.as_os_str().is_empty() {
            return Err(
                "usage: engine-bench FOLDER [--threads N] [--path NAME] [--batch-tokens N] [--decode N,N…]".into()
            );
        }
        Ok(args)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse()?;
    let started = Instant::now();
    let checkpoint = Checkpoint::open(&args.folder)?;
    let sequences_max = args.batches.iter().copied().max().ok_or("no batch is given")?;
    let limits = Limits { rows_max: args.batch_tokens.max(sequences_max), sampled_max: sequences_max };
    let device =
        CpuDevice::new(CpuOptions { threads: args.threads, path: args.path, ..CpuOptions::default() }, limits)?;
    let name = device.info().name;
    let limits = ModelLimits {
        context_tokens: Some(4096),
        kv: KvBudget::Pages(Measure::pages(&PROMPTS, &args.batches, CONTEXT, args.batch_tokens)),
        rows_max: limits.rows_max,
        sampled_max: limits.sampled_max,
        held: Held::Stored,
    };
    let model = Model::load(&checkpoint, Box::new(device), limits, &mut |_| {})?;
    let load = started.elapsed().as_secs_f64();
    drop(checkpoint);
    let clock = move || started.elapsed();
    let mut measure = Measure::new(Box::new(model), args.batch_tokens, sequences_max, &clock);
    measure.prefill(64)?;
    let mut report = json!({
        "engine": "penstock",
        "threads": args.threads,
        "device": name,
        "load_s": round(load),
    });
    for tokens in PROMPTS {
        report[format!("prefill_{tokens}")] = round(tokens as f64 / measure.prefill(tokens)?).into();
    }
    for batch in args.batches {
        report[format!("decode_b{batch}")] = round(batch as f64 / measure.decode(batch, CONTEXT)?).into();
    }
    report["rss_mib"] = peak_memory_mib().into();
    println!("{report}");
    Ok(())
}

fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// Peak resident memory, from /proc.
fn peak_memory_mib() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()? / 1024)
}
