//! KV from worker to worker: one connection per transfer, opened by the worker that wants the blocks.
//!
//! ```text
//! asker → holder   Greeting   version, nonce, numerics, size of a block
//! holder → asker   Challenge  on connections that the operating system does not guard: the proofs of [`crate::handshake`]
//! asker → holder   Proof
//! holder → asker   Welcome
//! asker → holder   Fetch{hashes}          blocks that the holder has
//!                | Prefill{prompt, …}     blocks that the holder computes, sent layer by layer while it does; and the token after them
//! holder → asker   Page{block, layer, checksum, bytes | slot}…   in any order of blocks, ascending layers of each
//!                  Computed{blocks}       so many leading blocks are what their names say
//!                  First{tokens}          what comes after the prompt, once, if it was asked for and computed; it overtakes pages
//!                  Alive                  now and then, while there is nothing else to say
//!                  End{blocks, why}
//! asker → holder   Taken{slots}…          these may be written again
//! ```
//! On a Unix socket, between processes that share memory, a page's bytes need not go through the socket: the asker says in its greeting that it
//! can map memory, the descriptor of some comes beside the welcome, and the question says whether it was mapped (`through_memory`). Then a page
//! names the slot in which its bytes are. Whoever does not know of this, or has no such memory, sends and gets bytes.
//!
//! Between machines a transfer may have several connections: the asker names it in its greeting (`ticket`), and greets again on others with the
//! same name (`joins`). These get pages and an end of their own; all else is said on the first, whose end comes last.
//!
//! Frames are those of [`crate::codec`]. The asker closes the connection when it wants no more, which stops the holder at once; the holder
//! dies or closes, and the asker knows at once. A page is checked against what was asked for and its checksum, and its block is used only
//! if the holder vouched for it.

use crate::BlockHash;
use crate::frames::{Sampling, Token};
use crate::handshake::{Challenge, Proof};
use bytes::Bytes;
use prost::{Message, Oneof};

/// Version of this protocol; another one is refused.
pub const TRANSFER_VERSION: u32 = 1;

/// Blocks of one transfer at most: a context of 2 Mi tokens.
pub const BLOCKS_MAX: usize = 1 << 16;

/// Bytes of one page of one layer at most; a page is one frame.
pub const PAGE_BYTES_MAX: usize = 8 << 20;

/// Asker to holder.
#[derive(Clone, PartialEq, Message)]
pub struct Ask {
    /// What is said.
    #[prost(oneof = "AskBody", tags = "1, 2, 3, 4, 5")]
    pub body: Option<AskBody>,
    /// With a question: the memory that came with the welcome is mapped, pages may come through it.
    #[prost(bool, tag = "16")]
    pub through_memory: bool,
}

/// Bodies of [`Ask`].
#[derive(Clone, PartialEq, Oneof)]
pub enum AskBody {
    /// First frame.
    #[prost(message, tag = "1")]
    Greeting(Greeting),
    /// Answer to [`Challenge`].
    #[prost(message, tag = "2")]
    Proof(Proof),
    /// Wants blocks that exist.
    #[prost(message, tag = "3")]
    Fetch(Fetch),
    /// Wants blocks computed.
    #[prost(message, tag = "4")]
    Prefill(Prefill),
    /// Has taken pages out of slots.
    #[prost(message, tag = "5")]
    Taken(Taken),
}

/// Holder to asker.
#[derive(Clone, PartialEq, Message)]
pub struct Answer {
    /// What is said.
    #[prost(oneof = "AnswerBody", tags = "1, 2, 3, 4, 5, 6, 7, 8")]
    pub body: Option<AnswerBody>,
}

/// Bodies of [`Answer`].
#[derive(Clone, PartialEq, Oneof)]
pub enum AnswerBody {
    /// Asks for a proof, and gives one.
    #[prost(message, tag = "1")]
    Challenge(Challenge),
    /// Go on.
    #[prost(message, tag = "2")]
    Welcome(Welcome),
    /// One page of one layer.
    #[prost(message, tag = "3")]
    Page(Page),
    /// Leading blocks that can be used.
    #[prost(message, tag = "4")]
    Computed(Computed),
    /// Still there.
    #[prost(message, tag = "5")]
    Alive(Alive),
    /// Nothing more comes.
    #[prost(message, tag = "6")]
    End(End),
    /// It will not, and says why.
    #[prost(message, tag = "7")]
    Refused(Refused),
    /// The tokens after the prompt.
    #[prost(message, tag = "8")]
    First(First),
}

