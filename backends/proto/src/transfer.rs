//! Protocol of KV transfers between workers: the worker that wants the blocks opens the connection.
//!
//! ```text
//! asker → holder   Greeting   version, nonce, numerics, size of a block
//! holder → asker   Challenge  on connections that the operating system does not guard: the proofs of [`crate::handshake`]
//! asker → holder   Proof
//! holder → asker   Welcome
//! asker → holder   Fetch{hashes}          blocks that the holder has
//!                | Prefill{prompt, …}     blocks that the holder computes, sent layer by layer while it does; and the token after them
//!                | AdaptedPrefill{…}      the same with an adapter
//! holder → asker   Page{block, layer, checksum, bytes | slot}…   in any order of blocks, ascending layers of each
//!                  Computed{blocks}       number of leading blocks that match their hashes
//!                  First{tokens}          what comes after the prompt, once, if it was asked for and computed; it overtakes pages
//!                  Alive                  now and then, while there is nothing else to say
//!                  End{blocks, why}
//! asker → holder   Taken{slots}…          these may be written again
//! ```
//! On a Unix socket, between processes that share memory, a page's bytes need not go through the socket: the asker's
//! greeting says that it can map memory, a file descriptor of shared memory comes beside the welcome, and the question
//! says whether it was mapped (`through_memory`). Then a page names the slot that holds its bytes. A peer without this
//! feature or such memory sends and receives bytes.
//!
//! Between machines a transfer may have several connections: the asker names the transfer in its greeting (`ticket`), and
//! opens further connections whose greetings carry the same ticket and `joins`. The joined connections carry pages and an
//! end of their own; all other frames go over the first, whose end comes last.
//!
//! Frames are those of [`crate::codec`]. The asker closes the connection when it wants no more, which stops the holder
//! at once; a holder that dies or closes is noticed by the asker at once. A page is checked against the request and
//! its checksum, and its block is used only if the holder vouched for it.

use crate::BlockHash;
use crate::frames::{Guide, Sampling, Token};
use crate::handshake::{Challenge, Proof};
use bytes::Bytes;
use prost::{Message, Oneof};

/// Version of this protocol; another one is refused.
pub const TRANSFER_VERSION: u32 = 1;

/// Most blocks of one transfer: a context of 2 Mi tokens.
pub const BLOCKS_MAX: usize = 1 << 16;

/// Largest page of one layer, in bytes; a page is one frame.
pub const PAGE_BYTES_MAX: usize = 8 << 20;

/// Frame from the asker to the holder.
#[derive(Clone, PartialEq, Message)]
pub struct Ask {
    /// The frame's one message; `None` in a frame without a body of a known tag.
    #[prost(oneof = "AskBody", tags = "1, 2, 3, 4, 5, 6")]
    pub body: Option<AskBody>,
    /// Set with a question if the memory that came with the welcome is mapped and pages may come through it.
    #[prost(bool, tag = "16")]
    pub through_memory: bool,
}

/// Bodies of [`Ask`]: handshake, one question, and the return of slots.
#[derive(Clone, PartialEq, Oneof)]
pub enum AskBody {
    /// First frame of a connection.
    #[prost(message, tag = "1")]
    Greeting(Greeting),
    /// Proof of the pool key by the asker, answering the holder's [`Challenge`].
    #[prost(message, tag = "2")]
    Proof(Proof),
    /// Request for blocks that the holder has in its prefix cache, by hash.
    #[prost(message, tag = "3")]
    Fetch(Fetch),
    /// Request for blocks of a prompt that the holder computes first.
    #[prost(message, tag = "4")]
    Prefill(Prefill),
    /// Return of slots whose pages have been copied out.
    #[prost(message, tag = "5")]
    Taken(Taken),
    /// [`Self::Prefill`] with an adapter. An earlier holder would pass over [`Prefill::adapter`] and send blocks of the
    /// model alone; it does not know this tag, so it answers with none.
    #[prost(message, tag = "6")]
    AdaptedPrefill(Prefill),
}

