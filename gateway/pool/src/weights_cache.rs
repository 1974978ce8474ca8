//! Cache of packed weights in files of a private folder, for starts that find no copy in memory: after the machine's start, in a new container.
//!
//! ```text
//! no copy in memory ─ locked ─┬─ an entry of the key, every piece as written ─→ memory filled, sealed, unlocked ─→ workers map it
//!                             └─ none, or a bad one, which is removed ────────→ unlocked ─→ the worker packs
//! a worker is ready ─ its sealed copy, if there is no entry ─→ written by a thread of low priority
//! ```
//! The lock is the one under which workers pack, so a worker that is started meanwhile waits, and packs where this process dies. Nobody maps an
//! entry: what is served lies in sealed memory, and was checked on its way there. A fault of the cache costs a packing, never a start.

mod entry;
mod folder;

pub use entry::{EntryError, EntryKey, Header, check_entry};

use super::copies::Copy;
use folder::{Entry, Folder, Found, Opened, Source, Written};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{FlockOperation, Mode, OFlags, flock, fstat, open};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;
use tracing::{debug, info, warn};

/// Bytes of a piece: small beside any model, large beside its hash of 32 bytes.
const PIECE: u64 = 8 << 20;

/// Most threads that read an entry: four hash more than most disks give.
const THREADS_MAX: usize = 4;

/// Copies that wait to be written; one that finds no place is offered again when the next worker is ready.
const WAITING_MAX: usize = 64;

/// Lowest priority of a thread.
const NICE: i32 = 19;

/// Name of the cache's threads.
const THREAD: &str = "penstock-cache";

/// Key of the packed weights that the workers of a pool share, as the files are at the moment of the call; `None`: they share none. An error is text
/// for the log.
pub type KeyNow = Arc<dyn Fn() -> Result<Option<EntryKey>, String> + Send + Sync>;

/// Function that fills a piece, by its number.
pub type ReadPiece<'r> = &'r (dyn Fn(usize, &mut [u8]) -> io::Result<()> + Sync);

/// Function that fills memory with a copy of (bytes, bytes of a piece), read by so many threads, and seals it under the key. False: the bytes are no
/// such copy. An error is text for the log. Memory that was not sealed is empty again.
pub type FillMemory = fn(&OwnedFd, &EntryKey, (usize, usize), usize, ReadPiece<'_>) -> Result<bool, String>;

/// Layout of a copy in memory, which the workers' engine knows.
#[derive(Clone, Copy, Debug)]
pub struct CopyLayout {
    /// Key under which memory was sealed; `None`: it is no sealed copy.
    pub key: fn(&OwnedFd) -> Option<EntryKey>,
    /// Function that fills memory with a copy, and seals it.
    pub fill: FillMemory,
}

/// Figures of the cache since the gateway began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounts {
    /// Copies that were read from an entry.
    pub hits: u64,
    /// Copies without an entry.
    pub misses: u64,
    /// Entries that were not as they were written, or not private, and were removed.
    pub bad: u64,
    /// Bytes of all entries, as last seen.
    pub bytes: u64,
}

/// Cache of packed weights in a folder. Clones are the same.
#[derive(Clone, Debug)]
pub struct WeightsCache {
    shared: Arc<Shared>,
    waiting: SyncSender<Weak<Copy>>,
}

#[derive(Debug)]
struct Shared {
    folder: Folder,
    bytes_max: u64,
    layout: CopyLayout,
    hits: AtomicU64,
    misses: AtomicU64,
    bad: AtomicU64,
    bytes: AtomicU64,
    /// Bytes of memory that are being filled now.
    filling: AtomicU64,
}

/// Bytes that are counted as being filled until this is dropped.
struct Filling<'s>(&'s AtomicU64, u64);

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

