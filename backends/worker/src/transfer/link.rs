//! Frames over a connection, with deadlines, and the greeting of both ends.

use super::lanes::{Joining, Part, Ticket};
use super::memory::{self, Memory};
use super::{About, Peers};
use crate::config::random;
use bytes::BytesMut;
use penstock_link::{Came, Reader, Writer, send_beside};
use penstock_proto::codec::{self, CodecError};
use penstock_proto::handshake::{Challenge, NONCE_BYTES, PoolKey, Proof, Side};
use penstock_proto::transfer::*;
use penstock_shm::Ring;
use prost::Message;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

/// Longest greeting: no engine is involved, so a slower peer counts as absent.
pub(super) const GREETING_DEADLINE: Duration = Duration::from_millis(2500);

/// Longest write; a slower peer counts as dead.
pub(super) const WRITE_DEADLINE: Duration = Duration::from_secs(10);

/// Largest frame during the handshake, in bytes.
const GREETING_BYTES_MAX: usize = 4096;

/// Reason why a transfer ended early, for the log and the gateway.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    #[error("the connection was closed")]
    Closed,
    #[error("the other end is silent")]
    Silent,
    #[error("the transfer took too long")]
    Late,
    #[error("the proof of the pool key is wrong, or there is none")]
    Proof,
    #[error("the connection was dropped for a newer one before its handshake was complete")]
    Displaced,
    #[error("unexpected frame")]
    Unexpected,
    #[error("unexpected KV page, or one that was damaged on the way")]
    BadPage,
    #[error("the other end takes no pages")]
    Slow,
    #[error("the other end refuses: {0}")]
    Refused(String),
    #[error("the other end has only {0} of the blocks")]
    Partly(usize),
    #[error("the worker is ending")]
    Ending,
    #[error(transparent)]
    Codec(#[from] CodecError),
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error("{0}")]
    Other(String),
}

/// Connection between two workers, as its reading and writing halves.
pub(super) struct Link {
    pub(super) incoming: Incoming,
    pub(super) outgoing: Outgoing,
}

pub(super) struct Incoming {
    inner: Reader,
    input: BytesMut,
    frame_bytes_max: usize,
}

pub(super) struct Outgoing {
    inner: Writer,
    output: BytesMut,
}

impl Incoming {
    /// Reads the next frame. Cancel-safe.
    pub(super) async fn next<M: Message + Default>(&mut self) -> Result<M, Fault> {
        loop {
            if let Some(message) = codec::decode_within(&mut self.input, self.frame_bytes_max)? {
                return Ok(message);
            }
            if self.inner.read_buf(&mut self.input).await? == 0 {
                return Err(Fault::Closed);
            }
        }
    }

    /// Allows frames as large as a page from now on.
    fn trust(&mut self) {
        self.frame_bytes_max = codec::FRAME_BYTES_MAX;
        self.input.reserve(256 << 10);
    }
}

impl Outgoing {
    pub(super) async fn send<M: Message>(&mut self, message: &M) -> Result<(), Fault> {
        self.output.clear();
        codec::encode(message, &mut self.output)?;
        self.write(0).await
    }

    /// Sends a frame with a descriptor beside it on the socket of this connection. False if nothing was sent, because
    /// descriptors cannot be.
    async fn send_beside<M: Message>(&mut self, message: &M, socket: &OwnedFd, with: &OwnedFd) -> Result<bool, Fault> {
        self.output.clear();
        codec::encode(message, &mut self.output)?;
        let Ok(sent) = send_beside(socket.as_fd(), &self.output, with.as_fd()) else { return Ok(false) };
        self.write(sent).await?;
        Ok(true)
    }

    async fn write(&mut self, from: usize) -> Result<(), Fault> {
        let written = async {
            self.inner.write_all(&self.output[from..]).await?;
            self.inner.flush().await
        };
        Ok(timeout(WRITE_DEADLINE, written).await.map_err(|_| Fault::Silent)??)
    }
}

/// Purpose of an accepted connection, known from its first frames.
pub(super) enum Purpose {
    /// The connection carries a question: a fetch or a prefill.
    Question(Box<Question>),
    /// The connection joins the transfer of this ticket and carries pages.
    Joins(Ticket),
}

/// Question of an asker, with the means to answer it.
pub(super) struct Question {
    pub(super) body: AskBody,
    /// Memory that the asker has mapped, for the pages.
    pub(super) ring: Option<Ring>,
    /// Registration under which further connections may join.
    pub(super) joining: Option<Joining>,
}

impl Link {
    pub(super) fn new(reader: Reader, writer: Writer) -> Self {
        let incoming = Incoming { inner: reader, input: BytesMut::new(), frame_bytes_max: GREETING_BYTES_MAX };
        Self { incoming, outgoing: Outgoing { inner: writer, output: BytesMut::new() } }
    }

    pub(super) async fn say(&mut self, body: AskBody) -> Result<(), Fault> {
        self.outgoing.send(&Ask { body: Some(body), ..Ask::default() }).await
    }

    pub(super) async fn answer(&mut self, body: AnswerBody) -> Result<(), Fault> {
        self.outgoing.send(&Answer { body: Some(body) }).await
    }

    async fn heard(&mut self) -> Result<AskBody, Fault> {
        self.incoming.next::<Ask>().await?.body.ok_or(Fault::Unexpected)
    }

