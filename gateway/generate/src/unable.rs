//! Refusals of requests that no worker of the pool is able to answer.

use std::time::Duration;

use penstock_base::error::Failure;
use penstock_pool::Needs;
use penstock_proto::{Capability, ErrorKind};

/// Refusal of a request with an adapter that no worker of the pool has.
pub(super) fn lacks_adapter() -> Failure {
    let log = "no ready worker announces the adapter: were they started with it, and are all of them of this version?";
    let failure = Failure::new(ErrorKind::Unavailable, "No worker of this model has its adapter at present.");
    failure.log(log).retry_after(Duration::from_secs(1))
}

/// Refusal of a request that no worker of the pool can answer; names what each of them lacks, or else all that none has
/// together.
pub(super) fn unable(needs: &Needs, meets: &dyn Fn(&Needs) -> bool) -> Failure {
    const GRAMMAR: &str = "a grammar";
    let alone = || Needs { adapter: needs.adapter, ..Needs::default() };
    if !meets(&alone()) {
        return lacks_adapter();
    }
    let grammar = needs.grammar.clone().map(|id| (Needs { grammar: Some(id), ..alone() }, GRAMMAR));
    let fields = needs.capabilities.iter().map(|capability| {
        let field = match capability {
            // Vectors are no text's.
            Capability::Unknown | Capability::Vectors | Capability::Encoders | Capability::Chains => "",
            // Dropped before.
            Capability::ReasoningBudgets => "reasoning",
            Capability::BadWords => "bad_words",
            Capability::LogprobTokens => "logprob_token_ids",
        };
        (Needs { capabilities: capability.into(), ..alone() }, field)
    });
    let all: Vec<_> = grammar.into_iter().chain(fields).collect();
    let lacking: Vec<&str> = all.iter().filter(|(needs, _)| !meets(needs)).map(|(_, name)| *name).collect();
    let lacking = if lacking.is_empty() { all.iter().map(|(_, name)| *name).collect() } else { lacking };
    let message = format!("No worker of this model can follow {} at present.", lacking.join(" and "));
    let log = format!("no ready worker has the grammars {:?} and {:?}", needs.grammar, needs.capabilities);
    let failure = Failure::new(ErrorKind::Unavailable, message).log(log);
    match lacking.iter().find(|name| **name != GRAMMAR) {
        Some(field) => failure.param(*field),
        None => failure,
    }
}
