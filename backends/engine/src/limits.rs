//! Bounds that a request is checked against, and the refusal of one that is beyond them.

use crate::forward::EncoderGeometry;
use crate::slots::Slots;
use penstock_grammar::Grammars;
use penstock_proto::ErrorKind;
use std::sync::Arc;

/// Bounds that a request is checked against.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) vocab_size: usize,
    /// Most tokens of a sequence, prompt and output.
    pub(crate) context_tokens: usize,
    pub(crate) choices_max: usize,
    pub(crate) logprobs_max: usize,
    pub(crate) prompt_logprobs_max: usize,
    pub(crate) numerics: String,
    /// Grammars over the model's vocabulary; `None` if there is no tokenizer.
    pub(crate) grammars: Option<Arc<Grammars>>,
    /// Components of a final state; 0 if the model gives none.
    pub(crate) state_width: usize,
    /// Dense layers that states go through behind their pooling.
    pub(crate) dense_layers: usize,
    /// True if the model has no head, so that no token can be drawn.
    pub(crate) headless: bool,
    /// Encoder, if the model is one.
    pub(crate) encoder: Option<EncoderGeometry>,
    /// Adapters that are loaded, by slot.
    pub(crate) adapters: Slots,
}

/// Refusal of a request, with the kind and message that the client gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) kind: ErrorKind,
    pub(crate) message: String,
}

/// Refuses a request as invalid unless `holds`.
pub(crate) fn check(holds: bool, message: impl FnOnce() -> String) -> Result<(), Refusal> {
    if holds { Ok(()) } else { Err(Refusal { kind: ErrorKind::InvalidRequest, message: message() }) }
}

/// Checks that the model knows all tokens of a field.
pub(crate) fn tokens_exist(field: &str, tokens: &[u32], limits: &Limits) -> Result<(), Refusal> {
    let out_of_range = tokens.iter().find(|token| **token as usize >= limits.vocab_size);
    out_of_range.map_or(Ok(()), |token| {
        check(false, || format!("{field}: token {token} is outside the vocabulary of {}", limits.vocab_size))
    })
}

#[cfg(test)]
impl Limits {
    /// Limits of a small model.
    pub(crate) fn small() -> Self {
        Self {
            vocab_size: 100,
            context_tokens: 64,
            choices_max: 4,
            logprobs_max: 5,
            prompt_logprobs_max: 40,
            numerics: String::new(),
            grammars: None,
            state_width: 0,
            dense_layers: 0,
            headless: false,
            encoder: None,
            adapters: Slots::loaded([7, 8].map(penstock_proto::AdapterId)),
        }
    }
}
