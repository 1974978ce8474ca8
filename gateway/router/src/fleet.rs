//! All workers of a pool and all requests that wait for one: what workers say goes in, bindings come out.

mod ahead;

pub use ahead::Ahead;

use crate::cost::Weights;
use crate::explain::{Candidate, Explanation, Why, why};
use crate::fit::Fit;
use crate::index::KvIndex;
use crate::load::Traffic;
use crate::place::{Market, Placement, Verdict};
use crate::policy::Policy;
use crate::queue::{FIRST, Queue, Rank, View, Waiting};
use crate::random::Random;
use crate::record::Record;
use crate::slo::Slo;
use crate::worker::{Member, Sent, WorkerView};
use crate::{WORKERS_MAX, WorkerId, pair};
use penstock_proto::frames::{Batch, EngineState, KvEvent};
use penstock_proto::{BLOCK_TOKENS, BlockHash};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// A token of prefill is charged with no more while nothing is known of the workers.
const TOKEN_SECONDS_GUESSED: f64 = 5e-5;

/// Waiting requests looked at when the first ones cannot be bound.
const LOOK_AHEAD: usize = 256;
/// Seconds of prefill that are believed of a request while nothing is known of the workers: a guess puts nobody behind others.
const GUESSED_MAX: f64 = 0.05;
/// Decisions that are remembered with all their candidates.
const DECISIONS_MAX: usize = 256;
/// Share of the past that a binding leaves in what is known of the traffic: about the last two hundred count.
const TRAFFIC_KEPT: f64 = 0.995;
/// Tokens of an answer before any has ended.
const OUTPUT_TOKENS: f64 = 256.0;

/// What the operator allows.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// New requests that may wait.
    pub queue_max: usize,
    /// A request whose first token is predicted later than this is refused at once; `None` lets it wait.
    pub ttft_max: Option<Duration>,
    /// How long a resumed request waits for a worker of its own numerics while others have credits.
    pub exact_wait: Duration,
    /// Objectives, where the pool has any: the queue is ordered by them, and what would miss them by far is refused.
    pub slo: Option<Slo>,
    /// Engine seconds by which tenants may differ and be equals.
    pub fair_bound: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { queue_max: 4096, ttft_max: None, exact_wait: Duration::from_secs(2), slo: None, fair_bound: 0.5 }
    }
}

/// The router's answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Choice {
    /// Send it there now.
    Bind {
        /// The request.
        request: u64,
        /// The worker.
        worker: WorkerId,
        /// Tokens that the worker is believed to have in its cache.
        cached_tokens: u32,
        /// Predicted time to the first token from now.
        ttft: Duration,
        /// False when a resumed request goes on in other numerics.
        exact: bool,
        /// Its place among those of one priority at the worker, lower first: what its tenant was served before, in microseconds of engine
        /// time by weight; [`FIRST`] for what began elsewhere.
        turn: i64,
        /// Who has more of the prompt, where fetching that is quicker than computing it.
        pull_from: Option<WorkerId>,
        /// Who computes the prompt for it, as far as it lacks it.
        prefill: Option<WorkerId>,
    },
    /// It has left the queue without a worker.
    Refuse {
        /// The request.
        request: u64,
        /// Why.
        reject: Reject,
    },
    /// Nothing can be bound until a worker says something new.
    Hold,
}

/// Why a request may not wait.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reject {
    /// When it is worth trying again.
    pub retry_after: Duration,
    /// What is in its way.
    pub refusal: Refusal,
}

/// What is in a request's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Too many wait.
    Full,
    /// Its first token would come later than the pool allows.
    Late,
    /// Its first token would come after its deadline.
    Impatient,
    /// Its deadline has passed.
    Deadline,
}

/// A request that has a worker.
struct Bound {
    worker: WorkerId,
    /// Number of its frame.
    sent: u64,
    tenant: Arc<str>,
    weight: u32,
    rank: Rank,
    /// Tokens emitted.
    emitted: u64,
    /// Blocks promised, until the first token.
    hashes: Option<Arc<[BlockHash]>>,
}

/// What requests are placed by: everything but the requests.
struct Site {
    weights: Weights,
    limits: Limits,
    policy: Policy,
    workers: BTreeMap<WorkerId, WorkerView>,
    index: KvIndex,
    turn: u64,
    /// Tokens of an answer, smoothed.
    output_tokens: f64,
    /// Seconds of prefill that were bound, in long prompts and in all, with forgetting.
    bound_seconds: (f64, f64),
}

