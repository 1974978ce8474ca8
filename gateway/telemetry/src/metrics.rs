//! Counters, gauges and histograms, rendered as Prometheus text. Each metric name exists once, in the table of
//! [`Metric`] or [`Gauge`].
//!
//! Label values come from bounded sets: served models, routes, status codes. The cost is one short lock per request and
//! metric, or none with a [`Tally`]; nothing is counted per token.

mod gauge;
mod labels;
mod metric;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

pub use gauge::Gauge;
use metric::Kind;
pub use metric::Metric;
use penstock_base::per_thread;

/// Most label sets per metric; further ones are folded into `series="other"`.
const SERIES_MAX: usize = 512;

/// Most bucket bounds that a histogram can have.
const BUCKETS_MAX: usize = 16;

/// Label names with values; values come from bounded sets.
pub type Labels<'a> = &'a [(&'static str, &'a str)];

/// Values of one series. Each number is exact by itself, but a scrape may see one of them a moment before another.
#[derive(Debug, Default)]
struct Counts {
    /// Sum of the values: the bits of an `f64`.
    sum: AtomicU64,
    count: AtomicU64,
    buckets: [AtomicU64; BUCKETS_MAX],
}

impl Counts {
    fn add(&self, bounds: &[f64], value: f64) {
        let add = |sum| Some((f64::from_bits(sum) + value).to_bits());
        let _ = self.sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        if bounds.is_empty() {
            return;
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        if let Some(at) = bounds.iter().position(|bound| value <= *bound) {
            self.buckets[at].fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Per-thread shard of a series, aligned to two cache lines against false sharing.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Part(Counts);

/// Series: one label set of a metric. `counts` takes occasional observations; `parts` are the shards of [`Tally`]s.
#[derive(Debug, Default)]
struct Series {
    /// Labels as Prometheus text.
    labels: String,
    counts: Counts,
    parts: OnceLock<Box<[Part; per_thread::COUNT]>>,
}

impl Series {
    fn of(labels: Labels<'_>) -> Arc<Self> {
        let mut text = String::new();
        render_labels(&mut text, labels);
        Arc::new(Self { labels: text, ..Self::default() })
    }

    fn all(&self) -> impl Iterator<Item = &Counts> {
        let parts = self.parts.get().map_or(&[][..], |parts| &parts[..]);
        parts.iter().map(|part| &part.0).chain([&self.counts])
    }

    fn sum(&self) -> f64 {
        self.all().map(|counts| f64::from_bits(counts.sum.load(Ordering::Relaxed))).sum()
    }

    fn total(&self, of: impl Fn(&Counts) -> &AtomicU64) -> u64 {
        self.all().map(|counts| of(counts).load(Ordering::Relaxed)).sum()
    }
}

/// Handle of one counter or histogram series, looked up once. Adding to it takes no lock and writes to the shard of the
/// calling thread only.
#[derive(Clone, Debug)]
pub struct Tally {
    series: Arc<Series>,
    bounds: &'static [f64],
}

impl Tally {
    /// Adds one to this counter; takes no lock.
    pub fn count(&self) {
        self.observe(1.0);
    }

    /// Records one value in the histogram: its bucket, the count and the sum.
    pub fn observe(&self, value: f64) {
        let parts = self.series.parts.get_or_init(Default::default);
        parts[per_thread::of_thread()].0.add(self.bounds, value);
    }
}

/// Series of a metric by their label sets: names and values with [`APART`] behind each, in the order of the caller.
type Family = BTreeMap<Vec<u8>, Arc<Series>>;

/// Byte that no text has.
const APART: u8 = 0xff;

thread_local! {
    /// Buffer in which a label set becomes a key, so that a known series costs no allocation.
    static KEY: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// All counters and histograms of the process, rendered as Prometheus text by `/metrics`.
#[derive(Debug)]
pub struct Metrics {
    series: [Mutex<Family>; Metric::ALL.len()],
    in_flight: AtomicI64,
    connections: AtomicI64,
    console_sessions: AtomicI64,
}

impl Default for Metrics {
    /// No series yet. Arrays of more than 32 have no default of their own.
    fn default() -> Self {
        Self {
            series: std::array::from_fn(|_| Mutex::default()),
            in_flight: AtomicI64::new(0),
            connections: AtomicI64::new(0),
            console_sessions: AtomicI64::new(0),
        }
    }
}

/// Sum of all series of a histogram at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reading {
    /// Sum of the values.
    pub sum: f64,
    /// Number of the values.
    pub count: u64,
    /// Upper bounds of the buckets, in ascending order.
    pub bounds: &'static [f64],
    /// Number of values per bucket.
    pub buckets: Vec<u64>,
}

impl Metrics {
    /// Adds one to the counter of `metric` with these labels.
    pub fn count(&self, metric: Metric, labels: Labels<'_>) {
        self.observe(metric, labels, 1.0);
    }

    /// Sets a counter whose total is kept elsewhere.
    pub fn set(&self, metric: Metric, labels: Labels<'_>, value: u64) {
        self.with(metric, labels, |series| series.counts.sum.store((value as f64).to_bits(), Ordering::Relaxed));
    }

    /// Records a value of a histogram, or adds it to a counter.
    pub fn observe(&self, metric: Metric, labels: Labels<'_>, value: f64) {
        self.with(metric, labels, |series| series.counts.add(bounds_of(metric), value));
    }

    /// Sum over the series of `metric` that have all of these labels.
    pub fn read(&self, metric: Metric, labels: Labels<'_>) -> Reading {
        let bounds = bounds_of(metric);
        let mut reading = Reading { bounds, buckets: vec![0; bounds.len()], ..Reading::default() };
        let wanted = labels.iter().map(|label| {
            let mut text = String::new();
            render_labels(&mut text, std::slice::from_ref(label));
            text
        });
        let wanted: Vec<String> = wanted.collect();
        let family = self.series[metric as usize].lock().unwrap_or_else(PoisonError::into_inner);
        let has_all = |series: &&Arc<Series>| wanted.iter().all(|label| series.labels.contains(label.as_str()));
        for series in family.values().filter(has_all) {
            reading.sum += series.sum();
            reading.count += series.total(|counts| &counts.count);
            for (at, bucket) in reading.buckets.iter_mut().enumerate() {
                *bucket += series.total(|counts| &counts.buckets[at]);
            }
        }
        reading
    }

    /// Sets the number of people who are signed in at the console.
    pub fn console_sessions(&self, count: usize) {
        self.console_sessions.store(count as i64, Ordering::Release);
    }

    /// Handle of one series for callers on a hot path.
    pub fn tally(&self, metric: Metric, labels: Labels<'_>) -> Tally {
        Tally { series: self.with(metric, labels, Arc::clone), bounds: bounds_of(metric) }
    }

    fn with<T>(&self, metric: Metric, labels: Labels<'_>, then: impl FnOnce(&Arc<Series>) -> T) -> T {
        KEY.with_borrow_mut(|key| {
            set_key(key, labels);
            let mut family = self.series[metric as usize].lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(series) = family.get(key.as_slice()) {
                return then(series);
            }
            let known = metric.labels();
            debug_assert!(labels.iter().all(|(name, _)| known.contains(name)), "{metric:?} with {labels:?}");
            let is_full = family.len() >= SERIES_MAX;
            let labels = if is_full { &[("series", "other")] } else { labels };
            set_key(key, labels);
            then(family.entry(key.clone()).or_insert_with(|| Series::of(labels)))
        })
    }

    /// Counts a request that begins (+1) or ends (-1).
    pub fn in_flight(&self, change: i64) {
        self.in_flight.fetch_add(change, Ordering::AcqRel);
    }

    /// Number of requests being served at this moment.
    pub fn in_flight_now(&self) -> i64 {
        self.in_flight.load(Ordering::Acquire)
    }

    /// Number of open client connections.
    pub fn connections_now(&self) -> i64 {
        self.connections.load(Ordering::Acquire)
    }

    /// Counts a connection that opens (+1) or closes (-1).
    pub fn connections(&self, change: i64) {
        self.connections.fetch_add(change, Ordering::AcqRel);
    }

    /// Renders all metrics as Prometheus text; `gauges` are (gauge, label value, value) triples read for this scrape.
    pub fn render(&self, gauges: &[(Gauge, String, f64)]) -> String {
        let mut out = String::with_capacity(16 * 1024);
        for metric in Metric::ALL {
            let family = self.series[metric as usize].lock().unwrap_or_else(PoisonError::into_inner).clone();
            render_family(&mut out, metric, &family);
        }
        let own = [
            (Gauge::InFlight, String::new(), self.in_flight_now() as f64),
            (Gauge::Connections, String::new(), self.connections.load(Ordering::Acquire) as f64),
            (Gauge::ConsoleSessions, String::new(), self.console_sessions.load(Ordering::Acquire) as f64),
        ];
        let mut all: Vec<_> = own.iter().chain(gauges).collect();
        all.sort_by_key(|(gauge, ..)| *gauge);
        let mut last = None;
        for (gauge, model, value) in all {
            let (name, kind, help) = gauge.about();
            if last.replace(name) != Some(name) {
                let _ = write!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
            }
            let mut labels = String::new();
            match gauge.detail() {
                Some(detail) => render_labels(&mut labels, &[(gauge.label(), model), detail]),
                None if !model.is_empty() => render_labels(&mut labels, &[(gauge.label(), model)]),
                None => {}
            }
            let _ = writeln!(out, "{name}{} {value}", braces(&labels));
        }
        out
    }
}

fn bounds_of(metric: Metric) -> &'static [f64] {
    match metric.about().1 {
        Kind::Histogram(bounds) => bounds,
        Kind::Counter => &[],
    }
}

fn set_key(key: &mut Vec<u8>, labels: Labels<'_>) {
    key.clear();
    for part in labels.iter().flat_map(|(name, value)| [name, value]) {
        key.extend_from_slice(part.as_bytes());
        key.push(APART);
    }
}

fn render_family(out: &mut String, metric: Metric, family: &Family) {
    let (name, kind, help) = metric.about();
    let kind_name = if kind == Kind::Counter { "counter" } else { "histogram" };
    let _ = write!(out, "# HELP {name} {help}\n# TYPE {name} {kind_name}\n");
    if kind == Kind::Counter && metric.labels().is_empty() && family.is_empty() {
        // Prometheus sees no increase in a series that begins with 1: the first event would raise no alert.
        let _ = writeln!(out, "{name} 0");
    }
    for series in family.values() {
        let labels = series.labels.as_str();
        let Kind::Histogram(bounds) = kind else {
            let _ = writeln!(out, "{name}{} {}", braces(labels), series.sum());
            continue;
        };
        let comma = if labels.is_empty() { "" } else { "," };
        let (mut below, total) = (0, series.total(|counts| &counts.count));
        for (at, bound) in bounds.iter().enumerate() {
            below += series.total(|counts| &counts.buckets[at]);
            let _ = writeln!(out, "{name}_bucket{{{labels}{comma}le=\"{bound}\"}} {below}");
        }
        let _ = writeln!(out, "{name}_bucket{{{labels}{comma}le=\"+Inf\"}} {total}");
        let _ = writeln!(out, "{name}_sum{} {}", braces(labels), series.sum());
        let _ = writeln!(out, "{name}_count{} {total}", braces(labels));
    }
}

fn braces(labels: &str) -> String {
    if labels.is_empty() { String::new() } else { format!("{{{labels}}}") }
}

fn render_labels(out: &mut String, labels: Labels<'_>) {
    for (name, value) in labels {
        if !out.is_empty() {
            out.push(',');
        }
        out.push_str(name);
        out.push_str("=\"");
        for character in value.chars() {
            match character {
                '\\' => out.push_str("\\\\"),
                '"' => out.push_str("\\\""),
                '\n' => out.push_str("\\n"),
                other => out.push(other),
            }
        }
        out.push('"');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renders_what_prometheus_reads() {
        let metrics = Metrics::default();
        metrics.observe(Metric::TimeToFirstToken, &[("gen_ai_request_model", "a\"b")], 0.03);
        metrics.observe(Metric::TimeToFirstToken, &[("gen_ai_request_model", "a\"b")], 99.0);
        metrics.count(Metric::Requests, &[("route", "/x"), ("status", "200")]);
        let text = metrics.render(&[(Gauge::BlocksTotal, "m".into(), 7.0)]);
        for line in [
            "# TYPE gen_ai_server_time_to_first_token_seconds histogram",
            "gen_ai_server_time_to_first_token_seconds_bucket{gen_ai_request_model=\"a\\\"b\",le=\"0.02\"} 0",
            "gen_ai_server_time_to_first_token_seconds_bucket{gen_ai_request_model=\"a\\\"b\",le=\"0.04\"} 1",
            "gen_ai_server_time_to_first_token_seconds_bucket{gen_ai_request_model=\"a\\\"b\",le=\"+Inf\"} 2",
            "gen_ai_server_time_to_first_token_seconds_count{gen_ai_request_model=\"a\\\"b\"} 2",
            "penstock_requests_total{route=\"/x\",status=\"200\"} 1",
            "penstock_kv_blocks{model=\"m\"} 7",
            "penstock_requests_in_flight 0",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} in\n{text}");
        }
    }

    #[test]
    fn a_counter_without_labels_is_0_before_its_first_event() {
        let metrics = Metrics::default();
        let is_bare = |metric: &Metric| metric.about().1 == Kind::Counter && metric.labels().is_empty();
        let bare: Vec<Metric> = Metric::ALL.into_iter().filter(is_bare).collect();
        assert!(bare.contains(&Metric::Panics));
        for metric in bare {
            let lines = |metrics: &Metrics| {
                let (text, name) = (metrics.render(&[]), format!("{} ", metric.about().0));
                text.lines().filter_map(|line| line.strip_prefix(&name).map(str::to_owned)).collect::<Vec<_>>()
            };
            assert_eq!(lines(&metrics), ["0"], "{metric:?}");
            metrics.count(metric, &[]);
            assert_eq!(lines(&metrics), ["1"], "{metric:?}");
        }
        assert!(!metrics.render(&[]).contains("penstock_requests_total 0"), "a counter with labels");
    }

    #[test]
    fn what_threads_count_apart_is_one_number() {
        let metrics = Metrics::default();
        let labels: Labels<'_> = &[("plugin", "p"), ("hook", "request")];
        let tally = metrics.tally(Metric::PluginSeconds, labels);
        std::thread::scope(|scope| {
            for _ in 0..per_thread::COUNT + 4 {
                scope.spawn(|| (0..100).for_each(|_| tally.observe(0.5)));
            }
        });
        metrics.observe(Metric::PluginSeconds, labels, 100.0);
        let count = 100 * (per_thread::COUNT + 4) + 1;
        let text = metrics.render(&[]);
        for line in [
            format!("penstock_plugin_seconds_bucket{{plugin=\"p\",hook=\"request\",le=\"1\"}} {}", count - 1),
            format!("penstock_plugin_seconds_sum{{plugin=\"p\",hook=\"request\"}} {}", (count - 1) / 2 + 100),
            format!("penstock_plugin_seconds_count{{plugin=\"p\",hook=\"request\"}} {count}"),
        ] {
            assert!(text.lines().any(|have| have == line), "{line} in\n{text}");
        }
    }

    #[test]
    fn a_reading_sums_what_has_the_labels() {
        let metrics = Metrics::default();
        for (model, kind, value) in [("a", "input", 3.0), ("a", "output", 5.0), ("b", "output", 70.0)] {
            let labels = [("gen_ai_request_model", model), ("gen_ai_token_type", kind)];
            metrics.observe(Metric::TokenUsage, &labels, value);
        }
        let output = metrics.read(Metric::TokenUsage, &[("gen_ai_token_type", "output")]);
        assert_eq!((output.sum, output.count, output.buckets.iter().sum::<u64>()), (75.0, 2, 2));
        let all = metrics.read(Metric::TokenUsage, &[]);
        assert_eq!((all.sum, all.count, all.bounds.len()), (78.0, 3, all.buckets.len()));
        assert_eq!(metrics.read(Metric::TokenUsage, &[("gen_ai_request_model", "c")]).count, 0);
    }

    #[test]
    fn every_bound_has_a_bucket() {
        assert!(Metric::ALL.iter().all(|metric| bounds_of(*metric).len() <= BUCKETS_MAX));
    }

    #[test]
    fn label_sets_are_bounded() {
        let metrics = Metrics::default();
        for number in 0..SERIES_MAX + 50 {
            metrics.count(Metric::Requests, &[("route", &number.to_string())]);
        }
        let text = metrics.render(&[]);
        assert_eq!(text.matches("penstock_requests_total{").count(), SERIES_MAX + 1);
        assert!(text.contains("penstock_requests_total{series=\"other\"} 50"));
    }

    fn tables() -> String {
        let all = [include_str!("metrics/metric.rs"), include_str!("metrics/gauge.rs")].concat();
        all.lines().filter(|line| !line.starts_with("use ")).collect()
    }

    /// Metric names in a text, without the suffixes of histograms.
    fn names_in(text: &str) -> impl Iterator<Item = &str> {
        let words = text.split(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '_'));
        let ours = words.filter(|word| {
            ["penstock_", "gen_ai_server_", "gen_ai_client_"].iter().any(|start| word.starts_with(start))
        });
        ours.map(|word| {
            let ends = ["_bucket", "_sum", "_count"];
            ends.iter().find_map(|end| word.strip_suffix(end)).unwrap_or(word)
        })
    }

    /// Defect of a HELP text, which operators read without its neighbours.
    fn unclear(help: &str) -> Option<String> {
        const BEGINS: [&str; 12] =
            ["Of the", "The same", "Since", "Used", "Reserved", "From", "Per ", "Sum ", "Same", "Also", "What", "Who"];
        const POINTS_ELSEWHERE: [&str; 9] = ["it", "its", "this", "these", "those", "they", "them", "each", "itself"];
        if !help.starts_with(|first: char| first.is_ascii_uppercase() || first.is_ascii_digit()) || !help.ends_with('.')
        {
            return Some("is no sentence".into());
        }
        if let Some(begin) = BEGINS.iter().find(|begin| help.starts_with(*begin)) {
            return Some(format!("begins with {begin:?}: the subject is missing"));
        }
        let mut words = help.split(|letter: char| !letter.is_ascii_alphabetic()).map(str::to_ascii_lowercase);
        let word = words.find(|word| POINTS_ELSEWHERE.contains(&word.as_str()))?;
        Some(format!("says {word:?}, and whoever reads only this line does not know what is meant"))
    }

    #[test]
    fn each_help_text_has_a_subject_of_its_own() {
        assert!(unclear("Seconds that these took.").is_some() && unclear("Of the bytes, some.").is_some());
        let tables = tables();
        let mut literals = tables.split('"').skip(1).step_by(2);
        let mut found = 0;
        while let Some(literal) = literals.next() {
            if !["penstock_", "gen_ai_"].iter().any(|start| literal.starts_with(start)) {
                continue;
            }
            let help = literals.find(|next| !["gauge", "counter"].contains(next)).expect("a HELP text");
            found += 1;
            assert_eq!(unclear(help), None, "{literal}: {help:?}");
        }
        assert!(found >= Metric::ALL.len() + 50, "{found} metrics were found");
    }

    #[test]
    fn the_dashboard_asks_for_metrics_that_exist() {
        let own = tables();
        let board = include_str!("../../../configs/grafana/penstock.json");
        let asked: std::collections::BTreeSet<_> = names_in(board).collect();
        assert!(asked.len() > 20, "{asked:?}");
        for name in asked {
            assert!(own.contains(&format!("\"{name}\"")), "{name} is on the dashboard and nowhere else");
        }
        serde_json::from_str::<serde_json::Value>(board).expect("JSON");
    }

    /// Gauges that the alert rules ask for, with their labels from the table.
    const WATCHED: [Gauge; 17] = [
        Gauge::AccessLinesLost,
        Gauge::BlocksFree,
        Gauge::BlocksTotal,
        Gauge::ConfigLastReloadOk,
        Gauge::ConfigPending,
        Gauge::CountersSlow,
        Gauge::KeySetAge,
        Gauge::LedgerLost,
        Gauge::LedgerWaiting,
        Gauge::Preemptions,
        Gauge::QueueWaiting,
        Gauge::ReplicaFailures,
        Gauge::StoreUp,
        Gauge::TargetState,
        Gauge::WorkerDeaths,
        Gauge::WorkerStarts,
        Gauge::WorkersReady,
    ];

    /// Labels that a series has, by the metric's name.
    fn labels_of(name: &str) -> Vec<&'static str> {
        let kinds = [
            Gauge::WorkersWanted,
            Gauge::WorkerTroubles("tier"),
            Gauge::TierCorrupt(penstock_proto::frames::Tier::Disk),
        ];
        let gauges = WATCHED.iter().chain(&kinds).filter(|gauge| gauge.about().0 == name);
        let read = gauges.flat_map(|gauge| [Some(gauge.label()), gauge.detail().map(|(label, _)| label)]);
        let counted = Metric::ALL.into_iter().filter(|metric| metric.about().0 == name);
        read.flatten().chain(counted.flat_map(|metric| metric.labels().iter().copied())).collect()
    }

    /// Names of labels in an expression or a text of an alert rule: matchers, `by (…)`, `on (…)` and `$labels.…`.
    fn labels_in(text: &str) -> Vec<&str> {
        let inside = |open: &'static str, close: char| {
            text.match_indices(open)
                .filter_map(move |(at, _)| text[at + open.len()..].split_once(close).map(|(held, _)| held))
        };
        let listed = [" by (", " on ("].into_iter().flat_map(|open| inside(open, ')')).flat_map(|held| held.split(','));
        let matched = text.match_indices('{').filter(|(at, _)| !text[..*at].ends_with('{')).filter_map(|(at, _)| {
            let held = text[at + 1..].split_once('}')?.0;
            held.contains('"').then_some(held)
        });
        let matched = matched.flat_map(|held| held.split(',')).filter_map(|part| part.split(['=', '!']).next());
        let told = text.match_indices("$labels.").map(|(at, mark)| {
            let rest = &text[at + mark.len()..];
            &rest[..rest.find(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '_')).unwrap_or(rest.len())]
        });
        listed.chain(matched).chain(told).map(str::trim).collect()
    }

    #[test]
    fn alert_rules_ask_for_metrics_and_labels_that_exist() {
        // Prometheus gives every series these two, and buckets of histograms the third.
        const GIVEN: [&str; 3] = ["job", "instance", "le"];
        let rules = include_str!("../../../packaging/prometheus/alerts.yaml");
        let own = tables();
        let mut watched = std::collections::BTreeSet::new();
        for rule in rules.split("- alert: ").skip(1) {
            let asked: Vec<&str> = names_in(rule.split("labels: {").next().expect("an expression")).collect();
            assert!(!asked.is_empty() || rule.starts_with("PenstockDown"), "{rule}");
            for name in &asked {
                assert!(own.contains(&format!("\"{name}\"")), "{name} is in a rule and nowhere else");
                watched.insert((*name).to_owned());
            }
            let known: Vec<&str> = asked.iter().flat_map(|name| labels_of(name)).chain(GIVEN).collect();
            let text = rule.replace("labels: { severity", "");
            for label in labels_in(&text) {
                assert!(known.contains(&label), "{label:?} is a label of none of {asked:?}:\n{rule}");
            }
        }
        assert!(watched.len() > 20, "{watched:?}");
        let idle: Vec<_> =
            WATCHED.iter().map(|gauge| gauge.about().0).filter(|name| !watched.contains(*name)).collect();
        assert!(idle.is_empty(), "in WATCHED and in no rule: {idle:?}");
    }

    #[test]
    fn labels_of_rules_are_found() {
        let found = labels_in("sum by (job, a) (x{b=\"1\",c!~\"2\"}) and on (d) y {{ $labels.e }}. {{ $value | f }}");
        assert_eq!(found, ["job", "a", "d", "b", "c", "e"]);
    }

    #[test]
    fn the_reference_says_what_each_metric_is() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference");
        let pages = std::fs::read_dir(folder).expect("the reference");
        let pages: Vec<_> =
            pages.map(|page| std::fs::read_to_string(page.expect("a page").path()).expect("text")).collect();
        let told: std::collections::BTreeSet<_> = pages.iter().flat_map(|page| names_in(page)).collect();
        let tables = tables();
        let names: std::collections::BTreeSet<_> = names_in(&tables).collect();
        assert!(names.len() > 80, "{names:?}");
        for name in names {
            assert!(told.contains(name), "{name} is in no page of the reference");
        }
    }
}
