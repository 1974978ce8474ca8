//! State of one request: its job and the tokens it has emitted. A worker's copy is only a cache of it.
//!
//! Output is emitted exactly once: an [`Output`] of an older attempt is dropped, tokens before `emitted.len()` are cut
//! off, and a hole is the worker's fault ([`Violation`]). From this state a request goes on at any worker
//! ([`Truth::generate`]), at any token, with any number of its choices finished. Pure; the actor does the sending.

use super::job::Job;
use penstock_proto::frames::{ChoiceStart, FinishReason, Generate, Output, Pooling, Window};
use penstock_proto::{Epoch, ErrorKind, RequestId};
use std::sync::Arc;

/// Most attempts of one request that end in a loss, whatever the cause; guards against a flapping fleet.
pub(super) const ATTEMPTS_MAX: u32 = 16;

/// Worker processes that may die while they run one request before the request counts as their killer.
const DEATHS_MAX: usize = 2;

/// Breach of the protocol by a worker; nothing of its session can be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Violation(pub(super) &'static str);

#[derive(Debug, Default)]
struct Choice {
    emitted: Vec<u32>,
    /// Output tokens that the worker may emit, over all attempts.
    allowed: u32,
    closed: bool,
    /// True if the first output, with `cached_tokens` and prompt logprobs, has been handed out.
    begun: bool,
}

/// Consequence of an output that the request's record has accepted.
#[derive(Debug, PartialEq)]
pub(super) enum Accepted {
    /// Tokens that the client has not had yet, to be handed to the ticket.
    Deliver(Output),
    /// The output brought no token that is new to the client.
    Nothing {
        /// Number of tokens dropped, as repeats or as those of an older attempt.
        dropped: usize,
    },
    /// The worker could not run the request; another one, or the same one later, may.
    Elsewhere,
    /// The worker had no room for a request that has begun; another one, or the same one later, has.
    Full,
}

/// State of one request that outlives its workers; see the module header.
#[derive(Debug)]
pub(super) struct Truth {
    pub(super) job: Job,
    pub(super) attempt: u32,
    /// Attempts that ended in the loss of their worker. Attempts that ended in a move are no sign of trouble.
    losses: u32,
    choices: Vec<Choice>,
    /// Numerics of the tokens emitted so far, once there are any.
    pub(super) numerics_id: Option<Arc<str>>,
    /// True if the log-probabilities of the prompt have been handed to the ticket.
    prompt_told: bool,
    /// True if this attempt has emitted a new token.
    advanced: bool,
    /// Epochs of workers that died while they ran the request, since it last advanced.
    deaths: Vec<Epoch>,
}

impl Truth {
    /// A request without output; each choice may emit `window` tokens.
    pub(super) fn new(job: Job, window: u32) -> Self {
        let choices = (0..job.choices).map(|_| Choice { allowed: window, ..Choice::default() }).collect();
        Self {
            job,
            attempt: 0,
            losses: 0,
            choices,
            numerics_id: None,
            prompt_told: false,
            advanced: false,
            deaths: Vec::new(),
        }
    }

    /// Number of choices that have not ended.
    pub(super) fn open(&self) -> u32 {
        self.choices.iter().filter(|choice| !choice.closed).count() as u32
    }

    /// Returns true if any choice has emitted a token.
    pub(super) fn has_begun(&self) -> bool {
        self.choices.iter().any(|choice| !choice.emitted.is_empty())
    }

    /// Returns true if the client has an output of any choice, be it only what was cached of the prompt.
    pub(super) fn has_told(&self) -> bool {
        self.choices.iter().any(|choice| choice.begun)
    }

    /// Tokens that a worker must hold before it can go on: the prompt and, with a single open choice, that choice's output.
    pub(super) fn tokens(&self) -> Arc<[u32]> {
        let mut open = self.choices.iter().filter(|choice| !choice.closed);
        match (open.next(), open.next()) {
            (Some(only), None) if !only.emitted.is_empty() => [&self.job.prompt[..], &only.emitted].concat().into(),
            _ => Arc::clone(&self.job.prompt),
        }
    }

