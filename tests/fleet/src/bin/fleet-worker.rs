//! A real worker process over the fake model of `sim`, or over the demo model, for tests that kill it.
#![forbid(unsafe_code)]

use penstock_engine::checkpoint::Checkpoint;
use penstock_engine::models::{KvBudget, Model, ModelLimits};
use penstock_engine::{AfterLayer, Engine, EngineConfig, Forward, Geometry, Pages};
use penstock_fleet_tests::{demo_grammars, fake_grammars, member_files};
use penstock_kernels::cpu::{CpuDevice, CpuOptions, Path as CpuPath};
use penstock_kernels::{Held, KernelError, KvFormat, Limits, Span, StepBatch};
use penstock_proto::frames::{Loading, Role};
use penstock_proto::handshake::PoolKey;
use penstock_sim::FakeForward;
use penstock_worker::{Build, ReadyInfo, WorkerConfig, WorkerError};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

const USAGE: &str = "fleet-worker --listen ADDRESS [--cores LIST] [--key-file FILE] [--step-ms N] [--load-ms N] [--orphan-ms N] \
                     [--numerics ID] [--sequences N] [--death-token ID] [--hang-at STEP] [--model NAME] [--role ROLE] [--fail-load] [--gate CONTEXT:DIR] [--demo] \
                     [--beyond-loopback] [--pages N] [--kv-disk DIR] [--kv-remote URL] [--tls DIR] [--transfer-port N] [--transfer-streams N]";

/// Rows of prefill in a step of the demo model: few, so that a prompt takes several.
const CHUNK: usize = 128;

/// Size of a disk tier.
const DISK_BYTES: u64 = 64 << 20;

/// KV pages of the demo model.
const DEMO_PAGES: usize = 256;

struct Options {
    worker: WorkerConfig,
    step: Duration,
    load: Duration,
    numerics: String,
    model: String,
    sequences: usize,
    role: Role,
    death_token: Option<u32>,
    hang_at: u64,
    fail_load: bool,
    gate: Option<Gate>,
    /// True to run the demo model on the CPU instead of the fake one.
    demo: bool,
    /// KV pages of the fake model.
    pages: usize,
}

fn options() -> Result<Options, String> {
    let mut options = Options {
        worker: WorkerConfig::new("unix:///dev/null".parse().expect("an address")),
        step: Duration::ZERO,
        load: Duration::ZERO,
        numerics: "fake".into(),
        model: "fake".into(),
        sequences: 16,
        role: Role::Mixed,
        death_token: None,
        hang_at: u64::MAX,
        fail_load: false,
        gate: None,
        demo: false,
        pages: 1024,
    };
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        match flag.as_str() {
            "--fail-load" => {
                options.fail_load = true;
                continue;
            }
            "--demo" => {
                options.demo = true;
                continue;
            }
            "--beyond-loopback" => {
                options.worker.beyond_loopback = true;
                continue;
            }
            // This worker has no adapters and says so.
            "--adapter-orders" => continue,
            "--own-session" => {
                options.worker.own_session = true;
                continue;
            }
            _ => {}
        }
        let value = args.next().ok_or(USAGE)?;
        let number = || value.parse::<u64>().map_err(|error| format!("{flag} {value}: {error}"));
        match flag.as_str() {
            "--listen" => options.worker.listen = value.parse().map_err(|error| format!("{error}"))?,
            "--cores" => {
                let core = |text: &str| text.parse().map_err(|error| format!("{flag} {text}: {error}"));
                options.worker.cores = value.split(',').map(core).collect::<Result<_, _>>()?;
            }
            "--key-file" => {
                let file = std::fs::read(&value).map_err(|error| format!("{value}: {error}"))?;
                options.worker.key = Some(PoolKey::new(&file).map_err(|error| error.to_string())?);
            }
            "--tls" => {
                let tls = penstock_link::Tls::read(&member_files(value.as_ref()));
                options.worker.tls = Some(tls.map_err(|error| error.to_string())?);
            }
            "--transfer-port" => {
                options.worker.transfer_port = u16::try_from(number()?).map_err(|error| error.to_string())?;
            }
            "--transfer-streams" => options.worker.transfer_streams = number()? as usize,
            "--pages" => options.pages = number()? as usize,
            "--kv-disk" => {
                options.worker.tiers.disk_path = Some(value.into());
                options.worker.tiers.disk_bytes = DISK_BYTES;
            }
            "--kv-remote" => options.worker.tiers.remote = Some(value),
            "--step-ms" => options.step = Duration::from_millis(number()?),
            "--load-ms" => options.load = Duration::from_millis(number()?),
            "--orphan-ms" => options.worker.orphan_ttl = Duration::from_millis(number()?),
            "--machine-share" => drop(number()?),
            "--numerics" => options.numerics = value,
            "--role" => {
                options.role = match value.as_str() {
                    "prefill" => Role::Prefill,
                    "decode" => Role::Decode,
                    _ => Role::Mixed,
                };
            }
            "--model" => options.model = value,
            "--sequences" => options.sequences = number()? as usize,
            "--hang-at" => options.hang_at = number()?,
            "--gate" => options.gate = Some(Gate::new(&value).ok_or(USAGE)?),
            "--death-token" => options.death_token = Some(number()? as u32),
            _ => return Err(USAGE.into()),
        }
    }
    Ok(options)
}

/// A model that is slowed down and can be killed.
struct Slow {
    inner: Box<dyn Forward>,
    step: Duration,
    death_token: Option<u32>,
    steps: u64,
    hang_at: u64,
    gate: Option<Gate>,
}

