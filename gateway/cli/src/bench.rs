//! `penstock bench`: how fast this machine computes a model, beside what its memory and its arithmetic allow.

mod page;
mod table;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use penstock_worker::bench::{BenchOptions, BenchReport, BenchStage, Timed, bench, shared_memory};
use penstock_worker::{DeviceChoice, ModelOptions, inspect};
use serde_json::{Value, json};

use crate::page::PageFile;

const EXAMPLES: &str = "\
Examples:
  penstock bench                                     the embedded demo model
  penstock bench --model Qwen/Qwen3-0.6B             a pulled model, a checkpoint folder or a GGUF file
  penstock bench --model m.gguf --threads 4 --html bench.html
  penstock bench --prefill 512,8192 --decode 1,16,64 --context 2048 --json

The model is loaded into this process, and nothing else is started. The share of the limit is the least time that this machine needs for a
step, over the time that it took: the larger of its bytes at the bandwidth and its operations at the arithmetic measured beforehand; of a GPU
the bandwidth alone. A step is a whole one of the engine, without sockets and text. Stop other programs first: both figures suffer from them.
A model that the caches hold, as the demo model, can read faster than memory.";

/// `penstock bench`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct BenchArgs {
    /// Checkpoint folder in Hugging Face's layout, a GGUF file, or the name of a pulled model [default: the embedded demo model]
    #[arg(long, short, value_name = "PATH|NAME")]
    model: Option<PathBuf>,
    /// Device: auto, cpu, cuda or reference
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: DeviceChoice,
    /// CPU instruction set: auto, amx, avx512bf16, avx512, avx2, portable
    #[arg(long, value_name = "PATH", default_value = "auto")]
    path: String,
    /// Round matrices while they are loaded: int8, int4, or none
    #[arg(long, value_name = "FORMAT", default_value = "none", value_parser = ["none", "int8", "int4"])]
    quantize: String,
    /// Form of keys and values in the KV cache
    #[arg(long, value_name = "FORMAT", default_value = "bf16", value_parser = ["bf16", "int8"])]
    kv_format: String,
    /// Put the weights into memory of the kind that workers of one machine share
    #[arg(long)]
    shared_weights: bool,
    /// Threads [default: one per core]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Lengths of prompts whose prefill is timed, in tokens
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', default_values_t = [512, 2048], value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    prefill: Vec<u32>,
    /// Numbers of sequences that decode together
    #[arg(long, value_name = "SEQUENCES", value_delimiter = ',', default_values_t = [1, 8, 32], value_parser = clap::value_parser!(u32).range(1..=4096))]
    decode: Vec<u32>,
    /// Tokens of one step: longer prompts are computed in several [default: 512]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(32..=1 << 16))]
    batch_tokens: Option<u32>,
    /// Tokens in front of every sequence that decodes
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    context: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Write the result as one page for a browser, which loads nothing else
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Measures, and prints the result.
pub(crate) fn run(args: &BenchArgs) -> anyhow::Result<()> {
    let sizes = |all: &[u32]| all.iter().map(|&size| size as usize).collect();
    let options = BenchOptions {
        model: ModelOptions {
            model: args.model.clone().map(penstock_config::named_model),
            held: inspect::held(&args.quantize).unwrap_or_default(),
            kv_format: inspect::kv_format(&args.kv_format).unwrap_or_default(),
            device: args.device,
            path: inspect::cpu_path(&args.path)?,
            threads: args.threads.map_or(0, usize::from),
            batch_tokens: args.batch_tokens.map_or(0, |tokens| tokens as usize),
            weights: args.shared_weights.then(shared_memory).transpose()?,
            ..ModelOptions::default()
        },
        prompts: sizes(&args.prefill),
        batches: sizes(&args.decode),
        context: args.context as usize,
    };
    let html = PageFile::open(args.html.as_deref())?;
    let report = shown(&options)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&facts(&report, options.context)).context("the result as JSON")?);
    } else {
        print!("{}", table::table(&report, options.context));
    }
    html.map_or(Ok(()), |file| file.write(page::page(&report, options.context), args.json))
}

