//! Times the CPU device on a model of Qwen3-0.6B's shape with random weights, beside the machine's limits measured in the same run.
//!
//!     cargo run --release -p penstock-kernels --example kernel-bench -- [--threads 1,2] [--path auto] [--repeat 3] \
//!         [--prefill 512,2048] [--decode 1,8,32] [--context 512]
//!
//! With `--formats bf16,int8,q8_0,q4_k_m` and `--rounds 5`: the same steps for each format in turns, and medians as ratios to the first.
//!
//! With `--shape moe-1b`: the experts of a mixture of one billion weights in the place of that model, for `bf16` or each of `--formats`; bytes are those of
//! the experts that a step reads.
//!
//! Prefill of 512 and 2048 tokens, decode of 1, 8 and 32 sequences at a context of 512 tokens each; for each the share of time per
//! operation, the rate of the matrix products as a part of the arithmetic limit, and the weights' bytes per second as a part of
//! the memory limit. Figures are medians; one thread is measured by the time that it computes.

mod clock;
mod moe;
mod shape;

use std::time::Instant;

use penstock_kernels::cpu::limits::{self, MachineLimits};
use penstock_kernels::cpu::{CpuDevice, CpuOptions, Path};
use penstock_kernels::{Limits, PAGE_TOKENS, Span, StepBatch};

use clock::Clock;
use shape::{Format, Qwen, Shares};

struct Arguments {
    threads: Vec<usize>,
    path: Path,
    repeat: usize,
    prefill: Vec<usize>,
    decode: Vec<usize>,
    /// Tokens of each sequence when decode is timed.
    context: usize,
    formats: Vec<Format>,
    rounds: usize,
    is_mixture: bool,
}

fn arguments() -> Arguments {
    let mut found = Arguments {
        threads: vec![1, 2],
        path: Path::Auto,
        repeat: 3,
        prefill: vec![512, 2048],
        decode: vec![1, 8, 32],
        context: 512,
        formats: Vec::new(),
        rounds: 5,
        is_mixture: false,
    };
    let numbers =
        |value: &str| value.split(',').filter(|n| !n.is_empty()).map(|n| n.parse().expect("a number")).collect();
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next().unwrap_or_else(|| panic!("{word} needs a value"));
        match word.as_str() {
            "--threads" => found.threads = numbers(&value),
            "--prefill" => found.prefill = numbers(&value),
            "--decode" => found.decode = numbers(&value),
            "--context" => found.context = value.parse().expect("a number"),
            "--path" => found.path = value.parse().expect("a path"),
            "--formats" => found.formats = value.split(',').map(Format::named).collect(),
            "--rounds" => found.rounds = value.parse().expect("a number"),
            "--shape" => {
                assert!(["qwen3-0.6b", "moe-1b"].contains(&value.as_str()), "unknown shape {value}");
                found.is_mixture = value == "moe-1b";
            }
            "--repeat" => found.repeat = value.parse().expect("a number"),
            _ => panic!("unknown argument {word}"),
        }
    }
    found
}

fn main() {
    let arguments = arguments();
    if arguments.is_mixture {
        return arguments.threads.iter().for_each(|&threads| mixture(&arguments, threads));
    }
    if !arguments.formats.is_empty() {
        return arguments.threads.iter().for_each(|&threads| compare(&arguments, threads));
    }
    for &threads in &arguments.threads {
        let clock = clock::of(threads);
        let options = CpuOptions { threads, cores: Some((0..threads).collect()), path: arguments.path };
        let limits = Limits { rows_max: 2048, sampled_max: 32 };
        let mut device = CpuDevice::new(options, limits).expect("a device");
        let limit = limit(threads, device.path(), clock);
        println!("{}: limits {limit}", penstock_kernels::Device::info(&device).name);
        let start = Instant::now();
        let model = Qwen::load(&mut device, Format::named("bf16"));
        let gigabytes = model.weight_bytes() as f64 / 1e9;
        println!("  load {:.2} s, {:.2} GB of weights", start.elapsed().as_secs_f64(), gigabytes);
        for &tokens in &arguments.prefill {
            prefill(&mut device, &model, tokens, arguments.repeat, &limit, clock);
        }
        touch(&mut device, &model, clock);
        for &sequences in &arguments.decode {
            decode(&mut device, &model, sequences, &arguments, &limit, clock);
        }
        println!("  after: {}", self::limit(threads, device.path(), clock));
    }
}

