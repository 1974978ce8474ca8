use super::*;
use crate::copies::{Copies, SharedWeights};
use proptest::prelude::*;
use rustix::fs::{FlockOperation, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate};
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::Path;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, SystemTime};

const PIECE: usize = 4096;
const SIZE: usize = 2 * PIECE + 700;

/// Layout of the tests: the key is the last 32 bytes.
const LAYOUT: CopyLayout = CopyLayout { key, fill };

fn key(memory: &OwnedFd) -> Option<EntryKey> {
    if !fcntl_get_seals(memory).ok()?.contains(SealFlags::WRITE) {
        return None;
    }
    content(memory).last_chunk().copied()
}

fn fill(
    memory: &OwnedFd,
    key: &EntryKey,
    (size, piece): (usize, usize),
    _: usize,
    read: ReadPiece<'_>,
) -> Result<bool, String> {
    let mut bytes = vec![0; size];
    let read = bytes.chunks_mut(piece).enumerate().try_for_each(|(number, piece)| read(number, piece));
    read.map_err(|error| error.to_string())?;
    if bytes.last_chunk() != Some(key) {
        return Ok(false);
    }
    seal(memory, &bytes);
    Ok(true)
}

fn seal(memory: &OwnedFd, bytes: &[u8]) {
    rustix::io::pwrite(memory, bytes, 0).expect("written");
    fcntl_add_seals(memory, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK).expect("sealed");
}

fn content(memory: &OwnedFd) -> Vec<u8> {
    let mut bytes = vec![0; fstat(memory).expect("memory").st_size as usize];
    let read = rustix::io::pread(memory, &mut bytes, 0).expect("read");
    assert_eq!(read, bytes.len());
    bytes
}

/// Folder of one test, removed with it.
struct Temporary(PathBuf);

impl Temporary {
    fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        Self(std::env::temp_dir().join(format!("penstock-cache-{}-{number}", std::process::id())))
    }

    fn folder(&self) -> Folder {
        Folder::new(self.0.clone())
    }

    /// Names of the files, without the lock's.
    fn names(&self) -> Vec<String> {
        let Ok(files) = fs::read_dir(&self.0) else { return Vec::new() };
        let names = files.map(|file| file.expect("a file").file_name().into_string().expect("UTF-8"));
        let mut names: Vec<String> = names.filter(|name| name != "lock").collect();
        names.sort();
        names
    }

    fn path(&self, key: &EntryKey) -> PathBuf {
        let name: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        self.0.join(name + ".weights")
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Bytes of a copy under a key: some, and the key.
fn weights(key: &EntryKey, size: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..size).map(|at| (at * 7 + usize::from(key[0])) as u8).collect();
    bytes[size - 32..].copy_from_slice(key);
    bytes
}

fn write(folder: &Folder, key: EntryKey, size: usize, bytes_max: u64) -> io::Result<Written> {
    let bytes = weights(&key, size);
    let mut read = |at: u64, part: &mut [u8]| {
        part.copy_from_slice(&bytes[at as usize..at as usize + part.len()]);
        Ok(())
    };
    folder.write(Source { key, bytes: size as u64, piece: PIECE as u64, read: &mut read }, bytes_max)
}

/// Whole copy of a key as it is served; `None`: there is no entry. An error is why it is bad.
fn served(folder: &Folder, key: &EntryKey) -> Result<Option<Vec<u8>>, EntryError> {
    let Some(opened) = folder.find().map_err(EntryError::Os)? else { return Ok(None) };
    match opened.entry(key).expect("a folder") {
        Found::Nothing => Ok(None),
        Found::Bad(why, _) => Err(why),
        Found::Entry(entry) => {
            let mut bytes = vec![0; entry.header().bytes as usize];
            let piece = entry.header().piece as usize;
            bytes.chunks_mut(piece).enumerate().try_for_each(|(number, part)| entry.read(number, part))?;
            Ok(Some(bytes))
        }
    }
}

const MANY: u64 = 1 << 30;

fn whole(size: usize) -> u64 {
    Header::size(size as u64, PIECE as u64) + size as u64
}

