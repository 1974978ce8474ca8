//! Grammars of a model, and the thread that compiles them: a step never waits for one.
//!
//! The bytes of the tokens are read beside the weights: they name the grammars, which a worker announces when it is ready. The index that masks need is
//! made after that, by the thread. A request whose grammar is not known yet waits for the thread, while
//! others run; the thread fills the cache that the engine reads, refusals included. Requests of one grammar wait for one
//! job, and a job is left out once nobody waits for it.

use crate::chain;
use crate::config::WorkerError;
use penstock_grammar::{CacheSizes, Grammars, Source, TokenText, Vocabulary};
use penstock_proto::frames::{Cancel, ChoiceStart, Finish, FinishReason, Generate, Output, Window};
use penstock_proto::{ErrorKind, WorkId};
use penstock_vocabulary::TokenBytes;
use std::collections::HashMap;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Weak};
use std::time::Instant;
use tracing::{info, warn};

/// Most grammars that wait to be compiled; further requests are refused as overloaded.
const JOBS_MAX: usize = 64;

/// Most requests that wait for their grammar, as many as the engine lets wait for a place.
const WAITING_MAX: usize = 256;

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

/// Order to the thread: one source to compile.
struct Order {
    job: WorkId,
    source: Source,
    /// Nothing is left of it once no request waits.
    wanted: Weak<()>,
}

/// A source that is being compiled or waits for that, and the requests that wait for it, in their order.
struct Job {
    id: WorkId,
    source: Source,
    requests: Vec<WorkId>,
    /// Dropped with the job, which tells the thread to leave it out.
    _wanted: Arc<()>,
}

/// The thread that compiles, and the requests that wait for it, by their numbers. The thread ends with this value.
pub(crate) struct Compiler {
    grammars: Arc<Grammars>,
    orders: SyncSender<Order>,
    jobs: Vec<Job>,
    waiting: HashMap<WorkId, Compiling>,
}

impl Compiler {
    /// Starts the thread.
    pub(crate) fn start(grammars: Arc<Grammars>, done: Done) -> Result<Self, WorkerError> {
        let (orders, inbox) = sync_channel::<Order>(JOBS_MAX);
        let known = Arc::clone(&grammars);
        let work = move || {
            let began = Instant::now();
            match known.vocabulary().index() {
                Ok(()) => info!(seconds = began.elapsed().as_secs_f64(), "vocabulary indexed for grammars"),
                Err(error) => warn!(
                    why = chain(&error),
                    "the vocabulary cannot be indexed: requests that have a grammar are refused"
                ),
            }
            for Order { job, source, wanted } in inbox {
                if wanted.strong_count() == 0 {
                    continue;
                }
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
        Ok(Self { grammars, orders, jobs: Vec::new(), waiting: HashMap::new() })
    }

    /// Takes a request whose grammar is not known; any other is given back at once.
    pub(crate) fn admit(&mut self, generate: Generate) -> Admitted {
        let source = generate.grammar.as_ref().and_then(penstock_engine::source);
        let Some(source) = source.filter(|source| self.grammars.peek(source).is_none()) else {
            return Admitted::Known(Box::new(generate));
        };
        let id = WorkId(generate.request);
        if self.waiting.len() >= WAITING_MAX || !self.order(id, source) {
            return Admitted::Refused(refusal(&generate));
        }
        self.waiting.insert(id, Compiling { generate, later: Vec::new() });
        Admitted::Waits
    }

    /// Has a source compiled for a request, once for all that wait for it; false if too many sources wait.
    fn order(&mut self, id: WorkId, source: Source) -> bool {
        if let Some(job) = self.jobs.iter_mut().find(|job| job.source == source) {
            job.requests.push(id);
            return true;
        }
        let wanted = Arc::new(());
        let order = Order { job: id, source: source.clone(), wanted: Arc::downgrade(&wanted) };
        let is_taken = self.orders.try_send(order).is_ok();
        if is_taken {
            self.jobs.push(Job { id, source, requests: vec![id], _wanted: wanted });
        }
        is_taken
    }

    /// Hands the requests over whose job has ended, in their order.
    pub(crate) fn compiled(&mut self, job: WorkId) -> Vec<Compiling> {
        let Some(at) = self.jobs.iter().position(|known| known.id == job) else { return Vec::new() };
        let requests = self.jobs.remove(at).requests;
        requests.iter().filter_map(|id| self.waiting.remove(id)).collect()
    }

    /// Takes out a request that waits no longer.
    pub(crate) fn take(&mut self, id: WorkId) -> Option<Compiling> {
        let taken = self.waiting.remove(&id)?;
        self.jobs.iter_mut().for_each(|job| job.requests.retain(|request| *request != id));
        self.jobs.retain(|job| !job.requests.is_empty());
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
    let message = "too many grammars wait to be compiled".to_owned();
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
    use std::sync::mpsc::channel;

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
        let mut compiler = Compiler::start(Arc::clone(&grammars), done).expect("started");
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

    #[test]
    fn a_source_is_compiled_once_for_all_that_wait_and_not_for_those_that_left() {
        let grammars = load(DEMO, &[], 4096).expect("the demo vocabulary");
        let (told, inbox) = channel();
        let (go_on, held) = channel::<()>();
        let held = std::sync::Mutex::new(held);
        // The thread waits behind each job until the test lets it go on.
        let done = move |id: WorkId| told.send(id).is_ok() && held.lock().is_ok_and(|held| held.recv().is_ok());
        let mut compiler = Compiler::start(grammars, Box::new(done)).expect("started");
        let mut waits = |number, text: &str| matches!(compiler.admit(request(number, text)), Admitted::Waits);
        assert!(waits(1, "first"));
        assert_eq!(inbox.recv(), Ok(WorkId(1)));
        assert!((100..200).all(|number| waits(number, "many")), "one source takes one place");
        let one_by_one = (200..300).take_while(|number| waits(*number, &format!("own{number}"))).count();
        assert_eq!(one_by_one, JOBS_MAX - 1, "each of these has a source of its own");
        for number in (101..200).chain(200..262) {
            assert!(compiler.take(WorkId(number)).is_some());
        }
        for expected in [100, 262] {
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
