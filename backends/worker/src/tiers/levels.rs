//! Tiers of one worker, fastest first: the plans of `penstock_kv` with the media that they plan for.
//!
//! ```text
//! evicted from the device ──▶ host memory ──evicted──▶ disk ──evicted──▶ remote
//!        loads come from the first that has the block ◀──────────────┘
//! ```
//! Lives on the engine's thread. Nothing here waits: a write that finds the queue full is dropped, a load that fails is computed.

use super::io::{Outcome, Write};
use super::level::{Change, Level, Medium};
use penstock_kv::Placed;
use penstock_kv::tier::Link;
use penstock_proto::frames::{KvEvent, Tier, TierState};
use penstock_proto::{BlockHash, WorkId};
use std::time::{Duration, Instant};

/// Most bytes of writes that wait for a store; at least two blocks. A long prompt that starts evicts as much at once.
const WRITES_BYTES_MAX: usize = 256 << 20;

/// Silence of a store with unanswered jobs after which requests stop waiting for it, and the remote store gets no
/// further query.
pub(crate) const SILENCE_MAX: Duration = Duration::from_millis(250);

/// Result of [`Levels::load`]: the bytes, a promise of them, or nothing.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Load {
    /// The block's bytes, copied from memory at once.
    Here(Vec<u8>),
    /// The block comes later, with an [`Outcome`].
    Coming,
    /// No tier has the block now.
    Nowhere,
}

/// Meaning of an outcome for waiting requests.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum News {
    /// The outcome concerns no waiting request.
    None,
    /// A block came, or will not come.
    Block(BlockHash, Option<Vec<u8>>),
    /// The remote tier has answered a request's query.
    Found(WorkId),
}

/// All KV tiers below the device, fastest first; a block evicted from one moves to the next.
pub(crate) struct Levels {
    levels: Vec<Level>,
    writes_max: usize,
}

impl Levels {
    pub(crate) fn new(levels: Vec<Level>, block_bytes: usize) -> Self {
        Self { levels, writes_max: (WRITES_BYTES_MAX / block_bytes.max(1)).clamp(2, 1024) }
    }

    /// Returns true if a block that leaves the device is to be handed over. A tier that has it already marks it as used.
    pub(crate) fn wants(&mut self, link: Link) -> bool {
        let Some(at) = self.open_from(0) else { return false };
        let level = &mut self.levels[at];
        if level.plan.knows(link.hash) {
            // Marks the block as last used now.
            level.plan.store(link);
            return false;
        }
        true
    }

    /// Number of blocks that the first tier can take now. Memory takes any number: its evicted blocks may be dropped.
    pub(crate) fn room(&self) -> usize {
        let Some(at) = self.open_from(0) else { return 0 };
        match self.levels[at].medium {
            Medium::Memory(_) => usize::MAX,
            Medium::Store(_) => self.writes_max.saturating_sub(self.levels[at].writes_waiting),
        }
    }

    /// Counts blocks evicted from the device for which the first open tier had no room.
    pub(crate) fn missed(&mut self, blocks: usize) {
        if let Some(at) = self.open_from(0) {
            self.levels[at].state.dropped += blocks as u64;
        }
    }

    fn open_from(&self, first: usize) -> Option<usize> {
        (first..self.levels.len()).find(|at| !self.levels[*at].plan.is_closed())
    }

    fn has_room(&self, at: usize) -> bool {
        self.levels[at].writes_waiting < self.writes_max
    }

    /// Puts a block into the first working tier from `first` on.
    pub(crate) fn put(&mut self, first: usize, link: Link, bytes: Vec<u8>) {
        let Some(at) = self.open_from(first) else { return };
        if !self.levels[at].plan.knows(link.hash) && !self.has_room(at) {
            self.levels[at].state.dropped += 1;
            return;
        }
        // The evicted block is wanted below, if it is not there and can be taken.
        let below = self.open_from(at + 1).filter(|below| self.has_room(*below));
        let (level, below) = match (below, self.levels.split_at_mut(at + 1)) {
            (Some(below), (upper, lower)) => (&mut upper[at], Some(&lower[below - at - 1])),
            (None, (upper, _)) => (&mut upper[at], None),
        };
        let Placed::Slot { slot, evicted } = level.plan.store(link) else { return };
        let keep = evicted.filter(|evicted| below.is_some_and(|below| !below.plan.knows(evicted.hash)));
        match &mut level.medium {
            Medium::Memory(places) => {
                let old = std::mem::replace(&mut places[slot.index()], bytes);
                level.plan.stored(slot);
                level.state.stored += 1;
                if let Some(evicted) = keep {
                    self.put(at + 1, evicted, old);
                }
            }
            Medium::Store(io) => {
                level.writes_waiting += 1;
                io.write(Write { slot, link, bytes, keep });
            }
        }
    }

