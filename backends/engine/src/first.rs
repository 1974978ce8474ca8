//! First tokens that another engine drew while it computed the prompt: turned into outputs here, before the request is
//! submitted.
//!
//! One idea: a received token is like one of an earlier attempt. The request goes on after it (`emitted`), so the
//! second token is drawn here as after any other first token; and a choice that ends with its first token never starts
//! here.

use crate::guide::{Guided, Rule};
use crate::limits::Limits;
use crate::sequence::finish;
use penstock_proto::frames::{ChoiceStart, Generate, Output, Pooling, Sampling, Token};
use penstock_proto::transfer::First;

/// Turns first tokens into outputs; see [`crate::Engine::say_first`].
pub(crate) fn say(generate: &mut Generate, first: First, cached_tokens: u32, limits: &Limits) -> Option<Vec<Output>> {
    let sampling = generate.sampling.as_ref()?;
    // Drawn without a part of the sampling: not what this worker would draw.
    // A request for a vector gets no tokens, whatever was drawn for it.
    if generate.pooling != Pooling::None as i32 || !first.has().has(sampling.needs()) {
        return None;
    }
    let rule = match generate.grammar.clone() {
        None => None,
        Some(guide) => {
            let rule = Rule::new(guide, limits.grammars.as_deref(), &sampling.stop_tokens).ok()?;
            // Drawn under no grammar, or masked by other rules: not what this worker would draw.
            Some(rule).filter(|rule| rule.id() == first.grammar).map(Some)?
        }
    };
    let tokens: Vec<Token> = first
        .tokens
        .into_iter()
        .zip(&generate.choices)
        .map(|(first, start)| first.token.filter(|token| first.choice == start.index && fits(token, sampling, limits)))
        .collect::<Option<_>>()?;
    // Exactly one token per choice; a window of one cannot express that no room is left for another.
    if tokens.len() != generate.choices.len() || generate.window == 1 {
        return None;
    }
    let prompt = generate.prompt.len();
    let tokens_max = prompt.saturating_add(sampling.max_tokens as usize).min(limits.context_tokens);
    let cached_tokens = cached_tokens.max(first.cached_tokens).min(prompt as u32);
    let is_complete: Vec<bool> = match &rule {
        None => vec![false; tokens.len()],
        Some(rule) => {
            let after = |(token, start): (&Token, &ChoiceStart)| completes(rule, &start.emitted, token.id, sampling);
            tokens.iter().zip(&generate.choices).map(after).collect::<Option<_>>()?
        }
    };
    let mut outputs = Vec::with_capacity(tokens.len());
    for ((token, start), is_complete) in tokens.into_iter().zip(&mut generate.choices).zip(is_complete) {
        let at = start.emitted.len();
        start.emitted.push(token.id);
        outputs.push(Output {
            request: generate.request,
            attempt: generate.attempt,
            choice: start.index,
            at: at as u32,
            finish: finish(Some(token.id), &sampling.stop_tokens, is_complete, prompt + at + 1 >= tokens_max),
            tokens: vec![token],
            cached_tokens: Some(cached_tokens),
            ..Output::default()
        });
    }
    let mut ended = outputs.iter().map(|output| output.finish.is_some());
    generate.choices.retain(|_| !ended.next().unwrap_or(false));
    // 0 means no limit and stays 0.
    generate.window = generate.window.saturating_sub(1);
    Some(outputs)
}

/// Whether the grammar lets nothing follow after `token`; `None` if the token does not fit it.
fn completes(rule: &Rule, emitted: &[u32], token: u32, sampling: &Sampling) -> Option<bool> {
    let mut guided = Guided::new(rule);
    let output = [emitted, &[token]].concat();
    let text = (1..=output.len()).filter(|count| !sampling.stop_tokens.contains(&output[count - 1]));
    text.for_each(|count| guided.follow(&output[..count]));
    guided.failure().is_none().then(|| guided.is_complete())
}

