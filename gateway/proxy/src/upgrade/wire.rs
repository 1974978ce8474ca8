//! Messages between the two processes: a length of four bytes, then JSON; with the offer, file descriptors.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use penstock_govern::{BookState, Unit};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::fleet::HeldWorkers;
use penstock_governed::Claimed;

/// Version of these messages; two processes must agree on it.
pub(super) const VERSION: u32 = 1;
/// Largest message, in bytes: counters of a million keys.
const BYTES_MAX: usize = 512 << 20;
/// Most descriptors in a message: listening sockets and the lock.
const SOCKETS_MAX: usize = 16;

/// Reason why a hand-over between two processes did not happen.
#[derive(Debug, thiserror::Error)]
pub enum UpgradeError {
    /// No gateway listens at the upgrade socket.
    #[error("no gateway to take over from at {place}: {error}")]
    Nobody {
        /// Path of the upgrade socket that was tried.
        place: String,
        /// Error of the system on connecting.
        error: io::Error,
    },
    /// The process at the other end belongs to another user, with this user id.
    #[error("the process at the other end belongs to user {0}, not to this one")]
    Stranger(u32),
    /// The connection to the other process broke.
    #[error("the other process: {0}")]
    Io(#[from] io::Error),
    /// The hand-over was refused by the process at the other end.
    #[error("{0}")]
    Refused(String),
    /// The two processes have different versions of the messages.
    #[error("the other process speaks another version of the hand-over: stop it and start this one")]
    Version,
}

/// Messages to the running gateway: of the next process, or of `penstock upgrade`.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Ask {
    /// Request to start the next process and hand over to it.
    Upgrade { program: Option<std::path::PathBuf> },
    /// Request of the next process to take over. `takes_holds`: it understands [`Tell::Holds`].
    TakeOver {
        version: u32,
        pid: u32,
        #[serde(default)]
        takes_holds: bool,
    },
    /// Report that the next process could serve now.
    Prepared,
    /// Report that the next process accepts connections now.
    Accepting,
}

/// Messages of the running gateway to the process at the other end.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Tell {
    /// Offer of things to take over; the descriptors come with it.
    Offer(Offer),
    /// Workers that an operator holds by now, before the book.
    Holds(HeldWorkers),
    /// Counters and holds of all limits, for the next process to go on with.
    Book(Box<Option<BookState>>),
    /// Hold of that number, of a request that was let in after the book was handed over.
    Held { id: u64, claims: Vec<Claimed> },
    /// End of a hold, of the book's or a later one, with the amounts used.
    Settled { id: u64, amounts: Vec<(u16, Unit, u64)> },
    /// Text about the progress, for the operator.
    Progress(String),
    /// Process id of the gateway that serves now.
    Done { pid: u32 },
    /// Failure of the hand-over; the running gateway goes on.
    Failed(String),
}

/// Content of [`Tell::Offer`]: what the next process takes over.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Offer {
    /// Names of the descriptors that come with the message, in their order.
    pub(super) sockets: Vec<String>,
    /// Digest of the program that the running workers were started from.
    pub(super) workers: String,
    /// Config in force, where it is not the file's.
    pub(super) config: Option<String>,
    /// Text of the file as it was last read, where another one is in force.
    #[serde(default)]
    pub(super) file: Option<String>,
    /// Workers that an operator holds.
    #[serde(default)]
    pub(super) held: HeldWorkers,
}

/// Connection to a process of the same user or of root, with framed messages.
pub(super) struct Wire(UnixStream);

impl Wire {
    pub(super) fn new(stream: UnixStream) -> Result<Self, UpgradeError> {
        let peer = rustix::net::sockopt::socket_peercred(&stream).map_err(io::Error::from)?;
        let own = rustix::process::geteuid();
        if peer.uid != own && !peer.uid.is_root() {
            return Err(UpgradeError::Stranger(peer.uid.as_raw()));
        }
        stream.set_write_timeout(Some(Duration::from_secs(30)))?;
        Ok(Self(stream))
    }

    /// Sets the timeout of the next message; `None`: no timeout.
    pub(super) fn patience(&self, time: Option<Duration>) -> Result<(), UpgradeError> {
        Ok(self.0.set_read_timeout(time)?)
    }

    pub(super) fn send<M: Serialize>(&mut self, message: &M) -> Result<(), UpgradeError> {
        Ok(self.0.write_all(&frame(message)?)?)
    }

