//! Sampled rows of a step: wanted for logits, for states or for both, and turned into a token or a vector.

use crate::forward::{AfterLayer, Forward};
use crate::guide::{Guided, Meter};
use crate::logits;
use crate::random::Draw;
use crate::sampler::{BadLogits, History, Sampler};
use crate::scheduler::Order;
use crate::sequence::Sequence;
use penstock_grammar::MatchError;
use penstock_kernels::{KernelError, Pick, SampledRow, SampledRows, StepBatch};
use penstock_proto::ErrorKind;
use penstock_proto::frames::{Token, TokenLogprobs};
use penstock_proto::transfer::FirstToken;

/// Result of one sampled row, before it is applied to its sequence.
pub(crate) struct Drawn {
    pub(crate) order: Order,
    /// Log-probabilities of the prompt token after this row.
    pub(crate) prompt: Option<TokenLogprobs>,
    /// Drawn tokens that equal their drafts; the sequence has them already.
    pub(crate) accepted: Vec<Token>,
    /// Next token drawn for the sequence; `None` if only log-probabilities or another worker's tokens were wanted, if
    /// its grammar lets nothing follow, or if the accepted drafts end or force what follows.
    pub(crate) token: Option<Token>,
    /// Number of times that a spent budget had closed the sequence's reasoning before this row.
    pub(crate) closed: u32,
    /// Next tokens drawn for another worker, one per choice.
    pub(crate) firsts: Vec<FirstToken>,
    /// State of the row, if that is the output; else empty.
    pub(crate) vector: Vec<f32>,
    /// True if this is the row of the sequence's last token, after which the sequence goes on or ends.
    pub(crate) last: bool,
}

impl Drawn {
    fn empty(order: Order) -> Self {
        let (accepted, firsts, vector) = (Vec::new(), Vec::new(), Vec::new());
        Self { order, prompt: None, accepted, token: None, closed: 0, firsts, vector, last: false }
    }
}

/// Result of the drafts of a sequence in one step.
pub(crate) struct Verified {
    /// Number of drafts from whose rows a token was drawn: their keys and values stand.
    pub(crate) kept: usize,
    /// True if a token was drawn that its draft does not equal.
    pub(crate) rejected: bool,
}

/// Reason why a row gives no token.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Trouble {
    #[error(transparent)]
    Logits(#[from] BadLogits),
    #[error(transparent)]
    Grammar(#[from] MatchError),
}

impl Trouble {
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            Trouble::Logits(BadLogits::NotFinite) => ErrorKind::ModelFailed,
            Trouble::Logits(BadLogits::NothingLeft) => ErrorKind::InvalidRequest,
            Trouble::Grammar(error) => unfit(error),
        }
    }
}

/// Kind of a grammar's failure in the middle of an output.
pub(crate) fn unfit(error: &MatchError) -> ErrorKind {
    match error {
        // The engine masks what it draws, so such a token came from elsewhere.
        MatchError::Rejected { .. } => ErrorKind::Internal,
        MatchError::TooComplex { .. } => ErrorKind::InvalidRequest,
    }
}

pub(crate) type Sampled = (Order, Result<Drawn, Trouble>);

/// Results that the sampled rows of a step are wanted for.
#[derive(Clone, Copy)]
pub(crate) struct Wants {
    pub(crate) states: bool,
    pub(crate) logits: bool,
}

impl Wants {
    /// Runs the step; returns its sampled rows, as `picks` asks for them or as logits, and leaves their states in `states`. A step
    /// with states has logits of all rows or of none.
    pub(crate) fn pass<'f>(
        self,
        forward: &'f mut dyn Forward,
        batch: &StepBatch<'_>,
        after_layer: AfterLayer<'_>,
        picks: &[Pick],
        states: &mut Vec<f32>,
    ) -> Result<SampledRows<'f>, KernelError> {
        match self.states {
            true => {
                let logits = forward.states(batch, after_layer, states, self.logits)?;
                Ok(SampledRows::whole(logits, picks.len()))
            }
            false => forward.sample(batch, after_layer, picks),
        }
    }
}

/// Way to what [`draw`] or [`verify`] make of a sampled row of `sequence`. `at`: position of the row, behind the last token for a draft.
pub(crate) fn pick(sequence: &Sequence, at: usize) -> Pick {
    let (request, params) = (&sequence.request, &sequence.request.params);
    if at + 1 < request.prompt.len() {
        return if params.prompt_logprobs.is_some() { Pick::Host } else { Pick::Best };
    }
    if params.logprobs.is_some() || request.rule.is_some() {
        return Pick::Host;
    }
    let choice = match (request.is_silent, request.draws.as_slice()) {
        (false, _) => Some(sequence.choice),
        (true, [choice]) => Some(*choice),
        (true, _) => None,
    };
    let drafts = (at + 1).saturating_sub(sequence.len());
    Sampler::pick(params, sequence.history(), choice.map(|choice| random(sequence, choice, drafts)))
}

