//! Task of a feed: connect, catch up by a replay, follow events, and start again when the connection is lost.

use std::io::{Error, ErrorKind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use penstock_base::panics::supervised;
use penstock_router::foreign::zmtp::Role;
use tokio::time::{Instant, sleep, timeout};

use super::client::{Connection, replay};
use super::{Feed, Heard, numbered};

/// First and longest backoff before the next attempt to connect.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));

/// Longest wait for a message before the task checks that the feed is still in use.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Silence after which a feed asks for a replay of its last batch, so that another process behind the address is noticed.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Least time between two replays of one feed, as a bound on the load by a publisher that keeps losing batches.
const REPLAY_EVERY: Duration = Duration::from_secs(1);

/// Starts following the feeds that have no task yet, on one thread (`kv-events`); the thread ends when they are
/// dropped.
pub fn start(feeds: &[Arc<Feed>]) {
    let feeds: Vec<Weak<Feed>> =
        feeds.iter().filter(|feed| !feed.followed.swap(true, Ordering::Relaxed)).map(Arc::downgrade).collect();
    if feeds.is_empty() {
        return;
    }
    let spawned = std::thread::Builder::new().name("kv-events".into()).spawn(move || {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
        runtime.block_on(async {
            let mut tasks = tokio::task::JoinSet::new();
            for feed in feeds {
                let lost = feed.clone();
                let follow = move || forever(feed.clone());
                let pause = move || {
                    // What is believed of the server's cache is followed by nobody.
                    if let Some(feed) = lost.upgrade() {
                        feed.connected.store(false, Ordering::Relaxed);
                        feed.forget();
                    }
                    sleep(PAUSES.1)
                };
                tasks.spawn(supervised("KV events", follow, pause));
            }
            while tasks.join_next().await.is_some() {}
        });
    });
    if let Err(error) = spawned {
        tracing::error!(%error, "the thread that follows KV events could not start");
    }
}

async fn forever(feed: Weak<Feed>) {
    if feed.upgrade().is_none_or(|feed| !feed.load_text()) {
        return;
    }
    let mut pause = PAUSES.0;
    loop {
        let began = Instant::now();
        let Some(why) = session(&feed).await else { return };
        let Some(feed) = feed.upgrade() else { return };
        if feed.connected.swap(false, Ordering::Relaxed) {
            tracing::warn!(provider = feed.id(), %why, "KV events: connection lost");
        } else {
            tracing::debug!(provider = feed.id(), %why, "KV events: connection failed");
        }
        feed.forget();
        drop(feed);
        if began.elapsed() > PAUSES.1 {
            pause = PAUSES.0;
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSES.1);
    }
}

/// Runs one connection from begin to end; `None`: the feed was dropped.
async fn session(feed: &Weak<Feed>) -> Option<std::io::Error> {
    let endpoint = feed.upgrade()?.config.endpoint.clone();
    let mut connection = match Connection::open(&endpoint, Role::Sub).await {
        Ok(connection) => connection,
        Err(error) => return Some(error),
    };
    // Events published from here on wait in the connection while the replay brings the earlier ones.
    let followed = feed.upgrade()?;
    followed.forget();
    let _ = catch_up(&followed, 0).await;
    followed.connected.store(true, Ordering::Relaxed);
    tracing::info!(provider = followed.id(), endpoint = %endpoint, blocks = followed.state().blocks, "KV events: connected");
    drop(followed);
    let (mut replayed, mut heard) = (None, Instant::now());
    loop {
        let message = match timeout(LOOK_EVERY, connection.message()).await {
            Ok(Ok(message)) => message,
            Ok(Err(error)) => return Some(error),
            Err(_) if feed.strong_count() == 0 => return None,
            Err(_) if heard.elapsed() < SILENCE_MAX => continue,
            Err(_) => {
                let feed = feed.upgrade()?;
                if let Err(error) = confirm(&feed).await {
                    return Some(error);
                }
                heard = Instant::now();
                continue;
            }
        };
        let feed = feed.upgrade()?;
        heard = Instant::now();
        let mut next = Some(message);
        while let Some(message) = next {
            take(&feed, &message, &mut replayed).await;
            next = connection.ready_message();
        }
    }
}

/// Processes one message; missing batches before it are requested once, then given up.
async fn take(feed: &Feed, message: &[Vec<u8>], replayed: &mut Option<Instant>) {
    let Heard::Missing(from) = feed.hear(message) else { return };
    feed.counts.gaps.fetch_add(1, Ordering::Relaxed);
    if replayed.is_none_or(|at| at.elapsed() >= REPLAY_EVERY) {
        let _ = catch_up(feed, from).await;
        *replayed = Some(Instant::now());
    }
    if let Heard::Missing(_) = feed.hear(message)
        && let Some((sequence, _)) = numbered(message)
    {
        tracing::debug!(provider = feed.id(), from, to = sequence, "KV events: missing batches could not be replayed");
        feed.skip_to(sequence);
        feed.hear(message);
    }
}

/// Requests the last batch that was taken, and those after it. A server that has none of them is another process: what
/// the feed knows is not about it.
pub(super) async fn confirm(feed: &Feed) -> std::io::Result<()> {
    let next = feed.lock().order.next();
    let told = catch_up(feed, next.saturating_sub(1)).await?;
    if next > 0 && told == Some(0) {
        return Err(Error::new(
            ErrorKind::ConnectionReset,
            "the server does not know its last batch: it was started anew",
        ));
    }
    Ok(())
}

/// Requests the batches from `from` on. Batches older than the server keeps are given up. Returns the number of batches
/// that came; `None`: there is no endpoint for replays.
async fn catch_up(feed: &Feed, from: u64) -> std::io::Result<Option<u64>> {
    let Some(endpoint) = &feed.config.replay else { return Ok(None) };
    let mut count = 0;
    let told = replay(endpoint, from, |message| {
        if let Heard::Missing(_) = feed.hear(&message)
            && let Some((sequence, _)) = numbered(&message)
        {
            feed.skip_to(sequence);
            feed.hear(&message);
        }
        count += 1;
    });
    let outcome = told.await;
    if let Err(error) = &outcome {
        tracing::warn!(provider = feed.id(), endpoint = %endpoint, %error, "KV events: replay failed");
    }
    feed.counts.replayed.fetch_add(count, Ordering::Relaxed);
    outcome.map(|()| Some(count))
}
