//! Histogram of a worker's decode step times: the gap between two tokens of the sequences it runs, by the worker's own clock.

/// Upper bound of the first bucket, in seconds.
const LEAST: f64 = 1e-5;

/// Buckets per doubling: a reported percentile is at most 9.1 % (a factor of 2^(1/8)) too high.
const PER_DOUBLING: f64 = 8.0;

/// Number of buckets; the last one reaches to 335 s, and longer steps count in it.
const BUCKETS: usize = 200;

/// Counts of step times per bucket, of one life of a worker.
pub(super) struct StepTimes {
    counts: [u64; BUCKETS],
    longest: f64,
}

/// Summary of the decode step times, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DecodeSteps {
    /// Number of steps with decodes that were counted.
    pub count: u64,
    /// Median duration of a step with decodes (p50), in seconds.
    pub p50: f64,
    /// 99th percentile of the durations of steps with decodes (p99), in seconds.
    pub p99: f64,
    /// Longest duration of a step with decodes, in seconds.
    pub max: f64,
}

impl Default for StepTimes {
    fn default() -> Self {
        Self { counts: [0; BUCKETS], longest: 0.0 }
    }
}

impl StepTimes {
    /// Counts one step; zero, negative and non-finite values are left out.
    pub(super) fn add(&mut self, seconds: f64) {
        if seconds.is_finite() && seconds > 0.0 {
            let bucket = ((seconds / LEAST).log2() * PER_DOUBLING).ceil().max(0.0) as usize;
            self.counts[bucket.min(BUCKETS - 1)] += 1;
            self.longest = self.longest.max(seconds);
        }
    }

    pub(super) fn summary(&self) -> DecodeSteps {
        let count = self.counts.iter().sum();
        let [p50, p99] = [0.5, 0.99].map(|share| self.quantile(share, count));
        DecodeSteps { count, p50, p99, max: self.longest }
    }

    /// Upper bound of the bucket that holds this share of `count`, at most the longest step.
    fn quantile(&self, share: f64, count: u64) -> f64 {
        let rank = (share * count as f64).ceil() as u64;
        let mut below = 0;
        let reaches = |here: &u64| {
            below += here;
            below >= rank
        };
        let end = |bucket: usize| LEAST * (bucket as f64 / PER_DOUBLING).exp2();
        self.counts.iter().position(reaches).map_or(0.0, end).min(self.longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_what_was_added() {
        let mut times = StepTimes::default();
        assert_eq!(times.summary(), DecodeSteps::default());
        (1..=1000).for_each(|n| times.add(f64::from(n) / 1000.0));
        let DecodeSteps { count, p50, p99, max } = times.summary();
        assert_eq!((count, max), (1000, 1.0));
        assert!((0.5..0.55).contains(&p50) && (0.99..=1.0).contains(&p99), "{p50} {p99}");
    }

    #[test]
    fn a_worker_may_say_anything() {
        let mut times = StepTimes::default();
        [f64::NAN, f64::INFINITY, -1.0, 0.0].into_iter().for_each(|seconds| times.add(seconds));
        assert_eq!(times.summary().count, 0);
        [1e-300, 1e300].into_iter().for_each(|seconds| times.add(seconds));
        assert_eq!((times.summary().count, times.summary().max), (2, 1e300));
    }
}
