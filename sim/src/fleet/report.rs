//! Results of a run: one row of a table.

use super::ask::Outcome;
use super::engine::Sums;
use super::run::{Setup, Spent};
use super::trace::{Request, Trace};
use serde::Serialize;
use std::collections::BTreeMap;

/// Service-level objectives (SLO) of a request, for TTFT and TPOT.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slo {
    /// Seconds to the first token of an empty prompt.
    pub ttft: f64,
    /// Further seconds to the first token per thousand prompt tokens.
    pub ttft_per_thousand: f64,
    /// Objective for the mean seconds between tokens (TPOT).
    pub tpot: f64,
}

impl Default for Slo {
    fn default() -> Self {
        Self { ttft: 1.0, ttft_per_thousand: 0.15, tpot: 0.1 }
    }
}

impl Slo {
    /// Returns true if a finished request met the objectives for TTFT and TPOT.
    pub fn met(&self, request: &Request, outcome: &Outcome) -> bool {
        let Some(first) = outcome.first.filter(|_| outcome.done) else { return false };
        let in_time = first - outcome.arrival <= self.ttft + self.ttft_per_thousand * request.input as f64 / 1000.0;
        in_time && tpot(request, outcome).is_none_or(|tpot| tpot <= self.tpot)
    }
}

/// Mean seconds between the tokens of a request that has more than one.
fn tpot(request: &Request, outcome: &Outcome) -> Option<f64> {
    let first = outcome.first.filter(|_| request.output > 1)?;
    Some(if outcome.done { (outcome.latest - first) / (request.output - 1) as f64 } else { f64::INFINITY })
}

/// Quantiles of the times to the first token.
const QUANTILES: [f64; 3] = [0.5, 0.9, 0.99];

/// Number of bins, of a millisecond each, for gaps between tokens.
const BINS: usize = 20_000;

/// Histogram of the times between tokens, filled during a run.
#[derive(Clone, Debug)]
pub struct Ledger {
    gaps: Vec<u64>,
}

impl Default for Ledger {
    fn default() -> Self {
        Self { gaps: vec![0; BINS + 1] }
    }
}

impl Ledger {
    /// Records the time between two tokens of a request.
    pub fn gap(&mut self, seconds: f64) {
        self.gaps[((seconds * 1e3) as usize).min(BINS)] += 1;
    }

    fn quantile(&self, share: f64) -> f64 {
        let total: u64 = self.gaps.iter().sum();
        let mut seen = 0;
        let bin = self.gaps.iter().position(|count| {
            seen += count;
            seen as f64 >= share * total as f64
        });
        bin.unwrap_or(0) as f64 / 1e3
    }
}

/// Results of one tenant's requests, a part of [`Report`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TenantReport {
    /// Number of the tenant's requests.
    pub requests: usize,
    /// Share of the tenant's requests in SLO, of 1.
    pub in_slo: f64,
    /// Seconds to the first token, p50.
    pub ttft_p50: f64,
    /// Seconds to the first token, p99.
    pub ttft_p99: f64,
}

/// Results of a run; times in seconds, shares of 1.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Name of the row, which tells the setting that the run varies.
    pub name: String,
    /// Name of the placement policy.
    pub policy: String,
    /// Rate of arrivals relative to the trace.
    pub rate: f64,
    /// Number of requests in the trace.
    pub requests: usize,
    /// Requests that got all their tokens.
    pub finished: usize,
    /// Requests that the gateway or an engine refused.
    pub rejected: usize,
    /// Number of changes of an engine's role.
    pub flips: u64,
    /// Seconds that engines ran, including their start and drain.
    pub engine_seconds: f64,
    /// Most engines that ran at once.
    pub engines_most: usize,
    /// Number of engines started and stopped because of the load.
    pub scalings: u64,
    /// Number of engines lost, summed over requests.
    pub resumes: u64,
    /// Longest silence of a stream whose engine was lost, in seconds.
    pub gap_max: f64,
    /// Share of prompt tokens read from a cache.
    pub hit: f64,
    /// Share of prompt tokens read from the host tier.
    pub host_hit: f64,
    /// Share of prompt tokens loaded from disk or the shared store.
    pub tier_hit: f64,
    /// Number of requests with loaded blocks; [`Self::brought_ttft`] has their times.
    pub brought: usize,
    /// Time to the first token of requests with loaded blocks: p50, p90, p99.
    pub brought_ttft: [f64; 3],
    /// Prefetched blocks that a request found on the device.
    pub prefetched: u64,
    /// Prefetched blocks that no request found within a minute.
    pub unused: u64,
    /// Share of prompt tokens that the router believed cached at the chosen engine.
    pub believed: f64,
    /// Time to the first token: p50, p90, p99.
    pub ttft: [f64; 3],
    /// Mean time to the first token, in seconds.
    pub ttft_mean: f64,
    /// Mean time between tokens of a request, p50 and p99.
    pub tpot: [f64; 2],
    /// Times between two tokens of any request, p50 and p99.
    pub itl: [f64; 2],
    /// Share of all requests that met the objectives.
    pub in_slo: f64,
    /// Requests per second that met the objectives.
    pub goodput: f64,
    /// Prefill of the busiest engine over the mean.
    pub imbalance: f64,
    /// Engines of another speed: index, speed relative to the others, prefill relative to their mean.
    pub slow: Vec<(usize, f64, f64)>,
    /// Share of the time that engines were in a step.
    pub busy: f64,
    /// Jain's index over tenants' shares in SLO: 1 means equal.
    pub fairness: f64,
    /// Results by tenant, where there are several.
    pub tenants: BTreeMap<u32, TenantReport>,
}

