//! Folder of the cache: its entries, the lock under which it is changed, and what it may take of the disk.
//!
//! Everything is reached from a descriptor of the folder, which is private to this user, and no symbolic link is followed from there. An entry is
//! written under another name, made durable, and renamed; the lock holds the writers of several gateways apart, and readers need none.

use super::entry::{EntryError, EntryKey, FIXED, Header};
use rustix::fd::OwnedFd;
use rustix::fs::{
    AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, flock,
    fstat, fstatvfs, fsync, futimens, open, openat, renameat, statat, unlinkat,
};
use rustix::io::Errno;
use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};

/// End of an entry's name.
const ENDING: &str = ".weights";

/// Name of the file of an entry that is being written.
const NEW: &str = "new";

/// Name of the file whose lock a writer holds.
const LOCK: &str = "lock";

/// Bytes of the disk that entries leave free: the store of the gateway may be on it.
const DISK_LEFT: u64 = 1 << 30;

/// Bytes of a new entry between two syncs to the disk, a bound of the unsynced bytes in memory.
const UNSYNCED_MAX: u64 = 64 << 20;

/// Folder of the cache.
#[derive(Clone, Debug)]
pub(super) struct Folder {
    path: PathBuf,
}

/// Folder that is open and private to this user.
#[derive(Debug)]
pub(super) struct Opened {
    folder: OwnedFd,
}

/// Entry of a key, as it was found.
#[derive(Debug)]
pub(super) enum Found {
    /// No entry.
    Nothing,
    /// Entry whose header is right.
    Entry(Entry),
    /// Entry that is not served, and the file that it is.
    Bad(EntryError, FileId),
}

/// Device and inode of a file.
pub(super) type FileId = (u64, u64);

/// Entry that is open; its header has been checked, its pieces are checked when they are read.
#[derive(Debug)]
pub(super) struct Entry {
    file: File,
    header: Header,
    id: FileId,
}

/// Outcome of writing an entry.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Written {
    /// Entry written, after older ones were removed.
    Done {
        /// Bytes of the entry.
        bytes: u64,
        /// Number of entries that made room.
        removed: usize,
    },
    /// Entry exists already.
    There,
    /// Entry larger than `bytes_max`.
    TooLarge,
    /// Disk with too little room.
    NoRoom,
}

/// Copy of packed weights to be written.
pub(super) struct Source<'s> {
    pub(super) key: EntryKey,
    pub(super) bytes: u64,
    /// Bytes of a piece.
    pub(super) piece: u64,
    /// Fills the slice with the copy's bytes from this offset on.
    pub(super) read: &'s mut dyn FnMut(u64, &mut [u8]) -> io::Result<()>,
}

impl Folder {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the folder; `None`: there is none.
    ///
    /// # Errors
    /// Symbolic link, folder of another user, or folder open to other users.
    pub(super) fn find(&self) -> io::Result<Option<Opened>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = match open(&self.path, flags, Mode::empty()) {
            Ok(folder) => folder,
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        match not_private(&fstat(&folder)?) {
            None => Ok(Some(Opened { folder })),
            Some(why) => Err(io::Error::new(io::ErrorKind::PermissionDenied, why)),
        }
    }

