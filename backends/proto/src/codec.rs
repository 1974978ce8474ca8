//! Length-delimited frames, sans I/O: bytes in, messages out.
//!
//! Layout: `u32` little-endian length, then that many bytes of one prost message. A length above [`FRAME_BYTES_MAX`] is a
//! broken or hostile peer: the connection is closed, nothing is allocated.

use bytes::{Buf, BufMut, BytesMut};
use prost::Message;

/// Largest frame: a prompt of 1 Mi tokens (5 bytes each) and its parameters fit with room.
pub const FRAME_BYTES_MAX: usize = 16 << 20;

/// Error of a byte stream that is not a session.
#[derive(Debug, thiserror::Error)]
pub enum CodecError {
    /// The length field claims more than [`FRAME_BYTES_MAX`].
    #[error("frame of {bytes} bytes is above the limit")]
    TooLarge {
        /// Length that the header claims, in bytes.
        bytes: usize,
    },
    /// The bytes are not a valid message.
    #[error("frame does not decode")]
    Decode(#[from] prost::DecodeError),
}

/// Appends one frame to `out`.
///
/// # Errors
/// [`CodecError::TooLarge`] when the message exceeds [`FRAME_BYTES_MAX`]; `out` is unchanged then.
pub fn encode<M: Message>(message: &M, out: &mut BytesMut) -> Result<(), CodecError> {
    let bytes = message.encoded_len();
    if bytes > FRAME_BYTES_MAX {
        return Err(CodecError::TooLarge { bytes });
    }
    out.reserve(4 + bytes);
    out.put_u32_le(bytes as u32);
    message.encode(out).expect("BytesMut grows");
    Ok(())
}

/// Takes the next whole frame off the front of `input`; `None` when more bytes are needed.
///
/// # Errors
/// The connection cannot be used any more after an error.
pub fn decode<M: Message + Default>(input: &mut BytesMut) -> Result<Option<M>, CodecError> {
    decode_within(input, FRAME_BYTES_MAX)
}

/// Takes a frame as [`decode`] does, from a peer that may not send frames above `bytes_max`, such as one that has not
/// proved its key.
///
/// # Errors
/// As [`decode`].
pub fn decode_within<M: Message + Default>(input: &mut BytesMut, bytes_max: usize) -> Result<Option<M>, CodecError> {
    let Some(head) = input.first_chunk::<4>() else { return Ok(None) };
    let bytes = u32::from_le_bytes(*head) as usize;
    if bytes > bytes_max {
        return Err(CodecError::TooLarge { bytes });
    }
    if input.len() < 4 + bytes {
        return Ok(None);
    }
    input.advance(4);
    Ok(Some(M::decode(input.split_to(bytes))?))
}
