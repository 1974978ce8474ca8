//! State of one sequence in its grammar: which tokens may follow, which one must, whether the text may end.

use crate::Grammar;
use crate::digits::Digits;
use crate::error::{MatchError, clip};
use crate::library::Parser;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Position of one sequence in a grammar. Everything that it answers is a function of the grammar and the consumed
/// tokens.
///
/// Matchers of one grammar share the states of its lexer. A failure in these, by a limit or by a bug of the library,
/// is repeated for every matcher that shares them: each then takes states of its own, once, and goes on.
#[derive(Clone)]
pub struct Matcher {
    grammar: Grammar,
    parser: Parser,
    tokens: Vec<u32>,
    is_isolated: bool,
    /// Set once a mask came out empty although the library saw a way on.
    is_dead: bool,
    mask: Vec<u32>,
    /// Place in the text, if that is JSON.
    digits: Option<Digits>,
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher").field("tokens", &self.tokens).finish_non_exhaustive()
    }
}

/// Tokens that may follow.
#[derive(Clone, Copy, Debug)]
pub struct Mask<'a> {
    /// One bit per row of logits, lowest bit first; the bits of special tokens are only set where the grammar names
    /// the token.
    pub bits: &'a [u32],
    /// True if no bit is set.
    pub is_empty: bool,
    /// True if the text so far satisfies the grammar, so that it may end here.
    pub may_end: bool,
    /// Time that it took to compute.
    pub elapsed: Duration,
}

impl Matcher {
    pub(crate) fn new(grammar: Grammar, parser: Parser) -> Self {
        let digits = grammar.is_json().then(Digits::default);
        Self { grammar, parser, tokens: Vec::new(), is_isolated: false, is_dead: false, mask: Vec::new(), digits }
    }

    /// Number of consumed tokens.
    pub fn consumed(&self) -> usize {
        self.tokens.len()
    }

    /// Returns true if the text satisfies the grammar and nothing may follow.
    pub fn is_complete(&self) -> bool {
        self.parser.is_complete()
    }

    /// Returns true if the text so far satisfies the grammar, so that it may end here.
    ///
    /// # Errors
    /// [`MatchError::TooComplex`]
    pub fn is_accepting(&mut self) -> Result<bool, MatchError> {
        if self.is_complete() {
            return Ok(true);
        }
        self.attempt(Parser::is_accepting)
    }

    /// Consumes the next token of the sequence. After an error the matcher is where it was before.
    ///
    /// # Errors
    /// [`MatchError`] if the token does not fit, or if following it is too much work.
    pub fn consume(&mut self, token: u32) -> Result<(), MatchError> {
        let is_full = self.is_complete() || token as usize >= self.grammar.vocabulary().rows();
        if is_full || !self.attempt(|parser| parser.consume(token))? {
            return Err(MatchError::Rejected { token });
        }
        self.tokens.push(token);
        self.digits = self.digits.map(|place| place.after(self.grammar.vocabulary().bytes(token)).0);
        Ok(())
    }

    /// Returns true if the token may come next. The answer is a function of the grammar and the consumed tokens; a token
    /// whose check is too much work may not come.
    pub fn takes(&mut self, token: u32) -> bool {
        let is_full = self.is_complete() || self.is_dead || token as usize >= self.grammar.vocabulary().rows();
        !is_full && self.attempt(|parser| parser.takes(token)).unwrap_or(false)
    }

    /// Consumes tokens of an earlier attempt of the sequence.
    ///
    /// # Errors
    /// [`MatchError`] at the first token that does not fit; those before it are consumed.
    pub fn replay(&mut self, tokens: &[u32]) -> Result<(), MatchError> {
        tokens.iter().try_for_each(|token| self.consume(*token))
    }

