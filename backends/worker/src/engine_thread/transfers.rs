//! Transfers on the engine's thread: work that waits for blocks from other workers, and the time budget between two
//! steps for moving pages.

use super::Desk;
use crate::inbox::{Command, Health, PageIn, Report, Taken};
use crate::transfer::{ASKED_MAX, Errand, FETCH_DEADLINE, PREFILL_DEADLINE, run};
use penstock_engine::{Missing, PageSink, Prefill};
use penstock_proto::frames::{EngineState, Generate, NoticeKind, Pull, Pulled, Step, UpBody};
use penstock_proto::transfer::{AskBody, BLOCKS_MAX, Fetch, First, Prefill as WantedPrefill};
use penstock_proto::{BLOCK_TOKENS, BlockHash, GatewayId, PullId, SessionId, WorkId};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::AbortHandle;
use tracing::{debug, info};

/// Share of a step's time for moving pages before the next one, while sequences run: their next tokens wait for it.
const STEP_SHARE: f64 = 0.1;

/// Least time for moving pages, so that fast steps do not starve a transfer.
const BUDGET_MIN: Duration = Duration::from_millis(1);

/// Most time for moving pages while no sequence runs: commands wait no longer.
const BUDGET_IDLE: Duration = Duration::from_millis(10);

/// Most windows and cancellations that a request collects while it waits for its blocks.
const LATER_MAX: usize = 1024;

/// Work that waits for blocks from another worker.
pub(super) struct Incoming {
    what: Awaited,
    /// Address of the worker that sends the blocks.
    from: String,
    have: usize,
    began: Instant,
    task: AbortHandle,
}

enum Awaited {
    /// A gateway's [`Pull`] wants the blocks in the prefix cache.
    Pull { session: SessionId, pull: PullId },
    /// A request waits for the blocks before it starts.
    Request {
        generate: Box<Generate>,
        /// Commands for the request that came meanwhile.
        later: Vec<Command>,
        /// True if its first token is drawn by the other end and comes before the blocks.
        is_drawn_there: bool,
        /// Time after which no further worker is asked for the blocks.
        until: Instant,
    },
}

impl Awaited {
    /// Returns true if another worker can be asked, and time is left for it.
    fn has_another(&self) -> bool {
        let Self::Request { generate, until, .. } = self else { return false };
        !generate.prefill_next.is_empty() && Instant::now() < *until
    }
}

/// A request that looks for its blocks, with its pending state.
struct Search {
    generate: Box<Generate>,
    later: Vec<Command>,
    until: Instant,
    /// Number of missing tokens up to which they are computed instead.
    few: usize,
}

/// Work of the engine for incoming pages, in order.
pub(super) enum Arrival {
    /// Write a received page into the KV cache.
    Page(PageIn),
    /// End the incoming transfer with that number, and report its result.
    End(WorkId, Report),
}

impl Desk {
    /// Takes pages in and gives pages out within the time budget. True if a page was moved.
    pub(super) fn move_pages(&mut self) -> bool {
        let share = Duration::from_secs_f64(self.step_seconds.clamp(0.0, 10.0) * STEP_SHARE);
        let budget = if self.engine.has_work() { share.max(BUDGET_MIN) } else { BUDGET_IDLE };
        let began = Instant::now();
        let mut moved = false;
        loop {
            let arrival = self.arrivals.pop_front();
            let came = arrival.is_some();
            arrival.into_iter().for_each(|arrival| self.arrive(arrival));
            let gave = self.engine.give();
            moved |= came || gave;
            if !(came || gave) || began.elapsed() >= budget {
                self.is_untold |= moved;
                return moved;
            }
        }
    }

    fn arrive(&mut self, arrival: Arrival) {
        match arrival {
            Arrival::Page(page) => {
                // Pages of an ended request, or of one that has lost its pages, are dropped; a useless transfer is
                // ended.
                let waits = self.incoming.contains_key(&page.id);
                if waits && !self.engine.accept(page.id, page.block, page.layer, &page.bytes) {
                    let why = "unexpected KV page, or its place in memory was needed".to_owned();
                    self.end(page.id, &Report { why, ..Report::default() });
                }
            }
            Arrival::End(id, report) => self.end(id, &report),
        }
    }

