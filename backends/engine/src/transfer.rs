//! KV transfers between engines: the pages held meanwhile, and the pages still to be moved.
//!
//! ```text
//! receive(chain) → pages held → accept(block, layer, bytes)… → settle(what the sender vouches for) → sealed, in the prefix cache
//! send(chain) | prefill(prompt) → layers of complete blocks into a PageSink: while a step computes them, or between two steps;
//!                                  and the token after the prompt, with the step that computes its last row
//! ```
//! Plain state: bytes come in and go out as slices, nothing here waits. A received block can be read by others only
//! once all of its layers are here and its sender says that the step which computed it succeeded. Pages held for a
//! transfer are the first to be reclaimed when a running sequence needs one: then the transfer is over, and the
//! missing blocks are computed.

use crate::forward::{Forward, Pages};
use crate::scheduler::{Order, Plan, Scheduler};
use crate::sequence::Status;
use penstock_kv::PageId;
use penstock_proto::transfer::First;
use penstock_proto::{BLOCK_TOKENS, BlockHash, WorkId};
use std::collections::BTreeMap;
use std::ops::Range;

/// Receiver of pages that leave the engine. A sink never blocks: without room it is asked again between later steps.
pub trait PageSink: Send {
    /// Returns true if the sink takes a page now; the engine asks again between steps until it does.
    fn has_room(&mut self) -> bool;
    /// Takes one page of one layer, in wire order. `block` counts from the first block that was asked for; `fill` writes the bytes
    /// of a page into a slice of their length.
    fn page(&mut self, block: usize, layer: usize, fill: &mut dyn FnMut(&mut [u8]));
    /// Reports that the steps which computed the first `blocks` blocks succeeded.
    fn computed(&mut self, blocks: usize);
    /// Takes the token after the prompt for each requested choice. Called at most once; pages may come after it.
    fn first(&mut self, first: First);
    /// Ends the transfer. `complete`: every requested page was given.
    fn end(&mut self, complete: bool);
}

/// Parts of a wanted chain of blocks that an engine has and lacks, at the start of an incoming transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Missing {
    /// Number of leading blocks that can be read here; they are held.
    pub have: usize,
    /// Number of blocks after these for which pages are held now.
    pub wanted: usize,
}

/// An incoming chain. Its pages, first those of blocks that were here, are held under the same number.
struct Intake {
    chain: Vec<BlockHash>,
    have: usize,
    /// Received pages, `[block][layer]` of the blocks after `have`.
    taken: Vec<bool>,
}

/// Holder of an outgoing transfer's pages, from which they are read.
enum Source {
    /// Block table of a sequence that computes them.
    Sequence(Order),
    /// Pages held in the scheduler under the transfer's number.
    Held,
}

/// An outgoing transfer: blocks that another worker asked for, given to its sink page by page.
struct Outgoing {
    source: Source,
    /// Index in the table of the first requested block.
    first: usize,
    /// Number of layers given to the sink so far, by block.
    given: Vec<usize>,
    computed: usize,
    sink: Box<dyn PageSink>,
}

/// A block that a step completes for an outgoing transfer.
pub(crate) struct Completing {
    id: WorkId,
    /// Index of the block in the sink's count.
    block: usize,
    page: u32,
}

/// Incoming and outgoing KV transfers of an engine, by their numbers.
#[derive(Default)]
pub(crate) struct Transfers {
    layers: usize,
    page_bytes: usize,
    intakes: BTreeMap<WorkId, Intake>,
    outgoing: BTreeMap<WorkId, Outgoing>,
}

impl Transfers {
    pub(crate) fn new(layers: usize, page_bytes: usize) -> Self {
        Self { layers, page_bytes, ..Self::default() }
    }

    fn works(&self, scheduler: &Scheduler) -> bool {
        self.layers * self.page_bytes > 0 && scheduler.sizes.prefix_cache
    }

    // ---- in ----

    /// Holds the blocks of a chain that are here, and spare pages for the missing ones.
    pub(crate) fn receive(&mut self, id: WorkId, chain: Vec<BlockHash>, scheduler: &mut Scheduler) -> Missing {
        if !self.works(scheduler) {
            return Missing::default();
        }
        let mut pages = scheduler.pool.lookup(chain.iter().copied()).pages;
        scheduler.pool.share(&pages);
        let have = pages.len();
        // Each running sequence can still begin a block.
        let running = scheduler.sequences.values().filter(|sequence| sequence.status == Status::Running).count();
        let spare = scheduler.pool.available().saturating_sub(running);
        let fresh = (chain.len() - have).min(spare);
        pages.extend((0..fresh).map_while(|_| scheduler.pool.allocate()));
        let wanted = pages.len() - have;
        scheduler.hold(id, pages);
        self.intakes.insert(id, Intake { chain, have, taken: vec![false; wanted * self.layers] });
        Missing { have, wanted }
    }

