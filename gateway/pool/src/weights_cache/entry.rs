//! Entry of the cache: the file of one copy of packed weights.
//!
//! ```text
//! [mark][key][bytes of the copy][bytes of a piece][sum][BLAKE3 of each piece] [piece][piece] … [the last piece, which may be shorter]
//! ```
//! Numbers are 64 bits, little-endian. The sum is BLAKE3 over everything before and behind it up to the first piece, so it is a hash of the whole
//! content; pieces have hashes of their own so that they can be read, and checked, by several threads.

use std::io;

/// Key of an entry: a digest of all that the bytes of the packed weights depend on.
pub type EntryKey = [u8; 32];

/// First bytes of an entry, with the version of this layout.
const MARK: [u8; 8] = *b"PSTKWF01";

/// Size of a BLAKE3 hash.
const HASH: usize = 32;

/// Bytes of the header before the hashes of the pieces.
pub(super) const FIXED: usize = MARK.len() + HASH + 8 + 8 + HASH;

/// Largest copy: 1 TiB.
const BYTES_MAX: u64 = 1 << 40;

/// Smallest and largest piece.
const PIECE: std::ops::RangeInclusive<u64> = (4 << 10)..=(64 << 20);

/// Reason why an entry is not served.
#[derive(Debug, thiserror::Error)]
pub enum EntryError {
    /// File of another kind, another owner, or with another name beside it.
    #[error("{0}")]
    Place(&'static str),
    /// Bytes that are no header of this version.
    #[error("the header is not one of this version")]
    Mark,
    /// Sizes that are out of bounds, or do not fit the file.
    #[error("the sizes in the header do not fit a file of {file_bytes} bytes")]
    Sizes {
        /// Size of the file.
        file_bytes: u64,
    },
    /// Header with a wrong hash.
    #[error("the header has changed since it was written")]
    Header,
    /// Header of another key.
    #[error("the header has another key")]
    OtherKey,
    /// Piece with a wrong hash.
    #[error("piece {0} has changed since it was written")]
    Piece(usize),
    /// Whole content that is no copy of packed weights under the key.
    #[error("the content is no packed weights under the key")]
    NoCopy,
    /// Failed operation of the system.
    #[error("the file cannot be read")]
    Os(#[source] io::Error),
}

/// Header of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Key under which the weights were sealed.
    pub key: EntryKey,
    /// Bytes of the copy.
    pub bytes: u64,
    /// Bytes of each piece but the last, which may have fewer.
    pub piece: u64,
    /// BLAKE3 of each piece.
    pub hashes: Vec<[u8; HASH]>,
}

impl Header {
    /// Size of the header of a copy of `bytes` in pieces of `piece` bytes.
    pub(super) fn size(bytes: u64, piece: u64) -> u64 {
        FIXED as u64 + bytes.div_ceil(piece) * HASH as u64
    }

    /// Size of the whole header whose first bytes these are, in a file of `file_bytes`: at most that.
    ///
    /// # Errors
    /// [`EntryError`]: they are not the beginning of an entry of that size.
    pub fn size_of(first: &[u8], file_bytes: u64) -> Result<usize, EntryError> {
        let (mark, rest) = first.split_first_chunk::<8>().ok_or(EntryError::Mark)?;
        if *mark != MARK || rest.len() < FIXED - MARK.len() {
            return Err(EntryError::Mark);
        }
        let (bytes, piece) = (number(&rest[HASH..]), number(&rest[HASH + 8..]));
        let sizes = EntryError::Sizes { file_bytes };
        if !(1..=BYTES_MAX).contains(&bytes) || !PIECE.contains(&piece) {
            return Err(sizes);
        }
        let size = Self::size(bytes, piece);
        if size + bytes != file_bytes {
            return Err(sizes);
        }
        usize::try_from(size).map_err(|_| sizes)
    }

