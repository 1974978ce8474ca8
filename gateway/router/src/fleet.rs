//! All workers of a pool and all requests that wait for one: what workers say goes in, bindings come out.

use crate::cost::{Terms, Weights, fill};
use crate::fit::Fit;
use crate::index::KvIndex;
use crate::queue::{Queue, View, Waiting};
use crate::{WORKERS_MAX, WorkerId};
use penstock_proto::frames::{Batch, EngineState, KvEvent};
use penstock_proto::{BLOCK_TOKENS, BlockHash};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

/// Waiting requests looked at when the first ones cannot be bound (they wait for certain numerics).
const LOOK_AHEAD: usize = 32;

/// How long a request of many sequences waits for credits for all of them, and keeps those behind it waiting. Then it takes
/// what there is, and the worker queues the rest.
const TOGETHER_WAIT: Duration = Duration::from_millis(500);

/// Sequences that may wait at a worker that was sent more than it granted; a worker refuses above that.
const WAITING_AT_WORKER_MAX: u32 = 256;

/// What the operator allows.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// New requests that may wait.
    pub queue_max: usize,
    /// A request whose first token is predicted later than this is refused at once; `None` lets it wait.
    pub ttft_max: Option<Duration>,
    /// How long a resumed request waits for a worker of its own numerics while others have credits.
    pub exact_wait: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { queue_max: 4096, ttft_max: None, exact_wait: Duration::from_secs(2) }
    }
}

/// A worker as it announces itself.
#[derive(Clone, Debug, Default)]
pub struct Member {
    /// What its results are exact within.
    pub numerics_id: Arc<str>,
    /// KV blocks in all.
    pub blocks_total: u32,
    /// Sequences that it runs at once.
    pub sequences_max: u32,
    /// State at this moment.
    pub state: EngineState,
    /// Device and path; workers of an equal one are taken to be as fast until their own steps tell.
    pub device: Arc<str>,
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
    },
    /// Nothing can be bound until a worker says something new.
    Hold,
}

/// Why a request may not wait.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reject {
    /// When it is worth trying again.
    pub retry_after: Duration,
}

struct WorkerView {
    member: Member,
    fit: Fit,
    /// Sent and not yet counted in the worker's state, oldest first: (number of the frame, sequences, prefill seconds).
    unseen: BTreeMap<u64, (u32, f64)>,
    sent: u64,
    suspended: bool,
}

impl WorkerView {
    fn credits(&self) -> u32 {
        if self.suspended {
            return 0;
        }
        self.member.state.credits.saturating_sub(self.promised())
    }

    /// Sequences sent that its state does not count yet.
    fn promised(&self) -> u32 {
        self.unseen.values().map(|(sequences, _)| sequences).sum()
    }

    /// Whether all sequences of a request would start, or as many as ever do: it may need more than a worker grants at once.
    fn starts(&self, sequences: u32) -> bool {
        self.credits() >= sequences.min(self.most_credits())
    }

    /// Whether one of them would start and the others may wait at the worker.
    fn starts_one(&self, sequences: u32) -> bool {
        let waiting = self.member.state.waiting.saturating_add(self.promised());
        self.credits() >= 1 && waiting.saturating_add(sequences) <= WAITING_AT_WORKER_MAX
    }

    /// Credits that it would have if nothing ran on it: what it grants now and what holds a slot. Stalled sequences hold none.
    fn most_credits(&self) -> u32 {
        let state = &self.member.state;
        let busy = state.running.saturating_sub(state.stalled).saturating_add(state.waiting);
        state.credits.saturating_add(busy).min(self.member.sequences_max).max(1)
    }

    fn queue_seconds(&self) -> f64 {
        let state = &self.member.state;
        // A worker that does not say what its tokens attend to has told the seconds.
        let told = if state.prefill_context_pending > 0.0 {
            self.fit.work_seconds(state.prefill_tokens_pending as f64, state.prefill_context_pending)
        } else {
            state.queue_seconds
        };
        let told = if told.is_finite() { told.max(0.0) } else { 0.0 };
        told + self.unseen.values().map(|(_, seconds)| seconds).sum::<f64>()
    }
}