    /// Opens the folder, and makes it first if there is none.
    fn make(&self) -> io::Result<Opened> {
        if let Some(opened) = self.find()? {
            return Ok(opened);
        }
        DirBuilder::new().recursive(true).mode(0o700).create(&self.path)?;
        self.find()?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Removes the file of a killed writer, and the least recently used entries beyond `bytes_max`, unless another gateway writes now.
    ///
    /// # Errors
    /// The folder cannot be used.
    pub(super) fn tidy(&self, bytes_max: u64) -> io::Result<()> {
        let Some(opened) = self.find()? else { return Ok(()) };
        let lock = opened.lock()?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        opened.remove(NEW)?;
        opened.remove_all(&opened.beyond(bytes_max)?)
    }

    /// Writes an entry, under the lock; waits for another gateway that writes. Least recently used entries are removed to keep `bytes_max`.
    ///
    /// # Errors
    /// Folder or copy cannot be used; no part of an entry is left.
    pub(super) fn write(&self, source: Source<'_>, bytes_max: u64) -> io::Result<Written> {
        let opened = self.make()?;
        let lock = opened.lock()?;
        // Ends with the descriptor.
        flock(&lock, FlockOperation::LockExclusive)?;
        opened.remove(NEW)?;
        match opened.entry(&source.key)? {
            Found::Entry(_) => return Ok(Written::There),
            Found::Bad(_, id) => opened.remove_bad(&source.key, id),
            Found::Nothing => {}
        }
        let bytes = Header::size(source.bytes, source.piece).saturating_add(source.bytes);
        let Some(others_max) = bytes_max.checked_sub(bytes) else { return Ok(Written::TooLarge) };
        let beyond = opened.beyond(others_max)?;
        let freed = beyond.iter().map(|old| old.bytes).fold(0, u64::saturating_add);
        let disk = fstatvfs(&opened.folder)?;
        let free = disk.f_bavail.saturating_mul(disk.f_frsize).saturating_add(freed);
        if free < bytes.saturating_add(DISK_LEFT) {
            return Ok(Written::NoRoom);
        }
        opened.remove_all(&beyond)?;
        let name = name_of(&source.key);
        if let Err(error) = opened.put(source, &name) {
            // Err: the next writer removes it.
            let _ = opened.remove(NEW);
            return Err(error);
        }
        Ok(Written::Done { bytes, removed: beyond.len() })
    }
}

impl Opened {
    /// Entry of a key; its pieces are checked later, as they are read.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub(super) fn entry(&self, key: &EntryKey) -> io::Result<Found> {
        let name = name_of(key);
        let stat = match statat(&self.folder, &name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok(Found::Nothing),
            Err(error) => return Err(error.into()),
        };
        let id = id_of(&stat);
        // Without a descriptor for it, nothing is said against the entry.
        match self.opened(&name)? {
            None => Ok(Found::Bad(EntryError::Place("it is a symbolic link"), id)),
            Some(file) => Ok(match checked(file, key, id) {
                Ok(entry) => Found::Entry(entry),
                Err(why) => Found::Bad(why, id),
            }),
        }
    }

    /// File of an entry; `None`: it is a symbolic link.
    fn opened(&self, name: &str) -> io::Result<Option<OwnedFd>> {
        // A pipe of that name would be waited for; it is refused later.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        match openat(&self.folder, name, flags, Mode::empty()) {
            Ok(file) => Ok(Some(file)),
            Err(Errno::LOOP) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes the entry of a key if its file is still `id`. No lock is taken: at worst, a new entry is lost.
    pub(super) fn remove_bad(&self, key: &EntryKey, id: FileId) {
        let name = name_of(key);
        if statat(&self.folder, &name, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|stat| id_of(&stat) == id) {
            // Err: it stays bad, and is not served the next time either.
            let _ = unlinkat(&self.folder, &name, AtFlags::empty());
        }
    }

    /// Number and bytes of all entries.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub(super) fn usage(&self) -> io::Result<(usize, u64)> {
        let all = self.entries()?;
        Ok((all.len(), all.iter().map(|entry| entry.bytes).fold(0, u64::saturating_add)))
    }

    fn lock(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        Ok(openat(&self.folder, LOCK, flags, Mode::RUSR | Mode::WUSR)?)
    }

    /// Writes the entry under another name, and renames it when the disk has it.
    fn put(&self, source: Source<'_>, name: &str) -> io::Result<()> {
        let Source { key, bytes, piece, read } = source;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = File::from(openat(&self.folder, NEW, flags, Mode::RUSR | Mode::WUSR)?);
        let begin = Header::size(bytes, piece);
        let mut header = Header { key, bytes, piece, hashes: Vec::new() };
        let (mut buffer, mut unsynced) = (vec![0; usize::try_from(piece.min(bytes)).unwrap_or(usize::MAX)], 0);
        let mut at = 0;
        while at < bytes {
            let size = piece.min(bytes - at);
            let part = &mut buffer[..size as usize];
            read(at, part)?;
            header.hashes.push(*blake3::hash(part).as_bytes());
            file.write_all_at(part, begin + at)?;
            at += size;
            unsynced += size;
            if unsynced >= UNSYNCED_MAX {
                file.sync_data()?;
                unsynced = 0;
            }
        }
        file.write_all_at(&header.to_bytes(), 0)?;
        file.sync_all()?;
        renameat(&self.folder, NEW, &self.folder, name)?;
        Ok(fsync(&self.folder)?)
    }

