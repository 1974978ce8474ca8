//! Store shared by several gateways: PostgreSQL, in the schema `penstock`.
//!
//! Every statement has a deadline and runs on a connection of a bounded pool; a connection whose statement was not
//! answered in time, or that was left within a transaction, is closed and not reused. SQLite serializes writes by its
//! single writer; here locks do so: a row is locked before it is judged, a tenant's quota is counted under an advisory
//! lock, and every change of the directory locks its version first, so versions become visible in order. `lead` is an
//! advisory lock held by its own connection. The server ends the sessions of a gateway that is lost (`session`).
//!
//! The URL contains a password: it appears in no error, no log and no `Debug` output.

mod audit;
mod batches;
mod claims;
mod configs;
mod counters;
mod files;
mod held;
mod inventory;
mod keys;
mod ledger;
mod listen;
mod objects;
mod people;
mod responses;
mod schema;
mod secrets;
mod session;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use deadpool_postgres::{Hook, Manager, ManagerConfig, Pool, RecyclingMethod, Runtime};
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

/// Time limit for the answer to a statement.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for a connection, new or pooled.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Advisory lock of the leader: "penstock" in ASCII.
const LEADER_LOCK: i64 = 0x7065_6e73_746f_636b;

/// Connection settings. Contains a password: no `Debug`.
#[derive(Clone)]
pub struct PostgresOptions {
    /// URL of the database: `postgres://USER:PASSWORD@HOST:PORT/DATABASE?sslmode=require`.
    pub url: String,
    /// TLS settings; `None`: connections without TLS.
    pub tls: Option<rustls::ClientConfig>,
    /// Most pooled connections, besides the listener's and the leader's.
    pub connections: usize,
}

/// Store in PostgreSQL, shared by several gateways.
pub struct Postgres {
    pool: Pool,
    counts: Arc<Counts>,
    connector: Connector,
    leader: Mutex<Option<Arc<Client>>>,
    listener: Listener,
    words: Words,
}

/// Opens connections to the database, on the runtime that opened the store.
#[derive(Clone)]
pub(crate) struct Connector {
    config: tokio_postgres::Config,
    tls: Option<MakeRustlsConnect>,
    home: Handle,
}

impl Connector {
    fn new(options: &PostgresOptions) -> Result<Self, StoreError> {
        // The parser's message may quote the URL.
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
        // The pool notices a closed connection; one that hangs is found by the first statement's deadline.
        let how = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        match &self.tls {
            Some(tls) => Manager::from_config(self.config.clone(), tls.clone(), how),
            None => Manager::from_config(self.config.clone(), NoTls, how),
        }
    }
}

impl Postgres {
    /// Connects and migrates the schema to the newest version. Connections belong to the runtime of this call.
    ///
    /// # Errors
    /// [`StoreError::Broken`] or [`StoreError::Busy`] if the server cannot be reached or used.
    pub async fn open(options: &PostgresOptions) -> Result<Self, StoreError> {
        let connector = Connector::new(options)?;
        let pool = Pool::builder(connector.manager())
            .max_size(options.connections.max(1))
            .wait_timeout(Some(CONNECT_TIMEOUT))
            .create_timeout(Some(CONNECT_TIMEOUT))
            .recycle_timeout(Some(CONNECT_TIMEOUT))
            .runtime(Runtime::Tokio1)
            .post_create(Hook::async_fn(|client, _| Box::pin(session::begin_pooled(client))))
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

    /// Takes a connection from the pool for one operation.
    async fn held(&self) -> Result<Held, StoreError> {
        home::at(&self.connector.home, Held::from_pool(&self.pool, &self.counts)).await
    }
}

/// Runs `sql` on the leader's connection: takes the advisory lock, or checks that the connection that holds it is
/// alive.
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
            // The server has ended the lock with the connection, or will: another process may lead now.
            *leader = None;
        }
        let client = listen::connect(&self.connector).await?;
        if holds_lock(&client, &format!("SELECT pg_try_advisory_lock({LEADER_LOCK})")).await {
            let client = Arc::new(client);
            session::keep(&client, &self.connector.home).await?;
            *leader = Some(client);
        }
        Ok(leader.is_some())
    }

    async fn resign(&self) -> Result<(), StoreError> {
        // Unlock rather than close: the next leader may ask at once.
        if let Some(client) = self.leader.lock().await.take() {
            let sql = format!("SELECT pg_advisory_unlock({LEADER_LOCK})");
            holds_lock(&client, &sql).await;
        }
        Ok(())
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn stats(&self) -> Stats {
        self.counts.stats()
    }
}