#[test]
fn an_entry_is_served_as_it_was_written() {
    let temporary = Temporary::new();
    let folder = temporary.folder();
    assert!(served(&folder, &[77; 32]).expect("no folder").is_none());
    for size in [32, PIECE - 1, PIECE, PIECE + 1, SIZE] {
        let key = [size as u8; 32];
        let done = Written::Done { bytes: whole(size), removed: 0 };
        assert_eq!(write(&folder, key, size, MANY).expect("written"), done);
        assert_eq!(served(&folder, &key).expect("good"), Some(weights(&key, size)), "{size}");
        assert_eq!(write(&folder, key, size, MANY).expect("looked"), Written::There);
        let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
        assert_eq!((mode(&temporary.path(&key)), mode(&temporary.0)), (0o600, 0o700));
    }
    assert!(served(&folder, &[77; 32]).expect("another key").is_none());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_is_changed_in_an_entry_it_is_not_served(at in any::<prop::sample::Index>(), mask in 1..=u8::MAX, kind in 0..4) {
        let (temporary, key) = (Temporary::new(), [9; 32]);
        let folder = temporary.folder();
        write(&folder, key, SIZE, MANY).expect("written");
        let path = temporary.path(&key);
        let mut bytes = fs::read(&path).expect("an entry");
        let at = at.index(bytes.len());
        match kind {
            0 | 1 => bytes[at] ^= mask,
            2 => bytes.truncate(at),
            _ => bytes.extend(vec![mask; at + 1]),
        }
        fs::write(&path, &bytes).expect("changed");
        prop_assert!(served(&folder, &key).is_err(), "kind {kind} at {at}");
        // And a good one takes its place.
        let again = write(&folder, key, SIZE, MANY).expect("written");
        let is_seen_by_header = at < whole(SIZE) as usize - SIZE || kind > 1;
        prop_assert_eq!(again, if is_seen_by_header { Written::Done { bytes: whole(SIZE), removed: 0 } } else { Written::There });
    }
}

#[test]
fn a_writer_that_ends_in_between_leaves_nothing_that_is_served() {
    let (temporary, key) = (Temporary::new(), [4; 32]);
    let folder = temporary.folder();
    write(&folder, key, SIZE, MANY).expect("written");
    let entry = fs::read(temporary.path(&key)).expect("an entry");
    fs::remove_file(temporary.path(&key)).expect("removed");
    for length in [0, 1, 88, 200, PIECE, entry.len() - 1, entry.len()] {
        // Killed: the part that was written so far stays under the name of the new file.
        fs::write(temporary.0.join("new"), &entry[..length]).expect("written");
        assert!(served(&folder, &key).expect("no entry").is_none());
        folder.tidy(MANY).expect("tidied");
        assert!(temporary.names().is_empty(), "{length}");
    }
    for failing in 0..3 {
        let mut read = |at: u64, part: &mut [u8]| match at as usize / PIECE == failing {
            true => Err(io::ErrorKind::StorageFull.into()),
            false => {
                part.fill(1);
                Ok(())
            }
        };
        let source = Source { key, bytes: SIZE as u64, piece: PIECE as u64, read: &mut read };
        assert!(folder.write(source, MANY).is_err());
        assert!(temporary.names().is_empty(), "piece {failing}");
        // And where the process is gone before it can remove anything.
        let gone = std::panic::catch_unwind(|| {
            let mut read = |at: u64, _: &mut [u8]| if at as usize / PIECE == failing { panic!("gone") } else { Ok(()) };
            folder.write(Source { key, bytes: SIZE as u64, piece: PIECE as u64, read: &mut read }, MANY)
        });
        assert!(gone.is_err() && served(&folder, &key).expect("no entry").is_none());
        assert_eq!(temporary.names(), ["new"]);
    }
    fs::write(temporary.0.join("new"), b"left").expect("written");
    write(&folder, key, SIZE, MANY).expect("written");
    assert_eq!(temporary.names().len(), 1);
    assert!(served(&folder, &key).expect("good").is_some());
}

#[test]
fn the_least_recently_used_entries_make_room() {
    let temporary = Temporary::new();
    let (folder, room) = (temporary.folder(), 3 * whole(SIZE));
    let age = |key: &EntryKey, seconds: u64| {
        let file = fs::File::open(temporary.path(key)).expect("an entry");
        file.set_modified(SystemTime::now() - Duration::from_secs(seconds)).expect("set");
    };
    let [a, b, c, d] = [1, 2, 3, 4].map(|byte| [byte; 32]);
    for (key, seconds) in [(a, 30), (b, 20), (c, 10)] {
        write(&folder, key, SIZE, room).expect("written");
        age(&key, seconds);
    }
    let is_there = |key: &EntryKey| temporary.path(key).exists();
    let opened = folder.find().expect("private").expect("there");
    let Found::Entry(entry) = opened.entry(&a).expect("a folder") else { panic!("an entry") };
    entry.touch();
    assert_eq!(opened.usage().expect("read"), (3, room));
    let done = Written::Done { bytes: whole(SIZE), removed: 1 };
    assert_eq!(write(&folder, d, SIZE, room).expect("written"), done);
    assert_eq!([a, b, c, d].map(|key| is_there(&key)), [true, false, true, true]);
    let too_large = 3 * SIZE + PIECE;
    assert_eq!(write(&folder, b, too_large, room).expect("looked"), Written::TooLarge);
    assert_eq!([a, c, d].map(|key| is_there(&key)), [true; 3], "nothing goes for what is not written");
    fs::write(temporary.0.join("notes.txt"), b"somebody's").expect("written");
    folder.tidy(whole(SIZE)).expect("tidied");
    assert_eq!(temporary.names().len(), 2, "{:?}", temporary.names());
    folder.tidy(0).expect("tidied");
    assert_eq!(temporary.names(), ["notes.txt"]);
}

