//! Compilation of a source within limits, and what the sequences of one grammar share.

use crate::Vocabulary;
use crate::error::GrammarError;
use crate::kind::Kind;
use crate::library::Parser;
use crate::matcher::Matcher;
use crate::schema::Unenforced;
use crate::source::{Prepared, Source};
use crate::vocabulary::Index;
use std::sync::{Arc, Mutex, PoisonError};

/// Stack of the thread that compiles: the library recurses over nested text. Only touched pages take memory.
const STACK_BYTES: usize = 64 << 20;

/// Bytes of a compiled grammar beside its lexer, roughly, per byte of its text.
const BYTES_PER_TEXT_BYTE: usize = 32;

/// A compiled grammar over one vocabulary. Clones share everything.
#[derive(Clone)]
pub struct Grammar {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammar").field("unenforced", &self.shared.unenforced).finish_non_exhaustive()
    }
}

struct Shared {
    vocabulary: Arc<Vocabulary>,
    /// Parser at the start of the text, whose lexer has been used for nothing else.
    pristine: Mutex<Parser>,
    /// Parser at the start of the text, whose lexer states all sequences share and extend.
    common: Mutex<Parser>,
    unenforced: Vec<Unenforced>,
    text_bytes: usize,
    /// True if every text of the grammar is JSON.
    is_json: bool,
}

impl Grammar {
    /// Compiles a source. Hostile text is refused within a second of work and some ten megabytes; common text takes
    /// milliseconds. The first grammar of a vocabulary also waits for its index ([`Vocabulary::index`]).
    ///
    /// # Errors
    /// [`GrammarError`], the fault of whoever wrote the source; [`GrammarError::Vocabulary`] if the model's tokens cannot be indexed.
    pub fn compile(source: &Source, vocabulary: &Arc<Vocabulary>) -> Result<Self, GrammarError> {
        let Prepared { grammar, unenforced } = source.prepare()?;
        let kind = source.kind;
        let index = vocabulary.indexed().map_err(|error| GrammarError::Vocabulary(error.clone()))?;
        let work = || {
            let parser = Parser::compile(index, grammar)?;
            // The first mask belongs to the work of compiling, and shows whether anything matches at all.
            let (pristine, mut first) = (parser.isolated(), parser.clone());
            let mut mask = vec![0; vocabulary.rows().div_ceil(32)];
            let matches = first.is_complete() || first.is_accepting()? || first.mask(&mut mask)?;
            Ok::<_, String>((pristine, parser, matches))
        };
        let compiled = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("penstock-grammar".into()).stack_size(STACK_BYTES);
            match thread.spawn_scoped(scope, work) {
                Ok(thread) => thread.join().unwrap_or_else(|_| Err("panic".to_owned())),
                Err(error) => Err(format!("limit of threads: {error}")),
            }
        });
        let (pristine, common, matches) = compiled.map_err(|message| GrammarError::of_library(kind, &message))?;
        if !matches {
            return Err(GrammarError::malformed(kind, "no text of the model's tokens can satisfy it"));
        }
        let (pristine, common) = (Mutex::new(pristine), Mutex::new(common));
        let text_bytes = source.text.len();
        let is_json = matches!(kind, Kind::JsonSchema | Kind::JsonObject);
        let shared = Shared { vocabulary: Arc::clone(vocabulary), pristine, common, unenforced, text_bytes, is_json };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Keywords of its schemas that are not enforced: an output may break them.
    pub fn unenforced(&self) -> &[Unenforced] {
        &self.shared.unenforced
    }

    /// Vocabulary that the grammar was compiled over.
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.shared.vocabulary
    }

    /// Index of the vocabulary's tokens.
    pub(crate) fn index(&self) -> &Index {
        self.shared.vocabulary.indexed().expect("a grammar was compiled over it")
    }

    pub(crate) fn is_json(&self) -> bool {
        self.shared.is_json
    }

    /// Makes the matcher of a new sequence, at the start of its text.
    pub fn matcher(&self) -> Matcher {
        Matcher::new(self.clone(), lock(&self.shared.common).clone())
    }

    /// Bytes that the grammar takes, roughly. The number grows with use, within a bound.
    pub fn bytes(&self) -> usize {
        let lexers = lock(&self.shared.common).lexer_bytes().saturating_add(lock(&self.shared.pristine).lexer_bytes());
        lexers.saturating_add(self.shared.text_bytes * BYTES_PER_TEXT_BYTE)
    }

    /// Parser at the start of the text that shares nothing with others.
    pub(crate) fn isolated(&self) -> Parser {
        lock(&self.shared.pristine).isolated()
    }

    /// Gives the sequences that start from now on fresh lexer states, after a failure in the common ones.
    pub(crate) fn renew(&self) {
        let fresh = self.isolated();
        *lock(&self.shared.common) = fresh;
    }
}

fn lock(parser: &Mutex<Parser>) -> std::sync::MutexGuard<'_, Parser> {
    // The library's panics are caught before they reach the lock.
    parser.lock().unwrap_or_else(PoisonError::into_inner)
}