impl Site {
    /// The promise of seconds between tokens, if there is one.
    fn tpot_max(&self) -> Option<f64> {
        self.limits.slo.map(|slo| slo.tpot.as_secs_f64()).filter(|tpot| *tpot > 0.0)
    }

    /// Mean speed of prefill of those that take requests.
    fn pace(&self) -> f64 {
        let taking = || self.workers.values().filter(|worker| worker.takes_requests());
        taking().map(WorkerView::pace).sum::<f64>() / taking().count().max(1) as f64
    }

    /// `queued`: seconds of prefill that wait in the gateway.
    fn market(&self, queued: f64, now: Duration) -> Market<'_> {
        let sum = self.workers.values().map(WorkerView::queue_seconds).sum::<f64>() + queued;
        Market {
            workers: &self.workers,
            index: &self.index,
            weights: &self.weights,
            policy: self.policy,
            exact_wait: self.limits.exact_wait,
            tpot: self.tpot_max(),
            rank: (0, i64::MAX),
            load: sum / self.workers.len().max(1) as f64,
            pace: self.pace(),
            output_tokens: self.output_tokens,
            turn: self.turn,
            now,
            ahead: [0.0; WORKERS_MAX],
            blocks_ahead: [0; WORKERS_MAX],
        }
    }
}

/// See the module header.
pub struct Fleet {
    site: Site,
    queue: Queue,
    random: Random,
    bound: HashMap<u64, Bound>,
    refused: VecDeque<(u64, Reject)>,
    decisions: VecDeque<Explanation>,
    /// Somebody came into the queue or left it since [`Self::ahead`] looked.
    has_moved: bool,
}

impl Fleet {
    /// An empty fleet that is cache aware and draws from seed 0.
    pub fn new(weights: Weights, limits: Limits) -> Self {
        let site = Site {
            weights,
            limits,
            policy: Policy::default(),
            workers: BTreeMap::new(),
            index: KvIndex::default(),
            turn: 0,
            output_tokens: OUTPUT_TOKENS,
            bound_seconds: (0.0, 0.0),
        };
        Self {
            site,
            queue: Queue::new(limits.fair_bound, limits.slo),
            random: Random::new(0),
            bound: HashMap::new(),
            refused: VecDeque::new(),
            decisions: VecDeque::new(),
            has_moved: false,
        }
    }

    /// Chooses by another rule.
    #[must_use]
    pub fn with_policy(mut self, policy: Policy) -> Self {
        self.site.policy = policy;
        self
    }

    /// Draws what is left to chance (which of equals) from another seed.
    #[must_use]
    pub fn seeded(self, seed: u64) -> Self {
        Self { random: Random::new(seed), ..self }
    }

    /// A worker is ready, with what its cache holds. It may have been there before: the view starts anew.
    pub fn join(&mut self, worker: WorkerId, member: Member, kv: &[KvEvent]) {
        self.leave(worker);
        self.site.index.join(worker, member.blocks_total as usize);
        kv.iter().for_each(|event| self.site.index.apply(worker, event));
        let equals = self.site.workers.values().filter(|view| view.member.device == member.device);
        let fit = Fit::like(equals.map(|view| &view.fit)).unwrap_or_default();
        self.site.workers.insert(worker, WorkerView::new(member, fit));
    }

    /// A worker is gone. Requests bound to it are the caller's to enqueue again.
    pub fn leave(&mut self, worker: WorkerId) {
        if self.site.workers.remove(&worker).is_some() {
            self.site.index.leave(worker);
            self.bound.retain(|_, bound| bound.worker != worker);
        }
    }

    /// Binds nothing to a worker while it is suspended; what is known of it stays.
    pub fn suspend(&mut self, worker: WorkerId, suspended: bool) {
        if let Some(view) = self.site.workers.get_mut(&worker) {
            view.suspended = suspended;
        }
    }

    /// Takes in what a worker said with a step. `accepted`: requests of this session that `state` counts.
    pub fn update(&mut self, worker: WorkerId, state: Option<&EngineState>, kv: &[KvEvent], accepted: u64) {
        let Some(view) = self.site.workers.get_mut(&worker) else { return };
        view.hear(state, accepted);
        kv.iter().for_each(|event| self.site.index.apply(worker, event));
    }

