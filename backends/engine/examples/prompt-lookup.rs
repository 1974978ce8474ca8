//! Gain and cost of prompt lookup on this machine: `prompt-lookup FOLDER [--threads N] [--path NAME] [--drafts N] [--rounds N]`.
//!
//! Loads a checkpoint and writes the same tokens with drafts and without, step by step in turns:
//! text that goes on as its prompt repeats, and text that does not repeat, for one sequence and for eight. Prints CPU time of decode per token, medians
//! over the rounds: on a machine that others use, the clock on the wall says more about them. The engine's own clock is CPU time too.
#![forbid(unsafe_code)]

use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use penstock_engine::checkpoint::Checkpoint;
use penstock_engine::models::{KvBudget, Model, ModelLimits};
use penstock_engine::{Engine, EngineConfig};
use penstock_kernels::cpu::{CpuDevice, CpuOptions, Path};
use penstock_kernels::{Held, KvFormat, Limits};
use penstock_proto::frames::{ChoiceStart, Generate, Sampling};

/// Output tokens of a sequence.
const TOKENS: u32 = 400;
/// Tokens of a prompt.
const PROMPT: usize = 256;
/// Sequences that run together.
const BATCHES: [usize; 2] = [1, 8];

struct Args {
    folder: PathBuf,
    threads: usize,
    path: Path,
    drafts: usize,
    rounds: usize,
}

impl Args {
    fn parse() -> Result<Self, Box<dyn Error>> {
        let mut args = Self { folder: PathBuf::new(), threads: 1, path: Path::Auto, drafts: 8, rounds: 7 };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} needs a value"));
            match word.as_str() {
                "--threads" => args.threads = value()?.parse()?,
                "--drafts" => args.drafts = value()?.parse()?,
                "--rounds" => args.rounds = value()?.parse()?,
                "--path" => {
                    let name = value()?;
                    let known = CpuDevice::paths_available();
                    args.path = known.into_iter().find(|path| path.name() == name).ok_or(format!("no path {name}"))?;
                }
                _ if word.starts_with('-') => return Err(format!("unknown option {word}").into()),
                _ => args.folder = word.into(),
            }
        }
        if args.folder.as_os_str().is_empty() || args.rounds == 0 {
            let usage = "usage: prompt-lookup FOLDER [--threads N] [--path NAME] [--drafts N] [--rounds N]";
            return Err(usage.into());
        }
        Ok(args)
    }
}

/// Text that the sequences write.
#[derive(Clone, Copy, Debug)]
enum Workload {
    /// A prompt that repeats a passage, greedily continued.
    Repeats,
    /// A prompt without repetition, continued at a high temperature.
    Differs,
    /// A prompt without repetition, continued at temperature 0.7, where text repeats by chance.
    Between,
}

impl Workload {
    fn request(self, number: u64, vocab_size: usize) -> Generate {
        let period = if matches!(self, Workload::Repeats) { 40 } else { PROMPT as u64 };
        let token = |at: u64| 300 + (at % period * 2_654_435_761 + number * 97_531) % (vocab_size as u64 - 400);
        let temperature = match self {
            Workload::Repeats => 0.0,
            Workload::Differs => 1.5,
            Workload::Between => 0.7,
        };
        Generate {
            request: number,
            prompt: (0..PROMPT as u64).map(|at| token(at) as u32).collect(),
            choices: vec![ChoiceStart::default()],
            sampling: Some(Sampling {
                temperature,
                seed: number,
                top_p: 1.0,
                repetition_penalty: 1.0,
                max_tokens: TOKENS,
                logprobs: -1,
                prompt_logprobs: -1,
                ..Sampling::default()
            }),
            ..Generate::default()
        }
    }
}

/// An engine, and what it has written.
struct Writer {
    engine: Engine,
    tokens: Vec<Vec<u32>>,
    spent: Duration,
}

impl Writer {
    fn begin(&mut self, workload: Workload, sequences: usize, vocab_size: usize) {
        (self.tokens, self.spent) = (vec![Vec::new(); sequences], Duration::ZERO);
        (0..sequences as u64).for_each(|number| self.engine.submit(workload.request(number, vocab_size)));
    }

    /// Runs a step, and adds its CPU time unless it is one of a prompt. Returns false if there is nothing left to do.
    fn step(&mut self) -> bool {
        if !self.engine.has_work() {
            return false;
        }
        let begun = cpu_time();
        let step = self.engine.step(&cpu_time);
        if step.batch.is_some_and(|batch| batch.prefill_tokens == 0) {
            self.spent += cpu_time() - begun;
        }
        for output in step.outputs {
            self.tokens[output.request as usize].extend(output.tokens.iter().map(|token| token.id));
        }
        true
    }
}

/// CPU time of this process so far.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse()?;
    let checkpoint = Checkpoint::open(&args.folder)?;
    let vocab_size = checkpoint.config().vocab_size;
    let make = |prompt_lookup: usize| -> Result<Writer, Box<dyn Error>> {
        let limits = Limits { rows_max: 512, sampled_max: 64 };
        let options = CpuOptions { threads: args.threads, path: args.path, ..CpuOptions::default() };
        let device = CpuDevice::new(options, limits)?;
        let limits = ModelLimits {
            context_tokens: Some(4096),
            kv: KvBudget::Pages(1024),
            rows_max: limits.rows_max,
            sampled_max: limits.sampled_max,
            held: Held::Stored,
            kv_format: KvFormat::Own,
        };
        let model = Model::load(&checkpoint, Box::new(device), limits, &mut |_| {})?;
        let config = EngineConfig { prompt_lookup, prefix_cache: false, ..EngineConfig::default() };
        Ok(Writer { engine: Engine::new(Box::new(model), &config), tokens: Vec::new(), spent: Duration::ZERO })
    };
    let (mut plain, mut drafting) = (make(0)?, make(args.drafts)?);
    for workload in [Workload::Repeats, Workload::Between, Workload::Differs] {
        for sequences in BATCHES {
            let (mut without, mut with, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
            let before = drafting.engine.state();
            for _ in 0..args.rounds {
                plain.begin(workload, sequences, vocab_size);
                drafting.begin(workload, sequences, vocab_size);
                // Step by step in turns: what else the machine does slows both.
                while plain.step() | drafting.step() {}
                if plain.tokens != drafting.tokens {
                    return Err("the tokens differ".into());
                }
                let count = plain.tokens.iter().map(Vec::len).sum::<usize>() as f64;
                without.push(plain.spent.as_secs_f64() / count);
                with.push(drafting.spent.as_secs_f64() / count);
                ratios.push(plain.spent.as_secs_f64() / drafting.spent.as_secs_f64());
            }
            let after = drafting.engine.state();
            let rounds = args.rounds as u64;
            println!(
                "{workload:?}, {sequences} sequences: {:.0} µs per token without, {:.0} µs with, ratio {:.3} ({:.3} to {:.3}); of {} drafts a round {} saved a step",
                median(&mut without) * 1e6,
                median(&mut with) * 1e6,
                median(&mut ratios),
                ratios[0],
                ratios[ratios.len() - 1],
                (after.drafted_tokens - before.drafted_tokens) / rounds,
                (after.accepted_tokens - before.accepted_tokens) / rounds,
            );
        }
    }
    Ok(())
}

/// Median of some values, which are sorted.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