    /// Greets as the asker. `key`: both ends have to prove it; `came`: socket on which a descriptor may come beside
    /// the welcome; `part`: of a transfer of several connections. Returns the mapped memory, if any.
    pub(super) async fn greet(
        &mut self,
        about: &About,
        key: Option<&PoolKey>,
        came: Option<&Came>,
        part: Option<Part>,
    ) -> Result<Option<Memory>, Fault> {
        let (ticket, joins) = match part {
            None => (Vec::new(), false),
            Some(Part::First(ticket)) => (ticket.to_vec(), false),
            Some(Part::Joins(ticket)) => (ticket.to_vec(), true),
        };
        let nonce: Vec<u8> = if key.is_some() { nonce()?.to_vec() } else { Vec::new() };
        let greeting = Greeting {
            version: TRANSFER_VERSION,
            nonce: nonce.clone(),
            numerics_id: about.numerics_id.clone(),
            block_bytes: about.block_bytes as u64,
            maps_memory: came.is_some(),
            ticket,
            joins,
        };
        self.say(AskBody::Greeting(greeting)).await?;
        let mut answer = self.incoming.next::<Answer>().await?.body;
        if let Some(key) = key {
            let Some(AnswerBody::Challenge(challenge)) = answer else { return Err(Fault::Proof) };
            if !key.verify(Side::Holder, &nonce, &challenge.nonce, &challenge.proof) {
                return Err(Fault::Proof);
            }
            let proof = key.proof(Side::Asker, &nonce, &challenge.nonce);
            self.say(AskBody::Proof(Proof { proof })).await?;
            answer = self.incoming.next::<Answer>().await?.body;
        }
        match answer {
            Some(AnswerBody::Welcome(welcome)) => {
                self.incoming.trust();
                let memory = came.and_then(Came::take);
                Ok(memory.and_then(|memory| Memory::open(&memory, welcome.slots, about.page_bytes)))
            }
            Some(AnswerBody::Refused(refused)) => Err(Fault::Refused(refused.message)),
            _ => Err(Fault::Unexpected),
        }
    }

    /// Answers a greeting and returns the purpose of the connection. `key`: both ends have to prove it; `socket`: a
    /// descriptor can go beside the welcome.
    pub(super) async fn welcome(
        &mut self,
        peers: &Peers,
        key: Option<&PoolKey>,
        socket: Option<OwnedFd>,
    ) -> Result<Purpose, Fault> {
        let about = peers.about.get();
        let AskBody::Greeting(greeting) = self.heard().await? else { return Err(Fault::Unexpected) };
        if let Some(key) = key {
            let nonce = nonce()?;
            let proof = key.proof(Side::Holder, &greeting.nonce, &nonce);
            self.answer(AnswerBody::Challenge(Challenge { nonce: nonce.to_vec(), proof })).await?;
            let AskBody::Proof(proof) = self.heard().await? else { return Err(Fault::Proof) };
            if !key.verify(Side::Asker, &greeting.nonce, &nonce, &proof.proof) {
                return Err(Fault::Proof);
            }
        }
        if let Some(why) = unsuited(&greeting, about) {
            self.answer(AnswerBody::Refused(Refused { message: why.into() })).await?;
            return Err(Fault::Other(why.into()));
        }
        let ticket = Ticket::try_from(greeting.ticket.as_slice()).ok();
        if let Some(ticket) = ticket.filter(|_| greeting.joins) {
            if !peers.meeting.knows(&ticket) {
                self.answer(AnswerBody::Refused(Refused { message: "no such transfer".into() })).await?;
                return Err(Fault::Unexpected);
            }
            self.accept(None, 0).await?;
            return Ok(Purpose::Joins(ticket));
        }
        let joining = ticket.and_then(|ticket| peers.meeting.expect(ticket));
        let socket = socket.filter(|_| greeting.maps_memory);
        let ring = self.accept(socket, about.map_or(0, |about| about.page_bytes)).await?;
        self.incoming.trust();
        let Ask { body, through_memory } = self.incoming.next().await?;
        let ring = ring.filter(|_| through_memory);
        let body = body.ok_or(Fault::Unexpected)?;
        Ok(Purpose::Question(Box::new(Question { body, ring, joining })))
    }

    /// Sends the welcome, with memory for pages beside it where the asker can map it.
    async fn accept(&mut self, socket: Option<OwnedFd>, page_bytes: usize) -> Result<Option<Ring>, Fault> {
        let welcome = |slots| Answer { body: Some(AnswerBody::Welcome(Welcome { version: TRANSFER_VERSION, slots })) };
        if let Some(socket) = socket
            && let Some((ring, memory, slots)) = memory::make(page_bytes)
            && self.outgoing.send_beside(&welcome(slots), &socket, &memory).await?
        {
            return Ok(Some(ring));
        }
        self.outgoing.send(&welcome(0)).await?;
        Ok(None)
    }
}

fn unsuited(greeting: &Greeting, about: Option<&About>) -> Option<&'static str> {
    let Some(about) = about else { return Some("the worker is loading") };
    if greeting.version != TRANSFER_VERSION {
        return Some("the workers speak different versions of the transfer protocol");
    }
    if greeting.numerics_id != about.numerics_id {
        return Some("the workers have different numerics: their KV blocks are not interchangeable");
    }
    (greeting.block_bytes != about.block_bytes as u64).then_some("the workers have different KV block sizes")
}

fn nonce() -> Result<[u8; NONCE_BYTES], Fault> {
    random().map_err(|error| Fault::Other(error.to_string()))
}
