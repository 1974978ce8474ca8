//! A request's way through the pool: from its handler into the router's queue, to a worker, back to the queue with its
//! emitted tokens when the worker is lost, and out.

use super::super::decision::Decision;
use super::super::job::{Gap, Job, PoolEvent};
use super::super::ticket::{Post, Slot};
use super::super::truth::{Accepted, Truth};
use super::{Actor, Live, Place};
use penstock_proto::ErrorKind;
use penstock_proto::codec::FRAME_BYTES_MAX;
use penstock_proto::frames::{Cancel, DownBody, Output, Prefetch};
use penstock_router::{Ahead, Choice, Needs, Refusal, Reject, View, WorkerId};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Deadline that a request has missed; it decides the error that the client gets.
#[derive(Clone, Copy, Debug)]
enum Late {
    /// The deadline that the request itself carries ([`Job::deadline`](crate::Job::deadline)).
    Deadline,
    /// The deadline for any worker to be ready.
    Nobody { interrupted: bool },
    /// The longest wait in the router's queue while workers are ready
    /// ([`PoolConfig::wait_max`](crate::PoolConfig::wait_max)).
    Queue,
}

/// Prefill workers named beside the first. After two losses the decode worker is better off computing the prompt itself.
const PREFILLS_NEXT_MAX: usize = 2;

impl Actor {
    pub(super) fn posts(&mut self) {
        for post in self.mailbox.take() {
            match post {
                Post::Submit(job, slot) => self.submit(*job, slot),
                Post::Notes(slot) => self.notes(&slot),
            }
        }
    }

    fn submit(&mut self, job: Job, slot: Arc<Slot>) {
        let id = slot.id;
        self.counts.submitted += 1;
        let truth = Truth::new(job, self.config.window_tokens);
        let place = Place::Waiting(Instant::now());
        let live = Live {
            truth,
            slot,
            place,
            came: Instant::now(),
            interrupted: false,
            ahead: None,
            bound_at: None,
            record: None,
            spoke: None,
            rests_until: None,
            gap: None,
        };
        self.asked_last = live.came;
        self.requests.insert(id, live);
        self.wait(id);
    }

    fn notes(&mut self, slot: &Slot) {
        let request = slot.id;
        let notes = slot.take_notes();
        let Some(live) = self.requests.get_mut(&request) else { return };
        let at = if let Place::Bound(worker) = live.place { Some(worker) } else { None };
        if notes.dropped {
            self.counts.cancelled += 1;
            self.cancel(request, at);
            return;
        }
        let closed: Vec<u32> = notes.cancelled.into_iter().filter(|choice| live.truth.close(*choice)).collect();
        let windows: Vec<_> =
            notes.taken.into_iter().filter_map(|(choice, tokens)| live.truth.grant(request, choice, tokens)).collect();
        if live.truth.open() == 0 {
            self.counts.finished += 1;
            self.cancel(request, at);
            return;
        }
        let Some(worker) = at else { return };
        windows.into_iter().for_each(|window| self.members.send(worker, DownBody::Window(window)));
        if !closed.is_empty() {
            self.members.send(worker, DownBody::Cancel(Cancel { request, choices: closed }));
        }
    }

    /// Ends a request from the gateway's side, bound or waiting.
    fn cancel(&mut self, request: u64, at: Option<WorkerId>) {
        if let Some(worker) = at {
            self.members.send(worker, DownBody::Cancel(Cancel { request, choices: Vec::new() }));
        }
        self.forget(request);
    }

    /// Puts a request into the router's queue.
    fn wait(&mut self, request: u64) {
        let Some(live) = self.requests.get(&request) else { return };
        let view = self.view(live);
        let now = self.began.elapsed();
        if let Err(reject) = self.router.enqueue(request, view, now) {
            self.refuse(request, reject);
        }
    }

    /// Describes a request for the router: tokens, salt, priority, tenant, and deadline.
    pub(super) fn view(&self, live: &Live) -> View {
        let truth = &live.truth;
        View {
            tokens: truth.tokens(),
            salt: Arc::clone(&truth.job.salt),
            priority: truth.job.priority,
            sequences: truth.open(),
            numerics_id: truth.numerics_id.clone(),
            needs: Needs {
                grammar: truth.job.grammar.as_ref().map(|grammar| Arc::clone(&grammar.id)),
                reasoning_budget: truth.job.sampling.reasoning.is_some(),
            },
            resumed: live.interrupted,
            tenant: Arc::clone(&truth.job.tenant),
            weight: truth.job.weight,
            session: truth.job.session,
            keyed: truth.job.keyed,
            deadline: truth.job.deadline.map(|deadline| deadline.saturating_duration_since(self.began)),
        }
    }

