//! Keeps in memory what authentication needs: the directory of issued keys, and the keys of those who sign tokens.
//!
//! One thread with a runtime of its own, so that neither depends on how busy requests are. It asks the store for the directory's
//! version without pause (a change elsewhere is seen within 300 ms) and reads what is new. When the store is gone, what is held is
//! used on; how long, the config says.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::time::{Duration, Instant};

use penstock_store::{Store, StoreError};
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};

use super::identity::is_open;
use super::jwt::keep;
use super::pepper::{Pepper, PepperSource};
use crate::gateway::Gateway;

/// Longest question for a change.
const ASK: Duration = Duration::from_millis(400);
/// Longest time that a store may take for an answer beyond that.
const ANSWER: Duration = Duration::from_secs(5);
/// After a question that failed.
const AGAIN: Duration = Duration::from_millis(250);
/// Keys, and teams and users, that are read at once.
const PIECE: u32 = 2000;
/// Between two looks at which issuers the config has.
const ISSUERS: Duration = Duration::from_millis(250);
/// Longest time that a start waits for the directory.
const FIRST: Duration = Duration::from_secs(10);
/// Least time between two questions that requests ask for.
const DEMAND_MS: u64 = 100;
/// Longest time that a request waits for one.
const DEMAND_WAIT: Duration = Duration::from_millis(600);

/// How current the directory is.
#[derive(Debug)]
pub(super) struct Follow {
    began: Instant,
    /// Whether there is a directory to follow.
    is_kept: AtomicBool,
    /// Last time that it was as the store has it, in milliseconds since `began`, plus one; 0: never.
    current_ms: AtomicU64,
    /// When a request may next have it asked.
    demanded_ms: AtomicU64,
    wake: Notify,
    /// Questions that were begun.
    asked: AtomicU64,
    /// The last of them that the store has answered.
    answers: watch::Sender<u64>,
}

impl Default for Follow {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            is_kept: AtomicBool::new(false),
            current_ms: AtomicU64::new(0),
            demanded_ms: AtomicU64::new(0),
            wake: Notify::new(),
            asked: AtomicU64::new(0),
            answers: watch::Sender::new(0),
        }
    }
}

impl Follow {
    /// How old what is held can be; `None`: it was never read. Without a store, nothing is ever old.
    pub(super) fn age(&self) -> Option<Duration> {
        if !self.is_kept.load(Ordering::Acquire) {
            return Some(Duration::ZERO);
        }
        let current = self.current_ms.load(Ordering::Acquire).checked_sub(1)?;
        Some(self.began.elapsed().saturating_sub(Duration::from_millis(current)))
    }

    /// Has the store asked at once, for a key that may be a moment old, and waits for its answer; not more often than is reasonable.
    pub(super) async fn renewed(&self) {
        if !self.is_kept.load(Ordering::Acquire) {
            return;
        }
        let mut answers = self.answers.subscribe();
        // One that is under way may have been put before the key was made.
        let next = self.asked.load(Ordering::Acquire) + 1;
        let answered = async {
            let due = self.demanded_ms.load(Ordering::Acquire);
            sleep(Duration::from_millis(due).saturating_sub(self.began.elapsed())).await;
            let now = self.began.elapsed().as_millis() as u64;
            let mine = self.demanded_ms.compare_exchange(due, now + DEMAND_MS, Ordering::AcqRel, Ordering::Acquire);
            if mine.is_ok() {
                self.wake.notify_one();
            }
            answers.wait_for(|answered| *answered >= next).await.is_ok()
        };
        // Later is as good as never: the key is not known then.
        let _ = timeout(DEMAND_WAIT, answered).await;
    }

    /// The number of a question that is about to be put.
    fn ask(&self) -> u64 {
        self.asked.fetch_add(1, Ordering::AcqRel) + 1
    }

    fn note_answer(&self, question: u64) {
        self.current_ms.store(self.began.elapsed().as_millis() as u64 + 1, Ordering::Release);
        self.answers.send_replace(question);
    }
}

