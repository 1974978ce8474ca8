//! Bytes of all tokens, and the index over them that a grammar is masked by.
//!
//! The bytes name the vocabulary, and are there at once. The index (tries of all tokens and of classes of them) takes most of a second for 150 thousand
//! tokens, and only grammars need it: it is made by the first that is compiled, or ahead of it by [`Vocabulary::index`].

use crate::VERSION;
use crate::runs::Runs;
use llguidance::ParserFactory;
use llguidance::api::ParserLimits;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use std::sync::{Arc, OnceLock};
use toktrie::INVALID_TOKEN;

/// Longest token in bytes that a grammar can use. Longer ones (runs of a thousand blanks) are never allowed.
const TOKEN_BYTES_MAX: usize = 512;
/// Most rows of logits: ids have 22 bits in the trie.
const ROWS_MAX: usize = 1 << 22;

/// Bounds on the work of one mask and the memory of one grammar, in the library's units.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 2000,
        initial_lexer_fuel: 400_000,
        step_lexer_fuel: 100_000,
        step_max_items: 50_000,
        max_lexer_states: 20_000,
        max_grammar_size: 100_000,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}

/// One token of a tokenizer.
#[derive(Clone, Copy, Debug)]
pub struct TokenText<'a> {
    /// Bytes that the token stands for in a text; its name, for a special token.
    pub bytes: &'a [u8],
    /// True for a control token, which is never part of a text.
    pub is_special: bool,
}

/// Reason why a vocabulary cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VocabularyError {
    /// The logits have no row or too many.
    #[error("logits have {rows} rows, 1 to {limit} are supported")]
    Rows {
        /// Number of rows.
        rows: usize,
        /// Most rows.
        limit: usize,
    },
    /// The tokens are longer together than an index can say.
    #[error("the tokens have more than {limit} bytes")]
    Bytes {
        /// Most bytes of all tokens together.
        limit: u32,
    },
    /// The library refused the tokens.
    #[error("the tokens cannot be indexed: {message}")]
    Library {
        /// Message of the library.
        message: String,
    },
}

/// Tokens of one model. Shared by all grammars of the model.
pub struct Vocabulary {
    /// Tokens in their forms of the trie, one behind the other.
    bytes: Vec<u8>,
    /// End of each token in `bytes`.
    ends: Vec<u32>,
    is_special: Vec<bool>,
    id: String,
    index: OnceLock<Result<Index, VocabularyError>>,
}

/// Tokens in the form that masks are computed over.
pub(crate) struct Index {
    pub(crate) factory: ParserFactory,
    /// Computation of masks for all parsers of the factory.
    pub(crate) masks: Arc<Runs>,
    /// Tokens of text that begin with a digit.
    digits: Vec<u32>,
    /// Most digits at the beginning of a token.
    token_digits_max: usize,
}