    /// Fails a request that the router refuses, with the error for the client.
    fn refuse(&mut self, request: u64, reject: Reject) {
        self.replicas.promises.first_token(Duration::MAX, Duration::ZERO);
        let (kind, message, retry_after) = match reject.refusal {
            Refusal::Full => (ErrorKind::Overloaded, "too many requests are waiting", Some(reject.retry_after)),
            Refusal::Late => {
                (ErrorKind::Overloaded, "an answer would come too late: too much is waiting", Some(reject.retry_after))
            }
            Refusal::Impatient => {
                let message =
                    "the answer would not begin within the time that the request gives it: too much is waiting";
                (ErrorKind::Overloaded, message, Some(reject.retry_after))
            }
            Refusal::Deadline => (ErrorKind::DeadlineExceeded, "the request took too long", None),
        };
        self.fail(request, kind, message, retry_after);
    }

    /// Binds waiting requests to workers for as long as the router chooses, and refuses those that it rejects.
    pub(super) fn dispatch(&mut self) {
        loop {
            let began = Instant::now();
            let next = self.router.next(self.began.elapsed());
            self.counts.decisions += 1;
            self.counts.decision_ns += began.elapsed().as_nanos() as u64;
            let (request, worker, cached_tokens, exact, turn, from, ttft) = match next {
                Choice::Bind { request, worker, cached_tokens, exact, turn, pull_from, prefill, ttft } => {
                    (request, worker, cached_tokens, exact, turn, (pull_from, prefill), ttft)
                }
                Choice::Refuse { request, reject } => {
                    self.refuse(request, reject);
                    continue;
                }
                Choice::Hold => return self.prefetch(),
            };
            let at = |worker: Option<WorkerId>| {
                worker.map_or("", |worker| self.members[worker].transfer_address()).to_owned()
            };
            let (prefill, from) = (from.1, (at(from.0), at(from.1)));
            let Some(live) = self.requests.get_mut(&request) else { continue };
            let (mut generate, windows) = live.truth.generate(request);
            generate.turn = turn;
            generate.waiting = u32::try_from(self.router.waiting()).unwrap_or(u32::MAX);
            (generate.pull_from, generate.prefill_at) = from;
            let is_apart = !generate.prefill_at.is_empty();
            if let Some(prefill) = prefill.filter(|_| is_apart) {
                (generate.prefill_next, generate.prefill_next_tokens) = self.prefills_next(worker, prefill);
            }
            let frame = DownBody::Generate(generate);
            if frame.encoded_len() > FRAME_BYTES_MAX {
                self.router.unsent(request);
                self.fail(request, ErrorKind::TooLarge, "prompt and output are too long to be sent to a worker", None);
                continue;
            }
            self.bound(request, worker, exact, ttft);
            self.counts.prefilled_apart += u64::from(is_apart);
            self.counts.cached_tokens_predicted += u64::from(cached_tokens);
            self.members[worker].bound.insert(request);
            self.members.send(worker, frame);
            windows.into_iter().for_each(|window| self.members.send(worker, DownBody::Window(window)));
        }
    }

    /// Addresses of the prefill workers to ask next when `prefill` is lost, and the number of missing tokens from which asking is worth it.
    fn prefills_next(&self, worker: WorkerId, prefill: WorkerId) -> (Vec<String>, u32) {
        let (next, tokens) = self.router.prefills_next(worker, prefill);
        let address = |worker: WorkerId| self.members[worker].transfer_address();
        let addresses = next.into_iter().map(address).filter(|address| !address.is_empty());
        (addresses.take(PREFILLS_NEXT_MAX).map(str::to_owned).collect(), u32::try_from(tokens).unwrap_or(u32::MAX))
    }

    /// Tells workers to prefetch blocks for requests that wait.
    fn prefetch(&mut self) {
        if !self.config.prefetch {
            return;
        }
        for Ahead { request, worker, blocks, wait } in self.router.ahead(self.began.elapsed()) {
            let Some(live) = self.requests.get_mut(&request) else { continue };
            live.ahead = Some(worker);
            let hashes = blocks.iter().map(|hash| hash.to_bytes().to_vec()).collect();
            let wait_seconds = wait.as_secs_f64();
            self.members.send(worker, DownBody::Prefetch(Prefetch { request, hashes, wait_seconds }));
        }
    }

