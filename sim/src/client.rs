//! A gateway's view of one request: what was sent, what came back, and the invariants between the two.

use penstock_engine::{Engine, EngineConfig, Geometry};
use penstock_proto::ErrorKind;
use penstock_proto::frames::{ChoiceStart, Finish, FinishReason, Generate, Output, Token, TokenLogprobs};
use std::collections::BTreeMap;
use std::time::Duration;

use crate::FakeForward;

/// Output of one choice, collected over all attempts.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// Tokens of all attempts together.
    pub tokens: Vec<Token>,
    /// Finish of the choice, once it has ended.
    pub finish: Option<Finish>,
    /// Log-probabilities of the prompt's tokens, as the first choice reports them.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Tokens that may still be sent in this attempt; `None` means any number.
    pub window: Option<u32>,
}

/// A request with its output so far, as a gateway would keep it.
#[derive(Clone, Debug)]
pub struct Client {
    /// The request as first sent.
    pub generate: Generate,
    /// Number of the current attempt, from 0; +1 at each resume.
    pub attempt: u32,
    /// Output of each choice, by its index.
    pub answers: BTreeMap<u32, Answer>,
}

impl Client {
    /// Creates the client of a request that is about to be sent.
    pub fn new(generate: Generate) -> Self {
        let window = (generate.window > 0).then_some(generate.window);
        let answer = Answer { window, ..Answer::default() };
        let answers = generate.choices.iter().map(|choice| (choice.index, answer.clone())).collect();
        Self { generate, attempt: 0, answers }
    }

    /// Choices that have not ended.
    pub fn open(&self) -> Vec<u32> {
        self.answers.iter().filter(|(_, answer)| answer.finish.is_none()).map(|(choice, _)| *choice).collect()
    }

    /// Frame that continues the request elsewhere; `None` when all choices have ended.
    pub fn resume(&mut self) -> Option<Generate> {
        let open = self.open();
        self.attempt += 1;
        let window = (self.generate.window > 0).then_some(self.generate.window);
        let start = |choice: &u32| {
            let emitted = self.answers[choice].tokens.iter().map(|token| token.id).collect();
            ChoiceStart { index: *choice, emitted }
        };
        let choices: Vec<_> = open.iter().map(start).collect();
        open.iter().for_each(|choice| self.answers.get_mut(choice).expect("open").window = window);
        (!choices.is_empty()).then(|| Generate { attempt: self.attempt, choices, ..self.generate.clone() })
    }

    /// Takes one output; true if the choice should be continued (its worker failed).
    ///
    /// # Panics
    /// If an index is emitted twice or skipped, the window is exceeded, or anything follows the end.
    pub fn take(&mut self, output: &Output) -> bool {
        if output.attempt != self.attempt {
            assert!(output.attempt < self.attempt, "an attempt that was not made yet");
            return false;
        }
        let request = output.request;
        let answer = self.answers.get_mut(&output.choice).expect("a choice that was asked for");
        assert!(answer.finish.is_none(), "output after the end of request {request}");
        let refused = output.finish.as_ref().is_some_and(|finish| finish.reason == FinishReason::Failed as i32);
        assert!(output.at as usize == answer.tokens.len() || refused, "request {request}: a token twice or lost");
        if let Some(window) = &mut answer.window {
            let sent = output.tokens.len() as u32;
            *window = window.checked_sub(sent).expect("the window is respected");
        }
        answer.tokens.extend(output.tokens.iter().cloned());
        if !output.prompt_logprobs.is_empty() {
            answer.prompt_logprobs.clone_from(&output.prompt_logprobs);
        }
        match &output.finish {
            Some(finish) if finish.error_kind == ErrorKind::WorkerFailed as i32 => return true,
            Some(finish) => answer.finish = Some(finish.clone()),
            None => {}
        }
        false
    }

    /// Compares each answer with the same choice run alone on a roomy engine, bit for bit; a cancelled one is a prefix of it.
    ///
    /// # Panics
    /// If they differ.
    pub fn check(&self, geometry: &Geometry, context_tokens: usize) {
        for (choice, answer) in &self.answers {
            let finish = answer.finish.as_ref().expect("every choice ends");
            let kind = ErrorKind::from_wire(finish.error_kind);
            if finish.reason == FinishReason::Failed as i32 && kind == ErrorKind::Overloaded {
                continue;
            }
            let alone = self.alone(*choice, geometry, context_tokens);
            let request = self.generate.request;
            let cancelled = finish.reason == FinishReason::Cancelled as i32;
            let compared = if cancelled { answer.tokens.len() } else { alone.tokens.len() };
            let head = alone.tokens.get(..compared).expect("not longer than alone");
            assert_eq!(
                bits(&answer.tokens),
                bits(head),
                "request {request} choice {choice} differs from its run alone"
            );
            if !cancelled {
                assert_eq!(Some(finish), alone.finish.as_ref(), "request {request} choice {choice} ends differently");
            }
            let first = self.generate.choices[0].index == *choice;
            let asked = self.generate.sampling.as_ref().is_some_and(|sampling| sampling.prompt_logprobs >= 0);
            let whole = finish.error_kind == 0 && !cancelled && self.attempt == 0;
            if !answer.prompt_logprobs.is_empty() || (first && asked && whole) {
                let logprobs = |list: &[TokenLogprobs]| list.iter().map(logprob_bits).collect::<Vec<_>>();
                let same = logprobs(&answer.prompt_logprobs) == logprobs(&alone.prompt_logprobs);
                assert!(same, "request {request}: prompt log-probabilities differ from its run alone");
            }
        }
    }

    /// Runs the choice alone on an engine of its own.
    fn alone(&self, choice: u32, geometry: &Geometry, context_tokens: usize) -> Answer {
        let pages = context_tokens.div_ceil(penstock_proto::BLOCK_TOKENS) + 2;
        let roomy = Geometry { pages, context_tokens, rows_max: 1 << 12, sampled_max: 1 << 12, ..geometry.clone() };
        let config = EngineConfig { batch_tokens: 1 << 12, chunk_tokens: 1 << 12, ..EngineConfig::default() };
        let mut engine = Engine::new(Box::new(FakeForward::new(roomy, 0)), &config);
        let mut generate = self.generate.clone();
        (generate.window, generate.attempt) = (0, 0);
        generate.choices = vec![ChoiceStart { index: choice, emitted: Vec::new() }];
        let mut client = Client::new(generate.clone());
        engine.submit(generate);
        while engine.has_work() {
            let step = engine.step(&|| Duration::ZERO);
            step.outputs.iter().for_each(|output| assert!(!client.take(output)));
        }
        client.answers.remove(&choice).expect("it was asked for")
    }
}

type LogprobBits = (u32, Vec<u32>, Vec<u32>, u32);

fn logprob_bits(l: &TokenLogprobs) -> LogprobBits {
    (l.logprob.to_bits(), l.top_tokens.clone(), l.top_logprobs.iter().map(|p| p.to_bits()).collect(), l.rank)
}

fn bits(tokens: &[Token]) -> Vec<(u32, Option<LogprobBits>)> {
    tokens.iter().map(|token| (token.id, token.logprobs.as_ref().map(logprob_bits))).collect()
}
