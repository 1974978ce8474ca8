//! Redis or Valkey: counters that several gateways share, and a cache.
//!
//! Each call is one script, so that comparison and change are one step of the server. One connection carries all calls
//! of the process, multiplexed; it is reopened when it breaks, and until then calls fail at once. One that is silent may
//! lead to a host that is gone, which TCP notices after a quarter of an hour: the call that waited in vain replaces it
//! (`Link`). A server may lose its data or return with an old state. Counts therefore belong to an *era*: a server
//! without one, or whose run id is not its era's, gets a new era from the first client that comes
//! ([`Counters::begin`]). A client of an older era gets [`StoreError::Lost`] and restores the counts that it knows from
//! the ledger. During an era's first [`YOUNG`] nothing is granted, so that all clients have time to restore. A client
//! that comes later restores, too, until one has said that the ledger is restored ([`Counters::restored`]): the first
//! may still read it, or have died over it. The server must not evict (`maxmemory-policy noeviction`, or `volatile-*` with memory to spare), and must be one server, not a
//! cluster: the counters of one call live on different slots.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ::redis::aio::{ConnectionManager, ConnectionManagerConfig};
use ::redis::{Client, FromRedisValue, RedisError, Script, ServerErrorKind, TlsCertificates};
use async_trait::async_trait;
use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::time::timeout;

use crate::counters::{AMOUNT_MAX, Words, check_asks, check_kept, check_settlements};
use crate::home;
use crate::{
    Ask, Begun, CACHE_KEY_BYTES_MAX, CACHE_VALUE_BYTES_MAX, Cache, Counters, Grant, Kept, Settlement, StoreError,
    Window,
};

/// Time limit for an answer: the caller has a local fallback, and a request waiting.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit for opening a connection to the server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Most calls that await the server's answer at once.
const WAITING_MAX: usize = 1024;
/// Longest time to live of a key: ten years.
const LIVE_MAX: u64 = 315_360_000;
/// Time without grants after counters were lost; gateways check several times a second.
const YOUNG: Duration = Duration::from_millis(1500);
/// Tolerated difference between the clocks of gateways and server, added to a key's time to live, in seconds.
const SLACK_SECONDS: u64 = 60;

/// Connection settings. Contains a password: no `Debug`.
#[derive(Clone)]
pub struct RedisOptions {
    /// URL of the server: `redis://USER:PASSWORD@HOST:PORT/DB`, `rediss://…` with TLS, `redis+unix:///path`.
    pub url: String,
    /// Prefix of every key, so that several installations can share a server.
    pub prefix: String,
    /// Certificates (PEM) that the server's is checked against, instead of the system's; for `rediss://`.
    pub ca: Option<Vec<u8>>,
}

/// Shared counters and cache in a Redis or Valkey server.
pub struct Redis {
    client: Client,
    link: Mutex<Arc<Link>>,
    home: Handle,
    prefix: String,
    take: Script,
    settle: Script,
    begin: Script,
    restore: Script,
    restored: Script,
    /// Era of the server's counts that this client counts in; empty: none yet.
    era: Mutex<String>,
    words: Words,
}

/// Connection to the server, until it is silent.
struct Link {
    connection: ConnectionManager,
    /// Number of calls that the server has answered on the connection, or that have failed at once.
    heard: AtomicU64,
}

impl Link {
    /// Connection that is opened at the first call. Must be called on the runtime that drives it.
    fn lazy(client: &Client) -> Result<Arc<Self>, StoreError> {
        let config = ConnectionManagerConfig::new()
            .set_number_of_retries(2)
            .set_min_delay(Duration::from_millis(50))
            .set_max_delay(Duration::from_millis(500))
            .set_connection_timeout(Some(CONNECT_TIMEOUT))
            .set_response_timeout(Some(ANSWER_TIMEOUT))
            .set_concurrency_limit(WAITING_MAX)
            .set_pipeline_buffer_size(WAITING_MAX);
        let connection = ConnectionManager::new_lazy_with_config(client.clone(), config);
        Ok(Arc::new(Self { connection: connection.map_err(|error| fault(&error))?, heard: AtomicU64::new(0) }))
    }
}

