//! `[endpoint_picker]`: the service that Envoy asks for the endpoint of a request.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use super::TlsFiles;
use super::raw::Document;

/// Listener of the endpoint picker, and the form of its answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointPickerConfig {
    /// Address and port of the gRPC service.
    pub listen: SocketAddr,
    /// TLS of the listener; `None`: HTTP/2 with prior knowledge (h2c).
    pub tls: Option<TlsFiles>,
    /// Most endpoints named in one answer: the chosen one, and those to ask after it.
    pub endpoints_max: usize,
}

/// Reads the table; `None`: no picker is served.
pub(super) fn read(document: &Document<'_>) -> Option<EndpointPickerConfig> {
    let table = document.table("endpoint_picker");
    let endpoints_max = table.number("endpoints_max", 1..=8) as usize;
    let (certificate, key) = (table.text("certificate").map(PathBuf::from), table.text("key").map(PathBuf::from));
    let client_ca = table.text("client_ca").map(PathBuf::from);
    let tls = match (certificate, key) {
        (Some(cert), Some(key)) => Some(TlsFiles { cert, key, client_required: client_ca.is_some(), client_ca }),
        (None, None) => {
            if client_ca.is_some() {
                table.fault("client_ca", "needs certificate and key");
            }
            None
        }
        (Some(_), None) => {
            table.fault("certificate", "needs key too");
            None
        }
        (None, Some(_)) => {
            table.fault("key", "needs certificate too");
            None
        }
    };
    let text = table.text("listen");
    let Some(text) = text else {
        if tls.is_some() {
            table.fault("listen", "is missing");
        }
        return None;
    };
    let full = if text.bytes().all(|byte| byte.is_ascii_digit()) { format!("127.0.0.1:{text}") } else { text };
    let Some(listen) = full.to_socket_addrs().ok().and_then(|mut all| all.next()) else {
        table.fault("listen", format!("{full:?} is not ADDRESS:PORT, as 0.0.0.0:9002"));
        return None;
    };
    Some(EndpointPickerConfig { listen, tls, endpoints_max })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Overrides, load};

    fn read(text: &str) -> Result<Option<EndpointPickerConfig>, String> {
        let read = load(Some(("p.toml", text)), &Overrides::default(), &|_| None);
        read.map(|snapshot| snapshot.endpoint_picker).map_err(|faults| faults.to_string())
    }

    #[test]
    fn it_is_off_unless_it_listens() {
        assert_eq!(read(""), Ok(None));
        let listen = SocketAddr::from(([0, 0, 0, 0], 9002));
        let plain = EndpointPickerConfig { listen, tls: None, endpoints_max: 1 };
        assert_eq!(read("[endpoint_picker]\nlisten = \"0.0.0.0:9002\"\n"), Ok(Some(plain)));
    }

    #[test]
    fn faults_are_named() {
        for (keys, part) in [
            ("listen = \"here\"", "is not ADDRESS:PORT"),
            ("listen = \"9002\"\ncertificate = \"a\"", "certificate: needs key too"),
            ("listen = \"9002\"\nclient_ca = \"a\"", "client_ca: needs certificate and key"),
            ("certificate = \"a\"\nkey = \"b\"", "endpoint_picker.listen: is missing"),
            ("listen = \"9002\"\nendpoints_max = 0", "endpoints_max"),
        ] {
            let faults = read(&format!("[endpoint_picker]\n{keys}\n")).expect_err(keys);
            assert!(faults.contains(part), "{part:?} in {faults}");
        }
    }
}
