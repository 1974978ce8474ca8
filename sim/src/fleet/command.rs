//! `penstock simulate`: its arguments and its tables.

use super::ablation::{Part, ablations};
use super::audit::{Audit, WEIGHTS, alternatives, record};
use super::engine::{Sizes, TOKEN_BYTES};
use super::eviction::{Found, Order, replay};
use super::peer::Foreign;
use super::placement::Policy;
use super::recorded;
use super::report::Report;
use super::run::{Kill, Replicas, Setup, run, run_with_outcomes};
use super::search::highest_rate;
use super::trace::{Shape, Trace, shifting, synthetic, tide};
use clap::Args;
use penstock_router::replicas::ReplicaLimits;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Most tokens of a tier: each of its blocks takes a hundred bytes of memory here.
const TIER_TOKENS_MAX: f64 = 1e8;

const EXAMPLES: &str = "\
Examples:
  penstock simulate                                                   a small trace that is made up
  penstock simulate --trace hour.jsonl.gz --rate 1,1.5,2              how the fleet does at these rates
  penstock simulate --trace hour.jsonl.gz --find 0.9                  the highest rate with 90 % of the requests in SLO
  penstock simulate --trace hour.jsonl.gz --policies round_robin,cache_aware
  penstock simulate --trace hour.jsonl.gz --rate 1.5 --ablate         what each part of the router is worth
  penstock simulate --shift 600 --roles mixed,2:6,6:2,follow          long prompts, then long answers: who prefills for whom
  penstock simulate --tide 1800 --replicas 4,6,8,1:8                  traffic that comes and goes: fixed numbers of engines, and one that follows
  penstock simulate --trace hour.jsonl.gz --kill 3@600s --slow 2:0.5  an engine dies, another is slow
  penstock simulate --trace hour.jsonl.gz --rate 1.5 --disk-tokens 4e6 --ablate   with a tier on each engine's disk
  penstock simulate --trace hour.jsonl.gz --evict 4e6                 what such a tier finds, by who is evicted first
  penstock simulate --trace hour.jsonl.gz --record decisions.jsonl
  penstock simulate --replay decisions.jsonl                          what other weights would have made of it

