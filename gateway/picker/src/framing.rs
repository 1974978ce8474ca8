//! Messages of a gRPC stream: five bytes in front of each, its compression and its length.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use penstock_http::Growth;
use prost::Message;

/// Bytes in front of a message.
const PREFIX_BYTES: usize = 5;
/// Largest message behind which its buffer is used again.
const KEPT_BYTES: usize = 64 * 1024;

/// Reader of a stream's messages out of its bytes, in any pieces.
#[derive(Debug, Default)]
pub struct Reader {
    held: BytesMut,
}

/// Reason why the bytes are no messages that this service takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameFault {
    /// The message is compressed, which the service has not offered.
    Compressed,
    /// The message is longer than allowed.
    TooLong,
    /// The stream ends within a message.
    Cut,
}

impl Reader {
    /// Adds bytes of the stream. A large message needs room first ([`Reader::growth`]).
    pub fn add(&mut self, bytes: &[u8]) {
        self.held.extend_from_slice(bytes);
    }

    /// Bytes of the buffer: what is held of messages which have not been taken, and the room behind.
    pub fn capacity(&self) -> usize {
        self.held.capacity()
    }

    /// Sizes to which the buffer has to grow before `more` bytes are added; `None`: they fit, or are few. The whole of a
    /// message is known from its front, and bytes that are announced cost no memory before they arrive.
    pub fn growth(&self, more: usize) -> Option<Growth> {
        let (held, needed) = (self.held.len(), self.held.len() + more);
        if needed <= self.held.capacity().max(KEPT_BYTES) {
            return None;
        }
        let length = self.held.get(1..PREFIX_BYTES).and_then(|length| length.try_into().ok()).map(u32::from_be_bytes);
        let whole = length.map_or(needed, |length| PREFIX_BYTES + length as usize);
        Some(Growth::of(held, more, whole))
    }

    /// Makes the buffer this large, not larger.
    pub fn grow(&mut self, capacity: usize) {
        let mut grown = BytesMut::with_capacity(capacity);
        grown.extend_from_slice(&self.held);
        self.held = grown;
    }

    /// Takes the next whole message of at most `bytes_max`; `None`: more bytes are needed.
    ///
    /// # Errors
    /// [`FrameFault`]; the stream cannot go on.
    pub fn next(&mut self, bytes_max: usize) -> Result<Option<Bytes>, FrameFault> {
        let Some((prefix, rest)) = self.held.split_at_checked(PREFIX_BYTES) else { return Ok(None) };
        if prefix[0] != 0 {
            return Err(FrameFault::Compressed);
        }
        let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
        if length > bytes_max {
            return Err(FrameFault::TooLong);
        }
        if rest.len() < length {
            return Ok(None);
        }
        self.held.advance(PREFIX_BYTES);
        let message = self.held.split_to(length).freeze();
        if length > KEPT_BYTES {
            // The rest would keep the message's whole buffer alive, and a stream may live for an hour.
            self.held = BytesMut::from(&self.held[..]);
        }
        Ok(Some(message))
    }

    /// Checks that the stream ends between two messages.
    ///
    /// # Errors
    /// [`FrameFault::Cut`].
    pub fn end(&self) -> Result<(), FrameFault> {
        if self.held.is_empty() { Ok(()) } else { Err(FrameFault::Cut) }
    }
}

/// Bytes of a message with what goes in front of it.
pub fn framed(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut out = BytesMut::with_capacity(PREFIX_BYTES + length);
    out.put_u8(0);
    out.put_u32(u32::try_from(length).expect("messages are bounded far below 4 GiB"));
    message.encode(&mut out).expect("the buffer grows");
    out.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::HealthCheckRequest;

    #[test]
    fn messages_come_out_of_any_pieces() {
        let message = |service: &str| HealthCheckRequest { service: service.into() };
        let stream = [framed(&message("")), framed(&message("readiness")), framed(&message("x"))].concat();
        assert_eq!(stream[..5], [0, 0, 0, 0, 0]);
        assert_eq!(stream[5..12], [0, 0, 0, 0, 11, 0x0a, 9]);
        for piece in 1..stream.len() {
            let (mut reader, mut out) = (Reader::default(), Vec::new());
            for bytes in stream.chunks(piece) {
                reader.add(bytes);
                while let Some(bytes) = reader.next(64).expect("whole") {
                    out.push(HealthCheckRequest::decode(bytes).expect("a message").service);
                }
            }
            assert_eq!((out.join("|").as_str(), reader.end()), ("|readiness|x", Ok(())));
        }
    }

    #[test]
    fn the_buffer_of_a_large_message_goes_with_it() {
        let large = [&[0, 0, 16, 0, 0][..], &[7; 1 << 20]].concat();
        for rest in [&[][..], &[0, 0, 0]] {
            let mut reader = Reader::default();
            large.chunks(10_000).chain([rest]).for_each(|piece| reader.add(piece));
            assert_eq!(reader.next(1 << 20).expect("no fault").map(|message| message.len()), Some(1 << 20));
            assert!(
                reader.held.capacity() <= KEPT_BYTES && reader.held.len() == rest.len(),
                "{}",
                reader.held.capacity()
            );
            reader.add(&framed(&HealthCheckRequest { service: "x".into() })[rest.len()..]);
            assert_eq!(reader.next(64).expect("no fault").map(|message| message.len()), Some(3));
        }
    }

    /// A buffer is as large as was charged for it, and at most a little larger than its message.
    #[test]
    fn a_buffer_grows_as_it_is_told_to() {
        const WHOLE: usize = PREFIX_BYTES + (1 << 20);
        for halved in [false, true] {
            let (mut reader, mut sizes) = (Reader::default(), Vec::new());
            let large = [&[0, 0, 16, 0, 0][..], &[7; 1 << 20]].concat();
            for piece in large.chunks(16_384) {
                if let Some(Growth { double, eighth }) = reader.growth(piece.len()) {
                    assert!(eighth <= double && double <= (2 * reader.held.len()).max(piece.len()), "{sizes:?}");
                    let size = if halved { eighth } else { double };
                    reader.grow(size);
                    assert_eq!(reader.capacity(), size);
                    sizes.push(size);
                }
                let (before, is_large) = (reader.capacity(), reader.held.len() + piece.len() > KEPT_BYTES);
                reader.add(piece);
                assert!(reader.capacity() == before || !is_large, "it does not grow by itself");
            }
            assert_eq!(sizes.last(), Some(&WHOLE), "{sizes:?}");
            assert!(sizes.len() < if halved { 40 } else { 9 }, "{sizes:?}");
            assert_eq!(reader.next(1 << 20).expect("no fault").map(|message| message.len()), Some(1 << 20));
        }
    }

    #[test]
    fn bad_frames_are_faults() {
        let fault = |bytes: &[u8]| {
            let mut reader = Reader::default();
            reader.add(bytes);
            reader.next(8).and_then(|_| reader.end()).expect_err("a fault")
        };
        assert_eq!(fault(&[1, 0, 0, 0, 0]), FrameFault::Compressed);
        assert_eq!(fault(&[0, 0, 0, 0, 9]), FrameFault::TooLong);
        assert_eq!(fault(&[0, 0xff, 0xff, 0xff, 0xff]), FrameFault::TooLong);
        assert_eq!(fault(&[0, 0, 0, 0, 8, 1]), FrameFault::Cut);
        assert_eq!(fault(&[0, 0, 0]), FrameFault::Cut);
    }
}
