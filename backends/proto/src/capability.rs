//! Capabilities: fields of a request that came after the first version of the contract, and that a worker of an earlier
//! version would pass over without a word.
//!
//! A worker announces the capabilities that it has; a request needs those of the fields that it sets ([`Sampling::needs`],
//! [`Pooling::needs`] and [`Pooling::chain_needs`], the one place that says so), and goes to no worker that lacks one. A later field belongs to one of four
//! classes, which the tests of this file hold it to: it needs a capability; it is a grammar (which has an id of its own, since
//! workers must mask alike and not only mask); it is an adapter (which has an id of its own too: a worker announces those that it
//! has loaded); or it costs time alone where it is passed over.

use crate::AdapterId;
use crate::frames::{Pooling, Ready, Sampling};
use crate::transfer::First;

/// Ability of a worker that earlier workers lack. Numbers are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum Capability {
    /// Number without a meaning, so that an absent one means nothing.
    Unknown = 0,
    /// [`Sampling::reasoning`] is enforced.
    ReasoningBudgets = 1,
    /// [`Sampling::bad_words`] are not drawn.
    BadWords = 2,
    /// Log-probabilities of [`Sampling::logprob_tokens`] are told.
    LogprobTokens = 3,
    /// Requests with a [`Pooling`] get a vector; earlier workers would generate text.
    Vectors = 4,
    /// Requests with a [`Pooling`] of encoders, or with a second text, are computed as these fields say.
    Encoders = 5,
    /// Requests with a [`Pooling`] by the maximum or another mean, from a later token on, or through dense layers, are computed as these fields say.
    Chains = 6,
}

impl Capability {
    /// Capabilities of this version.
    pub const ALL: [Self; 6] =
        [Self::ReasoningBudgets, Self::BadWords, Self::LogprobTokens, Self::Vectors, Self::Encoders, Self::Chains];

    fn bit(self) -> u32 {
        match self {
            Self::Unknown => 0,
            known => 1 << known as u32,
        }
    }
}

/// Set of capabilities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Capabilities(u32);

impl Capabilities {
    /// Set without a capability: what a worker of the first version has.
    pub const NONE: Self = Self(0);

    /// All capabilities of this version.
    pub fn all() -> Self {
        Capability::ALL.into_iter().collect()
    }

    /// Set of announced numbers; those of later versions are left out.
    pub fn of_numbers(numbers: &[i32]) -> Self {
        numbers.iter().filter_map(|number| Capability::try_from(*number).ok()).collect()
    }

    /// Numbers of the set, as frames carry them.
    pub fn numbers(self) -> Vec<i32> {
        self.iter().map(|capability| capability as i32).collect()
    }

    /// Capabilities of the set, in ascending order of their numbers.
    pub fn iter(self) -> impl Iterator<Item = Capability> {
        Capability::ALL.into_iter().filter(move |capability| self.0 & capability.bit() != 0)
    }

    /// Returns true if the set has every capability of `others`.
    pub fn has(self, others: Self) -> bool {
        others.0 & !self.0 == 0
    }

    /// The set without those of `others`.
    #[must_use]
    pub fn without(self, others: Self) -> Self {
        Self(self.0 & !others.0)
    }

    /// Capabilities of either set.
    #[must_use]
    pub fn and(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }
}

impl FromIterator<Capability> for Capabilities {
    fn from_iter<I: IntoIterator<Item = Capability>>(capabilities: I) -> Self {
        Self(capabilities.into_iter().fold(0, |bits, capability| bits | capability.bit()))
    }
}

impl From<Capability> for Capabilities {
    fn from(capability: Capability) -> Self {
        Self(capability.bit())
    }
}

impl Sampling {
    /// Capabilities that a worker needs to sample as these parameters say.
    pub fn needs(&self) -> Capabilities {
        let Self { bad_words, logprob_tokens, reasoning, .. } = self;
        let needed = [
            (Capability::BadWords, !bad_words.is_empty()),
            // Without log-probabilities there is nothing to tell.
            (Capability::LogprobTokens, !logprob_tokens.is_empty() && self.logprobs >= 0),
            (Capability::ReasoningBudgets, reasoning.is_some()),
        ];
        needed.into_iter().filter_map(|(capability, is_needed)| is_needed.then_some(capability)).collect()
    }
}