/// Begins; returns when the directory has been read, or cannot be in time (then issued keys are refused until it has).
///
/// # Errors
/// The thread cannot be started.
pub fn start(gateway: &Arc<Gateway>) -> std::io::Result<()> {
    let store = gateway.keeper().map(|keeper| keeper.store.clone());
    gateway.guard.follow.is_kept.store(store.is_some(), Ordering::Release);
    let (ready, wait) = mpsc::sync_channel(1);
    let started = gateway;
    let gateway = Arc::downgrade(gateway);
    std::thread::Builder::new().name("identity".into()).spawn(move || {
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => return tracing::error!(%error, "the thread that reads keys from the store could not start"),
        };
        runtime.block_on(async {
            let directory = async {
                match store {
                    Some(store) => directory(&gateway, store.as_ref(), &ready).await,
                    None => drop(ready.try_send(())),
                }
            };
            tokio::join!(directory, issuers(&gateway));
        });
    })?;
    if wait.recv_timeout(FIRST).is_err() {
        tracing::error!("the store did not answer at start: issued keys are refused until the store answers");
    }
    warn(started);
    Ok(())
}

/// Says what an operator may not have meant.
fn warn(gateway: &Gateway) {
    let serving = gateway.serving();
    let (config, is_local) = (&serving.config, serving.config.listen.ip().is_loopback());
    let has_keys = !config.auth.knows_nobody(&config.keys) || !gateway.guard.directory.load().is_virgin();
    if config.store.postgres.is_some() && config.auth.pepper == PepperSource::State {
        let help = "give all of them one auth.pepper_file or auth.pepper_env";
        tracing::warn!(
            help,
            "keys issued by this gateway work at no other gateway of this store: the pepper is in the state folder"
        );
    }
    if is_open(config) && !is_local {
        tracing::warn!(listen = %config.listen, "requests without credentials are served beyond loopback: auth.anonymous is \"allow\"");
    } else if !is_open(config) && !has_keys {
        let help = "issue a key (penstock keys create), or say so in the config (auth.anonymous)";
        tracing::warn!(listen = %config.listen, help, "there are no keys: every request is refused");
    }
}

/// Follows the directory until the gateway is gone.
async fn directory(gateway: &Weak<Gateway>, store: &dyn Store, ready: &mpsc::SyncSender<()>) {
    let mut failing = false;
    while let Some(held) = gateway.upgrade() {
        let question = held.guard.follow.ask();
        let answered = timeout(ANSWER, read(&held, store)).await.unwrap_or(Err(StoreError::Busy));
        match answered {
            Ok(()) => {
                held.guard.follow.note_answer(question);
                // The starter may have stopped waiting.
                let _ = ready.try_send(());
                if std::mem::take(&mut failing) {
                    tracing::info!("the store answers again: issued keys are up to date");
                }
            }
            Err(error) => {
                if !std::mem::replace(&mut failing, true) {
                    tracing::error!(%error, "the store does not answer: issued keys in memory stay in use");
                }
                drop(held);
                sleep(AGAIN).await;
                continue;
            }
        }
        let seen = held.guard.directory.load().version;
        tokio::select! {
            _ = timeout(ASK + ANSWER, store.directory_changed(seen, ASK)) => {}
            () = held.guard.follow.wake.notified() => {}
        }
    }
}

/// Reads what is new.
async fn read(gateway: &Gateway, store: &dyn Store) -> Result<(), StoreError> {
    let guard = &gateway.guard;
    if store.directory_version().await? != guard.directory.load().version {
        loop {
            let changes = store.directory_since(guard.directory.load().version, PIECE).await?;
            let more = changes.more;
            let next = guard.directory.load().with(changes);
            guard.directory.store(Arc::new(next));
            if !more {
                break;
            }
        }
    }
    if guard.pepper.load().is_none() && !guard.directory.load().is_virgin() {
        match Pepper::of(&gateway.serving().config, false) {
            Ok(pepper) => guard.pepper.store(Some(Arc::new(pepper))),
            Err(error) if !guard.pepperless.swap(true, Ordering::Relaxed) => {
                tracing::error!(error, "issued keys cannot be checked: their pepper is missing");
            }
            Err(_) => {}
        }
    }
    Ok(())
}

/// Has the keys of every issuer fetched that the config has, until the gateway is gone.
async fn issuers(gateway: &Weak<Gateway>) {
    let mut tasks = tokio::task::JoinSet::new();
    while let Some(held) = gateway.upgrade() {
        let serving = held.serving();
        held.guard.drop_rings(&serving.identity);
        for issuer in &serving.identity.issuers {
            let ring = held.guard.ring(issuer);
            if ring.claim() {
                tasks.spawn(keep(Arc::downgrade(&ring), held.metrics.clone()));
            }
        }
        drop((serving, held));
        sleep(ISSUERS).await;
        while tasks.try_join_next().is_some() {}
    }
}
