//! Results of simulations as charts on a terminal, and as one page for a browser.

use std::collections::BTreeMap;

use penstock_sim::fleet::command::Results;
use penstock_sim::fleet::report::Report;

use crate::chart::{Bar, lines};
use crate::page::{Column, Page};

/// Chart: its title, and a bar for each row.
type Chart = (&'static str, Vec<Bar>);

/// Charts as lines of text.
pub(super) fn text(results: &Results) -> String {
    charts(results).iter().map(|(title, bars)| lines(title, bars)).collect()
}

/// Page of the results.
pub(super) fn page(results: &Results) -> Page {
    let mut page = Page::new("penstock simulate", &[("simulated", results.about.clone())]);
    for (title, bars) in charts(results) {
        page.heading(title);
        page.bars(title, &[], &bars);
    }
    page.heading("Figures");
    if !results.evictions.is_empty() {
        let columns = [("first to go", false), ("blocks found %", true), ("seconds saved %", true)];
        let percent = |share: f64| format!("{:.1}", share * 100.0);
        let row = |(order, found): &(_, penstock_sim::fleet::eviction::Found)| {
            let order: &penstock_sim::fleet::eviction::Order = order;
            vec![order.to_string(), percent(found.blocks), percent(found.seconds)]
        };
        page.table(&columns, results.evictions.iter().map(row));
        return page;
    }
    let columns: Vec<Column<'_>> = Report::COLUMNS.iter().enumerate().map(|(at, name)| (*name, at > 0)).collect();
    page.table(
        &columns,
        results.rows.iter().map(|(name, report)| match report {
            Some(report) => report.cells(name).to_vec(),
            None => vec![name.clone(), "none found".to_owned()],
        }),
    );
    if results.is_scaled {
        let columns = [("engines", false), ("seconds of engines", true), ("most", true), ("starts and stops", true)];
        let row = |(name, report): (&str, &Report)| {
            let Report { engine_seconds, engines_most, scalings, .. } = report;
            vec![name.to_owned(), format!("{engine_seconds:.0}"), engines_most.to_string(), scalings.to_string()]
        };
        page.table(&columns, found(results).map(row));
    }
    for (name, report) in found(results) {
        report.notes().iter().for_each(|note| page.text(&format!("{name} at {}: {note}", report.rate)));
    }
    results.verdict.iter().for_each(|line| page.text(line));
    page
}

/// Rows that have a report.
fn found(results: &Results) -> impl Iterator<Item = (&str, &Report)> {
    results.rows.iter().filter_map(|(name, report)| Some((name.as_str(), report.as_ref()?)))
}

/// Charts of what is compared; of a single run its times to the first token.
fn charts(results: &Results) -> Vec<Chart> {
    if !results.evictions.is_empty() {
        let bars = |value: fn(&penstock_sim::fleet::eviction::Found) -> f64| {
            results.evictions.iter().map(|(order, found)| Bar::new(order.to_string(), value(found) * 100.0)).collect()
        };
        return vec![
            ("blocks found, %, by who is evicted first", bars(|found| found.blocks)),
            ("seconds of computing saved, %", bars(|found| found.seconds)),
        ];
    }
    let rows: Vec<(&str, &Report)> = found(results).collect();
    if let [(_, report)] = rows[..]
        && !results.is_search
    {
        let bars = ["p50", "p90", "p99"].into_iter().zip(report.ttft).map(|(name, value)| Bar::new(name, value));
        return vec![("seconds to the first token", bars.collect())];
    }
    let labels = labels(&rows);
    let bars = |value: fn(&Report) -> f64| -> Vec<Bar> {
        labels.iter().zip(&rows).map(|(label, (_, report))| Bar::new(label.clone(), value(report))).collect()
    };
    let mut charts = match rows.len() {
        0 => return Vec::new(),
        _ if results.is_search => vec![("highest rate, times the trace's", bars(|report| report.rate))],
        _ => vec![("requests in SLO, %", bars(|report| report.in_slo * 100.0))],
    };
    if results.is_scaled {
        charts.push(("seconds of engines", bars(|report| report.engine_seconds)));
    }
    charts.push(("seconds to the first token, p50", bars(|report| report.ttft[0])));
    charts.push(("seconds to the first token, p99", bars(|report| report.ttft[2])));
    charts.push(("tokens of prompts read from a cache, %", bars(|report| report.hit * 100.0)));
    charts
}

/// Labels of the rows: their names, with the rate where rates differ, and a number where rows are alike (several seeds).
fn labels(rows: &[(&str, &Report)]) -> Vec<String> {
    let has_rates = rows.iter().any(|(_, report)| report.rate != rows[0].1.rate);
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let mut label = |(name, report): &(&str, &Report)| {
        let rate = (report.rate * 1000.0).round() / 1000.0;
        let label = if has_rates { format!("{name} at {rate}") } else { (*name).to_owned() };
        let count = seen.entry(label.clone()).and_modify(|count| *count += 1).or_insert(1);
        if *count > 1 { format!("{label} ({count})") } else { label }
    };
    rows.iter().map(&mut label).collect()
}

#[cfg(test)]
mod tests {
    use penstock_sim::fleet::eviction::{Found, Order};

    use super::*;
    use crate::page::assert_alone;

    fn row(name: &str, rate: f64, in_slo: f64, ttft: [f64; 3]) -> (String, Option<Report>) {
        (name.to_owned(), Some(Report { rate, in_slo, ttft, hit: in_slo / 2.0, rejected: 7, ..Report::default() }))
    }

    fn results(rows: Vec<(String, Option<Report>)>) -> Results {
        let about = "400 requests; engines: 8".to_owned();
        Results { about, rows, evictions: Vec::new(), is_scaled: false, is_search: false, verdict: Vec::new() }
    }

    #[test]
    fn several_rows_are_compared() {
        let results = results(vec![
            row("round_robin", 1.0, 0.5, [1.0, 2.0, 8.0]),
            row("<b>", 1.0, 1.0, [0.25, 0.5, 4.0]),
            row("<b>", 1.0, 1.0, [0.25, 0.5, f64::INFINITY]),
        ]);
        let text = text(&results);
        for line in [
            "requests in SLO, %",
            "round_robin ████████████████████ 50.0",
            "        <b> ████████████████████████████████████████ 100",
            "    <b> (2)  never",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        let page = page(&results).finish();
        let parts = ["400 requests; engines: 8", "&lt;b&gt; (2)", "<td class=\"n\">50.0</td>", "7 requests refused"];
        assert_alone(&page, &parts);
        assert!(!page.contains("<b>"), "{page}");
        assert_eq!(page.matches("<rect").count(), 4 * 3);
    }

    #[test]
    fn one_row_is_shown_by_its_quantiles_and_a_search_by_its_rates() {
        let text_of = |results: &Results| text(results);
        let one = results(vec![row("cache_aware", 1.0, 0.5, [1.0, 2.0, 4.0])]);
        assert!(text_of(&one).ends_with(&format!("   p99 {} 4.00\n", "█".repeat(40))), "{}", text_of(&one));
        let search =
            Results { is_search: true, ..results(vec![row("a", 1.25, 0.9, [1.0; 3]), ("b".to_owned(), None)]) };
        assert!(text_of(&search).starts_with("\nhighest rate, times the trace's\n     a ██"), "{}", text_of(&search));
        assert_alone(&page(&search).finish(), &["none found", "1.25"]);
        assert_eq!(text_of(&results(vec![("b".to_owned(), None)])), "");
    }

    #[test]
    fn rates_are_part_of_a_label_where_they_differ() {
        let results = results(vec![row("a", 1.0, 0.5, [1.0; 3]), row("a", 1.5, 0.4, [1.0; 3])]);
        assert_eq!(labels(&found(&results).collect::<Vec<_>>()), ["a at 1", "a at 1.5"]);
    }

    #[test]
    fn evictions_have_charts_and_a_table_of_their_own() {
        let evictions = vec![
            (Order::None, Found { blocks: 0.1, seconds: 0.2 }),
            (Order::Value, Found { blocks: 0.3, seconds: 0.4 }),
        ];
        let results = Results { evictions, ..results(Vec::new()) };
        assert!(text(&results).contains("no tier █████████████▍ 10.0"), "{}", text(&results));
        assert_alone(&page(&results).finish(), &["no tier", "<td class=\"n\">30.0</td><td class=\"n\">40.0</td>"]);
    }
}
