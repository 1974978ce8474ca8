//! All workers of a pool and all requests that wait for one: reports of workers go in, bindings come out.

mod ahead;
mod look;

pub use ahead::Ahead;

use crate::cost::Weights;
use crate::explain::{Candidate, Explanation, Why, why};
use crate::fit::Fit;
use crate::index::KvIndex;
use crate::load::Traffic;
use crate::place::{Market, Placement};
use crate::policy::Policy;
use crate::queue::Queue;
use crate::random::Random;
use crate::record::Record;
use crate::slo::Slo;
use crate::view::{FIRST, Rank, View};
use crate::waiting::Waiting;
use crate::worker::{Member, Sent, WorkerView};
use crate::{WORKERS_MAX, WorkerId, pair};
use penstock_proto::frames::{Batch, EngineState, KvEvent};
use penstock_proto::{AdapterId, BLOCK_TOKENS, BlockHash, RequestId};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Most seconds charged per prefill token while the workers' speed is unknown.
const TOKEN_SECONDS_GUESSED: f64 = 5e-5;

/// Most seconds of prefill assumed of a request while the workers' speed is unknown, so that a guess puts no request behind others.
const GUESSED_MAX: f64 = 0.05;
/// Most decisions kept with all their candidates; the oldest make room.
const DECISIONS_MAX: usize = 256;
/// Weight of the past after each binding in the traffic's figures: about the last two hundred count.
const TRAFFIC_KEPT: f64 = 0.995;
/// Output tokens assumed of an answer before any has ended.
const OUTPUT_TOKENS: f64 = 256.0;

/// Operator's bounds on the router's queue, predicted waits, and fairness.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most new requests in the queue; resumed ones are never refused.
    pub queue_max: usize,
    /// Predicted TTFT above which a request is refused at once; `None`: no bound.
    pub ttft_max: Option<Duration>,
    /// Time that a resumed request waits for a worker of its own numerics while others have credits.
    pub exact_wait: Duration,
    /// Objectives, if the pool has any: they order the queue, and a request that would miss them by far is refused.
    pub slo: Option<Slo>,
    /// Time after which the caller fails a request that still waits; `None`: never. For its last quarter, a request
    /// takes any worker with room that suits.
    pub wait_max: Option<Duration>,
    /// Fairness bound: engine seconds by which tenants may differ and still count as equals.
    pub fair_bound: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            queue_max: 4096,
            ttft_max: None,
            exact_wait: Duration::from_secs(2),
            slo: None,
            wait_max: None,
            fair_bound: 0.5,
        }
    }
}

/// Outcome of [`Fleet::next`]: a binding, a refusal, or neither.
#[derive(Clone, Debug, PartialEq)]
pub enum Choice {
    /// The request has left the queue and is to be sent to the worker now.
    Bind {
        /// Number of the request that leaves the queue.
        request: RequestId,
        /// Worker that the request is bound to.
        worker: WorkerId,
        /// Prompt tokens that the router believes to be in the worker's cache.
        cached_tokens: u32,
        /// Predicted time from now to the first token.
        ttft: Duration,
        /// True if the request runs in its own numerics; false for a resumed request that goes on in others.
        exact: bool,
        /// Rank among requests of one priority at the worker, lower first: the tenant's earlier service in microseconds
        /// of engine time by weight; [`FIRST`] for a resumed request.
        turn: i64,
        /// Worker with more of the prompt, where pulling its blocks is quicker than computing them.
        pull_from: Option<WorkerId>,
        /// Worker that computes the uncached part of the prompt, if not the chosen one.
        prefill: Option<WorkerId>,
    },
    /// The request has left the queue without a worker.
    Refuse {
        /// Number of the request that leaves the queue.
        request: RequestId,
        /// Reason of the refusal, and the time after which a retry makes sense.
        reject: Reject,
    },
    /// No request can be bound until a worker reports.
    Hold,
}

/// Refusal of a request by the router, with the reason and the time for `Retry-After`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reject {
    /// Time after which the client may retry.
    pub retry_after: Duration,
    /// Reason of the refusal: a full queue, or a deadline.
    pub refusal: Refusal,
}

