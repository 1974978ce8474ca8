//! Result of a bench as one page for a browser: no scripts, nothing loaded from elsewhere, light and dark.

use std::fmt::Write;

use penstock_worker::bench::{BenchReport, Timed};

use super::table::{facts, number, share};

/// Width of the longest bar, and height of a row, in pixels.
const BAR: f64 = 420.0;
const ROW: usize = 34;

const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#57606a;--line:#d0d7de;--bar:#0969da;--back:#fff}\
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9198a1;--line:#3d444d;--bar:#4493f8;--back:#0d1117}}\
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back);max-width:46rem;margin:2rem auto;padding:0 1rem}\
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse;width:100%}\
th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid var(--line)}th{color:var(--soft);font-weight:500}\
.n{text-align:right;font-variant-numeric:tabular-nums}svg{max-width:100%;height:auto}\
rect{fill:var(--bar)}text{fill:var(--ink);font:14px system-ui,sans-serif}";

/// Page of `report`, whose sequences decode behind `context` tokens.
pub(super) fn page(report: &BenchReport, context: usize) -> String {
    let title = format!("penstock bench: {}", escaped(&report.model));
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\n\
         <meta name=\"viewport\" content=\"width=device-width\"><meta http-equiv=\"Content-Security-Policy\" \
         content=\"default-src 'none'; style-src 'nonce-bench'\">\n<style nonce=\"bench\">{STYLE}</style></head><body>\n<h1>{title}</h1>\n<table>\n"
    );
    let version = ("penstock", env!("CARGO_PKG_VERSION").to_owned());
    for (name, text) in facts(report).into_iter().chain([version]) {
        let _ = writeln!(out, "<tr><th scope=\"row\">{name}</th><td>{}</td></tr>", escaped(&text));
    }
    out += "</table>\n";
    part(&mut out, "Prefill", "tokens of the prompt", &report.prefill);
    let decode = format!("Decode, each sequence behind {context} tokens");
    part(&mut out, &decode, "sequences", &report.decode);
    out += "<p>The limit of a step is the larger of two times: its bytes at the memory bandwidth, and its operations at the arithmetic that \
            were measured in the same run.</p>\n</body></html>\n";
    out
}

/// Heading, chart and table of some steps.
fn part(out: &mut String, title: &str, size: &str, all: &[Timed]) {
    if all.is_empty() {
        return;
    }
    let most = all.iter().map(Timed::rate).fold(f64::MIN_POSITIVE, f64::max);
    let height = all.len() * ROW;
    let _ = writeln!(
        out,
        "<h2>{title}</h2>\n<svg viewBox=\"0 0 640 {height}\" role=\"img\" aria-label=\"tokens a second by {size}\">"
    );
    for (at, timed) in all.iter().enumerate() {
        let (top, width) = (at * ROW, (BAR * timed.rate() / most).max(1.0));
        let (middle, end) = (top + 22, 90.0 + width);
        let _ = writeln!(
            out,
            "<text x=\"70\" y=\"{middle}\" text-anchor=\"end\">{}</text><rect x=\"80\" y=\"{}\" width=\"{width:.1}\" height=\"{}\" rx=\"3\"/>\
             <text x=\"{end:.1}\" y=\"{middle}\">{}</text>",
            timed.size,
            top + 5,
            ROW - 10,
            number(timed.rate()),
        );
    }
    let _ = writeln!(
        out,
        "</svg>\n<table><tr><th scope=\"col\" class=\"n\">{size}</th><th scope=\"col\" class=\"n\">tokens a second</th>\
         <th scope=\"col\" class=\"n\">ms</th><th scope=\"col\">of the machine's limit</th></tr>"
    );
    for timed in all {
        let (rate, time) = (number(timed.rate()), number(1e3 * timed.seconds));
        let _ = writeln!(
            out,
            "<tr><td class=\"n\">{}</td><td class=\"n\">{rate}</td><td class=\"n\">{time}</td><td>{}</td></tr>",
            timed.size,
            share(timed)
        );
    }
    *out += "</table>\n";
}

/// Text without characters that mean something in HTML.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::tests::report;
    use super::*;

    #[test]
    fn a_page_has_the_figures_and_loads_nothing() {
        let report = BenchReport { model: "<script>alert('x')</script>".to_owned(), ..report() };
        let page = page(&report, 128);
        for part in
            ["256", "50 % (arithmetic)", "80 % (memory)", "behind 128 tokens", "&lt;script&gt;alert(&#39;x&#39;)"]
        {
            assert!(page.contains(part), "{part} is not in {page}");
        }
        for part in ["<script", "http://", "https://", "src=", "href=", "url(", "unsafe"] {
            assert!(!page.contains(part), "{part} is in {page}");
        }
        assert_eq!(page.matches("<rect").count(), 3);
    }
}
