//! Block slots in files.
//!
//! ```text
//! PATH/IDENTITY/N/segment-0000.kv   one page: magic, geometry │ headers of all slots │ slot 0 │ slot 1 │ …
//!                 segment-0001.kv   …                              (slots begin at multiples of 4 KiB)
//! ```
//! A segment has about 256 MiB, and all of its headers lie together, so the index of a tier of 100 GB is read back in
//! a few hundred reads. Writing a block clears its header, writes the bytes, then the header: after a crash at any
//! point, or a loss of power that reorders writes, header and bytes agree or the checksum tells. Nothing is synced: it
//! is a cache. Reads and writes go through the page cache, so a tier that fits into free memory is as fast as memory.
//!
//! Keys and values reveal the prompt to an owner of the model, so only the owner can access folders and files, and a
//! link in a file's place is not followed.
//!
//! Each worker locks a folder `N` of its own: two workers never write one file, and a restarted worker finds the
//! folder it had.

use super::block::{HEADER_BYTES, Identity, Unusable};
use penstock_kv::SlotId;
use penstock_kv::tier::Link;
use penstock_proto::BlockHash;
use rustix::fs::OFlags;
use std::collections::HashMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use tracing::{info, warn};

/// Size of a segment without its headers, in bytes.
const SEGMENT_BYTES: usize = 256 << 20;

/// Alignment of slots in a segment, in bytes.
const PAGE: usize = 4096;

/// Most slots of a tier: their plan takes 36 MB of memory, and a report of them to a gateway 7 to 16 MB.
const SLOTS_MAX: usize = 400_000;

/// Most workers whose disk tiers lie under one path.
const SHARERS_MAX: usize = 64;

/// Most times that other processes may remove a folder while it is being locked.
const REMOVALS_MAX: usize = 16;

/// Most segment files open at once.
const OPEN_MAX: usize = 64;

/// First bytes of a segment.
const MAGIC: [u8; 8] = *b"PSKVSG01";