/// Limits of the first `threads` cores, which read 1 GiB.
fn limit(threads: usize, path: Path, clock: Clock) -> MachineLimits {
    let cores: Vec<usize> = (0..threads).collect();
    limits::measure(threads, &cores, path, 1 << 30, clock).expect("1 GiB")
}

/// Times the experts of a mixture in each format.
fn mixture(arguments: &Arguments, threads: usize) {
    let bf16 = [Format::named("bf16")];
    let formats = if arguments.formats.is_empty() { &bf16 } else { arguments.formats.as_slice() };
    let clock = clock::of(threads);
    for format in formats {
        let options = CpuOptions { threads, cores: Some((0..threads).collect()), path: arguments.path };
        let mut device = CpuDevice::new(options, Limits { rows_max: 2048, sampled_max: 32 }).expect("a device");
        let limit = limit(threads, device.path(), clock);
        println!("{}, {}: limits {limit}", penstock_kernels::Device::info(&device).name, format.name);
        let model = moe::Mixture::load(&mut device, *format);
        let prefill = arguments.prefill.iter().map(|&n| (format!("prefill {n}"), Steps::prefill(n)));
        let decode = arguments.decode.iter().map(|&n| (format!("decode b{n}"), Steps::decode(n, 1)));
        for (name, mut steps) in prefill.chain(decode) {
            steps.tokens.iter_mut().for_each(|token| *token = *token * 31 % 8000);
            let (spans, repeat) = (steps.spans(), arguments.repeat * if steps.tokens.len() > 100 { 1 } else { 10 });
            let batch = steps.batch(&spans);
            let mut runs: Vec<moe::Taken> =
                (0..=repeat).map(|_| model.step(&mut device, &batch, clock)).skip(1).collect();
            runs.sort_by(|a, b| a.experts.total_cmp(&b.experts));
            let moe::Taken { route, experts, flops, bytes } = runs.swap_remove(repeat / 2);
            println!(
                "  {name:<12}: experts {:.2} ms, {:.0} GFLOP/s = {:.0} % of limit, {:.1} GB/s of active bytes = {:.0} % of limit; router {:.2} ms",
                experts * 1e3,
                flops / experts / 1e9,
                100.0 * flops / experts / 1e9 / limit.gflops,
                bytes / experts / 1e9,
                100.0 * bytes / experts / 1e9 / limit.gigabytes,
                route * 1e3,
            );
        }
        println!("  after: {}", self::limit(threads, device.path(), clock));
    }
}

/// Runs `step` several times; returns the shares of the run of median length.
fn median(repeat: usize, clock: Clock, mut step: impl FnMut(&mut Shares)) -> Shares {
    let mut runs: Vec<Shares> = (0..=repeat)
        .map(|_| {
            let mut shares = Shares::new(clock);
            step(&mut shares);
            shares
        })
        .skip(1)
        .collect();
    runs.sort_by(|a, b| a.total().total_cmp(&b.total()));
    runs.swap_remove(repeat / 2)
}

/// Times every format in turns, and prints the medians.
fn compare(arguments: &Arguments, threads: usize) {
    let limits = Limits { rows_max: 2048, sampled_max: 32 };
    let clock = clock::of(threads);
    let mut loaded: Vec<(CpuDevice, Qwen)> = arguments
        .formats
        .iter()
        .map(|format| {
            let options = CpuOptions { threads, cores: Some((0..threads).collect()), path: arguments.path };
            let mut device = CpuDevice::new(options, limits).expect("a device");
            let start = Instant::now();
            let model = Qwen::load(&mut device, *format);
            println!("{}: loaded in {:.2} s", format.name, start.elapsed().as_secs_f64());
            touch(&mut device, &model, clock);
            (device, model)
        })
        .collect();
    let steps: Vec<(String, Steps)> = (arguments.prefill.iter().map(|&n| (format!("prefill {n}"), Steps::prefill(n))))
        .chain(arguments.decode.iter().map(|&n| (format!("decode b{n}"), Steps::decode(n, arguments.context))))
        .collect();
    println!("{}", penstock_kernels::Device::info(&loaded[0].0).name);
    for (name, steps) in &steps {
        let mut seconds = vec![Vec::new(); loaded.len()];
        for _ in 0..arguments.rounds {
            for ((device, model), seconds) in loaded.iter_mut().zip(&mut seconds) {
                let repeat = if steps.tokens.len() > 100 { 1 } else { arguments.repeat };
                seconds.push(
                    median(repeat, clock, |shares| model.step(device, &steps.batch(&steps.spans()), shares)).total(),
                );
            }
        }
        let medians: Vec<f64> = seconds
            .iter_mut()
            .map(|seconds| {
                seconds.sort_by(f64::total_cmp);
                seconds[seconds.len() / 2]
            })
            .collect();
        print!("  {name:<12}");
        for (format, median) in arguments.formats.iter().zip(&medians) {
            print!(" | {} {:.1} tok/s {:.2}x", format.name, steps.tokens.len() as f64 / median, medians[0] / median);
        }
        println!();
    }
}