/// Random numbers of the token that follows a sequence and `drafts` more tokens.
fn random(sequence: &Sequence, choice: u32, drafts: usize) -> Draw {
    Draw { seed: sequence.request.params.seed, choice, position: (sequence.output.len() + drafts) as u32, draw: 0 }
}

/// Takes the state of a prompt's last row as its vector.
pub(crate) fn pool(state: &[f32], order: Order) -> Result<Drawn, Trouble> {
    if !state.iter().all(|value| value.is_finite()) {
        return Err(BadLogits::NotFinite.into());
    }
    Ok(Drawn { vector: state.to_vec(), last: true, ..Drawn::empty(order) })
}

/// Samples one row: the prompt token it predicts, or the next token of the output. `at`: position of the row.
pub(crate) fn draw(
    sampler: &mut Sampler,
    row: SampledRow<'_>,
    order: Order,
    sequence: &Sequence,
    at: usize,
) -> Result<Drawn, Trouble> {
    let request = &sequence.request;
    let last = at + 1 == sequence.len();
    let mut drawn = Drawn { last, closed: sequence.reasonings_closed(), ..Drawn::empty(order) };
    if let Some(&token) = request.prompt.get(at + 1) {
        let wanted = sequence.collecting().is_some_and(|known| at + 1 >= known);
        if let (SampledRow::Logits(row), Some(k)) = (row, request.params.prompt_logprobs.filter(|_| wanted)) {
            drawn.prompt = Some(sampler.logprobs(row, token, k, &[])?);
        }
    } else if last && request.is_silent {
        let first = |&choice| Ok::<_, Trouble>(FirstToken { choice, token: next(sampler, row, sequence, choice)? });
        drawn.firsts = request.draws.iter().map(first).collect::<Result<_, _>>()?;
    } else if last && sequence.finish().is_none() {
        drawn.token = next(sampler, row, sequence, sequence.choice)?;
    }
    Ok(drawn)
}

/// Draws on from the rows of the drafts, in order, while the token before equals its draft: each token is
/// appended and the next one drawn as in a step of its own. A row that gives no token ends this; so do the end of the output
/// and a forced token, which needs no row. The next step comes to the same place.
pub(crate) fn verify<'f>(
    sampler: &mut Sampler,
    rows: impl Iterator<Item = SampledRow<'f>>,
    sequence: &mut Sequence,
    drawn: &mut Drawn,
    meter: &mut Meter,
) -> Verified {
    let drafts = std::mem::take(&mut sequence.drafts);
    let mut kept = 0;
    for (draft, row) in drafts.iter().zip(rows) {
        let Some(token) = drawn.token.take_if(|token| token.id == *draft) else { break };
        sequence.say(token.id);
        drawn.accepted.push(token);
        if sequence.finish().is_some() || sequence.stalled() || sequence.jump().is_some() {
            break;
        }
        sequence.mask().into_iter().for_each(|elapsed| meter.masked(elapsed));
        drawn.token = next(sampler, row, sequence, sequence.choice).ok().flatten();
        kept += usize::from(drawn.token.is_some());
    }
    let rejected = drawn.token.as_ref().is_some_and(|token| drafts.get(kept).is_some_and(|draft| token.id != *draft));
    sequence.drafts = drafts;
    Verified { kept, rejected }
}

/// Draws the token that follows a sequence, with the random numbers of `choice`; `None` if the grammar is satisfied and
/// no allowed token follows.
fn next(
    sampler: &mut Sampler,
    row: SampledRow<'_>,
    sequence: &Sequence,
    choice: u32,
) -> Result<Option<Token>, Trouble> {
    let params = &sequence.request.params;
    let row = match row {
        SampledRow::Logits(row) => row,
        // A forced token needs a sound row too.
        SampledRow::Token(token) => {
            let token = token.ok_or(BadLogits::NotFinite)?;
            return Ok(Some(Token { id: sequence.forced().unwrap_or(token), logprobs: None }));
        }
    };
    let id = match sequence.forced() {
        Some(forced) => logits::max(row).map(|_| forced).ok_or(BadLogits::NotFinite)?,
        None => {
            let draw = random(sequence, choice, 0);
            let guided = sequence.guided.as_ref();
            let allowed = guided.map(|guided| guided.allowed(sequence.output.len() < params.min_tokens)).transpose()?;
            let history = History { allowed: allowed.flatten(), ..sequence.history() };
            match sampler.sample(row, params, history, draw) {
                Err(BadLogits::NothingLeft) if guided.is_some_and(Guided::may_end) => return Ok(None),
                drawn => drawn?,
            }
        }
    };
    let logprobs = params.logprobs.map(|k| sampler.logprobs(row, id, k, &params.logprob_tokens)).transpose()?;
    Ok(Some(Token { id, logprobs }))
}