/// Reason why the router refuses a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The queue holds [`Limits::queue_max`] new requests already.
    Full,
    /// The first token would come later than the pool allows.
    Late,
    /// The first token would come after the request's deadline.
    Impatient,
    /// The request's deadline passed while the request waited.
    Deadline,
}

/// A request that has been bound and has not ended: its tenant's share and its promised blocks.
struct Bound {
    worker: WorkerId,
    /// Number of the frame by which the request was sent to its worker.
    sent: u64,
    tenant: Arc<str>,
    weight: u32,
    rank: Rank,
    sequences: u32,
    /// Output tokens that the request has emitted so far.
    emitted: u64,
    /// Hashes of the blocks promised to be at the worker; `None` after the first token, when they are resident.
    hashes: Option<Arc<[BlockHash]>>,
}

/// State by which requests are placed: workers, cache index, weights, and averages.
struct Site {
    weights: Weights,
    limits: Limits,
    policy: Policy,
    workers: BTreeMap<WorkerId, WorkerView>,
    index: KvIndex,
    turn: u64,
    /// Exponentially smoothed mean of the output tokens per answer.
    output_tokens: f64,
    /// Seconds of prefill bound, in long prompts and in all, with forgetting.
    bound_seconds: (f64, f64),
}

impl Site {
    /// TPOT in seconds that the pool promises; `None`: no promise.
    fn tpot_max(&self) -> Option<f64> {
        self.limits.slo.map(|slo| slo.tpot.as_secs_f64()).filter(|tpot| *tpot > 0.0)
    }

    /// Mean prefill speed of the workers that take requests.
    fn pace(&self) -> f64 {
        let taking = || self.workers.values().filter(|worker| worker.takes_requests());
        taking().map(WorkerView::pace).sum::<f64>() / taking().count().max(1) as f64
    }

