//! File on its way: `NAME.part` with the bytes, `NAME.state` with how far each piece has come.
//!
//! ```text
//! NAME.state   0..HEAD_BYTES   JSON {size, sum, piece, tag}, filled with spaces
//!              then            u32 per piece, little-endian: bytes of the piece that are in NAME.part, from its start
//! ```
//!
//! Bytes are written before their count, so a process that is killed leaves a count that is true. After a loss of power the
//! checksum finds what is not.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::PullError;
use crate::choose::Chosen;
use crate::sum::Sum;

/// Bytes of one piece, which one request fetches: large enough that a hub is asked seldom.
const PIECE_BYTES: u64 = 64 << 20;
/// Bytes of the state before the counts.
const HEAD_BYTES: usize = 4096;

/// Validator of an answer (`ETag`), and who sent it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Tag {
    /// Origin that sent the answer.
    pub(super) origin: String,
    /// Strong entity tag, with its quotes.
    pub(super) value: String,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Head {
    size: u64,
    sum: Sum,
    piece: u64,
    tag: Option<Tag>,
}

/// File on its way.
#[derive(Debug)]
pub(super) struct Partial {
    folder: PathBuf,
    chosen: Chosen,
    data: File,
    state: File,
    /// Bytes of each piece that are there.
    counts: Vec<AtomicU32>,
    tag: Mutex<Option<Tag>>,
    /// True once a server has answered with other bytes than those that were asked for: then it is fetched from its start, in one request.
    anew: AtomicBool,
}

/// Range of bytes of one piece that is still to be fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    /// First byte.
    pub(super) start: u64,
    /// Byte behind the last.
    pub(super) end: u64,
}

impl Partial {
    /// Returns true if the file has its name: this pull has checked it, or an earlier one, which may have had its checksum from elsewhere.
    pub(super) fn is_named(folder: &Path, chosen: &Chosen) -> bool {
        folder.join(&chosen.name).exists()
    }

