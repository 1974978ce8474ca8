//! Growth policy of buffers that hold an incomplete unit.
//!
//! Doubling a buffer would, during the copy, hold three times the received bytes. Here a buffer above `SMALL_BYTES`
//! reserves eightfold, up to `AHEAD_BYTES_MAX`: untouched pages cost no memory, and the bytes copied on the way are
//! an eighth of the final size.

/// Size up to which a buffer grows as vectors do.
const SMALL_BYTES: usize = 64 << 10;
/// Most capacity reserved ahead of the received bytes.
const AHEAD_BYTES_MAX: usize = 64 << 20;

/// Reserves room for `more` bytes.
pub fn make_room(buffer: &mut Vec<u8>, more: usize) {
    let wanted = buffer.len() + more;
    if wanted > SMALL_BYTES && wanted > buffer.capacity() {
        let ahead = buffer.len().saturating_mul(8).min(AHEAD_BYTES_MAX);
        buffer.reserve_exact(wanted.max(ahead) - buffer.len());
    }
}

/// Appends `bytes`, growing as [`make_room`] does.
pub fn append(buffer: &mut Vec<u8>, bytes: &[u8]) {
    make_room(buffer, bytes.len());
    buffer.extend_from_slice(bytes);
}

/// Empties a buffer for reuse; the memory of one that has grown large is freed.
pub fn clear(buffer: &mut Vec<u8>) {
    if buffer.capacity() > SMALL_BYTES {
        *buffer = Vec::new();
    }
    buffer.clear();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_growing_buffer_is_copied_seldom() {
        let (mut buffer, mut copied, mut moves) = (Vec::new(), 0, 0);
        let piece = [7; 16 << 10];
        for _ in 0..2048 {
            let (before, held) = (buffer.capacity(), buffer.len());
            append(&mut buffer, &piece);
            if buffer.capacity() != before && before > SMALL_BYTES {
                (copied, moves) = (copied + held, moves + 1);
            }
        }
        assert_eq!(buffer.len(), 32 << 20);
        assert!(moves <= 3 && copied <= buffer.len() / 4, "{moves} moves of {copied} bytes");
        assert!(buffer.capacity() <= AHEAD_BYTES_MAX);
        clear(&mut buffer);
        assert_eq!(buffer.capacity(), 0);
    }
}
