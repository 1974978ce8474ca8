//! Strict decoder of chunked bodies (RFC 9112, section 7.1): bytes in, payload out, no I/O.
//!
//! Chunk sizes are bare hex digits; extensions and trailers are skipped within a small bound. Cost is linear in the
//! bytes received, whatever the size of the chunks; the framing overhead of tiny chunks is bounded by
//! `Decoder::overhead_max`.

/// Most bytes of the extensions of one chunk.
const EXTENSION_BYTES_MAX: usize = 256;
/// Most bytes of all trailers together.
const TRAILER_BYTES_MAX: usize = 4096;
/// Framing bytes that are free before the ratio to the payload counts.
const OVERHEAD_BYTES_FREE: usize = 64 * 1024;

/// Error of an invalid chunked body, with its reason for the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ChunkFault(pub &'static str);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// At or in the hex digits of a chunk size; `value` is the size read so far.
    Size { digits: u8, value: u64 },
    /// In an extension, this many bytes of it seen.
    Extension { value: u64, seen: usize },
    /// The size line's LF must follow.
    SizeEnd { value: u64 },
    /// In the payload of a chunk, with `left` bytes still to come.
    Data { left: u64 },
    /// The payload's CR must follow.
    DataCr,
    /// The payload's LF must follow.
    DataLf,
    /// In the trailers: bytes in the current line.
    Trailer { line: usize },
    /// LF of a trailer line (or of the end) must follow.
    TrailerLf { line: usize },
    /// All of the body has been read, trailers included.
    Done,
}

/// Decoder of one body. Feed bytes until [`Decoder::is_done`].
#[derive(Debug)]
pub struct Decoder {
    state: State,
    payload: usize,
    overhead: usize,
    trailers: usize,
}

impl Default for Decoder {
    fn default() -> Self {
        Self { state: State::Size { digits: 0, value: 0 }, payload: 0, overhead: 0, trailers: 0 }
    }
}

impl Decoder {
    /// Returns true if the last chunk and its trailers have been read.
    pub fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Framing bytes allowed for the payload so far: a fair body spends a few bytes per kilobyte, an attacker five per
    /// byte.
    fn overhead_max(&self) -> usize {
        OVERHEAD_BYTES_FREE + self.payload
    }

