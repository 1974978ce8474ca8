//! Hand-over from a running gateway to the next: another binary, the same sockets, no stream cut.
//!
//! ```text
//! penstock upgrade ──▶ old: starts  penstock serve … --upgrade
//!                      new: TakeOver ──▶ old: Offer (listening sockets, state lock, workers' build, config that is not in the file)
//!                      new: adopts the workers, makes all of it ready
//!                      new: Prepared ──▶ old: Holds (workers that an operator has drained), Book (counters and holds of limits)
//!                      new: accepts  ──▶ old: Accepting; accepts no more, answers what it has, then ends
//!                           old: Held, Settled, Settled, … end of file
//! ```
//!
//! Until `Accepting` the old process serves as before: when the new one dies, or is not ready in time, nothing has
//! happened. The sockets are never closed, so every connection is accepted; both processes accept for a moment. The
//! lock of the state folder (`lock.rs`) is never free. Only the same user can hand over or take over.
//!
//! Pingora's own hand-over is not used: it stops the old process whether or not there is a new one, five seconds later.

mod lock;
mod new;
mod old;
#[cfg(test)]
mod tests;
mod wire;

pub use lock::{LockError, StateLock};
pub use new::{Prepared, Taken, take_over};
pub(crate) use old::Copies;
pub use old::{Started, ask, listen};
pub use wire::UpgradeError;

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Longest time until the new process is ready: models may have to be loaded.
pub const READY_MAX: Duration = Duration::from_secs(900);

/// Path of the socket at which a gateway waits for its successor.
pub fn socket(state_dir: &Path) -> PathBuf {
    state_dir.join("upgrade.sock")
}

/// Longest wait for that socket: a gateway that has just begun to serve makes it a moment later.
const CONNECT_MAX: Duration = Duration::from_secs(2);

fn connect(state_dir: &Path) -> Result<wire::Wire, UpgradeError> {
    let place = socket(state_dir);
    let until = Instant::now() + CONNECT_MAX;
    loop {
        match UnixStream::connect(&place) {
            Ok(stream) => return wire::Wire::new(stream),
            Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(20)),
            Err(error) => return Err(UpgradeError::Nobody { place: place.display().to_string(), error }),
        }
    }
}

/// Notifies the service manager, if there is one that listens (`NOTIFY_SOCKET`, as systemd sets it).
pub fn notify_manager(state: &str) {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};
    let Some(place) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let address = match place.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&place),
    };
    let sent = UnixDatagram::unbound()
        .and_then(|socket| address.and_then(|address| socket.send_to_addr(state.as_bytes(), &address)));
    if let Err(error) = sent {
        tracing::warn!(%error, "the service manager could not be notified (sd_notify)");
    }
}
