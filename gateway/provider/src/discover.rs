//! Discovery of a provider's models: its list is fetched at start and periodically.

use std::future::poll_fn;
use std::sync::{Arc, Weak};
use std::time::Duration;

use http::Method;

use super::keys::Use;
use super::{Protocol, Provider};
use penstock_base::panics::supervised;
use penstock_http::client::{Client, Deadlines};
use penstock_upstream::Asker;

/// Time between two fetches of a provider's list of models.
const EVERY: Duration = Duration::from_secs(600);
/// Time until the next fetch after one that failed.
const AGAIN: Duration = Duration::from_secs(30);
/// Most bytes of a provider's list of models that are read.
const LIST_BYTES_MAX: usize = 4 << 20;
/// Time limit of one fetch of a list, from the connection to the last byte.
const LIST_TIMEOUT: Duration = Duration::from_secs(20);

/// Starts the discovery thread for the providers with `discover = true`; the thread ends when they are dropped.
pub fn start(providers: &[Arc<Provider>]) {
    let asked: Vec<_> = providers.iter().filter(|provider| provider.config.discover).map(Arc::downgrade).collect();
    if asked.is_empty() {
        return;
    }
    let spawned = std::thread::Builder::new().name("discovery".into()).spawn(move || {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
        runtime.block_on(async {
            let mut tasks = tokio::task::JoinSet::new();
            for provider in asked {
                let follow = move || forever(provider.clone());
                tasks.spawn(supervised("discovery of a provider's models", follow, || tokio::time::sleep(AGAIN)));
            }
            while tasks.join_next().await.is_some() {}
        });
    });
    if let Err(error) = spawned {
        tracing::error!(%error, "the thread that lists the models of providers could not start");
    }
}

async fn forever(provider: Weak<Provider>) {
    loop {
        let wait = {
            let Some(provider) = provider.upgrade() else { return };
            match list(&provider).await {
                Ok(models) => {
                    provider.found.store(Arc::new(models));
                    EVERY
                }
                Err(reason) => {
                    tracing::warn!(
                        provider = provider.id(),
                        reason,
                        "the list of models of a provider could not be read"
                    );
                    AGAIN
                }
            }
        };
        // Sleep in short steps, so that the thread ends soon after the gateway.
        let until = tokio::time::Instant::now() + wait;
        while tokio::time::Instant::now() < until && provider.strong_count() > 0 {
            tokio::time::sleep(Duration::from_secs(1).min(wait)).await;
        }
    }
}

/// Fetches the list of models once.
async fn list(provider: &Provider) -> Result<Vec<String>, String> {
    // A client per fetch: connections belong to the runtime that they were made in.
    let client = Client::new(provider.config.target.clone(), provider.config.ca_file.as_deref())?;
    let path = match provider.config.protocol {
        Protocol::Anthropic => "/models?limit=1000",
        Protocol::Gemini => "/models?pageSize=1000",
        Protocol::OpenAi | Protocol::OpenAiResponses => "/models",
        other => return Err(format!("{} has no list that can be asked for", other.name())),
    };
    let turn = provider.keys.awake(Asker::default(), Use::new("", path), std::time::Instant::now());
    let turn = turn.map_err(|_| "all keys are paused".to_owned())?;
    let request = provider.outgoing(Method::GET, path, &[], &[], turn.as_ref());
    let deadlines = Deadlines {
        connect: provider.config.connect_timeout,
        head: LIST_TIMEOUT,
        silence: LIST_TIMEOUT,
        whole: Some(tokio::time::Instant::now() + LIST_TIMEOUT),
    };
    let mut response = client.send(&request, &deadlines).await.map_err(|error| error.to_string())?;
    let mut bytes = Vec::new();
    while poll_fn(|context| response.body.poll_chunk(context, &mut bytes)).await.map_err(|error| error.to_string())? {
        if bytes.len() > LIST_BYTES_MAX {
            return Err("the list is too long".into());
        }
    }
    if response.status != 200 {
        return Err(format!("status {}", response.status));
    }
    penstock_dialects::listing::model_ids(&bytes).ok_or_else(|| "the list is not readable".into())
}