    /// Seconds to load a block, if a tier has it; 0 if unmeasured.
    pub(crate) fn seconds(&self, hash: BlockHash) -> Option<f64> {
        self.levels.iter().find(|level| level.plan.holds(hash)).map(|level| level.time.seconds())
    }

    /// Records that the tier which holds `hash` was found too slow.
    pub(crate) fn refused(&mut self, hash: BlockHash) {
        if let Some(level) = self.levels.iter_mut().find(|level| level.plan.holds(hash)) {
            level.time.refused();
        }
    }

    /// Silence of the tier that has a block.
    pub(crate) fn silence(&self, hash: BlockHash, now: Instant) -> Duration {
        let level = self.levels.iter().find(|level| level.plan.holds(hash));
        level.map_or(Duration::ZERO, |level| level.silence(now))
    }

    /// Time since the remote tier last answered, while jobs are unanswered; zero without such a tier.
    pub(crate) fn remote_silence(&self, now: Instant) -> Duration {
        self.remote().map_or(Duration::ZERO, |at| self.levels[at].silence(now))
    }

    /// Returns true if a tier has been silent for [`SILENCE_MAX`].
    pub(crate) fn is_silent(&self, now: Instant) -> bool {
        self.levels.iter().any(|level| level.silence(now) >= SILENCE_MAX)
    }

    /// Number of loads that silent tiers have not answered.
    pub(crate) fn stuck(&self, now: Instant) -> usize {
        self.levels.iter().filter(|level| level.silence(now) >= SILENCE_MAX).map(|level| level.reads).sum()
    }

    /// Counts a request that waited in vain for a block; `None` means a query to the remote tier.
    pub(crate) fn late(&mut self, hash: Option<BlockHash>) {
        let at = match hash {
            Some(hash) => self.levels.iter().position(|level| level.plan.holds(hash)),
            None => self.remote(),
        };
        at.into_iter().for_each(|at| self.levels[at].state.late += 1);
    }

    /// Starts to load a block from the fastest tier that has it.
    pub(crate) fn load(&mut self, hash: BlockHash, now: Instant) -> Load {
        for level in &mut self.levels {
            let Some(slot) = level.plan.load(hash) else { continue };
            if let Medium::Store(_) = level.medium {
                level.asked(now);
                level.reads += 1;
            }
            match &level.medium {
                Medium::Memory(places) => {
                    let bytes = places[slot.index()].clone();
                    level.plan.loaded(slot);
                    level.state.loaded += 1;
                    return Load::Here(bytes);
                }
                Medium::Store(io) => {
                    io.read(slot, hash);
                    return Load::Coming;
                }
            }
        }
        Load::Nowhere
    }

    /// Records that a block was imported into the device within `seconds` after it was read.
    pub(crate) fn imported(&mut self, hash: BlockHash, seconds: f64) {
        if let Some(level) = self.levels.iter_mut().find(|level| level.plan.holds(hash)) {
            level.state.load_seconds += seconds;
            if let Medium::Memory(_) = level.medium {
                level.time.measured(1, seconds);
            }
        }
    }

    /// Queries the remote tier for a part of a chain. False if there is none, it is silent, or `most` queries wait.
    pub(crate) fn find(&mut self, id: WorkId, hashes: &[BlockHash], most: usize, now: Instant) -> bool {
        let Some(level) = self.remote().map(|at| &mut self.levels[at]) else { return false };
        let Medium::Store(io) = &level.medium else { return false };
        if level.silence(now) >= SILENCE_MAX || !io.find(id, hashes.to_vec(), most) {
            return false;
        }
        level.asked(now);
        level.finds += 1;
        true
    }

    /// Index of the remote tier in `levels`, while it is open.
    fn remote(&self) -> Option<usize> {
        self.levels.iter().position(|level| level.plan.tier() == Tier::Remote && !level.plan.is_closed())
    }

    /// Returns true if a remote tier is open.
    pub(crate) fn has_remote(&self) -> bool {
        self.remote().is_some()
    }

