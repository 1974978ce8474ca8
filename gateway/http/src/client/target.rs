//! Targets of clients: parsed once from a URL of the config, never from a request.

use std::fmt;
use std::path::PathBuf;

/// Endpoint, and the base path of every request to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Address that connections to the endpoint are opened to.
    pub place: Place,
    /// Value of the `Host` header of every request to the endpoint.
    pub authority: String,
    /// Base path in front of every path; without a slash at its end.
    pub base: String,
}

/// Address of an endpoint: a TCP host and port, or a Unix socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// Host and port reached over TCP, with or without TLS.
    Tcp {
        /// Host name to resolve, or an IP address.
        host: String,
        /// TCP port of the endpoint.
        port: u16,
        /// True if the connection uses TLS.
        tls: bool,
    },
    /// Path of a Unix socket.
    Unix(PathBuf),
}

impl fmt::Display for Target {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Place::Tcp { tls, .. } => {
                let scheme = if *tls { "https" } else { "http" };
                write!(out, "{scheme}://{}{}", self.authority, self.base)
            }
            Place::Unix(path) => write!(out, "unix://{}:{}", path.display(), self.base),
        }
    }
}

impl Target {
    /// Returns true if traffic to the target is protected on its way: TLS, or this machine only.
    pub fn is_private(&self) -> bool {
        match &self.place {
            Place::Unix(_) => true,
            Place::Tcp { host, tls, .. } => *tls || is_loopback(host),
        }
    }

    /// Parses `http://HOST[:PORT][/BASE]`, `https://…`, or `unix:///PATH/TO/SOCKET[:/BASE]`.
    ///
    /// # Errors
    /// Names the URL and the part that is invalid.
    pub fn parse(url: &str) -> Result<Self, String> {
        if let Some(rest) = url.strip_prefix("unix://") {
            let (socket, base) = rest.split_once(':').unwrap_or((rest, ""));
            if !socket.starts_with('/') {
                return Err(format!("{url:?}: a Unix socket is written unix:///PATH/TO/SOCKET[:/BASE]"));
            }
            return Ok(Self { place: Place::Unix(socket.into()), authority: "localhost".into(), base: base_of(base)? });
        }
        let (tls, rest) = match (url.strip_prefix("https://"), url.strip_prefix("http://")) {
            (Some(rest), _) => (true, rest),
            (_, Some(rest)) => (false, rest),
            _ => return Err(format!("{url:?} must begin with http://, https:// or unix://")),
        };
        let (authority, base) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let shape = || format!("{url:?}: {authority:?} is not HOST or HOST:PORT");
        crate::head::checked_host(authority.as_bytes()).map_err(|_| shape())?;
        let port_at = authority.rfind(':').filter(|at| !authority[*at..].contains(']'));
        let (host, port) = match port_at {
            Some(at) => (&authority[..at], authority[at + 1..].parse().map_err(|_| shape())?),
            None => (authority, if tls { 443 } else { 80 }),
        };
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        Ok(Self { place: Place::Tcp { host, port, tls }, authority: authority.to_owned(), base: base_of(base)? })
    }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|address: std::net::IpAddr| address.is_loopback())
}

fn base_of(path: &str) -> Result<String, String> {
    if !is_path(path) || path.contains(['?', '#']) || !(path.is_empty() || path.starts_with('/')) {
        return Err(format!("{path:?} is not a path"));
    }
    Ok(path.trim_end_matches('/').to_owned())
}

/// Returns true if a request line can carry the text: printable ASCII without spaces.
pub fn is_path(text: &str) -> bool {
    text.bytes().all(|byte| (0x21..=0x7e).contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(url: &str, place: &str, authority: &str, base: &str) {
        let target = Target::parse(url).expect(url);
        let shown = match &target.place {
            Place::Tcp { host, port, tls } => format!("{host} {port} {tls}"),
            Place::Unix(path) => path.display().to_string(),
        };
        assert_eq!(
            (shown.as_str(), target.authority.as_str(), target.base.as_str()),
            (place, authority, base),
            "{url}"
        );
    }

    #[test]
    fn urls_are_read() {
        check("http://127.0.0.1:9000/v1", "127.0.0.1 9000 false", "127.0.0.1:9000", "/v1");
        check("https://api.example.com/v1/", "api.example.com 443 true", "api.example.com", "/v1");
        check("http://[::1]:81", "::1 81 false", "[::1]:81", "");
        check("https://[::1]", "::1 443 true", "[::1]", "");
        check("unix:///run/x.sock:/v1", "/run/x.sock", "localhost", "/v1");
        check("unix:///run/x.sock", "/run/x.sock", "localhost", "");
    }

    #[test]
    fn what_is_no_url_is_refused() {
        for url in [
            "",
            "example.com",
            "ftp://x/",
            "http://",
            "http://u@h/",
            "http://h:x/",
            "http://h:99999/",
            "http://h/a b",
            "http://h/?q",
            "unix://x",
        ] {
            assert!(Target::parse(url).is_err(), "{url}");
        }
    }
}