A trace has one request a line, as Mooncake publishes them:
  {\"timestamp\": 5000, \"input_length\": 1100, \"output_length\": 40, \"hash_ids\": [7, 8]}";

/// Arguments of `penstock simulate`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct SimulateArgs {
    /// Requests to replay (JSON lines, also gzipped); without it some are made up
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Leave out the first requests of the trace
    #[arg(long, value_name = "N", default_value_t = 0)]
    skip: usize,
    /// Replay at most so many requests
    #[arg(long, value_name = "N", default_value_t = usize::MAX, hide_default_value = true)]
    limit: usize,
    /// How much faster than recorded requests come
    #[arg(long, value_name = "FACTOR", value_delimiter = ',', default_values_t = [1.0])]
    rate: Vec<f64>,
    /// Look for the highest rate with this share of the requests in SLO
    #[arg(long, value_name = "SHARE", conflicts_with = "rate")]
    find: Option<f64>,
    /// Where the search begins to bisect
    #[arg(long, value_name = "FACTOR", default_value_t = 4.0)]
    rate_max: f64,
    /// Runs of a search
    #[arg(long, value_name = "N", default_value_t = 8)]
    steps: usize,
    /// Who chooses engines: cache_aware is the router of this gateway; round_robin, least_load, power_of_two, session; rules of
    /// other routers: longest_match, block_cost, least_ttft; what it does in front of other servers: foreign_events, foreign_guess; with perfect knowledge: oracle; with one cache for all: bound
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_values_t = [Policy::Router(penstock_router::Policy::CacheAware)])]
    policies: Vec<Policy>,
    /// Run without each part of the router in turn
    #[arg(long, conflicts_with_all = ["policies", "replay"])]
    ablate: bool,
    /// Run without parts of the router: promises, fit, credits, tpot, fairness, prefetch
    #[arg(long, value_name = "PARTS", value_delimiter = ',')]
    without: Vec<Part>,
    /// A weight of the router's cost: own, congestion, decoding, step, pressure
    #[arg(long = "weight", value_name = "NAME=VALUE", value_parser = weight)]
    weights: Vec<(usize, f64)>,
    /// Weights of the rules foreign_events and foreign_guess: OWN:HARM:ANSWER
    #[arg(long, value_name = "WEIGHTS", value_parser = foreign)]
    foreign: Option<Foreign>,
    /// Engines (8, or with --replay as many as were recorded)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    engines: Option<u16>,
    /// Tokens that an engine's KV cache holds (a million, or as recorded)
    #[arg(long, value_name = "TOKENS")]
    kv_tokens: Option<f64>,
    /// Tokens of a tier in host memory beside it
    #[arg(long, value_name = "TOKENS", default_value_t = 0.0)]
    host_tokens: f64,
    /// Tokens of a tier on each engine's disk
    #[arg(long, value_name = "TOKENS", default_value_t = 0.0)]
    disk_tokens: f64,
    /// Gigabytes a second that it reads
    #[arg(long, value_name = "GBYTES", default_value_t = 6.0)]
    disk_gbytes: f64,
    /// Tokens of a store that all engines share
    #[arg(long, value_name = "TOKENS", default_value_t = 0.0)]
    remote_tokens: f64,
    /// Gigabytes a second that each engine reads from it
    #[arg(long, value_name = "GBYTES", default_value_t = 10.0)]
    remote_gbytes: f64,
    /// Instead of a run: what a device and a tier of so many tokens below it find, by who is evicted from the tier first
    #[arg(long, value_name = "TOKENS", conflicts_with_all = ["find", "ablate", "policies", "record", "replay", "roles", "replicas", "json"])]
    evict: Option<f64>,
    /// Share of the cache that blocks which were read again may hold against others
    #[arg(long, value_name = "SHARE", default_value_t = Sizes::default().active_share)]
    active_share: f64,
    /// Tokens of a step (8192, or as recorded)
    #[arg(long, value_name = "TOKENS")]
    batch_tokens: Option<usize>,
    /// Sequences of an engine at once (256, or as recorded)
    #[arg(long, value_name = "N")]
    sequences: Option<usize>,
    /// Standard deviation of the factor on the time of a step
    #[arg(long, value_name = "SHARE", default_value_t = 0.1)]
    noise: f64,
    /// An engine dies then; with +SECONDS, another takes its place so much later (60)
    #[arg(long = "kill", value_name = "ENGINE@SECONDS", value_parser = kill)]
    kills: Vec<Kill>,
    /// An engine has this share of the others' speed
    #[arg(long = "slow", value_name = "ENGINE:SHARE", value_parser = slow)]
    slow: Vec<(usize, f64)>,
    /// Instead of a trace: so many seconds of long prompts, then as many of long answers
    #[arg(long, value_name = "SECONDS", conflicts_with = "trace")]
    shift: Option<f64>,
    /// Who prefills for whom, a row each: mixed, PREFILL:OTHERS, or follow (mixed at first, then as the planner finds)
    #[arg(long, value_name = "ROLES", value_delimiter = ',', value_parser = roles)]
    roles: Vec<(String, usize, bool)>,
    /// Instead of a trace: traffic that comes and goes once in so many seconds
    #[arg(long, value_name = "SECONDS", conflicts_with_all = ["trace", "shift"])]
    tide: Option<f64>,
    /// How many engines there are, a row each: a number, or LEAST:MOST (the least at first, then as the planner finds)
    #[arg(long, value_name = "ENGINES", value_delimiter = ',', value_parser = replicas, conflicts_with_all = ["engines", "roles", "ablate", "replay"])]
    replicas: Vec<(usize, usize)>,
    /// With --replicas: seconds until an engine that is started serves
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0)]
    start: f64,
    /// With --replicas: an engine is stopped when fewer would have been enough for so many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 120.0)]
    idle: f64,
    /// Gigabytes of KV that an engine can send and receive in a second; 0: none. With --roles 25
    #[arg(long, value_name = "GBYTES")]
    link: Option<f64>,
    /// Another tenant sends so many times the trace's requests
    #[arg(long, value_name = "FACTOR")]
    flood: Option<f64>,
    /// Seconds to the first token of an empty prompt that are good
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    slo_ttft: f64,
    /// More of them per thousand tokens of the prompt
    #[arg(long, value_name = "SECONDS", default_value_t = 0.15)]
    slo_ttft_per_thousand: f64,
    /// Mean seconds between tokens that are good
    #[arg(long, value_name = "SECONDS", default_value_t = 0.1)]
    slo_tpot: f64,
    /// Refuse requests whose first token is predicted so many times later than its objective; 0: none
    #[arg(long, value_name = "TIMES", default_value_t = 0.0)]
    refuse_above: f64,
    /// Seeds of noise and ties; several give several rows
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1])]
    seeds: Vec<u64>,
    /// Write the decisions of the first run there
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Replay a file of recorded router decisions, then simulate the same requests with the given weights and with each
    /// weight off, halved and doubled, and compare the results
    #[arg(long, value_name = "FILE", conflicts_with_all = ["trace", "policies", "find"])]
    replay: Option<PathBuf>,
    /// Reports as JSON, one a line
    #[arg(long)]
    json: bool,
}