    /// Applies the outcome of a store's job to its tier, and returns its meaning for waiting requests.
    pub(crate) fn outcome(&mut self, outcome: Outcome, now: Instant) -> News {
        if let Some(at) = outcome.answers().and_then(|tier| self.at(tier)) {
            self.levels[at].silent_since = now;
        }
        match outcome {
            Outcome::Written { tier, slot, result, kept, slots } => {
                let Some(at) = self.at(tier) else { return News::None };
                self.levels[at].written(slot, result, slots, now);
                if let Some((link, bytes)) = kept {
                    self.put(at + 1, link, bytes);
                }
                News::None
            }
            Outcome::Read { tier, slot, hash, result, seconds } => {
                let Some(at) = self.at(tier) else { return News::None };
                News::Block(hash, self.levels[at].read(slot, result, seconds, now))
            }
            Outcome::Found { tier, id, hashes } => {
                if let Some(at) = self.at(tier) {
                    self.levels[at].finds -= 1;
                    self.levels[at].adopt(&hashes);
                }
                News::Found(id)
            }
            Outcome::Revived { tier, result } => {
                if let Some(at) = self.at(tier) {
                    self.levels[at].revived(result, now);
                }
                News::None
            }
        }
    }

    /// Tries tiers again that are off, once their earlier jobs are answered.
    pub(crate) fn revive(&mut self, now: Instant) {
        for level in &mut self.levels {
            let is_quiet = level.writes_waiting + level.reads + level.finds == 0;
            if let (Some(off), Medium::Store(io)) = (&mut level.off, &level.medium)
                && !off.is_asked
                && now >= off.until
                && is_quiet
            {
                off.is_asked = true;
                io.revive();
            }
        }
    }

    /// Tiers that were switched off or on since the last call.
    pub(crate) fn take_changes(&mut self) -> Vec<Change> {
        let of = |level: &mut Level| {
            let tier = level.plan.tier();
            std::mem::take(&mut level.changes).into_iter().map(move |off| Change { tier, off })
        };
        self.levels.iter_mut().flat_map(of).collect()
    }

    fn at(&self, tier: Tier) -> Option<usize> {
        self.levels.iter().position(|level| level.plan.tier() == tier)
    }

    /// Closes the tiers: queued jobs finish, nothing new is written. True once the threads are done.
    pub(crate) fn close(&mut self) -> bool {
        let stores = self.levels.iter().filter_map(|level| match &level.medium {
            Medium::Store(io) => Some(io),
            Medium::Memory(_) => None,
        });
        stores.fold(true, |done, io| {
            io.close();
            done && io.is_finished()
        })
    }

    /// Returns true if a store has its maximum of writes waiting.
    pub(crate) fn is_busy(&self) -> bool {
        (0..self.levels.len()).any(|at| !self.has_room(at))
    }

    /// Returns true if any open tier keeps its blocks when the process ends.
    pub(crate) fn outlives(&self) -> bool {
        self.levels.iter().any(|level| !level.plan.is_closed() && matches!(level.medium, Medium::Store(_)))
    }

    /// Moves one block from memory to a tier that outlives the process. False if none is left; memory takes no more
    /// blocks.
    pub(crate) fn pour(&mut self) -> bool {
        let Some(Level { plan, medium: Medium::Memory(places), .. }) = self.levels.first_mut() else { return false };
        match plan.shrink() {
            Some((slot, link)) => {
                let bytes = std::mem::take(&mut places[slot.index()]);
                self.put(1, link, bytes);
                true
            }
            None => {
                plan.close();
                false
            }
        }
    }

    /// Changes since the last call, for the router.
    pub(crate) fn take_events(&mut self) -> Vec<KvEvent> {
        let of = |level: &mut Level| {
            let mut events = std::mem::take(&mut level.events);
            events.extend(level.plan.take_events());
            events
        };
        self.levels.iter_mut().flat_map(of).collect()
    }

    /// All loadable blocks as events, for a router that starts anew.
    pub(crate) fn snapshot(&self) -> Vec<KvEvent> {
        self.levels.iter().flat_map(|level| level.plan.snapshot()).collect()
    }

