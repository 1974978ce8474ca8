//! Looks at shared counters: their use by all gateways, for readers that take nothing of it.

use std::collections::HashMap;
use std::pin::pin;
use std::time::{Duration, Instant};

use penstock_govern::Claim;
use penstock_store::{Ask, is_counter_name};
use tokio::time::timeout_at;

use super::report::REPORTS;
use super::{Key, Shared, Want, want};
use penstock_base::clock;

/// Age below which a use is told again without a question to the store.
const FRESH: Duration = Duration::from_secs(1);
/// Longest wait of one look for the store.
const LOOK_MAX: Duration = Duration::from_millis(500);
/// Time after a look that the store has not answered in which the last answers are told again, without a question.
pub(super) const AWAY: Duration = Duration::from_secs(5);
/// Most counters that one look asks for, those of the oldest answers first.
const COUNTERS_MAX: usize = 1024;
/// Most uses that are remembered.
const KNOWN_MAX: usize = 1 << 17;

/// Uses by all gateways together, as of the last answer.
#[derive(Debug, Default)]
pub(super) struct Looks {
    known: HashMap<Key, (Instant, u64)>,
    sweep_at: usize,
    /// Time until which no look asks, since the store has not answered one; `None`: it has answered the last one.
    pub(super) away_until: Option<tokio::time::Instant>,
    /// Number of looks that wait for the store, and the time until which the first of them does; `None`: the store has
    /// answered one of them.
    waiting: usize,
    waits_until: Option<tokio::time::Instant>,
}

impl Looks {
    fn note(&mut self, key: Key, used: u64) {
        if self.known.len() >= self.sweep_at.clamp(COUNTERS_MAX, KNOWN_MAX) {
            let now = clock::unix_seconds();
            self.known.retain(|(_, window), _| window.end().is_some_and(|end| end > now));
            if self.known.len() >= KNOWN_MAX {
                self.known.clear();
            }
            self.sweep_at = self.known.len() * 2;
        }
        self.known.insert(key, (Instant::now(), used));
    }
}

impl Shared {
    /// Use of the claimed counters by all gateways together, reservations and the others' leases included; 0 where the
    /// store has not told it in the counter's window. Asks the store, unless it is away or its answer is fresh; an answer
    /// that comes too late is not waited for, and the last one is told again. Looks that begin while another waits wait no
    /// longer than that one, unless the store answers meanwhile; of all looks that begin after one was not answered, one
    /// waits per [`AWAY`].
    pub(crate) async fn look(&self, claims: &[Claim<'_>]) -> Vec<u64> {
        let wants: Vec<Want> = claims.iter().map(want).collect();
        if self.is_up() {
            self.refresh(&wants).await;
        }
        let looks = self.looks();
        wants.iter().map(|want| looks.known.get(&want.key).map_or(0, |(_, used)| *used)).collect()
    }

    async fn refresh(&self, wants: &[Want]) {
        let deadline = tokio::time::Instant::now() + LOOK_MAX;
        let stale = {
            let (mut looks, now) = (self.looks(), Instant::now());
            let asked = |want: &Want| looks.known.get(&want.key).map(|(at, _)| *at);
            let wants = wants.iter().filter(|want| is_counter_name(&want.key.0));
            let mut stale: Vec<_> = wants.map(|want| (asked(want), want)).collect();
            stale.retain(|(at, _)| at.is_none_or(|at| now.saturating_duration_since(at) >= FRESH));
            stale.sort_by_key(|(at, _)| *at);
            stale.truncate(COUNTERS_MAX);
            let is_away = looks.away_until.is_some_and(|until| tokio::time::Instant::now() < until);
            if stale.is_empty() || is_away {
                return;
            }
            // This look finds out whether the store is back; the others do not wait for it beside this one.
            looks.away_until = looks.away_until.map(|_| deadline + AWAY);
            stale
        };
        let wait = Wait::begin(self, deadline);
        for (nth, chunk) in stale.chunks(REPORTS).enumerate() {
            let asks: Vec<Ask> = chunk.iter().map(|(_, want)| question(want)).collect();
            let now = clock::unix_seconds();
            let asked = async {
                let _turn = self.turn.read().await;
                self.counters.take(&self.holder, &asks, false, now).await
            };
            let Some(Ok(grants)) = wait.answer(asked).await else {
                // A store that has answered a part is slow: the next look asks for the rest.
                if nth == 0 {
                    self.looks().away_until = Some(tokio::time::Instant::now() + AWAY);
                }
                return;
            };
            // What is left of this gateway's lease is in no use.
            let lefts: Vec<u64> = {
                let state = self.state();
                chunk.iter().map(|(_, want)| state.cells.get(&want.key).map_or(0, |cell| cell.left(now))).collect()
            };
            let mut looks = self.looks();
            (looks.away_until, looks.waits_until) = (None, None);
            for (((_, want), grant), left) in chunk.iter().zip(grants).zip(lefts) {
                looks.note(want.key.clone(), grant.used.saturating_sub(left));
            }
        }
    }

    pub(super) fn looks(&self) -> std::sync::MutexGuard<'_, Looks> {
        self.looks.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Wait of one look, which may end before its answer.
struct Wait<'a> {
    shared: &'a Shared,
    deadline: tokio::time::Instant,
}

impl<'a> Wait<'a> {
    fn begin(shared: &'a Shared, deadline: tokio::time::Instant) -> Self {
        let mut looks = shared.looks();
        looks.waiting += 1;
        looks.waits_until.get_or_insert(deadline);
        Self { shared, deadline }
    }

    /// Answer to `asked`; `None`: it does not come before the deadline, or the store is silent until that of the first
    /// look that waits.
    async fn answer<T>(&self, asked: impl Future<Output = T>) -> Option<T> {
        let mut asked = pin!(asked);
        loop {
            let until = self.shared.looks().waits_until.map_or(self.deadline, |first| first.min(self.deadline));
            if let Ok(answer) = timeout_at(until, &mut asked).await {
                return Some(answer);
            }
            let now = tokio::time::Instant::now();
            // Another look was answered meanwhile: the store is not silent.
            let goes_on = now < self.deadline && self.shared.looks().waits_until.is_none_or(|first| now < first);
            if !goes_on {
                return None;
            }
        }
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        let mut looks = self.shared.looks();
        looks.waiting -= 1;
        if looks.waiting == 0 {
            looks.waits_until = None;
        }
    }
}

/// Question for the use of a counter: it takes nothing, and leaves the lease as it is.
fn question(want: &Want) -> Ask {
    let (counter, window) = want.key.clone();
    Ask { counter, window, sliding: want.sliding, max: u64::MAX >> 12, want: 0, least: 0, until: 0 }
}