    /// Decodes `input` and appends the payload to `out`. Returns the bytes consumed: all of them, or up to the end of
    /// the body. The caller bounds `out`: the payload is at most as long as `input`.
    pub fn feed(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<usize, ChunkFault> {
        self.feed_up_to(usize::MAX, input, out)
    }

    /// Like [`Decoder::feed`], but stops in front of payload that would make `out` longer than `bytes_max`: then it has
    /// consumed less than `input`, and [`Decoder::is_done`] is false.
    pub fn feed_up_to(&mut self, bytes_max: usize, input: &[u8], out: &mut Vec<u8>) -> Result<usize, ChunkFault> {
        let mut at = 0;
        while at < input.len() && self.state != State::Done {
            if let State::Data { left } = self.state {
                let room = bytes_max.saturating_sub(out.len());
                let take = usize::try_from(left).unwrap_or(usize::MAX).min(input.len() - at).min(room);
                if take == 0 {
                    return Ok(at);
                }
                out.extend_from_slice(&input[at..at + take]);
                at += take;
                self.payload += take;
                let left = left - take as u64;
                self.state = if left == 0 { State::DataCr } else { State::Data { left } };
                continue;
            }
            self.state = self.step(input[at])?;
            at += 1;
            self.overhead += 1;
            if self.overhead > self.overhead_max() {
                return Err(ChunkFault("the chunks are too small for what they carry"));
            }
        }
        Ok(at)
    }

    fn step(&mut self, byte: u8) -> Result<State, ChunkFault> {
        Ok(match (self.state, byte) {
            (State::Size { digits, value }, byte) if byte.is_ascii_hexdigit() => {
                if digits == 15 {
                    return Err(ChunkFault("a chunk size is too large"));
                }
                let digit = u64::from((byte as char).to_digit(16).unwrap_or(0));
                State::Size { digits: digits + 1, value: value * 16 + digit }
            }
            (State::Size { digits: 1.., value }, b';') => State::Extension { value, seen: 0 },
            (State::Size { digits: 1.., value }, b'\r') => State::SizeEnd { value },
            (State::Size { .. }, _) => return Err(ChunkFault("a chunk size is not a hexadecimal number")),
            (State::Extension { value, .. }, b'\r') => State::SizeEnd { value },
            (State::Extension { .. }, 0..=8 | 10..=31 | 127) => {
                return Err(ChunkFault("a chunk extension has control characters"));
            }
            (State::Extension { value, seen }, _) if seen < EXTENSION_BYTES_MAX => {
                State::Extension { value, seen: seen + 1 }
            }
            (State::Extension { .. }, _) => return Err(ChunkFault("a chunk extension is too long")),
            (State::SizeEnd { value: 0 }, b'\n') => State::Trailer { line: 0 },
            (State::SizeEnd { value }, b'\n') => State::Data { left: value },
            (State::DataCr, b'\r') => State::DataLf,
            (State::DataLf, b'\n') => State::Size { digits: 0, value: 0 },
            (State::Trailer { line }, b'\r') => State::TrailerLf { line },
            (State::Trailer { .. }, 0..=8 | 10..=31 | 127) => {
                return Err(ChunkFault("a trailer has control characters"));
            }
            (State::Trailer { line }, _) => {
                self.trailers += 1;
                if self.trailers > TRAILER_BYTES_MAX {
                    return Err(ChunkFault("the trailers are too long"));
                }
                State::Trailer { line: line + 1 }
            }
            (State::TrailerLf { line: 0 }, b'\n') => State::Done,
            (State::TrailerLf { .. }, b'\n') => State::Trailer { line: 0 },
            (State::Data { .. } | State::Done, _) => unreachable!("feed handles payload and end"),
            _ => return Err(ChunkFault("a chunk does not end where its size says")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(input: &[u8], piece: usize) -> Result<(Vec<u8>, usize, bool), ChunkFault> {
        let (mut decoder, mut out, mut used) = (Decoder::default(), Vec::new(), 0);
        for part in input.chunks(piece) {
            let took = decoder.feed(part, &mut out)?;
            used += took;
            if took < part.len() {
                break;
            }
        }
        Ok((out, used, decoder.is_done()))
    }

    #[test]
    fn decodes_at_every_split() {
        let body = b"5\r\nhello\r\n6;a=\"b\"\r\n world\r\n0\r\nx: y\r\n\r\nGET";
        for piece in 1..=body.len() {
            let (out, used, done) = decode(body, piece).expect("valid");
            assert_eq!((out.as_slice(), used, done), (&b"hello world"[..], body.len() - 3, true), "pieces of {piece}");
        }
    }

    #[test]
    fn stops_in_front_of_payload_beyond_a_bound() {
        let body = b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n";
        for (bytes_max, used, done) in [(4, 7, false), (5, 13, false), (10, 18, false), (11, body.len(), true)] {
            let (mut decoder, mut out) = (Decoder::default(), Vec::new());
            assert_eq!(decoder.feed_up_to(bytes_max, body, &mut out), Ok(used), "{bytes_max}");
            assert_eq!((out.as_slice(), decoder.is_done()), (&b"hello world"[..bytes_max], done), "{bytes_max}");
        }
    }

    #[test]
    fn refuses_bad_sizes() {
        for body in [
            &b"+5\r\nhello\r\n0\r\n\r\n"[..],
            b" 5\r\nhello\r\n0\r\n\r\n",
            b"5 \r\nhello\r\n0\r\n\r\n",
            b"0x5\r\nhello\r\n0\r\n\r\n",
            b"-1\r\n",
            b"\r\n",
            b";a\r\n",
            b"5\nhello\n0\n\n",
            b"5\rhello",
            b"5\r\nhelloX\r\n0\r\n\r\n",
            b"5\r\nhello\n0\r\n\r\n",
            b"FFFFFFFFFFFFFFFFF\r\n",
            b"1;\n\r\n",
            b"0\r\nx\0: y\r\n\r\n",
            b"0\r\nx: y\n\r\n",
        ] {
            assert!(decode(body, body.len()).is_err(), "{:?}", String::from_utf8_lossy(body));
        }
        let long = [&b"1;"[..], &vec![b'a'; 300], b"\r\nx\r\n0\r\n\r\n"].concat();
        assert!(decode(&long, 64).is_err());
        let trailers = [&b"0\r\n"[..], &vec![b'a'; 5000], b"\r\n\r\n"].concat();
        assert!(decode(&trailers, 64).is_err());
    }

    #[test]
    fn bounds_the_overhead_of_tiny_chunks() {
        let body = b"1\r\nx\r\n".repeat(200_000);
        assert_eq!(decode(&body, 4096), Err(ChunkFault("the chunks are too small for what they carry")));
        let fair = [&b"400\r\n"[..], &vec![b'x'; 1024], b"\r\n"].concat().repeat(500);
        assert!(decode(&fair, 4096).is_ok());
    }

    proptest::proptest! {
        #[test]
        fn never_panics(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..300), piece in 1usize..50) {
            let _ = decode(&bytes, piece);
        }

        #[test]
        fn returns_what_was_sent(parts in proptest::collection::vec(proptest::collection::vec(0u8.., 1..200), 0..20)) {
            let mut body = Vec::new();
            for part in &parts {
                body.extend_from_slice(format!("{:x}\r\n", part.len()).as_bytes());
                body.extend_from_slice(part);
                body.extend_from_slice(b"\r\n");
            }
            body.extend_from_slice(b"0\r\n\r\n");
            let (out, used, done) = decode(&body, 7).expect("valid");
            proptest::prop_assert_eq!((out, used, done), (parts.concat(), body.len(), true));
        }
    }
}
