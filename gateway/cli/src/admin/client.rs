//! Client of the admin API: one request per connection, over TCP or a Unix socket.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, IF_MATCH};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use penstock_admin::{ADDRESS_FILE, key_path};
use penstock_base::percent_encoded;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

const CONNECT: Duration = Duration::from_secs(5);
/// Timeout of an answer; the API's own deadline is shorter.
const ANSWER: Duration = Duration::from_secs(90);
/// Longest key that is read, in bytes.
const KEY_BYTES_MAX: u64 = 4096;
/// Largest body: a page of a thousand items fits.
const BODY_BYTES_MAX: usize = 64 << 20;

trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// Address of the API.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    Tcp(String),
    Unix(PathBuf),
}

impl Place {
    fn parse(url: &str) -> anyhow::Result<Self> {
        if let Some(path) = url.strip_prefix("unix://") {
            return Ok(Self::Unix(path.into()));
        }
        let Some(rest) = url.strip_prefix("http://") else {
            bail!(
                "{url}: the admin API is at http://ADDRESS:PORT or unix:///PATH (through ssh -L from another machine)"
            );
        };
        let authority = rest.split('/').next().unwrap_or_default();
        if authority.is_empty() {
            bail!("{url} names no host");
        }
        let has_port = authority.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        Ok(Self::Tcp(if has_port { authority.to_owned() } else { format!("{authority}:80") }))
    }

    /// Whether the API is on this machine: only then is this machine's key sent to it.
    fn is_local(&self) -> bool {
        match self {
            Self::Unix(_) => true,
            Self::Tcp(authority) => {
                let host = authority.rsplit_once(':').map_or(authority.as_str(), |(host, _)| host);
                let address = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>();
                host == "localhost" || address.is_ok_and(|address| address.is_loopback())
            }
        }
    }
}

/// Sources of the address and the key.
pub(super) struct Search<'a> {
    pub(super) url: Option<&'a str>,
    /// Name of the environment variable with the key.
    pub(super) key_env: &'a str,
    /// False for requests that need no key: none is looked for.
    pub(super) needs_key: bool,
    pub(super) state_dir: &'a Path,
    /// Most rows of a list.
    pub(super) rows_max: usize,
}

/// Client with an address, and a key where requests need one.
pub(crate) struct Client {
    place: Place,
    key: Option<String>,
    rows_max: usize,
}

/// Answer with a status of 200 to 299.
pub(super) struct Answer {
    pub(super) body: Bytes,
    /// Cursor of the next page of a text.
    pub(super) next: Option<String>,
}

/// Key that the gateway has made for this machine.
///
/// # Errors
/// There is no such file, or it is not this user's to read.
pub(super) fn machine_key(state_dir: &Path) -> anyhow::Result<String> {
    let path = key_path(state_dir);
    let why = || {
        format!(
            "{} cannot be read: has the gateway been started, by this user? (--config or --state-dir say where)",
            path.display()
        )
    };
    let mut text = String::new();
    fs::File::open(&path).and_then(|file| file.take(KEY_BYTES_MAX).read_to_string(&mut text)).with_context(why)?;
    Ok(text.trim().to_owned())
}

impl Client {
    /// Address of the API, for people.
    pub(crate) fn address(&self) -> String {
        match &self.place {
            Place::Tcp(authority) => authority.clone(),
            Place::Unix(path) => format!("unix://{}", path.display()),
        }
    }

    /// Most rows of a list that are shown.
    pub(super) fn rows_max(&self) -> usize {
        self.rows_max
    }

    /// Finds address and key.
    pub(super) fn find(search: &Search<'_>) -> anyhow::Result<Self> {
        let dir = search.state_dir.display();
        let url = match search.url {
            Some(url) => url.to_owned(),
            None => {
                let text = fs::read_to_string(search.state_dir.join(ADDRESS_FILE)).map_err(|_| {
                    anyhow!("no gateway serves an admin API from {dir}: start one (penstock serve), or name its address with --url or --state-dir")
                })?;
                text.lines().next().with_context(|| format!("{dir}/{ADDRESS_FILE} is empty"))?.to_owned()
            }
        };
        let (place, rows_max) = (Place::parse(&url)?, search.rows_max);
        if !search.needs_key {
            return Ok(Self { place, key: None, rows_max });
        }
        let given = std::env::var(search.key_env).ok().filter(|key| !key.trim().is_empty());
        let key = match given {
            Some(key) => key,
            None if place.is_local() => fs::read_to_string(key_path(search.state_dir)).map_err(|error| {
                let path = key_path(search.state_dir);
                anyhow!(
                    "no admin key: put one into the variable {}, or make {} readable ({error})",
                    search.key_env,
                    path.display()
                )
            })?,
            None => bail!("no admin key: put one into the variable {} ({url} is not this machine)", search.key_env),
        };
        Ok(Self { place, key: Some(key.trim().to_owned()), rows_max })
    }

    /// Sends a GET request and reads the JSON of its answer.
    pub(super) async fn get(&self, path: &str) -> anyhow::Result<Value> {
        self.send(Method::GET, path, None, None).await.and_then(|answer| json(&answer.body))
    }

    /// Sends a GET request and returns its answer as bytes.
    pub(super) async fn text(&self, path: &str) -> anyhow::Result<Answer> {
        self.send(Method::GET, path, None, None).await
    }

    /// Sends a request that changes something. `version`: the change happens only to that version.
    pub(super) async fn change(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        version: Option<u64>,
    ) -> anyhow::Result<Value> {
        let expected = version.map(|version| format!("\"{version}\""));
        self.change_at(method, path, body, expected.as_deref()).await
    }

