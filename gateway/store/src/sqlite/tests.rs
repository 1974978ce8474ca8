//! Guarantees of the SQLite store: a crash loses nothing acknowledged, a full disk breaks nothing, one process leads.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;

use super::*;
use crate::{
    BatchStatus, Batches, CHUNK_BYTES_MAX, Deleted, EndedBatch, FileId, Files, KeyDigest, KeyId, KeyRecord, Keys,
    Ledger, NewBatch, NewFile, NewLine, Order, Page, People, ResponseChange, ResponseId, ResponseRecord, ResponseRoom,
    ResponseStatus, Responses, Tenant, UsageQuery, conformance,
};

/// Folder that is removed with its test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("penstock-store-{name}-{}", FileId::random()));
        std::fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }

    fn open(&self, bytes_max: u64) -> Sqlite {
        Sqlite::open(&SqliteOptions { path: self.0.join("a.db"), bytes_max }).expect("opens")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn file(bytes: u64) -> NewFile {
    NewFile {
        purpose: "batch".into(),
        name: "a".into(),
        bytes,
        created: 1,
        expires: None,
        tenant_bytes_max: u64::MAX,
        tenant_files_max: 100_000,
    }
}

async fn put(store: &Sqlite, tenant: &Tenant, bytes: usize) -> Result<FileId, StoreError> {
    let id = store.begin_file(tenant, file(bytes as u64)).await?;
    let mut at = 0;
    while at < bytes {
        let piece = CHUNK_BYTES_MAX.min(bytes - at);
        store.append(tenant, &id, at as u64, vec![7; piece].into()).await?;
        at += piece;
    }
    store.seal(tenant, &id).await?;
    Ok(id)
}

#[tokio::test]
async fn on_disk_it_is_a_store() {
    let folder = Folder::new("conformance");
    conformance::everything(&folder.open(0)).await;
}

#[tokio::test]
async fn in_memory_it_is_a_store() {
    let options = SqliteOptions { path: MEMORY.into(), bytes_max: 0 };
    conformance::everything(&Sqlite::open(&options).expect("opens")).await;
}

#[tokio::test]
async fn what_was_acknowledged_is_there_for_the_next_process() {
    let folder = Folder::new("reopen");
    let tenant = Tenant::new("a");
    let first = folder.open(0);
    let id = put(&first, &tenant, 600_000).await.expect("put");
    // Opened beside the first store, which is never closed: the state that a killed process leaves.
    let second = folder.open(0);
    assert_eq!(second.read(&tenant, &id, 0..600_000).await.expect("read").expect("there").len(), 600_000);
    drop(first);
    assert!(second.file(&tenant, &id).await.expect("read").is_some());
}

#[tokio::test]
async fn only_its_owner_may_read_the_database() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new("mode");
    // Checked while open: SQLite removes the files beside the database when the last connection closes.
    let store = folder.open(0);
    put(&store, &Tenant::new("a"), 1).await.expect("put");
    for entry in std::fs::read_dir(&folder.0).expect("listed").flatten() {
        let mode = entry.metadata().expect("there").permissions().mode();
        assert_eq!(mode & 0o077, 0, "{:?}", entry.path());
    }
}

#[tokio::test]
async fn a_full_store_says_so_and_goes_on() {
    let folder = Folder::new("full");
    let tenant = Tenant::new("a");
    let store = folder.open(4 << 20);
    let kept = put(&store, &tenant, 1 << 20).await.expect("fits");
    let full = put(&store, &tenant, 8 << 20).await;
    assert_eq!(full, Err(StoreError::Full));
    assert!(store.stats().errors > 0 && store.stats().down);
    // Existing files are intact; the unfinished one is swept, and its space is reused.
    assert_eq!(store.read(&tenant, &kept, 0..1 << 20).await.expect("read").expect("there").len(), 1 << 20);
    while store.sweep_files(1, 2).await.expect("swept") > 0 {}
    put(&store, &tenant, 1 << 20).await.expect("fits again");
    assert!(!store.stats().down);
    let check = store
        .writer
        .run(|connection| Ok(connection.query_row("PRAGMA integrity_check", [], |row| row.get::<_, String>(0))?));
    assert_eq!(check.await.as_deref(), Ok("ok"));
}

