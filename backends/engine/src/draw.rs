//! Sampled rows of a step: wanted for logits, for states or for both, and turned into a token or a vector.

use crate::forward::{AfterLayer, Forward};
use crate::guide::Guided;
use crate::logits;
use crate::random::Draw;
use crate::sampler::{BadLogits, History, Sampler};
use crate::scheduler::Order;
use crate::sequence::Sequence;
use penstock_grammar::MatchError;
use penstock_kernels::{KernelError, StepBatch};
use penstock_proto::ErrorKind;
use penstock_proto::frames::{Token, TokenLogprobs};
use penstock_proto::transfer::FirstToken;

/// Result of one sampled row, before it is applied to its sequence.
pub(crate) struct Drawn {
    pub(crate) order: Order,
    /// Log-probabilities of the prompt token after this row.
    pub(crate) prompt: Option<TokenLogprobs>,
    /// Next token drawn for the sequence; `None` if only log-probabilities or another worker's tokens were wanted, or if
    /// its grammar lets nothing follow.
    pub(crate) token: Option<Token>,
    /// Next tokens drawn for another worker, one per choice.
    pub(crate) firsts: Vec<FirstToken>,
    /// State of the row, if that is the output; else empty.
    pub(crate) vector: Vec<f32>,
    /// True if this is the row of the sequence's last token, after which the sequence goes on or ends.
    pub(crate) last: bool,
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
    /// Runs the step; returns the logits of the sampled rows, all or none, and leaves their states in `states`.
    pub(crate) fn pass<'f>(
        self,
        forward: &'f mut dyn Forward,
        batch: &StepBatch<'_>,
        after_layer: AfterLayer<'_>,
        states: &mut Vec<f32>,
    ) -> Result<&'f [f32], KernelError> {
        match self.states {
            true => forward.states(batch, after_layer, states, self.logits),
            false => forward.forward(batch, after_layer),
        }
    }
}

/// Takes the state of a prompt's last row as its vector.
pub(crate) fn pool(state: &[f32], order: Order) -> Result<Drawn, Trouble> {
    if !state.iter().all(|value| value.is_finite()) {
        return Err(BadLogits::NotFinite.into());
    }
    Ok(Drawn { order, prompt: None, token: None, firsts: Vec::new(), vector: state.to_vec(), last: true })
}

/// Samples one row: the prompt token it predicts, or the next token of the output. `at`: position of the row.
pub(crate) fn draw(
    sampler: &mut Sampler,
    row: &[f32],
    order: Order,
    sequence: &Sequence,
    at: usize,
) -> Result<Drawn, Trouble> {
    let request = &sequence.request;
    let last = at + 1 == sequence.len();
    let mut drawn = Drawn { order, prompt: None, token: None, firsts: Vec::new(), vector: Vec::new(), last };
    if let Some(&token) = request.prompt.get(at + 1) {
        let wanted = sequence.collecting().is_some_and(|known| at + 1 >= known);
        if let Some(k) = request.params.prompt_logprobs.filter(|_| wanted) {
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

/// Draws the token that follows a sequence, with the random numbers of `choice`; `None` if the grammar is satisfied and
/// no allowed token follows.
fn next(sampler: &mut Sampler, row: &[f32], sequence: &Sequence, choice: u32) -> Result<Option<Token>, Trouble> {
    let params = &sequence.request.params;
    let id = match sequence.forced() {
        Some(forced) => logits::max(row).map(|_| forced).ok_or(BadLogits::NotFinite)?,
        None => {
            let draw = Draw { seed: params.seed, choice, position: sequence.output.len() as u32, draw: 0 };
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
