//! Stores that other workers may read too: Redis or Valkey ([`redis`]), a bucket of S3 ([`s3`]).
//!
//! A block is one value, header and bytes, named by identity and hash. Several threads have a connection each, so that
//! as many blocks are in flight. Each operation has one deadline for the whole of it, an answer larger than a block is
//! not taken into memory, and after three failures in a row the store rests for a while, in which calls fail at once.
//!
//! The clients are async, the threads of a tier are not: each thread has a [`Line`], which drives its connection while
//! it waits.

#[cfg(feature = "s3")]
mod http;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "s3")]
mod s3;

use super::block::{HEADER_BYTES, Identity};
use super::io::{Failure, Store};
use penstock_kv::tier::Link;
use penstock_proto::BlockHash;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;
use tracing::{info, warn};

/// Longest wait for a connection to the store.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);
/// Longest time for an operation, including the connection: meanwhile a waiting request would compute the block.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// Failures in a row after which a store rests.
const FAILURES_MAX: u32 = 3;
/// Pause of a store after [`FAILURES_MAX`] failures in a row, and again after each further one.
const REST: Duration = Duration::from_secs(5);

/// The store at `url`, once per thread. Does not connect yet.
///
/// # Errors
/// A message that repeats neither the URL nor the secret.
pub(super) fn open(url: &str, secret: Option<&str>, identity: &Identity) -> Result<Vec<Box<dyn Store>>, String> {
    #[cfg(feature = "s3")]
    if url.starts_with("s3://") {
        return s3::stores(url, secret, identity);
    }
    #[cfg(feature = "redis")]
    if !url.starts_with("s3://") {
        return redis::stores(url, secret, identity);
    }
    let _ = (secret, identity);
    let (scheme, feature) = if url.starts_with("s3://") { ("S3", "s3") } else { ("Redis", "redis") };
    Err(format!("this build has no {scheme}: build with the feature {feature}"))
}

/// Value of a block in a store.
fn seal(identity: &Identity, link: Link, bytes: &[u8]) -> Vec<u8> {
    let mut value = identity.seal(link, 0, bytes).to_vec();
    value.extend_from_slice(bytes);
    value
}

/// Size of a block's value in bytes.
fn value_bytes(identity: &Identity) -> usize {
    HEADER_BYTES + identity.block_bytes()
}

/// Bytes of the block `hash`, if `value` holds it.
fn unseal(identity: &Identity, hash: BlockHash, value: &[u8]) -> Result<Vec<u8>, Failure> {
    let Some((header, bytes)) = value.split_at_checked(HEADER_BYTES) else { return Err(Failure::Corrupt) };
    match identity.check(header, hash, bytes) {
        Ok(_) => Ok(bytes.to_vec()),
        Err(why) => {
            warn!(%why, "a KV block of the remote tier is discarded");
            Err(Failure::Corrupt)
        }
    }
}

/// One thread's runtime for a store, with the failure state that all threads share.
struct Line {
    rest: Arc<Rest>,
    runtime: Runtime,
}

impl Line {
    /// `count` lines to one store.
    fn some(count: usize) -> Result<Vec<Self>, String> {
        let rest = Arc::new(Rest { origin: Instant::now(), failures: AtomicU32::new(0), until: AtomicU64::new(0) });
        let line =
            || Ok(Self { rest: Arc::clone(&rest), runtime: Builder::new_current_thread().enable_all().build()? });
        let lines: std::io::Result<Vec<Self>> = (0..count).map(|_| line()).collect();
        lines.map_err(|error| format!("starting the remote KV tier: {error}"))
    }

    /// Waits for an exchange, within the deadline. Only [`Failure::Broken`] counts as a failure of the store.
    fn ask<T>(&self, exchange: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
        if self.rest.rests() {
            return Err(Failure::Broken);
        }
        let answer = self.runtime.block_on(async { timeout(ANSWER_TIMEOUT, exchange).await });
        let answer = answer.unwrap_or(Err(Failure::Broken));
        self.rest.went(!matches!(answer, Err(Failure::Broken)));
        answer
    }
}

/// Failure state shared by the threads of one store.
struct Rest {
    origin: Instant,
    failures: AtomicU32,
    /// End of the rest, in milliseconds after `origin`.
    until: AtomicU64,
}

impl Rest {
    fn now(&self) -> u64 {
        self.origin.elapsed().as_millis() as u64
    }

    fn rests(&self) -> bool {
        self.now() < self.until.load(Ordering::Relaxed)
    }

    fn went(&self, well: bool) {
        if well {
            if self.failures.swap(0, Ordering::Relaxed) >= FAILURES_MAX {
                info!("the remote KV tier answers again");
            }
        } else {
            let failures = self.failures.fetch_add(1, Ordering::Relaxed).saturating_add(1);
            if failures < FAILURES_MAX {
                return;
            }
            if failures == FAILURES_MAX {
                warn!("the remote KV tier does not answer: no requests go there for a pause");
            }
            self.until.store(self.now() + REST.as_millis() as u64, Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, feature = "redis", feature = "s3"))]
mod tests {
    use super::*;
    use penstock_kv::SlotId;
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpListener, TcpStream};

    const BYTES: usize = 5000;
    const HASH: BlockHash = BlockHash(0xab << 120);

    fn identity() -> Identity {
        Identity::new(b"model", "numerics", BYTES)
    }

