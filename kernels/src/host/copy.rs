//! Packed weights that all workers of a machine share: memory that one process fills and seals, and others map.
//!
//! ```text
//! offset 0                                                                        size of the memory
//! [weight, 64-byte aligned][weight] … [weight][table: offset, bytes, name of each][key, count, sum, mark]
//! ```
//! A load is a deterministic walk: the same checkpoint, form and program ask for the same weights in the same order, so the first
//! process writes down the order beside the values, and the next walks it, checks each step against the table, and fills nothing.
//!
//! - *Nobody can write* once the copy is sealed (`F_SEAL_WRITE`), the process that filled it included: its own mapping is replaced by one
//!   that is read-only, at the same addresses, and the kernel refuses the seal while a writable one exists anywhere.
//! - *Nobody can make it shorter* (`F_SEAL_SHRINK`), so a read never meets a page that is gone.
//! - *Nothing is mapped for reading before it is sealed*, and nothing is read but under the key of the reader's own files and program.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{FlockOperation, SealFlags, fcntl_add_seals, fcntl_get_seals, flock, fstat, ftruncate};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use super::{Backing, CHUNK, Chunk, Element, HUGE, LINE, Region};
use crate::device::KernelError;

/// Key of a copy: a digest of all that its values depend on.
pub type CopyKey = [u8; 32];

/// Last eight bytes of a copy, with the version of this layout.
const MARK: u64 = u64::from_le_bytes(*b"PSTKWC01");

/// Size of an entry of the table: offset, bytes, digest of the name.
const ENTRY: usize = 24;

/// Size of the end of a copy: key, number of entries, sum over key and table, [`MARK`].
const END: usize = 32 + 8 + 8 + 8;

/// Seals that a copy has to have.
const SEALS: SealFlags = SealFlags::SEAL.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::WRITE);

/// Reason why memory cannot be used as a copy of the weights.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// Memory that somebody could still change, or a descriptor of something else.
    #[error("the memory is not sealed")]
    NotSealed,
    /// Copy of another checkpoint, form or program.
    #[error("the copy is one of other files, another form or another program")]
    OtherKey,
    /// Table that does not fit the memory, or is not one of this version.
    #[error("the table of the copy is not valid")]
    Table,
    /// Load that went another way than the one that made the copy.
    #[error("the copy has other weights: {0}")]
    Differs(String),
    /// The operating system refused an operation.
    #[error("{what}")]
    Os {
        /// Operation that was tried, in words.
        what: &'static str,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
}

fn os(what: &'static str) -> impl Fn(rustix::io::Errno) -> CopyError {
    move |error| CopyError::Os { what, source: error.into() }
}

/// Returns true if `memory` is sealed as a copy of the weights has to be; false for any other descriptor.
pub fn is_sealed(memory: impl AsFd) -> bool {
    fcntl_get_seals(memory).is_ok_and(|seals| seals.contains(SEALS))
}

/// Key under which a copy was sealed. Cost: one read of the copy's last bytes.
///
/// # Errors
/// [`CopyError`]: the memory is not sealed, or no copy of this version.
pub fn key_of(memory: &OwnedFd) -> Result<CopyKey, CopyError> {
    if !is_sealed(memory) {
        return Err(CopyError::NotSealed);
    }
    let size = fstat(memory).map_err(os("looking at the copy of the weights"))?.st_size;
    let at = u64::try_from(size).ok().and_then(|size| size.checked_sub(END as u64)).ok_or(CopyError::Table)?;
    let mut end = [0; END];
    let read = rustix::io::pread(memory, &mut end, at).map_err(os("reading the copy of the weights"))?;
    let (key, numbers) = end.split_first_chunk::<32>().ok_or(CopyError::Table)?;
    if read == END && words(numbers).last() == Some(&MARK) { Ok(*key) } else { Err(CopyError::Table) }
}

