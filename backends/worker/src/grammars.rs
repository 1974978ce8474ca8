//! Grammars of a model, and the thread that compiles them: a step never waits for one.
//!
//! The bytes of the tokens are read beside the weights: they name the grammars, which a worker announces when it is ready. The index that masks need is
//! made after that, by the thread. A request whose grammar is not known yet waits for the thread, while
//! others run; the thread fills the cache that the engine reads, refusals included. Requests of one grammar wait for one
//! job, and a job is left out once nobody waits for it. Jobs are done in the order of the requests, by priority and turn: a
//! tenant with many costly grammars delays the others by the one that is being compiled.

use crate::chain;
use crate::config::WorkerError;
use penstock_grammar::{CacheSizes, Grammars, Source, TokenText, Vocabulary};
use penstock_proto::frames::{Cancel, ChoiceStart, Finish, FinishReason, Generate, Output, Window};
use penstock_proto::{ErrorKind, WorkId};
use penstock_vocabulary::TokenBytes;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tracing::{info, warn};

/// Most windows and cancellations that a request collects while its grammar is compiled. Nothing was sent that could use
/// a window up, so few come.
const LATER_MAX: usize = 1024;

/// Grammars over the vocabulary of a tokenizer.json; `None`, with a warning, if it cannot be used for masks. `rows`: width
/// of the model's logits.
pub(crate) fn load(tokenizer_json: &[u8], end_tokens: &[u32], rows: usize) -> Option<Arc<Grammars>> {
    let table = TokenBytes::from_json(tokenizer_json).map_err(|error| error.to_string());
    let vocabulary = table.and_then(|table| {
        let text = |id| TokenText { bytes: table.token(id), is_special: table.is_special(id) };
        Vocabulary::new((0..table.count()).map(text), end_tokens, rows).map_err(|error| error.to_string())
    });
    let warned = vocabulary.inspect_err(|why| {
        warn!(why, "grammars are off: tokenizer.json cannot be used for masks; requests that have one are refused");
    });
    Some(Arc::new(Grammars::new(warned.ok()?, CacheSizes::default())))
}

/// Callback with the number of a job whose source is compiled, that of its first request; false if nobody listens any
/// more.
pub(crate) type Done = Box<dyn Fn(WorkId) -> bool + Send>;

/// A request whose grammar is being compiled.
pub(crate) struct Compiling {
    pub(crate) generate: Generate,
    /// Commands for the request that came meanwhile.
    pub(crate) later: Vec<Later>,
}

/// Command that waits for its request's grammar.
pub(crate) enum Later {
    Window(Window),
    Cancel(Cancel),
}

/// Decision about a request that may have a grammar.
pub(crate) enum Admitted {
    /// The request can start: its grammar is known, or it has none.
    Known(Box<Generate>),
    /// The request waits for its grammar.
    Waits,
    /// Too many wait; these outputs say so.
    Refused(Vec<Output>),
}

/// Place of a request in the order of work, by priority, turn and number: lower goes first.
type Place = (i32, i64, WorkId);

/// A source that is being compiled or waits for that, and the requests that wait for it, as they came.
struct Job {
    id: WorkId,
    source: Source,
    requests: Vec<Place>,
}

impl Job {
    /// Place of the job: that of its first request in the order of work.
    fn place(&self) -> Option<Place> {
        self.requests.iter().min().copied()
    }
}

/// Jobs that the thread has not begun. Their number is bounded by that of the requests that wait.
#[derive(Default)]
struct Orders {
    waiting: BTreeMap<Place, (WorkId, Source)>,
    is_over: bool,
}

