//! Speed of a modelled worker as measured from its steps alone, like a real worker's.

/// Weight of the past at each measured step.
const FADE: f64 = 0.9;
/// Least rows of a step from which the prefill speed is measured.
const PREFILL_ROWS_MIN: usize = 16;

/// Speed of one engine as measured from its steps, faded over about ten of them.
#[derive(Clone, Debug, Default)]
pub struct Meter {
    rows: f64,
    seconds: f64,
    step: f64,
}

/// Work of one step: tokens of prefill, decode and loads.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepWork {
    /// Prompt tokens computed in the step.
    pub prefill: usize,
    /// Attended tokens of the prefill: sum over its tokens of the tokens before each.
    pub attention: f64,
    /// Sequences that decoded one token in the step.
    pub decodes: usize,
    /// Sum of the decoding sequences' context lengths, in tokens.
    pub context: usize,
    /// Tokens of KV read from the host tier in the step.
    pub loaded: usize,
}

impl Meter {
    /// Records a step that did `work` and took `seconds`.
    pub fn observe(&mut self, work: &StepWork, seconds: f64) {
        self.step = seconds;
        if work.prefill >= PREFILL_ROWS_MIN && work.prefill >= work.decodes && seconds > 0.0 {
            self.rows = self.rows * FADE + (work.prefill + work.decodes) as f64;
            self.seconds = self.seconds * FADE + seconds;
        }
    }

    /// Prompt tokens per second; 0 until measured.
    pub fn prefill_tokens_per_second(&self) -> f64 {
        if self.seconds > 0.0 { self.rows / self.seconds } else { 0.0 }
    }

    /// Seconds of the last step.
    pub fn step_seconds(&self) -> f64 {
        self.step
    }
}