/// Frame from the holder to the asker.
#[derive(Clone, PartialEq, Message)]
pub struct Answer {
    /// The frame's one message; `None` in a frame without a body of a known tag.
    #[prost(oneof = "AnswerBody", tags = "1, 2, 3, 4, 5, 6, 7, 8")]
    pub body: Option<AnswerBody>,
}

/// Bodies of [`Answer`]: handshake, pages, and their confirmation.
#[derive(Clone, PartialEq, Oneof)]
pub enum AnswerBody {
    /// Demand for a proof, with the holder's own.
    #[prost(message, tag = "1")]
    Challenge(Challenge),
    /// Acceptance of the greeting: versions and numerics fit, and a question may follow.
    #[prost(message, tag = "2")]
    Welcome(Welcome),
    /// KV of one block in one layer, as bytes or as a slot of shared memory.
    #[prost(message, tag = "3")]
    Page(Page),
    /// Number of leading blocks whose steps succeeded, so that their pages can be used.
    #[prost(message, tag = "4")]
    Computed(Computed),
    /// Sign of life, sent while there is nothing else to say.
    #[prost(message, tag = "5")]
    Alive(Alive),
    /// End of the transfer or of a joined connection: the last frame of a connection.
    #[prost(message, tag = "6")]
    End(End),
    /// Refusal of the greeting or the question, with a reason for the log.
    #[prost(message, tag = "7")]
    Refused(Refused),
    /// First tokens after the prompt, one per requested choice.
    #[prost(message, tag = "8")]
    First(First),
}

/// Opening of a connection by the asker: version, numerics, block size, and the transfer that it joins.
#[derive(Clone, PartialEq, Message)]
pub struct Greeting {
    /// [`TRANSFER_VERSION`] of the asker.
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// Random bytes that the holder's proof must cover; empty on Unix sockets.
    #[prost(bytes = "vec", tag = "2")]
    pub nonce: Vec<u8>,
    /// Numerics id of the asker: blocks are comparable only within equal numerics.
    #[prost(string, tag = "3")]
    pub numerics_id: String,
    /// Bytes of one block in wire order, `[layer][page]`; the holder must have the same.
    #[prost(uint64, tag = "4")]
    pub block_bytes: u64,
    /// True if the sender can map memory whose descriptor comes beside the welcome.
    #[prost(bool, tag = "5")]
    pub maps_memory: bool,
    /// Random bytes that name a transfer of several connections; empty for a transfer with only this one.
    #[prost(bytes = "vec", tag = "6")]
    pub ticket: Vec<u8>,
    /// True if this connection joins a transfer begun on another. Nothing is asked on it: it carries pages, and an end
    /// of its own.
    #[prost(bool, tag = "7")]
    pub joins: bool,
}

/// Acceptance of the greeting by the holder, with the shared memory it offers.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Welcome {
    /// [`TRANSFER_VERSION`] of the holder.
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// Number of page-sized slots in the memory whose descriptor comes beside this frame; 0 if none comes.
    #[prost(uint32, tag = "2")]
    pub slots: u32,
}

/// Slots whose pages the asker has copied out: the holder may write them again.
#[derive(Clone, PartialEq, Message)]
pub struct Taken {
    /// Slot numbers, each named by an earlier page.
    #[prost(uint32, repeated, tag = "1")]
    pub slots: Vec<u32>,
}

/// Request for blocks that the holder has, by their hashes.
#[derive(Clone, PartialEq, Message)]
pub struct Fetch {
    /// Part of a chain, in order, 16 bytes each; the holder sends the leading ones that it has.
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub hashes: Vec<Vec<u8>>,
}

impl Fetch {
    /// Hashes in the request; `None` when one is malformed, or there are too many.
    pub fn names(&self) -> Option<Vec<BlockHash>> {
        let few = self.hashes.len() <= BLOCKS_MAX;
        few.then(|| self.hashes.iter().map(|hash| BlockHash::from_bytes(hash)).collect())?
    }
}