/// Reason why a simulation cannot run.
#[derive(Debug, thiserror::Error)]
pub enum SimulateError {
    /// The trace cannot be opened or read.
    #[error("cannot read {path}")]
    Read {
        /// Path of the trace file.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// A line of the trace is invalid, or the trace is too long or empty.
    #[error("{path}")]
    Trace {
        /// Path of the trace file.
        path: PathBuf,
        /// Line and fault of the trace.
        source: super::trace::TraceError,
    },
    /// An argument is out of range or contradicts another; the text says which.
    #[error("{0}")]
    Argument(&'static str),
    /// The output cannot be written.
    #[error("cannot write")]
    Write(#[from] std::io::Error),
}

/// Opener of a file, decompressed, for reading lines.
pub type Open<'a> = &'a dyn Fn(&Path) -> std::io::Result<Box<dyn BufRead>>;

/// Results of a command, for charts of what its tables say.
#[derive(Clone, Debug)]
pub struct Results {
    /// Trace and engines, in a sentence.
    pub about: String,
    /// Rows of the table, each with its name; `None`: the search found no rate.
    pub rows: Vec<(String, Option<Report>)>,
    /// Results by eviction order, in place of rows (`--evict`).
    pub evictions: Vec<(Order, Found)>,
    /// True if the number of engines is what the rows differ in (`--replicas`).
    pub is_scaled: bool,
    /// True if the rate of each row is what was looked for (`--find`).
    pub is_search: bool,
    /// Lines below the table: an audit's verdict.
    pub verdict: Vec<String>,
}

impl SimulateArgs {
    /// True if the reports are wanted as JSON.
    pub fn is_json(&self) -> bool {
        self.json
    }
}

/// Runs the simulations that the arguments ask for and writes their tables.
///
/// # Errors
/// [`SimulateError`].
pub fn simulate(args: &SimulateArgs, open: Open<'_>, out: &mut dyn Write) -> Result<Results, SimulateError> {
    let trace = load(args, open)?;
    let setup = setup(args, &trace)?;
    let about = about(&trace, args, &setup);
    let mut results = Results {
        about,
        rows: Vec::new(),
        evictions: Vec::new(),
        is_scaled: !args.replicas.is_empty(),
        is_search: args.find.is_some(),
        verdict: Vec::new(),
    };
    if !args.json {
        writeln!(out, "{}\n", results.about)?;
    }
    if let Some(tokens) = args.evict {
        let found = all(&Order::ALL, |order| replay(&trace, &setup.sizes, &setup.speed, tokens as usize, *order));
        results.evictions = Order::ALL.into_iter().zip(found).collect();
        write_evictions(&results.evictions, out)?;
        return Ok(results);
    }
    let jobs = jobs(args, &trace, &setup);
    if let Some(path) = &args.record {
        let (_, first) = jobs.first().ok_or(SimulateError::Argument("nothing to run"))?;
        let (_, outcomes) = run_with_outcomes(&trace, first);
        record(&trace, &outcomes, &first.slo, std::io::BufWriter::new(std::fs::File::create(path)?))?;
    }
    results.rows = all(&jobs, |(name, setup)| {
        let found = match args.find {
            Some(goal) => highest_rate(&trace, setup, goal, args.rate_max, args.steps),
            None => Some(run(&trace, setup)),
        };
        (name.clone(), found)
    });
    if args.json {
        for (name, report) in results.rows.iter().filter_map(|(name, report)| Some((name, report.as_ref()?))) {
            let named = Report { name: name.clone(), ..report.clone() };
            serde_json::to_writer(&mut *out, &named).map_err(std::io::Error::from)?;
            writeln!(out)?;
        }
        return Ok(results);
    }
    write_table(&results.rows, out)?;
    if results.is_scaled {
        write_spent(&results.rows, out)?;
    }
    if args.replay.is_some() {
        results.verdict = regret(&trace, &results.rows);
        for line in &results.verdict {
            writeln!(out, "\n{line}")?;
        }
    }
    Ok(results)
}

fn load(args: &SimulateArgs, open: Open<'_>) -> Result<Trace, SimulateError> {
    if let Some(seconds) = args.shift.filter(|seconds| *seconds > 0.0 && *seconds < 1e5) {
        return with_flood(Trace::new(shifting(seconds, 1)), args, Path::new("the trace"));
    }
    if let Some(seconds) = args.tide.filter(|seconds| *seconds > 0.0 && *seconds < 1e5) {
        return with_flood(Trace::new(tide(seconds, 1)), args, Path::new("the trace"));
    }
    let Some(path) = args.replay.as_ref().or(args.trace.as_ref()) else {
        let requests = synthetic(&Shape { requests: args.limit.min(400), ..Shape::default() });
        return with_flood(Trace::new(requests), args, Path::new("the trace"));
    };
    let lines = open(path).map_err(|source| SimulateError::Read { path: path.clone(), source })?;
    with_flood(Trace::read(lines, args.skip, args.limit), args, path)
}

/// Adds a tenant that sends far more than the others.
fn with_flood(
    trace: Result<Trace, super::trace::TraceError>,
    args: &SimulateArgs,
    path: &Path,
) -> Result<Trace, SimulateError> {
    let fault = |source| SimulateError::Trace { path: path.into(), source };
    let trace = trace.map_err(fault)?;
    let Some(factor) = args.flood.filter(|factor| *factor > 0.0) else { return Ok(trace) };
    let count = (trace.requests.len() as f64 * factor) as usize;
    let tenant = trace.requests.iter().map(|request| request.tenant).max().unwrap_or(0) + 1;
    let per_second = count as f64 / trace.seconds().max(1.0);
    let flood = Shape { requests: count, per_second, sessions: 64, tenant, seed: 7, ..Shape::default() };
    let mut requests = trace.requests;
    requests.extend(synthetic(&flood));
    requests.sort_by(|a, b| a.arrival.total_cmp(&b.arrival));
    Trace::new(requests).map_err(fault)
}

fn setup(args: &SimulateArgs, trace: &Trace) -> Result<Setup, SimulateError> {
    let kv_tokens = args.kv_tokens.unwrap_or(1e6);
    let positive = [kv_tokens, args.slo_tpot, args.rate_max, args.disk_gbytes, args.remote_gbytes];
    if positive.into_iter().chain(args.rate.iter().copied()).any(|value| !(value > 0.0 && value < 1e9)) {
        return Err(SimulateError::Argument("rates, --kv-tokens, --slo-tpot, --rate-max and gigabytes are positive"));
    }
    let tiers = [args.disk_tokens, args.remote_tokens, args.evict.unwrap_or_default()];
    if !tiers.iter().all(|tokens| (0.0..=TIER_TOKENS_MAX).contains(tokens)) {
        return Err(SimulateError::Argument("--disk-tokens, --remote-tokens and --evict are at most 1e8"));
    }
    if ![args.start, args.idle].iter().all(|seconds| (0.0..1e6).contains(seconds)) {
        return Err(SimulateError::Argument("--start and --idle are not negative"));
    }
    let sizes = [args.host_tokens, args.noise, args.refuse_above, args.slo_ttft, args.slo_ttft_per_thousand];
    if sizes.iter().any(|value| !(*value >= 0.0 && *value < 1e9))
        || [args.batch_tokens, args.sequences].contains(&Some(0))
    {
        return Err(SimulateError::Argument("sizes and times are not negative, and a step has tokens and sequences"));
    }
    let mut setup = Setup { noise: args.noise, ..Setup::default() };
    if args.replay.is_some() {
        recorded::take_from(trace, &mut setup);
    }
    setup.engines = args.engines.map_or(setup.engines, usize::from);
    setup.sizes.kv_tokens = args.kv_tokens.map_or(setup.sizes.kv_tokens, |tokens| tokens as usize);
    setup.sizes.batch_tokens = args.batch_tokens.unwrap_or(setup.sizes.batch_tokens);
    setup.sizes.sequences_max = args.sequences.unwrap_or(setup.sizes.sequences_max);
    setup.sizes.host_tokens = args.host_tokens as usize;
    setup.sizes.disk_tokens = args.disk_tokens as usize;
    setup.sizes.remote_tokens = args.remote_tokens as usize;
    setup.speed.disk = TOKEN_BYTES / (args.disk_gbytes * 1e9);
    setup.speed.remote = TOKEN_BYTES / (args.remote_gbytes * 1e9);
    setup.sizes.active_share = args.active_share.clamp(0.0, 1.0);
    setup.slo.ttft = args.slo_ttft;
    setup.slo.ttft_per_thousand = args.slo_ttft_per_thousand;
    setup.slo.tpot = args.slo_tpot;
    setup.limits.slo = Some(penstock_router::Slo {
        ttft: Duration::from_secs_f64(args.slo_ttft),
        ttft_per_1k: Duration::from_secs_f64(args.slo_ttft_per_thousand),
        tpot: Duration::from_secs_f64(args.slo_tpot),
        refuse_above: args.refuse_above,
    });
    setup.kills.clone_from(&args.kills);
    // The first value given for an engine counts.
    setup.slow.splice(0..0, args.slow.iter().copied());
    setup.foreign = args.foreign.unwrap_or_default();
    for part in &args.without {
        part.take_from(&mut setup.parts);
    }
    for (at, value) in &args.weights {
        *WEIGHTS[*at].1(&mut setup.weights) = *value;
    }
    let link = args.link.unwrap_or(if args.roles.is_empty() { 0.0 } else { 25.0 });
    if !(0.0..1e6).contains(&link) {
        return Err(SimulateError::Argument("--link is not negative"));
    }
    setup.apart.link = link * 1e9;
    if args.roles.iter().any(|(_, prefill, follow)| (*prefill > 0 || *follow) && link <= 0.0) {
        return Err(SimulateError::Argument("--roles needs a --link"));
    }
    let others = |name: &str| name.split_once(':').and_then(|(_, others)| others.parse::<usize>().ok());
    let adds_up = |(name, prefill, _): &(String, usize, bool)| {
        !name.contains(':') || others(name).is_some_and(|others| others > 0 && prefill + others == setup.engines)
    };
    if !args.roles.iter().all(adds_up) {
        return Err(SimulateError::Argument("--roles adds up to --engines, with somebody to decode"));
    }
    let known = |engine: usize| engine < setup.engines;
    if !args.kills.iter().all(|kill| known(kill.engine)) || !args.slow.iter().all(|(engine, _)| known(*engine)) {
        return Err(SimulateError::Argument("--kill and --slow name engines from 0"));
    }
    Ok(setup)
}

/// Setups to run, each with the name of its row.
fn jobs(args: &SimulateArgs, trace: &Trace, setup: &Setup) -> Vec<(String, Setup)> {
    let mut jobs = Vec::new();
    let rates = if args.find.is_some() { &[1.0][..] } else { &args.rate };
    for seed in &args.seeds {
        for rate in rates {
            let base = Setup { seed: *seed, rate: *rate, ..setup.clone() };
            if args.replay.is_some() {
                jobs.extend(alternatives(trace, &base));
            } else if args.ablate {
                jobs.extend(ablations(trace, &base));
            } else if !args.roles.is_empty() {
                for (name, prefill, follow) in &args.roles {
                    let mut setup = base.clone();
                    (setup.apart.prefill, setup.apart.follow) = (*prefill, *follow);
                    jobs.push((name.clone(), setup));
                }
            } else if !args.replicas.is_empty() {
                jobs.extend(args.replicas.iter().map(|bounds| scaled(args, *bounds, &base)));
            } else {
                let of = |policy: &Policy| (policy.to_string(), Setup { policy: *policy, ..base.clone() });
                jobs.extend(args.policies.iter().map(of));
            }
        }
    }
    jobs
}

/// Setup with a fixed number of engines, or one that follows the load.
fn scaled(args: &SimulateArgs, (least, most): (usize, usize), base: &Setup) -> (String, Setup) {
    let mut setup = Setup { engines: most, ..base.clone() };
    if least == most {
        return (most.to_string(), setup);
    }
    let idle = Duration::from_secs_f64(args.idle);
    let limits = ReplicaLimits { min: least, max: most, idle, ..ReplicaLimits::default() };
    setup.replicas = Some(Replicas { limits, start: args.start });
    (format!("{least}:{most}"), setup)
}

/// Runs all jobs, as many at once as there are processors; results are in order.
fn all<J: Sync, R: Send>(jobs: &[J], job: impl Fn(&J) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(jobs.len());
    let mut results: Vec<(usize, R)> = std::thread::scope(|scope| {
        let work = || {
            let mut done = Vec::new();
            while let Some((at, found)) = {
                let at = next.fetch_add(1, Ordering::Relaxed);
                jobs.get(at).map(|found| (at, found))
            } {
                done.push((at, job(found)));
            }
            done
        };
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("a run does not panic")).collect()
    });
    results.sort_by_key(|(at, _)| *at);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Sentence on the trace and the engines.
fn about(trace: &Trace, args: &SimulateArgs, setup: &Setup) -> String {
    let count = trace.requests.len() as f64;
    let bounds =
        |(least, most): &(usize, usize)| if least == most { most.to_string() } else { format!("{least}:{most}") };
    let engines = match args.replicas.as_slice() {
        [] => setup.engines.to_string(),
        several => several.iter().map(bounds).collect::<Vec<_>>().join(", "),
    };
    let mean = |of: fn(&super::trace::Request) -> usize| trace.requests.iter().map(of).sum::<usize>() as f64 / count;
    format!(
        "{} requests in {:.0} s, {:.0} tokens in and {:.0} out on average, {:.1} % of the prompts known to a cache of any size; engines: {}",
        trace.requests.len(),
        trace.seconds(),
        mean(|request| request.input),
        mean(|request| request.output),
        trace.ideal_hit_rate() * 100.0,
        engines,
    )
}

fn write_table(rows: &[(String, Option<Report>)], out: &mut dyn Write) -> std::io::Result<()> {
    writeln!(out, "{}", Report::head())?;
    for (name, report) in rows {
        match report {
            Some(report) => writeln!(out, "{}", report.row(name))?,
            None => writeln!(out, "| {name} | none found |")?,
        }
    }
    for (name, report) in rows.iter().filter_map(|(name, report)| Some((name, report.as_ref()?))) {
        for note in report.notes() {
            writeln!(out, "\n{name} at {}: {note}", report.rate)?;
        }
    }
    Ok(())
}

/// Writes the hit rates by eviction order.
fn write_evictions(all: &[(Order, Found)], out: &mut dyn Write) -> std::io::Result<()> {
    writeln!(out, "| first to go | blocks found % | seconds saved % |\n|---|---|---|")?;
    for (order, found) in all {
        writeln!(out, "| {order} | {:.1} | {:.1} |", found.blocks * 100.0, found.seconds * 100.0)?;
    }
    Ok(())
}

/// Writes the time that engines were running.
fn write_spent(rows: &[(String, Option<Report>)], out: &mut dyn Write) -> std::io::Result<()> {
    writeln!(out, "\n| engines | seconds of engines | most | starts and stops | in SLO % |\n|---|---|---|---|---|")?;
    for (name, report) in rows.iter().filter_map(|(name, report)| Some((name, report.as_ref()?))) {
        let Report { engine_seconds, engines_most, scalings, in_slo, .. } = report;
        writeln!(out, "| {name} | {engine_seconds:.0} | {engines_most} | {scalings} | {:.1} |", in_slo * 100.0)?;
    }
    Ok(())
}

/// Verdict of an audit: TTFT as recorded beside that of the replay, and the regret.
fn regret(trace: &Trace, rows: &[(String, Option<Report>)]) -> Vec<String> {
    let mut lines = Vec::new();
    let found = rows.iter().filter_map(|(name, report)| Some((name.clone(), report.clone()?)));
    let audit = Audit::of(found.collect());
    if let (Some([p50, p99]), Some((name, decided))) = (recorded::ttft(trace), audit.rows.first()) {
        let [again, _, last] = decided.ttft;
        lines.push(format!(
            "TTFT as recorded: p50 {p50:.2} s, p99 {p99:.2} s; {name}: p50 {again:.2} s, p99 {last:.2} s"
        ));
    }
    if let Some((name, best)) = audit.rows.get(audit.best) {
        lines.push(format!(
            "regret: {:.1} points in SLO; best: {name} ({:.1} % in SLO, mean TTFT {:.2} s)",
            audit.regret() * 100.0,
            best.in_slo * 100.0,
            best.ttft_mean
        ));
    }
    lines
}

fn weight(text: &str) -> Result<(usize, f64), String> {
    let (name, value) = text.split_once('=').ok_or("NAME=VALUE, for example own=2")?;
    let at = WEIGHTS.iter().position(|(known, _)| *known == name);
    let at =
        at.ok_or_else(|| format!("no weight {name:?}; there are {}", WEIGHTS.map(|(known, _)| known).join(", ")))?;
    let value: f64 = value.parse().map_err(|_| format!("{value:?} is not a number"))?;
    if (0.0..1e6).contains(&value) { Ok((at, value)) } else { Err("a weight is not negative".into()) }
}

fn foreign(text: &str) -> Result<Foreign, String> {
    let numbers: Result<Vec<f64>, _> = text.split(':').map(str::parse).collect();
    match numbers.as_deref() {
        Ok([own, harm, answer]) if [own, harm, answer].into_iter().all(|number| (0.0..1e9).contains(number)) => {
            Ok(Foreign { own: *own, harm: *harm, answer: *answer })
        }
        _ => Err(format!("{text:?} is not three numbers, as 2:0.05:64")),
    }
}

/// Parses the least and the most engines.
fn replicas(text: &str) -> Result<(usize, usize), String> {
    let number = |text: &str| text.parse::<usize>().ok().filter(|count| (1..=64).contains(count));
    let (least, most) = text.split_once(':').unwrap_or((text, text));
    let bounds = number(least).zip(number(most)).filter(|(least, most)| least <= most);
    bounds.ok_or_else(|| format!("{text:?} is neither a number of engines nor LEAST:MOST as 1:8"))
}

/// Parses the name of the row, the number of engines that prefill at first, and whether that number changes.
fn roles(text: &str) -> Result<(String, usize, bool), String> {
    let bad = || format!("{text:?} is none of mixed, follow, or PREFILL:OTHERS as 2:6");
    let (prefill, follow) = match text {
        "mixed" => (0, false),
        "follow" => (0, true),
        _ => (text.split_once(':').and_then(|(prefill, _)| prefill.parse().ok()).ok_or_else(bad)?, false),
    };
    Ok((text.to_owned(), prefill, follow))
}

fn seconds(text: &str) -> Result<f64, String> {
    let number = text.trim_end_matches('s');
    let value: f64 = number.parse().map_err(|_| format!("{text:?} is not a time in seconds"))?;
    if (0.0..1e9).contains(&value) { Ok(value) } else { Err(format!("{text:?} is not a time to come")) }
}

fn kill(text: &str) -> Result<Kill, String> {
    let (engine, when) = text.split_once('@').ok_or("ENGINE@SECONDS, for example 3@600s")?;
    let engine = engine.parse().map_err(|_| format!("{engine:?} is not an engine's number"))?;
    let (at, away) = when.split_once('+').unwrap_or((when, "60"));
    Ok(Kill { engine, at: seconds(at)?, away: seconds(away)? })
}

fn slow(text: &str) -> Result<(usize, f64), String> {
    let (engine, share) = text.split_once(':').ok_or("ENGINE:SHARE, for example 2:0.5")?;
    let engine = engine.parse().map_err(|_| format!("{engine:?} is not an engine's number"))?;
    let share: f64 = share.parse().map_err(|_| format!("{share:?} is not a share"))?;
    if (0.01..=100.0).contains(&share) { Ok((engine, share)) } else { Err("a share is from 0.01 to 100".into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_read_or_named() {
        assert_eq!(kill("3@600s"), Ok(Kill { engine: 3, at: 600.0, away: 60.0 }));
        assert_eq!(kill("0@5+2s"), Ok(Kill { engine: 0, at: 5.0, away: 2.0 }));
        assert!(kill("3").is_err() && kill("x@1").is_err() && kill("1@-4").is_err());
        assert_eq!(slow("2:0.5"), Ok((2, 0.5)));
        assert!(slow("2:0").is_err());
        assert_eq!(weight("step=20"), Ok((3, 20.0)));
        assert_eq!(roles("2:6"), Ok(("2:6".into(), 2, false)));
        assert!(roles("follow").is_ok_and(|(_, prefill, follow)| prefill == 0 && follow) && roles("some").is_err());
        assert_eq!((replicas("4"), replicas("1:8")), (Ok((4, 4)), Ok((1, 8))));
        assert!(replicas("8:1").is_err() && replicas("0:3").is_err() && replicas("1:65").is_err());
        assert!(weight("beta=2").unwrap_err().contains("own, congestion"));
    }
}