impl WorkerView {
    /// Seconds of a step once all that runs decodes.
    fn step_seconds(&self) -> f64 {
        let state = &self.member.state;
        self.fit.step_seconds(f64::from(state.running), state.context_tokens as f64)
    }
}

struct Promise {
    worker: WorkerId,
    /// Number of its frame.
    sent: u64,
    hashes: Arc<[BlockHash]>,
}

/// See the module header.
pub struct Fleet {
    weights: Weights,
    limits: Limits,
    workers: BTreeMap<WorkerId, WorkerView>,
    index: KvIndex,
    queue: Queue,
    promises: HashMap<u64, Promise>,
    turn: u64,
}

impl Fleet {
    /// An empty fleet.
    pub fn new(weights: Weights, limits: Limits) -> Self {
        Self {
            weights,
            limits,
            workers: BTreeMap::new(),
            index: KvIndex::default(),
            queue: Queue::default(),
            promises: HashMap::new(),
            turn: 0,
        }
    }

    /// A worker is ready, with what its cache holds. It may have been there before: the view starts anew.
    pub fn join(&mut self, worker: WorkerId, member: Member, kv: &[KvEvent]) {
        self.leave(worker);
        self.index.join(worker, member.blocks_total as usize);
        kv.iter().for_each(|event| self.index.apply(worker, event));
        let equals = self.workers.values().filter(|view| view.member.device == member.device);
        let mut fit = Fit::like(equals.map(|view| &view.fit)).unwrap_or_default();
        fit.observe_state(&member.state);
        self.workers.insert(worker, WorkerView { member, fit, unseen: BTreeMap::new(), sent: 0, suspended: false });
    }

    /// A worker is gone. Requests bound to it are the caller's to enqueue again.
    pub fn leave(&mut self, worker: WorkerId) {
        if self.workers.remove(&worker).is_some() {
            self.index.leave(worker);
            self.promises.retain(|_, promise| promise.worker != worker);
        }
    }

    /// Binds nothing to a worker while it is suspended; what is known of it stays.
    pub fn suspend(&mut self, worker: WorkerId, suspended: bool) {
        if let Some(view) = self.workers.get_mut(&worker) {
            view.suspended = suspended;
        }
    }

    /// Takes in what a worker said with a step. `accepted`: requests of this session that `state` counts.
    pub fn update(&mut self, worker: WorkerId, state: Option<&EngineState>, kv: &[KvEvent], accepted: u64) {
        let Some(view) = self.workers.get_mut(&worker) else { return };
        view.unseen.retain(|number, _| *number > accepted);
        if let Some(state) = state {
            view.fit.observe_state(state);
            view.member.state = state.clone();
        }
        kv.iter().for_each(|event| self.index.apply(worker, event));
    }

    /// Takes in what a step of a worker computed and how long it took.
    pub fn observe(&mut self, worker: WorkerId, batch: &Batch) {
        if let Some(view) = self.workers.get_mut(&worker) {
            view.fit.observe(batch);
        }
    }

    /// How fast a worker is as far as it is known.
    pub fn fit(&self, worker: WorkerId) -> Option<&Fit> {
        self.workers.get(&worker).map(|view| &view.fit)
    }

    /// Lets a request wait for a worker.
    ///
    /// # Errors
    /// [`Reject`] when the queue is full or the first token would come too late; never for a resumed request.
    pub fn enqueue(&mut self, request: u64, view: View, now: Duration) -> Result<(), Reject> {
        let late = self.limits.ttft_max.filter(|_| !view.resumed).and_then(|limit| {
            let ttft = self.predicted_ttft(view.tokens.len());
            (ttft > limit).then(|| ttft - limit)
        });
        if let Some(late) = late {
            return Err(Reject { retry_after: late.max(Duration::from_secs(1)) });
        }
        if !self.queue.push(request, view, now, self.limits.queue_max) {
            return Err(Reject { retry_after: self.predicted_ttft(0).max(Duration::from_secs(1)) });
        }
        Ok(())
    }

