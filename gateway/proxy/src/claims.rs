//! Claims of this process on the batches and background responses that it runs, so that no other gateway of the store
//! runs them too, or ends them.
//!
//! A leader that loses its session with the store lives on with what it has begun, while another gateway leads. So work
//! is claimed before it is begun, and the claim is renewed every [`BEAT`]. A gateway whose claims show no renewal at
//! [`SILENT_LOOKS`] looks in a row is taken for dead, and its work is anybody's. Looks are counted and not seconds: a
//! store that was away told nobody of a sign of life, and clocks of gateways differ. A process that was only cut off
//! learns by its next renewal that a claim is lost, and stops that work.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use penstock_store::{Store, StoreError, WorkClaim, random_id};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until};

/// Interval at which claims are renewed, and those of others are looked at.
const BEAT: Duration = if cfg!(test) { Duration::from_millis(20) } else { Duration::from_secs(2) };
/// Looks without a renewal after which the holder of a claim is taken for dead: 20 s. A renewal waits for at most one
/// connection and one answer of the store, 8 s.
const SILENT_LOOKS: u32 = 10;
/// Most claims of other gateways that are looked at.
const LOOK_MAX: u32 = 8192;

/// Claims of this process, and what it knows of those of others.
pub(crate) struct Claims {
    store: Arc<dyn Store>,
    /// Name of this process among the holders.
    holder: String,
    state: Mutex<State>,
    /// Wakes [`Claims::keep`]: a claim awaits its release.
    ended: Notify,
}

#[derive(Default)]
struct State {
    held: HashMap<String, Held>,
    /// Work that has ended and whose claim is to be released.
    ended: Vec<String>,
    /// Claims of other holders by their work.
    others: HashMap<String, Watched>,
    /// True once the process ends: nothing is claimed any more.
    is_closed: bool,
}

/// Claim that this process holds, or asks for.
struct Held {
    /// True once the store has it.
    is_kept: bool,
    /// Turns true when another process has the work.
    lost: watch::Sender<bool>,
}

struct Watched {
    claim: WorkClaim,
    /// Looks at which the claim was the same as before.
    looks: u32,
}