    /// Frames that start or continue the request: one [`Generate`], and a [`Window`] for each choice with more room
    /// than the least of them, since [`Generate`] carries one number.
    pub(super) fn generate(&mut self, request: RequestId) -> (Generate, Vec<Window>) {
        let open = || self.choices.iter().enumerate().filter(|(_, choice)| !choice.closed);
        let room = |choice: &Choice| choice.allowed.saturating_sub(choice.emitted.len() as u32);
        // 0 would mean no limit, so a choice whose window is used up may emit one token more.
        let window = open().map(|(_, choice)| room(choice)).min().unwrap_or(1).max(1);
        let windows = open()
            .filter(|(_, choice)| room(choice) > window)
            .map(|(at, choice)| Window { request: request.0, choice: at as u32, tokens: room(choice) - window })
            .collect();
        let starts =
            open().map(|(at, choice)| ChoiceStart { index: at as u32, emitted: choice.emitted.clone() }).collect();
        let mut sampling = self.job.sampling.clone();
        if self.prompt_told {
            sampling.prompt_logprobs = -1;
        }
        let generate = Generate {
            request: request.0,
            attempt: self.attempt,
            prompt: self.job.prompt.to_vec(),
            choices: starts,
            sampling: Some(sampling),
            salt: self.job.salt.to_vec(),
            priority: self.job.priority,
            window,
            prefill_at: String::new(),
            pull_from: String::new(),
            turn: penstock_router::FIRST,
            prefill_next: Vec::new(),
            prefill_next_tokens: 0,
            waiting: 0,
            grammar: self.job.grammar.as_ref().map(|grammar| grammar.guide.clone()),
            pooling: self.job.pooling as i32,
            adapter: self.job.adapter.map(|id| id.to_bytes().to_vec()).unwrap_or_default(),
            second_text: self.job.second_text,
            dense_layers: self.job.dense_layers,
            pooled_from: self.job.pooled_from,
        };
        for choice in self.choices.iter_mut().filter(|choice| !choice.closed) {
            choice.allowed = choice.allowed.max(choice.emitted.len() as u32 + window);
        }
        (generate, windows)
    }

    /// Takes in an output of one choice.
    ///
    /// # Errors
    /// [`Violation`] for a choice that does not exist, a hole, tokens beyond the window, or more than were asked for.
    pub(super) fn accept(&mut self, mut output: Output, numerics_id: &Arc<str>) -> Result<Accepted, Violation> {
        let count = output.tokens.len();
        if output.attempt != self.attempt {
            return Ok(Accepted::Nothing { dropped: count });
        }
        let goes_on = output.finish.is_some() && self.has_begun();
        let choice = self
            .choices
            .get_mut(output.choice as usize)
            .ok_or(Violation("output of a choice that was not asked for"))?;
        if choice.closed {
            return Ok(Accepted::Nothing { dropped: count });
        }
        if let Some(finish) = &output.finish
            && finish.reason == FinishReason::Failed as i32
        {
            let kind = ErrorKind::from_wire(finish.error_kind);
            // A stream that has begun was admitted, and is not refused for want of room.
            if kind == ErrorKind::Overloaded && goes_on {
                return Ok(Accepted::Full);
            }
            if matches!(kind, ErrorKind::Draining | ErrorKind::WorkerFailed) {
                return Ok(Accepted::Elsewhere);
            }
        }
        let (at, have) = (output.at as usize, choice.emitted.len());
        if at > have && count > 0 {
            return Err(Violation("tokens are missing before this output"));
        }
        let twice = (have - at.min(have)).min(count);
        // Checked before anything is kept: tokens that were not handed out were not emitted, and come again from the next worker.
        let comes_to = have + (count - twice);
        if comes_to > choice.allowed as usize {
            return Err(Violation("tokens beyond the window"));
        }
        if comes_to > self.job.sampling.max_tokens as usize {
            return Err(Violation("more tokens than were asked for"));
        }
        if self.job.pooling == Pooling::None && !output.vector.is_empty() {
            return Err(Violation("a vector that was not asked for"));
        }
        output.tokens.drain(..twice);
        output.at = have as u32;
        choice.emitted.extend(output.tokens.iter().map(|token| token.id));
        if choice.begun {
            output.cached_tokens = None;
        }
        if self.prompt_told {
            output.prompt_logprobs.clear();
        }
        choice.closed = output.finish.is_some();
        if output.tokens.is_empty()
            && output.finish.is_none()
            && output.cached_tokens.is_none()
            && output.prompt_logprobs.is_empty()
        {
            return Ok(Accepted::Nothing { dropped: twice });
        }
        choice.begun = true;
        self.prompt_told |= !output.prompt_logprobs.is_empty();
        if !output.tokens.is_empty() {
            self.advanced = true;
            self.numerics_id = Some(Arc::clone(numerics_id));
        }
        Ok(Accepted::Deliver(output))
    }