    /// Checks a file that an earlier pull has left under its name, and deletes it if it is not what is chosen now. What such a pull
    /// left of it on its way goes, too. Cost: reads the file.
    pub(super) fn check_again(folder: &Path, chosen: &Chosen) -> Result<(), PullError> {
        let path = folder.join(&chosen.name);
        let size = match path.metadata() {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(PullError::file(&path, error)),
        };
        let sum = |path: &Path| chosen.sum.again(path, &|_| {}).map_err(|error| PullError::file(path, error));
        if size != chosen.size || sum(&path)? != chosen.sum {
            return fs::remove_file(&path).map_err(|error| PullError::file(&path, error));
        }
        for left in [part(folder, &chosen.name), state(folder, &chosen.name)] {
            match fs::remove_file(&left) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(PullError::file(&left, error)),
                _ => {}
            }
        }
        Ok(())
    }

    /// Opens the file as an earlier pull has left it, or a new one.
    pub(super) fn open(folder: &Path, chosen: &Chosen) -> Result<Self, PullError> {
        let failed = |path: PathBuf| move |error| PullError::file(&path, error);
        let open = |path: &Path| OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let (data_path, state_path) = (part(folder, &chosen.name), state(folder, &chosen.name));
        let data = open(&data_path).map_err(failed(data_path.clone()))?;
        let state = open(&state_path).map_err(failed(state_path.clone()))?;
        let (counts, tag) = match read_state(&state, chosen) {
            Some(known) if data.metadata().is_ok_and(|metadata| metadata.len() == chosen.size) => known,
            _ => (vec![0; pieces(chosen.size)], None),
        };
        let partial = Self {
            folder: folder.to_owned(),
            chosen: chosen.clone(),
            data,
            state,
            counts: counts.into_iter().map(AtomicU32::new).collect(),
            tag: Mutex::new(tag),
            anew: AtomicBool::new(false),
        };
        // Sparse: space was looked for before.
        partial.data.set_len(chosen.size).map_err(failed(data_path))?;
        partial.write_state().map_err(failed(state_path))?;
        Ok(partial)
    }

    /// Name in the store.
    pub(super) fn name(&self) -> &str {
        &self.chosen.name
    }

    /// Path in the repository.
    pub(super) fn path(&self) -> &str {
        &self.chosen.path
    }

    /// Bytes of the whole file.
    pub(super) fn size(&self) -> u64 {
        self.chosen.size
    }

    /// Number of pieces.
    pub(super) fn pieces(&self) -> usize {
        self.counts.len()
    }

    /// Bytes that are missing.
    pub(super) fn left(&self) -> u64 {
        self.size() - self.counts.iter().map(|count| u64::from(count.load(Ordering::Relaxed))).sum::<u64>()
    }

    /// Rest of a piece; `None`: it is there.
    pub(super) fn wanted(&self, piece: usize) -> Option<Wanted> {
        let begin = piece as u64 * PIECE_BYTES;
        let end = (begin + PIECE_BYTES).min(self.size());
        let start = begin + u64::from(self.counts[piece].load(Ordering::Relaxed));
        (start < end).then_some(Wanted { start, end })
    }

    /// Writes bytes at the end of what a piece has.
    pub(super) fn write(&self, piece: usize, bytes: &[u8]) -> Result<(), PullError> {
        let before = self.counts[piece].load(Ordering::Relaxed);
        let at = piece as u64 * PIECE_BYTES + u64::from(before);
        let written = self.data.write_all_at(bytes, at).and_then(|()| {
            let count = before + bytes.len() as u32;
            self.counts[piece].store(count, Ordering::Relaxed);
            self.state.write_all_at(&count.to_le_bytes(), (HEAD_BYTES + 4 * piece) as u64)
        });
        written.map_err(|error| PullError::file(&part(&self.folder, self.name()), error))
    }

    /// Validator of the bytes that are there.
    pub(super) fn tag(&self) -> Option<Tag> {
        self.tag.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Keeps the validator of the first answer.
    pub(super) fn set_tag(&self, tag: Tag) -> Result<(), PullError> {
        let mut kept = self.tag.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.is_some() {
            return Ok(());
        }
        *kept = Some(tag);
        drop(kept);
        self.write_state().map_err(|error| PullError::file(&state(&self.folder, self.name()), error))
    }

    /// Marks the file to be fetched from its start, in one request.
    pub(super) fn begin_anew(&self) {
        self.anew.store(true, Ordering::Relaxed);
    }

    /// Returns true if the file is to be fetched from its start.
    pub(super) fn is_to_begin_anew(&self) -> bool {
        self.anew.load(Ordering::Relaxed)
    }

    /// Forgets all bytes; returns how many there were.
    pub(super) fn forget(&self) -> Result<u64, PullError> {
        let had = self.size() - self.left();
        self.counts.iter().for_each(|count| count.store(0, Ordering::Relaxed));
        *self.tag.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.write_state().map_err(|error| PullError::file(&state(&self.folder, self.name()), error))?;
        Ok(had)
    }

    /// Checks a complete file and gives it its name. `Ok(false)`: its checksum is wrong, and it is deleted. Cost: reads the file.
    pub(super) fn finish(&self, told: &dyn Fn(u64)) -> Result<bool, PullError> {
        let (data, state) = (part(&self.folder, self.name()), state(&self.folder, self.name()));
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |error| PullError::file(&path, error)
        };
        let sum = self.chosen.sum.again(&data, told).map_err(failed(&data))?;
        if sum != self.chosen.sum {
            fs::remove_file(&state).map_err(failed(&state))?;
            fs::remove_file(&data).map_err(failed(&data))?;
            return Ok(false);
        }
        self.data.sync_all().map_err(failed(&data))?;
        fs::rename(&data, self.folder.join(self.name())).map_err(failed(&data))?;
        fs::remove_file(&state).map_err(failed(&state))?;
        Ok(true)
    }

    fn write_state(&self) -> io::Result<()> {
        let head = Head { size: self.size(), sum: self.chosen.sum, piece: PIECE_BYTES, tag: self.tag() };
        let mut bytes = serde_json::to_vec(&head).map_err(io::Error::other)?;
        if bytes.len() > HEAD_BYTES {
            // A server's tag may be of any length: without one the pull goes on, too.
            bytes = serde_json::to_vec(&Head { tag: None, ..head }).map_err(io::Error::other)?;
        }
        bytes.resize(HEAD_BYTES, b' ');
        self.counts.iter().for_each(|count| bytes.extend(count.load(Ordering::Relaxed).to_le_bytes()));
        self.state.set_len(bytes.len() as u64)?;
        self.state.write_all_at(&bytes, 0)
    }
}

/// Counts and tag that an earlier pull has left; `None`: there are none for this content.
fn read_state(state: &File, chosen: &Chosen) -> Option<(Vec<u32>, Option<Tag>)> {
    let mut bytes = vec![0; HEAD_BYTES + 4 * pieces(chosen.size)];
    if state.metadata().ok()?.len() != bytes.len() as u64 {
        return None;
    }
    state.read_exact_at(&mut bytes, 0).ok()?;
    let head: Head = serde_json::from_slice(&bytes[..HEAD_BYTES]).ok()?;
    let fits = (head.size, head.sum, head.piece) == (chosen.size, chosen.sum, PIECE_BYTES);
    let counts: Vec<u32> =
        bytes[HEAD_BYTES..].chunks(4).map(|bytes| u32::from_le_bytes(bytes.try_into().expect("four bytes"))).collect();
    let of = |piece: usize| PIECE_BYTES.min(chosen.size - piece as u64 * PIECE_BYTES);
    let possible = counts.iter().enumerate().all(|(piece, count)| u64::from(*count) <= of(piece));
    (fits && possible).then_some((counts, head.tag))
}