fn kept(status: ResponseStatus, bytes: usize) -> ResponseRecord {
    ResponseRecord {
        id: ResponseId::random(),
        status,
        previous: None,
        created: 1,
        expires: 1000,
        body: Bytes::from_static(b"{}"),
        input: vec![b'x'; bytes].into(),
        output: Bytes::new(),
        request: Bytes::new(),
        event_bytes: 0,
    }
}

fn batch(input: &FileId, metadata: String) -> NewBatch {
    NewBatch {
        endpoint: "/v1/embeddings".into(),
        input: input.clone(),
        window: "24h".into(),
        expires: 86_500,
        metadata,
        output_expires_after: None,
        created: 100,
        tenant_open_max: 10,
        tenant_batches_max: 1 << 20,
        tenant_output_bytes_max: 1 << 40,
    }
}

fn failed(faults: String) -> EndedBatch {
    EndedBatch { status: BatchStatus::Failed, output: None, errors: None, faults, now: 130 }
}

/// One small input file that cannot be used, of which a client makes batches without end.
#[tokio::test]
async fn failed_batches_leave_room_for_keys() {
    let folder = Folder::new("batches");
    let tenant = Tenant::new("a");
    let store = folder.open(4 << 20);
    let input = put(&store, &tenant, 1).await.expect("fits");
    let mut count = 0;
    let full = loop {
        match store.create_batch(&tenant, batch(&input, "m".repeat(30_000))).await {
            Ok(made) => {
                let id = made.expect("the file is there").id;
                store.end_batch(&id, failed("f".repeat(30_000))).await.expect("ended");
                count += 1;
            }
            Err(error) => break error,
        }
    };
    assert!(full == StoreError::Full && count > 20, "{full} after {count}");
    let key = KeyRecord {
        id: KeyId::random(),
        name: "n".repeat(1000),
        digest: KeyDigest([1; 32]),
        previous: None,
        hint: "abcd".into(),
        team: None,
        user: None,
        parent: None,
        scope: Default::default(),
        limits: vec![],
        tags: vec![],
        created: 1,
        rotated: None,
        expires: None,
        revoked: None,
        version: 0,
    };
    assert!(store.create_key(key).await.expect("there is room").is_some());
    while store.sweep_batches(131).await.expect("swept") > 0 {}
    assert!(store.create_batch(&tenant, batch(&input, String::new())).await.is_ok(), "what was swept is free");
}

