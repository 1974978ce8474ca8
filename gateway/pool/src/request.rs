//! One request in the pool: where it is, how long it has waited, and its way between workers.
//!
//! ```text
//! submit ──▶ Waiting ──bind──▶ Bound ──last output──▶ over
//!               ▲                │ ▲
//!               └──lose──────────┘ └──move_to: another worker, while the first one lives
//! ```
//! Events for the handler go into the request's slot as they arise; frames and news for the router are the caller's.
//! Time is an argument.

use super::failure::{Failure, Late};
use super::job::{Gap, Job, PoolEvent};
use super::patience::Patience;
use super::ticket::{Notes, Slot};
use super::truth::{Accepted, Truth};
use penstock_proto::Epoch;
use penstock_proto::frames::{Generate, Output, Window};
use penstock_router::{Record, View, WorkerId};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Location of a request in the pool: in the router's queue, or bound to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In the router's queue, bound to no worker, since this instant.
    Waiting(Instant),
    /// The request is bound to this worker and has been sent to it.
    Bound(WorkerId),
}

/// State of one request, from its submission to its end; see the module header.
pub(super) struct Request {
    pub(super) truth: Truth,
    pub(super) slot: Arc<Slot>,
    place: Place,
    /// Instant at which the actor took in the client's request.
    came: Instant,
    /// True if the request was bound before and lost its worker, so that it resumes rather than starts.
    interrupted: bool,
    /// Instant since which workers without room have turned the request away; `None` once there is new output.
    turned_away: Option<Instant>,
    /// Worker that loads blocks for the request while the request waits.
    pub(super) ahead: Option<WorkerId>,
    /// Instant of the binding and the TTFT predicted then; taken at the first output.
    bound_at: Option<(Instant, Duration)>,
    /// Decision record, completed as the request runs and written when the request ends.
    pub(super) record: Option<Box<Record>>,
    /// Instant at which the last new tokens of the request arrived; `None` before the first.
    spoke: Option<Instant>,
    /// End of the pause after a move or a failed move; until then the request is not moved again.
    rests_until: Option<Instant>,
    /// Change of worker after which no token has come yet: its cause, and the arrival of the last token before.
    gap: Option<(Gap, Instant)>,
}

/// Binding of a waiting request to a worker, as the router chose it.
pub(super) struct Binding {
    pub(super) worker: WorkerId,
    pub(super) name: Arc<str>,
    /// True if the worker computes in the numerics of the tokens emitted so far.
    pub(super) exact: bool,
    /// Predicted time from now to the first token.
    pub(super) ttft: Duration,
    /// Reasons of the choice as text; `None`: the client does not ask for them.
    pub(super) route: Option<Arc<str>>,
    /// Decision record of the request's first binding; `None`: none are recorded.
    pub(super) record: Option<Box<Record>>,
}

/// Consequences of a binding for others than the request's handler.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Bound {
    /// Worker that still loads blocks for the request, in vain: not the one that it is bound to.
    pub(super) ahead: Option<WorkerId>,
    /// True if a resumed request goes on exactly; `None`: the request starts.
    pub(super) resumed: Option<bool>,
}

/// Consequence of the notes that a handler left.
#[derive(Debug, PartialEq)]
pub(super) enum Noted {
    /// The handler dropped its ticket.
    Dropped,
    /// The handler needs no more of any choice.
    Complete,
    /// The request goes on, with more room for some choices and without others.
    Goes { windows: Vec<Window>, closed: Vec<u32> },
}

/// Consequence of a worker's output.
#[derive(Debug, PartialEq)]
pub(super) enum Taken {
    /// The output had only tokens that are not wanted, and so many of them.
    Dropped(usize),
    /// New output went to the handler.
    Delivered {
        /// Number of new tokens.
        tokens: u32,
        /// Prompt tokens that the worker found cached, if the output says so.
        cached_tokens: u32,
        /// Times of the first output after a binding; `None` for a later output.
        first: Option<First>,
    },
    /// The worker could not run the request; another one may.
    Elsewhere,
    /// The worker had no room for the request, which has begun: no loss, however often.
    Full,
}