    /// Ends an incoming transfer in any way: the waiting work continues with the blocks that came.
    fn end(&mut self, id: WorkId, report: &Report) {
        let Some(Incoming { what, from, have, began, task }) = self.incoming.remove(&id) else { return };
        task.abort();
        self.judge(&from, report);
        // A request whose choices all ended with their first tokens needs no blocks.
        let keep = matches!(&what, Awaited::Request { generate, .. } if !generate.choices.is_empty());
        // The next worker is asked for the blocks still missing; the others are looked up again.
        let asks_next = report.is_lost && what.has_another();
        let blocks = self.engine.settle(id, report.vouched, keep && !asks_next);
        self.peers.count_blocks(blocks.saturating_sub(have).min(report.vouched));
        let (bytes, seconds) = (report.bytes, began.elapsed().as_secs_f64());
        debug!(id = id.0, have, blocks, bytes, seconds, why = report.why, "KV transfer to this worker ended");
        match what {
            Awaited::Pull { session, pull } => {
                // KV events first, so that a reader of the answer knows the blocks.
                self.report();
                let why = report.why.clone();
                let pulled = Pulled { id: pull.0, blocks: blocks as u32, bytes, seconds, why };
                self.answer(session, UpBody::Pulled(pulled));
            }
            Awaited::Request { generate, later, until, .. } if keep => {
                let mut search = Search { generate, later, until, few: 0 };
                if asks_next {
                    search.generate.prefill_at = search.generate.prefill_next.remove(0);
                    search.few = search.generate.prefill_next_tokens as usize;
                    search = match self.search(search) {
                        None => {
                            self.peers.count_next();
                            return info!(
                                id = id.0,
                                blocks,
                                why = report.why,
                                "KV transfer broke off: the next prefill worker is asked for the missing blocks"
                            );
                        }
                        Some(back) => back,
                    };
                }
                // The request was accepted before: a drain that began meanwhile concerns later ones.
                self.engine.go_on(*search.generate);
                search.later.into_iter().for_each(|command| self.apply(command));
            }
            // Its pages are free again, and no step will report that.
            Awaited::Request { .. } => self.is_untold = true,
        }
    }

    /// Records the health of a peer after a transfer from it.
    fn judge(&mut self, peer: &str, report: &Report) {
        let notice = match report.health {
            Health::Unknown => None,
            Health::Good => self.troubles.works(NoticeKind::Transfer, peer),
            Health::Bad => self.troubles.happened(NoticeKind::Transfer, peer, &report.why, Instant::now()),
        };
        self.notify(notice);
    }

    /// Emits the first tokens that the other end has drawn, at once, whatever follows.
    pub(super) fn first(&mut self, id: WorkId, first: First) {
        let Some(Incoming { what: Awaited::Request { generate, is_drawn_there, .. }, have, .. }) =
            self.incoming.get_mut(&id)
        else {
            return;
        };
        let was_asked = std::mem::take(is_drawn_there);
        let cached_tokens = (*have * BLOCK_TOKENS) as u32;
        let outputs = Some(first).filter(|_| was_asked).and_then(|f| self.engine.say_first(generate, f, cached_tokens));
        let Some(outputs) = outputs else {
            let why = "unexpected first token".to_owned();
            return self.end(id, &Report { why, ..Report::default() });
        };
        let is_over = generate.choices.is_empty();
        self.peers.drawn_elsewhere(outputs.len());
        let step = self.engine.report();
        self.publish(Step { outputs, ..step });
        if is_over {
            self.end(id, &Report { why: "the request has all its tokens".into(), ..Report::default() });
        }
    }

    /// Applies a command that came for a request while it waited; its numbers are the engine's.
    fn apply(&mut self, command: Command) {
        match command {
            Command::Window { window, .. } => self.engine.window(&window),
            Command::Cancel { cancel, .. } => self.engine.cancel(&cancel),
            _ => unreachable!("only these two are kept"),
        }
    }