    /// A request ended, or will wait again: forgets that it waits and what was promised for it.
    pub fn remove(&mut self, request: u64) {
        self.queue.remove(request);
        self.settle(request);
    }

    /// The first token of a request arrived: its blocks are resident now, the promise ends.
    pub fn settle(&mut self, request: u64) {
        if let Some(promise) = self.promises.remove(&request) {
            self.index.release(promise.worker, &promise.hashes);
        }
    }

    /// The request that was bound last was not sent after all: nothing of it reaches the worker.
    pub fn unsent(&mut self, request: u64) {
        let Some(promise) = self.promises.get(&request) else { return };
        if let Some(view) = self.workers.get_mut(&promise.worker).filter(|view| view.sent == promise.sent) {
            view.unseen.remove(&promise.sent);
            view.sent -= 1;
        }
        self.settle(request);
    }

    /// The next binding. Call until it says [`Choice::Hold`]; after [`Choice::Bind`] the request has left the queue and the
    /// caller sends it.
    pub fn next(&mut self, now: Duration) -> Choice {
        if self.workers.values().all(|view| view.credits() == 0) {
            return Choice::Hold;
        }
        let market = Market {
            workers: &self.workers,
            index: &self.index,
            weights: &self.weights,
            exact_wait: self.limits.exact_wait,
            load: mean(self.workers.values().map(WorkerView::queue_seconds)),
            turn: self.turn,
            now,
        };
        let mut found = None;
        for waiting in self.queue.iter_mut().take(LOOK_AHEAD) {
            match market.place(waiting) {
                Verdict::Place(placement) => {
                    found = Some((waiting.request, placement));
                    break;
                }
                Verdict::LetPass => {}
                Verdict::WaitForCredits => break,
            }
        }
        found.map_or(Choice::Hold, |(request, placement)| self.bind(request, placement))
    }

    /// Predicted time to the first token of a new request of `tokens` prompt tokens, cache aside: the shortest queue of a
    /// worker, its share of those that wait here, and its own prefill. [`Duration::MAX`] without a worker.
    pub fn predicted_ttft(&self, tokens: usize) -> Duration {
        let workers = self.workers.len().max(1);
        let ahead = self.queue.tokens() / workers;
        self.workers
            .values()
            .map(|view| view.queue_seconds() + view.fit.prefill_seconds(ahead + tokens, 0) + view.step_seconds())
            .min_by(f64::total_cmp)
            .map_or(Duration::MAX, seconds)
    }

    /// Requests that wait here.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Blocks in the index: resident somewhere, promised.
    pub fn index_sizes(&self) -> (usize, usize) {
        self.index.sizes()
    }

    fn bind(&mut self, request: u64, placement: Placement) -> Choice {
        let Placement { worker, cached_tokens, own, ttft, exact } = placement;
        let mut waiting = self.queue.remove(request).expect("it was just found in the queue");
        let view = self.workers.get_mut(&worker).expect("it was just chosen among the workers");
        view.sent += 1;
        view.unseen.insert(view.sent, (waiting.view.sequences, own));
        let sent = view.sent;
        let hashes = waiting.hashes(&view.member.numerics_id);
        self.settle(request);
        self.index.promise(worker, &hashes);
        self.promises.insert(request, Promise { worker, sent, hashes });
        self.turn = self.turn.wrapping_add(1);
        Choice::Bind { request, worker, cached_tokens, ttft, exact }
    }
}

#[derive(Clone, Copy)]
struct Placement {
    worker: WorkerId,
    cached_tokens: u32,
    own: f64,
    ttft: Duration,
    exact: bool,
}

/// Borrows of the fleet's parts while its queue is iterated, and what holds for one round of choosing.
struct Market<'a> {
    workers: &'a BTreeMap<WorkerId, WorkerView>,
    index: &'a KvIndex,
    weights: &'a Weights,
    exact_wait: Duration,
    load: f64,
    turn: u64,
    now: Duration,
}