#[test]
fn more_than_the_disk_has_is_not_written() {
    let temporary = Temporary::new();
    let mut read = |_: u64, _: &mut [u8]| panic!("nothing is read");
    let source = Source { key: [1; 32], bytes: 1 << 39, piece: 64 << 20, read: &mut read };
    let disk = rustix::fs::statvfs(std::env::temp_dir()).expect("a disk");
    if disk.f_bavail * disk.f_frsize < 1 << 39 {
        assert_eq!(temporary.folder().write(source, u64::MAX).expect("looked"), Written::NoRoom);
        assert!(temporary.names().is_empty());
    }
}

#[test]
fn links_and_files_of_others_are_not_served() {
    let (temporary, key) = (Temporary::new(), [6; 32]);
    let folder = temporary.folder();
    let path = temporary.path(&key);
    let aside = temporary.0.join("aside");
    let spoil: [(&str, &dyn Fn()); 5] = [
        ("symbolic link", &|| {
            fs::rename(&path, &aside).expect("renamed");
            symlink(&aside, &path).expect("linked");
        }),
        ("another name", &|| fs::hard_link(&path, &aside).expect("linked")),
        ("other users", &|| fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("set")),
        ("no plain file", &|| {
            fs::remove_file(&path).expect("removed");
            rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
                .expect("a pipe");
        }),
        ("another user", &|| chown(&path, Some(65_534), None).expect("given away")),
    ];
    for (why, spoil) in spoil {
        if why == "another user" && !rustix::process::geteuid().is_root() {
            continue;
        }
        write(&folder, key, SIZE, MANY).expect("written");
        spoil();
        let error = served(&folder, &key).expect_err(why).to_string();
        assert!(error.contains(why), "{error}");
        assert_eq!(
            write(&folder, key, SIZE, MANY).expect("written anew"),
            Written::Done { bytes: whole(SIZE), removed: 0 }
        );
        assert!(served(&folder, &key).expect("good").is_some());
        fs::remove_file(&path).expect("removed");
        let _ = fs::remove_file(&aside);
    }
    // The folder itself.
    let other = Temporary::new();
    symlink(&temporary.0, &other.0).expect("linked");
    assert!(served(&other.folder(), &key).is_err() && write(&other.folder(), key, SIZE, MANY).is_err());
    fs::remove_file(&other.0).expect("removed");
    fs::set_permissions(&temporary.0, fs::Permissions::from_mode(0o755)).expect("set");
    assert!(served(&folder, &key).is_err() && write(&folder, key, SIZE, MANY).is_err());
    // The lock.
    fs::set_permissions(&temporary.0, fs::Permissions::from_mode(0o700)).expect("set");
    fs::remove_file(temporary.0.join("lock")).expect("removed");
    symlink(&aside, temporary.0.join("lock")).expect("linked");
    assert!(write(&folder, key, SIZE, MANY).is_err() && !aside.exists());
}

#[test]
fn two_gateways_share_a_folder() {
    let temporary = Temporary::new();
    let room = 4 * whole(SIZE);
    std::thread::scope(|scope| {
        for gateway in 0..2_u8 {
            let folder = temporary.folder();
            scope.spawn(move || {
                for round in 0..12_u8 {
                    // Every third key is written by both.
                    let key = if round % 3 == 0 { [round; 32] } else { [100 + 20 * gateway + round; 32] };
                    write(&folder, key, SIZE, room).expect("written, or there");
                    if let Some(bytes) = served(&folder, &key).expect("never in parts") {
                        assert_eq!(bytes, weights(&key, SIZE));
                    }
                }
            });
        }
    });
    let names = temporary.names();
    assert!(names.len() <= 4 && names.iter().all(|name| name.ends_with(".weights")), "{names:?}");
}

/// Gateway with a cache in a folder.
struct Bench {
    weights: SharedWeights,
    cache: WeightsCache,
}

impl Bench {
    fn new(temporary: &Temporary, key: EntryKey) -> Self {
        let cache = WeightsCache::start(temporary.0.clone(), MANY, LAYOUT).expect("a thread");
        let copies = Copies::new(Some(cache.clone()));
        let weights =
            SharedWeights { copies, key: Arc::new(|| "k".into()), sealed_key: Arc::new(move || Ok(Some(key))) };
        Self { weights, cache }
    }

