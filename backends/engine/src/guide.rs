//! Constrained output: the grammar of a request, and where in it each choice is.
//!
//! One idea: everything here is a function of the request and the output tokens so far. A choice that is resumed, moved
//! or preempted replays its output and is where it was. The output is free until the guide's mark has occurred (see
//! `mark.rs`), and cannot end before; then each token is either forced by the grammar or drawn under its mask. A choice ends when its grammar is
//! satisfied and nothing may follow.

use crate::limits::Refusal;
use crate::mark::Mark;
use crate::params::Params;
use penstock_grammar::{Grammar, GrammarError, Grammars, Kind, MatchError, Matcher, Source};
use penstock_proto::ErrorKind;
use penstock_proto::frames::{Guide, GuideKind, GuideState};
use std::sync::Arc;
use std::time::Duration;

/// Most tokens of [`Guide::begins_after`].
pub(crate) const BEGINS_AFTER_MAX: usize = 64;

/// Source of a guide, in the words of the crate that compiles it; `None` for a kind that this version does not know.
pub fn source(guide: &Guide) -> Option<Source> {
    let kind = match guide.kind() {
        GuideKind::Unknown => return None,
        GuideKind::JsonSchema => Kind::JsonSchema,
        GuideKind::JsonObject => Kind::JsonObject,
        GuideKind::Regex => Kind::Regex,
        GuideKind::Lark => Kind::Lark,
        GuideKind::Choice => Kind::Choice,
    };
    Some(Source { kind, text: guide.text.clone() })
}

/// Compiled guide of a request, shared by its choices.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    grammar: Grammar,
    /// Mark behind which the grammar begins; `None`: at once.
    mark: Option<Arc<Mark>>,
    /// Stop tokens that no text contains: allowed where the grammar is satisfied.
    ends: Vec<u32>,
}

impl Rule {
    /// Looks the guide's grammar up, or compiles it now.
    pub(crate) fn new(guide: Guide, grammars: Option<&Grammars>, stop_tokens: &[u32]) -> Result<Self, Refusal> {
        let unsupported = |message: &str| Refusal { kind: ErrorKind::Unsupported, message: message.to_owned() };
        let grammars = grammars.ok_or_else(|| unsupported("grammar: this worker's model has no tokenizer file"))?;
        let source = source(&guide).ok_or_else(|| unsupported("grammar: the kind is of a later version"))?;
        let grammar = grammars.get(&source).map_err(|error| Refusal {
            kind: match error {
                GrammarError::Unsupported { .. } | GrammarError::Vocabulary(_) => ErrorKind::Unsupported,
                _ => ErrorKind::InvalidRequest,
            },
            message: format!("grammar: {error}"),
        })?;
        let vocabulary = grammars.vocabulary();
        let ends: Vec<u32> = stop_tokens.iter().copied().filter(|token| vocabulary.is_special(*token)).collect();
        let begins_after = Some(guide.begins_after).filter(|tokens| !tokens.is_empty());
        let mark = begins_after.map(|tokens| Arc::new(Mark::new(Arc::clone(vocabulary), tokens, &ends)));
        Ok(Self { grammar, mark, ends })
    }

    /// Id of the vocabulary and the rules over it.
    pub(crate) fn id(&self) -> &str {
        self.grammar.vocabulary().id()
    }
}

/// What comes next in a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Any token that is free in front of the mark: the grammar has not begun.
    Free,
    /// This token, whatever the model says.
    Forced(u32),
    /// A token under the mask.
    Masked,
    /// Nothing: the grammar is satisfied, and no token may follow.
    Complete,
}

/// Tokens that may be drawn now.
#[derive(Clone, Copy, Debug)]
pub struct Allowed<'a> {
    /// One bit per token of the vocabulary, lowest bit first.
    pub bits: &'a [u32],
    /// Further allowed tokens, which end the output.
    pub ends: &'a [u32],
}

/// Place of one choice in its grammar.
pub(crate) struct Guided {
    rule: Rule,
    /// Matcher of the text since the grammar began.
    matcher: Option<Box<Matcher>>,
    /// Number of bytes of the mark that the output ends with, while the grammar has not begun.
    held: usize,
    next: Next,
    bits: Vec<u32>,
    may_end: bool,
    /// First failure of the matcher. Reported with the next token that is wanted: tokens before it stand.
    failed: Option<MatchError>,
}

impl Guided {
    /// Place before the first token.
    pub(crate) fn new(rule: &Rule) -> Self {
        let matcher = rule.mark.is_none().then(|| Box::new(rule.grammar.matcher()));
        let next = match &matcher {
            Some(matcher) if matcher.is_complete() => Next::Complete,
            Some(_) => Next::Masked,
            None => Next::Free,
        };
        let rule = rule.clone();
        Self { rule, matcher, held: 0, next, bits: Vec::new(), may_end: false, failed: None }
    }