impl Report {
    /// Sums up a run: one row from the outcomes of its requests and the counters of its engines.
    pub fn of(
        trace: &Trace,
        setup: &Setup,
        outcomes: &[Outcome],
        sums: &[Sums],
        ledger: &Ledger,
        spent: Spent,
    ) -> Self {
        let rows: Vec<Row> =
            outcomes.iter().enumerate().map(|(at, outcome)| Row::of(trace, setup, at, outcome)).collect();
        let total = |of: fn(&Sums) -> u64| sums.iter().map(of).sum::<u64>() as f64;
        let looked_up = total(|sums| sums.looked_up).max(1.0);
        let prefilled: Vec<f64> = sums.iter().map(|sums| sums.prefilled as f64).collect();
        let mean = prefilled.iter().sum::<f64>() / prefilled.len() as f64;
        let good = rows.iter().filter(|row| row.good).count();
        let believed: usize = outcomes.iter().map(|outcome| outcome.believed).sum();
        let prompts: usize = trace.requests.iter().map(|request| request.input).sum();
        let tenants = by_tenant(&rows);
        let brought = rows.iter().zip(outcomes).filter(|(_, outcome)| outcome.brought > 0);
        let brought: Vec<f64> = brought.map(|(row, _)| row.ttft).collect();
        Self {
            name: String::new(),
            policy: setup.policy.to_string(),
            rate: setup.rate,
            requests: rows.len(),
            finished: outcomes.iter().filter(|outcome| outcome.done).count(),
            rejected: outcomes.iter().filter(|outcome| outcome.rejected).count(),
            flips: 0,
            engine_seconds: spent.seconds,
            engines_most: spent.most,
            scalings: spent.starts + spent.stops,
            resumes: outcomes.iter().map(|outcome| u64::from(outcome.resumes)).sum(),
            gap_max: outcomes.iter().map(|outcome| outcome.gap).fold(0.0, f64::max),
            hit: total(|sums| sums.hits) / looked_up,
            host_hit: total(|sums| sums.host_hits) / looked_up,
            tier_hit: total(|sums| sums.tier_hits) / looked_up,
            brought: brought.len(),
            brought_ttft: QUANTILES.map(|share| quantile(brought.iter().copied(), share)),
            prefetched: total(|sums| sums.prefetched) as u64,
            unused: total(|sums| sums.unused) as u64,
            believed: believed as f64 / prompts.max(1) as f64,
            ttft: QUANTILES.map(|share| quantile(rows.iter().map(|row| row.ttft), share)),
            ttft_mean: rows.iter().map(|row| row.ttft).sum::<f64>() / rows.len().max(1) as f64,
            tpot: [0.5, 0.99].map(|share| quantile(rows.iter().filter_map(|row| row.tpot), share)),
            itl: [0.5, 0.99].map(|share| ledger.quantile(share)),
            in_slo: good as f64 / rows.len().max(1) as f64,
            goodput: good as f64 / (trace.seconds() / setup.rate).max(1e-9),
            imbalance: prefilled.iter().copied().fold(0.0, f64::max) / mean.max(1.0),
            slow: slow_shares(setup, &prefilled),
            busy: sums.iter().map(|sums| sums.busy).sum::<f64>() / spent.seconds.max(1e-9),
            fairness: jain(tenants.values().map(|tenant| tenant.in_slo)),
            tenants: if tenants.len() > 1 { tenants } else { BTreeMap::new() },
        }
    }

    /// Headings of the report's table; [`Self::cells`] are under them.
    pub const COLUMNS: [&'static str; 15] = [
        "policy",
        "rate",
        "hit %",
        "tiers %",
        "TTFT p50 s",
        "p90",
        "p99",
        "TPOT p50 ms",
        "p99",
        "ITL p50 ms",
        "p99",
        "in SLO %",
        "goodput /s",
        "max/mean",
        "busy %",
    ];