    /// Takes one received page; false if it was not expected, came before, or its pages were reclaimed.
    pub(crate) fn accept(
        &mut self,
        id: WorkId,
        (block, layer): (usize, usize),
        bytes: &[u8],
        scheduler: &Scheduler,
        forward: &mut dyn Forward,
    ) -> bool {
        let Some(pages) = scheduler.held(id) else { return false };
        let Some(intake) = self.intakes.get_mut(&id) else { return false };
        let fits = layer < self.layers && bytes.len() == self.page_bytes;
        let place = block.checked_mul(self.layers).and_then(|at| intake.taken.get_mut(at.checked_add(layer)?));
        let Some(taken) = place.filter(|taken| fits && !**taken) else { return false };
        *taken = true;
        forward.write_page(layer, pages[intake.have + block].0, bytes);
        true
    }

    /// Ends an incoming transfer. Of the received blocks, the leading complete ones among the first `vouched` are
    /// sealed; the others are dropped. `keep`: holds the chain for the request of that number until it starts. Returns
    /// the number of leading blocks of the chain that can be read.
    pub(crate) fn settle(&mut self, id: WorkId, vouched: usize, keep: bool, scheduler: &mut Scheduler) -> usize {
        let Some(intake) = self.intakes.remove(&id) else { return 0 };
        let Some(mut pages) = scheduler.take_hold(id) else {
            return scheduler.pool.lookup(intake.chain.iter().copied()).pages.len();
        };
        let whole = intake.taken.chunks(self.layers).take_while(|layers| layers.iter().all(|taken| *taken)).count();
        let readable = intake.have + whole.min(vouched);
        pages.drain(readable..).rev().for_each(|page| scheduler.pool.release(page));
        for (block, page) in pages.iter_mut().enumerate().skip(intake.have) {
            let parent = block.checked_sub(1).map(|parent| intake.chain[parent]);
            *page = scheduler.pool.seal(*page, parent, intake.chain[block]);
        }
        scheduler.hold(id, pages);
        if !keep {
            scheduler.let_go(id);
        }
        readable
    }

    // ---- out ----

    /// Sends the leading blocks of `hashes` that are here; returns their number.
    pub(crate) fn send(
        &mut self,
        id: WorkId,
        hashes: &[BlockHash],
        mut sink: Box<dyn PageSink>,
        scheduler: &mut Scheduler,
    ) -> usize {
        let found =
            if self.works(scheduler) { scheduler.pool.lookup(hashes.iter().copied()).pages } else { Vec::new() };
        let blocks = found.len();
        sink.computed(blocks);
        if blocks == 0 {
            sink.end(hashes.is_empty());
            return 0;
        }
        scheduler.pool.share(&found);
        scheduler.hold(id, found);
        let source = Source::Held;
        self.outgoing.insert(id, Outgoing { source, first: 0, given: vec![0; blocks], computed: blocks, sink });
        blocks
    }

    /// Sends `blocks` of the table of the sequence at `order`, which computes them.
    pub(crate) fn follow(&mut self, id: WorkId, order: Order, blocks: Range<usize>, sink: Box<dyn PageSink>) {
        let source = Source::Sequence(order);
        let given = vec![0; blocks.len()];
        self.outgoing.insert(id, Outgoing { source, first: blocks.start, given, computed: 0, sink });
    }

    /// Stops an outgoing transfer early, with the sequence that computes for it.
    pub(crate) fn stop(&mut self, id: WorkId, scheduler: &mut Scheduler) {
        let Some(mut outgoing) = self.outgoing.remove(&id) else { return };
        outgoing.sink.end(false);
        match outgoing.source {
            Source::Sequence(order) if scheduler.sequences.contains_key(&order) => drop(scheduler.remove(order)),
            Source::Sequence(_) => {}
            Source::Held => scheduler.let_go(id),
        }
    }

    /// Returns true if pages of this transfer are still to be sent.
    pub(crate) fn is_sending(&self, id: WorkId) -> bool {
        self.outgoing.contains_key(&id)
    }

    /// Returns true if every outgoing transfer has ended, so that a draining worker may exit.
    pub(crate) fn has_given_all(&self) -> bool {
        self.outgoing.is_empty()
    }

    /// Returns true if [`Self::give`] would send a page or end a lost transfer now.
    pub(crate) fn can_give(&mut self, scheduler: &Scheduler) -> bool {
        let layers = self.layers;
        let moves = |(id, out): (&WorkId, &mut Outgoing)| {
            out.is_lost(*id, scheduler) || out.next(*id, scheduler, layers).is_some() && out.sink.has_room()
        };
        self.outgoing.iter_mut().any(moves)
    }

