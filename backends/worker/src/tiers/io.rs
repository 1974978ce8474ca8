//! Threads that move blocks to and from a store, so that no step waits for I/O.
//!
//! A queue in front of each store: loads before writes, because a request waits for a load and nothing waits for a
//! write. Writes are bounded by the caller (a cache may drop them), loads by the window of [`super::intake`], and
//! queries here: the asker may be gone long before a slow store answers. Every job has an outcome, which goes to the
//! engine's thread like any other command.

use super::block::Identity;
use super::disk::{DiskSet, Found, ReadError};
use penstock_kv::SlotId;
use penstock_kv::tier::Link;
use penstock_proto::frames::Tier;
use penstock_proto::{BlockHash, WorkId};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// Reason why a block was not loaded or stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The store does not have the block.
    Gone,
    /// The stored bytes are not the block.
    Corrupt,
    /// The store has no room for another block.
    Full,
    /// The store failed, or did not answer in time.
    Broken,
}

/// Storage for blocks. Two implementations: files, and a server.
pub(crate) trait Store: Send {
    /// Stores the block `link` in `slot`; `bytes` is its KV in wire order.
    fn write(&mut self, slot: SlotId, link: Link, bytes: &[u8]) -> Result<(), Failure>;

    /// Loads the block from its slot, and checks that the bytes belong to `hash`.
    fn read(&mut self, slot: SlotId, hash: BlockHash) -> Result<Vec<u8>, Failure>;

    /// Number of the first of `hashes` that it has; 0 for a store that only has blocks known to this worker.
    fn find(&mut self, hashes: &[BlockHash]) -> usize {
        let _ = hashes;
        0
    }

    /// Opens the store again after a failure: its slots, and the blocks in them, the least valuable first.
    fn revive(&mut self) -> Result<(usize, Vec<Found>), String> {
        Err("the tier cannot be reopened".into())
    }

    /// Most slots that the store can have, after it was full.
    fn slots(&self) -> usize {
        0
    }
}

/// Files of the disk tier, which can be opened again after a failure.
pub(crate) struct Disk {
    path: PathBuf,
    bytes_max: u64,
    identity: Identity,
    /// Open files; `None` if they could not be opened.
    set: Option<DiskSet>,
}

impl Disk {
    /// Opens the files; a tier that cannot be opened now may be later.
    pub(crate) fn open(
        path: &Path,
        bytes_max: u64,
        identity: &Identity,
    ) -> (Self, std::io::Result<(usize, Vec<Found>)>) {
        let (path, identity) = (path.to_owned(), identity.clone());
        let mut disk = Self { path, bytes_max, identity, set: None };
        let found = disk.reopen();
        (disk, found)
    }

    fn reopen(&mut self) -> std::io::Result<(usize, Vec<Found>)> {
        // The old lock goes with the old files, which may be on a disk that is gone.
        self.set = None;
        let (set, found) = DiskSet::open(&self.path, self.bytes_max, &self.identity)?;
        set.probe()?;
        let slots = set.slots();
        self.set = Some(set);
        Ok((slots, found))
    }
}

impl Store for Disk {
    fn write(&mut self, slot: SlotId, link: Link, bytes: &[u8]) -> Result<(), Failure> {
        let set = self.set.as_mut().ok_or(Failure::Broken)?;
        set.write(slot, link, bytes).map_err(|error| match error.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => Failure::Full,
            _ => {
                tracing::warn!(%error, "a KV block could not be written to disk");
                Failure::Broken
            }
        })
    }

    fn read(&mut self, slot: SlotId, hash: BlockHash) -> Result<Vec<u8>, Failure> {
        let set = self.set.as_mut().ok_or(Failure::Broken)?;
        set.read(slot, hash).map_err(|error| match error {
            ReadError::Unusable(why) => {
                tracing::warn!(slot = slot.0, %why, "a KV block on disk is discarded");
                Failure::Corrupt
            }
            ReadError::Io(error) => {
                tracing::warn!(%error, "a KV block could not be read from disk");
                Failure::Broken
            }
        })
    }

    fn revive(&mut self) -> Result<(usize, Vec<Found>), String> {
        self.reopen().map_err(|error| error.to_string())
    }

    fn slots(&self) -> usize {
        self.set.as_ref().map_or(0, DiskSet::slots_made)
    }
}

/// Job of storing one block in one slot.
pub(crate) struct Write {
    pub(crate) slot: SlotId,
    pub(crate) link: Link,
    pub(crate) bytes: Vec<u8>,
    /// Block that is in the slot now, if the tier below wants it.
    pub(crate) keep: Option<Link>,
}