    pub(super) fn receive<M: DeserializeOwned>(&mut self) -> Result<M, UpgradeError> {
        let mut head = [0; 4];
        self.0.read_exact(&mut head)?;
        self.body(head)
    }

    fn body<M: DeserializeOwned>(&mut self, head: [u8; 4]) -> Result<M, UpgradeError> {
        let length = u32::from_le_bytes(head) as usize;
        if length > BYTES_MAX {
            return Err(UpgradeError::Version);
        }
        let mut bytes = Vec::new();
        (&mut self.0).take(length as u64).read_to_end(&mut bytes)?;
        if bytes.len() < length {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        serde_json::from_slice(&bytes).map_err(|_| UpgradeError::Version)
    }

    /// Sends a message with descriptors, which go with its first bytes.
    pub(super) fn send_with<M: Serialize>(&mut self, message: &M, sockets: &[OwnedFd]) -> Result<(), UpgradeError> {
        let bytes = frame(message)?;
        let descriptors: Vec<_> = sockets.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SOCKETS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
            return Err(UpgradeError::Refused("more sockets than can be handed over".into()));
        }
        let sent = rustix::net::sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
        let sent = sent.map_err(io::Error::from)?;
        Ok(self.0.write_all(&bytes[sent..])?)
    }

    /// Receives one message and the descriptors that came with it.
    pub(super) fn receive_with<M: DeserializeOwned>(&mut self) -> Result<(M, Vec<OwnedFd>), UpgradeError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SOCKETS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut head = [0; 4];
        let read =
            rustix::net::recvmsg(&self.0, &mut [IoSliceMut::new(&mut head)], &mut control, RecvFlags::CMSG_CLOEXEC);
        let read = read.map_err(io::Error::from)?.bytes;
        let mut sockets = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                sockets.extend(descriptors);
            }
        }
        if read == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        self.0.read_exact(&mut head[read..])?;
        Ok((self.body(head)?, sockets))
    }
}

fn frame<M: Serialize>(message: &M) -> Result<Vec<u8>, UpgradeError> {
    let mut out = vec![0; 4];
    serde_json::to_writer(&mut out, message).map_err(io::Error::from)?;
    let length = out.len() - 4;
    if length > BYTES_MAX {
        return Err(UpgradeError::Refused("too much to be handed over".into()));
    }
    out[..4].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn sockets_cross_with_their_message() {
        let (left, right) = UnixStream::pair().expect("a pair");
        let (mut left, mut right) = (Wire::new(left).expect("own"), Wire::new(right).expect("own"));
        let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
        let address = listener.local_addr().expect("has one");
        let offer = Offer { sockets: vec!["http".into()], workers: "w".into(), ..Offer::default() };
        left.send_with(&Tell::Offer(offer), &[listener.into()]).expect("sent");
        left.send(&Tell::Progress("next".into())).expect("sent");
        let (told, mut sockets) = right.receive_with::<Tell>().expect("received");
        assert!(matches!(told, Tell::Offer(offer) if offer.sockets == ["http"]));
        assert!(matches!(right.receive(), Ok(Tell::Progress(text)) if text == "next"));
        let listener = TcpListener::from(sockets.pop().expect("one socket"));
        let client = TcpStream::connect(address).expect("somebody listens");
        assert_eq!(listener.accept().expect("accepts").1, client.local_addr().expect("has one"));
    }

    #[test]
    fn messages_of_a_version_without_holds_are_understood() {
        let offer = r#"{ "sockets": [], "workers": "w", "config": null }"#;
        let offer: Offer = serde_json::from_str(offer).expect("an offer");
        assert!(offer.held.is_empty());
        let asked: Ask = serde_json::from_str(r#"{ "TakeOver": { "version": 1, "pid": 7 } }"#).expect("a request");
        assert!(matches!(asked, Ask::TakeOver { pid: 7, takes_holds: false, .. }));
    }

    #[test]
    fn nonsense_is_no_message() {
        let (left, right) = UnixStream::pair().expect("a pair");
        let mut right = Wire::new(right).expect("own");
        (&left).write_all(&u32::MAX.to_le_bytes()).expect("written");
        assert!(matches!(right.receive::<Tell>(), Err(UpgradeError::Version)));
        (&left).write_all(&[3, 0, 0, 0, b'{', b'}', b'x']).expect("written");
        assert!(matches!(right.receive::<Tell>(), Err(UpgradeError::Version)));
        drop(left);
        assert!(matches!(right.receive::<Tell>(), Err(UpgradeError::Io(_))));
    }
}