    /// Takes in what a step of a worker computed and how long it took.
    pub fn observe(&mut self, worker: WorkerId, batch: &Batch) {
        let Some(view) = self.site.workers.get_mut(&worker) else { return };
        view.observe(batch);
        if batch.prefill_tokens > 0 && view.fit.is_lesson() {
            let device = Arc::clone(&view.member.device);
            self.teach(&device);
        }
    }

    /// Lets workers that have hardly been used be taken for their equals.
    fn teach(&mut self, device: &str) {
        let equals = |view: &&WorkerView| *view.member.device == *device;
        if self.site.workers.values().filter(equals).all(|view| view.fit.is_telling()) {
            return;
        }
        let Some(known) = Fit::like(self.site.workers.values().filter(equals).map(|view| &view.fit)) else { return };
        let all = self.site.workers.values_mut();
        all.filter(|view| *view.member.device == *device).for_each(|view| view.fit.take_after(&known));
    }

    /// How fast a worker is as far as it is known.
    pub fn fit(&self, worker: WorkerId) -> Option<&Fit> {
        self.site.workers.get(&worker).map(|view| &view.fit)
    }

    /// Lets a request wait for a worker. For it, another that waits may have to go: [`Self::next`] says so.
    ///
    /// # Errors
    /// [`Reject`] when the queue is full or the first token would come too late; never for a resumed request.
    pub fn enqueue(&mut self, request: u64, view: View, now: Duration) -> Result<(), Reject> {
        let mut waiting = Waiting::new(request, view, now);
        waiting.estimate = self.site.market(self.queue.seconds(), now).least_own(&mut waiting);
        if !self.is_known() {
            waiting.estimate = waiting.estimate.min(GUESSED_MAX);
        }
        if !waiting.view.resumed
            && let Some((late, refusal)) = self.too_late(&waiting, now)
        {
            let retry_after = late.max(Duration::from_secs(1));
            return Err(Reject { retry_after, refusal });
        }
        self.has_moved = true;
        let retry_after = || self.predicted_ttft(0).clamp(Duration::from_secs(1), Duration::from_secs(60));
        let reject = Reject { retry_after: retry_after(), refusal: Refusal::Full };
        self.queue.raise_level(self.site.workers.values().filter_map(WorkerView::first_turn).min());
        match self.queue.push(waiting, self.site.limits.queue_max) {
            Ok(()) => Ok(()),
            Err(out) if out == request => Err(reject),
            Err(out) => {
                self.refused.push_back((out, reject));
                Ok(())
            }
        }
    }

    /// How much too late a new request would be served: later than its client waits, or than the pool allows.
    fn too_late(&self, waiting: &Waiting, now: Duration) -> Option<(Duration, Refusal)> {
        let Limits { ttft_max, slo, .. } = self.site.limits;
        let view = &waiting.view;
        let patience = view.deadline.map(|deadline| deadline.saturating_sub(now));
        if patience.is_none() && ttft_max.is_none() && slo.is_none_or(|slo| slo.refuse_above <= 0.0) {
            return None;
        }
        let ttft = self.soonest(waiting)?;
        let beyond = |most: Duration| ttft.checked_sub(most).filter(|over| !over.is_zero());
        if let Some(over) = patience.filter(|_| self.is_known()).and_then(beyond) {
            return Some((over, Refusal::Impatient));
        }
        let late = ttft_max.and_then(beyond);
        late.or_else(|| slo.and_then(|slo| slo.too_late(ttft, view.tokens.len()))).map(|over| (over, Refusal::Late))
    }

    /// Predicted time to the first token of a request that begins to wait now.
    fn soonest(&self, waiting: &Waiting) -> Option<Duration> {
        let view = &waiting.view;
        let ahead = self.queue.ahead(&view.tenant, view.weight) / self.site.workers.len().max(1) as f64;
        let tpot = self.site.limits.slo.map_or(f64::INFINITY, |slo| slo.tpot.as_secs_f64());
        let at = |worker: &WorkerView| {
            let (sequences, tokens) = (view.sequences.max(1), view.tokens.len());
            // Somebody has to end first.
            let waits = !worker.starts(sequences) || worker.is_crowded(sequences, tokens, tpot);
            let place = if waits { worker.place_seconds(self.site.output_tokens) } else { 0.0 };
            worker.queue_seconds().max(place) + worker.step_seconds(1, tokens)
        };
        let soonest = self.site.workers.values().map(at).min_by(f64::total_cmp)?;
        Some(seconds(ahead + soonest + waiting.estimate))
    }