    /// Keeps a command for a request that waits for its blocks; gives it back when the request does not wait.
    pub(super) fn postpone(&mut self, id: WorkId, command: Command) -> Option<Command> {
        let Some(Incoming { what: Awaited::Request { later, .. }, .. }) = self.incoming.get_mut(&id) else {
            return Some(command);
        };
        let ends = matches!(&command, Command::Cancel { cancel, .. } if cancel.choices.is_empty());
        later.push(command);
        if ends || later.len() > LATER_MAX {
            self.end(id, &Report { why: "cancelled".into(), ..Report::default() });
        }
        None
    }

    /// Submits a request, after its missing blocks were fetched from the worker that it names.
    pub(super) fn submit(&mut self, generate: Generate) {
        let until = Instant::now() + PREFILL_DEADLINE;
        let search = Search { generate: Box::new(generate), later: Vec::new(), until, few: 0 };
        if let Some(Search { generate, .. }) = self.search(search) {
            self.start(*generate);
        }
    }

    /// Starts to fetch a request's missing blocks; gives the search back if the request goes on without.
    fn search(&mut self, search: Search) -> Option<Search> {
        let generate = &search.generate;
        let is_prefill = !generate.prefill_at.is_empty();
        let from = if is_prefill { generate.prefill_at.clone() } else { generate.pull_from.clone() };
        if from.is_empty() || self.is_draining || self.incoming.len() >= ASKED_MAX {
            return Some(search);
        }
        let id = WorkId(generate.request);
        let mut chain = self.engine.chain(generate);
        chain.truncate(BLOCKS_MAX);
        let Missing { have, wanted } = self.engine.receive(id, chain.clone());
        if wanted * BLOCK_TOKENS <= search.few {
            self.engine.settle(id, 0, wanted > 0);
            return Some(search);
        }
        let Search { generate, later, until, .. } = search;
        let is_drawn_there = is_prefill && has_one_next(&generate);
        let (question, deadline) = if is_prefill {
            let of = self.turns.of(id);
            (prefill(&generate, of, have, wanted, is_drawn_there), until.saturating_duration_since(Instant::now()))
        } else {
            (fetch(&chain[have..have + wanted]), FETCH_DEADLINE)
        };
        let what = Awaited::Request { generate, later, is_drawn_there, until };
        let errand = Errand { id, from, question, blocks: wanted, deadline };
        self.send_out(errand, have, what);
        None
    }

    /// Fetches blocks from another worker into the cache.
    pub(super) fn pull(&mut self, session: SessionId, pull: Pull) {
        let Pull { id: number, from, hashes, deadline_seconds } = pull;
        let refuse = |why: &str| UpBody::Pulled(Pulled { id: number, why: why.into(), ..Pulled::default() });
        let Some(chain) = (Fetch { hashes }).names() else {
            return self.answer(session, refuse("the block hashes are not valid"));
        };
        if self.incoming.len() >= ASKED_MAX {
            return self.answer(session, refuse("too many transfers are under way"));
        }
        let (id, blocks) = (self.next_id(), chain.len());
        let Missing { have, wanted } = self.engine.receive(id, chain.clone());
        if wanted == 0 {
            self.engine.settle(id, 0, false);
            let why = if have < blocks { "no KV block is free, or the device cannot move blocks" } else { "" };
            let pulled = Pulled { id: number, blocks: have as u32, why: why.into(), ..Pulled::default() };
            return self.answer(session, UpBody::Pulled(pulled));
        }
        let deadline = Duration::try_from_secs_f64(deadline_seconds).unwrap_or_default().min(PREFILL_DEADLINE);
        let question = fetch(&chain[have..have + wanted]);
        let errand = Errand { id, from, question, blocks: wanted, deadline };
        self.send_out(errand, have, Awaited::Pull { session, pull: PullId(number) });
    }

    fn send_out(&mut self, errand: Errand, have: usize, what: Awaited) {
        let (id, from) = (errand.id, errand.from.clone());
        let task = self.runtime.spawn(run(Arc::clone(&self.peers), errand)).abort_handle();
        self.incoming.insert(id, Incoming { what, from, have, began: Instant::now(), task });
        self.is_untold = true;
    }

