//! Descriptors that cross a Unix socket beside its bytes (`SCM_RIGHTS`).
//!
//! One idea: at most one descriptor is awaited, near the beginning of a connection. It comes with the first byte that
//! it was sent with, so a reader that has read that byte has it. A reader that awaits none gets none: the kernel
//! closes descriptors without a receiver.

use crate::{Reader, Writer, within_deadline};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, Interest, ReadBuf};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedReadHalf;

/// Slot into which a reader puts a file descriptor that arrives beside the bytes of a Unix socket.
#[derive(Clone)]
pub struct Came {
    /// Received descriptor; `None` once no reader awaits one.
    slot: Arc<Mutex<Option<Option<OwnedFd>>>>,
}

impl Came {
    fn new() -> Self {
        Self { slot: Arc::new(Mutex::new(Some(None))) }
    }

    /// Takes the received file descriptor (if several have arrived, the last one) and stops receiving: descriptors that
    /// arrive after this call are closed. `None`: none has arrived, or this was called before.
    pub fn take(&self) -> Option<OwnedFd> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner).take().flatten()
    }

    fn waits(&self) -> bool {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn put(&self, descriptor: OwnedFd) {
        if let Some(slot) = self.slot.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            *slot = Some(descriptor);
        }
    }
}

/// Connects to a socket file and waits for a descriptor beside what is read, until [`Came::take`].
///
/// # Errors
/// The listener is absent, or connecting took longer than [`crate::CONNECT_DEADLINE`].
pub async fn dial_unix(path: &Path) -> io::Result<(Reader, Writer, Came)> {
    let stream = within_deadline(UnixStream::connect(path)).await?;
    let (half, writer) = stream.into_split();
    let came = Came::new();
    Ok((Box::new(Receiving { half, came: came.clone() }), Box::new(writer), came))
}

/// Sends bytes, or the first of them, with a descriptor beside them; returns their number. Does not wait for room.
///
/// # Errors
/// The socket is closed, has no room now, or is no Unix socket.
pub fn send_beside(socket: BorrowedFd<'_>, bytes: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<usize> {
    let descriptors = [descriptor];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    Ok(rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?)
}

/// Reading half of a connection that also receives a descriptor.
struct Receiving {
    half: OwnedReadHalf,
    came: Came,
}

impl Receiving {
    fn receive(&self, into: &mut ReadBuf<'_>) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let stream: &UnixStream = self.half.as_ref();
        let bytes = {
            let mut room = [IoSliceMut::new(into.initialize_unfilled())];
            rustix::net::recvmsg(stream.as_fd(), &mut room, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes
        };
        into.advance(bytes);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                descriptors.for_each(|descriptor| self.came.put(descriptor));
            }
        }
        Ok(())
    }
}

impl AsyncRead for Receiving {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.came.waits() {
            return Pin::new(&mut this.half).poll_read(cx, into);
        }
        loop {
            let stream: &UnixStream = this.half.as_ref();
            ready!(stream.poll_read_ready(cx))?;
            match stream.try_io(Interest::READABLE, || this.receive(into)) {
                // The socket was not ready after all: wait for it.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return Poll::Ready(done),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Read;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixListener;

    fn text(descriptor: OwnedFd) -> String {
        let mut text = String::new();
        File::from(descriptor).read_to_string(&mut text).expect("a file");
        text
    }

    #[tokio::test]
    async fn a_descriptor_comes_with_its_byte() {
        let dir = std::env::temp_dir().join(format!("pen-beside-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        let (path, file) = (dir.join("s"), dir.join("f"));
        std::fs::write(&file, "beside").expect("a file");
        let open = || File::open(&file).expect("a file");
        let listener = UnixListener::bind(&path).expect("a socket");
        let (mut reader, _writer, came) = dial_unix(&path).await.expect("it listens");
        let (mut far, _) = listener.accept().await.expect("it connects");
        far.write_all(b"a").await.expect("sent");
        assert_eq!(send_beside(far.as_fd(), b"bc", open().as_fd()).expect("room"), 2);
        let mut bytes = [0; 3];
        reader.read_exact(&mut bytes).await.expect("all three");
        assert_eq!(&bytes, b"abc");
        assert_eq!(came.take().map(text).as_deref(), Some("beside"));
        // Without a waiting reader the descriptor is closed, and the bytes come.
        send_beside(far.as_fd(), b"d", open().as_fd()).expect("room");
        drop(far);
        assert_eq!(reader.read(&mut bytes).await.expect("one"), 1);
        assert_eq!(reader.read(&mut bytes).await.expect("the end"), 0);
        assert!(came.take().is_none());
        std::fs::remove_dir_all(&dir).expect("removed");
    }
}
