//! Debounced log of limits that begin and cease to refuse: one line each, however many requests they refuse in between.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// Time without a refusal after which a limit has ceased to refuse.
const QUIET_MS: u64 = 60_000;
/// Most counters followed at a time, and so lines per [`QUIET_MS`]. Refusals by further counters are only counted.
const COUNTERS_MAX: usize = 64;

/// Debounced log of limits: the counters that refuse at present, under one lock.
#[derive(Debug, Default)]
pub(super) struct Refusals(Mutex<Now>);

#[derive(Debug, Default)]
struct Now {
    /// Counters that refuse at present, by id of the limit and subject.
    refusing: HashMap<(String, String), Refusing>,
    /// Number of requests refused by counters that no longer fit into the map.
    others: u64,
    swept_ms: u64,
}

#[derive(Debug)]
struct Refusing {
    requests: u64,
    last_ms: u64,
}

/// Line of the refusal log: a counter begins or ceases to refuse, or further counters refused.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Line {
    Begins,
    Ends { limit: String, subject: String, requests: u64 },
    Others { requests: u64 },
}

impl Refusals {
    /// Notes that a counter has refused a request.
    pub(super) fn add(&self, limit: &str, subject: &str, now_ms: u64) {
        if self.lock().add(limit, subject, now_ms) == Some(Line::Begins) {
            tracing::info!(limit, subject, "a limit refuses requests");
        }
    }

    /// Logs the counters that have ceased to refuse. Called with each sweep.
    pub(super) fn sweep(&self, now_ms: u64) {
        let lines = self.lock().sweep(now_ms);
        for line in lines {
            match line {
                Line::Begins => {}
                Line::Ends { limit, subject, requests } => {
                    tracing::info!(limit, subject, requests, "a limit no longer refuses requests");
                }
                Line::Others { requests } => {
                    tracing::info!(requests, "more limits refused requests than the log names")
                }
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Now> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Now {
    fn add(&mut self, limit: &str, subject: &str, now_ms: u64) -> Option<Line> {
        let key = (limit.to_owned(), subject.to_owned());
        if let Some(known) = self.refusing.get_mut(&key) {
            (known.requests, known.last_ms) = (known.requests + 1, now_ms);
            return None;
        }
        if self.refusing.len() >= COUNTERS_MAX {
            self.others += 1;
            return None;
        }
        self.refusing.insert(key, Refusing { requests: 1, last_ms: now_ms });
        Some(Line::Begins)
    }

    fn sweep(&mut self, now_ms: u64) -> Vec<Line> {
        if now_ms < self.swept_ms + QUIET_MS {
            return Vec::new();
        }
        self.swept_ms = now_ms;
        let is_over = |_: &(String, String), known: &mut Refusing| now_ms >= known.last_ms + QUIET_MS;
        let ended = self.refusing.extract_if(is_over);
        let mut lines: Vec<Line> =
            ended.map(|((limit, subject), known)| Line::Ends { limit, subject, requests: known.requests }).collect();
        if self.others > 0 {
            lines.push(Line::Others { requests: std::mem::take(&mut self.others) });
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_counter_is_said_once_until_it_was_quiet() {
        let mut now = Now::default();
        assert_eq!(now.add("minute", "key_a", 0), Some(Line::Begins));
        assert_eq!(now.add("minute", "key_b", 0), Some(Line::Begins));
        for at in 1..1000 {
            assert_eq!(now.add("minute", "key_a", at * 100), None);
        }
        let ended = Line::Ends { limit: "minute".into(), subject: "key_b".into(), requests: 1 };
        assert_eq!(now.sweep(100_000), [ended]);
        assert_eq!(now.sweep(170_000).len(), 1, "key_a has refused nothing for a minute");
        assert_eq!(now.add("minute", "key_a", 170_001), Some(Line::Begins));
    }

    #[test]
    fn many_counters_are_counted_and_not_said() {
        let mut now = Now::default();
        let lines = (0..10_000).filter_map(|at| now.add("minute", &at.to_string(), at));
        assert_eq!(lines.count(), COUNTERS_MAX);
        assert_eq!(now.refusing.len(), COUNTERS_MAX);
        let others = Line::Others { requests: 10_000 - COUNTERS_MAX as u64 };
        assert!(now.sweep(20_000_000).contains(&others));
        assert!(now.sweep(40_000_000).is_empty());
    }
}
