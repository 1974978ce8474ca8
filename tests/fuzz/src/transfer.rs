//! Bytes of a hostile peer on a transfer connection: decoded frames encode again, and a page that passes its checksum
//! has the hashed bytes.

use bytes::BytesMut;
use penstock_proto::codec::{decode_within, encode};
use penstock_proto::transfer::{Answer, AnswerBody, Ask, AskBody, BLOCKS_MAX, PAGE_BYTES_MAX, checksum};

pub(crate) fn run(bytes: &[u8]) {
    let mut input = BytesMut::from(bytes);
    while let Ok(Some(answer)) = decode_within::<Answer>(&mut input, PAGE_BYTES_MAX + 1024) {
        if let Some(AnswerBody::Page(page)) = &answer.body {
            assert_eq!(page.is_whole(), page.checksum == checksum(page.block, page.layer, &page.bytes));
        }
        encode(&answer, &mut BytesMut::new()).expect("it came out of a frame");
    }
    let mut input = BytesMut::from(bytes);
    while let Ok(Some(ask)) = decode_within::<Ask>(&mut input, PAGE_BYTES_MAX) {
        if let Some(AskBody::Fetch(fetch)) = &ask.body {
            assert!(fetch.names().is_none_or(|names| names.len() <= BLOCKS_MAX));
        }
        encode(&ask, &mut BytesMut::new()).expect("it came out of a frame");
    }
}