    /// Copy as a worker finds it: waits for its lock, as a worker does.
    fn copy(&self) -> (Arc<Copy>, Vec<u8>, bool) {
        let copy = self.weights.get("k").expect("memory");
        let memory = copy.descriptor().expect("a descriptor");
        let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
        let own = open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).expect("opens");
        flock(&own, FlockOperation::LockExclusive).expect("locked");
        let is_sealed = fcntl_get_seals(&own).expect("memory").contains(SealFlags::WRITE);
        (copy, content(&own), is_sealed)
    }
}

#[track_caller]
fn until(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn the_next_gateway_finds_what_a_worker_has_packed() {
    let (temporary, key) = (Temporary::new(), [8; 32]);
    let bytes = weights(&key, SIZE);
    let bench = Bench::new(&temporary, key);
    let (copy, found, is_sealed) = bench.copy();
    assert_eq!((found.len(), is_sealed), (0, false));
    bench.weights.copies.write_sealed();
    assert!(!copy.is_offered.load(Ordering::Relaxed), "not sealed yet");
    seal(&copy.descriptor().expect("a descriptor"), &bytes);
    bench.weights.copies.write_sealed();
    until("an entry is written", || bench.cache.counts().bytes > 0);
    let header = Header::size(SIZE as u64, super::PIECE);
    assert_eq!(bench.cache.counts(), CacheCounts { hits: 0, misses: 1, bad: 0, bytes: header + SIZE as u64 });
    drop((copy, bench));

    let bench = Bench::new(&temporary, key);
    let (copy, found, is_sealed) = bench.copy();
    assert!(found == bytes && is_sealed && copy.is_offered.load(Ordering::Relaxed));
    let (again, ..) = bench.copy();
    assert!(Arc::ptr_eq(&copy, &again));
    assert_eq!((bench.cache.counts().hits, bench.cache.counts().misses), (1, 0), "looked for once");
    drop((copy, again, bench));

    let other = Bench::new(&temporary, [7; 32]);
    let (_copy, found, is_sealed) = other.copy();
    assert_eq!((found.len(), is_sealed, other.cache.counts().misses), (0, false, 1), "another checkpoint's");
}

/// Change of an entry's bytes.
type Spoil<'s> = &'s dyn Fn(&mut Vec<u8>);

#[test]
fn a_bad_entry_is_counted_and_removed_and_the_worker_packs() {
    let (temporary, key) = (Temporary::new(), [8; 32]);
    let folder = temporary.folder();
    let spoil: [Spoil<'_>; 3] =
        [&|entry| *entry.last_mut().expect("bytes") ^= 1, &|entry| entry.truncate(entry.len() - 1), &|entry| {
            entry[9] ^= 1
        }];
    for spoil in spoil {
        write(&folder, key, SIZE, MANY).expect("written");
        let mut entry = fs::read(temporary.path(&key)).expect("an entry");
        spoil(&mut entry);
        fs::write(temporary.path(&key), entry).expect("changed");
        let bench = Bench::new(&temporary, key);
        let (_copy, found, is_sealed) = bench.copy();
        until("it is counted", || bench.cache.counts().bad == 1);
        assert!(found.iter().all(|byte| *byte == 0) && !is_sealed);
        assert!(!temporary.path(&key).exists());
    }
    // Good bytes that are no copy under their key.
    let mut read = |_: u64, part: &mut [u8]| {
        part.fill(1);
        Ok(())
    };
    folder.write(Source { key, bytes: 40, piece: PIECE as u64, read: &mut read }, MANY).expect("written");
    let bench = Bench::new(&temporary, key);
    let (_copy, _, is_sealed) = bench.copy();
    until("it is counted", || bench.cache.counts().bad == 1);
    assert!(!is_sealed && !temporary.path(&key).exists());
}

#[test]
fn memory_that_nobody_wants_any_more_is_neither_filled_nor_written() {
    let (temporary, key) = (Temporary::new(), [8; 32]);
    write(&temporary.folder(), key, SIZE, MANY).expect("written");
    let bench = Bench::new(&temporary, key);
    let copies = Copies::default();
    let weights = SharedWeights { copies, key: Arc::new(|| "k".into()), sealed_key: Arc::new(|| Ok(None)) };
    let copy = weights.get("k").expect("memory");
    let (memory, gone) = (copy.descriptor().expect("a descriptor"), Arc::downgrade(&copy));
    drop(copy);
    bench.cache.shared.read(memory.try_clone().expect("a descriptor"), &gone, &key);
    assert_eq!((bench.cache.counts().hits, bench.cache.counts().bad, content(&memory).len()), (0, 0, 0));
    assert!(temporary.path(&key).exists());
    bench.cache.shared.write(&gone);
    ftruncate(&memory, 0).expect("not sealed");
    assert_eq!(temporary.names().len(), 1);
}
