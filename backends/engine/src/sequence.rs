//! One choice of a request: its tokens, the number computed, and the pages that hold them.
//!
//! The rule of the engine lives here: a sequence has `computed` tokens and wants all of its tokens computed; the step
//! that computes the last one draws the next. Prefill, chunks, prefix hits, resume and preemption only change the two
//! numbers.

use crate::guide::{Guided, Next};
use crate::lookup::{Lookup, Text};
use crate::reasoning::Reasoning;
use crate::request::Request;
use crate::sampler::History;
use penstock_kv::PageId;
use penstock_proto::frames::{ChoiceStart, Finish, FinishReason, TokenLogprobs};
use penstock_proto::{BLOCK_TOKENS, BlockHash};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// Whether a sequence holds pages and takes part in steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// The sequence has no pages and waits for its start, or after a preemption for its restart.
    Waiting,
    /// The sequence has pages and takes part in steps.
    Running,
}

pub(crate) struct Sequence {
    pub(crate) request: Arc<Request>,
    pub(crate) choice: u32,
    pub(crate) status: Status,
    /// Output tokens, those of earlier attempts included.
    pub(crate) output: Vec<u32>,
    /// Occurrences in `output`; empty unless a penalty is on.
    counts: HashMap<u32, u32>,
    /// Number of tokens whose KV is in `table`.
    pub(crate) computed: usize,
    /// Number of sealed blocks of `table`, from the first.
    pub(crate) sealed: usize,
    /// Block table: the page of each block of the sequence, in order.
    pub(crate) table: Vec<u32>,
    /// Hashes of the full blocks after the prompt's.
    output_hashes: Vec<BlockHash>,
    /// Number of tokens that may still be emitted; `None` means no limit.
    pub(crate) window: Option<u64>,
    /// Prompt tokens read from the cache at the first start.
    pub(crate) cached_tokens: Option<u32>,
    /// Number of tokens that the cache had at arrival.
    pub(crate) cached_hint: usize,
    /// True if the gateway was sent the first output, which carries the cached tokens.
    pub(crate) told: bool,
    /// Log-probabilities of the prompt so far, if this choice reports them.
    pub(crate) prompt_logprobs: Option<Vec<TokenLogprobs>>,
    /// Place in the grammar, if the output has one. Taken out while its mask is computed elsewhere.
    pub(crate) guided: Option<Guided>,
    /// Place in the reasoning, if its tokens are counted.
    reasoning: Option<Reasoning>,
    /// Next token, where the budget of the reasoning is spent.
    closing: Option<u32>,
    /// Forced tokens at the end of the output that no pass has computed: they are one chunk with the token before.
    pub(crate) jumped: usize,
    /// Draft tokens that the step computes behind the sequence's own. They are no part of it: what counts and hashes
    /// tokens does not see them.
    pub(crate) drafts: Vec<u32>,
    lookup: Lookup,
}

impl Sequence {
    /// Creates a sequence. `first`: it is the first choice of its request and reports the prompt's log-probabilities.
    pub(crate) fn new(request: Arc<Request>, start: ChoiceStart, window: u32, first: bool) -> Self {
        let reports = first && start.emitted.is_empty() && request.params.prompt_logprobs.is_some();
        let unknown = TokenLogprobs { logprob: f32::NAN, ..Default::default() };
        let mut sequence = Self {
            choice: start.index,
            status: Status::Waiting,
            output: Vec::new(),
            counts: HashMap::new(),
            computed: 0,
            sealed: 0,
            table: Vec::new(),
            output_hashes: Vec::new(),
            window: (window > 0).then_some(u64::from(window)),
            cached_tokens: None,
            cached_hint: 0,
            told: false,
            prompt_logprobs: reports.then(|| vec![unknown]),
            guided: request.rule.as_ref().map(Guided::new),
            reasoning: request.reasoning.clone().map(Reasoning::new),
            closing: None,
            jumped: 0,
            drafts: Vec::new(),
            lookup: Lookup::default(),
            request,
        };
        start.emitted.into_iter().for_each(|token| sequence.append(token));
        sequence.look();
        sequence
    }

