//! Bytes of a hostile peer, in two pieces: decoded frames encode again, and nothing panics or grows.

use bytes::BytesMut;
use penstock_proto::codec::{decode, encode};
use penstock_proto::frames::{Down, Up};

fn feed<M: prost::Message + Default>(pieces: [&[u8]; 2]) {
    let mut input = BytesMut::new();
    for piece in pieces {
        input.extend_from_slice(piece);
        while let Ok(Some(message)) = decode::<M>(&mut input) {
            let mut again = BytesMut::new();
            encode(&message, &mut again).expect("it came out of a frame");
            // NaN is not equal to itself, so frames are compared as bytes.
            let back = decode::<M>(&mut again).expect("our own bytes").expect("a whole frame");
            let mut twice = BytesMut::new();
            encode(&back, &mut twice).expect("as before");
            let mut once = BytesMut::new();
            encode(&message, &mut once).expect("as before");
            assert_eq!(once, twice);
        }
    }
}

pub(crate) fn run(bytes: &[u8]) {
    let Some((cut, bytes)) = bytes.split_first() else { return };
    let (first, second) = bytes.split_at(usize::from(*cut).min(bytes.len()));
    feed::<Down>([first, second]);
    feed::<Up>([first, second]);
}