    /// Whether predictions are more than guesses.
    fn is_known(&self) -> bool {
        self.site.workers.values().all(WorkerView::is_known)
    }

    /// A request ended, or will wait again: forgets that it waits and what was promised for it.
    pub fn remove(&mut self, request: u64) {
        self.has_moved = true;
        self.queue.remove(request);
        self.settle(request);
        if let Some(bound) = self.bound.remove(&request).filter(|bound| bound.emitted > 0) {
            self.site.output_tokens += (bound.emitted as f64 - self.site.output_tokens) / 64.0;
        }
    }

    /// The first token of a request arrived: its blocks are resident now, the promise ends.
    pub fn settle(&mut self, request: u64) {
        if let Some(bound) = self.bound.get_mut(&request)
            && let Some(hashes) = bound.hashes.take()
        {
            self.site.index.release(bound.worker, &hashes);
            self.site.workers.get_mut(&bound.worker).into_iter().for_each(|view| view.settle(request, bound.rank));
        }
    }

    /// A request got tokens: its tenant is charged for them.
    pub fn emitted(&mut self, request: u64, tokens: u64) {
        let Some(bound) = self.bound.get_mut(&request) else { return };
        bound.emitted += tokens;
        if let Some(view) = self.site.workers.get(&bound.worker) {
            self.queue.serve(&bound.tenant, bound.weight, view.token_seconds() * tokens as f64);
        }
    }

    /// The request that was bound last was not sent after all: nothing of it reaches the worker.
    pub fn unsent(&mut self, request: u64) {
        self.settle(request);
        let Some(bound) = self.bound.remove(&request) else { return };
        if let Some(view) = self.site.workers.get_mut(&bound.worker) {
            view.unsend(bound.sent);
        }
    }

    /// Binds a request to a worker that its owner chose, as when it moves while it runs; `cached_tokens` of it are there. False, and
    /// nothing has happened, when that worker is not there, takes nothing new, or would not start it now.
    pub fn assign(&mut self, request: u64, view: View, worker: WorkerId, cached_tokens: u32, now: Duration) -> bool {
        let mut waiting = Waiting::new(request, view, now);
        let (tokens, sequences) = (waiting.view.tokens.len(), waiting.view.sequences.max(1));
        let emitted = self.bound.get_mut(&request).map_or(0, |bound| std::mem::take(&mut bound.emitted));
        let Some(target) = self.site.workers.get_mut(&worker).filter(|target| target.starts(sequences)) else {
            self.bound.get_mut(&request).into_iter().for_each(|bound| bound.emitted = emitted);
            return false;
        };
        let seconds = target.prefill_seconds(tokens, cached_tokens as usize);
        let rows = tokens.saturating_sub(cached_tokens as usize);
        let blocks = rows.div_ceil(BLOCK_TOKENS) as u32;
        let sent = target.send(Sent { sequences, seconds, tokens, rows, blocks });
        let hashes = waiting.hashes(&target.member.numerics_id);
        self.remove(request);
        self.site.index.promise(worker, &hashes);
        let View { tenant, weight, priority, .. } = waiting.view;
        let rank = (priority, FIRST);
        self.site.workers.get_mut(&worker).into_iter().for_each(|view| view.begin(request, rank, rows));
        self.bound.insert(request, Bound { worker, sent, tenant, weight, rank, emitted, hashes: Some(hashes) });
        true
    }

    /// Predicted seconds of a step of a worker with so many sequences and tokens more; `None` when it would not start them now.
    pub fn step_with(&self, worker: WorkerId, sequences: u32, tokens: usize) -> Option<f64> {
        let view = self.site.workers.get(&worker)?;
        (sequences == 0 || view.starts(sequences)).then(|| view.step_seconds(sequences, tokens))
    }

    /// Predicted seconds of the prefill that a worker has before it.
    pub fn prefill_ahead(&self, worker: WorkerId) -> f64 {
        self.site.workers.get(&worker).map_or(0.0, WorkerView::queue_seconds)
    }