    /// Number of tokens, prompt and output.
    pub(crate) fn len(&self) -> usize {
        self.request.prompt.len() + self.output.len()
    }

    /// Number of tokens not computed so far; at least one.
    pub(crate) fn wanted(&self) -> usize {
        self.len() - self.computed
    }

    /// Returns true if the row of the sequence's last token is sampled: not for a prompt that is only computed.
    pub(crate) fn draws(&self) -> bool {
        !self.request.is_silent || !self.request.draws.is_empty()
    }

    /// Returns true if the window is used up: the sequence computes nothing until the reader takes some tokens.
    pub(crate) fn stalled(&self) -> bool {
        self.window == Some(0)
    }

    /// Number of prompt tokens with known log-probability, while they are being collected.
    pub(crate) fn collecting(&self) -> Option<usize> {
        let known = self.prompt_logprobs.as_ref()?.len();
        (known < self.request.prompt.len()).then_some(known)
    }

    /// Appends the `count` tokens that follow the computed ones to `out`.
    pub(crate) fn append_inputs(&self, count: usize, out: &mut Vec<u32>) {
        let (begin, end, split) = (self.computed, self.computed + count, self.request.prompt.len());
        out.extend_from_slice(&self.request.prompt[begin.min(split)..end.min(split)]);
        out.extend_from_slice(&self.output[begin.max(split) - split..end.max(split) - split]);
    }

    /// Drafts the tokens that may follow, `most` at most; returns their number.
    pub(crate) fn draft(&mut self, most: usize, price: f64) -> usize {
        // The token after the drafts is drawn too, and has to find room in the output and in the reader's window.
        let room = self.request.tokens_max.saturating_sub(self.len() + 1);
        let window = self.window.map_or(usize::MAX, |left| usize::try_from(left).unwrap_or(usize::MAX));
        let most = most.min(room).min(window.saturating_sub(1));
        let text = Text { prompt: &self.request.prompt, output: &self.output };
        self.lookup.propose(text, most, price, &mut self.drafts);
        self.drafts.len()
    }

    /// Records the drafts of a step: the number that stood, and whether the one after them was rejected.
    pub(crate) fn learn(&mut self, accepted: usize, rejected: bool, price: f64) {
        self.lookup.learn(accepted, rejected, price, self.output.len());
    }

    /// Appends an output token that the reader gets, and decides whether the next one is forced.
    pub(crate) fn say(&mut self, token: u32) {
        self.append(token);
        self.window = self.window.map(|left| left.saturating_sub(1));
        self.look();
    }

    /// Appends one output token, and counts it if a penalty needs the counts.
    pub(crate) fn append(&mut self, token: u32) {
        self.output.push(token);
        if self.request.params.penalized() {
            *self.counts.entry(token).or_insert(0) += 1;
        }
        if let Some(reasoning) = &mut self.reasoning {
            reasoning.follow(&self.output);
        }
        if let Some(guided) = self.guided.as_mut().filter(|_| !self.request.params.stop_tokens.contains(&token)) {
            guided.follow(&self.output);
        }
    }

    /// Decides whether the next token is forced; called once the tokens known so far are appended.
    pub(crate) fn look(&mut self) {
        self.closing = self.reasoning.as_ref().and_then(Reasoning::next);
        if let Some(guided) = &mut self.guided {
            self.closing = self.closing.filter(|token| guided.takes(*token));
            if self.closing.is_none() {
                guided.look(&self.request.params, &self.output);
            }
        }
    }

    /// Token that follows whatever the model says, if the choice goes on: one that closes the reasoning, or one that the
    /// grammar forces.
    pub(crate) fn forced(&self) -> Option<u32> {
        match self.guided.as_ref().map(Guided::next) {
            _ if self.closing.is_some() => self.closing,
            Some(Next::Forced(token)) => Some(token),
            _ => None,
        }
    }

    /// Returns true if the next token is drawn under a mask of the grammar.
    pub(crate) fn is_masked(&self) -> bool {
        self.closing.is_none() && self.guided.as_ref().is_some_and(|guided| guided.next() == Next::Masked)
    }

    /// Computes the mask of the next token, if it is drawn under one; returns the time that it took.
    pub(crate) fn mask(&mut self) -> Option<Duration> {
        let is_masked = self.is_masked();
        self.guided.as_mut().filter(|_| is_masked)?.mask()
    }

