//! Throughput of the engine on this machine: the line of penstock in `bench/engine.sh`.
//!
//! `engine-bench MODEL [--threads N] [--path NAME] [--name TEXT] [--quantize int8|int4] [--kv-format int8] [--context N] [--batch-tokens N] [--prefill N,N…] [--decode N,N…] [--adapters N] [--rank N] [--cpu-time]` loads a
//! checkpoint (a folder or a GGUF file) and drives the whole engine (scheduler, forward, sampler) with synthetic token ids, greedily, without prefix reuse. Prints one JSON line: prefill of 512 and 2048
//! tokens (median of three) and decode at batch 1, 8 and 32, or those given, on a context of 128 or that given (median step), load time, peak memory.
//! With `--adapters` the model gets so many LoRA adapters of random matrices on all seven projections of each layer (of rank 16, or the one given), and everything is
//! measured without them, with the first for all sequences, and with all in turn. With `--cpu-time` times are those that the calling thread computes (Linux), which says
//! something on a busy machine, with `--threads 1`.
#![forbid(unsafe_code)]

use std::error::Error;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use penstock_engine::adapter::{Adapter, AdapterError};
use penstock_engine::checkpoint::{Checkpoint, ModelConfig};
use penstock_engine::measure::Measure;
use penstock_engine::models::{KvBudget, Model, ModelLimits};
use penstock_kernels::cpu::{CpuDevice, CpuOptions, Path};
use penstock_kernels::{Device, Held, KvFormat, Limits};
use serde_json::json;

/// Default tokens in front of every decoding sequence.
const CONTEXT: usize = 128;
/// Default lengths of the prompts whose prefill is timed.
const PROMPTS: [usize; 2] = [512, 2048];
/// Default batch sizes of decode.
const BATCHES: [usize; 3] = [1, 8, 32];

struct Args {
    model: PathBuf,
    threads: usize,
    path: Path,
    name: String,
    held: Held,
    kv_format: KvFormat,
    /// Tokens in front of every decoding sequence.
    context: usize,
    batch_tokens: usize,
    prompts: Vec<usize>,
    batches: Vec<usize>,
    adapters: usize,
    rank: usize,
    cpu_time: bool,
}

impl Args {
    fn parse() -> Result<Self, Box<dyn Error>> {
        let mut args = Self {
            model: PathBuf::new(),
            threads: 0,
            path: Path::Auto,
            name: "penstock".into(),
            held: Held::Stored,
            kv_format: KvFormat::Own,
            context: CONTEXT,
            batch_tokens: 512,
            prompts: PROMPTS.to_vec(),
            batches: BATCHES.to_vec(),
            adapters: 0,
            rank: 16,
            cpu_time: false,
        };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} needs a value"));
            match word.as_str() {
                "--threads" => args.threads = value()?.parse()?,
                "--name" => args.name = value()?,
                "--quantize" => {
                    args.held = match value()?.as_str() {
                        "int8" => Held::Int8,
                        "int4" => Held::Int4,
                        other => return Err(format!("no weights of {other}").into()),
                    }
                }
                "--kv-format" => {
                    let name = value()?;
                    args.kv_format = KvFormat::named(&name).ok_or(format!("no keys and values of {name}"))?;
                }
                "--context" => args.context = value()?.parse()?,
                "--adapters" => args.adapters = value()?.parse()?,
                "--rank" => args.rank = value()?.parse()?,
                "--batch-tokens" => args.batch_tokens = value()?.parse()?,
                "--prefill" => args.prompts = value()?.split(',').map(str::parse).collect::<Result<_, _>>()?,
                "--decode" => args.batches = value()?.split(',').map(str::parse).collect::<Result<_, _>>()?,
                "--cpu-time" => args.cpu_time = true,
                "--path" => {
                    let name = value()?;
                    let known = CpuDevice::paths_available();
                    args.path = known.into_iter().find(|path| path.name() == name).ok_or(format!("no path {name}"))?;
                }
                _ if word.starts_with('-') => return Err(format!("unknown option {word}").into()),
                _ => args.model = word.into(),
            }
        }
        if args.model.as_os_str().is_empty() {
            return Err(
                "usage: engine-bench MODEL [--threads N] [--path NAME] [--name TEXT] [--quantize int8|int4] [--kv-format int8] [--context N] [--batch-tokens N] [--prefill N,N…] [--decode N,N…] [--adapters N] [--rank N] [--cpu-time]".into()
            );
        }
        Ok(args)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse()?;
    let started = Instant::now();
    let checkpoint = Checkpoint::open(&args.model)?;
    let sequences_max = args.batches.iter().copied().max().ok_or("no batch is given")?;
    let limits = Limits { rows_max: args.batch_tokens.max(sequences_max), sampled_max: sequences_max };
    let device =
        CpuDevice::new(CpuOptions { threads: args.threads, path: args.path, ..CpuOptions::default() }, limits)?;
    let name = device.info().name;
    let limits = ModelLimits {
        context_tokens: Some(4096),
        kv: KvBudget::Pages(Measure::pages(&args.prompts, &args.batches, args.context, args.batch_tokens)),
        rows_max: limits.rows_max,
        sampled_max: limits.sampled_max,
        held: args.held,
        kv_format: args.kv_format,
    };
    let model = Model::load(&checkpoint, Box::new(device), limits, &mut |_| {})?;
    let load = started.elapsed().as_secs_f64();
    let adapters: Vec<Adapter> = (0..args.adapters as u64)
        .map(|seed| random_adapter(checkpoint.config(), args.rank, seed))
        .collect::<Result<_, _>>()?;
    drop(checkpoint);
    let cpu_time = args.cpu_time;
    let clock = move || if cpu_time { computed() } else { started.elapsed() };
    let mut measure = Measure::new(Box::new(model), args.batch_tokens, sequences_max, &clock);
    measure.add_adapters(&adapters)?;
    measure.prefill(64)?;
    let mut report = json!({
        "engine": args.name,
        "threads": args.threads,
        "device": name,
        "load_s": round(load),
    });
    let mut turns = vec![0, 1, args.adapters];
    turns.retain(|turns| *turns <= args.adapters);
    turns.dedup();
    for count in turns {
        measure.take_turns(count);
        let with = if count > 0 { format!("_adapters_{count}") } else { String::new() };
        for &tokens in &args.prompts {
            report[format!("prefill_{tokens}{with}")] = round(tokens as f64 / measure.prefill(tokens)?).into();
        }
        for &batch in &args.batches {
            report[format!("decode_b{batch}{with}")] =
                round(batch as f64 / measure.decode(batch, args.context)?).into();
        }
    }
    if let Some(adapter) = adapters.first() {
        report["adapter_mib"] = (adapter.bytes() >> 20).into();
    }
    report["rss_mib"] = peak_memory_mib().into();
    println!("{report}");
    Ok(())
}

