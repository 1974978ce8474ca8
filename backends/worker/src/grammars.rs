//! Grammars of a model, and the thread that compiles them: a step never waits for one.
//!
//! The vocabulary is read beside the weights. A request whose grammar is not known yet waits for the thread, while
//! others run; the thread fills the cache that the engine reads, refusals included.

use crate::config::WorkerError;
use penstock_grammar::{CacheSizes, Grammars, Source, TokenText, Vocabulary};
use penstock_vocabulary::TokenBytes;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use tracing::warn;

/// Most grammars that wait to be compiled; further requests are refused as overloaded.
const JOBS_MAX: usize = 64;

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

/// Callback with the number of a job whose source is compiled; false if nobody listens any more.
pub(crate) type Done = Box<dyn Fn(u64) -> bool + Send>;

/// Sender of sources to the thread that compiles them. The thread ends with it.
pub(crate) struct Compiler {
    jobs: SyncSender<(u64, Source)>,
}

impl Compiler {
    /// Starts the thread.
    pub(crate) fn start(grammars: Arc<Grammars>, done: Done) -> Result<Self, WorkerError> {
        let (jobs, inbox) = sync_channel::<(u64, Source)>(JOBS_MAX);
        let work = move || {
            for (id, source) in inbox {
                // The outcome, good or bad, is in the cache now; it is held until the engine has been told.
                let outcome = grammars.get(&source);
                let is_heard = done(id);
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
        Ok(Self { jobs })
    }

    /// Has a source compiled; false if too many wait.
    pub(crate) fn ask(&self, id: u64, source: Source) -> bool {
        self.jobs.try_send((id, source)).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    const DEMO: &[u8] = include_bytes!("../../../models/penstock-demo/tokenizer.json");

    #[test]
    fn sources_are_compiled_elsewhere_and_known_then() {
        let grammars = load(DEMO, &[], 4096).expect("the demo vocabulary");
        let (told, inbox) = channel();
        let compiler =
            Compiler::start(Arc::clone(&grammars), Box::new(move |id| told.send(id).is_ok())).expect("started");
        let (good, bad) = (Source::regex("a+"), Source::regex("("));
        assert!(grammars.peek(&good).is_none());
        assert!(compiler.ask(1, good.clone()) && compiler.ask(2, bad.clone()));
        assert_eq!([inbox.recv(), inbox.recv()], [Ok(1), Ok(2)]);
        assert!(grammars.peek(&good).is_some_and(|outcome| outcome.is_ok()));
        assert!(grammars.peek(&bad).is_some_and(|outcome| outcome.is_err()));
    }

    #[test]
    fn a_tokenizer_that_cannot_be_used_turns_grammars_off() {
        assert!(load(b"{}", &[], 4096).is_none());
        assert!(load(DEMO, &[], 0).is_none());
    }
}