    /// Grants a choice as many tokens as the handler took. `None` when the choice has ended.
    pub(super) fn grant(&mut self, request: RequestId, choice: u32, tokens: u32) -> Option<Window> {
        let state = self.choices.get_mut(choice as usize).filter(|state| !state.closed)?;
        state.allowed = state.allowed.saturating_add(tokens);
        Some(Window { request: request.0, choice, tokens })
    }

    /// Closes a choice that the handler needs no more of. False when the choice had ended already.
    pub(super) fn close(&mut self, choice: u32) -> bool {
        self.choices.get_mut(choice as usize).is_some_and(|state| !std::mem::replace(&mut state.closed, true))
    }

    /// Notes the loss of this attempt's worker. `died`: epoch of the worker, if its process ended while it ran the
    /// request (not when it was given up or drained). False when the request must not be tried again.
    ///
    /// A request that emitted tokens there did not kill the worker by being started: another request beside it may have.
    pub(super) fn lose(&mut self, died: Option<Epoch>) -> bool {
        self.attempt += 1;
        self.losses += 1;
        if std::mem::take(&mut self.advanced) {
            self.deaths.clear();
        } else if let Some(epoch) = died
            && !self.deaths.contains(&epoch)
        {
            self.deaths.push(epoch);
        }
        self.deaths.len() < DEATHS_MAX && self.losses < ATTEMPTS_MAX
    }

    /// Leaves a worker that lives, for another one or because it has no room: later output of the old worker is dropped.
    pub(super) fn leave(&mut self) {
        self.attempt += 1;
        if std::mem::take(&mut self.advanced) {
            self.deaths.clear();
        }
    }

    /// Per open choice, the tokens whose KV its worker has computed: all but the last, which the next step reads.
    pub(super) fn computed(&self) -> Vec<(u32, Vec<u32>)> {
        let open = self.choices.iter().enumerate().filter(|(_, choice)| !choice.closed);
        open.map(|(at, choice)| {
            let mut tokens = [&self.job.prompt[..], &choice.emitted].concat();
            tokens.pop();
            (at as u32, tokens)
        })
        .collect()
    }

    /// Upper bound of the size of the frame that continues the request, in bytes.
    pub(super) fn frame_bytes(&self) -> usize {
        // A token takes five bytes at most. The rest (sampling with its lists) is as large as it was at the first binding.
        let emitted: usize =
            self.choices.iter().filter(|choice| !choice.closed).map(|choice| choice.emitted.len()).sum();
        let sampling = &self.job.sampling;
        let words: usize = sampling.bad_words.iter().map(|word| word.tokens.len() + 2).sum();
        let ids = sampling.allowed_tokens.len() + sampling.stop_tokens.len() + sampling.logprob_tokens.len();
        let lists = ids + words + 2 * sampling.logit_bias.len();
        let guide = self.job.grammar.as_ref().map(|grammar| &grammar.guide);
        let grammar = guide.map_or(0, |guide| guide.text.len() + 5 * guide.begins_after.len());
        let budget = sampling.reasoning.as_ref().map_or(0, |budget| {
            let tokens = budget.closing.len() + budget.closing_again.len();
            budget.opening.len() + budget.ending.len() + 5 * tokens
        });
        5 * (self.job.prompt.len() + emitted)
            + 8 * lists
            + 32 * self.choices.len()
            + self.job.salt.len()
            + grammar
            + budget
            + 1024
    }

