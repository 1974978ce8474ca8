//! Effects of what happens to requests: frames to workers, news for the router, errors for clients. What a request is and may do is in
//! `requests.rs` and `request.rs`.

use super::super::failure::Failure;
use super::super::job::Job;
use super::super::patience::Patience;
use super::super::placement::{Chosen, Next};
use super::super::request::{Binding, Fate, Noted, Request, Taken};
use super::super::requests::End;
use super::super::ticket::{Post, Slot};
use super::Actor;
use penstock_proto::frames::{Cancel, DownBody, Output, Prefetch};
use penstock_proto::{Epoch, ErrorKind, RequestId};
use penstock_router::{Ahead, Reject, WorkerId};
use std::sync::Arc;
use std::time::Instant;

impl Actor {
    pub(super) fn posts(&mut self) {
        for post in self.inputs.mailbox.take() {
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
                    self.members.send(worker, DownBody::Cancel(Cancel { request: request.0, choices: closed }));
                }
            }
        }
    }

    /// Ends a request from the gateway's side, bound or waiting.
    fn cancel(&mut self, request: RequestId, worker: Option<WorkerId>, end: End) {
        worker.into_iter().for_each(|worker| self.send_cancel(worker, request));
        self.end_request(request, end);
    }

    /// Tells a worker to end all choices of a request.
    pub(super) fn send_cancel(&self, worker: WorkerId, request: RequestId) {
        self.members.send(worker, DownBody::Cancel(Cancel { request: request.0, choices: Vec::new() }));
    }

    /// Puts a request into the router's queue.
    fn wait(&mut self, request: RequestId) {
        let Some(view) = self.requests.get(request).map(|request| request.view(self.placement.began)) else { return };
        if let Err(reject) = self.placement.router.enqueue(request, view, self.placement.clock(Instant::now())) {
            self.refuse(request, reject);
        }
    }

    /// Fails a request that the router refuses.
    fn refuse(&mut self, request: RequestId, reject: Reject) {
        self.replicas.refused();
        self.fail(request, Failure::refused(reject));
    }

    /// Binds waiting requests to workers for as long as the router chooses, and refuses those that it rejects.
    pub(super) fn dispatch(&mut self) {
        loop {
            let now = Instant::now();
            let next = self.placement.next(now);
            self.placement.decided(now.elapsed());
            match next {
                Next::Bind(chosen) => self.bind(&chosen),
                Next::Refuse(request, reject) => self.refuse(request, reject),
                Next::Hold => return self.prefetch(),
            }
        }
    }

    /// Sends a request to the worker that the router chose.
    fn bind(&mut self, chosen: &Chosen) {
        let Chosen { request, worker, exact, ttft, .. } = *chosen;
        let Some(live) = self.requests.get_mut(request) else { return };
        let Some(frames) = self.placement.frames(chosen, live, &self.members) else {
            let message = "prompt and output are too long to be sent to a worker";
            return self.fail(request, Failure::new(ErrorKind::TooLarge, message));
        };
        let now = Instant::now();
        let record = if live.is_interrupted() { None } else { self.placement.begin_record(request) };
        let asked = self.config.explain && live.truth.job.explain;
        let route = asked.then(|| self.placement.route(request, &self.members, now)).flatten();
        let binding = Binding { worker, name: self.members.name(worker), exact, ttft, route, record };
        let ahead = self.requests.bind(request, binding, now).and_then(|bound| bound.ahead);
        ahead.into_iter().for_each(|ahead| self.send_cancel(ahead, request));
        self.placement.bound(chosen, &frames);
        self.members[worker].bound.insert(request);
        self.members.send(worker, frames.generate);
        frames.windows.into_iter().for_each(|window| self.members.send(worker, DownBody::Window(window)));
    }

    /// Tells workers to prefetch blocks for requests that wait.
    fn prefetch(&mut self) {
        if !self.config.prefetch {
            return;
        }
        for Ahead { request, worker, blocks, wait } in self.placement.router.ahead(self.placement.clock(Instant::now()))
        {
            let Some(live) = self.requests.get_mut(request) else { continue };
            live.ahead = Some(worker);
            let hashes = blocks.iter().map(|hash| hash.to_bytes().to_vec()).collect();
            let wait_seconds = wait.as_secs_f64();
            self.members.send(worker, DownBody::Prefetch(Prefetch { request: request.0, hashes, wait_seconds }));
        }
    }

    /// Hands one output to its ticket, unless it is a repeat. True if the worker had no room for the request.
    ///
    /// # Errors
    /// A breach of the contract by the worker, in words.
    pub(super) fn output(&mut self, worker: WorkerId, output: Output) -> Result<bool, &'static str> {
        let (request, choice, ended) = (RequestId(output.request), output.choice, output.finish.is_some());
        let vocab_size = self.model.vocab_size();
        let numerics_id = &self.members[worker].numerics_id;
        match self.requests.accept(worker, output, numerics_id, vocab_size, Instant::now())? {
            None | Some(Taken::Dropped(_)) => {}
            Some(Taken::Delivered { tokens, first, .. }) => {
                if let Some(waited) = first.and_then(|first| first.waited) {
                    let prompt = self.requests.get(request).map_or(0, |live| live.truth.job.prompt.len());
                    self.replicas.first_token(waited, prompt);
                }
                self.placement.router.settle(request);
                self.placement.router.emitted(request, u64::from(tokens));
            }
            Some(Taken::Elsewhere) => {
                tracing::debug!(%request, choice, "request goes on at another worker");
                self.send_cancel(worker, request);
                self.members[worker].bound.remove(&request);
                self.interrupt(request, None);
                return Ok(false);
            }
            Some(Taken::Full) => {
                tracing::debug!(%request, choice, "worker has no room for a request that has begun");
                self.send_cancel(worker, request);
                self.members[worker].bound.remove(&request);
                if self.requests.turn_away(request, Instant::now()) {
                    self.moves.end(request);
                    self.placement.router.remove(request);
                    self.wait(request);
                }
                return Ok(true);
            }
        }
        if ended && self.requests.is_complete(request) {
            self.end_request(request, End::Finished);
        }
        Ok(false)
    }

    /// Requeues a request that lost its worker, or fails it after the second worker that died of it or after too many losses.
    pub(super) fn interrupt(&mut self, request: RequestId, died: Option<Epoch>) {
        let Some(fate) = self.requests.lose(request, died, Instant::now()) else { return };
        self.moves.end(request);
        let message = match fate {
            Fate::Waits => {
                self.placement.router.remove(request);
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

    fn fail(&mut self, request: RequestId, failure: Failure) {
        self.end_request(request, End::Failed(failure));
    }

    pub(super) fn fail_all(&mut self, failure: &Failure) {
        self.requests.numbers().into_iter().for_each(|request| self.fail(request, failure.clone()));
    }

    /// Ends a request everywhere but at its worker, which has ended it itself or is told by the caller.
    fn end_request(&mut self, request: RequestId, end: End) {
        let Some(live) = self.requests.close(request, end) else { return };
        self.placement.router.remove(request);
        self.moves.end(request);
        let worker = live.worker();
        live.ahead.into_iter().for_each(|ahead| self.send_cancel(ahead, request));
        self.placement.end_record(live.record, &live.truth.job.tenant);
        worker.into_iter().for_each(|worker| _ = self.members[worker].bound.remove(&request));
        live.slot.end();
    }
}
