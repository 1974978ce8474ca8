//! Address on which a worker listens: `unix:///run/penstock/pool-0.sock` or `tcp://127.0.0.1:7000`; the two slashes
//! may be left out.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Longest path of a Unix socket, in bytes, without the closing zero (`sockaddr_un` on Linux).
pub const UNIX_PATH_BYTES_MAX: usize = 107;

/// Address of a worker: a Unix socket or a TCP port.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// A socket file, guarded by the permissions of the file system.
    Unix(PathBuf),
    /// A TCP address `host:port`; needs the pool key.
    Tcp(String),
}

/// Reason why a text is not an address.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The scheme is neither `unix` nor `tcp`.
    #[error("address {0:?} must begin with unix: or tcp:")]
    Scheme(String),
    /// The path is relative or empty.
    #[error("address {0:?} needs an absolute path after unix:")]
    Path(String),
    /// The path does not fit into a socket address.
    #[error("socket path {path:?} has {bytes} bytes, limit {UNIX_PATH_BYTES_MAX}: choose a shorter state directory")]
    TooLong {
        /// The socket's path, as configured.
        path: String,
        /// Length of `path` in bytes, above [`UNIX_PATH_BYTES_MAX`].
        bytes: usize,
    },
    /// The port is missing or not a number.
    #[error("address {0:?} needs host:port after tcp:")]
    Port(String),
}

impl Address {
    /// Makes the address of a socket file.
    ///
    /// # Errors
    /// [`AddressError::Path`] for a relative path, [`AddressError::TooLong`] above [`UNIX_PATH_BYTES_MAX`].
    pub fn unix(path: impl Into<PathBuf>) -> Result<Self, AddressError> {
        let path = path.into();
        let text = path.to_string_lossy().into_owned();
        if !path.is_absolute() {
            return Err(AddressError::Path(text));
        }
        let bytes = path.as_os_str().len();
        if bytes > UNIX_PATH_BYTES_MAX {
            return Err(AddressError::TooLong { path: text, bytes });
        }
        Ok(Address::Unix(path))
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let after = |scheme: &str| {
            let rest = text.strip_prefix(scheme)?;
            Some(rest.strip_prefix("//").unwrap_or(rest))
        };
        if let Some(path) = after("unix:") {
            return Address::unix(path);
        }
        let Some(host_port) = after("tcp:") else { return Err(AddressError::Scheme(text.into())) };
        match host_port.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => Ok(Address::Tcp(host_port.into())),
            _ => Err(AddressError::Port(text.into())),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "unix://{}", path.display()),
            Address::Tcp(host_port) => write!(f, "tcp://{host_port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_back_as_they_were_written() {
        for text in ["unix:///run/penstock/a.sock", "tcp://127.0.0.1:7000", "tcp://[::1]:7000", "tcp://worker-3:0"] {
            assert_eq!(text.parse::<Address>().map(|a| a.to_string()).as_deref(), Ok(text));
        }
    }

    #[test]
    fn the_slashes_may_be_left_out() {
        assert_eq!("unix:/run/a.sock".parse::<Address>(), "unix:///run/a.sock".parse());
        assert_eq!("tcp:a:1".parse::<Address>(), "tcp://a:1".parse());
    }

    #[test]
    fn what_is_not_an_address_is_refused() {
        for text in [
            "",
            "/run/a.sock",
            "http://a:1",
            "unix://",
            "unix:",
            "unix://a.sock",
            "tcp://",
            "tcp://a",
            "tcp://a:",
            "tcp://:7",
            "tcp://a:70000",
        ] {
            assert!(text.parse::<Address>().is_err(), "{text:?}");
        }
        let long = format!("unix:///{}", "x".repeat(UNIX_PATH_BYTES_MAX));
        assert!(matches!(long.parse::<Address>(), Err(AddressError::TooLong { bytes: 108, .. })));
    }
}