/// Request to compute blocks of a prompt.
#[derive(Clone, PartialEq, Message)]
pub struct Prefill {
    /// Prompt from its first token to the last one of the last wanted block. Where a token is to be drawn, the prompt
    /// goes to its end and includes the tokens emitted after it.
    #[prost(uint32, repeated, tag = "1")]
    pub prompt: Vec<u32>,
    /// Salt of the block hashes, as in `frames::Generate::salt`: equal prompts share blocks only within one salt.
    #[prost(bytes = "vec", tag = "2")]
    pub salt: Vec<u8>,
    /// Priority; lower runs first, 0 is normal.
    #[prost(int32, tag = "3")]
    pub priority: i32,
    /// Index of the first wanted block in the prompt; the asker has the blocks before it.
    #[prost(uint32, tag = "4")]
    pub first: u32,
    /// Number of wanted blocks, from `first` on.
    #[prost(uint32, tag = "5")]
    pub blocks: u32,
    /// Choices whose next token the holder draws, all after these same tokens; empty if the asker draws it.
    #[prost(uint32, repeated, tag = "6")]
    pub choices: Vec<u32>,
    /// Sampling parameters of the draw; only with `choices`.
    #[prost(message, optional, tag = "7")]
    pub sampling: Option<Sampling>,
    /// Tokens at the end of `prompt` that are output of earlier attempts; only with `choices`.
    #[prost(uint32, tag = "8")]
    pub emitted: u32,
    /// Fair-share turn of the request (`frames::Generate::turn`).
    #[prost(sint64, tag = "9")]
    pub turn: i64,
    /// Id of the gateway that counts the turn (`frames::Hello::gateway`); 0 if unknown.
    #[prost(uint64, tag = "10")]
    pub gateway: u64,
    /// Grammar of the drawn token, applied to the output (`emitted` and what follows); only with `choices`.
    #[prost(message, optional, tag = "11")]
    pub grammar: Option<Guide>,
    /// Adapter that the model runs with, as in `frames::Generate::adapter`; empty for the model alone. Set exactly in
    /// [`AskBody::AdaptedPrefill`].
    #[prost(bytes = "vec", tag = "12")]
    pub adapter: Vec<u8>,
}

/// One page: the KV of one block in one layer, with a checksum.
#[derive(Clone, PartialEq, Message)]
pub struct Page {
    /// Index of the block, counted from the first one requested.
    #[prost(uint32, tag = "1")]
    pub block: u32,
    /// Index of the layer, from 0; the pages of a block come in ascending layers.
    #[prost(uint32, tag = "2")]
    pub layer: u32,
    /// [`checksum`] of the other fields.
    #[prost(fixed32, tag = "3")]
    pub checksum: u32,
    /// Bytes of the page in wire order; empty where a slot holds them.
    #[prost(bytes = "bytes", tag = "4")]
    pub bytes: Bytes,
    /// Slot of the shared memory that holds the bytes.
    #[prost(uint32, optional, tag = "5")]
    pub slot: Option<u32>,
}

impl Page {
    /// Makes a page with its checksum.
    pub fn new(block: u32, layer: u32, bytes: Bytes) -> Self {
        Self { block, layer, checksum: checksum(block, layer, &bytes), bytes, slot: None }
    }

    /// Makes a page whose bytes are in a slot.
    pub fn in_slot(block: u32, layer: u32, slot: u32, bytes: &[u8]) -> Self {
        Self { block, layer, checksum: checksum(block, layer, bytes), bytes: Bytes::new(), slot: Some(slot) }
    }

    /// Returns true if the page's bytes match its checksum.
    pub fn is_whole(&self) -> bool {
        self.checksum == checksum(self.block, self.layer, &self.bytes)
    }
}

/// CRC-32 over block, layer and bytes. Detects damage on the way; the handshake decides about authenticity.
pub fn checksum(block: u32, layer: u32, bytes: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&block.to_le_bytes());
    crc.update(&layer.to_le_bytes());
    crc.update(bytes);
    crc.finalize()
}

