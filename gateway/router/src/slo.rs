//! Service level objectives of a pool, and the bound beyond which a request is refused rather than queued.

use std::time::Duration;

/// Latency objectives of a pool (TTFT and TPOT), which order its queue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slo {
    /// Objective of the TTFT, without the prompt's share.
    pub ttft: Duration,
    /// Addition to the TTFT per thousand prompt tokens.
    pub ttft_per_1k: Duration,
    /// Objective of the TPOT, the mean time between tokens.
    pub tpot: Duration,
    /// Factor on the objective: a new request with a later predicted TTFT is refused; 0: never.
    pub refuse_above: f64,
}

impl Default for Slo {
    fn default() -> Self {
        Self {
            ttft: Duration::from_secs(1),
            ttft_per_1k: Duration::from_millis(150),
            tpot: Duration::from_millis(100),
            refuse_above: 0.0,
        }
    }
}

impl Slo {
    /// TTFT objective for a prompt of `tokens` tokens.
    pub fn ttft(&self, tokens: usize) -> Duration {
        let share = self.ttft_per_1k.as_secs_f64() * tokens as f64 / 1000.0;
        self.ttft + Duration::try_from_secs_f64(share).unwrap_or(Duration::MAX / 2)
    }

    /// Time by which a predicted TTFT exceeds the bound; `None`: it does not.
    pub fn too_late(&self, predicted: Duration, tokens: usize) -> Option<Duration> {
        let bearable = self.ttft(tokens).as_secs_f64() * self.refuse_above;
        let over = predicted.as_secs_f64() - bearable;
        (self.refuse_above > 0.0 && over > 0.0).then(|| Duration::try_from_secs_f64(over).unwrap_or(Duration::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_prompts_may_take_longer() {
        let slo = Slo { refuse_above: 2.0, ..Slo::default() };
        assert_eq!(slo.ttft(10_000), Duration::from_millis(2500));
        assert_eq!(slo.too_late(Duration::from_secs(5), 10_000), None);
        assert_eq!(slo.too_late(Duration::from_secs(6), 10_000), Some(Duration::from_secs(1)));
        assert_eq!(Slo::default().too_late(Duration::MAX, 1), None, "0 is never");
    }
}
