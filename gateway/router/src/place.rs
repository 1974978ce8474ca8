//! Placement of one request: every suitable worker is priced, and the policy chooses.
//!
//! A worker without credits is a candidate too: its price includes the wait, and if it is the cheapest the request
//! waits for it. The wait is bounded: time beyond the prediction is charged, and after [`HOLD_MAX`] only free workers
//! count; except when the worker has most of the prompt, which would have to be computed elsewhere. That is still better
//! than an error: for the last quarter of the time that the caller lets it wait, only free workers count for any request.
//!
//! A worker that lacks pages for the prompt is not free either, unless waiting frees none: there the request would stand first in
//! line and stop all behind it, while another worker may have pages sooner.
//!
//! Where a pool has objectives, a worker is not free for a request that would slow the sequences there beyond the
//! promised TPOT: the request goes elsewhere, or waits until one of them has ended. Resumed requests are exempt: they
//! were admitted before.

use crate::cost::{Terms, Weights, fill};
use crate::explain::{Candidate, Found};
use crate::index::{Hits, KvIndex};
use crate::policy::{Asked, Policy};
use crate::random::Random;
use crate::view::{Rank, View};
use crate::waiting::{Held, Passed, Waiting};
use crate::worker::WorkerView;
use crate::{WORKERS_MAX, WorkerId};
use penstock_proto::BLOCK_TOKENS;
use penstock_proto::frames::Tier;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Time that a request of many sequences waits for credits for all of them, and keeps those behind it waiting. After
/// that it takes the credits there are, and the worker queues the rest.
const TOGETHER_WAIT: Duration = Duration::from_millis(500);
/// Time that a request waits for a busy worker while others are free. Long, because the price includes the wait
/// already, and a session that is sent away computes its whole prompt anew, evicts others' blocks, and so sends them
/// away too. Simulated agents at 1.3 times their recorded rate: 40 % in SLO with ten seconds, 97 % with ten minutes.
const HOLD_MAX: Duration = Duration::from_secs(120);
/// Seconds that a wait may exceed its prediction before it is charged.
const HOLD_SLACK: f64 = 20.0;
/// Charge per second of a wait beyond that.
const OVERDUE: f64 = 0.5;
/// Life of a waiting request's index hits while it is only compared, not bound.
const FOUND_TTL: Duration = Duration::from_millis(50);

/// Borrowed parts of the fleet for one round of choosing, and figures that hold for the round.
pub(crate) struct Market<'a> {
    pub(crate) workers: &'a BTreeMap<WorkerId, WorkerView>,
    pub(crate) index: &'a KvIndex,
    pub(crate) weights: &'a Weights,
    pub(crate) policy: Policy,
    pub(crate) exact_wait: Duration,
    /// Wait in the queue after which only free workers count, whatever the others have; `None`: no such time.
    pub(crate) hold_max: Option<Duration>,
    /// TPOT in seconds that the pool promises; `None`: no promise.
    pub(crate) tpot: Option<f64>,
    /// Rank of the request that is being placed.
    pub(crate) rank: Rank,
    /// Mean queue of the fleet in seconds, with requests that wait in the gateway.
    pub(crate) load: f64,
    /// Mean prefill speed of the fleet, as [`WorkerView::pace`].
    pub(crate) pace: f64,
    /// Output tokens that are expected of an answer: the fleet's smoothed mean.
    pub(crate) output_tokens: f64,
    pub(crate) turn: u64,
    pub(crate) now: Duration,
    /// Prefill seconds, per worker, of earlier requests in the queue that wait for it.
    pub(crate) ahead: [f64; WORKERS_MAX],
    /// KV blocks, per worker, that the earlier requests in `ahead` will take.
    pub(crate) blocks_ahead: [u32; WORKERS_MAX],
}

/// Returns true if a worker's device has more than half of a prompt, promised blocks included.
fn has_most(found: Found, view: &View) -> bool {
    (found.device + found.promised) as usize * 2 > view.tokens.len()
}

/// Placement of a request: its priced candidates and the index of the chosen one.
pub(crate) struct Placement {
    pub(crate) candidates: Vec<Candidate>,
    pub(crate) chosen: usize,
    /// True if the choice has the request's own numerics.
    pub(crate) exact: bool,
}

impl Placement {
    pub(crate) fn choice(&self) -> &Candidate {
        &self.candidates[self.chosen]
    }
}