    /// Snapshot for one round of choosing. `queued`: seconds of prefill that wait in the gateway.
    fn market(&self, queued: f64, now: Duration) -> Market<'_> {
        let sum = self.workers.values().map(WorkerView::queue_seconds).sum::<f64>() + queued;
        Market {
            workers: &self.workers,
            index: &self.index,
            weights: &self.weights,
            policy: self.policy,
            exact_wait: self.limits.exact_wait,
            hold_max: self.limits.wait_max.map(|most| most * 3 / 4),
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

/// Router of one pool; see the module header.
pub struct Fleet {
    site: Site,
    queue: Queue,
    random: Random,
    bound: HashMap<RequestId, Bound>,
    refused: VecDeque<(RequestId, Reject)>,
    decisions: VecDeque<Explanation>,
    /// True if a request entered or left the queue since [`Self::ahead`] last looked.
    has_moved: bool,
}

impl Fleet {
    /// An empty fleet with the cache-aware policy and seed 0.
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

    /// Sets the policy by which workers are chosen.
    #[must_use]
    pub fn with_policy(mut self, policy: Policy) -> Self {
        self.site.policy = policy;
        self
    }

    /// Sets the seed of the random choices between workers of equal cost.
    #[must_use]
    pub fn seeded(self, seed: u64) -> Self {
        Self { random: Random::new(seed), ..self }
    }

    /// Adds a worker that is ready, with the content of its cache. A known worker's view starts anew.
    pub fn join(&mut self, worker: WorkerId, member: Member, kv: &[KvEvent]) {
        self.leave(worker);
        self.site.index.join(worker, member.blocks_total as usize);
        kv.iter().for_each(|event| self.site.index.apply(worker, event));
        let equals = self.site.workers.values().filter(|view| view.member.device == member.device);
        let fit = Fit::like(equals.map(|view| &view.fit)).unwrap_or_default();
        self.site.workers.insert(worker, WorkerView::new(member, fit));
    }

    /// Takes in the adapters that a worker has from now on.
    pub fn adapt(&mut self, worker: WorkerId, adapters: Arc<[AdapterId]>) {
        if let Some(view) = self.site.workers.get_mut(&worker) {
            view.member.adapters = adapters;
        }
    }

    /// Removes a worker. Its requests have to be enqueued again by the caller.
    pub fn leave(&mut self, worker: WorkerId) {
        if self.site.workers.remove(&worker).is_some() {
            self.site.index.leave(worker);
            self.bound.retain(|_, bound| bound.worker != worker);
        }
    }

    /// Suspends a worker or ends its suspension: a suspended one gets no requests, and its view is kept.
    pub fn suspend(&mut self, worker: WorkerId, suspended: bool) {
        if let Some(view) = self.site.workers.get_mut(&worker) {
            view.suspended = suspended;
        }
    }

    /// Takes in a worker's report. `accepted`: requests of this session that `state` counts.
    pub fn update(&mut self, worker: WorkerId, state: Option<&EngineState>, kv: &[KvEvent], accepted: u64) {
        let Some(view) = self.site.workers.get_mut(&worker) else { return };
        view.hear(state, accepted);
        kv.iter().for_each(|event| self.site.index.apply(worker, event));
    }

    /// Takes in a step of a worker: what was computed and how long it took.
    pub fn observe(&mut self, worker: WorkerId, batch: &Batch) {
        let Some(view) = self.site.workers.get_mut(&worker) else { return };
        view.observe(batch);
        if batch.prefill_tokens > 0 && view.fit.is_lesson() {
            let device = Arc::clone(&view.member.device);
            self.teach(&device);
        }
    }

    /// Updates the speed of hardly used workers from that of their equals on the same device.
    fn teach(&mut self, device: &str) {
        let equals = |view: &&WorkerView| *view.member.device == *device;
        if self.site.workers.values().filter(equals).all(|view| view.fit.is_telling()) {
            return;
        }
        let Some(known) = Fit::like(self.site.workers.values().filter(equals).map(|view| &view.fit)) else { return };
        let all = self.site.workers.values_mut();
        all.filter(|view| *view.member.device == *device).for_each(|view| view.fit.take_after(&known));
    }

    /// Fitted speed of a worker; `None` for a worker that has not joined.
    pub fn fit(&self, worker: WorkerId) -> Option<&Fit> {
        self.site.workers.get(&worker).map(|view| &view.fit)
    }

    /// Enqueues a request. A full queue may put out another one for it, which [`Self::next`] then refuses.
    ///
    /// # Errors
    /// [`Reject`] when the queue is full or the first token would come too late; never for a resumed request.
    pub fn enqueue(&mut self, request: RequestId, view: View, now: Duration) -> Result<(), Reject> {
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

    /// Time by which a new request would miss its deadline or the pool's bound on the TTFT; `None`: it misses none.
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

    /// Predicted TTFT of a request that begins to wait now, at the worker where it is shortest.
    fn soonest(&self, waiting: &Waiting) -> Option<Duration> {
        let view = &waiting.view;
        let ahead = self.queue.ahead(&view.tenant, view.weight) / self.site.workers.len().max(1) as f64;
        let tpot = self.site.limits.slo.map_or(f64::INFINITY, |slo| slo.tpot.as_secs_f64());
        let at = |worker: &WorkerView| {
            let (sequences, tokens) = (view.sequences.max(1), view.tokens.len());
            // All places are taken: a sequence has to end first.
            let waits = !worker.starts(sequences) || worker.is_crowded(sequences, tokens, tpot);
            let place = if waits { worker.place_seconds(self.site.output_tokens) } else { 0.0 };
            worker.queue_seconds().max(place) + worker.step_seconds(1, tokens)
        };
        let soonest = self.site.workers.values().map(at).min_by(f64::total_cmp)?;
        Some(seconds(ahead + soonest + waiting.estimate))
    }

    /// Returns true if predictions for all workers rest on more than guesses.
    fn is_known(&self) -> bool {
        self.site.workers.values().all(WorkerView::is_known)
    }

    /// Removes a request that has ended or will be enqueued again, with its promises.
    pub fn remove(&mut self, request: RequestId) {
        self.has_moved = true;
        self.queue.remove(request);
        self.settle(request);
        if let Some(bound) = self.unbind(request).filter(|bound| bound.emitted > 0) {
            self.site.output_tokens += (bound.emitted as f64 - self.site.output_tokens) / 64.0;
        }
    }

    /// Ends the promise of a request at its first token: its blocks are resident now.
    pub fn settle(&mut self, request: RequestId) {
        if let Some(bound) = self.bound.get_mut(&request)
            && let Some(hashes) = bound.hashes.take()
        {
            self.site.index.release(bound.worker, &hashes);
            self.site.workers.get_mut(&bound.worker).into_iter().for_each(|view| view.settle(request, bound.rank));
        }
    }

    /// Charges the tokens that a request has emitted to the service of its tenant.
    pub fn emitted(&mut self, request: RequestId, tokens: u64) {
        let Some(bound) = self.bound.get_mut(&request) else { return };
        bound.emitted += tokens;
        if let Some(view) = self.site.workers.get(&bound.worker) {
            self.queue.serve(&bound.tenant, bound.weight, view.token_seconds() * tokens as f64);
        }
    }

    /// Takes back the last binding, whose request was not sent to the worker after all.
    pub fn unsent(&mut self, request: RequestId) {
        self.settle(request);
        let Some(bound) = self.unbind(request) else { return };
        if let Some(view) = self.site.workers.get_mut(&bound.worker) {
            view.unsend(bound.sent);
        }
    }

    /// Removes what is known of a bound request, and its sequences from those of its worker.
    fn unbind(&mut self, request: RequestId) -> Option<Bound> {
        let bound = self.bound.remove(&request)?;
        self.site.workers.get_mut(&bound.worker).into_iter().for_each(|view| view.end(bound.rank, bound.sequences));
        Some(bound)
    }

    /// Binds a request to a worker chosen by the caller, as in a migration; `cached_tokens` of its prompt are there.
    /// False, without effect, when the worker is unknown, takes nothing new, or would not start the request now.
    pub fn assign(
        &mut self,
        request: RequestId,
        view: View,
        worker: WorkerId,
        cached_tokens: u32,
        now: Duration,
    ) -> bool {
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
        self.site.workers.get_mut(&worker).into_iter().for_each(|view| view.begin(request, rank, sequences, rows));
        self.bound
            .insert(request, Bound { worker, sent, tenant, weight, rank, sequences, emitted, hashes: Some(hashes) });
        true
    }

    /// Predicted seconds of a worker's decode step with `sequences` and `tokens` added; `None` when it would not start them now.
    pub fn step_with(&self, worker: WorkerId, sequences: u32, tokens: usize) -> Option<f64> {
        let view = self.site.workers.get(&worker)?;
        (sequences == 0 || view.starts(sequences)).then(|| view.step_seconds(sequences, tokens))
    }

    /// Predicted seconds of the prefill queued at a worker.
    pub fn prefill_ahead(&self, worker: WorkerId) -> f64 {
        self.site.workers.get(&worker).map_or(0.0, WorkerView::queue_seconds)
    }

    /// Prefill workers for `decode` if `prefill` is lost on the way, least queue first; and the number of missing
    /// tokens from which asking one is worth it. `adapter`: the adapter of the request, which they must have too.
    pub fn prefills_next(
        &self,
        decode: WorkerId,
        prefill: WorkerId,
        adapter: Option<AdapterId>,
    ) -> (Vec<WorkerId>, usize) {
        pair::next(&self.site.workers, &self.site.weights, (decode, prefill), adapter)
    }

    /// Returns true if a worker takes no waiting request, however small: then none is priced.
    fn is_shut(&self, view: &WorkerView) -> bool {
        // Resumed requests are exempt from the promise.
        let tpot = self.site.tpot_max().filter(|_| !self.queue.has_resumed());
        view.credits() == 0 || tpot.is_some_and(|tpot| view.is_crowded(1, 0, tpot))
    }

    /// The next binding or refusal. To be called until it returns [`Choice::Hold`]; after any other result the request
    /// has left the queue, and the caller sends it or tells its client.
    pub fn next(&mut self, now: Duration) -> Choice {
        if let Some((request, reject)) = self.refused.pop_front() {
            return Choice::Refuse { request, reject };
        }
        if let Some(request) = self.queue.expired(now) {
            self.queue.remove(request);
            let reject = Reject { retry_after: Duration::from_secs(1), refusal: Refusal::Deadline };
            return Choice::Refuse { request, reject };
        }
        // A request that waits for a worker without credits may pass those that came there later.
        let is_shut = self.site.workers.values().all(|view| self.is_shut(view));
        let last = self.site.workers.values().filter_map(WorkerView::last_rank).max();
        if self.queue.len() == 0 || is_shut && self.queue.first_rank() >= last {
            return Choice::Hold;
        }
        self.look(is_shut.then_some(last), now)
            .map_or(Choice::Hold, |(request, placement)| self.bind(request, placement, now))
    }

    /// Explains the decision that would be made about a request now, without effect.
    pub fn explain(&self, view: View, now: Duration) -> Explanation {
        let mut waiting = Waiting::new(RequestId::default(), view, now);
        let market = self.site.market(self.queue.seconds(), now);
        let placement = market.choose(&mut waiting, &|_| true, true, &mut { self.random });
        let (candidates, chosen) = placement.map_or_else(Default::default, |p| (p.candidates, Some(p.chosen)));
        self.explanation(&waiting, candidates, chosen, now)
    }

    /// Record of the decision that bound a request, if it was the last decision.
    pub fn record(&self, request: RequestId) -> Option<Record> {
        let made = self.decisions.back().filter(|made| made.request == request)?;
        let Bound { worker, hashes, .. } = self.bound.get(&request)?;
        Some(Record::new(made, hashes.as_deref()?).at(self.site.workers.get(worker)?))
    }

    /// The last decisions with all their candidates, oldest first; at most 256 are kept.
    pub fn decisions(&self) -> impl DoubleEndedIterator<Item = &Explanation> + ExactSizeIterator {
        self.decisions.iter()
    }

    /// Predicted TTFT of a new request of `tokens` prompt tokens without a cache hit: the shortest queue of a worker,
    /// its share of the gateway's queue, and the prefill. [`Duration::MAX`] without a worker.
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

    /// Load that waits in front of the workers, for the planners in [`crate::roles`] and [`crate::replicas`].
    pub fn traffic(&self) -> Traffic {
        let (long, all) = self.site.bound_seconds;
        let long_share = if all > 0.0 { long / all } else { 0.0 };
        Traffic { waiting: self.queue.len(), waiting_seconds: self.queue.seconds(), long_share }
    }

    /// Estimated prefill of the requests in the queue, in seconds.
    pub fn waiting_seconds(&self) -> f64 {
        self.queue.seconds()
    }

    /// Number of requests in the router's queue.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Tenants with waiting requests: name, requests, engine seconds served by weight.
    pub fn tenants(&self) -> impl Iterator<Item = (&Arc<str>, usize, f64)> {
        self.queue.tenants()
    }

    /// Number of blocks in the index: resident at some worker, and promised.
    pub fn index_sizes(&self) -> (usize, usize) {
        self.site.index.sizes()
    }

    fn bind(&mut self, request: RequestId, placement: Placement, now: Duration) -> Choice {
        let Placement { candidates, chosen, exact } = placement;
        let Candidate { worker, found, parts, ttft, pull_from, prefill, .. } = candidates[chosen];
        let mut waiting = self.queue.remove(request).expect("it was just found in the queue");
        let view = self.site.workers.get_mut(&worker).expect("it was just chosen among the workers");
        let (tokens, cached_tokens) = (waiting.view.tokens.len(), found.device + found.promised);
        let rows = tokens.saturating_sub(cached_tokens as usize);
        let blocks = rows.div_ceil(BLOCK_TOKENS) as u32;
        let sequences = waiting.view.sequences.max(1);
        // Prefill rows that another worker computes are not taken here.
        let rows = if prefill.is_some() { BLOCK_TOKENS.min(rows) } else { rows };
        let uncached = view.prefill_seconds(tokens, cached_tokens as usize);
        // Without a known speed the price may be a wild guess, and would charge the tenant for minutes.
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
        self.site.workers.get_mut(&worker).into_iter().for_each(|view| view.begin(request, rank, sequences, rows));
        let hashes = Some(hashes);
        self.bound.insert(request, Bound { worker, sent, tenant, weight, rank, sequences, emitted: 0, hashes });
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