    /// Sends blocks to another worker.
    pub(super) fn send_blocks(&mut self, hashes: &[BlockHash], sink: Box<dyn PageSink>, taken: Taken) {
        let id = self.next_id();
        self.engine.send(id, hashes, sink);
        self.answer_taken(id, Ok(()), taken);
    }

    /// Computes blocks for another worker.
    pub(super) fn prefill(&mut self, mut prefill: Prefill, gateway: GatewayId, sink: Box<dyn PageSink>, taken: Taken) {
        let id = self.next_id();
        prefill.id = id;
        prefill.turn = self.turns.lend(gateway, id, prefill.turn, |id| self.engine.is_sending(id));
        let done = self.engine.prefill(prefill, sink);
        if let Err(why) = &done {
            info!(why, "prefill for another worker refused");
        }
        self.answer_taken(id, done, taken);
    }

    /// Tells the asker the number of its transfer; if it has gone meanwhile, the work is stopped.
    fn answer_taken(&mut self, id: WorkId, done: Result<(), String>, taken: Taken) {
        if taken.send(done.map(|()| id)).is_err() {
            self.engine.stop(id);
            self.is_untold = true;
        }
    }

    /// State of the engine, with the work that waits for blocks.
    pub(super) fn with_transfers(&self, state: EngineState) -> EngineState {
        let sequences = |incoming: &Incoming| match &incoming.what {
            Awaited::Request { generate, .. } => generate.choices.len() as u32,
            Awaited::Pull { .. } => 0,
        };
        let coming: u32 = self.incoming.values().map(sequences).sum();
        EngineState {
            waiting: state.waiting + coming,
            credits: state.credits.saturating_sub(coming),
            transfers: Some(self.peers.state()),
            ..state
        }
    }
}

fn fetch(names: &[BlockHash]) -> AskBody {
    AskBody::Fetch(Fetch { hashes: names.iter().map(|name| name.to_bytes().to_vec()).collect() })
}

/// Output that all choices of a request have in common; `None` if it differs.
fn shared_output(generate: &Generate) -> Option<&[u32]> {
    let (first, rest) = generate.choices.split_first()?;
    (rest.is_empty() || generate.choices.iter().all(|choice| choice.emitted.is_empty())).then_some(&first.emitted)
}

/// Returns true if the next token of every choice follows the same tokens, and can be emitted before the request runs here.
fn has_one_next(generate: &Generate) -> bool {
    let tokens_max = generate.sampling.as_ref().map_or(0, |sampling| sampling.max_tokens as usize);
    // A window of one token would be used up, which a frame that continues the request cannot express.
    generate.window != 1 && shared_output(generate).is_some_and(|emitted| emitted.len() < tokens_max)
}

fn prefill(
    generate: &Generate,
    (gateway, turn): (GatewayId, i64),
    have: usize,
    wanted: usize,
    is_drawn_there: bool,
) -> AskBody {
    let emitted = shared_output(generate).unwrap_or_default();
    let mut prompt = [&generate.prompt[..], emitted].concat();
    let choices = generate.choices.iter().map(|choice| choice.index).filter(|_| is_drawn_there).collect();
    if !is_drawn_there {
        prompt.truncate((have + wanted) * BLOCK_TOKENS);
    }
    let wanted = WantedPrefill {
        prompt,
        salt: generate.salt.clone(),
        priority: generate.priority,
        turn,
        gateway: gateway.0,
        first: have as u32,
        blocks: wanted as u32,
        choices,
        sampling: generate.sampling.clone().filter(|_| is_drawn_there),
        emitted: if is_drawn_there { emitted.len() as u32 } else { 0 },
        grammar: generate.grammar.clone().filter(|_| is_drawn_there),
        adapter: generate.adapter.clone(),
    };
    if wanted.adapter.is_empty() { AskBody::Prefill(wanted) } else { AskBody::AdaptedPrefill(wanted) }
}
