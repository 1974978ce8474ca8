//! Check of a request's token ids against the model's vocabulary, the only check that needs the model.

use crate::error::ApiError;
use crate::request::{Prompt, Request};

/// Refuses token ids from `vocab_size` on in prompts and inputs, `logit_bias`, `allowed_token_ids` and `logprob_token_ids`. A
/// stop token that does not exist is harmless and passes, as in vLLM.
pub fn check_token_ids(request: &Request, vocab_size: u32) -> Result<(), ApiError> {
    let sampling = match request {
        Request::Chat(chat) => &chat.sampling,
        Request::Complete(complete) => {
            check_prompts(&complete.prompts, "prompt", vocab_size)?;
            &complete.sampling
        }
        Request::Embed(embed) => return check_prompts(&embed.inputs, "input", vocab_size),
        Request::Rerank(_) => return Ok(()),
    };
    check(sampling.allowed_token_ids.iter().copied(), vocab_size, |index| format!("allowed_token_ids[{index}]"))?;
    check(sampling.logprob_token_ids.iter().copied(), vocab_size, |index| format!("logprob_token_ids[{index}]"))?;
    let biased = &sampling.logit_bias;
    check(biased.iter().map(|(id, _)| *id), vocab_size, |index| format!("logit_bias.{}", biased[index].0))
}

fn check_prompts(prompts: &[Prompt], field: &str, vocab_size: u32) -> Result<(), ApiError> {
    for (number, prompt) in prompts.iter().enumerate() {
        let Prompt::Tokens(ids) = prompt else { continue };
        let prefix = if prompts.len() == 1 { field.to_owned() } else { format!("{field}[{number}]") };
        check(ids.iter().copied(), vocab_size, |index| format!("{prefix}[{index}]"))?;
    }
    Ok(())
}

fn check(mut ids: impl Iterator<Item = u32>, vocab_size: u32, param: impl Fn(usize) -> String) -> Result<(), ApiError> {
    match ids.position(|id| id >= vocab_size) {
        None => Ok(()),
        Some(index) => {
            let param = param(index);
            let message = format!("{param}: not a token id of this model, which has {vocab_size}");
            Err(ApiError::invalid(param, message))
        }
    }
}
