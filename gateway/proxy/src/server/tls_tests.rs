//! Clients with certificates, before and after the file of their authorities was replaced.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use penstock_config::{Overrides, load};
use penstock_telemetry::AccessLog;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{
    ClientConfig, ClientConnection, HandshakeKind, RootCertStore, ServerConfig, ServerConnection,
    SupportedProtocolVersion,
};

use super::*;

/// Folder with the files of a listener, deleted at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("penstock-tls-{name}-{}", std::process::id()));
        // Left behind by a process of the same number.
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder");
        Self(folder)
    }

    fn files(&self, client_required: bool) -> TlsFiles {
        let file = |name: &str| self.0.join(name);
        TlsFiles { cert: file("cert"), key: file("key"), client_ca: Some(file("clients")), client_required }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::<String>::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("an authority"))
    }

    fn member(&self, name: &str) -> (rcgen::Certificate, KeyPair) {
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new([name.to_owned()]).expect("a name");
        (params.signed_by(&key, &self.0).expect("signed"), key)
    }

    /// Client with a certificate of this authority, which goes on with its sessions; it knows the server's.
    fn client(&self, site: &Self, version: &'static SupportedProtocolVersion) -> Arc<ClientConfig> {
        let (certificate, key) = self.member("client.example");
        let mut roots = RootCertStore::empty();
        roots.add(site.0.der().clone()).expect("an authority");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[version]);
        let builder = builder.expect("a version").with_root_certificates(roots);
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let config = builder.with_client_auth_cert(vec![certificate.der().clone()], key);
        Arc::new(config.expect("a certificate"))
    }
}

/// Replaces a file as people are told to.
fn replace(place: &Path, text: &str) {
    let next = place.with_extension("next");
    fs::write(&next, text).expect("written");
    fs::rename(&next, place).expect("renamed");
}

/// Moves all that one side has to say to the other; true: it said something.
fn tell(said: &[u8], mut hears: impl FnMut(&mut &[u8]) -> Result<(), rustls::Error>) -> Result<bool, rustls::Error> {
    let mut rest = said;
    while !rest.is_empty() {
        hears(&mut rest)?;
    }
    Ok(!said.is_empty())
}

/// Handshake of a client, and a word from the server: a client has its tickets by then.
fn meet(server: Arc<ServerConfig>, client: &Arc<ClientConfig>) -> Result<HandshakeKind, rustls::Error> {
    let name = ServerName::try_from("site.example").expect("a name");
    let mut client = ClientConnection::new(client.clone(), name)?;
    let mut server = ServerConnection::new(server)?;
    server.writer().write_all(b"word").expect("buffered");
    loop {
        let (mut up, mut down) = (Vec::new(), Vec::new());
        while client.wants_write() {
            client.write_tls(&mut up).expect("in memory");
        }
        let went_up = tell(&up, |rest| {
            server.read_tls(rest).expect("in memory");
            server.process_new_packets().map(drop)
        })?;
        while server.wants_write() {
            server.write_tls(&mut down).expect("in memory");
        }
        let went_down = tell(&down, |rest| {
            client.read_tls(rest).expect("in memory");
            client.process_new_packets().map(drop)
        })?;
        if !went_up && !went_down {
            break;
        }
    }
    let mut word = [0; 4];
    client.reader().read_exact(&mut word).expect("the server's word");
    assert_eq!(&word, b"word");
    Ok(server.handshake_kind().expect("complete"))
}

fn gateway() -> Arc<Gateway> {
    let config = load(None, &Overrides::default(), &|_| None).expect("the default");
    Gateway::new(config, AccessLog::open("off").expect("off"), Vec::new(), Vec::new()).shared()
}

/// Replaces the authorities of a listener: `tls` makes it, and gives what its next handshake would be made with.
fn check<T>(
    name: &str,
    client_required: bool,
    tls: impl Fn(&Gateway, &TlsFiles) -> Arc<Renewed<T>>,
    config: impl Fn(&T) -> Arc<ServerConfig>,
) {
    let (site, before, after) = (Authority::new("site"), Authority::new("before"), Authority::new("the one after"));
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        let folder = Folder::new(name);
        let (files, gateway) = (folder.files(client_required), gateway());
        let (certificate, key) = site.member("site.example");
        let clients = files.client_ca.clone().expect("asked for");
        replace(&files.cert, &certificate.pem());
        replace(&files.key, &key.serialize_pem());
        replace(&clients, &before.0.pem());
        let tls = tls(&gateway, &files);
        let now = || config(&tls.now());
        let [old, new] = [&before, &after].map(|authority| authority.client(&site, version));

        assert_eq!(meet(now(), &old), Ok(HandshakeKind::Full));
        assert_eq!(meet(now(), &old), Ok(HandshakeKind::Resumed), "or the refusal below says less");
        assert!(meet(now(), &new).is_err());
        gateway.refresh_certificate();
        assert_eq!(meet(now(), &old), Ok(HandshakeKind::Resumed), "nothing has changed");

        let open = now();
        replace(&clients, &after.0.pem());
        gateway.refresh_certificate();
        assert!(meet(now(), &old).is_err(), "neither with its certificate nor with its session");
        assert_eq!(meet(now(), &new), Ok(HandshakeKind::Full));
        assert_eq!(meet(now(), &new), Ok(HandshakeKind::Resumed));
        // A handshake that has begun ends as it began, and its session is good for no other.
        drop(meet(open, &old));
        assert!(meet(now(), &old).is_err());

        for nonsense in ["", "-----BEGIN CERTIFICATE-----\n"] {
            replace(&clients, nonsense);
            gateway.refresh_certificate();
            assert_eq!(meet(now(), &new), Ok(HandshakeKind::Resumed), "those in use stay");
            assert!(meet(now(), &old).is_err());
        }
        replace(&clients, &format!("{}{}", before.0.pem(), after.0.pem()));
        gateway.refresh_certificate();
        assert_eq!([&old, &new].map(|client| meet(now(), client)), [Ok(HandshakeKind::Full), Ok(HandshakeKind::Full)]);
    }
}

#[test]
fn authorities_that_are_replaced_vouch_for_no_client_of_the_gateway() {
    for client_required in [false, true] {
        check(
            "gateway",
            client_required,
            |gateway, files| tls(gateway, files).expect("good files"),
            |acceptor| acceptor.acceptor.config().clone(),
        );
    }
}

#[test]
fn authorities_that_are_replaced_vouch_for_no_client_of_the_endpoint_picker() {
    let made = |gateway: &Gateway, files: &TlsFiles| picker_tls(gateway, Some(files)).expect("good files");
    check("picker", true, |gateway, files| made(gateway, files).expect("TLS"), |config| Arc::new(config.clone()));
}