    /// Sends a request that changes something, if the object has that `ETag`.
    pub(super) async fn change_at(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        etag: Option<&str>,
    ) -> anyhow::Result<Value> {
        let answer = self.send(method, path, body, etag).await?;
        if answer.body.is_empty() { Ok(Value::Null) } else { json(&answer.body) }
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        etag: Option<&str>,
    ) -> anyhow::Result<Answer> {
        let (stream, host) = self.connect().await?;
        let bytes = body.map_or_else(Bytes::new, |body| body.to_string().into());
        let mut request = Request::builder().method(method).uri(path).header(HOST, host);
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, format!("Bearer {key}"));
        }
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        if let Some(etag) = etag {
            request = request.header(IF_MATCH, etag);
        }
        let request =
            request.body(Full::new(bytes)).context("the key or the path has characters that no header takes")?;
        timeout(ANSWER, exchange(stream, request)).await.map_err(|_| anyhow!("no answer within {ANSWER:?}"))?
    }

    async fn connect(&self) -> anyhow::Result<(Box<dyn Io>, String)> {
        let late = |_| anyhow!("no connection within {CONNECT:?}");
        match &self.place {
            Place::Tcp(authority) => {
                let connected = timeout(CONNECT, TcpStream::connect(authority)).await.map_err(late)?;
                let hint =
                    || format!("cannot reach the admin API at {authority}: is the gateway running? (penstock serve)");
                Ok((Box::new(connected.with_context(hint)?), authority.clone()))
            }
            Place::Unix(path) => {
                let connected = timeout(CONNECT, UnixStream::connect(path)).await.map_err(late)?;
                let hint = || format!("cannot reach the admin API at {}: is the gateway running?", path.display());
                Ok((Box::new(connected.with_context(hint)?), "localhost".into()))
            }
        }
    }
}

async fn exchange(stream: Box<dyn Io>, request: Request<Full<Bytes>>) -> anyhow::Result<Answer> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.context("no HTTP connection")?;
    // Ends by itself, with its sender.
    tokio::spawn(async move {
        let _closed = connection.await;
    });
    let response = sender.send_request(request).await.context("the gateway closed the connection")?;
    let status = response.status();
    let next = response.headers().get("x-next").and_then(|next| next.to_str().ok()).map(str::to_owned);
    let body = Limited::new(response.into_body(), BODY_BYTES_MAX).collect().await;
    let body = body.map_err(|error| anyhow!("the answer cannot be read: {error}"))?.to_bytes();
    if status.is_success() { Ok(Answer { body, next }) } else { Err(refusal(status.as_u16(), &body)) }
}

/// Error made of the API's refusal.
fn refusal(status: u16, body: &[u8]) -> anyhow::Error {
    let said: Value = serde_json::from_slice(body).unwrap_or_default();
    let error = &said["error"];
    let Some(message) = error["message"].as_str() else { return anyhow!("the admin API answered {status}") };
    let details = error["details"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let lines: String = details.map(|detail| format!("\n  {detail}")).collect();
    anyhow!("{message} ({status}){lines}")
}

fn json(body: &[u8]) -> anyhow::Result<Value> {
    serde_json::from_slice(body).context("the answer is not JSON: is this the address of an admin API?")
}

/// Percent-encoded part of a path or a query, without characters that have a meaning there.
pub(super) fn encoded(text: &str) -> String {
    percent_encoded(text, b"")
}

/// Query string of the pairs that have a value.
pub(super) fn query(pairs: &[(&str, Option<String>)]) -> String {
    let pairs: Vec<_> =
        pairs.iter().filter_map(|(name, value)| Some(format!("{name}={}", encoded(value.as_ref()?)))).collect();
    if pairs.is_empty() { String::new() } else { format!("?{}", pairs.join("&")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read() {
        assert_eq!(Place::parse("http://127.0.0.1:8081").ok(), Some(Place::Tcp("127.0.0.1:8081".into())));
        assert_eq!(Place::parse("http://gw/").ok(), Some(Place::Tcp("gw:80".into())));
        assert_eq!(Place::parse("unix:///run/a.sock").ok(), Some(Place::Unix("/run/a.sock".into())));
        assert!(
            Place::parse("https://gw").is_err()
                && Place::parse("127.0.0.1:1").is_err()
                && Place::parse("http:///").is_err()
        );
    }

    #[test]
    fn the_machines_key_stays_on_the_machine() {
        for (url, local) in [
            ("http://127.0.0.1:1", true),
            ("http://[::1]:1", true),
            ("http://localhost:1", true),
            ("unix:///x", true),
            ("http://10.0.0.1:1", false),
            ("http://127.0.0.1.evil:1", false),
        ] {
            assert_eq!(Place::parse(url).expect("a place").is_local(), local, "{url}");
        }
    }

    #[test]
    fn names_cannot_leave_their_place() {
        assert_eq!(encoded("a/b?c=d e\u{e9}%"), "a%2Fb%3Fc%3Dd%20e%C3%A9%25");
        assert_eq!(query(&[("a", Some("1&b=2".into())), ("c", None)]), "?a=1%26b%3D2");
        assert_eq!(query(&[("c", None)]), "");
    }

    #[test]
    fn a_refusal_is_told_with_its_details() {
        let body = br#"{"error":{"code":"invalid","message":"No.","details":["a","b"]}}"#;
        assert_eq!(refusal(400, body).to_string(), "No. (400)\n  a\n  b");
        assert_eq!(refusal(502, b"<html>").to_string(), "the admin API answered 502");
    }
}