impl Index {
    fn new(words: &[Vec<u8>]) -> Result<Self, VocabularyError> {
        let made = llguidance::panic_utils::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let factory = factory(words)?;
            let masks = Arc::new(Runs::new(factory.slicer()));
            Ok((factory, masks))
        }));
        let (factory, masks) =
            made.map_err(|error| VocabularyError::Library { message: crate::error::clip(&error.to_string()) })?;
        let count = |word: &[u8]| word.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let digits = words.iter().zip(0..).filter(|(word, _)| count(word) > 0).map(|(_, id)| id).collect();
        let token_digits_max = words.iter().map(|word| count(word)).max().unwrap_or(0);
        Ok(Self { factory, masks, digits, token_digits_max })
    }

    /// Tokens that begin with a digit, and the most digits that one begins with.
    pub(crate) fn digits(&self) -> (&[u32], usize) {
        (&self.digits, self.token_digits_max)
    }

    pub(crate) fn trie(&self) -> &TokTrie {
        self.factory.tok_env().tok_trie()
    }
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocabulary").field("id", &self.id).field("rows", &self.rows()).finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// Takes the tokens in the order of their ids. `end_tokens` are never text, whatever the tokenizer says of them.
    /// `rows`: width of the logits, which may be more than there are tokens; ids beyond it cannot be drawn and are left
    /// out. Takes milliseconds for 150 thousand tokens; [`Self::index`] takes the rest.
    ///
    /// # Errors
    /// [`VocabularyError::Rows`] if the width is out of range, [`VocabularyError::Bytes`] if the tokens are too long.
    pub fn new<'a>(
        tokens: impl IntoIterator<Item = TokenText<'a>>,
        end_tokens: &[u32],
        rows: usize,
    ) -> Result<Arc<Self>, VocabularyError> {
        if rows == 0 || rows > ROWS_MAX {
            return Err(VocabularyError::Rows { rows, limit: ROWS_MAX });
        }
        let (mut bytes, mut ends) = (Vec::new(), Vec::with_capacity(rows));
        let mut is_special = Vec::with_capacity(rows);
        let mut hashed = Vec::new();
        for (token, id) in tokens.into_iter().take(rows).zip(0_u32..) {
            let special = token.is_special || end_tokens.contains(&id);
            hashed.push(u8::from(special));
            hashed.extend((token.bytes.len() as u64).to_le_bytes());
            hashed.extend(token.bytes);
            is_special.push(special);
            push_word(&mut bytes, token.bytes, special);
            ends.push(u32::try_from(bytes.len()).map_err(|_| VocabularyError::Bytes { limit: u32::MAX })?);
        }
        hashed.extend((rows as u64).to_le_bytes());
        ends.resize(rows, bytes.len() as u32);
        is_special.resize(rows, false);
        let id = format!("{VERSION} {}", &blake3::hash(&hashed).to_hex()[..16]);
        Ok(Arc::new(Self { bytes, ends, is_special, id, index: OnceLock::new() }))
    }

    /// Makes the index that grammars are compiled over, if it has not been made. Takes most of a second for 150 thousand tokens. Threads that need it meanwhile
    /// wait for it.
    ///
    /// # Errors
    /// [`VocabularyError::Library`] if the tokens cannot be indexed; then no grammar can be compiled either.
    pub fn index(&self) -> Result<(), VocabularyError> {
        self.indexed().map(drop).map_err(Clone::clone)
    }

    pub(crate) fn indexed(&self) -> Result<&Index, &VocabularyError> {
        let make = || {
            let words: Vec<Vec<u8>> = (0..self.rows()).map(|token| self.word(token).to_vec()).collect();
            Index::new(&words)
        };
        self.index.get_or_init(make).as_ref()
    }

    /// Name of the vocabulary and of the rules that are applied over it: equal ids give equal masks.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Width of a row of logits, and of a mask, in tokens.
    pub fn rows(&self) -> usize {
        self.is_special.len()
    }

    /// Returns true if the token is a control token or an end token, which no text contains.
    pub fn is_special(&self, token: u32) -> bool {
        self.is_special.get(token as usize).copied().unwrap_or(false)
    }

    /// Bytes of a token: its text, or the name of a control token. Empty for ids without a text, and for tokens that no
    /// grammar can use.
    pub fn bytes(&self, token: u32) -> &[u8] {
        let bytes = if (token as usize) < self.rows() { self.word(token as usize) } else { &[] };
        bytes.strip_prefix(&[TokTrie::SPECIAL_TOKEN_MARKER]).unwrap_or(bytes)
    }

    /// Form of a token in the trie.
    fn word(&self, token: usize) -> &[u8] {
        let begin = token.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[begin as usize..self.ends[token] as usize]
    }
}

fn factory(words: &[Vec<u8>]) -> anyhow::Result<ParserFactory> {
    let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, INVALID_TOKEN), words);
    // Not canonical: the library then masks by the grammar alone and leaves the choice of forced tokens to us.
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let slices = SlicedBiasComputer::general_slices();
    let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)?;
    factory.quiet();
    *factory.limits_mut() = limits();
    Ok(factory)
}

/// Adds the form of a token in the trie: a special one behind the byte that no text begins with, so that only a grammar which
/// names the token can match it.
fn push_word(words: &mut Vec<u8>, bytes: &[u8], special: bool) {
    const MARK: u8 = TokTrie::SPECIAL_TOKEN_MARKER;
    match bytes {
        [] => {}
        _ if bytes.len() > TOKEN_BYTES_MAX => {}
        _ if special => {
            words.push(MARK);
            words.extend(bytes);
        }
        // A lone byte 0xff is the mark itself, which the library never allows.
        [MARK, _, ..] => {}
        _ => words.extend(bytes),
    }
}
