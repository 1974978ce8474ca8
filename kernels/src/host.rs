//! Host memory: files mapped read-only, and huge-page memory for weights, activations and KV.
//!
//! A checkpoint is mapped, not read: packing a weight touches its pages once, and [`MappedFile::forget`] gives them back, so a
//! load needs little more memory than the packed weights. Packed weights may lie in memory that processes share: `copy.rs`.

mod copy;

pub use copy::{CopyError, CopyKey, CopyUse, Frozen, WeightCopy, is_sealed, key_of, restore};

use std::fs::File;
use std::marker::PhantomData;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use memmap2::{Advice, Mmap, MmapMut, MmapOptions, UncheckedAdvice};

use crate::device::KernelError;

/// A file mapped read-only.
///
/// The file must not be truncated or changed while it is mapped: the kernel would deliver SIGBUS or other values. A checkpoint
/// is replaced by renaming another file over it, which leaves this mapping as it is.
#[derive(Debug)]
pub struct MappedFile {
    map: Mmap,
    stamp: FileStamp,
}

/// State of a file by which a change of it is noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileStamp {
    /// Device and inode.
    pub place: [u64; 2],
    /// Size in bytes.
    pub size: u64,
    /// Time of the last change, in seconds and nanoseconds.
    pub changed: [i64; 2],
}

impl FileStamp {
    /// Stamp of a file of this metadata.
    pub fn of(file: &std::fs::Metadata) -> Self {
        Self { place: [file.dev(), file.ino()], size: file.len(), changed: [file.mtime(), file.mtime_nsec()] }
    }
}

impl MappedFile {
    /// Maps the file at `path` whole. Errors: [`KernelError::Os`] if it cannot be opened or mapped (an empty file cannot).
    pub fn open(path: &Path) -> Result<Self, KernelError> {
        let os = |source| KernelError::Os { what: format!("cannot map {}", path.display()), source };
        let file = File::open(path).map_err(os)?;
        let stamp = FileStamp::of(&file.metadata().map_err(os)?);
        // SAFETY: a shared read-only mapping of a file that nobody truncates or writes while it lives; that is the operator's
        // side of the contract, stated in the type's documentation, and no mapping interface can enforce it.
        let map = unsafe { MmapOptions::new().map(&file) }.map_err(os)?;
        Ok(Self { map, stamp })
    }

    /// Bytes of the whole file, read from disk when first touched.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Stamp of the file when it was mapped.
    pub fn stamp(&self) -> FileStamp {
        self.stamp
    }

    /// Size of the file in bytes.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Returns true if the file has no bytes; such a file is refused by [`MappedFile::open`] on Linux.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Tells the system that `range` is not needed soon: its pages leave this process's memory and are read again from the
    /// file if touched. A range that is empty or outside of the file does nothing; a failure is ignored, since it is advice.
    pub fn forget(&self, range: Range<usize>) {
        // Partial pages at the ends may belong to a neighbouring tensor; dropping them costs a minor fault, no data.
        if range.start < range.end && range.end <= self.map.len() {
            // SAFETY: the mapping is file-backed and never written, so a dropped page reads the same bytes again;
            // the range lies inside of it (checked above).
            let _ = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len()) };
        }
    }
}

/// Values that may live in a [`Region`]: any bit pattern is valid, and zero means zero.
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for i8 {}
    impl Sealed for u8 {}
    impl Sealed for u16 {}
    impl Sealed for u32 {}
    impl Sealed for f32 {}
}

impl Element for i8 {}
impl Element for u8 {}
impl Element for u16 {}
impl Element for u32 {}
impl Element for f32 {}

/// Size of huge pages on x86-64, and on arm64 with 4 KiB base pages.
const HUGE: usize = 2 << 20;
/// Size of a chunk that small weights share; only touched pages of it cost memory.
const CHUNK: usize = 64 << 20;
/// Cache line, which is also one AVX-512 register and one row of an AMX tile.
const LINE: usize = 64;

/// Gives out zeroed, 64-byte aligned memory from chunks aligned to 2 MiB for which huge pages were asked.
#[derive(Debug, Default)]
pub struct Arena {
    current: Option<(Arc<Chunk>, usize)>,
    /// Shared memory of weights, and the digest of the name of the weight that is loaded; `None`: weights are the process's own, too.
    shared: Option<(WeightCopy, u64)>,
}

/// Mapping of a chunk.
#[derive(Debug)]
enum Backing {
    Anonymous {
        /// Kept for its `Drop`.
        _map: MmapMut,
    },
    Reserved(#[expect(dead_code, reason = "held for its Drop")] copy::Reserved),
}

#[derive(Debug)]
struct Chunk {
    /// Mapping, kept for its `Drop`; reached only through `base`.
    _backing: Backing,
    base: *mut u8,
    bytes: usize,
}

// SAFETY: the chunk owns its memory, and hands out disjoint regions only; `base` is never used but to make their addresses.
unsafe impl Send for Chunk {}
// SAFETY: as above; a shared chunk has no operation that reads or writes its memory.
unsafe impl Sync for Chunk {}

impl Chunk {
    fn new(bytes: usize, what: &'static str) -> Result<Self, KernelError> {
        let memory = KernelError::Memory { what, bytes };
        let Some(padded) = bytes.checked_add(HUGE) else { return Err(memory) };
        let mut map = MmapMut::map_anon(padded).map_err(|_| memory)?;
        // Advice: without huge pages everything works, at the price of TLB misses.
        let _ = map.advise(Advice::HugePage);
        let skip = map.as_ptr().align_offset(HUGE);
        let base = map[skip..].as_mut_ptr();
        Ok(Self { _backing: Backing::Anonymous { _map: map }, base, bytes })
    }
}

impl Arena {
    /// Creates an arena whose weights lie in memory that processes share; everything else is the process's own.
    pub fn over(copy: WeightCopy) -> Self {
        Self { current: None, shared: Some((copy, 0)) }
    }