    /// Number of times that a spent budget has closed the reasoning.
    pub(crate) fn reasonings_closed(&self) -> u32 {
        self.reasoning.as_ref().map_or(0, Reasoning::closed)
    }

    /// Forced token that may be appended without a pass of its own: nothing is reported about it but its id, and its
    /// reader has room.
    pub(crate) fn jump(&self) -> Option<u32> {
        let may = self.request.params.logprobs.is_none() && !self.stalled() && self.finish().is_none();
        self.forced().filter(|_| may)
    }

    /// Returns true if the sequence decodes: all it lacks is its last token, and forced ones before it.
    pub(crate) fn decodes(&self) -> bool {
        self.wanted() <= 1 + self.jumped
    }

    /// Earlier tokens of the sequence, as far as penalties and forbidden words need them.
    pub(crate) fn history(&self) -> History<'_> {
        History {
            prompt: &self.request.prompt_set,
            counts: &self.counts,
            output_tokens: self.output.len(),
            output: &self.output,
            allowed: None,
        }
    }

    /// Hash of block `block`, which must be full.
    pub(crate) fn hash(&mut self, block: usize) -> BlockHash {
        let prompt_blocks = self.request.prompt_blocks();
        if block < prompt_blocks {
            return self.request.prompt_hashes[block];
        }
        while self.output_hashes.len() <= block - prompt_blocks {
            let next = prompt_blocks + self.output_hashes.len();
            let parent = self.output_hashes.last().or(self.request.prompt_hashes.last()).copied();
            let tokens: [u32; BLOCK_TOKENS] = std::array::from_fn(|i| self.token(next * BLOCK_TOKENS + i));
            self.output_hashes.push(self.request.hasher.block(parent, &tokens));
        }
        self.output_hashes[block - prompt_blocks]
    }

    fn token(&self, index: usize) -> u32 {
        let prompt = &self.request.prompt;
        prompt.get(index).copied().unwrap_or_else(|| self.output[index - prompt.len()])
    }

    /// Number of blocks that may be read from the cache: not the block of the last token, which draws the next, and
    /// none whose rows are wanted for prompt log-probabilities.
    pub(crate) fn readable_blocks(&self) -> usize {
        let first_needed = self.collecting().map_or(self.len() - 1, |known| known - 1);
        first_needed / BLOCK_TOKENS
    }

    /// Hash of the next block that it completes with its tokens.
    pub(crate) fn writing(&mut self) -> Option<BlockHash> {
        ((self.sealed + 1) * BLOCK_TOKENS <= self.len()).then(|| self.hash(self.sealed))
    }

    /// Takes the pages, last one first, which is the order of release.
    pub(crate) fn take_pages(&mut self) -> impl Iterator<Item = PageId> + use<> {
        (self.status, self.computed, self.sealed, self.jumped) = (Status::Waiting, 0, 0, 0);
        std::mem::take(&mut self.table).into_iter().rev().map(PageId)
    }

    /// Finish of the sequence, if its output ends it. Also true of output from an earlier attempt.
    pub(crate) fn finish(&self) -> Option<Finish> {
        let Request { params, tokens_max, .. } = &*self.request;
        let is_complete = self.guided.as_ref().is_some_and(Guided::is_complete);
        finish(self.output.last().copied(), &params.stop_tokens, is_complete, self.len() >= *tokens_max)
    }
}

/// Finish of a choice after its last token, if it ends. `is_complete`: its grammar lets nothing follow; `is_full`: it may
/// have no more tokens.
pub(crate) fn finish(last: Option<u32>, stop_tokens: &[u32], is_complete: bool, is_full: bool) -> Option<Finish> {
    if let Some(token) = last.filter(|token| stop_tokens.contains(token)) {
        return Some(Finish { reason: FinishReason::Stop as i32, stop_token: Some(token), ..Default::default() });
    }
    if is_complete {
        return Some(Finish { reason: FinishReason::Stop as i32, ..Default::default() });
    }
    is_full.then(|| Finish { reason: FinishReason::Length as i32, ..Default::default() })
}
