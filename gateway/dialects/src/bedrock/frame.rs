//! AWS event stream: messages in binary frames, read in pieces cut anywhere.
//!
//! ```text
//! total length  headers length  CRC of these 8  headers            payload   CRC of everything before
//! 4 bytes       4 bytes         4 bytes         name, type, value… …         4 bytes
//! ```
//! Numbers are big endian, checksums CRC-32 (as in zip). Follows the encoding of the AWS SDKs
//! (smithy.io/2.0/aws/amazon-eventstream.html). Both checksums are verified; an incomplete frame is buffered, and its
//! size is bounded by [`MESSAGE_BYTES_MAX`].

use penstock_types::room::{append, clear};

/// Longest message in bytes, the same bound as in the AWS SDKs.
pub const MESSAGE_BYTES_MAX: usize = 24 << 20;

const PRELUDE: usize = 12;
const CRC: usize = 4;

/// Fault in a stream of frames, after which nothing of it can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameFault {
    /// The prelude's checksum does not fit.
    #[error("the checksum of a frame's prelude is wrong")]
    PreludeCrc,
    /// The message's checksum does not fit.
    #[error("the checksum of a frame is wrong")]
    MessageCrc,
    /// Total and header lengths that no message can have.
    #[error("a frame of {0} bytes with {1} bytes of headers")]
    Lengths(u32, u32),
    /// Headers that cannot be read.
    #[error("a frame's headers cannot be read")]
    Headers,
}

/// One message of the stream, borrowed from the bytes read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    headers: &'a [u8],
    /// Payload of the message, without headers and checksums.
    pub payload: &'a [u8],
}

impl<'a> Frame<'a> {
    /// Value of the header `name`, if it is a string.
    pub fn header(&self, name: &str) -> Option<&'a str> {
        let mut rest = self.headers;
        while let Some((given, value, after)) = header(rest) {
            if given == name.as_bytes() {
                return value.and_then(|value| std::str::from_utf8(value).ok());
            }
            rest = after;
        }
        None
    }
}

/// Name, value, and the rest of the bytes.
type Header<'a> = (&'a [u8], Option<&'a [u8]>, &'a [u8]);

/// Splits off the first header: its name, its value if it is a string, the rest of the bytes.
fn header(bytes: &[u8]) -> Option<Header<'_>> {
    let (&size, rest) = bytes.split_first()?;
    let (name, rest) = rest.split_at_checked(usize::from(size))?;
    let (&kind, rest) = rest.split_first()?;
    let fixed = match kind {
        0 | 1 => 0, // true, false
        2 => 1,     // byte
        3 => 2,     // short
        4 => 4,     // integer
        5 | 8 => 8, // long, timestamp
        9 => 16,    // uuid
        6 | 7 => {
            let (size, rest) = rest.split_first_chunk::<2>()?;
            let (value, rest) = rest.split_at_checked(usize::from(u16::from_be_bytes(*size)))?;
            return Some((name, (kind == 7).then_some(value), rest));
        }
        _ => return None,
    };
    rest.split_at_checked(fixed).map(|(_, rest)| (name, None, rest))
}

/// Returns true if the bytes are a sequence of whole headers.
fn are_headers(mut bytes: &[u8]) -> bool {
    while !bytes.is_empty() {
        let Some((_, _, rest)) = header(bytes) else { return false };
        bytes = rest;
    }
    true
}

/// Reader of one event stream.
#[derive(Debug, Default)]
pub struct FrameReader {
    held: Vec<u8>,
}