/// Times of the first output after a binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct First {
    /// Time since the binding.
    pub(super) took: Duration,
    /// TTFT predicted at the binding.
    pub(super) predicted: Duration,
    /// Time since the client's request came, if its answer begins only now and was never interrupted.
    pub(super) waited: Option<Duration>,
}

/// Future of a request that has lost its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// The request waits for another worker.
    Waits,
    /// Workers died of the request, as far as can be known.
    Suspect,
    /// The request has lost too many workers.
    Tired,
}

impl Request {
    /// A request that waits for its first worker; each choice may emit `window` tokens.
    pub(super) fn new(job: Job, slot: Arc<Slot>, window: u32, now: Instant) -> Self {
        Self {
            truth: Truth::new(job, window),
            slot,
            place: Place::Waiting(now),
            came: now,
            interrupted: false,
            turned_away: None,
            ahead: None,
            bound_at: None,
            record: None,
            spoke: None,
            rests_until: None,
            gap: None,
        }
    }

    /// Worker that the request is bound to; `None` while it waits.
    pub(super) fn worker(&self) -> Option<WorkerId> {
        match self.place {
            Place::Bound(worker) => Some(worker),
            Place::Waiting(_) => None,
        }
    }

    /// True if the request lost a worker before and resumes rather than starts.
    pub(super) fn is_interrupted(&self) -> bool {
        self.interrupted
    }

    /// Describes the request for the router, whose clock began at `began`.
    pub(super) fn view(&self, began: Instant) -> View {
        let truth = &self.truth;
        View {
            tokens: truth.tokens(),
            salt: Arc::clone(&truth.job.salt),
            priority: truth.job.priority,
            sequences: truth.open(),
            numerics_id: truth.numerics_id.clone(),
            needs: truth.job.needs(),
            resumed: self.interrupted,
            tenant: Arc::clone(&truth.job.tenant),
            weight: truth.job.weight,
            session: truth.job.session,
            keyed: truth.job.keyed,
            deadline: truth.job.deadline.map(|deadline| deadline.saturating_duration_since(began)),
        }
    }

    /// Takes in what the handler noted: tokens taken, choices that it needs no more of, its own end.
    pub(super) fn note(&mut self, notes: Notes) -> Noted {
        if notes.dropped {
            return Noted::Dropped;
        }
        let (request, truth) = (self.slot.id, &mut self.truth);
        let closed: Vec<u32> = notes.cancelled.into_iter().filter(|choice| truth.close(*choice)).collect();
        let windows = notes.taken.into_iter().filter_map(|(choice, tokens)| truth.grant(request, choice, tokens));
        let windows = windows.collect();
        if truth.open() == 0 { Noted::Complete } else { Noted::Goes { windows, closed } }
    }

    /// Notes the binding to a worker and reports it to the handler; whoever drops the ticket before the handler has taken
    /// the report still finds it there ([`Ticket::is_bound`](super::ticket::Ticket::is_bound)).
    pub(super) fn bind(&mut self, binding: Binding, now: Instant) -> Bound {
        let Binding { worker, name, exact, ttft, route, record } = binding;
        let waited = match self.place {
            Place::Waiting(since) => now.saturating_duration_since(since),
            Place::Bound(_) => Duration::ZERO,
        };
        self.place = Place::Bound(worker);
        self.bound_at = Some((now, ttft));
        self.record = record.or(self.record.take());
        self.slot.bind(PoolEvent::Bound { worker: name, waited, route });
        self.truth.job.sent.set();
        let resumed = self.interrupted.then(|| exact || !self.truth.has_begun());
        resumed.into_iter().for_each(|exact| self.slot.push(PoolEvent::Resumed { exact }));
        Bound { ahead: self.ahead.take().filter(|at| *at != worker), resumed }
    }

