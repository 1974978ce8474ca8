//! Look-ups of the host names that stand for several servers (`resolve` of a provider).
//!
//! A name is asked again every [`EVERY`]. A look-up that fails changes nothing: the servers are more likely to be there
//! than the name service. Only addresses that differ bring a new table of targets.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use penstock_config::Members;
use penstock_http::client::Place;
use penstock_provider::ProviderConfig;
use tokio::time::{sleep, timeout};

use super::Live;
use super::follow::reload;

/// Time between two look-ups of a name.
const EVERY: Duration = Duration::from_secs(5);
/// Longest time of one look-up.
const LOOKUP_MAX: Duration = Duration::from_secs(5);
/// Look-ups in a row that may fail before the log repeats that they do.
const SAID_EACH: u32 = 60;

/// Follows the names of the config in force, for as long as the process lives.
pub(super) async fn follow(live: Arc<Live>) {
    let mut swaps = live.gateway.swaps();
    let mut failed: u32 = 0;
    loop {
        let config = live.gateway.serving().config.clone();
        let asked: Vec<_> = config.providers.iter().filter(|provider| provider.resolve).collect();
        let before = live.gateway.members();
        let mut members = Members::clone(&before);
        members.keep(&config.providers);
        let mut is_failed = false;
        for provider in &asked {
            match look_up(provider).await {
                Ok(addresses) => note(&mut members, &before, provider, addresses),
                Err(reason) => {
                    is_failed = true;
                    if failed.is_multiple_of(SAID_EACH) {
                        let known = before.of(&provider.id).len();
                        tracing::warn!(
                            provider = provider.id,
                            reason,
                            known,
                            "the host name of a provider cannot be looked up: the known addresses stay"
                        );
                    }
                }
            }
        }
        failed = if is_failed { failed.wrapping_add(1) } else { 0 };
        if members != *before {
            reload(&live, move |live| live.follow_members(members)).await;
        }
        let is_asked = !asked.is_empty();
        tokio::select! {
            () = sleep(EVERY), if is_asked => {}
            changed = swaps.changed() => if changed.is_err() { return },
        }
    }
}

/// Takes in the addresses of one name, and says in the log what has changed.
fn note(members: &mut Members, before: &Members, provider: &ProviderConfig, addresses: Vec<SocketAddr>) {
    let left_out = members.set(&provider.id, addresses);
    let (known, now) = (before.of(&provider.id), members.of(&provider.id));
    if known == now {
        return;
    }
    let list = |all: &[SocketAddr], other: &[SocketAddr]| {
        let new: Vec<_> = all.iter().filter(|address| !other.contains(address)).map(ToString::to_string).collect();
        new.join(" ")
    };
    let (came, left) = (list(now, known), list(known, now));
    tracing::info!(
        provider = provider.id,
        addresses = now.len(),
        came,
        left,
        "the addresses of a provider have changed"
    );
    if left_out > 0 {
        tracing::warn!(provider = provider.id, left_out, "a provider has more addresses than a model may have targets");
    }
}

async fn look_up(provider: &ProviderConfig) -> Result<Vec<SocketAddr>, String> {
    let Place::Tcp { host, port, .. } = &provider.target.place else { return Err("no host name".into()) };
    let found = timeout(LOOKUP_MAX, tokio::net::lookup_host((host.as_str(), *port))).await;
    let found: Vec<_> = found.map_err(|_| "no answer in time")?.map_err(|error| error.to_string())?.collect();
    match found.is_empty() {
        true => Err("no address".into()),
        false => Ok(found),
    }
}
