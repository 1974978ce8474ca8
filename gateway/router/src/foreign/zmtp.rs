//! Client side of ZMTP 3.0 for PUB (events) and ROUTER (replay) peers: bytes in, messages out.
//! <https://rfc.zeromq.org/spec/23/>
//!
//! ```text
//! greeting 64 bytes  FF 00×8 7F | 3 0 | "NULL" 00×16 | 00 | 00×31
//! frame              flags (1 more, 2 long, 4 command) | length 1 or 8 bytes | body
//! ```
//! No library is used, because this part is small and needs bounds: a message longer than allowed ends the connection before it is read.

use super::ForeignError;
use std::collections::VecDeque;

const GREETING_BYTES: usize = 64;
/// Most parts of one message; a message with more breaks the connection.
const PARTS_MAX: usize = 16;
/// Largest command frame of the peer, in bytes; a larger one breaks the connection.
const COMMAND_BYTES_MAX: usize = 4096;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Socket type that the client presents to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Subscriber of everything that a publisher sends.
    Sub,
    /// Client of a ROUTER, which may answer many times.
    Dealer,
}

/// State of one connection to a peer: bytes in both directions, without a socket.
pub struct Zmtp {
    role: Role,
    message_bytes_max: usize,
    stage: Stage,
    input: Vec<u8>,
    output: Vec<u8>,
    parts: Vec<Vec<u8>>,
    messages: VecDeque<Vec<Vec<u8>>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Greeting,
    Ready,
    Open,
}

impl Zmtp {
    /// A new connection, with its greeting ready to be sent.
    pub fn new(role: Role, message_bytes_max: usize) -> Self {
        let mut output = vec![0; GREETING_BYTES];
        (output[0], output[9], output[10]) = (0xff, 0x7f, 3);
        output[12..16].copy_from_slice(b"NULL");
        Self {
            role,
            message_bytes_max,
            stage: Stage::Greeting,
            input: Vec::new(),
            output,
            parts: Vec::new(),
            messages: VecDeque::new(),
        }
    }