    /// Hands an output of a worker to the handler, unless it is a repeat or comes from a worker that the request has left.
    ///
    /// # Errors
    /// A breach of the contract by the worker, in words.
    pub(super) fn accept(
        &mut self,
        worker: WorkerId,
        output: Output,
        numerics_id: &Arc<str>,
        vocab_size: u32,
        now: Instant,
    ) -> Result<Taken, &'static str> {
        if self.place != Place::Bound(worker) {
            return Ok(Taken::Dropped(output.tokens.len()));
        }
        // Emitted tokens become the next worker's input: an id beyond the vocabulary would be refused there.
        if output.tokens.iter().any(|token| token.id >= vocab_size) {
            return Err("a token that is not in the vocabulary");
        }
        match self.truth.accept(output, numerics_id).map_err(|violation| violation.0)? {
            Accepted::Nothing { dropped } => Ok(Taken::Dropped(dropped)),
            Accepted::Elsewhere => Ok(Taken::Elsewhere),
            Accepted::Full => Ok(Taken::Full),
            Accepted::Deliver(output) => Ok(self.deliver(output, now)),
        }
    }

    fn deliver(&mut self, output: Output, now: Instant) -> Taken {
        let tokens = output.tokens.len() as u32;
        let cached_tokens = output.cached_tokens.unwrap_or(0);
        let first = self.bound_at.take().map(|(bound_at, predicted)| First {
            took: now.saturating_duration_since(bound_at),
            predicted,
            waited: (self.spoke.is_none() && !self.interrupted).then(|| now.saturating_duration_since(self.came)),
        });
        if let Some(record) = &mut self.record {
            first.iter().for_each(|first| record.ttft_ms = first.took.as_secs_f64() * 1e3);
            record.output_length += tokens;
        }
        if tokens > 0 {
            if let Some((why, since)) = self.gap.take() {
                self.slot.leave(PoolEvent::Gap { why, time: now.saturating_duration_since(since) });
            }
            self.spoke = Some(now);
            self.turned_away = None;
        }
        self.slot.push(PoolEvent::Output(output));
        Taken::Delivered { tokens, cached_tokens, first }
    }

    /// Returns to the queue after the loss of its worker. `died`: epoch of the worker, if its process ended.
    pub(super) fn lose(&mut self, died: Option<Epoch>, now: Instant) -> Fate {
        self.place = Place::Waiting(now);
        self.interrupted = true;
        self.gap = self.gap.or_else(|| self.spoke.map(|since| (Gap::Lost, since)));
        match self.truth.lose(died) {
            true => Fate::Waits,
            false if self.truth.is_suspect() => Fate::Suspect,
            false => Fate::Tired,
        }
    }

    /// Returns to the queue after its worker had no room for it. Its wait counts from the first time on.
    pub(super) fn turn_away(&mut self, now: Instant) {
        self.place = Place::Waiting(*self.turned_away.get_or_insert(now));
        self.interrupted = true;
        self.gap = self.gap.or_else(|| self.spoke.map(|since| (Gap::Lost, since)));
        self.truth.leave();
    }

    /// Goes on at another worker while the first one lives; it is not moved again before `rests_until`.
    /// Returns the frames that start it there.
    pub(super) fn move_to(&mut self, to: WorkerId, name: Arc<str>, rests_until: Instant) -> (Generate, Vec<Window>) {
        self.truth.leave();
        let frames = self.truth.generate(self.slot.id);
        self.place = Place::Bound(to);
        self.rests_until = Some(rests_until);
        self.gap = self.spoke.map(|since| (Gap::Moved, since));
        self.slot.leave(PoolEvent::Moved { worker: name });
        frames
    }

    /// Leaves the request where it is until this instant.
    pub(super) fn rest_until(&mut self, until: Instant) {
        self.rests_until = Some(until);
    }

    /// Returns true if the request decodes and was not moved a moment ago.
    pub(super) fn may_move(&self, now: Instant) -> bool {
        self.rests_until.is_none_or(|until| now >= until) && self.truth.decodes()
    }

    /// Deadline that the request has missed, if any. `nobody`: no worker serves.
    pub(super) fn late(&self, patience: &Patience, nobody: bool, now: Instant) -> Option<Late> {
        if self.truth.job.deadline.is_some_and(|deadline| now >= deadline) {
            return Some(Late::Deadline);
        }
        let Place::Waiting(since) = self.place else { return None };
        let most = if self.interrupted { patience.resume } else { patience.ready };
        match nobody {
            true if patience.is_in_vain(since + most, now) => Some(Late::Nobody { interrupted: self.interrupted }),
            _ if now >= since + patience.queue => Some(Late::Queue),
            _ => None,
        }
    }

    /// Tells the handler that the request has failed: the last event.
    pub(super) fn fail(&self, failure: Failure) {
        let Failure { kind, message, retry_after } = failure;
        self.slot.push(PoolEvent::Failed { kind, message: message.into_owned(), retry_after });
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::job::tests::job;
    use super::super::patience::tests::patience;
    use super::super::ticket::{Mailbox, Ticket};
    use super::*;
    use penstock_proto::RequestId;
    use penstock_proto::frames::{Finish, FinishReason, Token};

    const SECOND: Duration = Duration::from_secs(1);
    const HERE: WorkerId = WorkerId(0);
    const THERE: WorkerId = WorkerId(1);

    fn request(choices: u32, now: Instant) -> Request {
        Request::new(job(choices), Arc::new(Slot::new(RequestId(7), 10)), 10, now)
    }

    pub(crate) fn binding(worker: WorkerId) -> Binding {
        Binding { worker, name: "a".into(), exact: true, ttft: SECOND, route: None, record: None }
    }

    pub(crate) fn output(attempt: u32, at: u32, tokens: &[u32]) -> Output {
        let tokens = tokens.iter().map(|id| Token { id: *id, logprobs: None }).collect();
        Output { request: 7, attempt, at, tokens, ..Output::default() }
    }

    fn accept(request: &mut Request, worker: WorkerId, output: Output, now: Instant) -> Result<Taken, &'static str> {
        request.accept(worker, output, &"n".into(), 100, now)
    }

    fn events(request: &Request) -> Vec<PoolEvent> {
        request.slot.take_events()
    }

    #[test]
    fn the_first_output_tells_how_long_it_took() {
        let now = Instant::now();
        let mut request = request(1, now);
        request.ahead = Some(THERE);
        let bound = request.bind(binding(HERE), now + SECOND);
        assert_eq!(bound, Bound { ahead: Some(THERE), resumed: None });
        let first = First { took: SECOND, predicted: SECOND, waited: Some(2 * SECOND) };
        let taken = accept(&mut request, HERE, output(0, 0, &[5, 6]), now + 2 * SECOND);
        assert_eq!(taken, Ok(Taken::Delivered { tokens: 2, cached_tokens: 0, first: Some(first) }));
        let taken = accept(&mut request, HERE, output(0, 2, &[7]), now + 3 * SECOND);
        assert_eq!(taken, Ok(Taken::Delivered { tokens: 1, cached_tokens: 0, first: None }));
        let waited = PoolEvent::Bound { worker: "a".into(), waited: SECOND, route: None };
        assert_eq!(events(&request)[0], waited);
    }

    #[test]
    fn a_binding_is_known_before_its_event_is_taken() {
        let now = Instant::now();
        let (job, mailbox) = (job(1), Arc::new(Mailbox::new()));
        let sent = job.sent.clone();
        let slot = Arc::new(Slot::new(RequestId(7), 10));
        let ticket = Ticket::new(Arc::clone(&slot), mailbox);
        let mut request = Request::new(job, slot, 10, now);
        assert_eq!((ticket.is_bound(), sent.get()), (false, false), "it waits: nothing is computed");
        request.bind(binding(HERE), now);
        assert_eq!((ticket.is_bound(), sent.get()), (true, true));
        request.lose(None, now);
        assert_eq!((ticket.is_bound(), sent.get()), (true, true), "what was computed stays so");
    }

    #[test]
    fn outputs_are_seen_before_they_are_taken() {
        let now = Instant::now();
        let slot = Arc::new(Slot::new(RequestId(7), 10));
        let mut ticket = Ticket::new(Arc::clone(&slot), Arc::new(Mailbox::new()));
        let mut request = Request::new(job(1), slot, 10, now);
        request.bind(binding(HERE), now);
        accept(&mut request, HERE, output(0, 0, &[5, 6]), now).expect("in order");
        accept(&mut request, HERE, output(0, 2, &[7]), now).expect("in order");
        let seen = |ticket: &Ticket| {
            let mut seen = Vec::new();
            ticket.see_waiting(|output| seen.extend(output.tokens.iter().map(|token| token.id)));
            seen
        };
        assert_eq!((seen(&ticket), seen(&ticket)), (vec![5, 6, 7], vec![5, 6, 7]), "nothing is taken");
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        for _ in 0..2 {
            assert!(ticket.poll_next(&mut context).is_ready(), "the binding, and an output");
        }
        assert_eq!(seen(&ticket), [7]);
    }

    #[test]
    fn a_worker_that_loads_for_the_request_it_gets_goes_on() {
        let now = Instant::now();
        let mut request = request(1, now);
        request.ahead = Some(HERE);
        assert_eq!(request.bind(binding(HERE), now), Bound { ahead: None, resumed: None });
    }

    #[test]
    fn output_counts_only_from_the_present_worker_and_in_its_vocabulary() {
        let now = Instant::now();
        let mut request = request(1, now);
        assert_eq!(accept(&mut request, HERE, output(0, 0, &[5]), now), Ok(Taken::Dropped(1)), "bound to none");
        request.bind(binding(HERE), now);
        assert_eq!(accept(&mut request, THERE, output(0, 0, &[5]), now), Ok(Taken::Dropped(1)));
        assert!(accept(&mut request, HERE, output(0, 0, &[100]), now).is_err());
        assert!(accept(&mut request, HERE, output(0, 1, &[5]), now).is_err(), "a hole");
        let finish = Finish {
            reason: FinishReason::Failed as i32,
            error_kind: penstock_proto::ErrorKind::Draining as i32,
            ..Finish::default()
        };
        let passed_on = Output { finish: Some(finish), ..output(0, 0, &[]) };
        assert_eq!(accept(&mut request, HERE, passed_on, now), Ok(Taken::Elsewhere));
    }

    #[test]
    fn a_worker_without_room_is_no_loss_but_costs_the_wait_for_a_place() {
        let now = Instant::now();
        let mut request = request(1, now);
        request.bind(binding(HERE), now);
        accept(&mut request, HERE, output(0, 0, &[5]), now).expect("taken");
        assert_eq!(request.lose(Some(Epoch(1)), now), Fate::Waits);
        let finish = Finish {
            reason: FinishReason::Failed as i32,
            error_kind: penstock_proto::ErrorKind::Overloaded as i32,
            ..Finish::default()
        };
        let patience = patience();
        let tick = patience.queue / 100;
        for attempt in 1..=100 {
            let at = now + tick * attempt;
            assert!(request.late(&patience, false, at).is_none(), "{attempt}");
            request.bind(binding(HERE), at);
            let full = Output { finish: Some(finish.clone()), ..output(attempt, 1, &[]) };
            assert_eq!(accept(&mut request, HERE, full, at), Ok(Taken::Full));
            request.turn_away(at);
            assert_eq!((request.worker(), request.is_interrupted()), (None, true));
        }
        let late = now + tick + patience.queue;
        assert_eq!(request.late(&patience, false, late), Some(Late::Queue), "no worker had room for all that time");
        request.bind(binding(HERE), late);
        accept(&mut request, HERE, output(101, 1, &[6]), late).expect("taken");
        assert_eq!(request.lose(None, late), Fate::Waits, "the second loss, not the hundredth");
        assert!(request.late(&patience, false, late + tick).is_none());
    }

    #[test]
    fn a_lost_request_resumes_with_a_gap() {
        let now = Instant::now();
        let mut request = request(1, now);
        request.bind(binding(HERE), now);
        accept(&mut request, HERE, output(0, 0, &[5]), now).expect("taken");
        assert_eq!((request.lose(Some(Epoch(1)), now + SECOND), request.worker()), (Fate::Waits, None));
        let inexact = Binding { exact: false, ..binding(THERE) };
        assert_eq!(request.bind(inexact, now + SECOND).resumed, Some(false));
        let taken = accept(&mut request, THERE, output(1, 1, &[6]), now + 3 * SECOND).expect("taken");
        assert!(matches!(taken, Taken::Delivered { first: Some(First { waited: None, .. }), .. }), "{taken:?}");
        let gap = PoolEvent::Gap { why: Gap::Lost, time: 3 * SECOND };
        let events = events(&request);
        assert_eq!(events[events.len() - 2], gap);
        assert!(events.contains(&PoolEvent::Resumed { exact: false }));
    }

    #[test]
    fn a_request_that_kills_or_loses_its_workers_ends() {
        let now = Instant::now();
        let mut killer = request(1, now);
        assert_eq!((killer.lose(Some(Epoch(1)), now), killer.lose(Some(Epoch(2)), now)), (Fate::Waits, Fate::Suspect));
        let mut unlucky = request(1, now);
        let fates: Vec<Fate> = (0..super::super::truth::ATTEMPTS_MAX).map(|_| unlucky.lose(None, now)).collect();
        assert_eq!((fates[0], fates[fates.len() - 2], fates[fates.len() - 1]), (Fate::Waits, Fate::Waits, Fate::Tired));
    }

    #[test]
    fn a_moved_request_rests_and_drops_what_its_old_worker_says() {
        let now = Instant::now();
        let mut request = request(1, now);
        request.bind(binding(HERE), now);
        assert!(!request.may_move(now), "in prefill");
        accept(&mut request, HERE, output(0, 0, &[5]), now).expect("taken");
        assert!(request.may_move(now));
        let (generate, _) = request.move_to(THERE, "b".into(), now + SECOND);
        assert_eq!((generate.attempt, request.worker()), (1, Some(THERE)));
        assert_eq!((request.may_move(now), request.may_move(now + SECOND)), (false, true));
        assert_eq!(accept(&mut request, HERE, output(0, 1, &[6]), now), Ok(Taken::Dropped(1)));
    }

    #[test]
    fn notes_end_a_request_or_give_it_room() {
        let now = Instant::now();
        let note = |notes| request(2, now).note(notes);
        assert_eq!(note(Notes { dropped: true, ..Notes::default() }), Noted::Dropped);
        assert_eq!(note(Notes { cancelled: vec![0, 1], ..Notes::default() }), Noted::Complete);
        let notes = Notes { cancelled: vec![1, 1], taken: vec![(0, 4), (1, 4)], dropped: false };
        let windows = vec![Window { request: 7, choice: 0, tokens: 4 }];
        assert_eq!(note(notes), Noted::Goes { windows, closed: vec![1] });
    }

    #[test]
    fn each_deadline_is_missed_at_its_instant() {
        let now = Instant::now();
        let patience = patience();
        let check = |request: &Request, nobody, after: Duration, expected| {
            assert_eq!(request.late(&patience, nobody, now + after), expected, "{nobody} {after:?}");
        };
        let mut request = request(1, now);
        let almost = |wait: Duration| wait - Duration::from_millis(1);
        check(&request, true, almost(patience.ready), None);
        check(&request, true, patience.ready, Some(Late::Nobody { interrupted: false }));
        check(&request, false, almost(patience.queue), None);
        check(&request, false, patience.queue, Some(Late::Queue));
        request.bind(binding(HERE), now);
        check(&request, false, patience.queue, None);
        request.lose(None, now);
        check(&request, true, almost(patience.resume), None);
        check(&request, true, patience.resume, Some(Late::Nobody { interrupted: true }));
        request.truth.job.deadline = Some(now + SECOND);
        check(&request, false, SECOND, Some(Late::Deadline));
    }
}
