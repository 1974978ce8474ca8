//! Outputs of a choice as the gateway gets them, filled from its sequence.

use crate::sequence::Sequence;
use penstock_proto::ErrorKind;
use penstock_proto::frames::{Finish, FinishReason, Output, Token};

/// Most forced tokens that one step appends to a sequence; the next ones follow with the next step.
const JUMP_MAX: usize = 256;

/// Appends a drawn token to a sequence, if there is one, and the forced ones after it.
pub(crate) fn extend(sequence: &mut Sequence, token: Option<Token>, tokens: &mut Vec<Token>) {
    sequence.jumped = 0;
    if let Some(token) = token {
        sequence.say(token.id);
        tokens.push(token);
    }
    while let Some(id) = sequence.jump().filter(|_| sequence.jumped < JUMP_MAX) {
        sequence.jumped += 1;
        sequence.say(id);
        tokens.push(Token { id, logprobs: None });
    }
}

/// Empty output of a choice.
pub(crate) fn output(sequence: &Sequence) -> Output {
    Output {
        request: sequence.request.id.0,
        attempt: sequence.request.attempt,
        choice: sequence.choice,
        at: sequence.output.len() as u32,
        ..Default::default()
    }
}

/// Adds the fields that only the first output of a choice carries.
pub(crate) fn first_output(sequence: &mut Sequence, output: &mut Output) {
    if !std::mem::replace(&mut sequence.told, true) {
        output.cached_tokens = Some(sequence.cached_tokens.unwrap_or(0));
        // A choice that ended early knows only a part of the prompt's log-probabilities and reports none.
        let known = sequence.collecting().is_none().then(|| sequence.prompt_logprobs.take());
        output.prompt_logprobs = known.flatten().unwrap_or_default();
    }
}

/// End of a choice that cannot go on, with the reason.
pub(crate) fn failed(kind: ErrorKind, message: String) -> Finish {
    Finish { reason: FinishReason::Failed as i32, stop_token: None, error_kind: kind as i32, message }
}
