//! Result of a bench as text: a table, and a chart of decode by batch.

use std::fmt::Write;

use penstock_worker::bench::{BenchReport, BoundBy, Timed};

use crate::chart::{Bar, lines, number};

/// Table and chart of `report`, whose sequences decode behind `context` tokens.
pub(super) fn table(report: &BenchReport, context: usize) -> String {
    let mut out = String::new();
    for (name, text) in facts(report) {
        let _ = writeln!(out, "{name:<10}{text}");
    }
    let _ = writeln!(out, "\n{:<16}{:>12}{:>12}   of the machine's limit", "", "tokens/s", "ms");
    for timed in &report.prefill {
        row(&mut out, &format!("prefill {}", timed.size), timed);
    }
    for timed in &report.decode {
        row(&mut out, &format!("decode x{}", timed.size), timed);
    }
    if report.decode.len() > 1 {
        let title = format!("decoded tokens a second by number of sequences, each behind {context} tokens");
        let bars: Vec<Bar> = report.decode.iter().map(|timed| Bar::new(timed.size.to_string(), timed.rate())).collect();
        out += &lines(&title, &bars);
    }
    out
}

/// Lines about model and machine.
pub(super) fn facts(report: &BenchReport) -> Vec<(&'static str, String)> {
    let weights = report.weights_bytes as f64 / 1e9;
    let limits = report.limits.map_or_else(|| "not measured on this device".to_owned(), |limits| limits.to_string());
    vec![
        ("model", format!("{} ({}, {}, {weights:.2} GB)", report.model, report.architecture, report.weight_format)),
        ("device", report.device.clone()),
        ("limits", limits),
        ("load", format!("{:.2} s", report.load_seconds)),
        ("steps", format!("at most {} tokens: scheduling, forward pass, greedy sampling", report.batch_tokens)),
    ]
}

/// Name of what bounds a step.
pub(super) fn bound(by: BoundBy) -> &'static str {
    match by {
        BoundBy::Arithmetic => "arithmetic",
        BoundBy::Memory => "memory",
    }
}

/// Share of the limit, for a person; a dash where the limit is not known.
pub(super) fn share(timed: &Timed) -> String {
    match (timed.share(), timed.bound) {
        (Some(share), Some((_, by))) => format!("{:.0} % ({})", 100.0 * share, bound(by)),
        _ => "-".to_owned(),
    }
}

fn row(out: &mut String, name: &str, timed: &Timed) {
    let (rate, time) = (number(timed.rate()), number(1e3 * timed.seconds));
    let _ = writeln!(out, "{name:<16}{rate:>12}{time:>12}   {}", share(timed));
}

#[cfg(test)]
mod tests {
    use super::super::tests::report;
    use super::*;

    #[test]
    fn a_report_is_a_table_and_a_chart() {
        let want = "\
model     small (Qwen3ForCausalLM, bf16, 1.19 GB)
device    cpu, 2 threads
limits    not measured on this device
load      1.50 s
steps     at most 512 tokens: scheduling, forward pass, greedy sampling

                    tokens/s          ms   of the machine's limit
prefill 512              256        2000   50 % (arithmetic)
decode x1               20.0        50.0   80 % (memory)
decode x8               80.0         100   -

decoded tokens a second by number of sequences, each behind 128 tokens
     1 ██████████ 20.0
     8 ████████████████████████████████████████ 80.0
";
        assert_eq!(table(&report(), 128), want);
    }
}