/// Where one request goes.
enum Verdict {
    Place(Placement),
    /// It waits, for a worker of its own numerics or for room at one; those behind it need not.
    LetPass,
    /// Nobody has credits enough; those behind it wait too, or it would starve. Not for longer than [`TOGETHER_WAIT`].
    WaitForCredits,
}

impl Market<'_> {
    fn place(&self, waiting: &mut Waiting) -> Verdict {
        let wanted = waiting.view.numerics_id.clone();
        let is_home = |view: &WorkerView| wanted.as_ref().is_none_or(|id| *id == view.member.numerics_id);
        let waited = self.now.saturating_sub(waiting.since);
        let is_late = waited >= TOGETHER_WAIT && waiting.view.sequences > 1;
        let wait = || if is_late { Verdict::LetPass } else { Verdict::WaitForCredits };
        let home = self.free(waiting.view.sequences, is_late, is_home);
        if !home.is_empty() {
            return self.cheapest(waiting, &home, true).map_or_else(wait, Verdict::Place);
        }
        if waited < self.exact_wait && self.workers.values().any(is_home) {
            return if wanted.is_some() { Verdict::LetPass } else { wait() };
        }
        let any = self.free(waiting.view.sequences, is_late, |_| true);
        self.cheapest(waiting, &any, false).map_or_else(wait, Verdict::Place)
    }

    /// Workers that suit and have credits for all the sequences; when there are none, and it is late, for one of them.
    fn free(&self, sequences: u32, is_late: bool, suits: impl Fn(&WorkerView) -> bool) -> Vec<WorkerId> {
        let with = |can: fn(&WorkerView, u32) -> bool| -> Vec<WorkerId> {
            let views = self.workers.iter().filter(|(_, view)| suits(view) && can(view, sequences));
            views.map(|(id, _)| *id).collect()
        };
        let all_at_once = with(WorkerView::starts);
        if all_at_once.is_empty() && is_late { with(WorkerView::starts_one) } else { all_at_once }
    }

    /// The cheapest of `eligible`; `None` when there are none.
    fn cheapest(&self, waiting: &mut Waiting, eligible: &[WorkerId], exact: bool) -> Option<Placement> {
        let tokens = waiting.view.tokens.len();
        let mut hits: Option<(Arc<str>, [u32; WORKERS_MAX])> = None;
        let mut best: Option<(f64, u64, Placement)> = None;
        for (at, worker) in (0_u64..).zip(eligible) {
            let view = &self.workers[worker];
            let numerics_id = &view.member.numerics_id;
            if hits.as_ref().is_none_or(|(id, _)| id != numerics_id) {
                let found = self.index.hits(&waiting.hashes(numerics_id), eligible.iter().copied());
                hits = Some((Arc::clone(numerics_id), found));
            }
            let blocks = hits.as_ref().map_or(0, |(_, found)| found[usize::from(worker.0)]) as usize;
            // The last token is always computed: its logits are wanted.
            let cached = (blocks * BLOCK_TOKENS).min(tokens.saturating_sub(1));
            let own = view.fit.prefill_seconds(tokens - cached, cached);
            let queue = view.queue_seconds();
            let step = view.step_seconds();
            let state = &view.member.state;
            let terms =
                Terms { queue, own, load: self.load, decoding: f64::from(state.running), step, fill: fill(state) };
            let cost = self.weights.cost(&terms);
            // Equal costs take turns, so an idle fleet fills evenly.
            let order = (at + self.turn) % eligible.len() as u64;
            if best.as_ref().is_none_or(|(least, earlier, _)| (cost, order) < (*least, *earlier)) {
                let ttft = seconds(queue + own + step);
                best =
                    Some((cost, order, Placement { worker: *worker, cached_tokens: cached as u32, own, ttft, exact }));
            }
        }
        best.map(|(_, _, placement)| placement)
    }
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len().max(1);
    values.sum::<f64>() / count as f64
}

fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value.max(0.0)).unwrap_or(Duration::MAX)
}