    /// Least recently used entries that are too many for `bytes_max`.
    fn beyond(&self, bytes_max: u64) -> io::Result<Vec<Listed>> {
        let mut all = self.entries()?;
        all.sort_by(|a, b| (a.used, &a.name).cmp(&(b.used, &b.name)));
        let mut sum = all.iter().map(|entry| entry.bytes).fold(0, u64::saturating_add);
        let count = all.iter().take_while(|entry| {
            let is_beyond = sum > bytes_max;
            sum = sum.saturating_sub(entry.bytes);
            is_beyond
        });
        let count = count.count();
        all.truncate(count);
        Ok(all)
    }

    fn entries(&self) -> io::Result<Vec<Listed>> {
        let mut all = Vec::new();
        for listed in Dir::read_from(&self.folder)? {
            let listed = listed?;
            let Some(name) = listed.file_name().to_str().ok().filter(|name| is_entry(name)) else { continue };
            // Err: another gateway has removed it.
            let Ok(stat) = statat(&self.folder, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            let used = (stat.st_mtime, stat.st_mtime_nsec.cast_signed());
            all.push(Listed { name: name.to_owned(), bytes: stat.st_size.unsigned_abs(), used });
        }
        Ok(all)
    }

    fn remove_all(&self, listed: &[Listed]) -> io::Result<()> {
        listed.iter().try_for_each(|entry| self.remove(&entry.name))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match unlinkat(&self.folder, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Checks place and header of an entry.
fn checked(file: OwnedFd, key: &EntryKey, id: FileId) -> Result<Entry, EntryError> {
    let stat = fstat(&file).map_err(|error| EntryError::Os(error.into()))?;
    if let Some(why) = not_private(&stat).or_else(|| not_plain(&stat)) {
        return Err(EntryError::Place(why));
    }
    let (file, file_bytes) = (File::from(file), stat.st_size.unsigned_abs());
    let mut first = [0; FIXED];
    file.read_exact_at(&mut first, 0).map_err(EntryError::Os)?;
    let mut all = vec![0; Header::size_of(&first, file_bytes)?];
    file.read_exact_at(&mut all, 0).map_err(EntryError::Os)?;
    let header = Header::read(&all, file_bytes)?;
    if header.key != *key { Err(EntryError::OtherKey) } else { Ok(Entry { file, header, id }) }
}

/// Entry of a list, with the time of its last use.
#[derive(Debug)]
struct Listed {
    name: String,
    bytes: u64,
    used: (i64, i64),
}

impl Entry {
    pub(super) fn header(&self) -> &Header {
        &self.header
    }

    pub(super) fn id(&self) -> FileId {
        self.id
    }

    /// Reads piece `number`, of the length that the header gives, into `piece`, and checks it.
    ///
    /// # Errors
    /// [`EntryError`]: the entry is bad.
    pub(super) fn read(&self, number: usize, piece: &mut [u8]) -> Result<(), EntryError> {
        let Header { bytes, piece: size, ref hashes, .. } = self.header;
        let at = Header::size(bytes, size) + number as u64 * size;
        self.file.read_exact_at(piece, at).map_err(EntryError::Os)?;
        let is_same = hashes.get(number).is_some_and(|hash| blake3::hash(piece) == *hash);
        if is_same { Ok(()) } else { Err(EntryError::Piece(number)) }
    }

    /// Notes that the entry was used now.
    pub(super) fn touch(&self) {
        let [omit, now] = [UTIME_OMIT, UTIME_NOW].map(|tv_nsec| Timespec { tv_sec: 0, tv_nsec });
        // Err: it goes earlier than it should.
        let _ = futimens(&self.file, &Timestamps { last_access: omit, last_modification: now });
    }
}

fn name_of(key: &EntryKey) -> String {
    let mut name: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    name.push_str(ENDING);
    name
}

fn is_entry(name: &str) -> bool {
    let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    name.strip_suffix(ENDING).is_some_and(|key| key.len() == 2 * size_of::<EntryKey>() && key.bytes().all(is_hex))
}

fn id_of(stat: &Stat) -> FileId {
    (stat.st_dev, stat.st_ino)
}

/// Reason why others can reach a file; `None`: it is this user's alone.
fn not_private(stat: &Stat) -> Option<&'static str> {
    if stat.st_uid != rustix::process::geteuid().as_raw() {
        Some("it belongs to another user")
    } else if stat.st_mode & 0o077 != 0 {
        Some("other users may use it")
    } else {
        None
    }
}

fn not_plain(stat: &Stat) -> Option<&'static str> {
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        Some("it is no plain file")
    } else if stat.st_nlink != 1 {
        Some("it has another name")
    } else {
        None
    }
}