/// Decision about one request whose turn it is: a placement, or a reason to wait.
pub(crate) enum Verdict {
    Place(Placement),
    /// The request waits for a worker of its own numerics, for room at one, or for a busy one; requests behind it may pass.
    LetPass,
    /// The request gathers credits for its sequences; requests behind it wait too, or it would starve. At most for [`TOGETHER_WAIT`].
    WaitForCredits,
}

impl Market<'_> {
    /// Decides about a request whose turn it is.
    pub(crate) fn place(&mut self, waiting: &mut Waiting, random: &mut Random) -> Verdict {
        waiting.passed = Some(Passed { at: self.now, worker: None, seconds: 0.0, blocks: 0 });
        let wanted = waiting.view.numerics_id.clone();
        let needs = waiting.view.needs.clone();
        let is_able = |view: &WorkerView| view.meets(&needs);
        let is_home =
            |view: &WorkerView| is_able(view) && wanted.as_ref().is_none_or(|id| *id == view.member.numerics_id);
        let waited = self.now.saturating_sub(waiting.since);
        let has_home = self.workers.values().any(is_home);
        let exact = has_home && (waited < self.exact_wait || self.any_free(&waiting.view, &is_home));
        let suits = |view: &WorkerView| if exact { is_home(view) } else { is_able(view) };
        let Some(mut placement) = self.choose(waiting, &suits, false, random) else { return Verdict::LetPass };
        if placement.choice().free {
            // The hits may be some time old: look again before the choice is final.
            match self.choose(waiting, &suits, true, random) {
                Some(fresh) => placement = fresh,
                None => return Verdict::LetPass,
            }
        }
        placement.exact = wanted.is_none() || exact;
        let choice = placement.choice();
        if choice.free {
            return Verdict::Place(placement);
        }
        let worker = &self.workers[&choice.worker];
        let lacks_credits = worker.credits() > 0 && !worker.starts(waiting.view.sequences);
        if waiting.view.sequences > 1 && waited < TOGETHER_WAIT && lacks_credits {
            waiting.passed = None;
            return Verdict::WaitForCredits;
        }
        let blocks = self.blocks(&waiting.view, choice.found.device + choice.found.promised);
        let passed = Passed { at: self.now, worker: Some(choice.worker), seconds: choice.parts.own, blocks };
        self.goes_before(&passed);
        waiting.passed = Some(passed);
        let promised = choice.parts.queue;
        waiting.held.get_or_insert(Held { since: self.now, promised });
        Verdict::LetPass
    }

    /// Takes in a request that waits for a worker, and goes before those that are placed later.
    pub(crate) fn goes_before(&mut self, passed: &Passed) {
        let Some(at) = passed.worker.map(|worker| usize::from(worker.0)) else { return };
        self.ahead[at] += passed.seconds;
        self.blocks_ahead[at] = self.blocks_ahead[at].saturating_add(passed.blocks);
    }

    fn any_free(&self, view: &View, suits: &dyn Fn(&WorkerView) -> bool) -> bool {
        let takes =
            |worker: &WorkerView| suits(worker) && worker.starts(view.sequences) && !self.only_prefills(worker, suits);
        self.workers.values().any(takes)
    }

    /// Prices the workers that suit and lets the policy choose; `None` when none suits.
    pub(crate) fn choose(
        &self,
        waiting: &mut Waiting,
        suits: &dyn Fn(&WorkerView) -> bool,
        fresh: bool,
        random: &mut Random,
    ) -> Option<Placement> {
        let mut candidates = self.candidates(waiting, suits, fresh);
        // A worker with most of the prompt is waited for on: elsewhere all of it would be computed, and others' blocks evicted for it.
        let waits_for_most =
            candidates.iter().any(|candidate| !candidate.free && has_most(candidate.found, &waiting.view));
        let held_too_long =
            !waits_for_most && waiting.held.is_some_and(|held| self.now.saturating_sub(held.since) > HOLD_MAX);
        let is_last_call = self.is_last_call(waiting);
        if (held_too_long || is_last_call) && candidates.iter().any(|candidate| candidate.free) {
            candidates.retain(|candidate| candidate.free);
        }
        if candidates.is_empty() {
            return None;
        }
        let session = waiting.view.session.unwrap_or(waiting.request.0);
        let chosen = {
            let asked = Asked { session, turn: self.turn, keyed: waiting.view.keyed };
            self.policy.choose(&asked, &candidates, random)
        };
        Some(Placement { candidates, chosen, exact: true })
    }

    /// Returns true in the last quarter of the time that the caller lets the request wait.
    fn is_last_call(&self, waiting: &Waiting) -> bool {
        self.hold_max.is_some_and(|most| self.now.saturating_sub(waiting.since) > most)
    }

    /// Seconds of prefill at the worker with the least.
    pub(crate) fn least_own(&self, waiting: &mut Waiting) -> f64 {
        self.find(waiting, true);
        let found = waiting.found.iter().map(|(worker, found)| {
            let (own, ..) = self.own(&self.workers[worker], *worker, &waiting.view, *found, &waiting.found);
            own
        });
        found.min_by(f64::total_cmp).unwrap_or(0.0)
    }

    fn candidates(&self, waiting: &mut Waiting, suits: &dyn Fn(&WorkerView) -> bool, fresh: bool) -> Vec<Candidate> {
        self.find(waiting, fresh);
        let view = &waiting.view;
        let is_late = view.sequences > 1 && self.now.saturating_sub(waiting.since) >= TOGETHER_WAIT;
        let overdue = waiting.held.map_or(0.0, |held| {
            let took = self.now.saturating_sub(held.since).as_secs_f64();
            OVERDUE * (took - 1.5 * held.promised - HOLD_SLACK).max(0.0)
        });
        // What has begun elsewhere is not held, and what has waited long enough waits on at a worker.
        let needs_pages = !view.resumed && !self.is_last_call(waiting);
        let has_pages =
            |id: WorkerId, worker: &WorkerView, found: Found| !needs_pages || self.has_pages(worker, id, view, found);
        let can = |worker: &&WorkerView| suits(worker) && !self.only_prefills(worker, suits);
        let starts_all = |(id, found): &(WorkerId, Found)| {
            let worker = self.workers.get(id).filter(can);
            worker.is_some_and(|worker| worker.starts(view.sequences) && has_pages(*id, worker, *found))
        };
        let takes_part = is_late && !waiting.found.iter().any(starts_all);
        let mut candidates = Vec::with_capacity(waiting.found.len());
        for (id, found) in &waiting.found {
            let Some(worker) = self.workers.get(id).filter(can) else { continue };
            let blocks = self.blocks(view, found.device + found.promised);
            let has_room = worker.starts(view.sequences)
                || takes_part && worker.starts_one(view.sequences)
                || worker.lets_pass(self.rank, view.sequences.max(1), blocks);
            let crowded = self.crowds(worker, view);
            let free = has_room && !crowded && has_pages(*id, worker, *found);
            let mut candidate = self.price(worker, *id, view, *found, &waiting.found, free);
            candidate.crowded = crowded;
            candidate.overdue = if free || has_most(*found, view) { 0.0 } else { overdue };
            candidates.push(candidate);
        }
        candidates
    }

    /// Returns true if the worker has pages for the part of the prompt that it does not have, after those of requests that wait in the
    /// gateway for this worker.
    fn has_pages(&self, worker: &WorkerView, id: WorkerId, view: &View, found: Found) -> bool {
        let have = (found.device + found.promised) as usize;
        let blocks = view.tokens.len().saturating_sub(have).div_ceil(BLOCK_TOKENS) as u32;
        worker.has_pages(blocks.saturating_add(self.blocks_ahead[usize::from(id.0)]), view.priority)
    }

    /// Price of the request at one worker.
    fn price(
        &self,
        worker: &WorkerView,
        id: WorkerId,
        view: &View,
        found: Found,
        all: &[(WorkerId, Found)],
        free: bool,
    ) -> Candidate {
        let tokens = view.tokens.len();
        let (own, loaded, pull_from) = self.own(worker, id, view, found, all);
        let found = Found { loaded, ..found };
        let mut queue = worker.queue_before(self.rank) + self.ahead[usize::from(id.0)];
        if !free {
            // Places are missing rather than time: a sequence has to end first.
            queue = queue.max(worker.place_seconds(self.output_tokens));
        }
        let before = worker.promised_blocks().saturating_add(self.blocks_ahead[usize::from(id.0)]);
        let blocks = self.blocks(view, found.device + found.promised);
        let step = worker.step_seconds(view.sequences.max(1), tokens);
        let terms = Terms {
            queue,
            own,
            pace: self.pace_of(worker),
            load: self.load,
            decoding: f64::from(worker.sequences()),
            step,
            fill: fill(&worker.member.state, before.saturating_add(blocks)),
        };
        let candidate = Candidate {
            worker: id,
            free,
            crowded: false,
            sequences: worker.sequences(),
            found,
            pull_from,
            prefill: None,
            parts: self.weights.price(&terms),
            overdue: 0.0,
            ttft: queue + own + step,
            tpot: worker.tpot(step),
        };
        self.apart(candidate, worker, &terms, view, all)
    }

    /// Prefill speed of a worker relative to the fleet's mean.
    pub(crate) fn pace_of(&self, worker: &WorkerView) -> f64 {
        if self.pace > 0.0 { worker.pace() / self.pace } else { 1.0 }
    }

    /// Returns true if a request would break the promised TPOT of the sequences at a worker.
    fn crowds(&self, worker: &WorkerView, view: &View) -> bool {
        let tpot = self.tpot.filter(|_| !view.resumed);
        tpot.is_some_and(|tpot| worker.is_crowded(view.sequences.max(1), view.tokens.len(), tpot))
    }

    /// Blocks that a request takes beyond those that hold `have` of its tokens, expected output included.
    fn blocks(&self, view: &View, have: u32) -> u32 {
        let tokens = view.tokens.len() + self.output_tokens as usize;
        tokens.saturating_sub(have as usize).div_ceil(BLOCK_TOKENS) as u32
    }

    /// Seconds until the worker has the prompt by the quickest way: computed, loaded from its tiers, or pulled from
    /// another worker. Also the number of tokens loaded or pulled, and the worker to pull from.
    fn own(
        &self,
        worker: &WorkerView,
        id: WorkerId,
        view: &View,
        found: Found,
        all: &[(WorkerId, Found)],
    ) -> (f64, u32, Option<WorkerId>) {
        let tokens = view.tokens.len();
        let have = found.device + found.promised;
        let mut best = (worker.prefill_seconds(tokens, have as usize), 0, None);
        let (mut reached, mut seconds) = (have, 0.0);
        let below = [(Tier::Host, found.host), (Tier::Disk, found.disk), (Tier::Remote, found.remote)];
        for (tier, more) in below {
            let Some(load) = worker.load_seconds(tier, more).filter(|_| more > 0) else {
                // Blocks behind a hole cannot be used.
                if more > 0 {
                    break;
                }
                continue;
            };
            (reached, seconds) = (reached + more, seconds + load);
            let all = seconds + worker.prefill_seconds(tokens, reached as usize);
            if all < best.0 {
                best = (all, reached - have, None);
            }
        }
        let others = all.iter().filter(|(other, found)| *other != id && found.device > have);
        if let Some((other, theirs)) = others.max_by_key(|(_, found)| found.device) {
            let more = theirs.device - have;
            let pull = self.workers.get(other).and_then(|other| worker.pull_seconds(other, more));
            let all = pull.map(|pull| pull + worker.prefill_seconds(tokens, theirs.device as usize));
            if let Some(all) = all.filter(|all| *all < best.0) {
                best = (all, more, Some(*other));
            }
        }
        best
    }

    /// Looks up the prompt's hits at every worker that takes requests.
    fn find(&self, waiting: &mut Waiting, fresh: bool) {
        let is_recent = self.now.saturating_sub(waiting.found_at) < FOUND_TTL && !waiting.found.is_empty();
        if is_recent && !fresh {
            return;
        }
        let mut hits: Option<(Arc<str>, Hits)> = None;
        let mut all = std::mem::take(&mut waiting.found);
        all.clear();
        for (id, worker) in self.workers.iter().filter(|(_, worker)| worker.takes_requests()) {
            let numerics_id = &worker.member.numerics_id;
            if hits.as_ref().is_none_or(|(known, _)| known != numerics_id) {
                let hashes = waiting.hashes(numerics_id);
                let found = self.index.hits_by_tier(&hashes, self.workers.keys().copied());
                hits = Some((Arc::clone(numerics_id), found));
            }
            let found =
                hits.as_ref().map_or_else(Found::default, |(_, hits)| found(hits, *id, waiting.view.tokens.len()));
            all.push((*id, found));
        }
        waiting.found = all;
        waiting.found_at = self.now;
        waiting.note_found();
    }
}

/// Hits in tokens. The last token is always computed, because its logits are needed.
fn found(hits: &Hits, worker: WorkerId, tokens: usize) -> Found {
    let most = tokens.saturating_sub(1) as u32;
    let up_to = |blocks: u32| blocks.saturating_mul(BLOCK_TOKENS as u32).min(most);
    let device = up_to(hits.on_device(worker));
    let ready = up_to(hits.ready(worker));
    let [host, disk, remote] = [Tier::Host, Tier::Disk, Tier::Remote].map(|tier| up_to(hits.within(worker, tier)));
    Found {
        device,
        promised: ready.saturating_sub(device),
        host: host.saturating_sub(ready),
        disk: disk.saturating_sub(host),
        remote: remote.saturating_sub(disk),
        loaded: 0,
    }
}