    /// Size, use and speed of each tier.
    pub(crate) fn states(&self) -> Vec<TierState> {
        self.levels.iter().map(Level::state).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tiers::disk::Found;
    use crate::tiers::io::{Failure, Io, Store, Tell};
    use crate::tiers::level::REVIVE_FIRST;
    use penstock_kv::{SlotId, TierPool};
    use std::collections::HashMap;
    use std::sync::{Arc, mpsc};

    /// A store with blocks that a test can corrupt.
    #[derive(Default)]
    struct Fake {
        blocks: HashMap<SlotId, (BlockHash, Vec<u8>)>,
        fail: Option<Failure>,
        /// Number of attempts to open it again; the second succeeds, and finds a block.
        tried: u32,
    }

    impl Store for Fake {
        fn write(&mut self, slot: SlotId, link: Link, bytes: &[u8]) -> Result<(), Failure> {
            self.blocks.insert(slot, (link.hash, bytes.to_vec()));
            self.fail.map_or(Ok(()), Err)
        }

        fn read(&mut self, slot: SlotId, hash: BlockHash) -> Result<Vec<u8>, Failure> {
            let (held, bytes) = self.blocks.get(&slot).ok_or(Failure::Gone)?;
            if *held == hash { Ok(bytes.clone()) } else { Err(Failure::Corrupt) }
        }

        fn revive(&mut self) -> Result<(usize, Vec<Found>), String> {
            self.tried += 1;
            if self.tried == 1 {
                return Err("no such folder".into());
            }
            self.fail = None;
            let (slot, hash) = (SlotId(0), BlockHash(77));
            self.blocks = [(slot, (hash, vec![77; 8]))].into();
            Ok((4, vec![(slot, Link { parent: None, hash })]))
        }

        fn slots(&self) -> usize {
            self.blocks.len()
        }
    }

    struct Bench {
        levels: Levels,
        outcomes: mpsc::Receiver<Outcome>,
    }

    fn bench(memory: usize, disk: usize, fail: Option<Failure>) -> Bench {
        let (sender, outcomes) = mpsc::channel();
        let tell: Tell = Arc::new(move |outcome| sender.send(outcome).is_ok());
        let mut levels = Vec::new();
        if memory > 0 {
            let plan = TierPool::new(Tier::Host, memory);
            levels.push(Level::new(plan, Medium::Memory(vec![Vec::new(); memory])));
        }
        let io = Io::start(Tier::Disk, vec![Box::new(Fake { fail, ..Fake::default() })], &tell).expect("starts");
        levels.push(Level::new(TierPool::new(Tier::Disk, disk), Medium::Store(io)));
        Bench { levels: Levels::new(levels, 8), outcomes }
    }

    impl Bench {
        fn put(&mut self, n: u128) {
            let link = Link { parent: None, hash: BlockHash(n) };
            if self.levels.wants(link) {
                self.levels.put(0, link, vec![n as u8; 8]);
            }
        }

        fn load(&mut self, n: u128) -> Load {
            self.levels.load(BlockHash(n), Instant::now())
        }

        fn outcome(&mut self) -> News {
            let outcome = self.outcomes.recv_timeout(std::time::Duration::from_secs(20)).expect("an outcome");
            self.levels.outcome(outcome, Instant::now())
        }

        fn state(&self, tier: Tier) -> TierState {
            *self.levels.states().iter().find(|state| state.tier == tier as i32).expect("a tier")
        }
    }

    #[test]
    fn what_leaves_memory_goes_to_disk_and_comes_back() {
        let mut bench = bench(2, 4, None);
        (1..=3).for_each(|n| bench.put(n));
        assert_eq!(bench.outcome(), News::None);
        assert_eq!((bench.state(Tier::Host).blocks_used, bench.state(Tier::Disk).stored), (2, 1));
        assert_eq!(bench.load(2), Load::Here(vec![2; 8]));
        assert_eq!((bench.load(1), bench.load(9)), (Load::Coming, Load::Nowhere));
        assert_eq!(bench.outcome(), News::Block(BlockHash(1), Some(vec![1; 8])));
        assert!(bench.levels.seconds(BlockHash(1)).is_some() && bench.levels.seconds(BlockHash(9)).is_none());
        // Back on the device and evicted again: memory takes the block, and the disk still has it.
        bench.put(1);
        bench.put(4);
        let stored = bench.state(Tier::Disk).stored;
        bench.put(1);
        assert_eq!(bench.state(Tier::Disk).stored, stored);
    }

    #[test]
    fn a_full_disk_keeps_its_size_and_a_broken_one_is_left_alone() {
        let mut full = bench(0, 4, Some(Failure::Full));
        full.put(1);
        full.outcome();
        assert_eq!((full.state(Tier::Disk).blocks_total, full.state(Tier::Disk).dropped), (1, 1));
        // No room in the files that exist: their space could not be reserved.
        for n in 2..=4 {
            assert_eq!(full.state(Tier::Disk).blocks_total, 1);
            full.put(n);
            full.outcome();
        }
        assert_eq!((full.state(Tier::Disk).blocks_total, full.state(Tier::Disk).dropped), (0, 4));
        let off = "3 reads or writes in a row failed".to_owned();
        assert_eq!(full.levels.take_changes(), [Change { tier: Tier::Disk, off: Some(off) }]);
        let mut broken = bench(0, 4, Some(Failure::Broken));
        for n in 1..=3 {
            broken.put(n);
            broken.outcome();
        }
        assert_eq!(broken.state(Tier::Disk).blocks_total, 0);
        assert!(!broken.levels.wants(Link { parent: None, hash: BlockHash(9) }), "it is off");
        assert!(broken.levels.take_events().last().is_some_and(|event| event.cleared));
    }

    #[test]
    fn a_disk_that_failed_is_tried_again_and_comes_back_with_what_it_has() {
        let mut bench = bench(0, 4, Some(Failure::Broken));
        let (disk, began) = (Tier::Disk, Instant::now());
        for n in 1..=3 {
            bench.put(n);
            bench.outcome();
        }
        let off = Some("3 reads or writes in a row failed".to_owned());
        assert_eq!(bench.levels.take_changes(), [Change { tier: disk, off }]);
        // Not tried before the pause is over, and then once.
        bench.levels.revive(began);
        assert!(bench.outcomes.try_recv().is_err());
        let due = Instant::now() + REVIVE_FIRST;
        bench.levels.revive(due);
        bench.levels.revive(due);
        let tried = |bench: &mut Bench, now| {
            let outcome = bench.outcomes.recv_timeout(Duration::from_secs(20)).expect("an outcome");
            bench.levels.outcome(outcome, now);
            bench.levels.take_changes()
        };
        assert_eq!(tried(&mut bench, due), [], "it fails still, and nothing has changed");
        assert!(bench.outcomes.try_recv().is_err(), "asked once");
        bench.levels.revive(due + REVIVE_FIRST);
        assert!(bench.outcomes.try_recv().is_err(), "the second pause is longer");
        let due = due + 2 * REVIVE_FIRST;
        bench.levels.revive(due);
        assert_eq!(tried(&mut bench, due), [Change { tier: disk, off: None }]);
        let events = bench.levels.take_events();
        assert!(events[0].cleared && events.iter().any(|event| !event.stored.is_empty()), "{events:?}");
        assert_eq!((bench.state(disk).blocks_total, bench.load(77)), (4, Load::Coming));
        assert_eq!(bench.outcome(), News::Block(BlockHash(77), Some(vec![77; 8])));
        bench.put(5);
        bench.outcome();
        assert_eq!(bench.state(disk).stored, 1, "it takes blocks again");
    }

    #[test]
    fn a_store_that_does_not_answer_is_silent_until_it_does() {
        let mut bench = bench(1, 4, None);
        (1..=2).for_each(|n| bench.put(n));
        assert_eq!(bench.outcome(), News::None);
        let began = Instant::now();
        let [soon, later] = [SILENCE_MAX / 2, SILENCE_MAX].map(|time| began + time);
        assert_eq!(bench.levels.silence(BlockHash(1), later), Duration::ZERO, "nobody has asked");
        assert_eq!(bench.levels.load(BlockHash(1), began), Load::Coming);
        assert_eq!(bench.levels.silence(BlockHash(1), soon), SILENCE_MAX / 2);
        assert_eq!((bench.levels.stuck(soon), bench.levels.stuck(later)), (0, 1));
        assert_eq!(bench.levels.silence(BlockHash(2), later), Duration::ZERO, "memory always answers");
        bench.levels.late(Some(BlockHash(1)));
        assert_eq!((bench.state(Tier::Disk).late, bench.state(Tier::Host).late), (1, 0));
        assert_eq!(bench.outcome(), News::Block(BlockHash(1), Some(vec![1; 8])));
        assert_eq!((bench.levels.silence(BlockHash(1), later), bench.levels.stuck(later)), (Duration::ZERO, 0));
    }

    #[test]
    fn memory_is_poured_to_disk_at_the_end() {
        let mut bench = bench(3, 8, None);
        (1..=3).for_each(|n| bench.put(n));
        while bench.levels.pour() {}
        (0..3).for_each(|_| assert_eq!(bench.outcome(), News::None));
        assert_eq!((bench.state(Tier::Disk).stored, bench.state(Tier::Host).blocks_total), (3, 0));
        bench.put(4);
        bench.outcome();
        assert_eq!(bench.state(Tier::Disk).stored, 4, "memory is closed");
    }
}