    /// Cells of the report's row, with `name` in the first column.
    pub fn cells(&self, name: &str) -> [String; 15] {
        let [ttft, tpot, itl] = [&self.ttft[..], &self.tpot, &self.itl];
        [
            name.to_owned(),
            ((self.rate * 1000.0).round() / 1000.0).to_string(),
            format!("{:.1}", self.hit * 100.0),
            format!("{:.1}", (self.host_hit + self.tier_hit) * 100.0),
            format!("{:.2}", ttft[0]),
            format!("{:.2}", ttft[1]),
            format!("{:.2}", ttft[2]),
            format!("{:.1}", tpot[0] * 1e3),
            format!("{:.1}", tpot[1] * 1e3),
            format!("{:.0}", itl[0] * 1e3),
            format!("{:.0}", itl[1] * 1e3),
            format!("{:.1}", self.in_slo * 100.0),
            format!("{:.2}", self.goodput),
            format!("{:.2}", self.imbalance),
            format!("{:.0}", self.busy * 100.0),
        ]
    }

    /// Head of the table in Markdown.
    pub fn head() -> String {
        format!("| {} |\n|{}", Self::COLUMNS.join(" | "), "---|".repeat(Self::COLUMNS.len()))
    }

    /// Row of the table in Markdown under [`Self::head`], with `name` in its first column.
    pub fn row(&self, name: &str) -> String {
        format!("| {} |", self.cells(name).join(" | "))
    }
}

impl Report {
    /// Further results that have no column: deaths, refusals, slow engines, tiers, tenants.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.resumes > 0 {
            notes.push(format!(
                "{} streams lost their engine, {} of {} finished, longest silence {:.2} s",
                self.resumes, self.finished, self.requests, self.gap_max
            ));
        }
        if self.rejected > 0 {
            notes.push(format!("{} requests refused", self.rejected));
        }
        if self.flips > 0 {
            notes.push(format!("{} changes of roles", self.flips));
        }
        for (engine, speed, prefill) in &self.slow {
            notes.push(format!(
                "engine {engine} has {speed:.2} of the others' speed and did {prefill:.2} of their mean prefill"
            ));
        }
        if self.brought > 0 {
            let [p50, p90, p99] = self.brought_ttft;
            notes.push(format!(
                "{} requests read from disk or the store, TTFT p50 {p50:.2} s, p90 {p90:.2} s, p99 {p99:.2} s; {} blocks came ahead and were used, {} were not",
                self.brought, self.prefetched, self.unused
            ));
        }
        for (tenant, report) in &self.tenants {
            notes.push(format!(
                "tenant {tenant}: {} requests, {:.1} % in SLO, TTFT p50 {:.2} s, p99 {:.2} s",
                report.requests,
                report.in_slo * 100.0,
                report.ttft_p50,
                report.ttft_p99
            ));
        }
        notes
    }
}

struct Row {
    tenant: u32,
    ttft: f64,
    tpot: Option<f64>,
    good: bool,
}

impl Row {
    fn of(trace: &Trace, setup: &Setup, at: usize, outcome: &Outcome) -> Self {
        let request = &trace.requests[at];
        let ttft = outcome.first.map_or(f64::INFINITY, |first| first - outcome.arrival);
        let (tpot, good) = (tpot(request, outcome), setup.slo.met(request, outcome));
        Self { tenant: request.tenant, ttft, tpot, good }
    }
}

/// Prefill of engines of another speed, relative to the mean of the usual ones.
fn slow_shares(setup: &Setup, prefilled: &[f64]) -> Vec<(usize, f64, f64)> {
    let is_slow = |engine: usize| setup.slow.iter().any(|(slow, _)| *slow == engine);
    let others: Vec<f64> = (0..prefilled.len()).filter(|at| !is_slow(*at)).map(|at| prefilled[at]).collect();
    let mean = others.iter().sum::<f64>() / others.len().max(1) as f64;
    let share = |(engine, speed): &(usize, f64)| Some((*engine, *speed, prefilled.get(*engine)? / mean.max(1.0)));
    setup.slow.iter().filter_map(share).collect()
}

fn by_tenant(rows: &[Row]) -> BTreeMap<u32, TenantReport> {
    let mut tenants: BTreeMap<u32, Vec<&Row>> = BTreeMap::new();
    rows.iter().for_each(|row| tenants.entry(row.tenant).or_default().push(row));
    let report = |rows: Vec<&Row>| TenantReport {
        requests: rows.len(),
        in_slo: rows.iter().filter(|row| row.good).count() as f64 / rows.len() as f64,
        ttft_p50: quantile(rows.iter().map(|row| row.ttft), 0.5),
        ttft_p99: quantile(rows.iter().map(|row| row.ttft), 0.99),
    };
    tenants.into_iter().map(|(tenant, rows)| (tenant, report(rows))).collect()
}

fn jain(shares: impl Iterator<Item = f64>) -> f64 {
    let (mut sum, mut squares, mut count) = (0.0, 0.0, 0.0);
    shares.for_each(|share| (sum, squares, count) = (sum + share, squares + share * share, count + 1.0));
    if squares > 0.0 { sum * sum / (count * squares) } else { 1.0 }
}

/// Quantile of the values; 0 if there are none.
pub(super) fn quantile(values: impl Iterator<Item = f64>, share: f64) -> f64 {
    let mut values: Vec<f64> = values.collect();
    if values.is_empty() {
        return 0.0;
    }
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * share) as usize]
}