/// Confirmation that the steps which computed the first `blocks` blocks succeeded.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Computed {
    /// Number of computed blocks, counted from the first one requested.
    #[prost(uint32, tag = "1")]
    pub blocks: u32,
}

/// Next token of each requested choice, drawn from the request's own random numbers: bit by bit the token that the
/// asker would draw.
#[derive(Clone, PartialEq, Message)]
pub struct First {
    /// Next tokens, one per choice in the order of [`Prefill::choices`].
    #[prost(message, repeated, tag = "1")]
    pub tokens: Vec<FirstToken>,
    /// Prompt tokens that the holder read from its cache.
    #[prost(uint32, tag = "2")]
    pub cached_tokens: u32,
    /// Id of the holder's grammars (`frames::Ready::grammar`), if the tokens were drawn under [`Prefill::grammar`]. The
    /// asker takes tokens of a guided request only under its own id.
    #[prost(string, tag = "3")]
    pub grammar: String,
    /// True if the tokens were drawn under the reasoning budget of [`Prefill::sampling`], where there is one. Askers read
    /// this that know no `capabilities`.
    #[prost(bool, tag = "4")]
    pub reasoning_budget: bool,
    /// Each [`crate::Capability`] of the holder, as its number. Earlier workers pass over parts of
    /// [`Prefill::sampling`]; where those were needed, the asker draws the tokens itself.
    #[prost(int32, repeated, tag = "5")]
    pub capabilities: Vec<i32>,
}

/// The next token of one choice.
#[derive(Clone, PartialEq, Message)]
pub struct FirstToken {
    /// Index of the choice within the request, from 0.
    #[prost(uint32, tag = "1")]
    pub choice: u32,
    /// Token, with its log-probabilities when the sampling asks for them.
    #[prost(message, optional, tag = "2")]
    pub token: Option<Token>,
}

/// Sign that the holder lives and its engine steps.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Alive {}

/// End of a transfer or of a joined connection.
#[derive(Clone, PartialEq, Message)]
pub struct End {
    /// Number of usable leading blocks, as in the last [`Computed`].
    #[prost(uint32, tag = "1")]
    pub blocks: u32,
    /// True if every page of these blocks was sent.
    #[prost(bool, tag = "2")]
    pub complete: bool,
}

/// Refusal by the holder: another version or numerics, a bad proof, or a question that it cannot answer.
#[derive(Clone, PartialEq, Message)]
pub struct Refused {
    /// Reason in words, for the log of the asker.
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
    fn an_earlier_holder_does_not_pass_over_an_adapter() {
        #[derive(Clone, PartialEq, Message)]
        struct EarlierAsk {
            #[prost(message, optional, tag = "4")]
            prefill: Option<Prefill>,
        }
        let ask = |body| {
            let mut wire = BytesMut::new();
            encode(&Ask { body: Some(body), ..Ask::default() }, &mut wire).expect("small enough");
            decode::<EarlierAsk>(&mut wire).expect("our own").expect("whole").prefill
        };
        let wanted = Prefill { prompt: vec![1; 32], blocks: 1, ..Prefill::default() };
        assert_eq!(ask(AskBody::Prefill(wanted.clone())), Some(wanted.clone()));
        assert_eq!(ask(AskBody::AdaptedPrefill(Prefill { adapter: vec![7; 16], ..wanted })), None);
    }

    #[test]
    fn names_are_sixteen_bytes_and_not_too_many() {
        let names = |hashes: Vec<Vec<u8>>| Fetch { hashes }.names().map(|names| names.len());
        assert_eq!(names(vec![vec![1; 16]; 3]), Some(3));
        assert_eq!(names(vec![vec![1; 16], vec![1; 15]]), None);
        assert_eq!(names(vec![vec![1; 16]; BLOCKS_MAX + 1]), None);
    }
}
