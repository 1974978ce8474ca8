//! A real worker process whose device only takes time: the engine, scheduler, prefix cache and session are those of
//! every worker, the forward pass sleeps for the duration of a modelled machine. For live comparisons of routers
//! (`bench/live.sh`).
//!
//! The machine is a 70B-class dense model on an 8-GPU node: a step takes 12 ms + 71 µs per prefill token + 1.35 ns per prefill token and
//! token of its context + 40 µs per decoding sequence + 16 ns per token of their contexts; 1M tokens of KV; 8,192 tokens a step.
//! `--tokens-each N`: one token stands for N of them, so that prompts stay small. `--speed S`: time runs S times faster.
//!
//! The token after position `p` is `'a' + (7·p mod 26)`, so a reader of a stream can check it.
#![forbid(unsafe_code)]

use penstock_engine::{AfterLayer, Engine, EngineConfig, Forward, Geometry, Pages};
use penstock_kernels::{KernelError, StepBatch};
use penstock_proto::BLOCK_TOKENS;
use penstock_worker::{Build, ReadyInfo, WorkerConfig, WorkerError};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

const USAGE: &str =
    "modelled-worker --listen ADDRESS --tokenizer tokenizer.json [--speed S] [--tokens-each N] [--slow FACTOR]";

/// Size of the vocabulary: bytes, and a few special tokens.
const VOCABULARY: usize = 260;
const KV_TOKENS: usize = 1_000_000;
const STEP_TOKENS: usize = 8192;
const SEQUENCES: usize = 256;

/// Time between two steps above which it counts as a pause.
const DEBT_MAX: Duration = Duration::from_millis(2);

struct Options {
    worker: WorkerConfig,
    tokenizer: PathBuf,
    speed: f64,
    tokens_each: usize,
    slow: f64,
}

fn options() -> Result<Options, String> {
    let listen = "unix:///dev/null".parse().map_err(|error| format!("{error}"))?;
    let mut options =
        Options { worker: WorkerConfig::new(listen), tokenizer: PathBuf::new(), speed: 1.0, tokens_each: 1, slow: 1.0 };
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let value = args.next().ok_or(USAGE)?;
        let number = || value.parse::<f64>().map_err(|error| format!("{flag} {value}: {error}"));
        match flag.as_str() {
            "--listen" => options.worker.listen = value.parse().map_err(|error| format!("{error}"))?,
            "--tokenizer" => options.tokenizer = value.into(),
            "--speed" => options.speed = number()?,
            "--slow" => options.slow = number()?,
            "--tokens-each" => options.tokens_each = number()? as usize,
            _ => return Err(USAGE.into()),
        }
    }
    let is_sane = options.speed > 0.0 && options.slow > 0.0 && (1..=1024).contains(&options.tokens_each);
    if is_sane { Ok(options) } else { Err(USAGE.into()) }
}

/// Device of a modelled machine.
struct Modelled {
    geometry: Geometry,
    tokens_each: usize,
    /// Seconds of the clock per second of the model.
    pace: f64,
    due: Instant,
    logits: Vec<f32>,
}

impl Modelled {
    fn new(options: &Options) -> Self {
        let geometry = Geometry {
            vocab_size: VOCABULARY,
            context_tokens: KV_TOKENS / options.tokens_each,
            pages: KV_TOKENS / options.tokens_each / BLOCK_TOKENS,
            rows_max: (STEP_TOKENS / options.tokens_each).max(SEQUENCES),
            sampled_max: SEQUENCES,
            numerics: "modelled".into(),
            ..Geometry::default()
        };
        let pace = options.slow / options.speed;
        Self { geometry, tokens_each: options.tokens_each, pace, due: Instant::now(), logits: Vec::new() }
    }

    /// Seconds of the step on the modelled machine.
    fn seconds(&self, batch: &StepBatch<'_>) -> f64 {
        let each = self.tokens_each as f64;
        let mut seconds = 12e-3;
        for span in batch.spans {
            let (rows, context) = (span.rows.len() as f64 * each, span.context as f64 * each);
            seconds += match span.rows.len() {
                1 => 40e-6 + 16e-9 * context,
                _ => rows * (71e-6 + 1.35e-9 * (context - rows / 2.0)),
            };
        }
        seconds
    }

    /// Sleeps until the step is over. A step that was a little late is made up for by the next; after a pause the
    /// clock starts anew.
    fn pass(&mut self, seconds: f64) {
        let now = Instant::now();
        let begin = if now.saturating_duration_since(self.due) > DEBT_MAX { now } else { self.due };
        self.due = begin + Duration::from_secs_f64(seconds * self.pace);
        while let Some(left) = self.due.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            std::thread::sleep(left);
        }
    }
}

impl Forward for Modelled {
    fn geometry(&self) -> Geometry {
        self.geometry.clone()
    }

    fn forward(&mut self, batch: &StepBatch<'_>, _: AfterLayer<'_>) -> Result<&[f32], KernelError> {
        self.pass(self.seconds(batch));
        self.logits.clear();
        self.logits.resize(batch.sampled.len() * VOCABULARY, -9.0);
        for (row, logits) in batch.sampled.iter().zip(self.logits.chunks_exact_mut(VOCABULARY)) {
            let span = batch.spans.iter().find(|span| span.rows.contains(row)).expect("a sampled row is of a span");
            let position = span.context - (span.rows.end - row);
            logits[usize::from(b'a') + 7 * position % 26] = 9.0;
        }
        Ok(&self.logits)
    }

    fn pages(&self) -> &dyn Pages {
        self
    }

    fn write_page(&mut self, _: usize, _: u32, _: &[u8]) {}
}

impl Pages for Modelled {
    fn read_page(&self, _: usize, _: u32, _: &mut [u8]) {}
}

fn build(options: &Options, tokenizer_hash: Vec<u8>) -> Build {
    let forward = Modelled::new(options);
    let config = EngineConfig {
        sequences_max: SEQUENCES,
        batch_tokens: forward.geometry.rows_max,
        chunk_tokens: forward.geometry.rows_max,
        // The modelled machine gives prefill the whole step.
        prefill_seconds_max: 10.0,
        ..EngineConfig::default()
    };
    Box::new(move |_| {
        let info = ReadyInfo {
            adapters: Vec::new(),
            shelf: None,
            gpu: None,
            weights: None,
            model: "modelled".into(),
            tokenizer_hash,
            model_hash: b"modelled".to_vec(),
            numerics_id: "modelled".into(),
            vocab_size: VOCABULARY as u32,
            device: "a modelled machine".into(),
        };
        Ok((Engine::new(Box::new(forward), &config), info))
    })
}

fn main() -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let run = options().and_then(|options| {
        let file =
            std::fs::read(&options.tokenizer).map_err(|error| format!("{}: {error}", options.tokenizer.display()))?;
        let build = build(&options, blake3::hash(&file).as_bytes().to_vec());
        penstock_worker::run(options.worker, build).map_err(|error: WorkerError| error.to_string())
    });
    match run {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}
