//! CPU time and memory of this process, and of compiling and starting a grammar in it.

use penstock_grammar::{Grammar, GrammarError, MatchError, Source, TokenText, Vocabulary};
use penstock_vocabulary::TokenBytes;
use std::sync::Arc;

/// Tokens that are followed after a hostile text was compiled.
const WALK: usize = 40;

/// Vocabulary of the demo model.
pub(crate) fn demo() -> Arc<Vocabulary> {
    let json = include_bytes!("../../../../models/penstock-demo/tokenizer.json");
    let table = TokenBytes::from_json(json).expect("the demo tokenizer");
    let tokens = (0..table.count()).map(|id| TokenText { bytes: table.token(id), is_special: table.is_special(id) });
    Vocabulary::new(tokens, &[], table.count() as usize).expect("the demo vocabulary")
}

/// Cost of one source, and what became of it.
pub(crate) struct Cost {
    pub(crate) seconds: f64,
    pub(crate) bytes: u64,
    /// Longest mask in seconds of CPU.
    pub(crate) mask_seconds: f64,
    pub(crate) outcome: String,
}

impl std::fmt::Display for Cost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let megabytes = self.bytes as f64 / 1e6;
        write!(f, "{:.3} s, {megabytes:.1} MB, mask {:.4} s: {}", self.seconds, self.mask_seconds, self.outcome)
    }
}

/// Compiles a source and follows it for a while, always with the allowed token of the lowest or highest id in turn.
pub(crate) fn measure(source: &Source) -> Cost {
    let vocabulary = demo();
    let mut mask_seconds = 0.0_f64;
    let ((outcome, seconds), _, bytes) = spent(|| {
        let began = cpu_seconds();
        let compiled = Grammar::compile(source, &vocabulary);
        let seconds = cpu_seconds() - began;
        let outcome = match &compiled {
            Ok(grammar) => match walk(grammar, &mut mask_seconds) {
                Ok(tokens) => format!("compiled, {tokens} tokens followed"),
                Err(error) => format!("compiled, then: {error}"),
            },
            Err(error) => variant(error),
        };
        (outcome, seconds)
    });
    Cost { seconds, bytes, mask_seconds, outcome }
}

/// What `work` returns, its CPU seconds, and the most memory that it held.
pub(crate) fn spent<T>(work: impl FnOnce() -> T) -> (T, f64, u64) {
    // The peak so far is that of what came before, such as reading the tokenizer.
    std::fs::write("/proc/self/clear_refs", "5").expect("Linux");
    let (memory, began) = (resident("VmRSS:"), cpu_seconds());
    let done = work();
    (done, cpu_seconds() - began, resident("VmHWM:").saturating_sub(memory))
}

fn variant(error: &GrammarError) -> String {
    format!("refused: {error}")
}

fn walk(grammar: &Grammar, longest: &mut f64) -> Result<usize, MatchError> {
    let mut matcher = grammar.matcher();
    for step in 0..WALK {
        let began = cpu_seconds();
        let mask = matcher.mask()?;
        *longest = longest.max(cpu_seconds() - began);
        let mut allowed =
            (0..mask.bits.len() as u32 * 32).filter(|token| mask.bits[*token as usize / 32] >> (token % 32) & 1 == 1);
        let token = if step % 2 == 0 { allowed.next() } else { allowed.next_back() };
        match token {
            Some(token) => matcher.consume(token)?,
            None => return Ok(step),
        }
    }
    Ok(WALK)
}

fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Bytes of a line of `/proc/self/status`.
fn resident(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find(|line| line.starts_with(field)).expect("a known field");
    let kilobytes: u64 = line[field.len()..].trim().trim_end_matches(" kB").parse().expect("a number");
    kilobytes * 1024
}
