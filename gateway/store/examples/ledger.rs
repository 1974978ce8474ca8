//! Benchmark of the ledger: entries settled in batches, in a SQLite database on disk. Prints CPU time of the whole
//! process per entry (commits and checkpoints included) and bytes per entry. `cargo run --release -p penstock-store
//! --example ledger`.

use std::sync::Arc;
use std::time::Instant;

use penstock_store::{
    Entry, EntryFilter, Group, Held, LEDGER_BATCH_MAX, Ledger, OpenEntry, Sqlite, SqliteOptions, Subject, Tokens,
    UsageQuery,
};

const ENTRIES: usize = 200_000;

/// CPU time of this process in µs: user and system.
fn cpu_us() -> u64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = text.rsplit(") ").next().unwrap_or_default();
    // In hundredths of a second: fields 14 and 15 of the file, of which the first two and the state are cut off.
    fields.split(' ').skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum::<u64>() * 10_000
}

fn entries(from: usize, count: usize, subject: &Arc<Subject>, gateway: &Arc<str>) -> Arc<[Entry]> {
    let one = |number: usize| Entry {
        opened: OpenEntry {
            at: 1_795_000_000 + number as u64 / 25_000,
            // Ids are in the order of their milliseconds, and in no order within one.
            request: format!(
                "req_{:012x}{:020x}",
                1_795_000_000_000 + number / 25,
                number.wrapping_mul(0x9e37_79b9_7f4a_7c15)
            ),
            gateway: gateway.clone(),
            subject: subject.clone(),
            held: Held { input: 80, output: 4096, micro_usd: 16_464 },
        },
        tokens: Tokens { input: 64, output: 1, ..Tokens::default() },
        micro_usd: 68,
        status: 200,
        outcome: "complete".into(),
        attempts: 1,
        first_ms: 1,
        total_ms: 1,
        assumed: false,
    };
    (from..from + count).map(one).collect()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let subject = Arc::new(Subject {
        key: "bench".into(),
        model: "mock".into(),
        provider: "mock".into(),
        route: "/v1/chat/completions".into(),
        tags: vec!["env:bench".into(), "limit:wide".into()],
        ..Subject::default()
    });
    let gateway = Arc::from("0123456789abcdef");
    let folder = std::env::temp_dir().join(format!("penstock-ledger-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    for batch in [100, 1000, LEDGER_BATCH_MAX] {
        let path = folder.join(format!("{batch}.db"));
        let store = Arc::new(Sqlite::open(&SqliteOptions { path: path.clone(), bytes_max: 0 })?);
        let starts = (0..ENTRIES).step_by(batch);
        let all: Vec<_> = starts.map(|from| entries(from, batch.min(ENTRIES - from), &subject, &gateway)).collect();
        let (cpu, began) = (cpu_us(), Instant::now());
        for entries in all {
            runtime.block_on(store.settle_entries(entries))?;
        }
        let (cpu, wall) = (cpu_us() - cpu, began.elapsed());
        let bytes = std::fs::metadata(&path)?.len();
        let filter = EntryFilter { from: 1_795_000_002, until: 1_795_000_004, ..EntryFilter::default() };
        let query = UsageQuery { filter, groups: vec![Group::Model], after: None, limit: 10 };
        let began = Instant::now();
        let found = runtime.block_on(store.usage(&query))?.items.iter().map(|row| row.requests).sum::<u64>();
        println!(
            "batches of {batch}: {:.2} µs of CPU and {:.2} µs of time per entry, {} bytes; sums of {found} in {:?}",
            cpu as f64 / ENTRIES as f64,
            wall.as_micros() as f64 / ENTRIES as f64,
            bytes / ENTRIES as u64,
            began.elapsed()
        );
    }
    std::fs::remove_dir_all(&folder)?;
    Ok(())
}