/// Large files and the lines of large batches are deleted by many small writes, between which others have their turns, and
/// what a crash leaves of them is swept.
#[tokio::test]
async fn what_is_large_is_deleted_in_pieces() {
    let store = Sqlite::open(&SqliteOptions { path: MEMORY.into(), bytes_max: 0 }).expect("opens");
    let tenant = Tenant::new("a");
    let rows = async |table: &'static str| {
        let sql = format!("SELECT count(*) FROM {table}");
        store.writer.run(move |connection| Ok(connection.query_row(&sql, [], |row| row.get::<_, u64>(0))?)).await
    };
    let file = put(&store, &tenant, 100 * CHUNK_BYTES_MAX).await.expect("put");
    let before = store.stats().writes;
    assert_eq!(store.delete_file(&tenant, &file).await, Ok(Deleted::Yes));
    assert!(store.stats().writes - before > 3, "{}", store.stats().writes - before);
    assert_eq!((rows("files").await, rows("file_chunks").await), (Ok(0), Ok(0)));

    let input = put(&store, &tenant, 1).await.expect("put");
    let made = store.create_batch(&tenant, batch(&input, String::new())).await.expect("made").expect("there");
    let lines: Vec<_> = (0..1000).map(|line| NewLine { line, custom_id: "c".into(), at: 0, bytes: 1 }).collect();
    store.admit_lines(&made.id, lines.clone()).await.expect("admitted");
    let before = store.stats().writes;
    assert_eq!(store.end_batch(&made.id, failed(String::new())).await, Ok(true));
    assert!(store.stats().writes - before > 5, "{}", store.stats().writes - before);
    assert_eq!(rows("batch_lines").await, Ok(0));

    // The process ends between the first and the second piece.
    let file = put(&store, &tenant, 3 * CHUNK_BYTES_MAX).await.expect("put");
    let (owner, id) = (tenant.clone(), file.clone());
    store.writer.run(move |connection| files::doom(connection, &owner, &id)).await.expect("doomed");
    let left = "INSERT INTO batch_lines (batch, line, custom_id, at, bytes) SELECT seq, 7, 'c', 0, 1 FROM batches";
    store.writer.run(move |connection| Ok(connection.execute(left, [])?)).await.expect("left");
    assert_eq!(store.read(&tenant, &file, 0..1).await, Ok(None));
    assert_eq!(store.delete_file(&tenant, &file).await, Ok(Deleted::Absent));
    let page = Page { after: None, limit: 10, order: Order::Ascending };
    assert_eq!(store.files(&tenant, None, &page).await.expect("listed").items.len(), 1, "the input alone");
    while store.sweep_files(1, 1).await.expect("swept") + store.sweep_batches(0).await.expect("swept") > 0 {}
    assert_eq!((rows("file_chunks").await, rows("batch_lines").await), (Ok(1), Ok(0)));
}

#[tokio::test]
async fn what_clients_keep_leaves_room_for_keys() {
    let folder = Folder::new("reserve");
    let tenant = Tenant::new("a");
    let store = folder.open(4 << 20);
    let room = ResponseRoom { tenant_max: 1 << 20, tenant_bytes_max: 1 << 40, bytes_max: 1 << 40 };
    // Large responses, then small ones, until not even the smallest fits.
    for bytes in [256 << 10, 16 << 10, 1] {
        while store.save_response(&tenant, kept(ResponseStatus::Queued, bytes), room).await.is_ok() {}
        assert_eq!(
            store.save_response(&tenant, kept(ResponseStatus::Queued, bytes), room).await,
            Err(StoreError::Full)
        );
    }
    assert_eq!(put(&store, &tenant, 1).await, Err(StoreError::Full));
    for number in 0..40 {
        let (name, identity) = (format!("jwt:corp:{number}"), "x".repeat(4000));
        store.keep_identity(&Tenant::new(&name), &identity, 1).await.expect("what the gateway writes itself");
    }
}

/// Operation by a client or by time on the responses of one of three tenants.
#[derive(Clone, Debug)]
enum Step {
    Save { tenant: usize, open: bool, bytes: usize },
    Update { nth: usize, end: bool, bytes: usize },
    Delete { nth: usize },
    Sweep { now: u64 },
}

fn step() -> impl proptest::strategy::Strategy<Value = Step> {
    use proptest::prelude::*;
    prop_oneof![
        6 => (0..3_usize, any::<bool>(), 0..6_000_usize)
            .prop_map(|(tenant, open, bytes)| Step::Save { tenant, open, bytes }),
        4 => (any::<usize>(), any::<bool>(), 0..6_000_usize)
            .prop_map(|(nth, end, bytes)| Step::Update { nth, end, bytes }),
        1 => any::<usize>().prop_map(|nth| Step::Delete { nth }),
        1 => (0..1_200_u64).prop_map(|now| Step::Sweep { now }),
    ]
}

const BOUNDS: ResponseRoom = ResponseRoom { tenant_max: 6, tenant_bytes_max: 12_000, bytes_max: 20_000 };