/// Queue between the engine's thread and the one that compiles.
#[derive(Default)]
struct Queue {
    orders: Mutex<Orders>,
    changed: Condvar,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, place: Place, job: WorkId, source: Source) {
        self.lock().waiting.insert(place, (job, source));
        self.changed.notify_one();
    }

    /// Moves a job to another place, or takes it out. Without effect on one that the thread has begun.
    fn change(&self, from: Place, to: Option<Place>) {
        let mut orders = self.lock();
        if let (Some(order), Some(to)) = (orders.waiting.remove(&from), to) {
            orders.waiting.insert(to, order);
        }
    }

    /// Waits for the first job; `None`: no more will come.
    fn next(&self) -> Option<(WorkId, Source)> {
        let is_idle = |orders: &mut Orders| orders.waiting.is_empty() && !orders.is_over;
        let mut orders = self.changed.wait_while(self.lock(), is_idle).unwrap_or_else(PoisonError::into_inner);
        orders.waiting.pop_first().map(|(_, order)| order).filter(|_| !orders.is_over)
    }

    fn end(&self) {
        self.lock().is_over = true;
        self.changed.notify_one();
    }
}

/// The thread that compiles, and the requests that wait for it, by their numbers. The thread ends with this value.
pub(crate) struct Compiler {
    grammars: Arc<Grammars>,
    queue: Arc<Queue>,
    jobs: Vec<Job>,
    waiting: HashMap<WorkId, Compiling>,
    /// Most choices that wait for their grammar; requests beyond them are refused as overloaded.
    waiting_max: usize,
}

impl Drop for Compiler {
    fn drop(&mut self) {
        self.queue.end();
    }
}

impl Compiler {
    /// Starts the thread. `waiting_max`: most choices that wait for their grammar, as many as the engine lets wait for a place.
    pub(crate) fn start(grammars: Arc<Grammars>, waiting_max: usize, done: Done) -> Result<Self, WorkerError> {
        let queue = Arc::new(Queue::default());
        let (known, inbox) = (Arc::clone(&grammars), Arc::clone(&queue));
        let work = move || {
            let began = Instant::now();
            match known.vocabulary().index() {
                Ok(()) => info!(seconds = began.elapsed().as_secs_f64(), "vocabulary indexed for grammars"),
                Err(error) => warn!(
                    why = chain(&error),
                    "the vocabulary cannot be indexed: requests that have a grammar are refused"
                ),
            }
            while let Some((job, source)) = inbox.next() {
                // The outcome, good or bad, is in the cache now; it is held until the engine has been told.
                let outcome = known.get(&source);
                let is_heard = done(job);
                drop(outcome);
                if !is_heard {
                    break;
                }
            }
        };
        std::thread::Builder::new()
            .name("penstock-compile".into())
            .spawn(work)
            .map_err(|source| WorkerError::Os { what: "starting the thread of grammars".into(), source })?;
        Ok(Self { grammars, queue, jobs: Vec::new(), waiting: HashMap::new(), waiting_max })
    }

    /// Takes a request whose grammar is not known; any other is given back at once.
    pub(crate) fn admit(&mut self, generate: Generate) -> Admitted {
        let source = generate.grammar.as_ref().and_then(penstock_engine::source);
        let Some(source) = source.filter(|source| self.grammars.peek(source).is_none()) else {
            return Admitted::Known(Box::new(generate));
        };
        let id = WorkId(generate.request);
        if self.waiting_choices() as usize + generate.choices.len() > self.waiting_max {
            return Admitted::Refused(refusal(&generate));
        }
        self.order((generate.priority, generate.turn, id), source);
        self.waiting.insert(id, Compiling { generate, later: Vec::new() });
        Admitted::Waits
    }

    /// Has a source compiled for a request, once for all that wait for it.
    fn order(&mut self, place: Place, source: Source) {
        match self.jobs.iter_mut().find(|job| job.source == source) {
            Some(job) => {
                let before = job.place().filter(|before| place < *before);
                job.requests.push(place);
                before.into_iter().for_each(|before| self.queue.change(before, Some(place)));
            }
            None => {
                let id = place.2;
                self.queue.add(place, id, source.clone());
                self.jobs.push(Job { id, source, requests: vec![place] });
            }
        }
    }

