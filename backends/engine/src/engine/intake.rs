//! Requests that come in: taken, refused, continued, cancelled; prompts that are computed for other engines; first tokens that
//! other engines drew.

use super::Engine;
use crate::draw::unfit;
use crate::first;
use crate::guide::Guided;
use crate::limits::Refusal;
use crate::output::failed;
use crate::request::{Prefill, Request};
use crate::sequence::Sequence;
use crate::transfer::PageSink;
use penstock_proto::frames::{Cancel, ChoiceStart, Finish, FinishReason, Generate, Output, Window};
use penstock_proto::transfer::First;
use penstock_proto::{BlockHash, ErrorKind, WorkId};
use std::sync::Arc;

impl Engine {
    /// Most sequences that wait for their first step; a request beyond them is refused as overloaded.
    pub fn waiting_max(&self) -> usize {
        self.waiting_max
    }

    /// Takes a request, or refuses it: then the next step carries a `Failed` finish for each of its choices.
    ///
    /// A request that is already open is continued if `attempt` is higher (its pages are freed) and ignored otherwise.
    pub fn submit(&mut self, generate: Generate) {
        self.take(generate, self.draining);
    }

    /// Takes a request that was accepted before the engine began to drain, and has waited for its blocks since.
    pub fn go_on(&mut self, generate: Generate) {
        self.take(generate, false);
    }

    fn take(&mut self, generate: Generate, refuses: bool) {
        let (id, attempt) = (WorkId(generate.request), generate.attempt);
        match self.scheduler.attempt(id) {
            Some(open) if open >= attempt => return,
            Some(_) => {
                let kept = self.scheduler.take_hold(id);
                let members = self.scheduler.members(id).to_vec();
                members.into_iter().for_each(|order| drop(self.scheduler.remove(order)));
                kept.into_iter().for_each(|pages| self.scheduler.hold(id, pages));
            }
            None => {}
        }
        let (rank, window) = ((generate.priority, generate.turn), generate.window);
        let choices: Vec<u32> =
            generate.choices.iter().map(|choice| choice.index).take(self.limits.choices_max).collect();
        match self.admit(generate, refuses) {
            Ok((request, starts)) => {
                let request = Arc::new(request);
                for (n, start) in starts.into_iter().enumerate() {
                    let sequence = Sequence::new(Arc::clone(&request), start, window, n == 0);
                    match sequence.guided.as_ref().and_then(Guided::failure) {
                        None => self.open(rank, sequence),
                        Some(error) => {
                            self.outbox.unfit(&sequence, failed(unfit(error), format!("emitted: {error}")));
                        }
                    }
                }
            }
            Err(refusal) => self.outbox.refuse(id, attempt, &choices, &refusal),
        }
        if self.scheduler.members(id).is_empty() {
            self.scheduler.let_go(id);
        }
    }

    fn admit(&self, generate: Generate, refuses: bool) -> Result<(Request, Vec<ChoiceStart>), Refusal> {
        if refuses {
            return Err(Refusal { kind: ErrorKind::Draining, message: "the worker is draining".to_owned() });
        }
        let waiting = self.scheduler.waiting() + generate.choices.len();
        let (request, starts) = Request::parse(generate, &self.limits)?;
        if waiting > self.waiting_max {
            let message = format!("{} sequences wait, limit {}", self.scheduler.waiting(), self.waiting_max);
            return Err(Refusal { kind: ErrorKind::Overloaded, message });
        }
        Ok((request, starts))
    }

    fn open(&mut self, rank: (i32, i64), mut sequence: Sequence) {
        match sequence.finish() {
            // Ended already, with no further output and no prompt to report on.
            Some(finish) if sequence.collecting().is_none() => self.outbox.end(&mut sequence, finish),
            _ => _ = self.scheduler.insert(rank, sequence),
        }
    }

    /// Frees the resources of a request's choices (all when none are named); the next step carries their `Cancelled`
    /// finish.
    pub fn cancel(&mut self, cancel: &Cancel) {
        for order in self.scheduler.members(WorkId(cancel.request)).to_vec() {
            let choice = self.scheduler.sequences[&order].choice;
            if cancel.choices.is_empty() || cancel.choices.contains(&choice) {
                let finish = Finish { reason: FinishReason::Cancelled as i32, ..Default::default() };
                self.outbox.end(&mut self.scheduler.remove(order), finish);
            }
        }
    }

    /// Extends the window of a choice.
    pub fn window(&mut self, window: &Window) {
        for order in self.scheduler.members(WorkId(window.request)).to_vec() {
            let sequence = self.scheduler.sequence(order);
            if sequence.choice == window.choice {
                sequence.window = sequence.window.map(|left| left.saturating_add(u64::from(window.tokens)));
            }
        }
    }

    /// Computes blocks of a prompt for another engine and sends each layer as soon as it is complete; then draws the
    /// token after it, if asked for and if there was anything to compute.
    ///
    /// # Errors
    /// The reason of the refusal, for the other engine's log; `sink` has been told.
    pub fn prefill(&mut self, prefill: Prefill, mut sink: Box<dyn PageSink>) -> Result<(), String> {
        let (id, rank) = (prefill.id, (prefill.priority, prefill.turn));
        let blocks = prefill.first..prefill.first.saturating_add(prefill.blocks);
        let silent = if self.draining {
            Err("the worker is draining".to_owned())
        } else if self.scheduler.waiting() >= self.waiting_max || self.blocks.block_bytes == 0 {
            Err("the worker takes no more, or cannot send".to_owned())
        } else {
            Request::silent(prefill, &self.limits).map_err(|refusal| refusal.message)
        };
        let (request, start) = silent.inspect_err(|_| sink.end(false))?;
        let mut sequence = Sequence::new(Arc::new(request), start, 0, false);
        if let Some(error) = sequence.guided.as_ref().and_then(Guided::failure) {
            sink.end(false);
            return Err(format!("emitted: {error}"));
        }
        let wanted: Vec<BlockHash> = blocks.clone().map(|block| sequence.hash(block)).collect();
        if self.scheduler.pool.lookup(wanted.iter().copied()).pages.len() == wanted.len() {
            // All blocks are here, so the asker does not wait for a computation: it computes the few remaining rows
            // and its token itself.
            self.transfers.send(id, &wanted, sink, &mut self.scheduler);
            return Ok(());
        }
        let order = self.scheduler.insert(rank, sequence);
        self.transfers.follow(id, order, blocks, sink);
        Ok(())
    }

    /// Takes the first tokens of a request, drawn by another engine, before the request is submitted; returns the
    /// outputs for them. `generate` goes on after them, without the choices that ended. `cached_tokens`: prompt tokens
    /// that were here. `None`, with nothing changed, if the tokens do not fit the request.
    pub fn say_first(&mut self, generate: &mut Generate, first: First, cached_tokens: u32) -> Option<Vec<Output>> {
        let outputs = first::say(generate, first, cached_tokens, &self.limits)?;
        self.stats.output_tokens += outputs.len() as u64;
        Some(outputs)
    }
}
