//! Memory of packed weights that local workers share: one copy per model, form and program, held here while a worker of it runs or is to run.
//!
//! ```text
//! supervisor ── key of the files now ──→ Copies ──→ memory of that key, empty or sealed
//!     └─ starts the worker with it as standard input; the first one packs into it and seals it
//!     └─ empty memory may be filled from a file, and a sealed copy be kept in one: `weights_cache.rs`
//! gateway killed or replaced: the next one finds the memory in /proc/PID/fd/0 of each worker that it adopts
//! ```
//! A copy is held by the supervisors of its workers and by nobody else: it goes with the last of them that stops its worker for good. The key
//! only finds the memory. Whether the content is what a worker needs, the worker itself checks, against files that it has open.

use super::lease::{self, Lease};
use super::weights_cache::{KeyNow, WeightsCache};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_get_seals, fstat, memfd_create, open};
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use tracing::warn;

/// Copies of weights that the supervisors of a gateway hold. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Copies {
    held: Arc<Mutex<HashMap<String, Weak<Copy>>>>,
    /// Files of copies; `None`: none are kept.
    cache: Option<WeightsCache>,
}

/// Copies for the workers of a pool, and the key of their weights.
#[derive(Clone)]
pub struct SharedWeights {
    /// Copies of all pools.
    pub copies: Copies,
    /// Digest of program, model files and form as they are at the moment of the call.
    pub key: Arc<dyn Fn() -> String + Send + Sync>,
    /// Key of the weights, in sealed memory and in files.
    pub sealed_key: KeyNow,
}

impl fmt::Debug for SharedWeights {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("SharedWeights").field("copies", &self.copies).finish_non_exhaustive()
    }
}

/// Memory for the packed weights of one key.
#[derive(Debug)]
pub(super) struct Copy {
    key: String,
    memory: OwnedFd,
    /// True if the cache has the copy, or was asked to keep it.
    pub(super) is_offered: AtomicBool,
}

impl Copy {
    /// Key under which the memory is found.
    pub(super) fn key(&self) -> &str {
        &self.key
    }

    /// Descriptor for a worker.
    pub(super) fn descriptor(&self) -> io::Result<OwnedFd> {
        self.memory.try_clone()
    }

    /// Returns true once nobody can change the memory: a worker has packed its weights.
    fn is_sealed(&self) -> bool {
        fcntl_get_seals(&self.memory).is_ok_and(|seals| seals.contains(SealFlags::WRITE))
    }
}

impl SharedWeights {
    /// Memory of a key of these weights: that of other workers, or empty memory, which may be filled from a file meanwhile.
    ///
    /// # Errors
    /// The system has no memory that can be sealed, or no descriptor left.
    pub(super) fn get(&self, key: &str) -> io::Result<Arc<Copy>> {
        self.copies.get(key, &self.sealed_key)
    }
}

impl Copies {
    /// Copies of which files are kept in `cache`; `None`: of none.
    pub fn new(cache: Option<WeightsCache>) -> Self {
        Self { held: Arc::default(), cache }
    }

    /// Files of the copies; `None`: none are kept.
    pub fn cache(&self) -> Option<&WeightsCache> {
        self.cache.as_ref()
    }

    /// Offers sealed copies without a file to the cache.
    pub(super) fn write_sealed(&self) {
        let Some(cache) = &self.cache else { return };
        let copies: Vec<Arc<Copy>> = self.lock().values().filter_map(Weak::upgrade).collect();
        for copy in copies.iter().filter(|copy| copy.is_sealed()) {
            if !copy.is_offered.load(Ordering::Relaxed) {
                copy.is_offered.store(cache.keep(copy), Ordering::Relaxed);
            }
        }
    }