    /// Hands the requests over whose job has ended, in their order.
    pub(crate) fn compiled(&mut self, job: WorkId) -> Vec<Compiling> {
        let Some(at) = self.jobs.iter().position(|known| known.id == job) else { return Vec::new() };
        let requests = self.jobs.remove(at).requests;
        requests.iter().filter_map(|(_, _, id)| self.waiting.remove(id)).collect()
    }

    /// Takes out a request that waits no longer.
    pub(crate) fn take(&mut self, id: WorkId) -> Option<Compiling> {
        let taken = self.waiting.remove(&id)?;
        let queue = &self.queue;
        self.jobs.retain_mut(|job| {
            let before = job.place();
            job.requests.retain(|(_, _, request)| *request != id);
            let after = job.place();
            before.filter(|_| before != after).into_iter().for_each(|before| queue.change(before, after));
            after.is_some()
        });
        Some(taken)
    }

    /// Keeps a command for a waiting request; false if the request does not wait, or has too many commands.
    pub(crate) fn keep(&mut self, id: WorkId, command: Later) -> bool {
        let waiting = self.waiting.get_mut(&id).filter(|waiting| waiting.later.len() < LATER_MAX);
        waiting.map(|waiting| waiting.later.push(command)).is_some()
    }

    /// Number of choices that wait.
    pub(crate) fn waiting_choices(&self) -> u32 {
        self.waiting.values().map(|waiting| waiting.generate.choices.len() as u32).sum()
    }
}