/// Responses, bytes and unfinished bytes of each tenant; counted from the rows, not from the sums.
async fn counted(store: &Sqlite) -> Vec<(String, u64, u64, u64)> {
    let sql = "SELECT tenant, count(*), sum(512 + length(body) + length(input) + length(output) + length(request)),
               sum(CASE WHEN status < 2 THEN bytes ELSE 0 END) FROM responses GROUP BY tenant ORDER BY tenant";
    let read = move |connection: &Connection| {
        let mut statement = connection.prepare(sql)?;
        let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)))?;
        Ok(rows.collect::<Result<_, _>>()?)
    };
    store.reader.run(read).await.expect("counted")
}

async fn take(store: &Sqlite, known: &mut Vec<(Tenant, ResponseId)>, step: &Step) {
    let before = counted(store).await;
    let total = |of: &[(String, u64, u64, u64)]| of.iter().map(|(_, _, bytes, _)| bytes).sum::<u64>();
    let refused = match step {
        Step::Save { tenant, open, bytes } => {
            let status = if *open { ResponseStatus::Queued } else { ResponseStatus::Ended };
            let (tenant, record) = (Tenant::new(["a", "b", "c"][*tenant]), kept(status, *bytes));
            known.push((tenant.clone(), record.id.clone()));
            store.save_response(&tenant, record, BOUNDS).await.is_err()
        }
        Step::Update { nth, end, bytes } if !known.is_empty() => {
            let (_, id) = &known[nth % known.len()];
            let status = if *end { ResponseStatus::Ended } else { ResponseStatus::InProgress };
            let body = Bytes::from(vec![b'y'; *bytes]);
            let change = ResponseChange { status, body, output: Bytes::new(), events: Bytes::new() };
            store.update_response(id, change, Some(BOUNDS)).await.is_err()
        }
        Step::Delete { nth } if !known.is_empty() => {
            let (tenant, id) = &known[nth % known.len()];
            store.delete_response(tenant, id).await.is_err()
        }
        Step::Sweep { now } => store.sweep_responses(*now).await.is_err(),
        _ => false,
    };
    let after = counted(store).await;
    if refused {
        assert_eq!(before, after, "what is refused changes nothing: {step:?}");
    }
    assert!(total(&after) <= BOUNDS.bytes_max, "{step:?}: {after:?}");
    for (tenant, responses, bytes, _) in &after {
        assert!(*responses <= BOUNDS.tenant_max && *bytes <= BOUNDS.tenant_bytes_max, "{step:?} {tenant}: {after:?}");
    }
    assert_eq!(store.response_bytes().await, Ok(total(&after)), "the sums are true: {step:?}");
    let open = |of: &[(String, u64, u64, u64)]| of.iter().map(|(.., open)| open).sum::<u64>();
    if matches!(step, Step::Save { open: false, .. }) {
        assert_eq!(open(&before), open(&after), "what has not ended never makes room");
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig { cases: 48, ..Default::default() })]

    #[test]
    fn responses_never_pass_their_bounds(steps in proptest::collection::vec(step(), 1..60)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let store = Sqlite::open(&SqliteOptions { path: MEMORY.into(), bytes_max: 0 }).expect("opens");
            let mut known = Vec::new();
            for step in &steps {
                take(&store, &mut known, step).await;
            }
        });
    }
}

#[tokio::test]
async fn one_failed_change_leaves_the_others_of_its_group() {
    let folder = Folder::new("group");
    let tenant = Tenant::new("a");
    let store = Arc::new(folder.open(0));
    let mut tasks = Vec::new();
    for number in 0..200 {
        let (store, tenant) = (store.clone(), tenant.clone());
        tasks.push(tokio::spawn(async move {
            if number % 3 == 0 {
                let nowhere = store.append(&tenant, &FileId::random(), 0, Bytes::from_static(b"x")).await;
                assert!(matches!(nowhere, Err(StoreError::Misuse(_))), "{nowhere:?}");
                return 0;
            }
            put(&store, &tenant, 1).await.expect("put");
            1
        }));
    }
    let mut put = 0;
    for task in tasks {
        put += task.await.expect("no panic");
    }
    let page = crate::Page { after: None, limit: 1000, order: crate::Order::Ascending };
    assert_eq!(store.files(&tenant, None, &page).await.expect("listed").items.len(), put);
    let stats = store.stats();
    assert!(stats.writes > stats.commits, "changes share commits: {stats:?}");
}

