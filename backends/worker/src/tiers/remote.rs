//! A store that other workers may read too: Redis or Valkey.
//!
//! A block is one value, header and bytes, under `PREFIX:IDENTITY:HASH`, and lives for a day unless the server evicts it before
//! (`maxmemory-policy allkeys-lru`). Several threads have a connection each, so that as many blocks are on their way; every call has a
//! deadline, and after three failures in a row the store is left alone for a while, in which calls fail at once.

use super::block::{HEADER_BYTES, Identity};
use super::io::{Failure, Store};
use penstock_kv::SlotId;
use penstock_kv::tier::Link;
use penstock_proto::BlockHash;
use redis::{Client, Connection, IntoConnectionInfo, RedisResult};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// Longest wait for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);
/// Longest wait for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// Failures in a row after which the store rests.
const FAILURES_MAX: u32 = 3;
/// How long.
const REST: Duration = Duration::from_secs(5);
/// Life of a block, in seconds.
const LIVE_SECONDS: u64 = 86_400;
/// Before every key.
const PREFIX: &str = "penstock:kv:1";

/// Where the server is. Holds a password: no `Debug`.
#[derive(Clone)]
pub(crate) struct Server {
    client: Client,
    identity: Identity,
    prefix: String,
    rest: Arc<Rest>,
}

/// Shared by the threads of one server.
struct Rest {
    origin: Instant,
    failures: AtomicU32,
    /// Milliseconds after `origin`.
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
        } else if self.failures.fetch_add(1, Ordering::Relaxed) + 1 >= FAILURES_MAX {
            if self.until.load(Ordering::Relaxed) == 0 {
                warn!("the remote KV tier does not answer: it rests");
            }
            self.until.store(self.now() + REST.as_millis() as u64, Ordering::Relaxed);
        }
    }
}

impl Server {
    /// A server at `url`: `redis://`, `rediss://` with TLS, `redis+unix:///path`. Does not connect yet.
    ///
    /// # Errors
    /// A message that does not repeat the URL: it could hold a password.
    pub(crate) fn new(url: &str, password: Option<&str>, identity: &Identity) -> Result<Self, String> {
        let refused = |_| "the URL of the remote KV tier is not redis://HOST:PORT/DB".to_owned();
        let mut info = url.into_connection_info().map_err(refused)?;
        if let Some(password) = password {
            let settings = info.redis_settings().clone().set_password(password);
            info = info.set_redis_settings(settings);
        }
        let client = Client::open(info).map_err(refused)?;
        let rest = Rest { origin: Instant::now(), failures: AtomicU32::new(0), until: AtomicU64::new(0) };
        let prefix = format!("{PREFIX}:{}", identity.name());
        Ok(Self { client, identity: identity.clone(), prefix, rest: Arc::new(rest) })
    }

    /// `count` stores with a connection each.
    pub(crate) fn stores(&self, count: usize) -> Vec<Box<dyn Store>> {
        let one = || Box::new(Remote { server: self.clone(), connection: None }) as Box<dyn Store>;
        (0..count).map(|_| one()).collect()
    }
}

struct Remote {
    server: Server,
    connection: Option<Connection>,
}

impl Remote {
    /// Runs one exchange; a connection that failed is not used again.
    fn ask<T>(&mut self, exchange: impl FnOnce(&mut Connection) -> RedisResult<T>) -> Result<T, Failure> {
        if self.server.rest.rests() {
            return Err(Failure::Broken);
        }
        let result = self.connected().and_then(exchange);
        self.server.rest.went(result.is_ok());
        result.map_err(|error| {
            // Its text could repeat what was sent.
            tracing::debug!(kind = ?error.kind(), "the remote KV tier");
            self.connection = None;
            Failure::Broken
        })
    }

    fn connected(&mut self) -> RedisResult<&mut Connection> {
        if self.connection.is_none() {
            let connection = self.server.client.get_connection_with_timeout(CONNECT_TIMEOUT)?;
            connection.set_read_timeout(Some(ANSWER_TIMEOUT))?;
            connection.set_write_timeout(Some(ANSWER_TIMEOUT))?;
            self.connection = Some(connection);
        }
        Ok(self.connection.as_mut().expect("it was made above"))
    }

    fn key(&self, hash: BlockHash) -> String {
        format!("{}:{hash:?}", self.server.prefix)
    }
}

impl Store for Remote {
    fn write(&mut self, _: SlotId, link: Link, bytes: &[u8]) -> Result<(), Failure> {
        let key = self.key(link.hash);
        let mut value = self.server.identity.seal(link, 0, bytes).to_vec();
        value.extend_from_slice(bytes);
        // What is there under this name is the same block.
        let mut set = redis::cmd("SET");
        set.arg(key).arg(value).arg("EX").arg(LIVE_SECONDS);
        self.ask(|connection| set.query::<()>(connection))
    }

    fn read(&mut self, _: SlotId, hash: BlockHash) -> Result<Vec<u8>, Failure> {
        let expected = HEADER_BYTES + self.server.identity.block_bytes();
        let key = self.key(hash);
        // A value of another length is not taken into memory.
        let (length, value) = self.ask(|connection| {
            let length: usize = redis::cmd("STRLEN").arg(&key).query(connection)?;
            let wanted = length == expected;
            let value: Option<Vec<u8>> = if wanted { redis::cmd("GET").arg(&key).query(connection)? } else { None };
            Ok((length, value))
        })?;
        let Some(mut value) = value else {
            return Err(if length == 0 { Failure::Gone } else { Failure::Corrupt });
        };
        if value.len() < HEADER_BYTES {
            return Err(Failure::Gone);
        }
        let bytes = value.split_off(HEADER_BYTES);
        match self.server.identity.check(&value, hash, &bytes) {
            Ok(_) => Ok(bytes),
            Err(why) => {
                warn!(%why, "a KV block of the remote tier is not used");
                Err(Failure::Corrupt)
            }
        }
    }

    fn find(&mut self, hashes: &[BlockHash]) -> usize {
        let mut pipe = redis::pipe();
        for hash in hashes {
            pipe.cmd("EXISTS").arg(self.key(*hash));
        }
        let there: Vec<bool> = self.ask(|connection| pipe.query(connection)).unwrap_or_default();
        there.iter().take_while(|there| **there).count()
    }
}
