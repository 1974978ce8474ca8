//! Connections to the stores that the config names: SQLite or PostgreSQL for stored objects; nothing, PostgreSQL or
//! Redis for shared counters.
//!
//! Connections to servers live on a small runtime of their own, as long as the process: the runtimes of listeners come
//! and go.

use std::path::PathBuf;
use std::sync::Arc;

use penstock_store::{Cache, Counters, Sqlite, SqliteOptions, Store, StoreError};

#[cfg(any(feature = "postgres", feature = "redis"))]
use penstock_config::CountersConfig;
use penstock_config::Snapshot;

/// Reason why the store cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The folder for the database is not known, or cannot be created.
    #[error("{0}")]
    Place(String),
    /// The SQLite database exists and cannot be used.
    #[error("{}: {error}", .path.display())]
    Store {
        /// Path of the SQLite database.
        path: PathBuf,
        /// Error of opening the database.
        error: StoreError,
    },
    /// A database server cannot be reached, or refuses the connection.
    #[error("{what} cannot be used: {error}")]
    Server {
        /// Name of the server for the message, as PostgreSQL.
        what: &'static str,
        /// Error of the server; its text has no passwords.
        error: StoreError,
    },
}

/// Services that several gateways share besides the store.
#[derive(Clone)]
pub struct Shared {
    /// Counters of limits that all gateways count in.
    pub counters: Arc<dyn Counters>,
    /// Cache for plugins; `None`: PostgreSQL is no cache.
    pub cache: Option<Arc<dyn Cache>>,
}

/// Opens the store that the config names. Blocks, for some seconds at most where a server does not answer.
///
/// # Errors
/// [`OpenError`] with what to tell the operator.
pub fn open(config: &Snapshot) -> Result<Arc<dyn Store>, OpenError> {
    #[cfg(feature = "postgres")]
    if let Some(server) = &config.store.postgres {
        return Ok(postgres(server, server.connections)?);
    }
    let path = match &config.store.path {
        Some(path) => path.clone(),
        None => {
            let folder = penstock_config::state_dir(config).map_err(OpenError::Place)?;
            let made = std::fs::create_dir_all(&folder);
            made.map_err(|error| OpenError::Place(format!("{}: {error}", folder.display())))?;
            folder.join("penstock.db")
        }
    };
    let options = SqliteOptions { path: path.clone(), bytes_max: config.store.bytes_max };
    let opened = Sqlite::open(&options).map_err(|error| OpenError::Store { path, error })?;
    Ok(Arc::new(opened))
}

/// Opens the counters that several gateways share; `None`: this gateway counts by itself. A Redis that is away is no
/// error: each limit's `on_store_failure` decides then. Blocks like [`open`].
///
/// # Errors
/// [`OpenError`] with what to tell the operator.
pub fn shared(config: &Snapshot) -> Result<Option<Shared>, OpenError> {
    match (&config.counters, &config.store.postgres) {
        // Connections of their own: a ledger that is slow holds no counter up.
        #[cfg(feature = "postgres")]
        (CountersConfig::Store, Some(server)) => {
            let counters = postgres(server, server.connections.div_ceil(2))?;
            Ok(Some(Shared { counters, cache: None }))
        }
        #[cfg(feature = "redis")]
        (CountersConfig::Redis { url, prefix, ca_file }, _) => {
            let redis = redis(url.expose(), prefix, ca_file.as_deref())?;
            Ok(Some(Shared { counters: redis.clone(), cache: Some(redis) }))
        }
        // Counters of its own; a server that this build cannot reach was refused with the config.
        _ => Ok(None),
    }
}

/// Runtime that connections to PostgreSQL and Redis run on, made once per process.
#[cfg(any(feature = "postgres", feature = "redis"))]
fn runtime() -> Result<&'static tokio::runtime::Runtime, OpenError> {
    use std::sync::OnceLock;
    use tokio::runtime::{Builder, Runtime};
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime);
    }
    let built = Builder::new_multi_thread().worker_threads(1).thread_name("store-net").enable_all().build();
    let built = built.map_err(|error| OpenError::Place(format!("threads of the store: {error}")))?;
    Ok(RUNTIME.get_or_init(|| built))
}

#[cfg(feature = "postgres")]
fn postgres(
    config: &penstock_config::PostgresConfig,
    connections: usize,
) -> Result<Arc<penstock_store::Postgres>, OpenError> {
    use penstock_store::{Postgres, PostgresOptions};
    let tls = penstock_http::client::database_tls(config.ca_file.as_deref()).map_err(OpenError::Place)?;
    let options = PostgresOptions { url: config.url.expose().to_owned(), tls: Some(tls), connections };
    let runtime = runtime()?;
    // On a thread of its own: the caller's may be one of a runtime, which nobody may block on.
    let opened = std::thread::scope(|scope| scope.spawn(|| runtime.block_on(Postgres::open(&options))).join());
    let opened = opened.unwrap_or_else(|_| Err(StoreError::Broken("its thread has ended".into())));
    Ok(Arc::new(opened.map_err(|error| OpenError::Server { what: "the PostgreSQL of [store]", error })?))
}

#[cfg(feature = "redis")]
fn redis(url: &str, prefix: &str, ca: Option<&std::path::Path>) -> Result<Arc<penstock_store::Redis>, OpenError> {
    use penstock_store::{Redis, RedisOptions};
    // Read here as every other file of certificates is, so that a bad one is said in the same words.
    penstock_http::client::database_tls(ca).map_err(OpenError::Place)?;
    let read = |path: &std::path::Path| {
        std::fs::read(path).map_err(|error| OpenError::Place(format!("{}: {error}", path.display())))
    };
    let options = RedisOptions { url: url.to_owned(), prefix: prefix.to_owned(), ca: ca.map(read).transpose()? };
    let _runtime = runtime()?.enter();
    let opened = Redis::lazy(&options);
    Ok(Arc::new(opened.map_err(|error| OpenError::Server { what: "the Redis of [counters]", error })?))
}