/// An adapter of small random matrices in bf16 on the seven projections of each layer.
fn random_adapter(c: &ModelConfig, rank: usize, seed: u64) -> Result<Adapter, AdapterError> {
    let (queries, keys) = (c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
    let (hidden, inner) = (c.hidden_size, c.intermediate_size);
    let projections = [
        ("self_attn.q_proj", queries, hidden),
        ("self_attn.k_proj", keys, hidden),
        ("self_attn.v_proj", keys, hidden),
        ("self_attn.o_proj", hidden, queries),
        ("mlp.gate_proj", inner, hidden),
        ("mlp.up_proj", inner, hidden),
        ("mlp.down_proj", hidden, inner),
    ];
    let (mut header, mut data, mut state) = (serde_json::Map::new(), Vec::new(), seed);
    for layer in 0..c.num_hidden_layers {
        for (name, outputs, inputs) in projections {
            for (side, shape) in [("A", [rank, inputs]), ("B", [outputs, rank])] {
                let start = data.len();
                for _ in 0..shape[0] * shape[1] {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    // A sign, 2^-6 to 2^-5, and a random fraction.
                    let bits = 0x3c80 | (state >> 48) as u16 & 0x807f;
                    data.extend_from_slice(&bits.to_le_bytes());
                }
                let name = format!("base_model.model.model.layers.{layer}.{name}.lora_{side}.weight");
                let offsets = [start, data.len()];
                header.insert(name, json!({"dtype": "BF16", "shape": shape, "data_offsets": offsets}));
            }
        }
    }
    let header = serde_json::to_vec(&header).unwrap_or_default();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    let config = json!({"peft_type": "LORA", "r": rank, "lora_alpha": rank}).to_string().into_bytes();
    let files = [("adapter_config.json", config), ("adapter_model.safetensors", file)];
    Adapter::from_buffers(files.map(|(name, bytes)| (name.to_owned(), bytes.into())).into(), c)
}

fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// Time that this thread has computed, from /proc, up to a tick of the scheduler.
fn computed() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(text.split(' ').next().and_then(|nanos| nanos.parse().ok()).unwrap_or(0))
}

/// Peak resident memory, from /proc.
fn peak_memory_mib() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()? / 1024)
}