    /// Who prefills for `decode` when `prefill` is lost on the way, the one with the least ahead first; and how many tokens `decode` has to lack
    /// then, for that to be worth it.
    pub fn prefills_next(&self, decode: WorkerId, prefill: WorkerId) -> (Vec<WorkerId>, usize) {
        pair::next(&self.site.workers, &self.site.weights, decode, prefill)
    }

    /// Whether a worker takes nothing of what waits, however little it is: then nothing is priced.
    fn is_shut(&self, view: &WorkerView) -> bool {
        // What runs already is bound to no promise.
        let tpot = self.site.tpot_max().filter(|_| !self.queue.has_resumed());
        view.credits() == 0 || tpot.is_some_and(|tpot| view.is_crowded(1, 0, tpot))
    }

    /// The next binding or refusal. Call until it says [`Choice::Hold`]; after any other the request has left the queue, and the
    /// caller sends it or tells its client.
    pub fn next(&mut self, now: Duration) -> Choice {
        if let Some((request, reject)) = self.refused.pop_front() {
            return Choice::Refuse { request, reject };
        }
        if let Some(request) = self.queue.expired(now) {
            self.queue.remove(request);
            let reject = Reject { retry_after: Duration::from_secs(1), refusal: Refusal::Deadline };
            return Choice::Refuse { request, reject };
        }
        // Who waits for a worker without credits may pass what came after it.
        let is_shut = self.site.workers.values().all(|view| self.is_shut(view));
        let last = self.site.workers.values().filter_map(WorkerView::last_rank).max();
        if self.queue.len() == 0 || is_shut && self.queue.first_rank() >= last {
            return Choice::Hold;
        }
        let order = self.queue.order(now, LOOK_AHEAD);
        let mut random = self.random;
        let mut market = self.site.market(self.queue.seconds(), now);
        let (mut found, mut is_short) = (None, false);
        for request in order {
            let Some((rank, waiting)) = self.queue.get_mut(request) else { continue };
            if is_shut && Some(rank) >= last {
                continue;
            }
            market.rank = rank;
            let verdict = market.place(waiting, &mut random);
            is_short |= std::mem::take(&mut waiting.has_lost);
            match verdict {
                Verdict::Place(placement) => {
                    found = Some((request, placement));
                    break;
                }
                Verdict::LetPass => {}
                Verdict::WaitForCredits => break,
            }
        }
        self.random = random;
        if is_short {
            self.queue.fall_short(now);
        }
        found.map_or(Choice::Hold, |(request, placement)| self.bind(request, placement, now))
    }

    /// What would be decided about a request now, and why; nothing happens.
    pub fn explain(&self, view: View, now: Duration) -> Explanation {
        let mut waiting = Waiting::new(0, view, now);
        let market = self.site.market(self.queue.seconds(), now);
        let placement = market.choose(&mut waiting, &|_| true, true, &mut { self.random });
        let (candidates, chosen) = placement.map_or_else(Default::default, |p| (p.candidates, Some(p.chosen)));
        self.explanation(&waiting, candidates, chosen, now)
    }

    /// What is to be written down of the decision that bound a request, if it was the last.
    pub fn record(&self, request: u64) -> Option<Record> {
        let made = self.decisions.back().filter(|made| made.request == request)?;
        let Bound { worker, hashes, .. } = self.bound.get(&request)?;
        Some(Record::new(made, hashes.as_deref()?).at(self.site.workers.get(worker)?))
    }

    /// The last decisions, oldest first.
    pub fn decisions(&self) -> impl DoubleEndedIterator<Item = &Explanation> + ExactSizeIterator {
        self.decisions.iter()
    }

    /// Predicted time to the first token of a new request of `tokens` prompt tokens, cache aside: the shortest queue of a
    /// worker, its share of those that wait here, and its own prefill. [`Duration::MAX`] without a worker.
    pub fn predicted_ttft(&self, tokens: usize) -> Duration {
        let ahead = self.queue.seconds() / self.site.workers.len().max(1) as f64;
        let at =
            |view: &WorkerView| view.queue_seconds() + view.prefill_seconds(tokens, 0) + view.step_seconds(1, tokens);
        self.site
            .workers
            .values()
            .map(at)
            .min_by(f64::total_cmp)
            .map_or(Duration::MAX, |soonest| seconds(ahead + soonest))
    }