/// Fills empty memory with the bytes of a copy that was kept elsewhere, and seals it. `size`: bytes of the copy; `read`: called for each piece of
/// `piece` bytes (the last one may have fewer) with its number, from `threads` threads at once, and fills it, zeroed, or says why it cannot.
/// The caller makes sure that no other process fills or maps the memory meanwhile.
///
/// # Errors
/// [`CopyError`]: a piece could not be read, or the bytes are no copy under `key`; the memory is empty again.
pub fn restore(
    memory: &OwnedFd,
    key: &CopyKey,
    (size, piece): (usize, usize),
    threads: usize,
    read: &(dyn Fn(usize, &mut [u8]) -> io::Result<()> + Sync),
) -> Result<(), CopyError> {
    let restored = fill_from(memory, key, (size, piece), threads, read);
    let sealed = restored.and_then(|()| fcntl_add_seals(memory, SEALS).map_err(os("sealing weights")));
    if sealed.is_err() {
        // Err: it is not empty, and whoever fills it next empties it.
        let _ = ftruncate(memory, 0);
    }
    sealed
}

fn fill_from(
    memory: &OwnedFd,
    key: &CopyKey,
    (size, piece): (usize, usize),
    threads: usize,
    read: &(dyn Fn(usize, &mut [u8]) -> io::Result<()> + Sync),
) -> Result<(), CopyError> {
    if size < END || piece == 0 {
        return Err(CopyError::Table);
    }
    let seals = fcntl_get_seals(memory).map_err(os("looking at memory for weights"))?;
    if seals.contains(SealFlags::SEAL) {
        return Err(CopyError::Os { what: "filling sealed memory", source: io::ErrorKind::PermissionDenied.into() });
    }
    // What it held is gone: the pieces are zeroed.
    ftruncate(memory, 0).map_err(os("emptying memory for weights"))?;
    ftruncate(memory, size as u64).map_err(os("growing memory for weights"))?;
    // Through a mapping, which may have huge pages where a write has none.
    let chunk = Chunk::reserved(size).map_err(os("reserving addresses for weights"))?;
    chunk.map(memory, 0, true).map_err(os("mapping memory for weights"))?;
    // SAFETY: the chunk maps the memory's `size` bytes for writing as long as it lives, which is longer than the slice; it was made above, so
    // nobody else has its addresses, and nobody else maps the memory, which the caller promises.
    let bytes = unsafe { std::slice::from_raw_parts_mut(chunk.base, size) };
    let pieces = Mutex::new(bytes.chunks_mut(piece).enumerate());
    let failed = Mutex::new(None);
    let work = || {
        loop {
            let next = pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((number, piece)) = next else { return };
            if let Err(error) = read(number, piece) {
                failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
            if failed.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
                return;
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // Err: no thread can be started, and this one does the work.
            let _ = std::thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    if let Some(source) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(CopyError::Os { what: "reading weights", source });
    }
    table_of(bytes, key).map(drop)
}

/// Handle on the shared memory of a device's packed weights, while they are loaded. Clones are the same memory.
#[derive(Clone, Debug)]
pub struct WeightCopy {
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
enum State {
    Filling(Filling),
    Reading(Reading),
    /// Loaded: what comes later is the process's own.
    Over,
}

/// Weight of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    offset: u64,
    bytes: u64,
    /// Digest of the name of the tensor.
    name: u64,
}

#[derive(Debug)]
struct Filling {
    memory: OwnedFd,
    /// Chunks mapped so far, and the offset of each in the memory.
    chunks: Vec<(Arc<Chunk>, u64)>,
    /// Bytes used of the last chunk.
    used: usize,
    table: Vec<Entry>,
}

#[derive(Debug)]
struct Reading {
    chunk: Arc<Chunk>,
    table: Vec<Entry>,
    /// Number of entries that were asked for.
    taken: usize,
    /// Difference between table and load, once there is one.
    differs: Option<String>,
}

/// How the shared memory of a device's weights came to be filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyUse {
    /// Weights that this process has packed and sealed.
    Packed {
        /// Bytes of the weights.
        bytes: u64,
    },
    /// Weights that another process had packed and sealed.
    Shared {
        /// Bytes of the weights.
        bytes: u64,
    },
}

impl CopyUse {
    /// Bytes of the weights.
    pub fn bytes(self) -> u64 {
        let (Self::Packed { bytes } | Self::Shared { bytes }) = self;
        bytes
    }
}

impl WeightCopy {
    /// Memory to be filled by this process and sealed by [`WeightCopy::finish`]; what it held is discarded. The caller makes sure that no
    /// other process fills or maps it meanwhile. (A lock on the descriptor ends when the copy is finished.)
    ///
    /// # Errors
    /// [`CopyError::Os`]: the memory is sealed already, or no memory that can be sealed.
    pub fn fill(memory: OwnedFd) -> Result<Self, CopyError> {
        // Only memory can be sealed: a file fails here, before it is emptied.
        let seals = fcntl_get_seals(&memory).map_err(os("looking at memory for weights"))?;
        if seals.contains(SealFlags::SEAL) {
            return Err(CopyError::Os {
                what: "filling sealed memory",
                source: io::ErrorKind::PermissionDenied.into(),
            });
        }
        ftruncate(&memory, 0).map_err(os("emptying memory for weights"))?;
        let filling = Filling { memory, chunks: Vec::new(), used: 0, table: Vec::new() };
        Ok(Self { state: Arc::new(Mutex::new(State::Filling(filling))) })
    }

    /// Maps a copy that another process has sealed. `key`: of this process's checkpoint, form and program.
    ///
    /// # Errors
    /// [`CopyError`]: the memory is not a whole copy under that key.
    pub fn open(memory: &OwnedFd, key: &CopyKey) -> Result<Self, CopyError> {
        if !is_sealed(memory) {
            return Err(CopyError::NotSealed);
        }
        let size = fstat(memory).map_err(os("looking at the copy of the weights"))?.st_size;
        let size = usize::try_from(size).map_err(|_| CopyError::Table)?;
        if size < END {
            return Err(CopyError::Table);
        }
        let chunk = Chunk::reserved(size).map_err(os("reserving addresses for weights"))?;
        chunk.map(memory, 0, false).map_err(os("mapping the copy of the weights"))?;
        // SAFETY: the chunk maps the memory's `size` bytes for reading as long as it lives, which is longer than the slice; the seals, checked
        // above, let nobody write or shorten them.
        let bytes = unsafe { std::slice::from_raw_parts(chunk.base.cast_const(), size) };
        let table = table_of(bytes, key)?;
        let reading = Reading { chunk: Arc::new(chunk), table, taken: 0, differs: None };
        Ok(Self { state: Arc::new(Mutex::new(State::Reading(reading))) })
    }

    /// Returns true if another process has filled the memory, so that this one takes none for its weights.
    pub fn is_read(&self) -> bool {
        matches!(*self.lock(), State::Reading(_))
    }

    /// Difference between the copy and the load, if there was one: the load has failed, and may be tried without the copy.
    pub fn differs(&self) -> Option<CopyError> {
        match &*self.lock() {
            State::Reading(Reading { differs, .. }) => differs.clone().map(CopyError::Differs),
            State::Filling(_) | State::Over => None,
        }
    }

    /// Ends the load: seals what was filled under `key`, or checks that a copy was read whole. `None`: it was ended before.
    ///
    /// # Errors
    /// [`CopyError`]: the weights of this load must not be used; it may be tried without the copy.
    pub fn finish(&self, key: &CopyKey) -> Result<Option<CopyUse>, CopyError> {
        let mut state = self.lock();
        let used = match &mut *state {
            State::Filling(filling) => CopyUse::Packed { bytes: filling.seal(key)? },
            State::Reading(reading) => {
                if let Some(differs) = &reading.differs {
                    return Err(CopyError::Differs(differs.clone()));
                }
                if reading.taken < reading.table.len() {
                    let (taken, all) = (reading.taken, reading.table.len());
                    return Err(CopyError::Differs(format!("{taken} of its {all} were asked for")));
                }
                CopyUse::Shared { bytes: reading.table.iter().map(|entry| entry.bytes).sum() }
            }
            State::Over => return Ok(None),
        };
        *state = State::Over;
        Ok(Some(used))
    }

    /// Memory for `count` values of the weight `name`, which `fill` gets, zeroed, where nobody has filled it before; `None`: the load is over.
    pub(super) fn hold<T: Element>(
        &self,
        (count, bytes): (usize, usize),
        name: u64,
        what: &'static str,
        fill: &mut dyn FnMut(&mut [T]),
    ) -> Result<Option<Frozen<T>>, KernelError> {
        let mut state = self.lock();
        let region = match &mut *state {
            State::Filling(filling) => {
                let (chunk, start) = filling.take(bytes, name, what)?;
                let mut region = Region::new(chunk, start.cast::<T>(), count);
                // Under the lock: `finish` waits for it.
                fill(&mut region);
                region
            }
            State::Reading(reading) => {
                let start = reading.take(bytes, name, what)?.cast::<T>();
                Region::new(Arc::clone(&reading.chunk), start, count)
            }
            State::Over => return Ok(None),
        };
        Ok(Some(Frozen(region)))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Filling {
    /// Takes `bytes` (whole lines) of the memory, and writes them down.
    fn take(&mut self, bytes: usize, name: u64, what: &'static str) -> Result<(Arc<Chunk>, *mut u8), KernelError> {
        let fits = self.chunks.last().is_some_and(|(chunk, _)| chunk.bytes - self.used >= bytes);
        if !fits {
            self.grow(bytes).map_err(|_| KernelError::Memory { what, bytes })?;
        }
        let (chunk, begin) = self.chunks.last().expect("there is one: it fits, or was added");
        let start = chunk.base.wrapping_add(self.used);
        self.table.push(Entry { offset: begin + self.used as u64, bytes: bytes as u64, name });
        self.used += bytes;
        Ok((Arc::clone(chunk), start))
    }

    /// Adds a chunk for at least `bytes`, behind the others. Memory is taken by what is written only.
    fn grow(&mut self, bytes: usize) -> rustix::io::Result<()> {
        let size = bytes.checked_next_multiple_of(HUGE).ok_or(rustix::io::Errno::NOMEM)?.max(CHUNK);
        let begin = self.chunks.last().map_or(0, |(chunk, begin)| begin + chunk.bytes as u64);
        let end = begin.checked_add(size as u64).ok_or(rustix::io::Errno::NOMEM)?;
        let chunk = Chunk::reserved(size)?;
        ftruncate(&self.memory, end)?;
        chunk.map(&self.memory, begin, true)?;
        self.chunks.push((Arc::new(chunk), begin));
        self.used = 0;
        Ok(())
    }

    /// Writes the table, makes the mappings read-only, and seals the memory; returns the bytes of the weights.
    fn seal(&mut self, key: &CopyKey) -> Result<u64, CopyError> {
        let end = self.chunks.last().map_or(0, |(_, begin)| begin + self.used as u64);
        let table = bytes_of(&self.table, key);
        let whole = end + table.len() as u64;
        ftruncate(&self.memory, whole).map_err(os("cutting the copy of the weights"))?;
        let (mut rest, mut at) = (&table[..], end);
        while !rest.is_empty() {
            let written = rustix::io::pwrite(&self.memory, rest, at).map_err(os("writing the table of weights"))?;
            (rest, at) = (&rest[written..], at + written as u64);
        }
        for (chunk, begin) in &self.chunks {
            chunk.map(&self.memory, *begin, false).map_err(os("mapping weights read-only"))?;
        }
        fcntl_add_seals(&self.memory, SEALS).map_err(os("sealing weights"))?;
        // The mappings keep the description, and with it the caller's lock. Err: there was none.
        let _ = flock(&self.memory, FlockOperation::Unlock);
        Ok(self.table.iter().map(|entry| entry.bytes).sum())
    }
}

impl Reading {
    /// Takes the next weight of the table, which must have these bytes and this name.
    fn take(&mut self, bytes: usize, name: u64, what: &'static str) -> Result<*mut u8, KernelError> {
        let found = self.table.get(self.taken).filter(|entry| entry.bytes == bytes as u64 && entry.name == name);
        let Some(entry) = found.filter(|_| self.differs.is_none()) else {
            let why = format!("weight {} is another", self.taken);
            self.differs.get_or_insert_with(|| why.clone());
            return Err(KernelError::Unavailable { what: what.to_owned(), why });
        };
        self.taken += 1;
        Ok(self.chunk.base.wrapping_add(entry.offset as usize))
    }
}

/// Table and end of a copy, as bytes.
fn bytes_of(table: &[Entry], key: &CopyKey) -> Vec<u8> {
    let mut out: Vec<u8> = table
        .iter()
        .flat_map(|entry| [entry.offset, entry.bytes, entry.name])
        .flat_map(u64::to_le_bytes)
        .chain(*key)
        .collect();
    let sum = digest(&out);
    out.extend([table.len() as u64, sum, MARK].into_iter().flat_map(u64::to_le_bytes));
    out
}

/// Table of the copy that `bytes` are, each entry of it within the weights.
fn table_of(bytes: &[u8], key: &CopyKey) -> Result<Vec<Entry>, CopyError> {
    let (rest, end) = bytes.split_last_chunk::<END>().ok_or(CopyError::Table)?;
    let (found, numbers) = end.split_first_chunk::<32>().ok_or(CopyError::Table)?;
    let [count, sum, mark] = words(numbers)[..] else { return Err(CopyError::Table) };
    if mark != MARK {
        return Err(CopyError::Table);
    }
    if found != key {
        return Err(CopyError::OtherKey);
    }
    let size = usize::try_from(count).ok().and_then(|count| count.checked_mul(ENTRY));
    let begin = size.and_then(|size| rest.len().checked_sub(size)).ok_or(CopyError::Table)?;
    if digest(&bytes[begin..rest.len() + 32]) != sum {
        return Err(CopyError::Table);
    }
    let entry = |words: &[u64]| Entry { offset: words[0], bytes: words[1], name: words[2] };
    let table: Vec<Entry> = words(&rest[begin..]).chunks_exact(3).map(entry).collect();
    let is_within = |entry: &Entry| {
        let end = entry.offset.checked_add(entry.bytes);
        entry.offset.is_multiple_of(LINE as u64) && end.is_some_and(|end| end <= begin as u64)
    };
    if table.iter().all(is_within) { Ok(table) } else { Err(CopyError::Table) }
}

fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

/// FNV-1a: finds a table that was cut or mixed up; seals and key are against everything else.
pub(super) fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Values of a weight, which nobody changes any more; alive as long as this value.
#[derive(Debug)]
pub struct Frozen<T>(pub(super) Region<T>);

impl<T: Element> std::ops::Deref for Frozen<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

/// Addresses reserved for a mapping, aligned to 2 MiB; unmapped when dropped, with whatever is mapped there.
#[derive(Debug)]
pub(super) struct Reserved {
    start: NonNull<u8>,
    bytes: usize,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: the range is the one that `Chunk::reserved` mapped, mapped over or not, and nobody has an address in it any more: regions
        // hold their chunk. Err: it is no mapping, which it is.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

impl Chunk {
    /// Reserves addresses for `bytes`, which can be used once something is mapped there.
    fn reserved(bytes: usize) -> rustix::io::Result<Self> {
        let padded = bytes.checked_add(HUGE).ok_or(rustix::io::Errno::NOMEM)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: no address is asked for, so nothing that is mapped already is replaced.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), padded, ProtFlags::empty(), flags) }?;
        let start = NonNull::new(start.cast::<u8>()).ok_or(rustix::io::Errno::NOMEM)?;
        let base = start.as_ptr().wrapping_add(start.as_ptr().align_offset(HUGE));
        Ok(Self { _backing: Backing::Reserved(Reserved { start, bytes: padded }), base, bytes })
    }

    /// Maps `memory` from `begin` on over the whole chunk, in place of what was there. For reading the mapping is private, which the kernel
    /// allows whether the memory is sealed or not, and shares its pages all the same, since nobody writes.
    fn map(&self, memory: impl AsFd, begin: u64, writable: bool) -> rustix::io::Result<()> {
        let (access, sharing) = match writable {
            true => (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED),
            false => (ProtFlags::READ, MapFlags::PRIVATE),
        };
        let at = self.base.cast();
        // SAFETY: the range is within the addresses that `reserved` took for this chunk alone (`base` is less than 2 MiB behind their start,
        // and 2 MiB more than `bytes` were taken). What is replaced is either the reservation, which nobody reads, or a mapping of the same
        // bytes of the same memory: a reference into it reads the same values before and after, and the system makes the change at once.
        // No `&mut` into it exists then: only a closure that fills has one, and it runs under the lock that `finish` takes.
        unsafe { mmap(at, self.bytes, access, sharing | MapFlags::FIXED, memory, begin) }?;
        // Advice: where the system gives this kind of memory no huge pages, small ones serve.
        // SAFETY: advice about the pages' size, for the range that was mapped above.
        let _ = unsafe { madvise(at, self.bytes, Advice::LinuxHugepage) };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Arena;
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};

    const KEY: CopyKey = [7; 32];

    fn memory() -> OwnedFd {
        memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memory")
    }

    /// Loads weights of these names and sizes, filled with their number from 1 on, and returns them with the number of fills.
    fn load(copy: &WeightCopy, weights: &[(&str, usize)]) -> Result<(Vec<Frozen<u16>>, usize), KernelError> {
        let (mut arena, mut fills) = (Arena::over(copy.clone()), 0);
        let mut held = Vec::new();
        for (number, (name, count)) in weights.iter().enumerate() {
            arena.about(name);
            let weight = arena.hold(*count, "a weight", |values: &mut [u16]| {
                assert!(values.iter().all(|value| *value == 0), "fresh memory is zero");
                values.fill(number as u16 + 1);
                fills += 1;
            })?;
            held.push(weight);
        }
        Ok((held, fills))
    }

    /// A sealed copy of `weights`, and its maker's values.
    fn packed(weights: &[(&str, usize)]) -> (OwnedFd, Vec<Frozen<u16>>) {
        let memory = memory();
        let copy = WeightCopy::fill(memory.try_clone().expect("a descriptor")).expect("empty memory");
        let (held, fills) = load(&copy, weights).expect("loads");
        assert_eq!(fills, weights.len());
        let bytes = weights.iter().map(|(_, count)| (count * 2).next_multiple_of(LINE) as u64).sum();
        assert_eq!(copy.finish(&KEY).expect("sealed"), Some(CopyUse::Packed { bytes }));
        assert_eq!(copy.finish(&KEY).expect("once"), None);
        (memory, held)
    }

    const WEIGHTS: [(&str, usize); 4] = [("a", 33), ("b", CHUNK), ("c", 1), ("d", CHUNK / 4)];

    #[test]
    fn the_second_load_fills_nothing_and_reads_the_same() {
        let (memory, first) = packed(&WEIGHTS);
        let copy = WeightCopy::open(&memory, &KEY).expect("sealed");
        assert!(copy.is_read() && copy.differs().is_none());
        let (second, fills) = load(&copy, &WEIGHTS).expect("loads");
        assert_eq!(fills, 0);
        assert!(matches!(copy.finish(&KEY).expect("whole"), Some(CopyUse::Shared { .. })));
        drop(copy);
        for (number, (first, second)) in first.iter().zip(&second).enumerate() {
            assert_eq!(first[..], second[..]);
            assert!(second.iter().all(|value| usize::from(*value) == number + 1));
            assert_eq!(second.as_ptr() as usize % LINE, 0);
        }
        drop(first);
        assert_eq!(second[3][CHUNK / 4 - 1], 4, "the reader's mapping is its own");
    }

    #[test]
    fn nobody_can_change_a_sealed_copy() {
        let (memory, _held) = packed(&WEIGHTS);
        // SAFETY: no address is asked for.
        let mapped = unsafe { mmap(ptr::null_mut(), 64, ProtFlags::WRITE, MapFlags::SHARED, &memory, 0) };
        assert!(mapped.is_err(), "a mapping that can write");
        assert!(rustix::io::pwrite(&memory, b"x", 0).is_err());
        assert!(ftruncate(&memory, 1).is_err() && ftruncate(&memory, 1 << 40).is_err());
        assert!(matches!(WeightCopy::fill(memory), Err(CopyError::Os { .. })), "it is filled once");
    }

    #[test]
    fn a_load_that_differs_is_refused() {
        let (memory, _held) = packed(&WEIGHTS);
        let [a, b, c, d] = WEIGHTS;
        let check = |weights: &[(&str, usize)], fails: bool| {
            let copy = WeightCopy::open(&memory, &KEY).expect("sealed");
            assert_eq!(load(&copy, weights).is_err(), fails, "{weights:?}");
            assert_eq!(copy.differs().is_some(), fails, "{weights:?}");
            assert!(matches!(copy.finish(&KEY), Err(CopyError::Differs(_))), "{weights:?}");
        };
        check(&[a, b, c], false);
        check(&[a, b, c, d, a], true);
        check(&[b, a, c, d], true);
        check(&[a, ("x", b.1), c, d], true);
        check(&[a, b, ("c", 33), d], true);
    }

    #[test]
    fn memory_that_is_no_copy_is_refused() {
        let open = |memory: &OwnedFd| WeightCopy::open(memory, &KEY).expect_err("refused");
        assert!(matches!(open(&memory()), CopyError::NotSealed));
        let file = std::fs::File::open(std::env::current_exe().expect("a path")).expect("a file");
        assert!(matches!(open(&file.into()), CopyError::NotSealed));
        let sealed = |bytes: &[u8]| {
            let memory = memory();
            rustix::io::pwrite(&memory, bytes, 0).expect("written");
            fcntl_add_seals(&memory, SEALS).expect("sealed");
            memory
        };
        assert!(matches!(open(&sealed(b"short")), CopyError::Table));
        assert!(matches!(open(&sealed(&[0; 4096])), CopyError::Table));
        let whole = |table: &[Entry]| [vec![0; 128], bytes_of(table, &KEY)].concat();
        let good = Entry { offset: 64, bytes: 64, name: 1 };
        assert!(WeightCopy::open(&sealed(&whole(&[good])), &KEY).is_ok());
        assert!(matches!(WeightCopy::open(&sealed(&whole(&[good])), &[8; 32]), Err(CopyError::OtherKey)));
        for bad in
            [Entry { offset: 128, ..good }, Entry { offset: 1, bytes: 1, name: 1 }, Entry { bytes: u64::MAX, ..good }]
        {
            assert!(matches!(open(&sealed(&whole(&[bad]))), CopyError::Table), "{bad:?}");
        }
        let mut cut = whole(&[good]);
        cut.remove(150);
        assert!(matches!(open(&sealed(&cut)), CopyError::Table | CopyError::OtherKey));
    }

    #[test]
    fn what_a_killed_process_left_is_discarded() {
        let memory = memory();
        let copy = WeightCopy::fill(memory.try_clone().expect("a descriptor")).expect("empty memory");
        load(&copy, &[("x", 500), ("y", 700)]).expect("loads");
        drop(copy);
        assert!(matches!(WeightCopy::open(&memory, &KEY), Err(CopyError::NotSealed)));
        let copy = WeightCopy::fill(memory).expect("not sealed");
        assert_eq!(load(&copy, &WEIGHTS).expect("loads").1, 4);
        copy.finish(&KEY).expect("sealed");
    }

    /// Bytes of memory.
    fn content(memory: &OwnedFd) -> Vec<u8> {
        let mut bytes = vec![0; fstat(memory).expect("memory").st_size as usize];
        let read = rustix::io::pread(memory, &mut bytes, 0).expect("read");
        assert_eq!(read, bytes.len());
        bytes
    }

    #[test]
    fn a_copy_that_was_kept_elsewhere_is_read_like_the_first() {
        const SMALL: [(&str, usize); 3] = [("a", 33), ("b", 70_000), ("c", 1)];
        let (first, _held) = packed(&SMALL);
        let kept = content(&first);
        assert_eq!(key_of(&first).expect("a copy"), KEY);
        let read = |number: usize, piece: &mut [u8]| {
            let begin = number * 4096;
            assert!(piece.iter().all(|byte| *byte == 0), "zeroed");
            piece.copy_from_slice(&kept[begin..begin + piece.len()]);
            Ok(())
        };
        let again = memory();
        rustix::io::pwrite(&again, &[7; 100], 0).expect("what a killed process left");
        restore(&again, &KEY, (kept.len(), 4096), 3, &read).expect("restored");
        assert!(is_sealed(&again) && content(&again) == kept);
        let copy = WeightCopy::open(&again, &KEY).expect("sealed");
        assert_eq!(load(&copy, &SMALL).expect("loads").1, 0);
        assert!(matches!(copy.finish(&KEY).expect("whole"), Some(CopyUse::Shared { .. })));
        assert!(matches!(restore(&again, &KEY, (kept.len(), 4096), 1, &read), Err(CopyError::Os { .. })), "sealed");
        let other = memory();
        assert!(matches!(restore(&other, &[8; 32], (kept.len(), 4096), 2, &read), Err(CopyError::OtherKey)));
        let fails = |number: usize, piece: &mut [u8]| match number {
            9 => Err(io::ErrorKind::InvalidData.into()),
            _ => read(number, piece),
        };
        assert!(matches!(restore(&other, &KEY, (kept.len(), 4096), 2, &fails), Err(CopyError::Os { .. })));
        assert!(matches!(restore(&other, &KEY, (END - 1, 4096), 1, &read), Err(CopyError::Table)));
        assert!(content(&other).is_empty() && !is_sealed(&other));
        assert!(matches!(key_of(&other), Err(CopyError::NotSealed)));
        WeightCopy::fill(other).expect("it can be packed into");
    }

    #[test]
    fn weights_that_come_after_the_load_are_the_processs_own() {
        let copy = WeightCopy::fill(memory()).expect("empty memory");
        let (_held, _) = load(&copy, &WEIGHTS).expect("loads");
        copy.finish(&KEY).expect("sealed");
        assert_eq!(load(&copy, &[("e", 5)]).expect("loads").1, 1);
    }
}