impl Redis {
    /// Connects and begins to count, with nothing to restore.
    ///
    /// # Errors
    /// [`StoreError::Broken`] or [`StoreError::Busy`] if the server cannot be reached.
    pub async fn open(options: &RedisOptions) -> Result<Self, StoreError> {
        let this = Self::lazy(options)?;
        if let Begun::Anew(wait) = this.begin().await? {
            this.restored().await?;
            tokio::time::sleep(wait).await;
        }
        Ok(this)
    }

    /// Creates a client that connects at the first call. Must be called on a runtime, which drives the connection.
    ///
    /// # Errors
    /// [`StoreError::Broken`] for a URL that cannot be parsed.
    pub fn lazy(options: &RedisOptions) -> Result<Self, StoreError> {
        // The client's TLS uses the process-wide crypto provider; it may be installed already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        // The parser's message may quote the URL.
        let bad = |_| StoreError::Broken("the URL of Redis cannot be read".into());
        let client = match &options.ca {
            None => Client::open(options.url.as_str()),
            Some(ca) => {
                let certificates = TlsCertificates { client_tls: None, root_cert: Some(ca.clone()) };
                Client::build_with_tls(options.url.as_str(), certificates)
            }
        };
        let client = client.map_err(bad)?;
        Ok(Self {
            link: Mutex::new(Link::lazy(&client)?),
            client,
            home: Handle::current(),
            prefix: options.prefix.clone(),
            take: Script::new(include_str!("take.lua")),
            settle: Script::new(include_str!("settle.lua")),
            begin: Script::new(include_str!("begin.lua")),
            restore: Script::new(include_str!("restore.lua")),
            restored: Script::new(include_str!("restored.lua")),
            era: Mutex::default(),
            words: Words::default(),
        })
    }

    /// Keys of the era, and of its time without grants.
    fn eras(&self) -> [String; 2] {
        ["era", "young"].map(|name| format!("{}{name}", self.prefix))
    }