    /// Names the weight that [`Arena::hold`] is asked for next, so that two loads that differ are told apart.
    pub fn about(&mut self, name: &str) {
        if let Some((_, digest)) = &mut self.shared {
            *digest = copy::digest(name.as_bytes());
        }
    }

    /// Makes `count` values of a weight, aligned to a cache line: `fill` gets them zeroed, unless another process has filled them in shared
    /// memory. `what` names the use in the error.
    ///
    /// Errors: [`KernelError::Memory`]; [`KernelError::Unavailable`] if the shared memory has another weight here.
    pub fn hold<T: Element>(
        &mut self,
        count: usize,
        what: &'static str,
        mut fill: impl FnMut(&mut [T]),
    ) -> Result<Frozen<T>, KernelError> {
        let bytes = padded::<T>(count, what)?;
        if let Some((copy, name)) = &self.shared
            && let Some(frozen) = copy.hold((count, bytes), *name, what, &mut fill)?
        {
            return Ok(frozen);
        }
        let mut region = self.alloc(count, what)?;
        fill(&mut region);
        Ok(Frozen(region))
    }

    /// Allocates `count` zeroed values, aligned to a cache line. `what` names the use in the error.
    pub fn alloc<T: Element>(&mut self, count: usize, what: &'static str) -> Result<Region<T>, KernelError> {
        let bytes = padded::<T>(count, what)?;
        let (chunk, used) = match self.current.take() {
            Some((chunk, used)) if chunk.bytes - used >= bytes => (chunk, used),
            _ => (Arc::new(Chunk::new(bytes.next_multiple_of(HUGE).max(CHUNK), what)?), 0),
        };
        let start = chunk.base.wrapping_add(used).cast::<T>();
        self.current = Some((Arc::clone(&chunk), used + bytes));
        Ok(Region::new(chunk, start, count))
    }
}

/// Bytes of `count` values, in whole lines.
fn padded<T>(count: usize, what: &'static str) -> Result<usize, KernelError> {
    let bytes = count.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_next_multiple_of(LINE));
    bytes.ok_or(KernelError::Memory { what, bytes: usize::MAX })
}

/// Memory owned exclusively, from an [`Arena`]; alive as long as this value.
#[derive(Debug)]
pub struct Region<T> {
    /// Chunk that the region lies in; its mapping lives as long as the region.
    #[expect(dead_code, reason = "held for its Drop")]
    chunk: Arc<Chunk>,
    start: *mut T,
    count: usize,
    values: PhantomData<T>,
}

impl<T> Region<T> {
    /// `count` values from `start` on: inside of the chunk, aligned to a line, initialised, and in no other region that is written.
    fn new(chunk: Arc<Chunk>, start: *mut T, count: usize) -> Self {
        Self { chunk, start, count, values: PhantomData }
    }
}

// SAFETY: a region owns its values as a Vec does; `Element` types are Send and Sync.
unsafe impl<T: Element> Send for Region<T> {}
// SAFETY: shared access is through `Deref` to a slice only.
unsafe impl<T: Element> Sync for Region<T> {}

impl<T: Element> std::ops::Deref for Region<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `start` is valid for `count` values inside of the chunk (checked by `Arena::alloc`), aligned to a line, zeroed
        // by the system and so initialised, and no other region overlaps; the chunk lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start, self.count) }
    }
}

impl<T: Element> std::ops::DerefMut for Region<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `self` is borrowed uniquely.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.count) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_aligned_zeroed_and_apart() {
        let mut arena = Arena::default();
        let mut a = arena.alloc::<u16>(33, "a").unwrap();
        let mut b = arena.alloc::<f32>(5, "b").unwrap();
        a.fill(7);
        b.fill(1.5);
        assert!(a.iter().all(|&v| v == 7) && b.iter().all(|&v| v == 1.5));
        assert_eq!((a.as_ptr() as usize % LINE, b.as_ptr() as usize % LINE), (0, 0));
        let big = arena.alloc::<u16>(CHUNK, "big").unwrap();
        assert_eq!((big.as_ptr() as usize % HUGE, big[CHUNK - 1]), (0, 0));
        drop(arena);
        assert_eq!(a[32], 7);
    }

    #[test]
    fn absurd_sizes_are_refused() {
        let mut arena = Arena::default();
        assert!(matches!(arena.alloc::<f32>(usize::MAX, "x"), Err(KernelError::Memory { .. })));
        assert!(matches!(arena.alloc::<u16>(usize::MAX / 2, "x"), Err(KernelError::Memory { .. })));
    }

    #[test]
    fn a_forgotten_range_reads_the_same() {
        let path = std::env::temp_dir().join(format!("penstock-map-{}", std::process::id()));
        let content: Vec<u8> = (0..20_000u32).map(|i| i as u8).collect();
        std::fs::write(&path, &content).unwrap();
        let file = MappedFile::open(&path).unwrap();
        file.forget(100..12_345);
        file.forget(0..1 << 40);
        assert_eq!((file.bytes(), file.len(), file.is_empty()), (&content[..], 20_000, false));
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(MappedFile::open(&path), Err(KernelError::Os { .. })));
    }
}