    /// A server that answers the first query of each connection with `greeting`, and all later ones with `answer`.
    fn server(greeting: &'static [u8], answer: impl Fn(&mut TcpStream, &str) + Send + Copy + 'static) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
        let address = listener.local_addr().expect("bound");
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                std::thread::spawn(move || {
                    let mut is_first = !greeting.is_empty();
                    let mut asked = [0; 4096];
                    while let Ok(bytes @ 1..) = stream.read(&mut asked) {
                        let said = String::from_utf8_lossy(&asked[..bytes]);
                        if std::mem::take(&mut is_first) {
                            drop(stream.write_all(greeting));
                        } else {
                            answer(&mut stream, &said);
                        }
                    }
                });
            }
        });
        address
    }

    fn first(url: &str) -> Box<dyn Store> {
        open(url, Some("id:key"), &identity()).expect("a store").swap_remove(0)
    }

    /// Answers of a Redis to the first commands of its client.
    const GREETING: &[u8] = b"+OK\r\n+OK\r\n+OK\r\n";

    fn redis(answer: impl Fn(&mut TcpStream, &str) + Send + Copy + 'static) -> Box<dyn Store> {
        first(&format!("redis://{}", server(GREETING, answer)))
    }

    fn s3(answer: impl Fn(&mut TcpStream, &str) + Send + Copy + 'static) -> Box<dyn Store> {
        first(&format!("s3://blocks/kv?endpoint=http://{}", server(b"", answer)))
    }

    fn say(stream: &mut TcpStream, what: &str) {
        drop(stream.write_all(what.as_bytes()));
    }

    /// Sends a byte now and then, for ever.
    fn drip(stream: &mut TcpStream) {
        while stream.write_all(b"x").is_ok() {
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    #[track_caller]
    fn ends_in_time(mut store: Box<dyn Store>) {
        let began = Instant::now();
        assert_eq!(store.read(SlotId(0), HASH), Err(Failure::Broken));
        let took = began.elapsed();
        assert!(took >= ANSWER_TIMEOUT, "it answered at once and went on: {took:?}");
        assert!(took < ANSWER_TIMEOUT * 3, "{took:?}");
    }

    #[test]
    fn a_store_that_answers_byte_by_byte_has_no_longer_than_one_that_is_silent() {
        ends_in_time(redis(|stream, _| {
            say(stream, "$5128\r\n");
            drip(stream);
        }));
        ends_in_time(s3(|stream, _| {
            say(stream, "HTTP/1.1 206 Partial Content\r\ncontent-length: 5128\r\n\r\n");
            drip(stream);
        }));
    }

    #[test]
    fn an_answer_larger_than_a_block_is_not_taken_into_memory() {
        let mut store = s3(|stream, _| {
            say(stream, "HTTP/1.1 206 Partial Content\r\ncontent-length: 1000000000000\r\n\r\n");
            while stream.write_all(&[7; 65536]).is_ok() {}
        });
        let began = Instant::now();
        assert_eq!(store.read(SlotId(0), HASH), Err(Failure::Broken));
        assert!(began.elapsed() < ANSWER_TIMEOUT, "it is refused by its size, not by the time it takes");
    }

    #[test]
    fn a_store_that_fails_is_left_alone() {
        // Bound, not listening: nobody else is given the port meanwhile.
        let nobody = tokio::net::TcpSocket::new_v4().expect("a socket");
        nobody.bind("127.0.0.1:0".parse().expect("an address")).expect("a free port");
        let closed = nobody.local_addr().expect("bound");
        for url in [format!("redis://{closed}"), format!("s3://blocks?endpoint=http://{closed}")] {
            let mut store = first(&url);
            for _ in 0..FAILURES_MAX {
                assert_eq!(store.read(SlotId(0), HASH), Err(Failure::Broken));
            }
            let began = Instant::now();
            assert_eq!((0..1000).map(|_| store.find(&[HASH])).sum::<usize>(), 0);
            assert!(began.elapsed() < ANSWER_TIMEOUT, "nobody was asked");
        }
    }

    #[test]
    fn a_bucket_is_asked_of_a_chain_as_little_as_can_be() {
        static ASKED: AtomicU32 = AtomicU32::new(0);
        let mut store = s3(|stream, asked| {
            ASKED.fetch_add(1, Ordering::Relaxed);
            let name = asked.split_whitespace().nth(1).and_then(|path| path.rsplit('/').next()).unwrap_or_default();
            let is_there = u128::from_str_radix(name, 16).is_ok_and(|hash| hash < 100);
            let status = if is_there { "200 OK" } else { "404 Not Found" };
            let tags = "etag: \"a\"\r\nlast-modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n";
            say(stream, &format!("HTTP/1.1 {status}\r\ncontent-length: 5128\r\n{tags}\r\n"));
        });
        let chain: Vec<BlockHash> = (0..256).map(BlockHash).collect();
        for (from, found, asked) in [(0, 100, 9), (99, 1, 9), (100, 0, 1), (256, 0, 0)] {
            ASKED.store(0, Ordering::Relaxed);
            assert_eq!(store.find(&chain[from..]), found, "from {from}");
            assert!(ASKED.load(Ordering::Relaxed) <= asked, "from {from}");
        }
    }

    #[test]
    fn what_cannot_be_is_refused_without_repeating_it() {
        let said = |url: &str, secret: &str| open(url, Some(secret), &identity()).err().expect("refused");
        for (url, secret) in
            [("s3://blocks", "geheim"), ("s3://geheim:key@blocks", "id:key"), ("redis://geheim@@x:y", "geheim")]
        {
            let said = said(url, secret);
            assert!(!said.contains("geheim"), "{said}");
        }
    }
}