    /// Cancels the prefetch of a request that does not go to the worker that loads for it.
    fn end_ahead(&mut self, request: u64, ahead: Option<WorkerId>, bound: Option<WorkerId>) {
        if let Some(worker) = ahead.filter(|worker| Some(*worker) != bound) {
            self.members.send(worker, DownBody::Cancel(Cancel { request, choices: Vec::new() }));
        }
    }

    /// Records the binding of a request and reports it to the request's handler.
    fn bound(&mut self, request: u64, worker: WorkerId, exact: bool, ttft: Duration) {
        let Some(live) = self.requests.get_mut(&request) else { return };
        let waited = match live.place {
            Place::Waiting(since) => since.elapsed(),
            Place::Bound(_) => Duration::ZERO,
        };
        let ahead = live.ahead.take();
        live.place = Place::Bound(worker);
        live.bound_at = Some((Instant::now(), ttft));
        if self.recorder.is_some() && !live.interrupted {
            live.record = self.router.record(request).map(Box::new);
        }
        let asked = self.config.explain && live.truth.job.explain;
        let made = self.router.decisions().next_back().filter(|made| asked && made.request == request);
        let route = made.map(|made| Decision::new(made, &self.members, self.began.elapsed()).line().into());
        let (at, worker) = (worker, self.members.name(worker));
        live.slot.leave(PoolEvent::Bound { worker, waited, route });
        if live.interrupted {
            let exact = exact || !live.truth.has_begun();
            live.slot.push(PoolEvent::Resumed { exact });
            self.counts.resumed += 1;
            self.counts.resumed_inexact += u64::from(!exact);
        }
        self.end_ahead(request, ahead, Some(at));
    }

    /// The last `count` decisions, newest first.
    pub(super) fn decisions(&self, count: usize) -> Vec<Decision> {
        let now = self.began.elapsed();
        self.router.decisions().rev().take(count).map(|made| Decision::new(made, &self.members, now)).collect()
    }

