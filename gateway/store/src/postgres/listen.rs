//! Listener for changes of the directory: `LISTEN` on its own connection, which is reopened when it breaks.
//!
//! Notifications only wake waiting callers sooner: these poll often enough to work without them.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_postgres::{AsyncMessage, Client, Connection, NoTls, Socket};

use super::held::fault;
use super::{ANSWER_TIMEOUT, CONNECT_TIMEOUT, Connector, session};
use crate::{StoreError, home};

/// Notification channel of all changes of the directory.
pub(super) const CHANNEL: &str = "penstock_directory";
/// First and longest backoff before the next connection; doubled each time.
const RETRY: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));

/// Background listener on the notification channel; wakes callers that wait for a change of the directory.
pub(super) struct Listener {
    pub(super) changed: Arc<Notify>,
    task: AbortHandle,
}

impl Listener {
    pub(super) fn start(connector: Connector) -> Self {
        let changed = Arc::new(Notify::new());
        let task = tokio::spawn(listen(connector, changed.clone())).abort_handle();
        Self { changed, task }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn listen(connector: Connector, changed: Arc<Notify>) {
    let mut wait = RETRY.0;
    loop {
        if let Ok(client) = connect_and(&connector, Some(changed.clone())).await {
            let heard = timeout(ANSWER_TIMEOUT, client.batch_execute(&format!("LISTEN {CHANNEL}"))).await;
            if matches!(heard, Ok(Ok(()))) {
                wait = RETRY.0;
                // Changes may have happened while nothing was listening.
                changed.notify_waiters();
                while !client.is_closed() {
                    tokio::time::sleep(RETRY.0).await;
                }
            }
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(RETRY.1);
    }
}

/// Opens a connection outside of the pool.
pub(super) async fn connect(connector: &Connector) -> Result<Client, StoreError> {
    connect_and(connector, None).await
}

async fn connect_and(connector: &Connector, changed: Option<Arc<Notify>>) -> Result<Client, StoreError> {
    let connecting = async {
        let client = match &connector.tls {
            Some(tls) => {
                let (client, connection) = connector.config.connect(tls.clone()).await?;
                tokio::spawn(drive(connection, changed));
                client
            }
            None => {
                let (client, connection) = connector.config.connect(NoTls).await?;
                tokio::spawn(drive(connection, changed));
                client
            }
        };
        Ok(client)
    };
    let made = home::at(&connector.home, timeout(CONNECT_TIMEOUT, connecting)).await.map_err(|_| StoreError::Busy)?;
    let client = made.map_err(|error: tokio_postgres::Error| fault(&error))?;
    session::begin(&client).await?;
    Ok(client)
}

/// Drives a connection until it ends, which is when its client is dropped.
async fn drive<S>(mut connection: Connection<Socket, S>, changed: Option<Arc<Notify>>)
where
    S: tokio_postgres::tls::TlsStream + Unpin,
{
    while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
        if let (AsyncMessage::Notification(_), Some(changed)) = (message, &changed) {
            changed.notify_waiters();
        }
    }
}