    /// Computes the tokens that may follow.
    ///
    /// # Errors
    /// [`MatchError::TooComplex`] if that takes more work than is spent on one mask.
    pub fn mask(&mut self) -> Result<Mask<'_>, MatchError> {
        let began = Instant::now();
        let mut bits = std::mem::take(&mut self.mask);
        bits.resize(self.grammar.vocabulary().rows().div_ceil(32), 0);
        let computed = self.compute(&mut bits);
        self.mask = bits;
        let (is_empty, may_end) = computed?;
        Ok(Mask { bits: &self.mask, is_empty, may_end, elapsed: began.elapsed() })
    }

    fn compute(&mut self, bits: &mut [u32]) -> Result<(bool, bool), MatchError> {
        if self.is_complete() || self.is_dead {
            bits.fill(0);
            return Ok((true, self.is_complete()));
        }
        let may_end = self.is_accepting()?;
        let any = self.attempt(|parser| parser.mask(bits))?;
        if any {
            self.end_long_numbers(bits, may_end)?;
        }
        if !any {
            // The library's parser has stopped. A copy that has not can still say what was consumed.
            self.restart()?;
            self.is_dead = !may_end;
        }
        Ok((bits.iter().all(|word| *word == 0), may_end))
    }

    /// Takes those tokens out of a mask that would make a number longer than any program writes one, unless nothing else
    /// may follow.
    fn end_long_numbers(&mut self, bits: &mut [u32], may_end: bool) -> Result<(), MatchError> {
        let vocabulary = Arc::clone(self.grammar.vocabulary());
        let grammar = self.grammar.clone();
        let (digits, token_digits_max) = grammar.index().digits();
        let Some(place) = self.digits.filter(|place| place.is_near(token_digits_max)) else { return Ok(()) };
        // Digits that the grammar demands are as many as it says.
        if self.forced()?.is_some() {
            return Ok(());
        }
        let is_set = |bits: &[u32], token: u32| bits[token as usize / 32] >> (token % 32) & 1 == 1;
        let long = |token: &&u32| is_set(bits, **token) && place.after(vocabulary.bytes(**token)).1;
        let long: Vec<u32> = digits.iter().filter(long).copied().collect();
        let all = bits.iter().map(|word| word.count_ones() as usize).sum::<usize>();
        if may_end || long.len() < all {
            long.iter().for_each(|token| bits[*token as usize / 32] &= !(1 << (token % 32)));
        }
        Ok(())
    }

    /// Token that must follow, if the grammar leaves the text of the next token no choice: the longest token of the
    /// forced text, unless a token that goes on beyond the forced text is possible too. `None` where the model chooses.
    ///
    /// The answer is a function of the grammar and the consumed tokens alone, so a run that is cut inside of forced
    /// text goes on with the same tokens. The forced token is always one that the mask allows.
    ///
    /// # Errors
    /// [`MatchError::TooComplex`]
    pub fn forced(&mut self) -> Result<Option<u32>, MatchError> {
        if self.is_complete() || self.is_dead {
            return Ok(None);
        }
        let grammar = self.grammar.clone();
        self.attempt(|parser| parser.forced(grammar.index().trie()))
    }

    /// Tries an operation, and once more on lexer states of its own.
    fn attempt<T>(&mut self, mut operation: impl FnMut(&mut Parser) -> Result<T, String>) -> Result<T, MatchError> {
        let too_complex = |message: String| MatchError::TooComplex { message: clip(&message) };
        match operation(&mut self.parser) {
            Ok(done) => Ok(done),
            Err(message) if self.is_isolated => {
                // The parser is not used after an error; the next operation starts over.
                self.restart().ok();
                Err(too_complex(message))
            }
            Err(_) => {
                self.grammar.renew();
                self.is_isolated = true;
                self.restart()?;
                operation(&mut self.parser).map_err(too_complex)
            }
        }
    }

    /// Starts over with lexer states of its own, and consumes the same tokens.
    fn restart(&mut self) -> Result<(), MatchError> {
        let mut parser = self.grammar.isolated();
        for &token in &self.tokens {
            match parser.consume(token) {
                Ok(true) => {}
                Ok(false) => return Err(MatchError::Rejected { token }),
                Err(message) => return Err(MatchError::TooComplex { message: clip(&message) }),
            }
        }
        self.parser = parser;
        Ok(())
    }
}
