//! Report of a run in one JSON line.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use crate::RunArgs;

/// Counts of a run.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// Number of correct answers.
    pub(crate) complete: usize,
    /// Number of events with content, over all correct answers.
    pub(crate) chunks: usize,
    /// Bytes of bodies.
    pub(crate) bytes: usize,
    /// Errors, with the number of each.
    pub(crate) errors: BTreeMap<String, usize>,
    /// Times from request to end of answer.
    pub(crate) latency: Vec<Duration>,
    /// Times from request to first content.
    pub(crate) first: Vec<Duration>,
}

/// Measurements of the watched process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Watched {
    /// CPU time of the run.
    pub(crate) cpu_seconds: f64,
    /// Memory before the run, in bytes.
    pub(crate) memory_before: u64,
    /// Largest memory during the run, in bytes.
    pub(crate) memory_peak: u64,
}

impl Tally {
    /// Adds the counts of another tally.
    pub(crate) fn add(&mut self, other: Tally) {
        self.complete += other.complete;
        self.chunks += other.chunks;
        self.bytes += other.bytes;
        for (error, count) in other.errors {
            *self.errors.entry(error).or_default() += count;
        }
        self.latency.extend(other.latency);
        self.first.extend(other.first);
    }
}

/// Makes one line of JSON; absent figures are null. `waves`: memory after each wave.
pub(crate) fn line(args: &RunArgs, mut tally: Tally, wall: Duration, watched: Option<Watched>, waves: &[u64]) -> Value {
    let per = |count: usize| watched.filter(|_| count > 0).map(|seen| round(seen.cpu_seconds * 1e6 / count as f64));
    json!({
        "name": args.name,
        "stream": args.stream,
        "connections": args.connections,
        "prompt_bytes": args.prompt_bytes,
        "tokens": args.tokens,
        "complete": tally.complete,
        "errors": tally.errors,
        "wall_s": round(wall.as_secs_f64()),
        "requests_per_s": round(tally.complete as f64 / wall.as_secs_f64()),
        "chunks": tally.chunks,
        "cpu_us_per_request": per(tally.complete),
        "cpu_us_per_chunk": per(tally.chunks),
        "latency_ms": quantiles(&mut tally.latency),
        "first_ms": quantiles(&mut tally.first),
        "memory_mib": watched.map(|seen| mib(seen.memory_peak)),
        "memory_after_mib": waves.iter().map(|bytes| mib(*bytes)).collect::<Vec<_>>(),
        "memory_kib_per_connection": watched.map(|seen| {
            round(seen.memory_peak.saturating_sub(seen.memory_before) as f64 / 1024.0 / args.connections as f64)
        }),
    })
}

fn mib(bytes: u64) -> f64 {
    round(bytes as f64 / f64::from(1 << 20))
}

pub(crate) fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

fn quantiles(values: &mut [Duration]) -> Value {
    values.sort_unstable();
    let at = |share: f64| {
        let index = ((values.len() as f64 * share) as usize).min(values.len().saturating_sub(1));
        values.get(index).map(|value| round(value.as_secs_f64() * 1e3))
    };
    json!({ "p50": at(0.5), "p99": at(0.99) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_few_values() {
        let milliseconds = |values: &[u64]| values.iter().map(|&ms| Duration::from_millis(ms)).collect::<Vec<_>>();
        assert_eq!(quantiles(&mut milliseconds(&[3, 1, 2])), json!({ "p50": 2.0, "p99": 3.0 }));
        assert_eq!(quantiles(&mut []), json!({ "p50": null, "p99": null }));
    }
}
