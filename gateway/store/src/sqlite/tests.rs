//! SQLite's own promises: nothing is lost by a crash, a full disk breaks nothing, one process leads.

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;

use super::*;
use crate::{CHUNK_BYTES_MAX, FileId, Files, NewFile, Tenant, conformance};

/// A folder that is removed with its test.
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
    // Opened beside the first, which is never closed in order: what a killed process leaves.
    let second = folder.open(0);
    assert_eq!(second.read(&tenant, &id, 0..600_000).await.expect("read").expect("there").len(), 600_000);
    drop(first);
    assert!(second.file(&tenant, &id).await.expect("read").is_some());
}

#[tokio::test]
async fn only_its_owner_may_read_the_database() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new("mode");
    // Open meanwhile: SQLite removes the files beside the database when the last connection closes.
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
    // What was there is whole; what was begun is swept, and its place is used again.
    assert_eq!(store.read(&tenant, &kept, 0..1 << 20).await.expect("read").expect("there").len(), 1 << 20);
    while store.sweep_files(1, 2).await.expect("swept") > 0 {}
    put(&store, &tenant, 1 << 20).await.expect("fits again");
    assert!(!store.stats().down);
    let check = store
        .writer
        .run(|connection| Ok(connection.query_row("PRAGMA integrity_check", [], |row| row.get::<_, String>(0))?));
    assert_eq!(check.await.as_deref(), Ok("ok"));
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

#[tokio::test]
async fn one_process_leads_until_it_ends() {
    let folder = Folder::new("lead");
    let (first, second) = (folder.open(0), folder.open(0));
    assert_eq!((first.lead().await, second.lead().await), (Ok(true), Ok(false)));
    assert_eq!(first.lead().await, Ok(true));
    drop(first);
    assert_eq!(second.lead().await, Ok(true));
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