    /// Reads a whole header, as long as [`Header::size_of`] says.
    ///
    /// # Errors
    /// [`EntryError`]: it is not the header of an entry of `file_bytes`, or not as it was written.
    pub fn read(all: &[u8], file_bytes: u64) -> Result<Self, EntryError> {
        let size = Self::size_of(all, file_bytes)?;
        let (fixed, hashes) = all.split_at_checked(FIXED).filter(|_| all.len() == size).ok_or(EntryError::Mark)?;
        let mut key = [0; HASH];
        key.copy_from_slice(&fixed[8..8 + HASH]);
        let (bytes, piece) = (number(&fixed[8 + HASH..]), number(&fixed[16 + HASH..]));
        let header = Self { key, bytes, piece, hashes: hashes.as_chunks::<HASH>().0.to_vec() };
        if header.sum() == fixed[FIXED - HASH..] { Ok(header) } else { Err(EntryError::Header) }
    }

    /// Header as bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let sum = self.sum();
        [&self.begin()[..], &sum, self.hashes.as_flattened()].concat()
    }

    fn begin(&self) -> Vec<u8> {
        [&MARK[..], &self.key, &self.bytes.to_le_bytes(), &self.piece.to_le_bytes()].concat()
    }

    fn sum(&self) -> [u8; HASH] {
        let mut hash = blake3::Hasher::new();
        hash.update(&self.begin()).update(self.hashes.as_flattened());
        *hash.finalize().as_bytes()
    }
}

fn number(bytes: &[u8]) -> u64 {
    bytes.first_chunk::<8>().map_or(0, |number| u64::from_le_bytes(*number))
}

/// Reads any bytes as an entry, and checks what the reader promises of it: a header that is taken fits the file, and is the one that was written.
///
/// # Panics
/// If a promise is broken.
pub fn check_entry(bytes: &[u8]) {
    let file_bytes = bytes.len() as u64;
    let Ok(size) = Header::size_of(bytes, file_bytes) else {
        assert!(Header::read(bytes, file_bytes).is_err());
        return;
    };
    assert!(size > FIXED && size < bytes.len(), "{size} of {}", bytes.len());
    let mut header = bytes[..size].to_vec();
    if Header::read(&header, file_bytes).is_err() {
        // As a writer of these fields would have written it.
        let mut hash = blake3::Hasher::new();
        hash.update(&header[..FIXED - HASH]).update(&header[FIXED..]);
        header[FIXED - HASH..FIXED].copy_from_slice(hash.finalize().as_bytes());
    }
    let read = Header::read(&header, file_bytes).expect("its sum is right");
    assert_eq!(read.to_bytes(), header);
    assert_eq!(read.hashes.len() as u64, read.bytes.div_ceil(read.piece));
    assert!(Header::read(&header[..size - 1], file_bytes).is_err() && Header::read(&header, file_bytes + 1).is_err());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_as_it_was_written() {
        let header = Header { key: [3; 32], bytes: 9000, piece: 4096, hashes: vec![[1; 32], [2; 32], [3; 32]] };
        let mut entry = header.to_bytes();
        assert_eq!(entry.len() as u64, Header::size(9000, 4096));
        entry.resize(entry.len() + 9000, 7);
        let file_bytes = entry.len() as u64;
        let size = Header::size_of(&entry, file_bytes).expect("an entry");
        assert_eq!(Header::read(&entry[..size], file_bytes).expect("whole"), header);
        check_entry(&entry);
        for (at, bit) in (0..size).flat_map(|at| (0..8).map(move |bit| (at, bit))) {
            let mut changed = entry.clone();
            changed[at] ^= 1 << bit;
            let read =
                Header::size_of(&changed, file_bytes).and_then(|size| Header::read(&changed[..size], file_bytes));
            assert!(read.is_err(), "bit {bit} of byte {at}");
        }
    }

    #[test]
    fn sizes_out_of_bounds_are_refused_before_memory_is_taken() {
        for (bytes, piece) in
            [(0, 4096), (1, 0), (u64::MAX, 4096), (BYTES_MAX + 1, 64 << 20), (9000, 4095), (9000, 65 << 20)]
        {
            let header = Header { key: [0; 32], bytes, piece, hashes: Vec::new() }.to_bytes();
            for file_bytes in [0, 9000, u64::MAX] {
                assert!(
                    matches!(Header::size_of(&header, file_bytes), Err(EntryError::Sizes { .. })),
                    "{bytes} {piece}"
                );
            }
        }
        assert!(matches!(Header::size_of(b"PSTKWF01", 9000), Err(EntryError::Mark)));
    }
}
