//! Search for the highest rate at which the share of requests in SLO stays above a goal.

use super::report::Report;
use super::run::{Setup, run};
use super::trace::Trace;

/// Bisects between 0 and `rate_max` in `steps` runs: the highest rate found with `goal` of the requests in SLO, and its report.
pub fn highest_rate(trace: &Trace, setup: &Setup, goal: f64, rate_max: f64, steps: usize) -> Option<Report> {
    let (mut low, mut high) = (0.0, rate_max);
    let mut best = None;
    let mut rate = rate_max / 2.0;
    for _ in 0..steps {
        let report = run(trace, &Setup { rate, ..setup.clone() });
        if report.in_slo >= goal {
            low = rate;
            best = Some(report);
        } else {
            high = rate;
        }
        rate = (low + high) / 2.0;
    }
    best
}