/// Reason why a block could not be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadError {
    /// The block is absent from its slot, or its bytes are damaged.
    #[error(transparent)]
    Unusable(#[from] Unusable),
    /// The disk failed to read the block's bytes.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A block found on disk at the start, with its slot.
pub(crate) type Found = (SlotId, Link);

/// The files of one worker's disk tier.
pub(crate) struct DiskSet {
    folder: PathBuf,
    identity: Identity,
    slots: usize,
    slots_per_segment: usize,
    stride: usize,
    /// Number of segment files that exist, from segment 0 on.
    segments: usize,
    open: HashMap<usize, File>,
    serial: u64,
    /// Lock of the folder, held as long as the tier is used.
    _lock: File,
}

impl DiskSet {
    /// Opens the first free folder below `path`, with room for `bytes_max`, and scans it: blocks come least recently
    /// stored first.
    ///
    /// # Errors
    /// An error of the file system, or no room for one block.
    pub(crate) fn open(path: &Path, bytes_max: u64, identity: &Identity) -> io::Result<(Self, Vec<Found>)> {
        make_folder(path)?;
        forget_others(path, &identity.name());
        let (folder, lock) = lock(&path.join(identity.name()))?;
        let stride = identity.block_bytes().next_multiple_of(PAGE);
        let slots_per_segment = (SEGMENT_BYTES / stride).max(1);
        // Headers are less than a thousandth of their blocks, except for tiny blocks.
        let affordable = usize::try_from(bytes_max / (stride + HEADER_BYTES) as u64).unwrap_or(usize::MAX);
        let slots = affordable.min(SLOTS_MAX);
        if slots == 0 {
            let message = format!("{bytes_max} bytes hold no block of {}", identity.block_bytes());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let (identity, open) = (identity.clone(), HashMap::new());
        let mut set =
            Self { folder, identity, slots, slots_per_segment, stride, segments: 0, open, serial: 0, _lock: lock };
        let found = set.scan()?;
        Ok((set, found))
    }

    /// Number of slots that fit.
    pub(crate) fn slots(&self) -> usize {
        self.slots
    }

    /// Number of slots in existing files.
    pub(crate) fn slots_made(&self) -> usize {
        (self.segments * self.slots_per_segment).min(self.slots)
    }

    fn segment_path(&self, segment: usize) -> PathBuf {
        self.folder.join(format!("segment-{segment:04}.kv"))
    }

    fn table_bytes(&self) -> usize {
        (self.slots_per_segment * HEADER_BYTES).next_multiple_of(PAGE)
    }

    /// First page of a segment: magic, stride, slots.
    fn preamble(&self) -> [u8; 24] {
        let mut preamble = [0; 24];
        preamble[..8].copy_from_slice(&MAGIC);
        preamble[8..16].copy_from_slice(&(self.stride as u64).to_le_bytes());
        preamble[16..].copy_from_slice(&(self.slots_per_segment as u64).to_le_bytes());
        preamble
    }

    /// Reads the headers of all segments; removes segments of another geometry or beyond the size.
    fn scan(&mut self) -> io::Result<Vec<Found>> {
        let mut found = Vec::new();
        let mut table = vec![0; self.table_bytes()];
        for segment in 0.. {
            let path = self.segment_path(segment);
            let file = match private().read(true).open(&path) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                Err(error) => return Err(error),
            };
            let mut preamble = [0; 24];
            let whole = file.read_exact_at(&mut preamble, 0).and_then(|()| file.read_exact_at(&mut table, PAGE as u64));
            let ours = whole.is_ok() && preamble == self.preamble() && segment == self.segments;
            if !ours || segment * self.slots_per_segment >= self.slots {
                std::fs::remove_file(&path)?;
                continue;
            }
            self.segments += 1;
            for (at, header) in table.chunks_exact(HEADER_BYTES).take(self.slots_per_segment).enumerate() {
                let slot = segment * self.slots_per_segment + at;
                if let Some(header) = self.identity.parse(header).filter(|_| slot < self.slots) {
                    found.push((header.serial, (SlotId(slot as u32), header.link)));
                }
            }
        }
        found.sort_unstable_by_key(|(serial, _)| *serial);
        self.serial = found.last().map_or(0, |(serial, _)| *serial);
        Ok(found.into_iter().map(|(_, found)| found).collect())
    }

    /// File of a slot, with the offsets of its header and its bytes.
    fn place(&mut self, slot: SlotId) -> io::Result<(&File, u64, u64)> {
        let (segment, at) = (slot.index() / self.slots_per_segment, slot.index() % self.slots_per_segment);
        while self.segments <= segment {
            self.make_segment()?;
        }
        if self.open.len() >= OPEN_MAX && !self.open.contains_key(&segment) {
            self.open.clear();
        }
        let header = PAGE + at * HEADER_BYTES;
        let bytes = PAGE + self.table_bytes() + at * self.stride;
        let path = self.segment_path(segment);
        let file = match self.open.entry(segment) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => entry.insert(private().read(true).open(path)?),
        };
        Ok((file, header as u64, bytes as u64))
    }

    /// Makes the next segment, with its space reserved: a full disk shows here and not in the middle of a block.
    fn make_segment(&mut self) -> io::Result<()> {
        let path = self.segment_path(self.segments);
        let slots = self.slots_per_segment.min(self.slots - self.segments * self.slots_per_segment);
        let bytes = (PAGE + self.table_bytes() + slots * self.stride) as u64;
        let file = private().read(true).create(true).truncate(true).open(&path)?;
        let made = reserve(&file, bytes).and_then(|()| file.write_all_at(&self.preamble(), 0));
        if let Err(error) = made {
            // A failed segment returns its space.
            drop(std::fs::remove_file(&path));
            return Err(error);
        }
        self.segments += 1;
        Ok(())
    }

    /// Checks that a file can be written, reaches the disk, and can be read back.
    ///
    /// # Errors
    /// An error of the file system.
    pub(crate) fn probe(&self) -> io::Result<()> {
        let path = self.folder.join("probe");
        let file = private().read(true).create(true).truncate(true).open(&path)?;
        let mut read = [0; MAGIC.len()];
        let done = file
            .write_all_at(&MAGIC, 0)
            .and_then(|()| file.sync_data())
            .and_then(|()| file.read_exact_at(&mut read, 0));
        drop(std::fs::remove_file(&path));
        done?;
        if read == MAGIC { Ok(()) } else { Err(io::Error::other("the bytes read differ from the bytes written")) }
    }

    /// Writes a block.
    ///
    /// # Errors
    /// An error of the disk; the slot then holds no block.
    pub(crate) fn write(&mut self, slot: SlotId, link: Link, bytes: &[u8]) -> io::Result<()> {
        self.serial += 1;
        let header = self.identity.seal(link, self.serial, bytes);
        let (file, header_at, bytes_at) = self.place(slot)?;
        file.write_all_at(&[0; HEADER_BYTES], header_at)?;
        file.write_all_at(bytes, bytes_at)?;
        file.write_all_at(&header, header_at)
    }

    /// Reads the block in a slot, and checks its header and bytes against `hash`.
    ///
    /// # Errors
    /// The block is not the one that `hash` names, or the disk failed.
    pub(crate) fn read(&mut self, slot: SlotId, hash: BlockHash) -> Result<Vec<u8>, ReadError> {
        let mut header = [0; HEADER_BYTES];
        let mut bytes = vec![0; self.identity.block_bytes()];
        let (file, header_at, bytes_at) = self.place(slot)?;
        file.read_exact_at(&mut header, header_at)?;
        file.read_exact_at(&mut bytes, bytes_at)?;
        self.identity.check(&header, hash, &bytes)?;
        Ok(bytes)
    }
}