/// A point in a sequence at which the device waits for permission to continue: a fault made meanwhile falls exactly
/// there.
struct Gate {
    /// Tokens of the sequence of which the step that waits computes the last one.
    context: usize,
    /// Folder in which the device writes `reached-PID` and waits for `open`.
    dir: PathBuf,
}

impl Gate {
    fn new(text: &str) -> Option<Self> {
        let (context, dir) = text.split_once(':')?;
        Some(Self { context: context.parse().ok()?, dir: dir.into() })
    }

    fn pass(&self, batch: &StepBatch<'_>) {
        let open = self.dir.join("open");
        // A step may add several tokens: those of a prefill chunk, and those that a grammar forces.
        let before = |span: &Span<'_>| span.context - span.rows.len();
        let passes = batch.spans.iter().any(|span| (before(span)..span.context).contains(&(self.context - 1)));
        if open.exists() || !passes {
            return;
        }
        let said = std::fs::write(self.dir.join(format!("reached-{}", std::process::id())), b"");
        assert!(said.is_ok(), "{}: {said:?}", self.dir.display());
        // The directory disappears when the test is over.
        while !open.exists() && self.dir.exists() {
            pause(Duration::from_millis(1));
        }
    }
}

impl Forward for Slow {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn forward(&mut self, batch: &StepBatch<'_>, after_layer: AfterLayer<'_>) -> Result<&[f32], KernelError> {
        assert!(!self.death_token.is_some_and(|token| batch.tokens.contains(&token)), "the death token was read");
        self.steps += 1;
        self.gate.iter().for_each(|gate| gate.pass(batch));
        pause(if self.steps == self.hang_at { Duration::MAX } else { self.step });
        self.inner.forward(batch, after_layer)
    }

    fn pages(&self) -> &dyn Pages {
        self.inner.pages()
    }

    fn write_page(&mut self, layer: usize, page: u32, bytes: &[u8]) {
        self.inner.write_page(layer, page, bytes);
    }
}

/// Sleeps as long as a device would compute; for ever, if it hangs.
fn pause(time: Duration) {
    match std::time::Instant::now().checked_add(time) {
        Some(_) => std::thread::park_timeout(time),
        None => loop {
            std::thread::park();
        },
    }
}

fn fake_model(numerics: &str, pages: usize) -> Box<dyn Forward> {
    let geometry = Geometry {
        vocab_size: 256,
        context_tokens: 4096,
        pages,
        rows_max: 512,
        sampled_max: 64,
        numerics: numerics.to_owned(),
        ..Geometry::default()
    };
    Box::new(FakeForward::new(geometry, 0))
}

/// The demo model on one thread of the CPU.
fn demo_model() -> Result<(Box<dyn Forward>, String), WorkerError> {
    let failed = |error: String| WorkerError::Model(error);
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/penstock-demo");
    let checkpoint = Checkpoint::open(folder.as_ref()).map_err(|error| failed(error.to_string()))?;
    let sizes = Limits { rows_max: 512, sampled_max: 64 };
    let options = CpuOptions { threads: 1, cores: None, path: CpuPath::Auto };
    let device = CpuDevice::new(options, sizes).map_err(|error| failed(error.to_string()))?;
    let limits = ModelLimits {
        context_tokens: None,
        kv: KvBudget::Pages(DEMO_PAGES),
        rows_max: sizes.rows_max,
        sampled_max: sizes.sampled_max,
        held: Held::Stored,
        kv_format: KvFormat::Own,
    };
    let model = Model::load(&checkpoint, Box::new(device), limits, &mut |_| {});
    let model = model.map_err(|error| failed(error.to_string()))?;
    let name = model.device().info().name;
    Ok((Box::new(model), name))
}

fn main() -> ExitCode {
    let options = match options() {
        Ok(options) => options,
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::from(2);
        }
    };
    let log = tracing_subscriber::fmt().with_max_level(tracing_subscriber::filter::LevelFilter::DEBUG);
    log.with_writer(std::io::stderr).with_ansi(false).init();
    let Options { worker, step, load, numerics, model, sequences, role, death_token, hang_at, fail_load, gate, .. } =
        options;
    let (demo, pages) = (options.demo, options.pages);
    let build: Build = Box::new(move |progress| {
        for part in 0..10 {
            progress(Loading { stage: "packing weights".into(), bytes_done: part, bytes_total: 10 });
            pause(load / 10);
        }
        if fail_load {
            return Err(WorkerError::Model("model.safetensors: tensor \"a\" ends behind the file".into()));
        }
        let (inner, device) = if demo { demo_model()? } else { (fake_model(&numerics, pages), "fake".to_owned()) };
        let geometry = inner.geometry();
        let (numerics, vocab_size) = (geometry.numerics.clone(), geometry.vocab_size as u32);
        let mut config = EngineConfig { sequences_max: sequences, ..EngineConfig::default() };
        if demo {
            config.chunk_tokens = CHUNK;
        }
        let mut engine = Engine::new(Box::new(Slow { inner, step, death_token, steps: 0, hang_at, gate }), &config);
        engine.set_role(role);
        engine.set_grammars(if demo { demo_grammars() } else { fake_grammars() });
        let info = ReadyInfo {
            adapters: Vec::new(),
            shelf: None,
            gpu: None,
            weights: None,
            tokenizer_hash: b"tokenizer".to_vec(),
            model_hash: model.as_bytes().to_vec(),
            model,
            numerics_id: numerics,
            vocab_size,
            device,
        };
        Ok((engine, info))
    });
    match penstock_worker::run(worker, build) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}