impl WeightsCache {
    /// Cache of at most `bytes_max` in `folder`, which is made when needed. Starts a thread that removes entries beyond `bytes_max`, then writes
    /// copies, and ends with the last clone.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(folder: PathBuf, bytes_max: u64, layout: CopyLayout) -> io::Result<Self> {
        let [hits, misses, bad, bytes, filling] = [(); 5].map(|()| AtomicU64::new(0));
        let shared =
            Arc::new(Shared { folder: Folder::new(folder), bytes_max, layout, hits, misses, bad, bytes, filling });
        let (waiting, copies) = sync_channel(WAITING_MAX);
        let writer = Arc::clone(&shared);
        std::thread::Builder::new().name(THREAD.into()).spawn(move || writer.run(&copies))?;
        Ok(Self { shared, waiting })
    }

    /// Number of entries in a folder, and their bytes; zeros if there is no folder.
    ///
    /// # Errors
    /// The folder cannot be read, or is not private to this user.
    pub fn usage(folder: PathBuf) -> io::Result<(usize, u64)> {
        Folder::new(folder).find()?.map_or(Ok((0, 0)), |opened| opened.usage())
    }

    /// Figures of the cache.
    pub fn counts(&self) -> CacheCounts {
        let [hits, misses, bad, bytes] = [&self.shared.hits, &self.shared.misses, &self.shared.bad, &self.shared.bytes]
            .map(|count| count.load(Ordering::Relaxed));
        CacheCounts { hits, misses, bad, bytes }
    }

    /// Locks the empty memory of a copy, and fills it on a thread of its own if there is an entry of the key. Workers that are started with the memory
    /// before the thread ends wait for the lock.
    pub(super) fn restore(&self, copy: &Arc<Copy>, key: &KeyNow) {
        let locked = match lock(copy) {
            Ok(locked) => locked,
            Err(error) => {
                warn!(%error, "packed weights are not read from the cache: their memory cannot be locked");
                return;
            }
        };
        let (shared, copy, key) = (Arc::clone(&self.shared), Arc::downgrade(copy), Arc::clone(key));
        let reads = std::thread::Builder::new().name(THREAD.into()).spawn(move || match key() {
            Ok(Some(key)) => shared.read(locked, &copy, &key),
            Ok(None) => {}
            Err(error) => debug!(error, "packed weights are not looked for in the cache: they have no key"),
        });
        if let Err(error) = reads {
            warn!(%error, "packed weights are not read from the cache: no thread can be started");
        }
    }

    /// Takes in a sealed copy to be written, if there is a place; it is dropped if its last worker stops before.
    pub(super) fn keep(&self, copy: &Arc<Copy>) -> bool {
        self.waiting.try_send(Arc::downgrade(copy)).is_ok()
    }
}

