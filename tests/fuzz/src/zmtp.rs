//! Bytes of a hostile peer, in two pieces: nothing panics, and nothing is kept beyond the limit.

use penstock_router::foreign::zmtp::{Role, Zmtp};

const MESSAGE_BYTES_MAX: usize = 1000;

pub(crate) fn run(bytes: &[u8]) {
    let Some((cut, bytes)) = bytes.split_first() else { return };
    let (first, second) = bytes.split_at(usize::from(*cut).min(bytes.len()));
    let mut client = Zmtp::new(Role::Sub, MESSAGE_BYTES_MAX);
    for piece in [first, second] {
        if client.feed(piece).is_err() {
            return;
        }
        while let Some(message) = client.message() {
            assert!(message.iter().map(Vec::len).sum::<usize>() <= MESSAGE_BYTES_MAX);
        }
        assert!(client.kept_bytes() <= MESSAGE_BYTES_MAX + 4096 + 64);
    }
}
