//! Outputs that wait for the next step's frame.

use crate::limits::Refusal;
use crate::output::{failed, first_output, output};
use crate::sequence::Sequence;
use penstock_proto::WorkId;
use penstock_proto::frames::{Finish, Output};

/// Outputs in the order in which they came about: those of a step, and those of sequences that ended between steps.
#[derive(Default)]
pub(super) struct Outbox(Vec<Output>);

impl Outbox {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn push(&mut self, output: Output) {
        self.0.push(output);
    }

    /// Refuses a request: a finish for each of its choices, and for choice 0 of a request that names none.
    pub(super) fn refuse(&mut self, id: WorkId, attempt: u32, choices: &[u32], refusal: &Refusal) {
        let choices = if choices.is_empty() { &[0] } else { choices };
        let finish = failed(refusal.kind, refusal.message.clone());
        let refuse =
            |&choice| Output { request: id.0, attempt, choice, finish: Some(finish.clone()), ..Default::default() };
        self.0.extend(choices.iter().map(refuse));
    }

    /// Refuses a choice whose emitted tokens do not fit the request.
    pub(super) fn unfit(&mut self, sequence: &Sequence, finish: Finish) {
        self.0.push(Output { finish: Some(finish), ..output(sequence) });
    }

    /// Ends a sequence without a further token.
    pub(super) fn end(&mut self, sequence: &mut Sequence, finish: Finish) {
        self.end_with(sequence, Output { finish: Some(finish), ..output(sequence) });
    }

    /// Ends a sequence with its vector.
    pub(super) fn end_with_vector(&mut self, sequence: &mut Sequence, vector: Vec<f32>, finish: Finish) {
        self.end_with(sequence, Output { vector, finish: Some(finish), ..output(sequence) });
    }

    fn end_with(&mut self, sequence: &mut Sequence, mut output: Output) {
        first_output(sequence, &mut output);
        self.0.push(output);
    }

    /// Takes the outputs for one frame: all of them, unless the lists of prompt log-probabilities have more than `entries_max` entries
    /// at once; the rest follows with the next frame.
    pub(super) fn take(&mut self, entries_max: usize) -> Vec<Output> {
        let entries = |output: &Output| output.prompt_logprobs.iter().map(|l| 1 + l.top_tokens.len()).sum::<usize>();
        let mut left = entries_max;
        let fitting = self.0.iter().take_while(|output| {
            let entries = entries(output);
            let fits = entries <= left;
            left -= entries.min(left);
            fits
        });
        let rest = self.0.split_off(fitting.count());
        std::mem::replace(&mut self.0, rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_proto::ErrorKind;
    use penstock_proto::frames::TokenLogprobs;

    fn refusal() -> Refusal {
        Refusal { kind: ErrorKind::Draining, message: "the worker is draining".to_owned() }
    }

    #[test]
    fn every_choice_of_a_refused_request_is_told() {
        let told = |choices: &[u32]| {
            let mut outbox = Outbox::default();
            outbox.refuse(WorkId(7), 2, choices, &refusal());
            let outputs = outbox.take(0);
            assert!(outbox.is_empty());
            assert!(outputs.iter().all(|output| (output.request, output.attempt) == (7, 2)));
            let finishes = outputs.iter().map(|output| output.finish.as_ref().expect("an end"));
            assert!(finishes.into_iter().all(|finish| finish.message == "the worker is draining"));
            outputs.iter().map(|output| output.choice).collect::<Vec<_>>()
        };
        assert_eq!(told(&[3, 1]), [3, 1]);
        assert_eq!(told(&[]), [0], "a request without choices gets an answer, too");
    }

    #[test]
    fn a_frame_holds_so_many_entries_and_the_rest_follows_in_order() {
        let mut outbox = Outbox::default();
        for (choice, entries) in [(0, 2), (1, 3), (2, 0), (3, 4)] {
            let prompt_logprobs = vec![TokenLogprobs::default(); entries];
            outbox.push(Output { choice, prompt_logprobs, ..Default::default() });
        }
        let mut frame = || outbox.take(5).into_iter().map(|output| output.choice).collect::<Vec<_>>();
        assert_eq!([frame(), frame(), frame()], [vec![0, 1, 2], vec![3], vec![]]);
    }
}
