//! Search for the next request to bind.
//!
//! ```text
//! order   1 ……… 256 │ 257 …………………………………………… 4096
//!         all priced │ those not passed over lately, and those whose worker has credits again: 256 at most
//! ```
//! A request that waits for a busy worker lets the others pass. Hundreds of them (one adapter, or one long common prefix, at one worker) would stand before
//! all that any other worker could take, of later priorities and other tenants too, if only the first ones were looked at. So the search goes on
//! behind them; and as prices cost time, a request there that waits for a worker is priced again when that worker has credits, or after a while.

use super::Fleet;
use crate::place::{Placement, Verdict};
use crate::view::Rank;
use penstock_proto::RequestId;
use std::collections::HashSet;
use std::time::Duration;

/// Waiting requests that are priced at each look, the first in order.
const FIRST_MAX: usize = 256;
/// Waiting requests behind the first ones that are priced at one look.
const BEHIND_MAX: usize = 256;
/// Those of them that are priced though they were passed over lately: the worker that they wait for has credits again.
const AGAIN_MAX: usize = BEHIND_MAX / 2;
/// Waiting requests that are looked at in all.
const ORDER_MAX: usize = 4096;
/// Time for which a request behind the first ones that was passed over is not priced again.
const PASSED_FOR: Duration = Duration::from_secs(2);

impl Fleet {
    /// First request in order that can be bound, and its placement. `shut`: no worker takes anything, so only requests count that go before this
    /// last rank at a worker.
    pub(super) fn look(&mut self, shut: Option<Option<Rank>>, now: Duration) -> Option<(RequestId, Placement)> {
        let mut random = self.random;
        let mut market = self.site.market(self.queue.seconds(), now);
        let (mut found, mut is_short) = (None, false);
        let (mut behind, mut again) = (BEHIND_MAX, AGAIN_MAX);
        let mut first = HashSet::new();
        'look: for most in [FIRST_MAX, ORDER_MAX] {
            let order = self.queue.order(now, most);
            let is_behind = !first.is_empty();
            for request in order.iter().filter(|request| !first.contains(*request)) {
                let Some((rank, waiting)) = self.queue.get_mut(*request) else { continue };
                if shut.is_some_and(|last| Some(rank) >= last) {
                    continue;
                }
                if is_behind {
                    if let Some(passed) = waiting.passed.filter(|passed| now.saturating_sub(passed.at) < PASSED_FOR) {
                        let worker = passed.worker.and_then(|worker| self.site.workers.get(&worker));
                        if again == 0 || worker.is_none_or(|worker| worker.credits() == 0) {
                            market.goes_before(&passed);
                            continue;
                        }
                        again -= 1;
                    }
                    if behind == 0 {
                        break 'look;
                    }
                    behind -= 1;
                }
                market.rank = rank;
                let verdict = market.place(waiting, &mut random);
                is_short |= std::mem::take(&mut waiting.has_lost);
                match verdict {
                    Verdict::Place(placement) => {
                        found = Some((*request, placement));
                        break 'look;
                    }
                    Verdict::LetPass => {}
                    Verdict::WaitForCredits => break 'look,
                }
            }
            // Without a worker that takes something, none stands idle for what is behind the first ones.
            if shut.is_some() || is_behind || order.len() < most {
                break;
            }
            first = order.into_iter().collect();
        }
        self.random = random;
        if is_short {
            self.queue.fall_short(now);
        }
        found
    }
}