    fn era(&self) -> String {
        self.era.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Run id of the server, which changes with each restart; empty if the user may not call INFO.
    async fn run(&self) -> Result<String, StoreError> {
        let command = ::redis::cmd("INFO").arg("server").take();
        let told: Result<String, _> = self.ask(async |mut connection| command.query_async(&mut connection).await).await;
        match told {
            Ok(told) => {
                let line = told.lines().find_map(|line| line.strip_prefix("run_id:"));
                Ok(line.unwrap_or_default().trim().to_owned())
            }
            Err(StoreError::Broken(why)) if why.contains("NOPERM") => Ok(String::new()),
            Err(error) => Err(error),
        }
    }

    /// Key of a holder's numbers (last lease call, last settlement).
    fn holder(&self, name: &str) -> String {
        format!("{}h:{name}", self.prefix)
    }

    /// Raises counters to known spent amounts (empty holder), or sets the leases of a holder.
    async fn lift(&self, holder: &str, kept: &[Kept], now: u64) -> Result<(), StoreError> {
        if kept.is_empty() {
            return Ok(());
        }
        let mut script = self.restore.prepare_invoke();
        let [era, _] = self.eras();
        script.key(era).key(self.holder(holder)).arg(self.era()).arg(holder).arg(self.words.of(holder));
        for one in kept {
            script.key(self.counter(&one.counter, one.window));
            // A window without end lives as long as its lease.
            let window = if one.window.seconds > 0 {
                live(one.window, now)
            } else {
                one.until.saturating_sub(now) + SLACK_SECONDS
            };
            script.arg(one.amount.min(AMOUNT_MAX)).arg(one.until.min(AMOUNT_MAX)).arg(window.min(LIVE_MAX));
        }
        let word: u64 = self.ask(async |mut connection| script.invoke_async(&mut connection).await).await?;
        if !holder.is_empty() {
            self.words.said(holder, word);
        }
        Ok(())
    }

    fn counter(&self, name: &str, window: Window) -> String {
        format!("{}c:{}:{}:{name}", self.prefix, window.start, window.seconds)
    }

    async fn ask<T: FromRedisValue>(
        &self,
        question: impl AsyncFnOnce(ConnectionManager) -> Result<T, RedisError>,
    ) -> Result<T, StoreError> {
        let link = self.link.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let heard = link.heard.load(Ordering::Relaxed);
        let asked = timeout(ANSWER_TIMEOUT + CONNECT_TIMEOUT, question(link.connection.clone()));
        let answered = home::at(&self.home, asked).await;
        match &answered {
            Ok(Err(error)) if error.is_timeout() => self.replace(&link, heard),
            Err(_) => self.replace(&link, heard),
            Ok(_) => drop(link.heard.fetch_add(1, Ordering::Relaxed)),
        }
        answered.map_err(|_| StoreError::Busy)?.map_err(|error| fault(&error))
    }

    /// Replaces a connection on which nothing was heard since a call began, unless another call has.
    fn replace(&self, silent: &Arc<Link>, heard: u64) {
        if silent.heard.load(Ordering::Relaxed) != heard {
            return;
        }
        let _home = self.home.enter();
        let mut link = self.link.lock().unwrap_or_else(PoisonError::into_inner);
        if Arc::ptr_eq(&link, silent)
            && let Ok(new) = Link::lazy(&self.client)
        {
            *link = new;
        }
    }
}

/// Time to live of a counter in seconds: its window, and the next one, in which a sliding window counts it.
fn live(window: Window, now: u64) -> u64 {
    let end = window.end().unwrap_or(now).saturating_add(window.seconds);
    end.saturating_sub(now).saturating_add(SLACK_SECONDS).min(LIVE_MAX)
}

fn fault(error: &RedisError) -> StoreError {
    if error.is_timeout() {
        return StoreError::Busy;
    }
    match error.kind() {
        ::redis::ErrorKind::Server(ServerErrorKind::BusyLoading | ServerErrorKind::TryAgain) => StoreError::Busy,
        _ if error.code() == Some("OOM") => StoreError::Full,
        _ if error.code() == Some("LOST") => StoreError::Lost,
        _ if error.code() == Some("YOUNG") => StoreError::Busy,
        _ if error.is_io_error() => StoreError::Broken(format!("Redis: {error}")),
        // The server's message may quote the request.
        _ => StoreError::Broken(format!("Redis: {} {}", error.category(), error.code().unwrap_or_default())),
    }
}

#[async_trait]
impl Counters for Redis {
    async fn take(&self, holder: &str, asks: &[Ask], whole: bool, now: u64) -> Result<Vec<Grant>, StoreError> {
        check_asks(holder, asks)?;
        if asks.is_empty() {
            return Ok(vec![]);
        }
        let mut script = self.take.prepare_invoke();
        let [era, young] = self.eras();
        script.key(era).key(young).key(self.holder(holder));
        script.arg(holder).arg(now).arg(u8::from(whole)).arg(self.era()).arg(self.words.of(holder));
        for ask in asks {
            let before = ask.window.before(now).filter(|_| ask.sliding);
            let (window, part) = before.map_or((ask.window, 0), |(window, part, _)| (window, part));
            script.key(self.counter(&ask.counter, ask.window)).key(self.counter(&ask.counter, window));
            script.arg(ask.max.min(AMOUNT_MAX)).arg(ask.want).arg(ask.least).arg(ask.until.min(AMOUNT_MAX));
            script.arg(ask.window.seconds).arg(part).arg(live(ask.window, now));
        }
        let answer: Vec<u64> = self.ask(async |mut connection| script.invoke_async(&mut connection).await).await?;
        let grants: Vec<Grant> =
            answer.chunks_exact(3).map(|one| Grant { granted: one[0], leased: one[1], used: one[2] }).collect();
        if grants.len() == asks.len() { Ok(grants) } else { Err(StoreError::Broken("Redis: an odd answer".into())) }
    }