fn pieces(size: u64) -> usize {
    size.div_ceil(PIECE_BYTES) as usize
}

fn part(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.part"))
}

fn state(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.state"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(size: u64) -> Chosen {
        let sum = Sum::git_sha1("ce013625030ba8dba906f756967f9e9ca394464a").expect("a sum");
        Chosen { path: "m".into(), name: "m".into(), size, sum }
    }

    fn scratch(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("penstock-partial-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder");
        folder
    }

    #[test]
    fn a_pull_goes_on_where_it_was() {
        let folder = scratch("resume");
        let first = Partial::open(&folder, &chosen(6)).expect("opened");
        assert_eq!((first.left(), first.wanted(0)), (6, Some(Wanted { start: 0, end: 6 })));
        first.write(0, b"hel").expect("written");
        let tag = Tag { origin: "http://hub".into(), value: "\"x\"".into() };
        first.set_tag(tag.clone()).expect("kept");
        drop(first);
        let second = Partial::open(&folder, &chosen(6)).expect("opened");
        assert_eq!((second.wanted(0), second.tag()), (Some(Wanted { start: 3, end: 6 }), Some(tag)));
        second.write(0, b"lo\n").expect("written");
        assert_eq!((second.left(), second.wanted(0)), (0, None));
        assert!(!Partial::is_named(&folder, &chosen(6)));
        assert!(second.finish(&|_| {}).expect("checked"));
        assert!(Partial::is_named(&folder, &chosen(6)));
        assert_eq!(fs::read_dir(&folder).expect("listed").count(), 1);
        fs::remove_dir_all(&folder).expect("removed");
    }

    #[test]
    fn what_an_earlier_pull_left_is_checked_again() {
        let folder = scratch("again");
        let left =
            |names: &[&str]| names.iter().for_each(|name| fs::write(folder.join(name), "hello\n").expect("written"));
        let there = || fs::read_dir(&folder).expect("listed").count();
        Partial::check_again(&folder, &chosen(6)).expect("nothing there");
        left(&["m", "m.part", "m.state"]);
        Partial::check_again(&folder, &chosen(6)).expect("checked");
        assert!(Partial::is_named(&folder, &chosen(6)) && there() == 1);
        fs::write(folder.join("m"), "hellO\n").expect("written");
        Partial::check_again(&folder, &chosen(6)).expect("checked");
        assert!(!Partial::is_named(&folder, &chosen(6)), "another content of the same length");
        left(&["m"]);
        Partial::check_again(&folder, &chosen(7)).expect("checked");
        assert!(!Partial::is_named(&folder, &chosen(7)), "another length");
        fs::remove_dir_all(&folder).expect("removed");
    }

    #[test]
    fn a_file_of_several_pieces_comes_in_any_order() {
        let folder = scratch("pieces");
        let size = 2 * PIECE_BYTES + 10;
        let file = Partial::open(&folder, &chosen(size)).expect("opened");
        assert_eq!(file.pieces(), 3);
        file.write(2, b"0123456789").expect("written");
        assert_eq!((file.wanted(2), file.left()), (None, 2 * PIECE_BYTES));
        assert_eq!(file.wanted(1), Some(Wanted { start: PIECE_BYTES, end: 2 * PIECE_BYTES }));
        assert_eq!(file.forget().expect("forgotten"), 10);
        assert_eq!(file.left(), size);
        fs::remove_dir_all(&folder).expect("removed");
    }

    #[test]
    fn wrong_bytes_are_deleted_and_other_content_begins_anew() {
        let folder = scratch("wrong");
        let file = Partial::open(&folder, &chosen(6)).expect("opened");
        file.write(0, b"hellO\n").expect("written");
        assert!(!file.finish(&|_| {}).expect("checked"));
        assert_eq!(fs::read_dir(&folder).expect("listed").count(), 0);
        Partial::open(&folder, &chosen(6)).expect("opened").write(0, b"hel").expect("written");
        assert_eq!(Partial::open(&folder, &chosen(7)).expect("opened").left(), 7, "another size");
        fs::write(state(&folder, "m"), b"garbage").expect("written");
        assert_eq!(Partial::open(&folder, &chosen(7)).expect("opened").left(), 7, "a damaged state");
        fs::remove_dir_all(&folder).expect("removed");
    }
}