    /// What comes to the fleet, for [`crate::roles`] and [`crate::replicas`].
    pub fn traffic(&self) -> Traffic {
        let (long, all) = self.site.bound_seconds;
        let long_share = if all > 0.0 { long / all } else { 0.0 };
        Traffic { waiting: self.queue.len(), waiting_seconds: self.queue.seconds(), long_share }
    }

    /// Prefill seconds of the requests that wait here.
    pub fn waiting_seconds(&self) -> f64 {
        self.queue.seconds()
    }

    /// Requests that wait here.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Tenants that wait: name, requests, engine seconds served by weight.
    pub fn tenants(&self) -> impl Iterator<Item = (&Arc<str>, usize, f64)> {
        self.queue.tenants()
    }

    /// Blocks in the index: resident somewhere, promised.
    pub fn index_sizes(&self) -> (usize, usize) {
        self.site.index.sizes()
    }

    fn bind(&mut self, request: u64, placement: Placement, now: Duration) -> Choice {
        let Placement { candidates, chosen, exact } = placement;
        let Candidate { worker, found, parts, ttft, pull_from, prefill, .. } = candidates[chosen];
        let mut waiting = self.queue.remove(request).expect("it was just found in the queue");
        let view = self.site.workers.get_mut(&worker).expect("it was just chosen among the workers");
        let (tokens, cached_tokens) = (waiting.view.tokens.len(), found.device + found.promised);
        let rows = tokens.saturating_sub(cached_tokens as usize);
        let blocks = rows.div_ceil(BLOCK_TOKENS) as u32;
        let sequences = waiting.view.sequences.max(1);
        // What is computed elsewhere takes no rows here.
        let rows = if prefill.is_some() { BLOCK_TOKENS.min(rows) } else { rows };
        let uncached = view.prefill_seconds(tokens, cached_tokens as usize);
        // A guess can be more than a tenant's share of minutes.
        let charge = if view.is_known() { parts.own } else { parts.own.min(rows as f64 * TOKEN_SECONDS_GUESSED) };
        let sent = view.send(Sent { sequences, seconds: parts.own, tokens, rows, blocks });
        let hashes = waiting.hashes(&view.member.numerics_id);
        let is_long = tokens.saturating_sub(cached_tokens as usize) > self.site.weights.apart_tokens;
        let (long, all) = &mut self.site.bound_seconds;
        *long = *long * TRAFFIC_KEPT + if is_long { uncached } else { 0.0 };
        *all = *all * TRAFFIC_KEPT + uncached;
        if let Some(view) = prefill.and_then(|prefill| self.site.workers.get_mut(&prefill)) {
            let rows = tokens.saturating_sub(cached_tokens as usize);
            view.lend(Sent {
                sequences: 1,
                seconds: view.prefill_seconds(tokens, cached_tokens as usize),
                tokens,
                rows,
                blocks,
            });
        }
        self.remove(request);
        self.site.index.promise(worker, &hashes);
        let View { tenant, weight, .. } = &waiting.view;
        let rank = self.queue.rank(&waiting.view);
        self.queue.serve(tenant, *weight, charge);
        let (tenant, weight) = (Arc::clone(tenant), *weight);
        self.site.workers.get_mut(&worker).into_iter().for_each(|view| view.begin(request, rank, rows));
        self.bound.insert(request, Bound { worker, sent, tenant, weight, rank, emitted: 0, hashes: Some(hashes) });
        self.site.turn = self.site.turn.wrapping_add(1);
        let explanation = self.explanation(&waiting, candidates, Some(chosen), now);
        if self.decisions.len() >= DECISIONS_MAX {
            self.decisions.pop_front();
        }
        self.decisions.push_back(explanation);
        Choice::Bind { request, worker, cached_tokens, ttft: seconds(ttft), exact, turn: rank.1, pull_from, prefill }
    }

    fn explanation(
        &self,
        waiting: &Waiting,
        candidates: Vec<Candidate>,
        chosen: Option<usize>,
        now: Duration,
    ) -> Explanation {
        Explanation {
            request: waiting.request,
            at: now,
            waited: now.saturating_sub(waiting.since),
            tokens: waiting.view.tokens.len() as u32,
            policy: self.site.policy,
            why: chosen.map_or(Why::Only, |chosen| why(self.site.policy, &candidates, chosen)),
            candidates,
            chosen,
        }
    }
}

fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value.max(0.0)).unwrap_or(Duration::MAX)
}