impl FrameReader {
    /// Takes the next bytes and calls `each` with every message that they complete. An error of `each` stops the
    /// reading.
    ///
    /// # Errors
    /// [`FrameFault`], or the error that `each` returned.
    pub fn push<E: From<FrameFault>>(
        &mut self,
        bytes: &[u8],
        mut each: impl FnMut(Frame<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut rest = bytes;
        if !self.held.is_empty() {
            // Complete the buffered frame first, then read the rest in place.
            while let Some(missing) = missing(&self.held)? {
                let (now, later) = rest.split_at(missing.min(rest.len()));
                append(&mut self.held, now);
                rest = later;
                if now.len() < missing {
                    return Ok(());
                }
            }
            let mut held = std::mem::take(&mut self.held);
            each(frame(&held)?)?;
            // The buffer keeps its capacity for the next frame that is cut.
            clear(&mut held);
            self.held = held;
        }
        loop {
            if rest.is_empty() {
                return Ok(());
            }
            if missing(rest)?.is_some() {
                append(&mut self.held, rest);
                return Ok(());
            }
            let (now, later) = rest.split_at(total(rest));
            each(frame(now)?)?;
            rest = later;
        }
    }

    /// Bytes buffered of an incomplete message.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Returns true if a message has begun and not ended.
    pub fn is_inside(&self) -> bool {
        !self.held.is_empty()
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|word| word.try_into().ok()).map_or(0, u32::from_be_bytes)
}

/// Length of the frame whose prelude is present.
fn total(bytes: &[u8]) -> usize {
    word(bytes, 0) as usize
}

/// Bytes that the first frame lacks; `None` if the frame is whole. The prelude's checksum is verified as soon as its
/// bytes are there.
fn missing(bytes: &[u8]) -> Result<Option<usize>, FrameFault> {
    if bytes.len() < PRELUDE {
        return Ok(Some(PRELUDE - bytes.len()));
    }
    let (total, headers) = (word(bytes, 0), word(bytes, 4));
    if crc32fast::hash(&bytes[..8]) != word(bytes, 8) {
        return Err(FrameFault::PreludeCrc);
    }
    let size = total as usize;
    if !(PRELUDE + CRC..=MESSAGE_BYTES_MAX).contains(&size) || headers as usize > size - PRELUDE - CRC {
        return Err(FrameFault::Lengths(total, headers));
    }
    Ok(size.checked_sub(bytes.len()).filter(|missing| *missing > 0))
}

/// Reads the frame at the start of `bytes`, whose lengths were checked before, and compares its checksum.
fn frame(bytes: &[u8]) -> Result<Frame<'_>, FrameFault> {
    let bytes = &bytes[..total(bytes)];
    let (message, crc) = bytes.split_at(bytes.len() - CRC);
    if crc32fast::hash(message) != word(crc, 0) {
        return Err(FrameFault::MessageCrc);
    }
    let (headers, payload) = message[PRELUDE..].split_at(word(bytes, 4) as usize);
    if !are_headers(headers) {
        return Err(FrameFault::Headers);
    }
    Ok(Frame { headers, payload })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message from the AWS SDKs' test vectors: one header, one payload.
    const VECTOR: &[u8] = b"\x00\x00\x00\x3d\x00\x00\x00\x20\x07\xfd\x83\x96\x0ccontent-type\x07\x00\x10application/json{'foo':'bar'}\x8d\x9c\x08\xb1";

    fn read(pieces: &[&[u8]]) -> Result<Vec<(String, Vec<u8>)>, FrameFault> {
        let (mut reader, mut all) = (FrameReader::default(), Vec::new());
        for piece in pieces {
            reader.push(piece, |frame| {
                all.push((frame.header("content-type").unwrap_or_default().to_owned(), frame.payload.to_vec()));
                Ok::<(), FrameFault>(())
            })?;
        }
        assert!(!reader.is_inside());
        Ok(all)
    }

    #[test]
    fn frames_are_the_same_however_they_are_cut() {
        let one = ("application/json".to_owned(), b"{'foo':'bar'}".to_vec());
        let stream = [VECTOR, VECTOR].concat();
        for cut in 0..=stream.len() {
            for second in cut..=stream.len() {
                let pieces = [&stream[..cut], &stream[cut..second], &stream[second..]];
                assert_eq!(read(&pieces), Ok(vec![one.clone(), one.clone()]), "{cut} {second}");
            }
        }
    }

    #[test]
    fn every_changed_byte_is_noticed() {
        for at in 0..VECTOR.len() {
            let mut bytes = VECTOR.to_vec();
            bytes[at] ^= 1;
            let mut reader = FrameReader::default();
            let read = reader.push(&bytes, |_| Ok::<(), FrameFault>(()));
            assert!(matches!(read, Err(FrameFault::PreludeCrc | FrameFault::MessageCrc)), "{at}: {read:?}");
        }
    }

    fn prelude(total: u32, headers: u32) -> Vec<u8> {
        let mut bytes = [total.to_be_bytes(), headers.to_be_bytes()].concat();
        bytes.extend(crc32fast::hash(&bytes).to_be_bytes());
        bytes
    }

    #[test]
    fn lengths_are_checked_before_anything_is_held() {
        for (total, headers) in [(0, 0), (15, 0), (16, 1), (u32::MAX, 0), (u32::MAX, u32::MAX), (25 << 20, 0)] {
            let mut reader = FrameReader::default();
            let read = reader.push(&prelude(total, headers), |_| Ok::<(), FrameFault>(()));
            assert_eq!(read, Err(FrameFault::Lengths(total, headers)));
        }
    }

    #[test]
    fn headers_of_every_type_are_passed_over() {
        let mut headers = Vec::new();
        for (kind, size) in [(0, 0), (1, 0), (2, 1), (3, 2), (4, 4), (5, 8), (8, 8), (9, 16)] {
            headers.extend([1, b'a', kind]);
            headers.extend(vec![7; size]);
        }
        headers.extend(b"\x01a\x06\x00\x02xy\x01b\x07\x00\x01z");
        let mut bytes = prelude(16 + headers.len() as u32, headers.len() as u32);
        bytes.extend(&headers);
        bytes.extend(crc32fast::hash(&bytes).to_be_bytes());
        let mut seen = Vec::new();
        let each = |frame: Frame<'_>| {
            seen.push((frame.header("a").map(str::to_owned), frame.header("b").map(str::to_owned)));
            Ok::<(), FrameFault>(())
        };
        FrameReader::default().push(&bytes, each).expect("good");
        assert_eq!(seen, [(None, Some("z".to_owned()))]);
    }
}
