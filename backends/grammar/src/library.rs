//! The library's parser behind a guard: panics become errors, and nothing of it is used after an error.

use crate::Vocabulary;
use llguidance::TokenParser;
use llguidance::api::{GrammarInit, StopReason, TopLevelGrammar};
use llguidance::toktrie::TokTrie;
use llguidance::{Logger, panic_utils};
use std::panic::AssertUnwindSafe;
use toktrie::InferenceCapabilities;

/// Tokens that are consumed between two masks at most: only a mask renews the work that the lexer may do.
const UNMASKED_MAX: u32 = 32;

/// State of one sequence in the library, or of none so far.
#[derive(Clone)]
pub(crate) struct Parser {
    inner: TokenParser,
    /// Tokens consumed since the last mask.
    unmasked: u32,
}

impl Parser {
    /// Compiles a grammar.
    pub(crate) fn compile(vocabulary: &Vocabulary, grammar: TopLevelGrammar) -> Result<Self, String> {
        let factory = &vocabulary.factory;
        guarded(|| {
            let init = GrammarInit::Serialized(grammar);
            let (logger, caps) = (Logger::new(0, 0), InferenceCapabilities::default());
            let mut parser = factory.create_parser_from_init_ext(init, logger, caps, factory.limits().clone())?;
            parser.start_without_prompt();
            parser.check_stop()?;
            Ok(Self { inner: parser, unmasked: 0 })
        })
    }

    /// Copies the parser with lexer states of its own.
    pub(crate) fn isolated(&self) -> Self {
        Self { inner: self.inner.deep_clone(), unmasked: self.unmasked }
    }

    /// Bytes that the states of the lexer take, which grow with use.
    pub(crate) fn lexer_bytes(&self) -> usize {
        guarded(|| Ok(self.inner.parser.lexer_stats().num_bytes)).unwrap_or(usize::MAX)
    }

    /// Returns true if the text so far matches, and nothing may follow.
    pub(crate) fn is_complete(&self) -> bool {
        self.inner.stop_reason() == StopReason::NoExtension
    }

    /// Returns true if the text so far matches.
    pub(crate) fn is_accepting(&mut self) -> Result<bool, String> {
        let parser = &mut self.inner;
        guarded(|| {
            let accepting = parser.is_accepting();
            sound(parser)?;
            Ok(accepting)
        })
    }

    /// Returns true if a token fits.
    pub(crate) fn takes(&mut self, token: u32) -> Result<bool, String> {
        let parser = &mut self.inner;
        guarded(|| {
            let fits = parser.validate_token(token)?;
            sound(parser)?;
            Ok(fits)
        })
    }

    /// Consumes a token; false if it does not fit.
    pub(crate) fn consume(&mut self, token: u32) -> Result<bool, String> {
        let (parser, unmasked) = (&mut self.inner, &mut self.unmasked);
        guarded(|| {
            if *unmasked >= UNMASKED_MAX {
                match parser.compute_mask() {
                    Err(_) if parser.stop_reason() == StopReason::NoExtensionBias => return Ok(false),
                    masked => drop(masked?),
                }
                *unmasked = 0;
            }
            if !parser.validate_token(token)? {
                sound(parser)?;
                return Ok(false);
            }
            let back = parser.consume_token(token)?;
            anyhow::ensure!(back == 0, "the grammar takes tokens back");
            parser.check_stop()?;
            sound(parser)?;
            *unmasked += 1;
            Ok(true)
        })
    }

    /// Writes the tokens that may follow into `mask`, one bit each; false if there is none.
    pub(crate) fn mask(&mut self, mask: &mut [u32]) -> Result<bool, String> {
        let parser = &mut self.inner;
        self.unmasked = 0;
        guarded(|| match parser.compute_mask() {
            Ok(allowed) => {
                let words = allowed.as_slice();
                let (kept, rest) = mask.split_at_mut(words.len().min(mask.len()));
                kept.copy_from_slice(&words[..kept.len()]);
                rest.fill(0);
                Ok(true)
            }
            Err(_) if parser.stop_reason() == StopReason::NoExtensionBias => {
                mask.fill(0);
                Ok(false)
            }
            Err(error) => Err(error),
        })
    }

    /// Token that is forced here; see [`crate::Matcher::forced`].
    pub(crate) fn forced(&mut self, trie: &TokTrie) -> Result<Option<u32>, String> {
        let parser = &mut self.inner.parser;
        guarded(|| {
            parser.force_bytes();
            let bytes = parser.currently_forced_bytes();
            if bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) {
                return Ok(toktrie::parse_numeric_token(&bytes[1..]).map(|(_, token)| token));
            }
            let (token, length) = match bytes {
                [] => return Ok(None),
                _ => trie.prefix_token_id(&bytes[..bytes.len().min(trie.max_token_len())]),
            };
            if length == 0 {
                return Ok(None);
            }
            let may_go_on = bytes.len() < trie.max_token_len() && {
                let bytes = bytes.to_vec();
                parser.with_recognizer(|recognizer| trie.has_valid_extensions(recognizer, &bytes))
            };
            if let Some(error) = parser.get_error() {
                anyhow::bail!(error.message());
            }
            Ok(Some(token).filter(|_| !may_go_on))
        })
    }
}

/// Fails if the lexer has reached a limit: it then takes no bytes any more, for none of those who share it.
fn sound(parser: &TokenParser) -> anyhow::Result<()> {
    match parser.parser.get_error() {
        Some(error) => anyhow::bail!(error.message()),
        None => Ok(()),
    }
}

fn guarded<T>(work: impl FnOnce() -> anyhow::Result<T>) -> Result<T, String> {
    panic_utils::catch_unwind(AssertUnwindSafe(work)).map_err(|error| format!("{error:#}"))
}