/// Tokens, tables and contexts of one kind of step.
struct Steps {
    tokens: Vec<u32>,
    tables: Vec<Vec<u32>>,
    context: usize,
    sampled: Vec<usize>,
}

impl Steps {
    fn prefill(tokens: usize) -> Self {
        let tables = vec![(0..tokens.div_ceil(PAGE_TOKENS) as u32).rev().collect()];
        let ids = (0..tokens as u32).map(|i| i * 7 % 150_000).collect();
        Self { tokens: ids, tables, context: tokens, sampled: vec![tokens - 1] }
    }

    fn decode(sequences: usize, context: usize) -> Self {
        let pages = context.div_ceil(PAGE_TOKENS);
        let tables = (0..sequences).map(|s| (0..pages).map(|p| (p * sequences + s) as u32).collect()).collect();
        Self { tokens: (0..sequences as u32).collect(), tables, context, sampled: (0..sequences).collect() }
    }

    fn spans(&self) -> Vec<Span<'_>> {
        let rows = self.tokens.len() / self.tables.len();
        let span = |(i, table)| Span {
            rows: i * rows..(i + 1) * rows,
            context: self.context,
            block_table: table,
            adapter: None,
        };
        self.tables.iter().map(Vec::as_slice).enumerate().map(span).collect()
    }

    fn batch<'a>(&'a self, spans: &'a [Span<'a>]) -> StepBatch<'a> {
        StepBatch { tokens: &self.tokens, spans, sampled: &self.sampled, ..Default::default() }
    }
}

fn prefill(device: &mut CpuDevice, model: &Qwen, tokens: usize, repeat: usize, limit: &MachineLimits, clock: Clock) {
    let steps = Steps::prefill(tokens);
    let spans = steps.spans();
    let batch = steps.batch(&spans);
    let shares = median(repeat, clock, |shares| model.step(device, &batch, shares));
    let rate = model.layer_flops() as f64 * tokens as f64 / shares.products() / 1e9;
    println!(
        "  prefill {tokens:>4}: {:>7.1} tok/s; products {rate:.0} GFLOP/s = {:.0} % of limit; {shares}",
        tokens as f64 / shares.total(),
        100.0 * rate / limit.gflops,
    );
}

/// Writes a token to every page of the KV cache: memory never written is one shared page of zeros, which is always in cache.
fn touch(device: &mut CpuDevice, model: &Qwen, clock: Clock) {
    let pages: Vec<u32> = (0..shape::PAGES as u32).collect();
    let spans: Vec<Span<'_>> = (0..shape::PAGES)
        .map(|i| Span { rows: i..i + 1, context: 1, block_table: &pages[i..=i], adapter: None })
        .collect();
    model.step(
        device,
        &StepBatch { tokens: &pages, spans: &spans, sampled: &[0], ..Default::default() },
        &mut Shares::new(clock),
    );
}

fn decode(
    device: &mut CpuDevice,
    model: &Qwen,
    sequences: usize,
    arguments: &Arguments,
    limit: &MachineLimits,
    clock: Clock,
) {
    let context = arguments.context;
    let steps = Steps::decode(sequences, context);
    let spans = steps.spans();
    let batch = steps.batch(&spans);
    let shares = median(arguments.repeat * 5, clock, |shares| model.step(device, &batch, shares));
    let steps = 1.0 / shares.total();
    let flops = (model.layer_flops() + model.head_flops()) as f64 * sequences as f64;
    let (memory, compute) =
        (model.step_bytes(sequences, context) as f64 / limit.gigabytes / 1e9, flops / limit.gflops / 1e9);
    println!(
        "  decode b{sequences:<2}: {:>7.1} tok/s; {:.1} GB/s; {:.0} % of the roofline ({:.1} ms memory, {:.1} ms compute); {shares}",
        steps * sequences as f64,
        model.step_bytes(sequences, context) as f64 * steps / 1e9,
        100.0 * memory.max(compute) * steps,
        memory * 1e3,
        compute * 1e3,
    );
}