/// Memory of a copy by a description of its own, locked as by a worker that packs.
fn lock(copy: &Copy) -> io::Result<OwnedFd> {
    let shared = copy.descriptor()?;
    let own = open(format!("/proc/self/fd/{}", shared.as_raw_fd()), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    flock(&own, FlockOperation::NonBlockingLockExclusive)?;
    Ok(own)
}

impl Shared {
    /// Fills the locked memory from the entry of the key, if there is one; unlocks it in any case.
    fn read(&self, memory: OwnedFd, copy: &Weak<Copy>, key: &EntryKey) {
        let found = self.folder.find().and_then(|opened| match opened {
            Some(opened) => opened.entry(key).map(|found| Some((opened, found))),
            None => Ok(None),
        });
        let (opened, entry) = match found {
            Ok(None | Some((_, Found::Nothing))) => {
                self.misses.fetch_add(1, Ordering::Relaxed);
                return;
            }
            Ok(Some((opened, Found::Bad(why, id)))) => return self.discard(&opened, key, (id, &why), memory),
            Ok(Some((opened, Found::Entry(entry)))) => (opened, entry),
            Err(error) => {
                warn!(folder = %self.folder.path().display(), %error, "the cache of packed weights cannot be read: the worker packs");
                self.misses.fetch_add(1, Ordering::Relaxed);
                return;
            }
        };
        match self.fill(&memory, copy, key, &entry) {
            Ok(()) => {}
            Err(Fault::Entry(why)) => self.discard(&opened, key, (entry.id(), &why), memory),
            Err(Fault::Left) => debug!("packed weights are not read from the cache: the last worker has stopped"),
            Err(Fault::Memory(error)) => {
                self.misses.fetch_add(1, Ordering::Relaxed);
                warn!(error, "packed weights are not read from the cache: the worker packs");
            }
        }
    }

    fn fill(&self, memory: &OwnedFd, copy: &Weak<Copy>, key: &EntryKey, entry: &Entry) -> Result<(), Fault> {
        let began = Instant::now();
        let bytes = entry.header().bytes;
        let system = penstock_machine::Machine::default().memory();
        // Copies of other pools may be filled at the same time, and have taken little of their memory so far.
        let others = self.filling.fetch_add(bytes, Ordering::Relaxed);
        let _filling = Filling(&self.filling, bytes);
        if system.bound != penstock_machine::Bound::Unknown && system.available < bytes.saturating_add(others) {
            let available = system.available;
            return Err(Fault::Memory(format!("{bytes} bytes, {available} are available, and others fill {others}")));
        }
        let sizes = (usize::try_from(bytes), usize::try_from(entry.header().piece));
        let (Ok(size), Ok(piece)) = sizes else { return Err(Fault::Memory("too large for this machine".into())) };
        let fault = Mutex::new(None);
        let read = |number: usize, piece: &mut [u8]| {
            let read = match copy.strong_count() {
                0 => Err(Fault::Left),
                _ => entry.read(number, piece).map_err(Fault::Entry),
            };
            read.map_err(|why| {
                fault.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(why);
                io::ErrorKind::InvalidData.into()
            })
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
        let filled = (self.layout.fill)(memory, key, (size, piece), threads, &read);
        if let Some(fault) = fault.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(fault);
        }
        match filled {
            Ok(true) => {}
            Ok(false) => return Err(Fault::Entry(EntryError::NoCopy)),
            Err(error) => return Err(Fault::Memory(error)),
        }
        entry.touch();
        copy.upgrade().iter().for_each(|copy| copy.is_offered.store(true, Ordering::Relaxed));
        self.hits.fetch_add(1, Ordering::Relaxed);
        let (entry, seconds) = (short(key), began.elapsed().as_secs_f64());
        info!(entry, bytes, seconds, "packed weights read from the cache");
        Ok(())
    }

    /// Unlocks the memory, which is empty, so that the worker packs, and removes the entry.
    fn discard(&self, opened: &Opened, key: &EntryKey, (id, why): (folder::FileId, &EntryError), memory: OwnedFd) {
        opened.remove_bad(key, id);
        self.bad.fetch_add(1, Ordering::Relaxed);
        drop(memory);
        let os = match why {
            EntryError::Os(error) => error.to_string(),
            _ => String::new(),
        };
        warn!(entry = short(key), folder = %self.folder.path().display(), %why, os, "an entry of the cache of packed weights is bad: it is removed, and the worker packs");
        self.see();
    }

    /// Writes copies as they come, until the last handle is gone.
    fn run(&self, copies: &Receiver<Weak<Copy>>) {
        // Err: it has the priority of the others.
        let _ = rustix::process::nice(NICE);
        if let Err(error) = self.folder.tidy(self.bytes_max) {
            warn!(folder = %self.folder.path().display(), %error, "the cache of packed weights cannot be used");
        }
        self.see();
        while let Ok(copy) = copies.recv() {
            self.write(&copy);
            self.see();
        }
    }

    /// Writes one copy, as long as somebody holds it.
    fn write(&self, copy: &Weak<Copy>) {
        let began = Instant::now();
        let left = || io::Error::from(io::ErrorKind::NotFound);
        let about = copy.upgrade().and_then(|copy| {
            let memory = copy.descriptor().ok()?;
            let key = (self.layout.key)(&memory)?;
            Some((key, fstat(&memory).ok()?.st_size.unsigned_abs()))
        });
        let Some((key, bytes)) = about else { return };
        let mut read = |at: u64, part: &mut [u8]| {
            // Held for no longer than a piece: the memory goes with its last worker.
            let memory = copy.upgrade().ok_or_else(left)?.descriptor()?;
            File::from(memory).read_exact_at(part, at)
        };
        let written = self.folder.write(Source { key, bytes, piece: PIECE, read: &mut read }, self.bytes_max);
        let (entry, bytes_max) = (short(&key), self.bytes_max);
        match written {
            Ok(Written::Done { bytes, removed }) => {
                let seconds = began.elapsed().as_secs_f64();
                info!(entry, bytes, seconds, removed, "packed weights written to the cache");
            }
            Ok(Written::There) => {}
            Ok(Written::TooLarge) => {
                warn!(bytes, bytes_max, "packed weights are not kept: larger than server.weights_cache_bytes_max");
            }
            Ok(Written::NoRoom) => {
                warn!(bytes, folder = %self.folder.path().display(), "packed weights are not kept: the disk has too little room");
            }
            Err(_) if copy.strong_count() == 0 => debug!("packed weights are not kept: the last worker has stopped"),
            Err(error) => {
                warn!(folder = %self.folder.path().display(), %error, "packed weights are not kept: the cache cannot be written");
            }
        }
    }

    /// Takes in the bytes of all entries.
    fn see(&self) {
        if let Ok(Some(opened)) = self.folder.find()
            && let Ok((_, bytes)) = opened.usage()
        {
            self.bytes.store(bytes, Ordering::Relaxed);
        }
    }
}

/// Reason why memory was not filled.
enum Fault {
    /// Entry that is not as it was written.
    Entry(EntryError),
    /// Copy that nobody holds any more.
    Left,
    /// Memory that cannot be used.
    Memory(String),
}

/// Beginning of an entry's name, for logs.
fn short(key: &EntryKey) -> String {
    key[..6].iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests;
