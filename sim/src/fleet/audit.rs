//! Record of the router's decisions, and their replay under other parameters.
//!
//! A decision is a line of a trace with the chosen engine and the outcome, so a record is a trace too. [`audit`]
//! replays it as decided, then with the weights given, then with each weight off, halved and doubled: the regret is
//! the gain of the best alternative over the decisions.

use super::ask::Outcome;
use super::peer::Rule;
use super::placement::Policy;
use super::report::{Report, Slo};
use super::run::{Setup, run};
use super::trace::{Request, Trace};
use penstock_router::Weights;
use serde::Serialize;
use std::io::Write;

#[derive(Serialize)]
struct Decision<'a> {
    timestamp: f64,
    input_length: usize,
    output_length: usize,
    hash_ids: &'a [u64],
    session: u64,
    tenant: u32,
    engine: usize,
    believed: usize,
    cached: usize,
    ttft_ms: Option<f64>,
    in_slo: bool,
}

/// Writes the decisions of a run, one per line.
///
/// # Errors
/// An error of the writer.
pub fn record(trace: &Trace, outcomes: &[Outcome], slo: &Slo, mut out: impl Write) -> std::io::Result<()> {
    for (request, outcome) in trace.requests.iter().zip(outcomes) {
        let decision = Decision {
            timestamp: outcome.arrival * 1e3,
            input_length: request.input,
            output_length: request.output,
            hash_ids: &request.ids,
            session: request.session,
            tenant: request.tenant,
            engine: outcome.engine,
            believed: outcome.believed,
            cached: outcome.cached,
            ttft_ms: outcome.first.map(|first| (first - outcome.arrival) * 1e3),
            in_slo: slo.met(request, outcome),
        };
        serde_json::to_writer(&mut out, &decision)?;
        out.write_all(b"\n")?;
    }
    out.flush()
}

/// A weight of the router by its name.
pub type Weight = (&'static str, fn(&mut Weights) -> &mut f64);

/// The weights of the cost that can be changed one by one.
pub const WEIGHTS: [Weight; 5] = [
    ("own", |weights| &mut weights.own),
    ("congestion", |weights| &mut weights.congestion),
    ("decoding", |weights| &mut weights.decoding),
    ("step", |weights| &mut weights.step),
    ("pressure", |weights| &mut weights.pressure),
];

/// Setups that [`audit`] compares, with their names: as decided first, then the setup's own weights.
pub fn alternatives(trace: &Trace, setup: &Setup) -> Vec<(String, Setup)> {
    let mut all = Vec::new();
    if trace.requests.iter().any(|request: &Request| request.engine.is_some()) {
        all.push(("as decided".to_owned(), Setup { policy: Policy::Peer(Rule::Recorded), ..setup.clone() }));
    }
    all.push(("weights as given".to_owned(), setup.clone()));
    for (name, weight) in WEIGHTS {
        for (word, factor) in [("off", 0.0), ("halved", 0.5), ("doubled", 2.0)] {
            let mut changed = setup.clone();
            *weight(&mut changed.weights) *= factor;
            if changed.weights != setup.weights {
                all.push((format!("{name} {word}"), changed));
            }
        }
    }
    all
}

/// Result of an audit: the reports of alternative settings, and the best of them.
#[derive(Clone, Debug)]
pub struct Audit {
    /// Reports of all alternatives, in the order of [`alternatives`].
    pub rows: Vec<(String, Report)>,
    /// Index of the best alternative: most requests in SLO, then least mean TTFT.
    pub best: usize,
}

impl Audit {
    /// Picks the best of the alternatives.
    pub fn of(rows: Vec<(String, Report)>) -> Self {
        let value = |report: &Report| (report.in_slo, -report.ttft_mean);
        let better = |a: &usize, b: &usize| {
            value(&rows[*a].1).partial_cmp(&value(&rows[*b].1)).unwrap_or(std::cmp::Ordering::Equal).then(b.cmp(a))
        };
        let best = (0..rows.len()).max_by(better).unwrap_or(0);
        Self { rows, best }
    }

    /// Share of the requests that only the best alternative would have had in SLO.
    pub fn regret(&self) -> f64 {
        self.rows.first().map_or(0.0, |(_, decided)| self.rows[self.best].1.in_slo - decided.in_slo)
    }
}

/// Replays a record; see the module header.
pub fn audit(trace: &Trace, setup: &Setup) -> Audit {
    let rows = alternatives(trace, setup).into_iter().map(|(name, setup)| (name, run(trace, &setup)));
    Audit::of(rows.collect())
}