/// Reserves the space of a file, or only sets its length where the file system cannot reserve.
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, bytes) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => file.set_len(bytes),
        Err(error) => Err(error.into()),
    }
}

/// Options to write a file that only its owner can access, and that does not follow links.
fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).mode(0o600).custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
    options
}

/// Makes a folder, and missing ones above it, for its owner alone.
fn make_folder(path: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Finds a folder below `path` that no other worker uses, and locks it.
fn lock(path: &Path) -> io::Result<(PathBuf, File)> {
    let mut options = private();
    options.create(true).truncate(false);
    for n in 0..SHARERS_MAX {
        let folder = path.join(n.to_string());
        let mut removals = 0..REMOVALS_MAX;
        loop {
            match make_folder(&folder).and_then(|()| own(&options, &folder)) {
                Ok(Some(lock)) => return Ok((folder, lock)),
                Ok(None) => break,
                // Another process removed the folder or the one above it, possibly between two looks: it is made anew.
                Err(error) if is_removal(&error) && removals.next().is_some() => {}
                Err(error) => return Err(error),
            }
        }
    }
    Err(io::Error::new(io::ErrorKind::AddrInUse, format!("{} workers use {}", SHARERS_MAX, path.display())))
}

/// Returns true if an error of creating a folder means that another process removes it at the same time.
fn is_removal(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists)
}

