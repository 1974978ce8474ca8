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
use penstock_engine::models::{KvBudget, Model, ModelLimits};
use penstock_engine::{Engine, EngineConfig};
use penstock_kernels::cpu::{CpuDevice, CpuOptions, Path};
use penstock_kernels::{Device, Held, Limits};
use penstock_proto::frames::{ChoiceStart, FinishReason, Generate, Sampling, Step};
use serde_json::json;

/// Context tokens in front of every decoding sequence.
const CONTEXT: usize = 128;
/// Number of steps whose median is a decode rate.
const STEPS: usize = 32;
/// Default batch sizes of decode.
const BATCHES: [usize; 3] = [1, 8, 32];
/// KV pages for the longest prompt ...
const PAGES: usize = 512;
/// ... and for each sequence of the largest batch.
const PAGES_EACH: usize = 16;

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

/// An engine, and the settings of its requests.
struct Bench {
    engine: Engine,
    started: Instant,
    vocab: u32,
    requests: u64,
}

impl Bench {
    /// Opens a request of `prompt` synthetic tokens; nothing stops it before `output` tokens.
    fn submit(&mut self, prompt: usize, output: u32) {
        self.requests += 1;
        let mix = |at: usize| (at as u64 * 2_654_435_761 + self.requests * 97_531) % u64::from(self.vocab / 2);
        self.engine.submit(Generate {
            request: self.requests,
            prompt: (0..prompt).map(|at| mix(at) as u32).collect(),
            choices: vec![ChoiceStart { index: 0, emitted: Vec::new() }],
            sampling: Some(Sampling {
                top_p: 1.0,
                repetition_penalty: 1.0,
                max_tokens: output,
                logprobs: -1,
                prompt_logprobs: -1,
                ..Sampling::default()
            }),
            ..Generate::default()
        });
    }

    /// Runs one step; returns its result and the seconds it took.
    fn step(&mut self) -> Result<(Step, f64), Box<dyn Error>> {
        let (started, begun) = (self.started, Instant::now());
        let step = self.engine.step(&move || started.elapsed());
        let failed = |finish: &&penstock_proto::frames::Finish| finish.reason == FinishReason::Failed as i32;
        match step.outputs.iter().filter_map(|output| output.finish.as_ref()).find(failed) {
            Some(finish) => Err(finish.message.clone().into()),
            None => Ok((step, begun.elapsed().as_secs_f64())),
        }
    }

    /// Steps until no sequence is left; returns the seconds.
    fn finish(&mut self) -> Result<f64, Box<dyn Error>> {
        let mut seconds = 0.0;
        while !self.engine.is_empty() {
            seconds += self.step()?.1;
        }
        Ok(seconds)
    }

    /// Prefill rate of one prompt, in tokens per second.
    fn prefill(&mut self, tokens: usize) -> Result<f64, Box<dyn Error>> {
        let mut rates = Vec::new();
        for _ in 0..3 {
            self.submit(tokens, 1);
            rates.push(tokens as f64 / self.finish()?);
        }
        Ok(median(rates))
    }

    /// Decode rate of `sequences` sequences in one batch, in tokens per second.
    fn decode(&mut self, sequences: usize) -> Result<f64, Box<dyn Error>> {
        // Early sequences decode while late ones are still in prefill, so the output is longer than the measured steps
        // by the steps of prefill.
        let output = STEPS + 64 + sequences * CONTEXT / 256;
        (0..sequences).for_each(|_| self.submit(CONTEXT, output as u32));
        let mut rates = Vec::new();
        while rates.len() < STEPS {
            if self.engine.is_empty() {
                return Err(format!("{sequences} sequences never decoded together for {STEPS} steps").into());
            }
            let (step, seconds) = self.step()?;
            // Earlier steps still contain prefill.
            if step.outputs.len() == sequences && step.outputs.iter().all(|output| output.at > 0) {
                rates.push(sequences as f64 / seconds);
            }
        }
        self.finish()?;
        Ok(median(rates))
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
        kv: KvBudget::Pages(PAGES.max(PAGES_EACH * sequences_max)),
        rows_max: limits.rows_max,
        sampled_max: limits.sampled_max,
        held: Held::Stored,
    };
    let model = Model::load(&checkpoint, Box::new(device), limits, &mut |_| {})?;
    let load = started.elapsed().as_secs_f64();
    let config = EngineConfig {
        sequences_max,
        batch_tokens: args.batch_tokens,
        chunk_tokens: args.batch_tokens,
        prefix_cache: false,
        // Prefill is not throttled: the measured batches contain decode only.
        prefill_seconds_max: 0.0,
        ..EngineConfig::default()
    };
    let vocab = checkpoint.config().vocab_size as u32;
    drop(checkpoint);
    let mut bench = Bench { engine: Engine::new(Box::new(model), &config), started, vocab, requests: 0 };
    bench.prefill(64)?;
    let mut report = json!({
        "engine": "penstock",
        "threads": args.threads,
        "device": name,
        "load_s": round(load),
        "prefill_512": round(bench.prefill(512)?),
        "prefill_2048": round(bench.prefill(2048)?),
    });
    for batch in args.batches {
        report[format!("decode_b{batch}")] = round(bench.decode(batch)?).into();
    }
    report["rss_mib"] = peak_memory_mib().into();
    println!("{report}");
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
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