    async fn begin(&self) -> Result<Begun, StoreError> {
        let mut random = [0; 16];
        getrandom::fill(&mut random).map_err(|error| StoreError::Broken(format!("no random numbers: {error}")))?;
        let new = format!("{:032x}", u128::from_le_bytes(random));
        let run = self.run().await?;
        let mut script = self.begin.prepare_invoke();
        let [era, young] = self.eras();
        script.key(era).key(young).arg(&new).arg(run).arg(YOUNG.as_millis() as u64);
        let told: (String, u64, u8) =
            self.ask(async |mut connection| script.invoke_async(&mut connection).await).await?;
        let (era, wait, owed) = told;
        let mut known = self.era.lock().unwrap_or_else(PoisonError::into_inner);
        // A client without an era has counted nothing yet; once the era is restored and grants, it has nothing to restore.
        let is_settled = known.is_empty() && wait == 0 && owed == 0;
        if *known == era || is_settled {
            *known = era;
            return Ok(Begun::Whole);
        }
        *known = era;
        Ok(Begun::Anew(Duration::from_millis(wait)))
    }

    async fn restore(&self, kept: &[Kept], now: u64) -> Result<(), StoreError> {
        check_kept("ledger", kept)?;
        self.lift("", kept, now).await
    }

    async fn restored(&self) -> Result<(), StoreError> {
        let mut script = self.restored.prepare_invoke();
        let [era, _] = self.eras();
        script.key(era).arg(self.era());
        self.ask(async |mut connection| script.invoke_async::<()>(&mut connection).await).await
    }

    async fn lease(&self, holder: &str, kept: &[Kept], now: u64) -> Result<(), StoreError> {
        check_kept(holder, kept)?;
        self.lift(holder, kept, now).await
    }

    async fn settle(&self, holder: &str, nth: u64, settlements: &[Settlement], now: u64) -> Result<(), StoreError> {
        check_settlements(holder, nth, settlements)?;
        if settlements.is_empty() {
            return Ok(());
        }
        let mut script = self.settle.prepare_invoke();
        let [era, _] = self.eras();
        script.key(era).key(self.holder(holder)).arg(holder).arg(self.era()).arg(nth);
        for one in settlements {
            script.key(self.counter(&one.counter, one.window));
            script.arg(one.leased).arg(one.spent).arg(one.window.seconds).arg(live(one.window, now));
        }
        self.ask(async |mut connection| script.invoke_async::<()>(&mut connection).await).await
    }
}

#[async_trait]
impl Cache for Redis {
    async fn get(&self, key: &str) -> Result<Option<Bytes>, StoreError> {
        check_key(key)?;
        let command = ::redis::cmd("GET").arg(format!("{}k:{key}", self.prefix)).take();
        let found: Option<Vec<u8>> =
            self.ask(async |mut connection| command.query_async(&mut connection).await).await?;
        Ok(found.map(Bytes::from))
    }

    async fn put(&self, key: &str, value: Bytes, seconds: u64) -> Result<(), StoreError> {
        check_key(key)?;
        if value.len() > CACHE_VALUE_BYTES_MAX {
            return Err(StoreError::Misuse("a value that is too long"));
        }
        let mut command = ::redis::cmd("SET");
        command.arg(format!("{}k:{key}", self.prefix)).arg(value.as_ref());
        command.arg("EX").arg(seconds.clamp(1, LIVE_MAX));
        self.ask(async |mut connection| command.query_async::<()>(&mut connection).await).await
    }
}

fn check_key(key: &str) -> Result<(), StoreError> {
    if key.len() > CACHE_KEY_BYTES_MAX { Err(StoreError::Misuse("a key that is too long")) } else { Ok(()) }
}
