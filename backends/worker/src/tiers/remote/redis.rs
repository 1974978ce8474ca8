//! Redis or Valkey as a store. A block lies under `PREFIX:IDENTITY:HASH`, for a day unless the server evicts it before
//! (`maxmemory-policy allkeys-lru`).

use super::{CONNECT_TIMEOUT, Line, seal, unseal, value_bytes};
use crate::tiers::block::Identity;
use crate::tiers::io::{Failure, Store};
use penstock_kv::SlotId;
use penstock_kv::tier::Link;
use penstock_proto::BlockHash;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, IntoConnectionInfo, RedisResult};

/// Connections to a server, and so blocks in flight at once.
const CONNECTIONS: usize = 4;
/// Time to live of a stored block, in seconds: one day.
const LIVE_SECONDS: u64 = 86_400;
/// Prefix of every key in the server, which ends with a version number.
const PREFIX: &str = "penstock:kv:1";

/// Stores at `url`: `redis://`, `rediss://` with TLS, `redis+unix:///path`.
pub(super) fn stores(url: &str, password: Option<&str>, identity: &Identity) -> Result<Vec<Box<dyn Store>>, String> {
    let refused = |_| "the URL of the remote KV tier is not redis://HOST:PORT/DB".to_owned();
    let mut info = url.into_connection_info().map_err(refused)?;
    if let Some(password) = password {
        let settings = info.redis_settings().clone().set_password(password);
        info = info.set_redis_settings(settings);
    }
    let client = Client::open(info).map_err(refused)?;
    let prefix = format!("{PREFIX}:{}", identity.name());
    let one = |line| Server {
        client: client.clone(),
        identity: identity.clone(),
        prefix: prefix.clone(),
        line,
        connection: None,
    };
    Ok(Line::some(CONNECTIONS)?.into_iter().map(|line| Box::new(one(line)) as Box<dyn Store>).collect())
}

/// One connection to the server. Holds a password: no `Debug`.
struct Server {
    client: Client,
    identity: Identity,
    prefix: String,
    line: Line,
    connection: Option<MultiplexedConnection>,
}

impl Server {
    /// Runs one exchange; a connection that failed is not reused.
    fn ask<T>(
        &mut self,
        exchange: impl AsyncFnOnce(&mut MultiplexedConnection) -> RedisResult<T>,
    ) -> Result<T, Failure> {
        let Self { client, line, connection, .. } = self;
        let answer = line.ask(async {
            let answer = match connected(client, connection).await {
                Ok(connection) => exchange(connection).await,
                Err(error) => Err(error),
            };
            answer.map_err(|error| {
                // The error's text could repeat the sent bytes.
                tracing::debug!(kind = ?error.kind(), "a request to the remote KV tier failed");
                Failure::Broken
            })
        });
        if answer.is_err() {
            *connection = None;
        }
        answer
    }

    fn key(&self, hash: BlockHash) -> String {
        format!("{}:{hash:?}", self.prefix)
    }
}

async fn connected<'a>(
    client: &Client,
    connection: &'a mut Option<MultiplexedConnection>,
) -> RedisResult<&'a mut MultiplexedConnection> {
    match connection {
        Some(connection) => Ok(connection),
        None => {
            // The deadline of the exchange is that of the line.
            let config =
                AsyncConnectionConfig::new().set_connection_timeout(Some(CONNECT_TIMEOUT)).set_response_timeout(None);
            Ok(connection.insert(client.get_multiplexed_async_connection_with_config(&config).await?))
        }
    }
}

impl Store for Server {
    fn write(&mut self, _: SlotId, link: Link, bytes: &[u8]) -> Result<(), Failure> {
        let (key, value) = (self.key(link.hash), seal(&self.identity, link, bytes));
        // A value under this name is the same block, so it is kept.
        let mut set = redis::cmd("SET");
        set.arg(key).arg(value).arg("EX").arg(LIVE_SECONDS);
        self.ask(async |connection| set.query_async::<()>(connection).await)
    }

    fn read(&mut self, _: SlotId, hash: BlockHash) -> Result<Vec<u8>, Failure> {
        // One byte more than a block reveals a longer value; a missing value is empty.
        let mut get = redis::cmd("GETRANGE");
        get.arg(self.key(hash)).arg(0).arg(value_bytes(&self.identity));
        let value: Vec<u8> = self.ask(async |connection| get.query_async(connection).await)?;
        if value.is_empty() { Err(Failure::Gone) } else { unseal(&self.identity, hash, &value) }
    }

    fn find(&mut self, hashes: &[BlockHash]) -> usize {
        let mut pipe = redis::pipe();
        for hash in hashes {
            pipe.cmd("EXISTS").arg(self.key(*hash));
        }
        let there: Vec<bool> = self.ask(async |connection| pipe.query_async(connection).await).unwrap_or_default();
        there.iter().take_while(|there| **there).count()
    }
}
