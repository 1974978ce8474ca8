//! A network between a gateway and a worker, in one task: it can stop carrying, carry late, or cut a connection in the middle of a frame.

use crate::Dir;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What the network does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Carry,
    /// Nothing arrives and nobody is told; what was sent meanwhile arrives when it is mended.
    Hold,
    /// Everything arrives so much later.
    Late(Duration),
}

/// See the module header. Ends with the value.
pub struct Relay {
    socket: PathBuf,
    mode: watch::Sender<Mode>,
    cut: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Relay {
    /// A network that leads to the socket `to`.
    ///
    /// # Panics
    /// If it cannot listen.
    pub fn start(dir: &Dir, name: &str, to: &Path) -> Self {
        let socket = dir.file(&format!("{name}.relay"));
        let listener = UnixListener::bind(&socket).expect("the relay listens");
        let (mode, modes) = watch::channel(Mode::Carry);
        let cut = Arc::new(AtomicBool::new(false));
        let task = tokio::spawn(accept(listener, to.to_owned(), modes, Arc::clone(&cut)));
        Self { socket, mode, cut, task }
    }

    /// Where the gateway connects to.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Carries nothing from now on, in neither direction, and tells nobody.
    pub fn hold(&self) {
        self.mode.send_replace(Mode::Hold);
    }

    /// Carries everything so much later.
    pub fn delay(&self, time: Duration) {
        self.mode.send_replace(Mode::Late(time));
    }

    /// Carries again; what was held arrives.
    pub fn mend(&self) {
        self.mode.send_replace(Mode::Carry);
    }

    /// Closes the connection that carries something next, in the middle of it.
    pub fn cut_next(&self) {
        self.cut.store(true, Ordering::Relaxed);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: UnixListener, to: PathBuf, modes: watch::Receiver<Mode>, cut: Arc<AtomicBool>) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let Ok((near, _)) = listener.accept().await else { return };
        let (to, modes, cut) = (to.clone(), modes.clone(), Arc::clone(&cut));
        connections.spawn(async move {
            // A worker that is not there: the connection ends, as it would without a network between.
            let Ok(far) = UnixStream::connect(to).await else { return };
            let (near_reader, near_writer) = near.into_split();
            let (far_reader, far_writer) = far.into_split();
            tokio::select! {
                () = carry(near_reader, far_writer, modes.clone(), &cut) => {}
                () = carry(far_reader, near_writer, modes, &cut) => {}
            }
        });
        while connections.try_join_next().is_some() {}
    }
}

/// One direction, until either end closes.
async fn carry(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut modes: watch::Receiver<Mode>,
    cut: &AtomicBool,
) {
    let mut bytes = vec![0; 16 * 1024];
    loop {
        let Ok(count @ 1..) = from.read(&mut bytes).await else { return };
        let mode = *modes.borrow_and_update();
        match mode {
            Mode::Carry => {}
            Mode::Late(time) => tokio::time::sleep(time).await,
            Mode::Hold => {
                if modes.wait_for(|mode| *mode != Mode::Hold).await.is_err() {
                    return;
                }
            }
        }
        let is_cut = cut.swap(false, Ordering::Relaxed);
        let carried = if is_cut { count / 2 } else { count };
        if to.write_all(&bytes[..carried]).await.is_err() || is_cut {
            return;
        }
    }
}