/// Opens a transfer.
#[derive(Clone, PartialEq, Message)]
pub struct Greeting {
    /// [`TRANSFER_VERSION`] of the sender.
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// Random bytes that the holder's proof must cover; empty on Unix sockets.
    #[prost(bytes = "vec", tag = "2")]
    pub nonce: Vec<u8>,
    /// Blocks mean the same only within equal numerics.
    #[prost(string, tag = "3")]
    pub numerics_id: String,
    /// Bytes of one block in wire order.
    #[prost(uint64, tag = "4")]
    pub block_bytes: u64,
    /// The sender can map memory whose descriptor comes beside the welcome.
    #[prost(bool, tag = "5")]
    pub maps_memory: bool,
    /// Random bytes that name a transfer of several connections; empty: it has this one.
    #[prost(bytes = "vec", tag = "6")]
    pub ticket: Vec<u8>,
    /// This is not the first of them. Nothing is asked on it: it gets pages, and an end of its own.
    #[prost(bool, tag = "7")]
    pub joins: bool,
}

/// The greeting is accepted.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Welcome {
    /// [`TRANSFER_VERSION`] of the sender.
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// Slots, of a page each, of the memory whose descriptor comes beside this; 0: none comes.
    #[prost(uint32, tag = "2")]
    pub slots: u32,
}

/// Slots whose pages the asker has: the holder may write them again.
#[derive(Clone, PartialEq, Message)]
pub struct Taken {
    /// Each named by a page before.
    #[prost(uint32, repeated, tag = "1")]
    pub slots: Vec<u32>,
}

/// Wants blocks by name.
#[derive(Clone, PartialEq, Message)]
pub struct Fetch {
    /// Part of a chain, in order, 16 bytes each; the leading ones that are there come.
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub hashes: Vec<Vec<u8>>,
}

impl Fetch {
    /// The names; `None` when they are no names, or too many.
    pub fn names(&self) -> Option<Vec<BlockHash>> {
        let few = self.hashes.len() <= BLOCKS_MAX;
        few.then(|| self.hashes.iter().map(|hash| BlockHash::from_bytes(hash)).collect())?
    }
}

/// Wants blocks of a prompt computed.
#[derive(Clone, PartialEq, Message)]
pub struct Prefill {
    /// The prompt from its first token to the last of the last block; to its end, and what was emitted after it, where a token is drawn.
    #[prost(uint32, repeated, tag = "1")]
    pub prompt: Vec<u32>,
    /// Salt of the request.
    #[prost(bytes = "vec", tag = "2")]
    pub salt: Vec<u8>,
    /// Lower runs first; 0 is normal.
    #[prost(int32, tag = "3")]
    pub priority: i32,
    /// First block that is wanted.
    #[prost(uint32, tag = "4")]
    pub first: u32,
    /// Blocks that are wanted.
    #[prost(uint32, tag = "5")]
    pub blocks: u32,
    /// Choices whose next token is to be drawn there, all after these same tokens; empty: the asker draws it.
    #[prost(uint32, repeated, tag = "6")]
    pub choices: Vec<u32>,
    /// How it is drawn; only with `choices`.
    #[prost(message, optional, tag = "7")]
    pub sampling: Option<Sampling>,
    /// Tokens at the end of `prompt` that are output of earlier attempts; only with `choices`.
    #[prost(uint32, tag = "8")]
    pub emitted: u32,
    /// That of the request (`frames::Generate::turn`).
    #[prost(sint64, tag = "9")]
    pub turn: i64,
    /// Whose counter that is (`frames::Hello::gateway`); 0 where it is not said.
    #[prost(uint64, tag = "10")]
    pub gateway: u64,
}

/// One page of one layer.
#[derive(Clone, PartialEq, Message)]
pub struct Page {
    /// Counted from the first block that was asked for.
    #[prost(uint32, tag = "1")]
    pub block: u32,
    /// The layer.
    #[prost(uint32, tag = "2")]
    pub layer: u32,
    /// [`checksum`] of the rest.
    #[prost(fixed32, tag = "3")]
    pub checksum: u32,
    /// In wire order; empty where a slot has them.
    #[prost(bytes = "bytes", tag = "4")]
    pub bytes: Bytes,
    /// The slot of the shared memory that has the bytes.
    #[prost(uint32, optional, tag = "5")]
    pub slot: Option<u32>,
}

