//! Embedded store: one SQLite database in WAL mode, with one writer thread and two reader threads.
//!
//! `synchronous=FULL`: acknowledged changes survive a power loss, not only a crash of the process; group commit (see
//! `lane`) makes that one fsync for all queued changes. File contents are rows of up to 256 KiB in the same database,
//! so that a file, its record and references to it change in one transaction, and a copy of the database is a complete
//! backup. Space of deleted files is reused; the database file does not shrink.
//! `docs/adr/0008-one-database-for-what-is-kept.md` has the alternatives considered.

mod audit;
mod batches;
mod claims;
mod configs;
mod files;
mod inventory;
mod keys;
mod lane;
mod ledger;
mod objects;
mod pages;
mod people;
mod responses;
mod schema;
mod secrets;

use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{Connection, OpenFlags};
use tokio::sync::Notify;

use crate::claims::MemoryClaims;
use crate::{Stats, Store, StoreError};
use lane::Lane;

/// Number of connections that only read objects, beside the one that writes and the one that reads keys.
const READERS: usize = 2;
/// Longest wait of a statement for another process's transaction.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
/// Path of a database that ends with the process.
const MEMORY: &str = ":memory:";
/// WAL frames after which the writer checkpoints them into the database: 4 MiB.
const CHECKPOINT_PAGES: u32 = 1024;
/// Size to which a WAL that grew in a burst is truncated after a checkpoint.
const WAL_BYTES_KEPT: u32 = 64 << 20;

/// Options for opening the SQLite database: its path and largest size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SqliteOptions {
    /// Path of the database; `:memory:` persists nothing.
    pub path: PathBuf,
    /// Largest size in bytes; 0: bounded by the disk only.
    pub bytes_max: u64,
}

/// Store embedded in this process, in one SQLite database.
pub struct Sqlite {
    writer: Lane,
    reader: Lane,
    /// Reads of keys and their changes: no queue of large objects stands between a revocation and its effect.
    key_reader: Lane,
    /// Lock file beside the database, held by the leader. `None`: in memory, so no other process exists.
    leader: Option<Mutex<Leader>>,
    /// Wakes callers that wait for a change of the directory by this process.
    directory: Notify,
    /// Claims on the work that this process runs.
    claims: MemoryClaims,
}

struct Leader {
    file: File,
    leads: bool,
    /// True if another process led while this one had the store open: it may still be saving answers when it leads no more.
    followed: bool,
}

impl Sqlite {
    /// Opens or creates the database and migrates it to the newest version.
    ///
    /// # Errors
    /// [`StoreError::Broken`] if the file cannot be opened, is no database, or is damaged.
    pub fn open(options: &SqliteOptions) -> Result<Self, StoreError> {
        let memory = options.path.as_os_str() == MEMORY;
        let connection = if memory { Connection::open_in_memory()? } else { connect(&options.path)? };
        connection.execute_batch(&format!(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES};
             PRAGMA journal_size_limit = {WAL_BYTES_KEPT}; PRAGMA temp_store = MEMORY;"
        ))?;
        schema::migrate(&connection)?;
        if options.bytes_max > 0 {
            let page: u64 = connection.query_row("PRAGMA page_size", [], |row| row.get(0))?;
            connection.execute_batch(&format!("PRAGMA max_page_count = {}", (options.bytes_max / page).max(1)))?;
        }
        let spawned = |error: std::io::Error| StoreError::Broken(format!("its threads: {error}"));
        if memory {
            let writer = Lane::writer(connection).map_err(spawned)?;
            let (reader, key_reader) = (writer.clone(), writer.clone());
            return Ok(Self {
                reader,
                key_reader,
                writer,
                leader: None,
                directory: Notify::new(),
                claims: MemoryClaims::default(),
            });
        }
        let readers = (0..READERS).map(|_| read_only(&options.path)).collect::<Result<_, _>>()?;
        Ok(Self {
            writer: Lane::writer(connection).map_err(spawned)?,
            reader: Lane::readers(readers).map_err(spawned)?,
            key_reader: Lane::readers(vec![read_only(&options.path)?]).map_err(spawned)?,
            leader: Some(Mutex::new(Leader { file: lock_file(&options.path)?, leads: false, followed: false })),
            directory: Notify::new(),
            claims: MemoryClaims::default(),
        })
    }
}

fn connect(path: &Path) -> Result<Connection, StoreError> {
    // Created here with mode 0600, so that no other user can ever read it; SQLite gives its other files the same mode.
    use std::os::unix::fs::OpenOptionsExt;
    let made = OpenOptions::new().create(true).append(true).mode(0o600).open(path);
    made.map_err(|error| StoreError::Broken(format!("{}: {error}", path.display())))?;
    let connection =
        Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    Ok(connection)
}

fn read_only(path: &Path) -> Result<Connection, StoreError> {
    let connection = connect(path)?;
    connection.execute_batch("PRAGMA query_only = ON")?;
    Ok(connection)
}

fn lock_file(path: &Path) -> Result<File, StoreError> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let opened = OpenOptions::new().create(true).append(true).mode(0o600).open(&name);
    opened.map_err(|error| StoreError::Broken(format!("{}: {error}", Path::new(&name).display())))
}

#[async_trait]
impl Store for Sqlite {
    async fn lead(&self) -> Result<bool, StoreError> {
        let Some(leader) = &self.leader else { return Ok(true) };
        let mut leader = leader.lock().unwrap_or_else(PoisonError::into_inner);
        if !leader.leads {
            leader.leads = match leader.file.try_lock() {
                Ok(()) => true,
                Err(TryLockError::WouldBlock) => {
                    leader.followed = true;
                    false
                }
                Err(TryLockError::Error(error)) => return Err(StoreError::Broken(error.to_string())),
            };
        }
        Ok(leader.leads)
    }

    async fn resign(&self) -> Result<(), StoreError> {
        let Some(leader) = &self.leader else { return Ok(()) };
        let mut leader = leader.lock().unwrap_or_else(PoisonError::into_inner);
        leader.leads = false;
        leader.file.unlock().map_err(|error| StoreError::Broken(error.to_string()))
    }

    /// During an upgrade the process before saves answers for as long as its last requests take.
    fn is_shared(&self) -> bool {
        let leader = self.leader.as_ref().map(|leader| leader.lock().unwrap_or_else(PoisonError::into_inner));
        leader.is_some_and(|leader| !leader.leads || leader.followed)
    }

    fn stats(&self) -> Stats {
        let (writer, reader, keys) = (self.writer.stats(), self.reader.stats(), self.key_reader.stats());
        let same = self.leader.is_none();
        let errors = if same { writer.errors } else { writer.errors + reader.errors + keys.errors };
        Stats { errors, down: writer.down || reader.down || keys.down, ..writer }
    }
}

#[cfg(test)]
mod tests;
