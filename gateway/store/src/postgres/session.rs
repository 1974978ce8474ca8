//! Settings of the server for each session of a gateway.
//!
//! A host that dies or is cut off sends no end of its connections: without these settings the server would hold the
//! session, with its locks, until TCP gives up after two hours. Settings that a version of the server does not know are
//! left out.

use std::sync::{Arc, Weak};
use std::time::Duration;

use deadpool_postgres::HookError;
use tokio::runtime::Handle;
use tokio::time::{sleep, timeout};
use tokio_postgres::Client;

use super::{ANSWER_TIMEOUT, CONNECT_TIMEOUT, held};
use crate::StoreError;

/// Settings of every session. The server notices a lost host within 15 s, ends a transaction whose gateway is silent for
/// 10 s, and ends a statement whose caller has given up (`ANSWER_TIMEOUT`).
const SETTINGS: &str = "('tcp_keepalives_idle', '5'), ('tcp_keepalives_interval', '2'), ('tcp_keepalives_count', '3'),
    ('tcp_user_timeout', '15s'), ('idle_in_transaction_session_timeout', '10s'), ('statement_timeout', '10s')";
/// Setting of the leader's session, which also ends where a relay keeps the connection open for a gateway that is lost.
/// [`keep`] asks several times within it. PostgreSQL has it from version 14 on.
const LEADER: &str = "('idle_session_timeout', '15s')";
/// Interval at which the leader's session is used.
const LEADER_ASKS: Duration = Duration::from_secs(3);

fn statement(settings: &str) -> String {
    format!(
        "SELECT set_config(name, value, false) FROM (VALUES {settings}) AS wanted (name, value)
         WHERE current_setting(name, true) IS NOT NULL"
    )
}

/// Applies the settings of every session to a new connection of the pool.
///
/// # Errors
/// The server's error, or a message without an answer in time.
pub(super) async fn begin_pooled(client: &Client) -> Result<(), HookError> {
    match timeout(CONNECT_TIMEOUT, client.batch_execute(&statement(SETTINGS))).await {
        Ok(done) => done.map_err(HookError::Backend),
        Err(_) => Err(HookError::message("no answer in time")),
    }
}

/// Applies the settings of every session to a new connection outside of the pool.
///
/// # Errors
/// [`StoreError::Busy`] without an answer in time, or the server's error.
pub(super) async fn begin(client: &Client) -> Result<(), StoreError> {
    begin_pooled(client).await.map_err(|error| held::unprepared(&error))
}

/// Applies the settings of the leader's session, and uses the session until it is dropped or breaks.
///
/// # Errors
/// As of [`begin`].
pub(super) async fn keep(client: &Arc<Client>, home: &Handle) -> Result<(), StoreError> {
    let asked = timeout(CONNECT_TIMEOUT, client.batch_execute(&statement(LEADER))).await;
    asked.map_err(|_| StoreError::Busy)?.map_err(|error| held::fault(&error))?;
    home.spawn(used(Arc::downgrade(client)));
    Ok(())
}

async fn used(client: Weak<Client>) {
    loop {
        sleep(LEADER_ASKS).await;
        let Some(client) = client.upgrade() else { return };
        if !matches!(timeout(ANSWER_TIMEOUT, client.batch_execute("SELECT true")).await, Ok(Ok(()))) {
            return;
        }
    }
}
