//! Result of a bench as one page for a browser.

use penstock_worker::bench::{BenchReport, Timed};

use super::table::{facts, share};
use crate::chart::{Bar, number};
use crate::page::Page;

/// Page of `report`, whose sequences decode behind `context` tokens.
pub(super) fn page(report: &BenchReport, context: usize) -> Page {
    let mut page = Page::new(&format!("penstock bench: {}", report.model), &facts(report));
    part(&mut page, "Prefill", "tokens of the prompt", &report.prefill);
    let decode = format!("Decode, each sequence behind {context} tokens");
    part(&mut page, &decode, "sequences", &report.decode);
    page.text(
        "The limit of a step is the larger of two times: its bytes at the memory bandwidth, and its operations at the arithmetic that \
         were measured in the same run.",
    );
    page
}

/// Heading, chart and table of some steps.
fn part(page: &mut Page, title: &str, size: &str, all: &[Timed]) {
    if all.is_empty() {
        return;
    }
    page.heading(title);
    let bars: Vec<Bar> = all.iter().map(|timed| Bar::new(timed.size.to_string(), timed.rate())).collect();
    page.bars(&format!("tokens a second by {size}"), &[], &bars);
    let row =
        |timed: &Timed| vec![timed.size.to_string(), number(timed.rate()), number(1e3 * timed.seconds), share(timed)];
    let columns = [(size, true), ("tokens a second", true), ("ms", true), ("of the machine's limit", false)];
    page.table(&columns, all.iter().map(row));
}

#[cfg(test)]
mod tests {
    use super::super::tests::report;
    use super::*;
    use crate::page::assert_alone;

    #[test]
    fn a_page_has_the_figures_and_loads_nothing() {
        let report = BenchReport { model: "<script>alert('x')</script>".to_owned(), ..report() };
        let page = page(&report, 128).finish();
        let parts =
            ["256", "50 % (arithmetic)", "80 % (memory)", "behind 128 tokens", "&lt;script&gt;alert(&#39;x&#39;)"];
        assert_alone(&page, &parts);
        assert_eq!(page.matches("<rect").count(), 3);
    }
}