/// Takes the lock of a folder, if it is free. The lock's owner may remove the file: a file opened before that is a
/// lock on nothing.
fn own(options: &OpenOptions, folder: &Path) -> io::Result<Option<File>> {
    let path = folder.join("lock");
    let file = options.open(&path)?;
    match file.try_lock() {
        Ok(()) => {
            let (ours, there) = (file.metadata()?, std::fs::symlink_metadata(&path)?);
            let is_there = (ours.dev(), ours.ino()) == (there.dev(), there.ino());
            if is_there { Ok(Some(file)) } else { Err(io::ErrorKind::NotFound.into()) }
        }
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Removes folders that workers of another model or other numerics left, if those workers are gone: no worker would
/// ever read them.
fn forget_others(path: &Path, name: &str) {
    let Ok(entries) = std::fs::read_dir(path) else { return };
    for entry in entries.flatten() {
        let other = entry.file_name().to_string_lossy().into_owned();
        let is_identity = other.len() == 32 && other.bytes().all(|byte| byte.is_ascii_hexdigit());
        if other != name && is_identity {
            forget(&entry.path());
        }
    }
}

fn forget(identity: &Path) {
    for n in 0..SHARERS_MAX {
        let folder = identity.join(n.to_string());
        let Ok(Some(_lock)) = own(&private(), &folder) else { continue };
        for segment in 0.. {
            if std::fs::remove_file(folder.join(format!("segment-{segment:04}.kv"))).is_err() {
                break;
            }
        }
        let emptied = std::fs::remove_file(folder.join("lock")).and_then(|()| std::fs::remove_dir(&folder));
        match emptied {
            Ok(()) => info!(folder = %folder.display(), "KV blocks of another model removed from disk"),
            Err(error) => {
                warn!(folder = %folder.display(), %error, "KV blocks of another model could not be removed from disk")
            }
        }
    }
    // Not empty: another worker uses a part of it.
    drop(std::fs::remove_dir(identity));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A temporary folder, removed when dropped.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("penstock-disk-{}-{name}", std::process::id()));
            drop(std::fs::remove_dir_all(&path));
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            drop(std::fs::remove_dir_all(&self.0));
        }
    }

    const BYTES: usize = 5000;

    fn identity() -> Identity {
        Identity::new(b"model", "numerics", BYTES)
    }

    fn open(folder: &Folder) -> (DiskSet, Vec<Found>) {
        DiskSet::open(&folder.0, 100_000, &identity()).expect("opens")
    }

    fn link(n: u128) -> Link {
        Link { parent: (n > 1).then(|| BlockHash(n - 1)), hash: BlockHash(n) }
    }

    fn segment(set: &DiskSet) -> File {
        OpenOptions::new().read(true).write(true).open(set.segment_path(0)).expect("opens")
    }

    #[test]
    fn blocks_are_found_after_a_restart_in_the_order_they_came() {
        let folder = Folder::new("restart");
        let (mut set, found) = open(&folder);
        assert_eq!((found.len(), set.slots()), (0, 100_000 / (8192 + HEADER_BYTES)));
        for (slot, n) in [(3, 1), (0, 2), (1, 3), (0, 4)] {
            set.write(SlotId(slot), link(n), &[n as u8; BYTES]).expect("writes");
        }
        drop(set);
        let (mut set, found) = open(&folder);
        assert_eq!(found, [(SlotId(3), link(1)), (SlotId(1), link(3)), (SlotId(0), link(4))]);
        assert_eq!(set.read(SlotId(0), BlockHash(4)).expect("reads"), vec![4; BYTES]);
        assert!(matches!(set.read(SlotId(0), BlockHash(2)), Err(ReadError::Unusable(Unusable::Other))));
        assert!(matches!(set.read(SlotId(5), BlockHash(2)), Err(ReadError::Unusable(Unusable::NoBlock))));
    }

    #[test]
    fn nobody_else_reads_it_and_no_link_leads_elsewhere() {
        let folder = Folder::new("private");
        let (mut set, _) = open(&folder);
        set.write(SlotId(0), link(1), &[1; BYTES]).expect("writes");
        let segment = set.segment_path(0);
        let mode = |path: &Path| path.metadata().expect("there").mode() & 0o777;
        assert_eq!([&folder.0, &set.folder, &segment].map(|path| mode(path)), [0o700, 0o700, 0o600]);
        drop(set);
        let others = folder.0.join("precious");
        std::fs::rename(&segment, &others).expect("moves");
        std::os::unix::fs::symlink(&others, &segment).expect("links");
        assert!(DiskSet::open(&folder.0, 100_000, &identity()).is_err(), "a link is no segment");
        let (made, _) = (std::fs::metadata(&others).expect("still there"), std::fs::remove_file(&segment));
        assert!(made.len() > 0);
    }

    #[test]
    fn a_crash_at_any_point_of_a_write_shows() {
        let folder = Folder::new("crash");
        let (mut set, _) = open(&folder);
        set.write(SlotId(0), link(1), &[1; BYTES]).expect("writes");
        let (file, header_at, bytes_at) = set.place(SlotId(0)).expect("a place");
        let (file, mut old) = (file.try_clone().expect("clones"), [0; HEADER_BYTES]);
        file.read_exact_at(&mut old, header_at).expect("reads");
        // The header is cleared, and the bytes are missing; then a part of them is there.
        file.write_all_at(&[0; HEADER_BYTES], header_at).expect("writes");
        file.write_all_at(&[2; 100], bytes_at).expect("writes");
        assert!(matches!(set.read(SlotId(0), BlockHash(1)), Err(ReadError::Unusable(Unusable::NoBlock))));
        // Reordered writes: the bytes without the cleared header; or the new header without the bytes.
        file.write_all_at(&old, header_at).expect("writes");
        assert!(matches!(set.read(SlotId(0), BlockHash(1)), Err(ReadError::Unusable(Unusable::Checksum))));
        let new = identity().seal(link(2), 2, &[2; BYTES]);
        file.write_all_at(&new, header_at).expect("writes");
        assert!(matches!(set.read(SlotId(0), BlockHash(2)), Err(ReadError::Unusable(Unusable::Checksum))));
        // A torn header.
        file.write_all_at(&old[..40], header_at).expect("writes");
        drop(set);
        assert_eq!(open(&folder).1, []);
    }

    #[test]
    fn two_workers_have_folders_of_their_own_and_another_model_clears_what_is_left() {
        let folder = Folder::new("sharers");
        let (mut one, _) = open(&folder);
        let (two, _) = open(&folder);
        assert_ne!(one.folder, two.folder);
        one.write(SlotId(0), link(1), &[1; BYTES]).expect("writes");
        let other = Identity::new(b"other", "numerics", BYTES);
        drop(two);
        drop(DiskSet::open(&folder.0, 100_000, &other).expect("opens"));
        assert!(one.folder.exists() && one.read(SlotId(0), BlockHash(1)).is_ok(), "it is in use");
        let path = one.folder.clone();
        drop(one);
        drop(DiskSet::open(&folder.0, 100_000, &other).expect("opens"));
        assert!(!path.exists(), "nobody would ever read it");
    }

    #[test]
    fn a_lock_that_was_removed_is_none() {
        let folder = Folder::new("removed");
        make_folder(&folder.0).expect("made");
        let mut options = private();
        options.create(true).truncate(false);
        let lock = folder.0.join("lock");
        let first = own(&options, &folder.0).expect("locks").expect("free");
        assert!(own(&private(), &folder.0).expect("asks").is_none(), "somebody has it");
        // The lock file, removed by its owner while another process waited for it, and made anew by a third.
        let opened = OpenOptions::new().write(true).open(&lock).expect("opens");
        std::fs::remove_file(&lock).expect("removes");
        let third = own(&options, &folder.0).expect("locks").expect("free");
        drop(first);
        opened.try_lock().expect("nobody has the old one");
        assert!(own(&private(), &folder.0).expect("asks").is_none(), "the third still has its own");
        drop((opened, third));
        assert!(own(&private(), &folder.0).expect("asks").is_some());
    }

    #[test]
    fn workers_that_come_and_go_never_lose_what_they_have_to_others() {
        let folder = Folder::new("storm");
        let one = |n: u128| {
            let identity = Identity::new(&n.to_le_bytes(), "numerics", BYTES);
            for round in 1..40 {
                let (mut set, _) = DiskSet::open(&folder.0, 100_000, &identity).expect("opens");
                set.write(SlotId(0), link(round), &[n as u8; BYTES]).expect("writes");
                std::thread::yield_now();
                let here = std::fs::symlink_metadata(set.folder.join("lock")).expect("its lock is there");
                assert_eq!(here.ino(), set._lock.metadata().expect("open").ino(), "and its own");
                assert!(set.segment_path(0).exists(), "nobody removes what is in use");
            }
        };
        std::thread::scope(|scope| (0..6).for_each(|n| drop(scope.spawn(move || one(n % 3)))));
    }

    #[test]
    fn a_smaller_size_and_a_damaged_segment_are_taken_as_they_are() {
        let folder = Folder::new("smaller");
        let (mut set, _) = open(&folder);
        (0..10).for_each(|n| set.write(SlotId(n), link(u128::from(n) + 1), &[1; BYTES]).expect("writes"));
        drop(set);
        let (set, found) = DiskSet::open(&folder.0, 30_000, &identity()).expect("opens");
        assert_eq!((set.slots(), found.len()), (3, 3));
        segment(&set).set_len(100).expect("cuts");
        drop(set);
        let (mut set, found) = open(&folder);
        assert_eq!(found.len(), 0);
        set.write(SlotId(0), link(1), &[1; BYTES]).expect("a new segment is made");
        assert!(DiskSet::open(&folder.0, 100, &identity()).is_err(), "no room for a block");
    }
}