enum Job {
    Write(Write),
    Read { slot: SlotId, hash: BlockHash },
    Find { id: WorkId, hashes: Vec<BlockHash> },
    Revive,
}

/// Outcome of a job of an I/O thread, sent to the engine's thread.
pub(crate) enum Outcome {
    /// Outcome of a write. `kept`: the former block of the slot.
    Written { tier: Tier, slot: SlotId, result: Result<(), Failure>, kept: Option<(Link, Vec<u8>)>, slots: usize },
    /// Outcome of a load, with the seconds that it took.
    Read { tier: Tier, slot: SlotId, hash: BlockHash, result: Result<Vec<u8>, Failure>, seconds: f64 },
    /// Answer to a query: the leading hashes of `request` that the store has.
    Found { tier: Tier, id: WorkId, hashes: Vec<BlockHash> },
    /// Outcome of opening a failed store again.
    Revived { tier: Tier, result: Result<(usize, Vec<Found>), String> },
}

impl Outcome {
    /// Tier whose store has answered; `None` if the store failed or was too slow, and for a revival.
    pub(crate) fn answers(&self) -> Option<Tier> {
        match self {
            Self::Written { result: Err(Failure::Broken), .. }
            | Self::Read { result: Err(Failure::Broken), .. }
            | Self::Revived { .. } => None,
            Self::Written { tier, .. } | Self::Read { tier, .. } | Self::Found { tier, .. } => Some(*tier),
        }
    }
}

/// Callback that takes outcomes to the engine's thread; false if that has ended.
pub(crate) type Tell = Arc<dyn Fn(Outcome) -> bool + Send + Sync>;

#[derive(Default)]
struct Jobs {
    urgent: VecDeque<Job>,
    writes: VecDeque<Write>,
    /// Number of queries among the urgent jobs.
    finds: usize,
    closed: bool,
}

#[derive(Default)]
struct Queue {
    jobs: Mutex<Jobs>,
    more: Condvar,
}

impl Queue {
    fn put(&self, put: impl FnOnce(&mut Jobs)) {
        put(&mut self.jobs.lock().unwrap_or_else(PoisonError::into_inner));
        self.more.notify_one();
    }