/// Returns true if the sampling can give this token; a token is checked before it is passed on.
fn fits(token: &Token, sampling: &Sampling, limits: &Limits) -> bool {
    let exists = |token: u32| (token as usize) < limits.vocab_size;
    let told_max = i64::from(sampling.logprobs).max(sampling.logprob_tokens.len() as i64);
    let is_told = match &token.logprobs {
        None => sampling.logprobs < 0,
        Some(told) => {
            told.top_tokens.len() == told.top_logprobs.len()
                && told_max >= told.top_tokens.len() as i64
                && told.top_tokens.iter().all(|token| exists(*token))
        }
    };
    exists(token.id) && is_told
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_proto::frames::{BadWord, FinishReason, ReasoningBudget, TokenLogprobs};
    use penstock_proto::transfer::FirstToken;
    use penstock_proto::{Capabilities, Capability};

    fn generate(choices: u32) -> Generate {
        let sampling = Sampling { max_tokens: 10, logprobs: -1, stop_tokens: vec![7], ..Default::default() };
        let choices = (0..choices).map(|index| ChoiceStart { index, emitted: vec![] }).collect();
        Generate {
            request: 3,
            attempt: 2,
            prompt: vec![1; 20],
            choices,
            sampling: Some(sampling),
            ..Default::default()
        }
    }

    fn first(tokens: &[(u32, u32)]) -> First {
        let token = |&(choice, id): &(u32, u32)| FirstToken { choice, token: Some(Token { id, logprobs: None }) };
        First { tokens: tokens.iter().map(token).collect(), ..First::default() }
    }

    #[test]
    fn a_first_token_is_said_once_and_the_rest_goes_on_after_it() {
        let mut request = Generate { window: 8, ..generate(2) };
        let outputs = say(&mut request, first(&[(0, 5), (1, 7)]), 3, &Limits::small()).expect("they are its tokens");
        let told = |output: &Output| (output.request, output.attempt, output.choice, output.at, output.tokens[0].id);
        assert_eq!(outputs.iter().map(told).collect::<Vec<_>>(), [(3, 2, 0, 0, 5), (3, 2, 1, 0, 7)]);
        assert_eq!(outputs[0].finish, None);
        let end = outputs[1].finish.as_ref().expect("a stop token");
        assert_eq!((end.reason, end.stop_token), (FinishReason::Stop as i32, Some(7)));
        assert_eq!(request.choices, [ChoiceStart { index: 0, emitted: vec![5] }]);
        assert_eq!((request.window, outputs[0].cached_tokens), (7, Some(3)));
    }

    #[test]
    fn one_token_may_be_all() {
        let mut request = generate(1);
        request.sampling.as_mut().expect("set").max_tokens = 1;
        let outputs = say(&mut request, first(&[(0, 5)]), 0, &Limits::small()).expect("its token");
        assert_eq!(outputs[0].finish.as_ref().map(|end| end.reason), Some(FinishReason::Length as i32));
        assert!(request.choices.is_empty() && request.window == 0);
    }

    #[test]
    fn tokens_of_a_worker_that_passes_over_a_part_of_the_sampling_are_not_said() {
        for capability in Capability::ALL
            .into_iter()
            .filter(|capability| ![Capability::Vectors, Capability::Encoders, Capability::Chains].contains(capability))
        {
            let mut request = generate(1);
            let sampling = request.sampling.as_mut().expect("set");
            match capability {
                Capability::Unknown | Capability::Vectors | Capability::Encoders | Capability::Chains => {}
                Capability::BadWords => sampling.bad_words = vec![BadWord { tokens: vec![9] }],
                Capability::LogprobTokens => (sampling.logprobs, sampling.logprob_tokens) = (0, vec![5]),
                Capability::ReasoningBudgets => sampling.reasoning = Some(ReasoningBudget::default()),
            }
            let mut drawn = first(&[(0, 5)]);
            if capability == Capability::LogprobTokens {
                let logprobs = TokenLogprobs { top_tokens: vec![5], top_logprobs: vec![0.0], ..Default::default() };
                drawn.tokens[0].token.as_mut().expect("set").logprobs = Some(logprobs);
            }
            let without = First { capabilities: Capabilities::all().without(capability.into()).numbers(), ..drawn };
            assert_eq!(say(&mut request.clone(), without.clone(), 0, &Limits::small()), None, "{capability:?}");
            let with = First { capabilities: Capabilities::all().numbers(), ..without };
            assert!(say(&mut request, with, 0, &Limits::small()).is_some(), "{capability:?}");
        }
    }

    #[test]
    fn a_request_for_a_vector_is_said_no_token() {
        let mut request = Generate { pooling: Pooling::Last as i32, ..generate(1) };
        assert_eq!(say(&mut request, first(&[(0, 5)]), 0, &Limits::small()), None);
        assert!(say(&mut generate(1), first(&[(0, 5)]), 0, &Limits::small()).is_some());
    }

    #[test]
    fn tokens_of_another_request_are_not_said() {
        let wrong = [first(&[]), first(&[(0, 5)]), first(&[(1, 5), (0, 5)]), first(&[(0, 5), (1, 100)])];
        for (number, wrong) in wrong.into_iter().enumerate() {
            let mut request = generate(2);
            assert_eq!(say(&mut request, wrong, 0, &Limits::small()), None, "{number}");
            assert_eq!(request, generate(2), "{number}: nothing is changed");
        }
        let mut told = first(&[(0, 5)]);
        let logprobs = TokenLogprobs { top_tokens: vec![5], top_logprobs: vec![0.0], ..Default::default() };
        told.tokens[0].token.as_mut().expect("set").logprobs = Some(logprobs);
        assert_eq!(say(&mut generate(1), told.clone(), 0, &Limits::small()), None, "nobody asked for them");
        let mut asks = generate(1);
        asks.sampling.as_mut().expect("set").logprobs = 1;
        assert!(say(&mut asks.clone(), told, 0, &Limits::small()).is_some());
        assert_eq!(say(&mut asks, first(&[(0, 5)]), 0, &Limits::small()), None, "they are missing");
        assert_eq!(say(&mut Generate { window: 1, ..generate(1) }, first(&[(0, 5)]), 0, &Limits::small()), None);
    }
}