    /// Largest number of output tokens that an open choice may still get.
    pub(super) fn left(&self) -> u32 {
        let open = self.choices.iter().filter(|choice| !choice.closed);
        open.map(|choice| self.job.sampling.max_tokens.saturating_sub(choice.emitted.len() as u32)).max().unwrap_or(0)
    }

    /// Returns true if every open choice has a token, so prefill is over.
    pub(super) fn decodes(&self) -> bool {
        self.open() > 0 && self.choices.iter().all(|choice| choice.closed || !choice.emitted.is_empty())
    }

    /// Returns true if workers died of the request, as far as can be known; selects the message.
    pub(super) fn is_suspect(&self) -> bool {
        self.deaths.len() >= DEATHS_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::super::job::tests::job;
    use super::*;
    use penstock_proto::AdapterId;
    use penstock_proto::frames::{Finish, Token};
    use proptest::prelude::*;

    fn output(attempt: u32, choice: u32, at: u32, tokens: &[u32]) -> Output {
        let tokens = tokens.iter().map(|id| Token { id: *id, logprobs: None }).collect();
        Output { attempt, choice, at, tokens, ..Default::default() }
    }

    fn numerics() -> Arc<str> {
        "test".into()
    }

    #[track_caller]
    fn delivered(truth: &mut Truth, output: Output) -> (u32, Vec<u32>) {
        match truth.accept(output, &numerics()) {
            Ok(Accepted::Deliver(output)) => (output.at, output.tokens.iter().map(|t| t.id).collect()),
            other => panic!("not delivered: {other:?}"),
        }
    }

    #[test]
    fn a_request_goes_on_where_it_was() {
        let mut truth = Truth::new(Job { adapter: Some(AdapterId(7)), ..job(2) }, 10);
        let prompt_logprobs = vec![penstock_proto::frames::TokenLogprobs::default(); 3];
        delivered(&mut truth, Output { prompt_logprobs, ..output(0, 0, 0, &[7, 8]) });
        delivered(&mut truth, Output { finish: Some(Finish::default()), ..output(0, 1, 0, &[9]) });
        assert!(truth.lose(Some(Epoch(1))));
        let (generate, windows) = truth.generate(RequestId(5));
        assert_eq!((generate.request, generate.attempt, generate.window), (5, 1, 8));
        assert_eq!(generate.adapter, AdapterId(7).to_bytes(), "with its adapter");
        assert_eq!(generate.choices, [ChoiceStart { index: 0, emitted: vec![7, 8] }]);
        assert_eq!(generate.sampling.map(|s| s.prompt_logprobs), Some(-1), "they were handed out");
        assert!(windows.is_empty());
        assert_eq!(truth.tokens()[..], [1, 2, 3, 7, 8]);
        assert_eq!(
            truth.accept(output(0, 0, 2, &[66]), &numerics()),
            Ok(Accepted::Nothing { dropped: 1 }),
            "the late worker"
        );
        assert_eq!(delivered(&mut truth, output(1, 0, 2, &[9])), (2, vec![9]));
    }

    #[test]
    fn what_is_sent_twice_is_emitted_once() {
        let mut truth = Truth::new(job(1), 10);
        delivered(&mut truth, output(0, 0, 0, &[1, 2, 3]));
        assert_eq!(truth.accept(output(0, 0, 1, &[2, 3]), &numerics()), Ok(Accepted::Nothing { dropped: 2 }));
        assert_eq!(delivered(&mut truth, output(0, 0, 2, &[3, 4])), (3, vec![4]));
    }

    #[test]
    fn a_worker_that_breaks_the_contract_is_found_out() {
        let mut truth = Truth::new(job(1), 2);
        assert!(truth.accept(output(0, 0, 1, &[5]), &numerics()).is_err(), "hole");
        assert!(truth.accept(output(0, 1, 0, &[5]), &numerics()).is_err(), "no such choice");
        assert!(truth.accept(output(0, 0, 0, &[5, 6, 7]), &numerics()).is_err(), "beyond the window");
        let all: Vec<u32> = (0..101).collect();
        let mut wide = Truth::new(job(1), 1000);
        assert!(wide.accept(output(0, 0, 0, &all), &numerics()).is_err(), "a hundred were asked for");
        assert_eq!(delivered(&mut wide, output(0, 0, 0, &all[..100])), (0, all[..100].to_vec()));
        assert!(truth.lose(None));
        assert_eq!(truth.generate(RequestId(5)).0.choices, [ChoiceStart::default()], "nobody got what was refused");
        assert_eq!(delivered(&mut truth, output(1, 0, 0, &[5, 6])), (0, vec![5, 6]));
    }

    #[test]
    fn windows_survive_a_move() {
        let mut truth = Truth::new(job(2), 4);
        delivered(&mut truth, output(0, 0, 0, &[1, 2, 3, 4]));
        assert_eq!(truth.grant(RequestId(5), 1, 6), Some(Window { request: 5, choice: 1, tokens: 6 }));
        assert!(truth.lose(None));
        let (generate, windows) = truth.generate(RequestId(5));
        assert_eq!(generate.window, 1, "0 would be no limit");
        assert_eq!(windows, [Window { request: 5, choice: 1, tokens: 9 }]);
    }

    #[test]
    fn a_request_of_which_two_workers_died_is_not_tried_again() {
        let mut truth = Truth::new(job(1), 4);
        assert!(truth.lose(Some(Epoch(1))));
        assert!(truth.lose(Some(Epoch(1))), "the same death twice");
        assert!(truth.lose(None), "given up, not dead");
        assert!(!truth.lose(Some(Epoch(2))));
        assert!(truth.is_suspect());
    }

    #[test]
    fn a_request_that_moves_is_no_suspect_and_may_move_for_ever() {
        let mut truth = Truth::new(job(1), 1000);
        assert!(!truth.decodes());
        assert!(truth.lose(Some(Epoch(1))));
        for at in 0..100 {
            delivered(&mut truth, output(at + 1, 0, at, &[at]));
            truth.leave();
        }
        assert!(truth.decodes() && truth.lose(Some(Epoch(2))), "the first death was long ago");
        assert_eq!(truth.computed(), [(0, [1, 2, 3].into_iter().chain(0..99).collect())]);
        assert_eq!(truth.left(), 0);
    }

    #[test]
    fn deaths_are_not_charged_to_a_request_that_advanced() {
        let mut truth = Truth::new(job(1), 100);
        for life in 0..5 {
            delivered(&mut truth, output(life, 0, life, &[life]));
            assert!(truth.lose(Some(Epoch(u64::from(life)))), "it stood beside whatever killed life {life}");
        }
        assert!(truth.lose(Some(Epoch(10))));
        assert!(!truth.lose(Some(Epoch(11))), "two lives without a token");
    }

    #[test]
    fn prompt_logprobs_are_told_once_whichever_choice_speaks_first() {
        let told = || vec![penstock_proto::frames::TokenLogprobs { logprob: -1.0, ..Default::default() }];
        let mut truth = Truth::new(job(2), 100);
        delivered(&mut truth, output(0, 1, 0, &[7]));
        assert!(truth.lose(None));
        assert_eq!(truth.generate(RequestId(5)).0.sampling.map(|s| s.prompt_logprobs), Some(0), "nobody has told them");
        for (attempt, expected) in [(1, told()), (2, Vec::new())] {
            let output = Output { prompt_logprobs: told(), ..output(attempt, 0, attempt - 1, &[8]) };
            let Ok(Accepted::Deliver(got)) = truth.accept(output, &numerics()) else { panic!("it is new") };
            assert_eq!(got.prompt_logprobs, expected);
            assert!(truth.lose(None));
            assert_eq!(truth.generate(RequestId(5)).0.sampling.map(|s| s.prompt_logprobs), Some(-1));
        }
    }

    #[test]
    fn a_vector_comes_once_from_whichever_worker_ends_it() {
        let vector =
            |attempt| Output { vector: vec![0.5, 2.0], finish: Some(Finish::default()), ..output(attempt, 0, 0, &[]) };
        let mut pooled = job(1);
        (pooled.pooling, pooled.sampling.max_tokens) = (Pooling::Last, 0);
        let mut truth = Truth::new(pooled, 4);
        assert_eq!(truth.generate(RequestId(5)).0.pooling, Pooling::Last as i32);
        assert!(truth.lose(Some(Epoch(1))), "its worker died: it is asked for elsewhere");
        assert_eq!(truth.generate(RequestId(5)).0.pooling, Pooling::Last as i32);
        assert_eq!(truth.accept(vector(0), &numerics()), Ok(Accepted::Nothing { dropped: 0 }), "of the dead worker");
        let Ok(Accepted::Deliver(output)) = truth.accept(vector(1), &numerics()) else { panic!("it is new") };
        assert_eq!((output.vector, truth.open()), (vec![0.5, 2.0], 0));
        assert_eq!(truth.accept(vector(1), &numerics()), Ok(Accepted::Nothing { dropped: 0 }), "twice");
        let mut text = Truth::new(job(1), 4);
        assert_eq!(text.accept(vector(0), &numerics()), Err(Violation("a vector that was not asked for")));
    }

    #[test]
    fn a_draining_worker_and_a_full_one_pass_the_request_on() {
        let mut truth = Truth::new(job(1), 4);
        let failed = |kind: ErrorKind| Output {
            finish: Some(Finish { reason: FinishReason::Failed as i32, error_kind: kind as i32, ..Default::default() }),
            ..output(0, 0, 0, &[])
        };
        assert_eq!(truth.accept(failed(ErrorKind::Draining), &numerics()), Ok(Accepted::Elsewhere));
        assert!(matches!(truth.accept(failed(ErrorKind::ContextLength), &numerics()), Ok(Accepted::Deliver(_))));
        assert_eq!(truth.open(), 0);
        for has_begun in [false, true] {
            let mut truth = Truth::new(job(1), 4);
            if has_begun {
                delivered(&mut truth, output(0, 0, 0, &[7]));
            }
            let full = truth.accept(failed(ErrorKind::Overloaded), &numerics());
            assert_eq!(full == Ok(Accepted::Full), has_begun, "{full:?}");
        }
    }

    proptest! {
        /// Any mix of repeats, cuts and lives hands out the sequence 0, 1, 2, … exactly once and in order.
        #[test]
        fn emission_is_exactly_once(script in prop::collection::vec((0..8_u32, 1..6_u32, 0..10_u8), 1..60)) {
            let mut truth = Truth::new(job(1), 10_000);
            truth.job.sampling.max_tokens = 10_000;
            let mut got: Vec<u32> = Vec::new();
            for (back, count, event) in script {
                if event == 0 && !truth.lose(None) { break; }
                let at = (got.len() as u32).saturating_sub(back);
                let tokens: Vec<u32> = (at..at + count).collect();
                let attempt = truth.attempt - u32::from(event == 1 && truth.attempt > 0);
                if let Accepted::Deliver(output) = truth.accept(output(attempt, 0, at, &tokens), &numerics()).unwrap() {
                    prop_assert_eq!(output.at as usize, got.len());
                    got.extend(output.tokens.iter().map(|t| t.id));
                }
            }
            prop_assert!(got.iter().copied().eq(0..got.len() as u32));
        }
    }
}