impl Page {
    /// A page with its checksum.
    pub fn new(block: u32, layer: u32, bytes: Bytes) -> Self {
        Self { block, layer, checksum: checksum(block, layer, &bytes), bytes, slot: None }
    }

    /// A page whose bytes are in a slot.
    pub fn in_slot(block: u32, layer: u32, slot: u32, bytes: &[u8]) -> Self {
        Self { block, layer, checksum: checksum(block, layer, bytes), bytes: Bytes::new(), slot: Some(slot) }
    }

    /// Whether it is what was sent.
    pub fn is_whole(&self) -> bool {
        self.checksum == checksum(self.block, self.layer, &self.bytes)
    }
}

/// CRC-32 over place and bytes. Against damage on the way; who may speak is the handshake's.
pub fn checksum(block: u32, layer: u32, bytes: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&block.to_le_bytes());
    crc.update(&layer.to_le_bytes());
    crc.update(bytes);
    crc.finalize()
}

/// The steps that computed the first `blocks` blocks have ended well.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Computed {
    /// Counted from the first that was asked for.
    #[prost(uint32, tag = "1")]
    pub blocks: u32,
}

/// The next token of each choice that was asked for, drawn from the request's own randoms: what the asker would draw, bit by bit.
#[derive(Clone, PartialEq, Message)]
pub struct First {
    /// In the order in which they were asked for.
    #[prost(message, repeated, tag = "1")]
    pub tokens: Vec<FirstToken>,
    /// Prompt tokens that the holder read from its cache.
    #[prost(uint32, tag = "2")]
    pub cached_tokens: u32,
}

/// The next token of one choice.
#[derive(Clone, PartialEq, Message)]
pub struct FirstToken {
    /// The choice.
    #[prost(uint32, tag = "1")]
    pub choice: u32,
    /// With its log-probabilities, when the sampling asks for them.
    #[prost(message, optional, tag = "2")]
    pub token: Option<Token>,
}

/// Shows that the holder lives, and that its engine steps.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Alive {}

/// Nothing more comes.
#[derive(Clone, PartialEq, Message)]
pub struct End {
    /// As in the last [`Computed`].
    #[prost(uint32, tag = "1")]
    pub blocks: u32,
    /// Every page of these was sent.
    #[prost(bool, tag = "2")]
    pub complete: bool,
}

/// Why the holder does not send.
#[derive(Clone, PartialEq, Message)]
pub struct Refused {
    /// For the log.
    #[prost(string, tag = "1")]
    pub message: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::{decode, encode};
    use bytes::BytesMut;

    #[test]
    fn a_page_is_its_place_and_its_bytes() {
        let page = || Page::new(3, 1, Bytes::from_static(b"kv"));
        assert!(page().is_whole());
        assert!(!Page { block: 2, ..page() }.is_whole());
        assert!(!Page { layer: 0, ..page() }.is_whole());
        for bytes in [&b"kw"[..], b""] {
            assert!(!Page { bytes: Bytes::from_static(bytes), ..page() }.is_whole());
        }
    }

    #[test]
    fn a_page_goes_through_the_codec() {
        let page = Page::new(7, 27, vec![0xa5; 1 << 17].into());
        let mut wire = BytesMut::new();
        encode(&Answer { body: Some(AnswerBody::Page(page.clone())) }, &mut wire).expect("small enough");
        let back: Answer = decode(&mut wire).expect("our own").expect("whole");
        assert_eq!(back.body, Some(AnswerBody::Page(page)));
    }

    #[test]
    fn names_are_sixteen_bytes_and_not_too_many() {
        let names = |hashes: Vec<Vec<u8>>| Fetch { hashes }.names().map(|names| names.len());
        assert_eq!(names(vec![vec![1; 16]; 3]), Some(3));
        assert_eq!(names(vec![vec![1; 16], vec![1; 15]]), None);
        assert_eq!(names(vec![vec![1; 16]; BLOCKS_MAX + 1]), None);
    }
}