    /// Gives one page to a sink that has room, oldest transfer first; false if there is nothing to give now.
    pub(crate) fn give(&mut self, scheduler: &mut Scheduler, forward: &dyn Forward) -> bool {
        let layers = self.layers;
        let mut ended = None;
        for (&id, out) in &mut self.outgoing {
            if out.is_lost(id, scheduler) {
                ended = Some((id, false));
                break;
            }
            if let Some((block, page)) = out.next(id, scheduler, layers).filter(|_| out.sink.has_room()) {
                let layer = out.given[block];
                out.sink.page(block, layer, &mut |bytes| forward.pages().read_page(layer, page.0, bytes));
                out.given[block] += 1;
                if !out.is_done(layers) {
                    return true;
                }
                ended = Some((id, true));
                break;
            }
        }
        let Some((id, complete)) = ended else { return false };
        self.end(id, complete, scheduler);
        true
    }

    fn end(&mut self, id: WorkId, complete: bool, scheduler: &mut Scheduler) {
        if let Some(mut out) = self.outgoing.remove(&id) {
            out.sink.end(complete);
            scheduler.let_go(id);
        }
    }

    /// Blocks that a planned step completes for outgoing transfers.
    pub(crate) fn completing(&self, plan: &Plan, scheduler: &Scheduler) -> Vec<Completing> {
        let mut found = Vec::new();
        for (id, out) in &self.outgoing {
            let Source::Sequence(order) = out.source else { continue };
            let Some(run) = plan.runs.iter().find(|run| run.order == order) else { continue };
            let sequence = &scheduler.sequences[&order];
            let blocks = sequence.computed / BLOCK_TOKENS..(sequence.computed + run.rows) / BLOCK_TOKENS;
            for at in blocks.filter(|at| (out.first..out.first + out.given.len()).contains(at)) {
                found.push(Completing { id: *id, block: at - out.first, page: sequence.table[at] });
            }
        }
        found
    }

    /// Gives one layer of the completing blocks after it was computed. A sink without room gets this layer and the
    /// later ones later.
    pub(crate) fn after_layer(&mut self, layer: usize, completing: &[Completing], pages: &dyn Pages) {
        for Completing { id, block, page } in completing {
            let Some(out) = self.outgoing.get_mut(id) else { continue };
            if out.given[*block] == layer && out.sink.has_room() {
                out.sink.page(*block, layer, &mut |bytes| pages.read_page(layer, *page, bytes));
                out.given[*block] += 1;
            }
        }
    }

    /// Passes on the token that the sequence at `order` drew for another engine.
    pub(crate) fn first(&mut self, order: Order, first: First) {
        let of = |out: &&mut Outgoing| matches!(out.source, Source::Sequence(at) if at == order);
        if let Some(out) = self.outgoing.values_mut().find(of) {
            out.sink.first(first);
        }
    }

    /// Ends a step: reports the completed blocks, and holds the pages of completely computed sequences until they are
    /// given.
    pub(crate) fn after_step(&mut self, scheduler: &mut Scheduler) {
        let mut done = Vec::new();
        for (&id, out) in &mut self.outgoing {
            let Source::Sequence(order) = out.source else { continue };
            let Some(sequence) = scheduler.sequences.get(&order) else { continue };
            let computed = (sequence.computed / BLOCK_TOKENS).saturating_sub(out.first).min(out.given.len());
            if computed > out.computed {
                out.computed = computed;
                out.sink.computed(computed);
            }
            if sequence.computed == sequence.len() {
                scheduler.retire(order, id);
                out.source = Source::Held;
                if out.is_done(self.layers) {
                    done.push(id);
                }
            }
        }
        done.into_iter().for_each(|id| self.end(id, true, scheduler));
    }
}

impl Outgoing {
    /// Returns true if the sequence that computed for a transfer, or the hold of its pages, is gone.
    fn is_lost(&self, id: WorkId, scheduler: &Scheduler) -> bool {
        match self.source {
            Source::Sequence(order) => !scheduler.sequences.contains_key(&order),
            Source::Held => scheduler.held(id).is_none(),
        }
    }

    fn is_done(&self, layers: usize) -> bool {
        matches!(self.source, Source::Held) && self.given.iter().all(|given| *given == layers)
    }

    /// Next block of which a layer can be given, and its page.
    fn next(&self, id: WorkId, scheduler: &Scheduler, layers: usize) -> Option<(usize, PageId)> {
        let block = self.given.iter().position(|given| *given < layers)?;
        let at = self.first + block;
        let page = match self.source {
            Source::Held => scheduler.held(id)?.get(at).copied(),
            Source::Sequence(order) => {
                let sequence = scheduler.sequences.get(&order)?;
                (at < sequence.computed / BLOCK_TOKENS).then(|| PageId(sequence.table[at]))
            }
        };
        Some((block, page?))
    }
}
