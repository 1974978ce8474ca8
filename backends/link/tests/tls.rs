//! Connections between members with right, wrong and missing certificates, over real sockets.

use penstock_link::{Reader, Tls, TlsFiles, Writer, accepted, dial};
use penstock_proto::Address;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// A certificate authority with a folder of its own.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: PathBuf,
}

impl Authority {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("penstock-link-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let mut params = CertificateParams::new(Vec::<String>::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("an authority");
        std::fs::write(folder.join("ca.pem"), issuer.pem()).expect("written");
        Self { issuer, folder }
    }

    /// A member with a certificate for `name`.
    fn member(&self, name: &str) -> TlsFiles {
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new([name.to_owned()]).expect("a name");
        let certificate = params.signed_by(&key, &self.issuer).expect("signed");
        let file = |end: &str| self.folder.join(format!("{name}.{end}"));
        std::fs::write(file("pem"), certificate.pem()).expect("written");
        std::fs::write(file("key"), key.serialize_pem()).expect("written");
        TlsFiles { certificate: file("pem"), key: file("key"), ca: self.folder.join("ca.pem") }
    }

    fn tls(&self, name: &str) -> Tls {
        Tls::read(&self.member(name)).expect("good files")
    }
}

impl Drop for Authority {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Results of both ends after an attempt to connect, each having sent a word and read one.
async fn meet(asks: Option<&Tls>, holds: Option<&Tls>) -> (io::Result<()>, io::Result<()>) {
    async fn talk((mut reader, mut writer): (Reader, Writer)) -> io::Result<()> {
        writer.write_all(b"word").await?;
        writer.flush().await?;
        let mut heard = [0; 4];
        reader.read_exact(&mut heard).await?;
        if &heard == b"word" { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = Address::Tcp(listener.local_addr().expect("bound").to_string());
    let holding = async {
        let (stream, _) = listener.accept().await?;
        talk(accepted(stream, holds).await?).await
    };
    let asking = async { talk(dial(&address, asks).await?).await };
    tokio::join!(asking, holding)
}

#[tokio::test]
async fn members_of_one_authority_talk() {
    let ours = Authority::new();
    let (asked, held) = meet(Some(&ours.tls("gateway")), Some(&ours.tls("127.0.0.1"))).await;
    asked.expect("a word from the holder");
    held.expect("a word from the asker");
}

#[tokio::test]
async fn strangers_do_not() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let (gateway, worker) = (ours.tls("gateway"), ours.tls("127.0.0.1"));
    for (what, asks, holds) in [
        ("a gateway of another authority", Some(&theirs.tls("gateway")), Some(&worker)),
        ("a worker of another authority", Some(&gateway), Some(&theirs.tls("127.0.0.1"))),
        ("a worker with a certificate for another host", Some(&gateway), Some(&ours.tls("10.0.0.9"))),
        ("a gateway without TLS", None, Some(&worker)),
        ("a worker without TLS", Some(&gateway), None),
    ] {
        let (asked, held) = meet(asks, holds).await;
        assert!(asked.is_err() && held.is_err(), "{what}: {asked:?}, {held:?}");
    }
}

#[tokio::test]
async fn what_is_said_is_not_on_the_wire() {
    let ours = Authority::new();
    let (gateway, worker) = (ours.tls("gateway"), ours.tls("127.0.0.1"));
    let front = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let back = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = Address::Tcp(front.local_addr().expect("bound").to_string());
    let behind = back.local_addr().expect("bound");
    let relay = tokio::spawn(async move {
        let (mut client, _) = front.accept().await?;
        let mut server = TcpStream::connect(behind).await?;
        let (mut from_client, mut to_client) = client.split();
        let (mut from_server, mut to_server) = server.split();
        let mut seen = Vec::new();
        let mut piece = [0; 4096];
        let up = async {
            loop {
                let count = from_client.read(&mut piece).await?;
                if count == 0 {
                    return to_server.shutdown().await;
                }
                seen.extend_from_slice(&piece[..count]);
                to_server.write_all(&piece[..count]).await?;
            }
        };
        let down = tokio::io::copy(&mut from_server, &mut to_client);
        let _ = tokio::join!(up, down);
        io::Result::Ok(seen)
    });
    const SECRET: &[u8] = b"the prompt that nobody else may read";
    let asking = async {
        let (_, mut writer) = dial(&address, Some(&gateway)).await?;
        writer.write_all(SECRET).await?;
        writer.shutdown().await
    };
    let holding = async {
        let (stream, _) = back.accept().await?;
        let (mut reader, _writer) = accepted(stream, Some(&worker)).await?;
        let mut heard = vec![0; SECRET.len()];
        reader.read_exact(&mut heard).await.map(|_| heard)
    };
    let (asked, held) = tokio::join!(asking, holding);
    asked.expect("sent");
    assert_eq!(held.expect("heard"), SECRET);
    let seen = relay.await.expect("no panic").expect("relayed");
    assert!(seen.len() > SECRET.len() && !seen.windows(8).any(|window| SECRET.windows(8).any(|part| part == window)));
}

#[test]
fn a_file_that_is_wrong_is_named() {
    let ours = Authority::new();
    let good = ours.member("gateway");
    for wrong in [
        TlsFiles { ca: "/nonexistent/ca.pem".into(), ..good.clone() },
        TlsFiles { certificate: good.key.clone(), ..good.clone() },
        TlsFiles { key: good.ca.clone(), ..good.clone() },
        TlsFiles { key: ours.member("other").key, ..good },
    ] {
        let error = Tls::read(&wrong).expect_err("wrong").to_string();
        let named =
            [&wrong.ca, &wrong.certificate, &wrong.key].iter().any(|path| error.contains(&*path.to_string_lossy()));
        assert!(named, "{error}");
    }
}