/// Measures, and shows on a terminal what is being done.
fn shown(options: &BenchOptions) -> anyhow::Result<BenchReport> {
    let target =
        if std::io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(0), target);
    let style = ProgressStyle::with_template("{spinner} {msg} {elapsed}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
    bar.enable_steady_tick(Duration::from_millis(100));
    let total = options.prompts.len() + options.batches.len();
    let mut begun = 0;
    let report = bench(options, &mut |stage| {
        begun += usize::from(matches!(stage, BenchStage::Prefill(_) | BenchStage::Decode(_)));
        bar.set_message(match stage {
            BenchStage::Limits => "measuring the machine's limits".to_owned(),
            BenchStage::Loading(done, all) => {
                format!("loading weights, {:.0} %", 100.0 * done as f64 / all.max(1) as f64)
            }
            BenchStage::Prefill(tokens) => format!("{begun} of {total}: prefill of {tokens} tokens"),
            BenchStage::Decode(sequences) => format!("{begun} of {total}: decode of {sequences} sequences"),
        });
    });
    bar.finish_and_clear();
    Ok(report?)
}

/// Result as JSON. Times are in seconds, rates per second.
fn facts(report: &BenchReport, context: usize) -> Value {
    let timed = |name: &str, all: &[Timed]| -> Vec<Value> {
        let one = |timed: &Timed| {
            json!({
                name: timed.size,
                "seconds": timed.seconds,
                "tokens_per_second": timed.rate(),
                "share_of_limit": timed.share(),
                "bound_by": timed.bound.map(|(_, by)| table::bound(by)),
            })
        };
        all.iter().map(one).collect()
    };
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "model": report.model,
        "architecture": report.architecture,
        "weight_format": report.weight_format,
        "weights_bytes": report.weights_bytes,
        "device": report.device,
        "threads": report.threads,
        "limits": report.limits.map(|limits| json!({
            "gflops": limits.arithmetic().map(|(gflops, _)| gflops),
            "instruction": limits.arithmetic().map(|(_, instruction)| instruction),
            "gigabytes_per_second": limits.gigabytes(),
        })),
        "batch_tokens": report.batch_tokens,
        "load_seconds": report.load_seconds,
        "context_tokens": context,
        "prefill": timed("tokens", &report.prefill),
        "decode": timed("sequences", &report.decode),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_worker::bench::BoundBy;

    /// Report of three measurements, one of them with no known limit.
    pub(super) fn report() -> BenchReport {
        let timed = |size, seconds, bound| Timed { size, seconds, bound };
        BenchReport {
            model: "small".into(),
            architecture: "Qwen3ForCausalLM",
            weight_format: "bf16".into(),
            weights_bytes: 1_192_000_000,
            device: "cpu, 2 threads".into(),
            threads: 2,
            limits: None,
            batch_tokens: 512,
            load_seconds: 1.5,
            prefill: vec![timed(512, 2.0, Some((1.0, BoundBy::Arithmetic)))],
            decode: vec![timed(1, 0.05, Some((0.04, BoundBy::Memory))), timed(8, 0.1, None)],
        }
    }

    #[test]
    fn json_has_units_and_what_is_not_known_is_null() {
        let facts = facts(&report(), 128);
        assert_eq!((&facts["limits"], &facts["context_tokens"]), (&Value::Null, &json!(128)));
        assert_eq!(
            facts["prefill"][0],
            json!({"tokens": 512, "seconds": 2.0, "tokens_per_second": 256.0, "share_of_limit": 0.5, "bound_by": "arithmetic"})
        );
        assert_eq!(facts["decode"][1]["sequences"], 8);
        assert!(facts["decode"][1]["share_of_limit"].is_null() && facts["decode"][1]["bound_by"].is_null());
    }
}