    /// Takes the bytes that the caller is to write to the peer now.
    pub fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }

    /// Returns true if the peer's READY has arrived.
    pub fn is_open(&self) -> bool {
        self.stage == Stage::Open
    }

    /// Takes the next whole message, as its parts.
    pub fn message(&mut self) -> Option<Vec<Vec<u8>>> {
        self.messages.pop_front()
    }

    /// Bytes in memory: of an incomplete message, and of messages that nobody took.
    pub fn kept_bytes(&self) -> usize {
        let whole = self.messages.iter().flatten().map(Vec::len).sum::<usize>();
        self.input.len() + self.parts.iter().map(Vec::len).sum::<usize>() + whole
    }

    /// Queues a message that consists of the given parts for sending.
    pub fn send(&mut self, parts: &[&[u8]]) {
        for (number, part) in parts.iter().enumerate() {
            let more = if number + 1 < parts.len() { MORE } else { 0 };
            self.frame(more, part);
        }
    }

    /// Takes in bytes from the peer.
    ///
    /// # Errors
    /// The bytes are not ZMTP, or a message is too long: the connection has to be closed.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), ForeignError> {
        self.input.extend_from_slice(bytes);
        let mut at = 0;
        if self.stage == Stage::Greeting {
            if !self.greeted()? {
                return Ok(());
            }
            at = GREETING_BYTES;
        }
        while let Some((flags, body)) = self.whole_frame(&mut at)? {
            let body = self.input[body].to_vec();
            match flags & COMMAND {
                0 => self.part(flags & MORE != 0, body)?,
                _ => self.command(&body)?,
            }
        }
        self.input.drain(..at);
        Ok(())
    }

    fn greeted(&mut self) -> Result<bool, ForeignError> {
        let have = &self.input;
        if have.first().is_some_and(|byte| *byte != 0xff) || have.get(9).is_some_and(|byte| *byte & 1 == 0) {
            return Err(ForeignError::Greeting);
        }
        if have.get(10).is_some_and(|version| *version < 3) {
            return Err(ForeignError::Greeting);
        }
        if have.len() < GREETING_BYTES {
            return Ok(false);
        }
        if have[12..17] != *b"NULL\0" {
            return Err(ForeignError::Greeting);
        }
        self.stage = Stage::Ready;
        let name: &[u8] = if self.role == Role::Sub { b"SUB" } else { b"DEALER" };
        let mut ready = b"\x05READY\x0bSocket-Type".to_vec();
        ready.extend_from_slice(&(name.len() as u32).to_be_bytes());
        ready.extend_from_slice(name);
        self.frame(COMMAND, &ready);
        Ok(true)
    }

    /// Flags and range of the frame at `at`, if it is complete; moves `at` behind it.
    fn whole_frame(&self, at: &mut usize) -> Result<Option<(u8, std::ops::Range<usize>)>, ForeignError> {
        let bytes = &self.input[*at..];
        let Some(&flags) = bytes.first() else { return Ok(None) };
        if flags & !(MORE | LONG | COMMAND) != 0 || flags & (COMMAND | MORE) == COMMAND | MORE {
            return Err(ForeignError::Protocol);
        }
        let wide = if flags & LONG == 0 { 1 } else { 8 };
        let Some(length) = bytes.get(1..1 + wide) else { return Ok(None) };
        let length = length.iter().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
        let max = if flags & COMMAND == 0 { self.message_bytes_max } else { COMMAND_BYTES_MAX };
        let used: usize = self.parts.iter().map(Vec::len).sum();
        let length = usize::try_from(length).ok().filter(|length| length.saturating_add(used) <= max);
        let length = length.ok_or(ForeignError::Long(max))?;
        let body = *at + 1 + wide..*at + 1 + wide + length;
        if body.end > self.input.len() {
            return Ok(None);
        }
        *at = body.end;
        Ok(Some((flags, body)))
    }

    fn part(&mut self, more: bool, body: Vec<u8>) -> Result<(), ForeignError> {
        if self.stage != Stage::Open || self.parts.len() == PARTS_MAX {
            return Err(ForeignError::Protocol);
        }
        self.parts.push(body);
        if !more {
            self.messages.push_back(std::mem::take(&mut self.parts));
        }
        Ok(())
    }

    fn command(&mut self, body: &[u8]) -> Result<(), ForeignError> {
        if self.stage == Stage::Ready {
            if !body.starts_with(b"\x05READY") {
                return Err(ForeignError::Protocol);
            }
            self.stage = Stage::Open;
            if self.role == Role::Sub {
                // An empty topic prefix subscribes to everything; the reader of the messages filters topics.
                self.frame(0, &[1]);
            }
        }
        Ok(())
    }

    fn frame(&mut self, flags: u8, body: &[u8]) {
        match u8::try_from(body.len()) {
            Ok(length) => self.output.extend_from_slice(&[flags, length]),
            Err(_) => {
                self.output.push(flags | LONG);
                self.output.extend_from_slice(&(body.len() as u64).to_be_bytes());
            }
        }
        self.output.extend_from_slice(body);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A publisher's bytes up to its READY.
    fn publisher() -> Vec<u8> {
        let mut bytes = vec![0; GREETING_BYTES];
        (bytes[0], bytes[9], bytes[10], bytes[11]) = (0xff, 0x7f, 3, 1);
        bytes[12..16].copy_from_slice(b"NULL");
        let ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB\x08Identity\x00\x00\x00\x00";
        bytes.extend_from_slice(&[COMMAND, ready.len() as u8]);
        bytes.extend_from_slice(ready);
        bytes
    }

    fn message(parts: &[&[u8]]) -> Vec<u8> {
        let mut peer = Zmtp::new(Role::Dealer, 1 << 20);
        peer.take_output();
        peer.send(parts);
        peer.take_output()
    }

    #[test]
    fn a_subscription_wherever_the_bytes_are_cut() {
        let long = vec![7; 300];
        let bytes = [publisher(), message(&[b"topic", &[0; 8], &long]), message(&[b"x"])].concat();
        for step in [1, 2, 3, 63, 64, 65, 100, bytes.len()] {
            let mut client = Zmtp::new(Role::Sub, 1000);
            let mut sent = client.take_output();
            bytes.chunks(step).for_each(|piece| client.feed(piece).unwrap());
            sent.extend(client.take_output());
            assert_eq!(&sent[sent.len() - 3..], &[0, 1, 1], "it subscribed");
            assert_eq!(client.message(), Some(vec![b"topic".to_vec(), vec![0; 8], long.clone()]));
            assert_eq!(client.message(), Some(vec![b"x".to_vec()]));
            assert_eq!((client.message(), client.kept_bytes()), (None, 0));
        }
    }

    #[test]
    fn what_is_not_allowed_ends_the_connection() {
        let open = || {
            let mut client = Zmtp::new(Role::Sub, 1000);
            client.feed(&publisher()).unwrap();
            client
        };
        assert_eq!(Zmtp::new(Role::Sub, 9).feed(b"HTTP/1.1 400"), Err(ForeignError::Greeting));
        let mut secured = publisher();
        secured[12..17].copy_from_slice(b"CURVE");
        assert_eq!(Zmtp::new(Role::Sub, 9).feed(&secured), Err(ForeignError::Greeting));
        assert_eq!(open().feed(&[LONG, 0xff, 0, 0, 0, 0, 0, 0, 0]), Err(ForeignError::Long(1000)));
        assert_eq!(open().feed(&message(&[&[0; 600], &[0; 600]])), Err(ForeignError::Long(1000)));
        assert_eq!(open().feed(&[0x80, 0]), Err(ForeignError::Protocol));
        assert_eq!(open().feed(&message(&[&b"a"[..]; 20])), Err(ForeignError::Protocol));
        let early = [&publisher()[..GREETING_BYTES], &message(&[b"a"])].concat();
        assert_eq!(Zmtp::new(Role::Sub, 9).feed(&early), Err(ForeignError::Protocol));
    }
}