    fn next(&self) -> Option<Job> {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(job) = jobs.urgent.pop_front().or_else(|| jobs.writes.pop_front().map(Job::Write)) {
                jobs.finds -= usize::from(matches!(job, Job::Find { .. }));
                return Some(job);
            }
            if jobs.closed {
                return None;
            }
            jobs = self.more.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Threads of one store. They end when this is dropped, after the queued jobs.
pub(crate) struct Io {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

impl Io {
    /// Starts one thread for each of `stores`, which are handles of the same store.
    pub(crate) fn start(tier: Tier, stores: Vec<Box<dyn Store>>, tell: &Tell) -> std::io::Result<Self> {
        let queue = Arc::new(Queue::default());
        let mut io = Self { queue, threads: Vec::new() };
        for store in stores {
            let (queue, tell) = (Arc::clone(&io.queue), Arc::clone(tell));
            let name = format!("penstock-{}", tier.name());
            io.threads.push(std::thread::Builder::new().name(name).spawn(move || work(tier, store, &queue, &*tell))?);
        }
        Ok(io)
    }

    /// Queues a write; reads and queries go before all writes.
    pub(crate) fn write(&self, write: Write) {
        self.queue.put(|jobs| jobs.writes.push_back(write));
    }

    /// Queues a load of the block `hash` from `slot`, before all writes.
    pub(crate) fn read(&self, slot: SlotId, hash: BlockHash) {
        self.queue.put(|jobs| jobs.urgent.push_back(Job::Read { slot, hash }));
    }

    /// Queues an attempt to open the store anew.
    pub(crate) fn revive(&self) {
        self.queue.put(|jobs| jobs.urgent.push_back(Job::Revive));
    }

    /// Queues a query for `hashes`, a part of a chain. False, with nothing queued, if `most` queries wait already.
    pub(crate) fn find(&self, id: WorkId, hashes: Vec<BlockHash>, most: usize) -> bool {
        let mut is_asked = false;
        self.queue.put(|jobs| {
            is_asked = jobs.finds < most;
            if is_asked {
                jobs.finds += 1;
                jobs.urgent.push_back(Job::Find { id, hashes });
            }
        });
        is_asked
    }

    /// Returns true if all queued jobs are done and the threads are gone.
    pub(crate) fn is_finished(&self) -> bool {
        self.threads.iter().all(JoinHandle::is_finished)
    }

    /// Closes the queue: the threads end after the queued jobs.
    pub(crate) fn close(&self) {
        self.queue.jobs.lock().unwrap_or_else(PoisonError::into_inner).closed = true;
        self.queue.more.notify_all();
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        self.close();
    }
}

fn work(tier: Tier, mut store: Box<dyn Store>, queue: &Queue, tell: &dyn Fn(Outcome) -> bool) {
    while let Some(job) = queue.next() {
        let outcome = match job {
            Job::Write(Write { slot, link, bytes, keep }) => {
                let kept = keep.and_then(|link| Some((link, store.read(slot, link.hash).ok()?)));
                let result = store.write(slot, link, &bytes);
                Outcome::Written { tier, slot, result, kept, slots: store.slots() }
            }
            Job::Read { slot, hash } => {
                let began = Instant::now();
                let result = store.read(slot, hash);
                Outcome::Read { tier, slot, hash, result, seconds: began.elapsed().as_secs_f64() }
            }
            Job::Find { id, mut hashes } => {
                hashes.truncate(store.find(&hashes));
                Outcome::Found { tier, id, hashes }
            }
            Job::Revive => Outcome::Revived { tier, result: store.revive() },
        };
        if !tell(outcome) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// A store that answers a query when the test allows it.
    struct Slow(mpsc::Receiver<()>);

    impl Store for Slow {
        fn write(&mut self, _: SlotId, _: Link, _: &[u8]) -> Result<(), Failure> {
            Ok(())
        }

        fn read(&mut self, _: SlotId, _: BlockHash) -> Result<Vec<u8>, Failure> {
            Err(Failure::Gone)
        }

        fn find(&mut self, hashes: &[BlockHash]) -> usize {
            self.0.recv().map_or(0, |()| hashes.len())
        }
    }

    #[test]
    fn a_disk_is_opened_again_with_what_it_has() {
        let folder = std::env::temp_dir().join(format!("penstock-revive-{}", std::process::id()));
        let (path, away) = (folder.join("kv"), folder.join("away"));
        std::fs::create_dir_all(&folder).expect("a folder");
        let identity = Identity::new(b"model", "numerics", 100);
        let link = Link { parent: None, hash: BlockHash(7) };
        let (mut disk, found) = Disk::open(&path, 100_000, &identity);
        assert_eq!(found.expect("it opens").1, []);
        disk.write(SlotId(0), link, &[3; 100]).expect("written");
        // Something else is in the file's place for a while.
        std::fs::rename(&path, &away).expect("moved");
        std::fs::write(&path, "a file").expect("written");
        assert!(disk.revive().is_err());
        assert_eq!(disk.write(SlotId(1), link, &[3; 100]), Err(Failure::Broken));
        assert_eq!(disk.read(SlotId(0), link.hash), Err(Failure::Broken));
        std::fs::remove_file(&path).expect("removed");
        std::fs::rename(&away, &path).expect("moved back");
        assert_eq!(disk.revive().expect("it opens").1, [(SlotId(0), link)]);
        assert_eq!(disk.read(SlotId(0), link.hash), Ok(vec![3; 100]));
        // A store that could not be opened at the start can be opened later.
        std::fs::write(folder.join("no folder"), "a file").expect("written");
        let (mut late, found) = Disk::open(&folder.join("no folder"), 100_000, &identity);
        assert!(found.is_err());
        std::fs::remove_file(folder.join("no folder")).expect("removed");
        assert!(late.revive().is_ok());
        std::fs::remove_dir_all(&folder).expect("removed");
    }

    #[test]
    fn questions_wait_for_a_slow_store_up_to_a_bound() {
        let ((go, wait), (told, outcomes)) = (mpsc::channel(), mpsc::channel());
        let tell: Tell = Arc::new(move |outcome| told.send(outcome).is_ok());
        let io = Io::start(Tier::Remote, vec![Box::new(Slow(wait))], &tell).expect("a thread");
        let ask = |most| io.find(WorkId(1), vec![BlockHash(7)], most);
        let asked = (0..1000).filter(|_| ask(3)).count();
        assert!((3..=4).contains(&asked), "{asked}: three wait, and one may be asked by now");
        assert!(ask(5), "who is more important may still ask");
        for _ in 0..asked + 1 {
            go.send(()).expect("it listens");
            let Ok(Outcome::Found { hashes, .. }) = outcomes.recv() else { panic!("an answer") };
            assert_eq!(hashes.len(), 1);
        }
        assert!(ask(1), "nothing waits any more");
        drop(go);
    }
}