impl Claims {
    pub(crate) fn new(store: Arc<dyn Store>) -> Arc<Self> {
        Arc::new(Self { store, holder: random_id("run_"), state: Mutex::default(), ended: Notify::new() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if another gateway held the work when it was last asked for or looked at.
    pub(crate) fn is_elsewhere(&self, work: &str) -> bool {
        self.state().others.contains_key(work)
    }

    /// Claims work for this process; `None`: it has the claim already, or another gateway has it.
    ///
    /// # Errors
    /// The store's; then nothing is claimed.
    pub(crate) async fn take(self: &Arc<Self>, work: &str) -> Result<Option<Claim>, StoreError> {
        let (sender, lost) = watch::channel(false);
        {
            let mut state = self.state();
            if state.is_closed || state.held.contains_key(work) {
                return Ok(None);
            }
            state.ended.retain(|ended| ended != work);
            state.held.insert(work.to_owned(), Held { is_kept: false, lost: sender });
        }
        // From here on the claim is released however this ends, also where the store's answer is lost.
        let claim = Claim { claims: self.clone(), work: work.to_owned(), lost };
        if !self.store.claim_work(work, &self.holder).await? {
            // Whose it is, the next look tells.
            let claim = WorkClaim { work: work.to_owned(), holder: String::new(), beats: 0 };
            self.state().others.insert(work.to_owned(), Watched { claim, looks: 0 });
            return Ok(None);
        }
        if let Some(held) = self.state().held.get_mut(work) {
            held.is_kept = true;
        }
        Ok(Some(claim))
    }

    /// Renews claims and looks at those of others, without end. `freed` is called when work of another gateway may be
    /// anybody's.
    pub(crate) async fn keep(&self, freed: impl Fn()) {
        let mut due = Instant::now();
        loop {
            let is_due = tokio::select! {
                () = sleep_until(due) => true,
                () = self.ended.notified() => false,
            };
            let looked = if is_due { self.look().await } else { self.release_ended().await.map(|()| false) };
            match looked {
                Ok(true) => freed(),
                Ok(false) => {}
                Err(error) => {
                    // Nobody could renew a claim meanwhile, as far as is known: everybody gets the full silence again.
                    self.state().others.values_mut().for_each(|watched| watched.looks = 0);
                    tracing::debug!(%error, "claims on batches and background responses could not be renewed in the store");
                }
            }
            if is_due {
                due = Instant::now() + BEAT;
            }
        }
    }

    /// Releases the claims on work that has ended.
    ///
    /// # Errors
    /// The store's; the claims are released at a later time.
    pub(crate) async fn release_ended(&self) -> Result<(), StoreError> {
        let ended = std::mem::take(&mut self.state().ended);
        if ended.is_empty() {
            return Ok(());
        }
        let released = self.store.release_work(&ended, &self.holder).await;
        if released.is_err() {
            let mut state = self.state();
            let again = ended.into_iter().filter(|work| !state.held.contains_key(work)).collect::<Vec<_>>();
            state.ended.extend(again);
        }
        released
    }

    /// Renews claims and looks at those of others once. `true`: one of theirs is gone.
    async fn look(&self) -> Result<bool, StoreError> {
        if self.state().is_closed {
            return Ok(false);
        }
        self.release_ended().await?;
        let (kept, holds): (Vec<String>, bool) = {
            let state = self.state();
            let kept = state.held.iter().filter(|(_, held)| held.is_kept).map(|(work, _)| work.clone());
            (kept.collect(), !state.held.is_empty())
        };
        if holds {
            let own = self.store.renew_work(&self.holder).await?;
            for work in self.compare(&kept, own) {
                self.claim_again(&work).await?;
            }
        }
        let others = self.store.claims_of_others(&self.holder, LOOK_MAX).await?;
        let (silent, mut has_freed) = self.watch(others);
        for claim in silent {
            if self.store.forget_work(&claim).await? {
                tracing::warn!(
                    work = %claim.work,
                    holder = %claim.holder,
                    "a gateway of the store gave no sign of life: what it ran is taken over"
                );
            }
            has_freed |= self.state().others.remove(&claim.work).is_some();
        }
        Ok(has_freed)
    }

    /// Returns the work whose claim the store has no more, of those that it had before the renewal. Claims that nobody
    /// here knows, of asks whose answer was lost, are released.
    fn compare(&self, kept: &[String], own: Vec<String>) -> Vec<String> {
        let mut state = self.state();
        let mine: HashSet<&String> = own.iter().collect();
        let gone = kept.iter().filter(|work| !mine.contains(work) && state.held.contains_key(*work)).cloned().collect();
        let strays: Vec<String> = own.into_iter().filter(|work| !state.held.contains_key(work)).collect();
        state.ended.extend(strays);
        gone
    }

    /// Claims work again whose claim is gone: another gateway forgot it, or a database without the last seconds took
    /// over. Only where another gateway has it is it lost.
    async fn claim_again(&self, work: &str) -> Result<(), StoreError> {
        if self.store.claim_work(work, &self.holder).await? {
            let mut state = self.state();
            if !state.held.contains_key(work) {
                state.ended.push(work.to_owned());
            }
        } else if let Some(held) = self.state().held.get(work) {
            held.lost.send_replace(true);
        }
        Ok(())
    }

    /// Releases all claims and takes no more, since the process ends: whoever serves next need not wait until they lapse.
    ///
    /// # Errors
    /// The store's; the claims lapse.
    pub(crate) async fn close(&self) -> Result<(), StoreError> {
        let held: Vec<String> = {
            let mut state = self.state();
            state.is_closed = true;
            let mut held = std::mem::take(&mut state.ended);
            held.extend(state.held.keys().cloned());
            held
        };
        if held.is_empty() { Ok(()) } else { self.store.release_work(&held, &self.holder).await }
    }

    /// Notes the claims of others; returns those whose holders are silent, and whether one of before is gone.
    fn watch(&self, claims: Vec<WorkClaim>) -> (Vec<WorkClaim>, bool) {
        let mut state = self.state();
        let mut before = std::mem::take(&mut state.others);
        let mut silent = Vec::new();
        for claim in claims {
            let same = before.remove(&claim.work).filter(|watched| watched.claim == claim);
            let looks = same.map_or(0, |watched| watched.looks + 1);
            if looks >= SILENT_LOOKS {
                silent.push(claim.clone());
            }
            state.others.insert(claim.work.clone(), Watched { claim, looks });
        }
        (silent, !before.is_empty())
    }

    /// Notes that the work of a claim has ended; `false`: its claim was noted before.
    fn end(&self, work: &str) -> bool {
        self.state().held.remove(work).is_some()
    }
}

/// Claim of this process on work. Dropped, it is released later, by [`Claims::keep`].
pub(crate) struct Claim {
    claims: Arc<Claims>,
    work: String,
    lost: watch::Receiver<bool>,
}

impl Claim {
    /// Waits until the claim is lost: another gateway took this process for dead. Cancel-safe.
    pub(crate) async fn lost(&mut self) {
        if self.lost.wait_for(|lost| *lost).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Releases the claim, so that whoever leads can take the work at once.
    pub(crate) async fn release(self) {
        let work = [self.work.clone()];
        if self.claims.end(&self.work)
            && let Err(error) = self.claims.store.release_work(&work, &self.claims.holder).await
        {
            tracing::debug!(work = %self.work, %error, "a claim is released later: the store failed");
            self.claims.state().ended.extend(work);
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.claims.end(&self.work) {
            self.claims.state().ended.push(self.work.clone());
            self.claims.ended.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use penstock_store::{Sqlite, SqliteOptions};

    use super::*;

    fn store() -> Arc<dyn Store> {
        Arc::new(Sqlite::open(&SqliteOptions { path: ":memory:".into(), bytes_max: 0 }).expect("opens"))
    }

    /// Looks until the claim of another on `work` has lapsed; returns how many looks that took.
    async fn looks_until_free(claims: &Claims, work: &str) -> u32 {
        for looks in 1..100 {
            claims.look().await.expect("looked");
            if !claims.is_elsewhere(work) {
                return looks;
            }
        }
        panic!("never");
    }

    #[tokio::test]
    async fn work_of_a_living_gateway_is_left_alone_and_that_of_a_dead_one_is_taken() {
        let store = store();
        let (one, two) = (Claims::new(store.clone()), Claims::new(store.clone()));
        let mut held = one.take("work").await.expect("asked").expect("free");
        assert!(one.take("work").await.expect("asked").is_none(), "once in a process");
        assert!(two.take("work").await.expect("asked").is_none());
        for _ in 0..3 * SILENT_LOOKS {
            one.look().await.expect("renewed");
            two.look().await.expect("looked");
            assert!(two.is_elsewhere("work") && !one.is_elsewhere("work"));
        }
        // One is cut off. Its work is another's after so many looks, not before, and one learns so when it is back.
        assert_eq!(looks_until_free(&two, "work").await, SILENT_LOOKS);
        let taken = two.take("work").await.expect("asked").expect("free");
        one.look().await.expect("renewed");
        held.lost().await;
        held.release().await;
        assert!(one.take("work").await.expect("asked").is_none(), "what it gave up was not its own any more");
        taken.release().await;
        assert!(one.take("work").await.expect("asked").is_some());
    }

    /// Another gateway forgets a claim (this one was slow, or the database lost its last seconds), and nobody has the work.
    #[tokio::test]
    async fn a_claim_that_was_forgotten_and_that_nobody_took_is_claimed_again() {
        let store = store();
        let (one, two) = (Claims::new(store.clone()), Claims::new(store.clone()));
        let held = one.take("work").await.expect("asked").expect("free");
        looks_until_free(&two, "work").await;
        one.look().await.expect("renewed");
        assert!(!*held.lost.borrow(), "nobody has taken it");
        assert!(two.take("work").await.expect("asked").is_none());
    }

    #[tokio::test]
    async fn a_process_that_ends_leaves_its_work_to_the_next() {
        let store = store();
        let (one, two) = (Claims::new(store.clone()), Claims::new(store.clone()));
        let _held = one.take("work").await.expect("asked").expect("free");
        one.close().await.expect("released");
        assert!(two.take("work").await.expect("asked").is_some(), "at once");
        one.look().await.expect("closed");
        assert!(one.take("other").await.expect("asked").is_none());
        assert!(two.take("other").await.expect("asked").is_some());
    }

    #[tokio::test]
    async fn a_claim_that_is_dropped_is_released_by_the_keeper() {
        let store = store();
        let (one, two) = (Claims::new(store.clone()), Claims::new(store.clone()));
        let keeper = one.clone();
        let keeps = tokio::spawn(async move { keeper.keep(|| {}).await });
        drop(one.take("work").await.expect("asked").expect("free"));
        let deadline = Instant::now() + Duration::from_secs(60);
        while two.take("work").await.expect("asked").is_none() {
            assert!(Instant::now() < deadline, "it is not released");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        keeps.abort();
    }

    /// A claim whose ask was not answered may be in the store; it does not block the work for ever.
    #[tokio::test]
    async fn a_claim_that_nobody_knows_is_released() {
        let store = store();
        let (one, two) = (Claims::new(store.clone()), Claims::new(store.clone()));
        assert_eq!(store.claim_work("stray", &one.holder).await, Ok(true));
        let _held = one.take("work").await.expect("asked").expect("free");
        one.look().await.expect("renewed");
        one.look().await.expect("released");
        assert!(two.take("stray").await.expect("asked").is_some());
        assert!(two.take("work").await.expect("asked").is_none());
    }
}
