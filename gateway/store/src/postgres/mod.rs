//! The store of several gateways: PostgreSQL, in the schema `penstock`.
//!
//! Every statement has a deadline and runs on a connection of a bounded pool; a connection on which one was not answered in time, or
//! that was left in the middle of a transaction, is closed and not used again. What SQLite's one writer gives for free is said with
//! locks here: a row is locked before it is judged, a tenant's quota is counted under an advisory lock, and every change of the
//! directory locks its version first, so versions become visible in their order. `lead` is an advisory lock held by a connection of its
//! own.
//!
//! The URL holds a password: it is in no error, no log and no `Debug` output.

mod audit;
mod batches;
mod configs;
mod counters;
mod files;
mod held;
mod keys;
mod ledger;
mod listen;
mod people;
mod responses;
mod schema;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod, Runtime};
use tokio::runtime::Handle;
use tokio::sync::Mutex;
use tokio::time::timeout;
use tokio_postgres::config::SslMode;
use tokio_postgres::{Client, NoTls};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::counters::Words;
use crate::home;
use crate::{Stats, Store, StoreError};
use held::{Counts, Held};
use listen::Listener;

/// Longest wait for the answer to a statement.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for a connection, new or used before.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Advisory lock of the leader: "penstock" in ASCII.
const LEADER_LOCK: i64 = 0x7065_6e73_746f_636b;

/// How the database is reached. Holds a password: no `Debug`.
#[derive(Clone)]
pub struct PostgresOptions {
    /// `postgres://USER:PASSWORD@HOST:PORT/DATABASE?sslmode=require`.
    pub url: String,
    /// For connections with TLS; `None`: without.
    pub tls: Option<rustls::ClientConfig>,
    /// Connections at most, beside the one that listens and the leader's.
    pub connections: usize,
}

/// The store of several gateways.
pub struct Postgres {
    pool: Pool,
    counts: Arc<Counts>,
    connector: Connector,
    leader: Mutex<Option<Client>>,
    listener: Listener,
    words: Words,
}

/// Makes connections.
#[derive(Clone)]
pub(crate) struct Connector {
    config: tokio_postgres::Config,
    tls: Option<MakeRustlsConnect>,
    home: Handle,
}

impl Connector {
    fn new(options: &PostgresOptions) -> Result<Self, StoreError> {
        // What the parser says may quote the URL.
        let bad = |_| StoreError::Broken("the URL of PostgreSQL cannot be read".into());
        let mut config: tokio_postgres::Config = options.url.parse().map_err(bad)?;
        if config.get_application_name().is_none() {
            config.application_name("penstock");
        }
        config.connect_timeout(CONNECT_TIMEOUT).keepalives_idle(Duration::from_secs(30));
        if options.tls.is_none() {
            if config.get_ssl_mode() == SslMode::Require {
                return Err(StoreError::Broken(
                    "the URL of PostgreSQL asks for TLS, for which there are no roots".into(),
                ));
            }
            config.ssl_mode(SslMode::Disable);
        }
        Ok(Self { config, tls: options.tls.clone().map(MakeRustlsConnect::new), home: Handle::current() })
    }

    fn manager(&self) -> Manager {
        // A closed connection is noticed; one that hangs is found by the first statement's deadline.
        let how = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        match &self.tls {
            Some(tls) => Manager::from_config(self.config.clone(), tls.clone(), how),
            None => Manager::from_config(self.config.clone(), NoTls, how),
        }
    }
}

impl Postgres {
    /// Connects, and brings the database to the newest version. Connections live on the runtime that this is called on.
    ///
    /// # Errors
    /// [`StoreError::Broken`] or [`StoreError::Busy`] where it cannot be reached or used.
    pub async fn open(options: &PostgresOptions) -> Result<Self, StoreError> {
        let connector = Connector::new(options)?;
        let pool = Pool::builder(connector.manager())
            .max_size(options.connections.max(1))
            .wait_timeout(Some(CONNECT_TIMEOUT))
            .create_timeout(Some(CONNECT_TIMEOUT))
            .recycle_timeout(Some(CONNECT_TIMEOUT))
            .runtime(Runtime::Tokio1)
            .build()
            .map_err(|error| StoreError::Broken(error.to_string()))?;
        let store = Self {
            pool,
            counts: Arc::default(),
            listener: Listener::start(connector.clone()),
            connector,
            leader: Mutex::default(),
            words: Words::default(),
        };
        schema::migrate(&mut store.held().await?).await?;
        Ok(store)
    }

    /// A connection, for one operation.
    async fn held(&self) -> Result<Held, StoreError> {
        home::at(&self.connector.home, Held::from_pool(&self.pool, &self.counts)).await
    }
}

/// Asks for the leader's lock on a connection of its own, or, on the one that holds it, whether it is alive.
async fn holds_lock(client: &Client, sql: &str) -> bool {
    let asked = timeout(ANSWER_TIMEOUT, client.query_one(sql, &[])).await;
    matches!(asked, Ok(Ok(row)) if row.try_get::<_, bool>(0).unwrap_or(false))
}

#[async_trait]
impl Store for Postgres {
    async fn lead(&self) -> Result<bool, StoreError> {
        let mut leader = self.leader.lock().await;
        if let Some(client) = leader.as_ref() {
            if holds_lock(client, "SELECT true").await {
                return Ok(true);
            }
            // The server ended the lock with the connection, or will: somebody else may lead now.
            *leader = None;
        }
        let client = listen::connect(&self.connector).await?;
        if holds_lock(&client, &format!("SELECT pg_try_advisory_lock({LEADER_LOCK})")).await {
            *leader = Some(client);
        }
        Ok(leader.is_some())
    }

    async fn resign(&self) -> Result<(), StoreError> {
        // Unlocked rather than closed: the next may ask at once.
        if let Some(client) = self.leader.lock().await.take() {
            let sql = format!("SELECT pg_advisory_unlock({LEADER_LOCK})");
            holds_lock(&client, &sql).await;
        }
        Ok(())
    }

    fn stats(&self) -> Stats {
        self.counts.stats()
    }
}