    /// Hands one output to its ticket, unless it is a repeat.
    ///
    /// # Errors
    /// A breach of the contract by the worker, in words.
    pub(super) fn output(&mut self, worker: WorkerId, output: Output) -> Result<(), &'static str> {
        let (request, choice) = (output.request, output.choice);
        let numerics_id = Arc::clone(&self.members[worker].numerics_id);
        let Some(live) = self.requests.get_mut(&request) else { return Ok(()) };
        if !matches!(live.place, Place::Bound(at) if at == worker) {
            self.counts.tokens_dropped += output.tokens.len() as u64;
            return Ok(());
        }
        // Emitted tokens become the next worker's input: an id beyond the vocabulary would be refused there.
        let vocab_size = self.model.as_ref().map_or(0, |model| model.vocab_size);
        if output.tokens.iter().any(|token| token.id >= vocab_size) {
            return Err("a token that is not in the vocabulary");
        }
        let ended = output.finish.is_some();
        match live.truth.accept(output, &numerics_id).map_err(|violation| violation.0)? {
            Accepted::Nothing { dropped } => self.counts.tokens_dropped += dropped as u64,
            Accepted::Deliver(output) => {
                self.counts.tokens += output.tokens.len() as u64;
                self.counts.cached_tokens_told += u64::from(output.cached_tokens.unwrap_or(0));
                let tokens = output.tokens.len() as u64;
                if let Some((bound_at, predicted)) = live.bound_at.take() {
                    self.counts.first_token(bound_at.elapsed(), predicted);
                    if live.spoke.is_none() && !live.interrupted {
                        let promised = self.replicas.promised(live.truth.job.prompt.len());
                        self.replicas.promises.first_token(live.came.elapsed(), promised);
                    }
                    live.record.iter_mut().for_each(|record| record.ttft_ms = bound_at.elapsed().as_secs_f64() * 1e3);
                }
                live.record.iter_mut().for_each(|record| record.output_length += tokens as u32);
                if tokens > 0 {
                    let now = Instant::now();
                    if let Some((why, since)) = live.gap.take() {
                        live.slot.leave(PoolEvent::Gap { why, time: now.saturating_duration_since(since) });
                    }
                    live.spoke = Some(now);
                }
                live.slot.push(PoolEvent::Output(output));
                self.router.settle(request);
                self.router.emitted(request, tokens);
            }
            Accepted::Elsewhere => {
                tracing::debug!(request, choice, "request goes on at another worker");
                self.members.send(worker, DownBody::Cancel(Cancel { request, choices: Vec::new() }));
                self.members[worker].bound.remove(&request);
                self.interrupt(request, None);
                return Ok(());
            }
        }
        if ended && self.requests.get(&request).is_some_and(|live| live.truth.open() == 0) {
            self.counts.finished += 1;
            self.forget(request);
        }
        Ok(())
    }

    /// Requeues a request that lost its worker, or fails it after the second worker that died of it or after too many losses.
    pub(super) fn interrupt(&mut self, request: u64, died: Option<u64>) {
        let Some(live) = self.requests.get_mut(&request) else { return };
        live.place = Place::Waiting(Instant::now());
        live.interrupted = true;
        live.gap = live.gap.or_else(|| live.spoke.map(|since| (Gap::Lost, since)));
        self.end_move(request);
        let Some(live) = self.requests.get_mut(&request) else { return };
        if live.truth.lose(died) {
            self.router.remove(request);
            self.wait(request);
        } else if live.truth.is_suspect() {
            self.fail(request, ErrorKind::WorkerFailed, "two workers died while they ran this request", None);
        } else {
            self.fail(request, ErrorKind::WorkerFailed, "the request was interrupted too often", None);
        }
    }

    pub(super) fn deadlines(&mut self, now: Instant) {
        if self.requests.is_empty() {
            return;
        }
        let alone = self.members.is_nobody_there();
        let patience = self.patience(now);
        // While no worker serves, a request that cannot be served in time need not wait for its deadline.
        let in_vain = |until: Instant| now >= until || patience.nobody_before.is_some_and(|next| next >= until);
        let late = |live: &Live| {
            if live.truth.job.deadline.is_some_and(|deadline| now >= deadline) {
                return Some(Late::Deadline);
            }
            let Place::Waiting(since) = live.place else { return None };
            let most = if live.interrupted { patience.resume } else { patience.ready };
            match alone {
                true if in_vain(since + most) => Some(Late::Nobody { interrupted: live.interrupted }),
                _ if now >= since + patience.queue => Some(Late::Queue),
                _ => None,
            }
        };
        let late: Vec<_> = self.requests.iter().filter_map(|(id, live)| late(live).map(|why| (*id, why))).collect();
        for (request, why) in late {
            if let Some(Place::Bound(worker)) = self.requests.get(&request).map(|live| &live.place) {
                self.members.send(*worker, DownBody::Cancel(Cancel { request, choices: Vec::new() }));
            }
            let (kind, message, retry_after) = self.too_late(why, patience.retry_after);
            self.fail(request, kind, &message, retry_after);
        }
    }

    /// Error for a client whose request has missed a deadline.
    fn too_late(&self, why: Late, retry_after: Duration) -> (ErrorKind, String, Option<Duration>) {
        let ended = || self.members.last_end().map_or_else(String::new, |how| format!(" (the last one ended: {how})"));
        match why {
            Late::Deadline => (ErrorKind::DeadlineExceeded, "the request took too long".into(), None),
            Late::Queue => (ErrorKind::Overloaded, "no worker was free in time".into(), Some(Duration::from_secs(10))),
            Late::Nobody { interrupted: true } => {
                let message = format!("the worker was lost and no other could continue the request in time{}", ended());
                (ErrorKind::WorkerFailed, message, None)
            }
            Late::Nobody { interrupted: false } => {
                (ErrorKind::Unavailable, format!("no worker is ready{}", ended()), Some(retry_after))
            }
        }
    }

    fn fail(&mut self, request: u64, kind: ErrorKind, message: &str, retry_after: Option<Duration>) {
        if let Some(live) = self.requests.get(&request) {
            self.counts.failed += 1;
            live.slot.push(PoolEvent::Failed { kind, message: message.into(), retry_after });
            self.forget(request);
        }
    }

    pub(super) fn fail_all(&mut self, kind: ErrorKind, message: &str) {
        let all: Vec<u64> = self.requests.keys().copied().collect();
        all.into_iter().for_each(|request| self.fail(request, kind, message, None));
    }

    fn forget(&mut self, request: u64) {
        self.router.remove(request);
        self.end_move(request);
        let Some(live) = self.requests.remove(&request) else { return };
        self.end_ahead(request, live.ahead, None);
        if let (Some(recorder), Some(record)) = (&mut self.recorder, live.record) {
            recorder.write(*record, &live.truth.job.tenant);
        }
        if let Place::Bound(worker) = live.place {
            self.members[worker].bound.remove(&request);
        }
        live.slot.end();
    }
}