    /// Goes on after the last token of `output`, which is not a stop token.
    pub(crate) fn follow(&mut self, output: &[u32]) {
        let Some(token) = output.last().filter(|_| self.failed.is_none()) else { return };
        match &mut self.matcher {
            None => {
                let begins = self.rule.mark.as_ref().is_none_or(|mark| mark.follow(&mut self.held, output));
                if !begins {
                    return;
                }
                self.matcher = Some(Box::new(self.rule.grammar.matcher()));
                self.next = Next::Masked;
            }
            Some(matcher) => {
                self.failed = matcher.consume(*token).err();
                self.next = Next::Masked;
            }
        }
        if self.matcher.as_ref().is_some_and(|matcher| matcher.is_complete()) {
            self.next = Next::Complete;
        }
    }

    /// Decides what comes after `output`. A forced token that the request excludes is left to the mask.
    pub(crate) fn look(&mut self, params: &Params, output: &[u32]) {
        let Some(matcher) = self.matcher.as_mut().filter(|_| self.failed.is_none() && self.next != Next::Complete)
        else {
            return;
        };
        self.next = match matcher.forced() {
            Ok(Some(token)) if params.permits(token, output) => Next::Forced(token),
            Ok(_) => Next::Masked,
            Err(error) => {
                self.failed = Some(error);
                Next::Masked
            }
        };
    }

    /// Returns true if `token` may come next, as far as the grammar goes.
    pub(crate) fn takes(&mut self, token: u32) -> bool {
        match &mut self.matcher {
            _ if self.failed.is_some() || self.next == Next::Complete => false,
            None => self.rule.mark.as_ref().is_none_or(|mark| mark.is_free(self.held, token)),
            Some(matcher) => matcher.takes(token),
        }
    }

    pub(crate) fn next(&self) -> Next {
        self.next
    }

    /// Returns true if the grammar is satisfied and nothing may follow.
    pub(crate) fn is_complete(&self) -> bool {
        self.next == Next::Complete
    }

    /// Computes the mask of the next token, where one is needed; returns the time that it took.
    pub(crate) fn mask(&mut self) -> Option<Duration> {
        let matcher = self.matcher.as_mut().filter(|_| self.next == Next::Masked && self.failed.is_none())?;
        match matcher.mask() {
            Ok(mask) => {
                self.bits.clear();
                self.bits.extend_from_slice(mask.bits);
                self.may_end = mask.may_end;
                Some(mask.elapsed)
            }
            Err(error) => {
                self.failed = Some(error);
                None
            }
        }
    }

    /// Tokens that may be drawn next: the result of [`Self::mask`], or those that are free in front of the mark; `None` where nothing is drawn.
    /// `is_early`: the output may not end here, whatever the grammar says.
    pub(crate) fn allowed(&self, is_early: bool) -> Result<Option<Allowed<'_>>, MatchError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let ends: &[u32] = if self.may_end && !is_early { &self.rule.ends } else { &[] };
        Ok(match (self.next, &self.rule.mark) {
            (Next::Free, Some(mark)) => Some(Allowed { bits: mark.free(self.held), ends: &[] }),
            (Next::Masked, _) => Some(Allowed { bits: &self.bits, ends }),
            _ => None,
        })
    }

    /// Returns true if the grammar is satisfied by the output so far, as the last mask found.
    pub(crate) fn may_end(&self) -> bool {
        self.may_end
    }

    /// Failure of the matcher, if there was one.
    pub(crate) fn failure(&self) -> Option<&MatchError> {
        self.failed.as_ref()
    }
}

/// Counters of guided output, sums since the engine began.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Meter {
    pub(crate) jumped_tokens: u64,
    pub(crate) too_complex: u64,
    masks: u64,
    mask_seconds: f64,
    mask_seconds_max: f64,
}

impl Meter {
    pub(crate) fn masked(&mut self, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64();
        self.masks += 1;
        self.mask_seconds += seconds;
        self.mask_seconds_max = self.mask_seconds_max.max(seconds);
    }

    /// State for the gateway. `sequences`: open choices with a grammar.
    pub(crate) fn state(&self, sequences: usize, grammars: &Grammars) -> GuideState {
        let (compiled, spent) = grammars.spent();
        GuideState {
            sequences: sequences as u32,
            jumped_tokens: self.jumped_tokens,
            masks: self.masks,
            mask_seconds: self.mask_seconds,
            mask_seconds_max: self.mask_seconds_max,
            compiled,
            compile_seconds: spent.as_secs_f64(),
            too_complex: self.too_complex,
        }
    }
}