    fn get(&self, key: &str, sealed_key: &KeyNow) -> io::Result<Arc<Copy>> {
        let mut held = self.lock();
        if let Some(copy) = held.get(key).and_then(Weak::upgrade) {
            return Ok(copy);
        }
        let memory = memfd_create("penstock-weights", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let copy = keep(&mut held, key, memory);
        // Before anybody else can find the memory, and start a worker that takes its lock.
        self.cache.iter().for_each(|cache| cache.restore(&copy, sealed_key));
        Ok(copy)
    }

    /// Memory of the weights of an adopted worker: sealed memory that is known under its key, or else the memory that the worker was started with.
    /// `None`: the worker was started without.
    pub(super) fn adopt(&self, lease: &Lease) -> Option<Arc<Copy>> {
        if lease.weights.is_empty() {
            return None;
        }
        let found = self.lock().get(&lease.weights).and_then(Weak::upgrade);
        if let Some(copy) = found.filter(|copy| copy.is_sealed()) {
            return Some(copy);
        }
        match memory_of(lease) {
            Ok(memory) => Some(keep(&mut self.lock(), &lease.weights, memory)),
            Err(error) => {
                warn!(pid = lease.pid, %error, "the packed weights of an adopted worker are not shared with others: its memory cannot be opened");
                None
            }
        }
    }

    /// Returns true if a worker has packed weights of the key.
    pub fn has(&self, key: &str) -> bool {
        self.lock().get(key).and_then(Weak::upgrade).is_some_and(|copy| copy.is_sealed())
    }

    /// Bytes of memory that all copies take now.
    pub fn bytes(&self) -> u64 {
        let copies: Vec<Arc<Copy>> = self.lock().values().filter_map(Weak::upgrade).collect();
        let of =
            |copy: &Arc<Copy>| fstat(&copy.memory).map_or(0, |file| file.st_blocks.unsigned_abs().saturating_mul(512));
        copies.iter().map(of).sum()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Weak<Copy>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Notes memory under its key, and forgets the keys whose memory has gone.
fn keep(held: &mut HashMap<String, Weak<Copy>>, key: &str, memory: OwnedFd) -> Arc<Copy> {
    held.retain(|_, copy| copy.strong_count() > 0);
    let copy = Arc::new(Copy { key: key.to_owned(), memory, is_offered: AtomicBool::new(false) });
    held.insert(key.to_owned(), Arc::downgrade(&copy));
    copy
}

/// Memory at the standard input of a worker's process.
fn memory_of(lease: &Lease) -> io::Result<OwnedFd> {
    let path = format!("/proc/{}/fd/0", lease.pid);
    // Standard input is no terminal and no pipe whose opening would wait: those are refused below, by their seals.
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let memory = open(path, flags, Mode::empty())?;
    // Looked up after the memory is open: it is that of the leased process, not of a later one with its pid.
    if lease::start_time(lease.pid) != Some(lease.start_time) {
        return Err(io::ErrorKind::NotFound.into());
    }
    // Only memory has seals.
    fcntl_get_seals(memory.as_fd())?;
    Ok(memory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::fcntl_add_seals;
    use std::process::{Command, Stdio};

    fn get(copies: &Copies, key: &str) -> Arc<Copy> {
        copies.get(key, &(Arc::new(|| Ok(None)) as KeyNow)).expect("memory")
    }

    fn lease(pid: u32, weights: &str) -> Lease {
        let start_time = lease::start_time(pid as i32).expect("it runs");
        Lease { pid: pid as i32, start_time, place: String::new(), weights: weights.into() }
    }

    #[test]
    fn a_copy_is_one_while_somebody_holds_it_and_gone_afterwards() {
        let copies = Copies::default();
        let first = get(&copies, "a");
        rustix::io::pwrite(&first.memory, &[1; 5000], 0).expect("written");
        assert!(Arc::ptr_eq(&first, &get(&copies, "a")));
        assert!(!Arc::ptr_eq(&first, &get(&copies, "b")));
        // In whole pages, which may be large.
        assert!(copies.bytes() >= 5000 && !copies.has("a"));
        fcntl_add_seals(&first.memory, SealFlags::WRITE).expect("sealed");
        assert!(copies.has("a") && !copies.has("b"));
        drop(first);
        assert_eq!((copies.bytes(), copies.has("a")), (0, false));
    }

    #[test]
    fn the_copy_of_an_adopted_worker_is_found_in_its_process() {
        let first = Copies::default();
        let copy = get(&first, "a");
        rustix::io::pwrite(&copy.memory, b"weights", 0).expect("written");
        fcntl_add_seals(&copy.memory, SealFlags::WRITE).expect("sealed");
        let start = |stdin: Stdio| Command::new("sleep").arg("60").stdin(stdin).spawn().expect("starts");
        let (mut with, mut without) = (start(copy.descriptor().expect("a descriptor").into()), start(Stdio::null()));
        drop((copy, first));
        let next = Copies::default();
        let adopted = next.adopt(&lease(with.id(), "a"));
        let again = next.adopt(&lease(with.id(), "a"));
        let none = [next.adopt(&lease(without.id(), "a b")), next.adopt(&lease(with.id(), ""))];
        let gone = next.adopt(&Lease { start_time: 1, ..lease(with.id(), "other") });
        for child in [&mut with, &mut without] {
            child.kill().expect("it runs");
            child.wait().expect("it ends");
        }
        let adopted = adopted.expect("its memory");
        assert!(again.is_some_and(|again| Arc::ptr_eq(&again, &adopted)));
        assert!(none.iter().all(Option::is_none) && gone.is_none());
        let mut bytes = [0; 7];
        assert_eq!(rustix::io::pread(&adopted.memory, &mut bytes, 0).expect("read"), 7);
        assert_eq!((&bytes, next.has("a")), (b"weights", true));
    }
}
