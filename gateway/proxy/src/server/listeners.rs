//! Listening sockets: bound here rather than by Pingora, so that a fault is found early and reported in words, and so
//! that they can be handed to the next process.

use std::io;
use std::net::TcpListener;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use pingora_core::server::{Fds, ListenFds};

use super::ServerError;
use crate::upgrade::{Copies, Taken};
use penstock_config::Snapshot;

/// Begin of the name of the endpoint picker's socket.
const PICKER: &str = "picker ";

/// Listening sockets of the server, bound once and handed on to the next process.
pub struct Listeners {
    /// Sockets under the names by which the next process asks for them; empty when connections are accepted no more.
    sockets: Mutex<Vec<Socket>>,
    /// Path of the running program, as it was called: another file may lie there by now.
    program: PathBuf,
}

struct Socket {
    /// Name for the next process: the address as it was typed, so that port 0 finds its socket again.
    name: String,
    /// Address in the form that Pingora takes.
    address: String,
    socket: OwnedFd,
}

impl Listeners {
    /// Binds the addresses of the config, or takes over sockets of the process before this one. Port 0 in the config is
    /// replaced by the bound port.
    ///
    /// # Errors
    /// [`ServerError::Listen`] with advice.
    pub fn bind(config: &mut Snapshot, program: PathBuf, mut taken: Option<&mut Taken>) -> Result<Self, ServerError> {
        let mut sockets = Vec::new();
        let name = format!("tcp {}", config.listen);
        let listener = match taken.as_mut().and_then(|taken| taken.tcp(&name)) {
            Some(listener) => listener,
            None => {
                TcpListener::bind(config.listen).map_err(|error| listen_error(config.listen.to_string(), &error))?
            }
        };
        config.listen = listener.local_addr().unwrap_or(config.listen);
        let failed = |error: io::Error| listen_error(config.listen.to_string(), &error);
        listener.set_nonblocking(true).map_err(failed)?;
        sockets.push(Socket { name, address: config.listen.to_string(), socket: listener.into() });
        if let Some(path) = &config.unix {
            let address = path.display().to_string();
            let name = format!("unix {address}");
            let listener = match taken.as_mut().and_then(|taken| taken.unix(&name)) {
                Some(listener) => listener,
                None => bind_unix(path).map_err(|error| listen_error(address.clone(), &error))?,
            };
            listener.set_nonblocking(true).map_err(|error| listen_error(address.clone(), &error))?;
            sockets.push(Socket { name, address, socket: listener.into() });
        }
        if let Some(picker) = &mut config.endpoint_picker {
            let name = format!("{PICKER}{}", picker.listen);
            let listener = match taken.as_mut().and_then(|taken| taken.tcp(&name)) {
                Some(listener) => listener,
                None => {
                    TcpListener::bind(picker.listen).map_err(|error| listen_error(picker.listen.to_string(), &error))?
                }
            };
            picker.listen = listener.local_addr().unwrap_or(picker.listen);
            sockets.push(Socket { name, address: picker.listen.to_string(), socket: listener.into() });
        }
        Ok(Self { sockets: Mutex::new(sockets), program })
    }

    /// Copy of the endpoint picker's socket; `None`: the config has none.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn picker(&self) -> io::Result<Option<TcpListener>> {
        let sockets = self.sockets();
        let socket = sockets.iter().find(|one| one.name.starts_with(PICKER));
        socket.map(|one| one.socket.try_clone().map(TcpListener::from)).transpose()
    }

    /// Path of the running program, which an upgrade starts anew.
    pub fn program(&self) -> &Path {
        &self.program
    }

    fn sockets(&self) -> std::sync::MutexGuard<'_, Vec<Socket>> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies of the descriptors for the next process, with their names.
    pub(crate) fn copies(&self) -> io::Result<Copies> {
        let sockets = self.sockets();
        let copies: io::Result<Vec<_>> = sockets.iter().map(|one| one.socket.try_clone()).collect();
        Ok((sockets.iter().map(|one| one.name.clone()).collect(), copies?))
    }

    /// Descriptors for Pingora, which closes them when it accepts no more.
    pub fn table(&self) -> io::Result<ListenFds> {
        let mut table = Fds::new();
        for one in self.sockets().iter().filter(|one| !one.name.starts_with(PICKER)) {
            table.add(one.address.clone(), one.socket.try_clone()?.into_raw_fd());
        }
        Ok(ListenFds::new(table.into()))
    }

    /// Closes the sockets: a new connection must not wait in the queue of a socket that is not read.
    pub(super) fn close(&self) {
        self.sockets().clear();
    }
}

fn listen_error(address: String, error: &io::Error) -> ServerError {
    let reason = match error.kind() {
        io::ErrorKind::AddrInUse => {
            "the port is in use; choose another with --listen 127.0.0.1:PORT (0: any free one)".into()
        }
        io::ErrorKind::PermissionDenied => "not permitted; ports below 1024 need privileges".into(),
        _ => error.to_string(),
    };
    ServerError::Listen { address, reason }
}

fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
    Ok(listener)
}