/// Outputs that end each choice of a request.
fn refusal(generate: &Generate) -> Vec<Output> {
    let message = "too many requests wait for their grammars".to_owned();
    let (reason, error_kind) = (FinishReason::Failed as i32, ErrorKind::Overloaded as i32);
    let finish = Some(Finish { reason, error_kind, message, stop_token: None });
    let refuse = |choice: &ChoiceStart| Output {
        request: generate.request,
        attempt: generate.attempt,
        choice: choice.index,
        finish: finish.clone(),
        ..Output::default()
    };
    generate.choices.iter().map(refuse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_proto::frames::{Guide, GuideKind};
    use std::sync::mpsc::{Receiver, Sender, channel};

    const DEMO: &[u8] = include_bytes!("../../../models/penstock-demo/tokenizer.json");

    fn request(request: u64, text: &str) -> Generate {
        let guide = Guide { kind: GuideKind::Regex as i32, text: text.to_owned(), begins_after: Vec::new() };
        let choices = vec![ChoiceStart::default(); 2];
        Generate { request, choices, grammar: Some(guide), ..Generate::default() }
    }

    fn numbers(compiled: &[Compiling]) -> Vec<u64> {
        compiled.iter().map(|waited| waited.generate.request).collect()
    }

    #[test]
    fn sources_are_compiled_elsewhere_and_known_then() {
        let grammars = load(DEMO, &[], 4096).expect("the demo vocabulary");
        let (told, inbox) = channel();
        let done = Box::new(move |id: WorkId| told.send(id).is_ok());
        let mut compiler = Compiler::start(Arc::clone(&grammars), 256, done).expect("started");
        assert!(matches!(compiler.admit(Generate::default()), Admitted::Known(_)), "no grammar");
        assert!(matches!(compiler.admit(request(1, "a+")), Admitted::Waits));
        assert!(matches!(compiler.admit(request(2, "(")), Admitted::Waits));
        assert_eq!(compiler.waiting_choices(), 4);
        assert!(
            compiler.keep(WorkId(1), Later::Window(Window::default()))
                && !compiler.keep(WorkId(3), Later::Window(Window::default()))
        );
        assert_eq!([inbox.recv(), inbox.recv()], [Ok(WorkId(1)), Ok(WorkId(2))]);
        let compiled = compiler.compiled(WorkId(1));
        assert_eq!((numbers(&compiled), compiled[0].later.len()), (vec![1], 1));
        assert!(compiler.compiled(WorkId(1)).is_empty() && compiler.take(WorkId(1)).is_none());
        let (good, bad) = (Source::regex("a+"), Source::regex("("));
        assert!(grammars.peek(&good).is_some_and(|outcome| outcome.is_ok()));
        assert!(grammars.peek(&bad).is_some_and(|outcome| outcome.is_err()));
        assert!(matches!(compiler.admit(request(3, "a+")), Admitted::Known(_)), "known now");
    }

    /// A compiler whose thread tells the number of each job and then waits until the test lets it go on.
    fn one_by_one(waiting_max: usize) -> (Compiler, Receiver<WorkId>, Sender<()>) {
        let grammars = load(DEMO, &[], 4096).expect("the demo vocabulary");
        let (told, inbox) = channel();
        let (go_on, held) = channel::<()>();
        let held = Mutex::new(held);
        let done = move |id: WorkId| told.send(id).is_ok() && held.lock().is_ok_and(|held| held.recv().is_ok());
        (Compiler::start(grammars, waiting_max, Box::new(done)).expect("started"), inbox, go_on)
    }

    #[test]
    fn sources_are_compiled_in_the_order_of_their_requests() {
        let (mut compiler, inbox, go_on) = one_by_one(256);
        let mut waits = |number, text: &str, priority, turn| {
            let asked = Generate { priority, turn, ..request(number, text) };
            assert!(matches!(compiler.admit(asked), Admitted::Waits), "{number}");
        };
        waits(1, "begun", 0, 0);
        assert_eq!(inbox.recv(), Ok(WorkId(1)));
        // A tenant with many sources, each a turn later; then others.
        (0..100).for_each(|n| waits(100 + n, &format!("heavy{n}"), 0, 10 + 10 * n as i64));
        waits(300, "late", 5, 0);
        waits(301, "light", 0, 15);
        waits(302, "urgent", -1, 9999);
        waits(303, "heavy99", 0, 12);
        waits(304, "goes on", 0, i64::MIN);
        waits(305, "heavy98", 0, 11);
        assert!(compiler.take(WorkId(305)).is_some(), "who leaves takes the place along");
        for expected in [302, 304, 100, 199, 301, 101, 102] {
            go_on.send(()).expect("the thread lives");
            assert_eq!(inbox.recv(), Ok(WorkId(expected)));
        }
        assert_eq!(numbers(&compiler.compiled(WorkId(199))), [199, 303], "one source, two requests");
    }

    #[test]
    fn a_source_is_compiled_once_for_all_that_wait_and_not_for_those_that_left() {
        let (mut compiler, inbox, go_on) = one_by_one(600);
        let mut waits = |number, text: &str| matches!(compiler.admit(request(number, text)), Admitted::Waits);
        assert!(waits(1, "first"));
        assert_eq!(inbox.recv(), Ok(WorkId(1)));
        assert!((100..200).all(|number| waits(number, "many")), "one source takes one place");
        let own = (200..500).take_while(|number| waits(*number, &format!("own{number}"))).count();
        assert_eq!(own, 199, "each of these has a source of its own; all have two choices");
        for number in (101..200).chain(200..398) {
            assert!(compiler.take(WorkId(number)).is_some());
        }
        for expected in [100, 398] {
            go_on.send(()).expect("the thread lives");
            assert_eq!(inbox.recv(), Ok(WorkId(expected)), "nobody waits for those between");
            assert_eq!(numbers(&compiler.compiled(WorkId(expected))), [expected]);
        }
        assert_eq!(numbers(&compiler.compiled(WorkId(1))), [1]);
        assert_eq!(compiler.waiting_choices(), 0);
    }

    #[test]
    fn a_tokenizer_that_cannot_be_used_turns_grammars_off() {
        assert!(load(b"{}", &[], 4096).is_none());
        assert!(load(DEMO, &[], 0).is_none());
    }
}