/// Each lane of a file and the only one in memory: neither the thread nor its connection is lost.
#[tokio::test]
async fn a_call_that_panics_fails_alone_and_changes_nothing() {
    let count =
        |connection: &Connection| Ok(connection.query_row("SELECT count(*) FROM it", (), |row| row.get::<_, i64>(0))?);
    let folder = Folder::new("panic");
    for store in [folder.open(0), Sqlite::open(&SqliteOptions { path: MEMORY.into(), bytes_max: 0 }).expect("opens")] {
        store.writer.run(|connection| Ok(connection.execute_batch("CREATE TABLE it (n)")?)).await.expect("made");
        for lane in [&store.writer, &store.reader, &store.key_reader] {
            for _ in 0..4 {
                let broken = lane.run(|_| -> Result<(), StoreError> { panic!("as a test") }).await;
                assert!(matches!(broken, Err(StoreError::Broken(_))), "{broken:?}");
                assert!(lane.run(count).await.is_ok(), "the thread goes on");
            }
        }
        let half = |connection: &Connection| -> Result<(), StoreError> {
            connection.execute_batch("INSERT INTO it VALUES (1)")?;
            panic!("as a test")
        };
        assert!(matches!(store.writer.run(half).await, Err(StoreError::Broken(_))));
        store.writer.run(|connection| Ok(connection.execute_batch("INSERT INTO it VALUES (2)")?)).await.expect("put");
        assert_eq!(store.writer.run(count).await, Ok(1), "the half is undone");
    }
}

/// Sums of a large ledger take longer than other reads may.
#[tokio::test]
async fn a_caller_of_the_ledger_waits_for_as_long_as_it_says() {
    let store = Sqlite::open(&SqliteOptions { path: MEMORY.into(), bytes_max: 0 }).expect("opens");
    let (free, is_free) = std::sync::mpsc::channel::<()>();
    let slow = store.writer.run(move |_| Ok(is_free.recv().is_ok()));
    let asked = async {
        let (began, query) = (Instant::now(), UsageQuery { limit: 1, ..UsageQuery::default() });
        let answer = store.usage_within(&query, Duration::from_millis(50)).await.map(|rows| rows.items.len());
        drop(free);
        (answer, began.elapsed())
    };
    let (slow, (answer, waited)) = tokio::join!(slow, asked);
    assert_eq!((slow, answer), (Ok(false), Err(StoreError::Busy)));
    assert!(waited < Duration::from_secs(30), "{waited:?}");
}

#[tokio::test]
async fn one_process_leads_until_it_ends() {
    let folder = Folder::new("lead");
    let (first, second) = (folder.open(0), folder.open(0));
    assert_eq!((first.lead().await, second.lead().await), (Ok(true), Ok(false)));
    assert_eq!(first.lead().await, Ok(true));
    assert!(!first.is_shared() && second.is_shared());
    drop(first);
    assert_eq!(second.lead().await, Ok(true));
    assert!(second.is_shared(), "the process before may still be saving answers");
}

#[test]
fn what_is_no_database_is_refused() {
    let folder = Folder::new("garbage");
    let path = folder.0.join("a.db");
    std::fs::write(&path, vec![b'x'; 8192]).expect("written");
    let opened = Sqlite::open(&SqliteOptions { path, bytes_max: 0 }).err();
    assert!(matches!(opened, Some(StoreError::Broken(_))), "{opened:?}");
    let nowhere = Sqlite::open(&SqliteOptions { path: folder.0.join("none/a.db"), bytes_max: 0 }).err();
    assert!(matches!(nowhere, Some(StoreError::Broken(_))), "{nowhere:?}");
}