impl Pooling {
    /// Capabilities that a worker needs for a request with this rule.
    pub fn needs(self) -> Capabilities {
        match self {
            Self::None => Capabilities::NONE,
            Self::Last => Capability::Vectors.into(),
            Self::First | Self::Mean | Self::Head => Capability::Encoders.into(),
            Self::RootMean | Self::WeightedMean | Self::Max => {
                Capabilities::from(Capability::Encoders).and(Capability::Chains.into())
            }
        }
    }

    /// Capabilities that a worker needs for a vector that goes through dense layers, or that is pooled from a later token than the first.
    pub fn chain_needs(dense_layers: u32, pooled_from: u32) -> Capabilities {
        if dense_layers > 0 || pooled_from > 0 { Capability::Chains.into() } else { Capabilities::NONE }
    }
}

impl Ready {
    /// Capabilities of the worker.
    pub fn has(&self) -> Capabilities {
        with_budgets(&self.capabilities, self.reasoning_budgets)
    }
}

impl Ready {
    /// Adapters of the worker by their names, in its order; one without a valid id is left out.
    pub fn loaded(&self) -> impl Iterator<Item = (&str, AdapterId)> {
        self.adapters.iter().filter_map(|adapter| Some((adapter.name.as_str(), AdapterId::from_bytes(&adapter.id)?)))
    }
}

impl First {
    /// Capabilities with which the tokens were drawn.
    pub fn has(&self) -> Capabilities {
        with_budgets(&self.capabilities, self.reasoning_budget)
    }
}

