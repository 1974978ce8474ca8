//! Effects of what happens to requests: frames to workers, news for the router, errors for clients. What a request is and may do is in
//! `requests.rs` and `request.rs`.

use super::super::decision::Decision;
use super::super::failure::Failure;
use super::super::job::Job;
use super::super::patience::Patience;
use super::super::request::{Binding, Fate, Noted, Request, Taken};
use super::super::requests::End;
use super::super::ticket::{Post, Slot};
use super::Actor;
use penstock_proto::ErrorKind;
use penstock_proto::codec::FRAME_BYTES_MAX;
use penstock_proto::frames::{Cancel, DownBody, Output, Prefetch};
use penstock_router::{Ahead, Choice, Reject, WorkerId};
use std::sync::Arc;
use std::time::{Duration, Instant};

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
        let now = Instant::now();
        self.demand.asked(now);
        let request = self.requests.submit(job, slot, now);
        self.wait(request);
    }

    fn notes(&mut self, slot: &Slot) {
        let (request, notes) = (slot.id, slot.take_notes());
        let Some(noted) = self.requests.note(request, notes) else { return };
        let worker = self.requests.get(request).and_then(Request::worker);
        match noted {
            Noted::Dropped => self.cancel(request, worker, End::Cancelled),
            Noted::Complete => self.cancel(request, worker, End::Finished),
            Noted::Goes { windows, closed } => {
                let Some(worker) = worker else { return };
                windows.into_iter().for_each(|window| self.members.send(worker, DownBody::Window(window)));
                if !closed.is_empty() {
                    self.members.send(worker, DownBody::Cancel(Cancel { request, choices: closed }));
                }
            }
        }
    }

    /// Ends a request from the gateway's side, bound or waiting.
    fn cancel(&mut self, request: u64, worker: Option<WorkerId>, end: End) {
        worker.into_iter().for_each(|worker| self.send_cancel(worker, request));
        self.end_request(request, end);
    }

    /// Tells a worker to end all choices of a request.
    pub(super) fn send_cancel(&self, worker: WorkerId, request: u64) {
        self.members.send(worker, DownBody::Cancel(Cancel { request, choices: Vec::new() }));
    }

    /// Puts a request into the router's queue.
    fn wait(&mut self, request: u64) {
        let Some(view) = self.requests.get(request).map(|request| request.view(self.began)) else { return };
        if let Err(reject) = self.router.enqueue(request, view, self.began.elapsed()) {
            self.refuse(request, reject);
        }
    }

    /// Fails a request that the router refuses.
    fn refuse(&mut self, request: u64, reject: Reject) {
        self.replicas.refused();
        self.fail(request, Failure::refused(reject));
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
            let Some(live) = self.requests.get_mut(request) else { continue };
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
                let message = "prompt and output are too long to be sent to a worker";
                self.fail(request, Failure::new(ErrorKind::TooLarge, message));
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
            let Some(live) = self.requests.get_mut(request) else { continue };
            live.ahead = Some(worker);
            let hashes = blocks.iter().map(|hash| hash.to_bytes().to_vec()).collect();
            let wait_seconds = wait.as_secs_f64();
            self.members.send(worker, DownBody::Prefetch(Prefetch { request, hashes, wait_seconds }));
        }
    }

    /// Records the binding of a request and reports it to the request's handler.
    fn bound(&mut self, request: u64, worker: WorkerId, exact: bool, ttft: Duration) {
        let Some(live) = self.requests.get(request) else { return };
        let starts = self.recorder.is_some() && !live.is_interrupted();
        let record = starts.then(|| self.router.record(request)).flatten().map(Box::new);
        let asked = self.config.explain && live.truth.job.explain;
        let made = self.router.decisions().next_back().filter(|made| asked && made.request == request);
        let route = made.map(|made| Decision::new(made, &self.members, self.began.elapsed()).line().into());
        let binding = Binding { worker, name: self.members.name(worker), exact, ttft, route, record };
        let ahead = self.requests.bind(request, binding, Instant::now()).and_then(|bound| bound.ahead);
        ahead.into_iter().for_each(|ahead| self.send_cancel(ahead, request));
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
        let (request, choice, ended) = (output.request, output.choice, output.finish.is_some());
        let vocab_size = self.model.as_ref().map_or(0, |model| model.vocab_size);
        let numerics_id = &self.members[worker].numerics_id;
        match self.requests.accept(worker, output, numerics_id, vocab_size, Instant::now())? {
            None | Some(Taken::Dropped(_)) => {}
            Some(Taken::Delivered { tokens, first, .. }) => {
                if let Some(waited) = first.and_then(|first| first.waited) {
                    let prompt = self.requests.get(request).map_or(0, |live| live.truth.job.prompt.len());
                    self.replicas.first_token(waited, prompt);
                }
                self.router.settle(request);
                self.router.emitted(request, u64::from(tokens));
            }
            Some(Taken::Elsewhere) => {
                tracing::debug!(request, choice, "request goes on at another worker");
                self.send_cancel(worker, request);
                self.members[worker].bound.remove(&request);
                self.interrupt(request, None);
                return Ok(());
            }
        }
        if ended && self.requests.is_complete(request) {
            self.end_request(request, End::Finished);
        }
        Ok(())
    }

    /// Requeues a request that lost its worker, or fails it after the second worker that died of it or after too many losses.
    pub(super) fn interrupt(&mut self, request: u64, died: Option<u64>) {
        let Some(fate) = self.requests.lose(request, died, Instant::now()) else { return };
        self.moves.end(request);
        let message = match fate {
            Fate::Waits => {
                self.router.remove(request);
                return self.wait(request);
            }
            Fate::Suspect => "two workers died while they ran this request",
            Fate::Tired => "the request was interrupted too often",
        };
        self.fail(request, Failure::new(ErrorKind::WorkerFailed, message));
    }

    /// Fails the requests that have missed a deadline.
    pub(super) fn deadlines(&mut self, now: Instant) {
        if self.requests.is_empty() {
            return;
        }
        let patience = Patience::of(&self.config, &self.members, now);
        for (request, why) in self.requests.late(&patience, self.members.is_nobody_there(), now) {
            let worker = self.requests.get(request).and_then(Request::worker);
            let failure = Failure::late(why, self.members.last_end(), patience.retry_after);
            self.cancel(request, worker, End::Failed(failure));
        }
    }

    fn fail(&mut self, request: u64, failure: Failure) {
        self.end_request(request, End::Failed(failure));
    }

    pub(super) fn fail_all(&mut self, failure: &Failure) {
        self.requests.numbers().into_iter().for_each(|request| self.fail(request, failure.clone()));
    }

    /// Ends a request everywhere but at its worker, which has ended it itself or is told by the caller.
    fn end_request(&mut self, request: u64, end: End) {
        let Some(live) = self.requests.close(request, end) else { return };
        self.router.remove(request);
        self.moves.end(request);
        let worker = live.worker();
        live.ahead.into_iter().for_each(|ahead| self.send_cancel(ahead, request));
        if let (Some(recorder), Some(record)) = (&mut self.recorder, live.record) {
            recorder.write(*record, &live.truth.job.tenant);
        }
        worker.into_iter().for_each(|worker| _ = self.members[worker].bound.remove(&request));
        live.slot.end();
    }
}
