//! The task of a feed: connect, catch up, listen, and again from the start when the connection is lost.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use penstock_router::foreign::zmtp::Role;
use tokio::time::{Instant, sleep, timeout};

use super::client::{Connection, replay};
use super::{Feed, Heard, numbered};

/// First and longest pause before the next attempt to connect.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));

/// How often a feed looks whether anybody still wants it.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// After so long a silence a feed asks for a replay: a peer that is gone without a word is noticed.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Between two replays of one feed: a publisher that loses batches all the time must not keep us busy.
const REPLAY_EVERY: Duration = Duration::from_secs(1);

/// Follows the feeds that nobody follows yet, on a thread of its own; it ends when they are gone.
pub(crate) fn start(feeds: &[Arc<Feed>]) {
    let feeds: Vec<Weak<Feed>> =
        feeds.iter().filter(|feed| !feed.followed.swap(true, Ordering::Relaxed)).map(Arc::downgrade).collect();
    if feeds.is_empty() {
        return;
    }
    let spawned = std::thread::Builder::new().name("kv-events".into()).spawn(move || {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
        runtime.block_on(async {
            let mut tasks = tokio::task::JoinSet::new();
            feeds.into_iter().for_each(|feed| drop(tasks.spawn(forever(feed))));
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

/// One connection, from its beginning to its end; `None`: nobody wants the feed any more.
async fn session(feed: &Weak<Feed>) -> Option<std::io::Error> {
    let endpoint = feed.upgrade()?.config.endpoint.clone();
    let mut connection = match Connection::open(&endpoint, Role::Sub).await {
        Ok(connection) => connection,
        Err(error) => return Some(error),
    };
    // What is published from here on waits in the connection while the replay tells what was before.
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
                let next = feed.lock().order.next();
                if let Err(error) = catch_up(&feed, next).await {
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

/// Takes one message; what is missing before it is asked for, or given up.
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

/// Asks for the batches from `from` on. What is older than the server keeps is given up.
async fn catch_up(feed: &Feed, from: u64) -> std::io::Result<()> {
    let Some(endpoint) = &feed.config.replay else { return Ok(()) };
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
    outcome
}