/// Capabilities of a list of numbers, and of the flag that announced the first one before there was a list.
fn with_budgets(numbers: &[i32], reasoning_budgets: bool) -> Capabilities {
    let budgets = if reasoning_budgets { Capability::ReasoningBudgets } else { Capability::Unknown };
    Capabilities::of_numbers(numbers).and(budgets.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::{BadWord, ChoiceStart, Generate, Guide, LogitBias, ReasoningBudget};
    use prost::Message;
    use prost::encoding::{DecodeContext, WireType, decode_key, skip_field};

    /// Sampling with every field set to what is not its default. A new field is an error here: it belongs to a class.
    fn sampling() -> Sampling {
        Sampling {
            temperature: 1.0,
            top_k: 1,
            top_p: 1.0,
            min_p: 1.0,
            presence_penalty: 1.0,
            frequency_penalty: 1.0,
            repetition_penalty: 1.0,
            logit_bias: vec![LogitBias { token: 1, bias: 1.0 }],
            seed: 1,
            max_tokens: 1,
            min_tokens: 1,
            stop_tokens: vec![1],
            logprobs: 1,
            prompt_logprobs: 1,
            allowed_tokens: vec![1],
            bad_words: vec![BadWord { tokens: vec![1] }],
            logprob_tokens: vec![1],
            reasoning: Some(ReasoningBudget { tokens: 1, ..ReasoningBudget::default() }),
        }
    }

    /// Request with every field set to what is not its default. A new field is an error here: it belongs to a class.
    fn generate() -> Generate {
        Generate {
            request: 1,
            attempt: 1,
            prompt: vec![1],
            choices: vec![ChoiceStart { index: 1, emitted: vec![1] }],
            sampling: Some(Sampling { temperature: 1.0, ..Sampling::default() }),
            salt: vec![1],
            priority: 1,
            window: 1,
            prefill_at: "a".into(),
            pull_from: "a".into(),
            turn: 1,
            prefill_next: vec!["a".into()],
            prefill_next_tokens: 1,
            waiting: 1,
            grammar: Some(Guide { kind: 1, ..Guide::default() }),
            pooling: Pooling::Last as i32,
            adapter: vec![1; 16],
            second_text: 1,
            dense_layers: 1,
            pooled_from: 1,
        }
    }

    /// Fields of a message: their tags, and each encoded alone.
    fn fields(message: &impl Message) -> Vec<(u32, Vec<u8>)> {
        let wire = message.encode_to_vec();
        let mut rest = &wire[..];
        let mut fields = Vec::new();
        while !rest.is_empty() {
            let from = wire.len() - rest.len();
            let (tag, kind): (u32, WireType) = decode_key(&mut rest).expect("our own");
            skip_field(kind, tag, &mut rest, DecodeContext::default()).expect("our own");
            fields.push((tag, wire[from..wire.len() - rest.len()].to_vec()));
        }
        fields
    }

    /// Fields of the first version, which every worker knows.
    const SAMPLING_FIRST: [u32; 15] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
    const GENERATE_FIRST: [u32; 9] = [1, 2, 3, 4, 5, 6, 7, 8, 9];
    /// Later fields that cost time alone where they are passed over: `pull_from`, `turn`, `prefill_next`,
    /// `prefill_next_tokens`, `waiting`.
    const GENERATE_HINTS: [u32; 5] = [10, 11, 12, 13, 14];
    /// Grammar, which goes to workers of its own id alone.
    const GENERATE_GRAMMAR: u32 = 15;
    /// Rule of a vector, which needs a capability.
    const GENERATE_POOLING: u32 = 20;
    /// Adapter, which goes to workers that announce its id alone.
    const GENERATE_ADAPTER: u32 = 21;

    /// Second text, which is sent only with the pooling of a classification head, and that pooling needs the capability.
    const GENERATE_SECOND_TEXT: u32 = 22;
    /// Dense layers and first pooled token, which need a capability.
    const GENERATE_CHAIN: [u32; 2] = [23, 24];

    #[test]
    fn every_field_of_a_request_is_known_to_all_workers_or_needs_a_capability() {
        let all = fields(&sampling());
        assert_eq!(all.len(), 18, "a field each");
        for (tag, wire) in all {
            // Log-probabilities are off at −1, and a list of tokens is used only with them: 0 is on.
            let alone = Sampling::decode(&wire[..]).expect("our own");
            assert_eq!(alone.needs() == Capabilities::NONE, SAMPLING_FIRST.contains(&tag), "sampling, field {tag}");
        }
        let needed = sampling().needs().and(Pooling::Last.needs()).and(Pooling::Head.needs()).and(Pooling::Max.needs());
        assert_eq!(needed, Capabilities::all(), "a capability is of a field");
        assert_eq!(Pooling::None.needs(), Capabilities::NONE);
        assert_eq!(Pooling::chain_needs(0, 0), Capabilities::NONE);
        for (dense_layers, pooled_from) in [(1, 0), (0, 1)] {
            assert_eq!(Pooling::chain_needs(dense_layers, pooled_from), Capability::Chains.into());
        }
        let all = fields(&generate());
        assert_eq!(all.len(), 20, "a field each");
        for (tag, _) in all {
            let alone = [GENERATE_GRAMMAR, GENERATE_POOLING, GENERATE_ADAPTER, GENERATE_SECOND_TEXT].contains(&tag);
            let alone = alone || GENERATE_CHAIN.contains(&tag);
            let classes = [GENERATE_FIRST.contains(&tag), GENERATE_HINTS.contains(&tag), alone];
            assert_eq!(classes.into_iter().filter(|is_of| *is_of).count(), 1, "request, field {tag}");
        }
    }

    #[test]
    fn log_probabilities_of_tokens_are_needed_where_any_are_told() {
        assert_eq!(
            Sampling { logprobs: -1, logprob_tokens: vec![1], ..Sampling::default() }.needs(),
            Capabilities::NONE
        );
    }

    #[test]
    fn earlier_and_later_workers_are_understood() {
        assert_eq!(Ready::default().has(), Capabilities::NONE);
        let budgets = Capabilities::from(Capability::ReasoningBudgets);
        assert_eq!(Ready { reasoning_budgets: true, ..Ready::default() }.has(), budgets);
        assert_eq!(First { reasoning_budget: true, ..First::default() }.has(), budgets);
        let loaded = [("sql", vec![7; 16]), ("later", vec![7; 32])].map(|(name, id)| crate::frames::LoadedAdapter {
            name: name.into(),
            id,
            key: String::new(),
        });
        let adapted = Ready { adapters: loaded.to_vec(), ..Ready::default() };
        assert_eq!(adapted.loaded().map(|(name, _)| name).collect::<Vec<_>>(), ["sql"]);
        let later = Ready { capabilities: vec![0, 2, 99, -1], ..Ready::default() };
        assert_eq!(later.has(), Capability::BadWords.into());
        let all = Capabilities::all();
        assert_eq!(Capabilities::of_numbers(&all.numbers()), all);
        assert!(all.has(budgets) && !budgets.has(all) && !all.without(budgets).has(budgets));
        assert!(budgets.has(Capabilities::NONE));
    }
}
