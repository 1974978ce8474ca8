//! The pinned thread pool: a fork and a join per operation, both of them barriers that spin first and sleep later.
//!
//! A decode step makes some hundred and fifty forks of tens of microseconds each, so workers spin for [`SPINS`] before
//! they park; an idle engine costs nothing. The distribution of items never affects a result: every item is computed
//! whole by one thread.
//!
//! A worker joins a task if it comes while the task is *open*. The caller closes the task when its own share is done,
//! that is, when no item is left, and then waits only for the workers that joined. So a worker whose core is busy with
//! something else (the gateway, say) costs the caller its help, not a time slice of waiting.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};

use crate::device::KernelError;

/// Spins before a worker parks, about 30–60 µs of `pause`: longer than the gap between two operations of a step,
/// shorter than that between two steps.
const SPINS: u32 = 2000;

/// Bytes up to which work stays on the caller: one core reads as much from its caches in about 5 µs, and a fork and a
/// join take 2 µs when nothing disturbs them.
const ALONE_BYTES: usize = 256 << 10;

type Task = dyn Fn(usize) + Sync;

/// Bit that allows workers to join.
const OPEN: u64 = 1 << 31;
/// Bits that count the joined workers.
const JOINED: u64 = OPEN - 1;

fn epoch(word: u64) -> u64 {
    word >> 32
}

struct State {
    /// Epoch (grows by one per fork) in the upper half, [`OPEN`], and the number of workers that have joined and not
    /// left.
    word: AtomicU64,
    /// Task of the current epoch, borrowed from the caller for as long as the epoch lasts. Written by the caller
    /// before it opens the epoch, read by workers that joined.
    task: UnsafeCell<Option<*const Task>>,
    stop: AtomicBool,
    asleep: Vec<AtomicBool>,
    caller_asleep: AtomicBool,
    caller: Mutex<Option<Thread>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `task` is the only part that is not Sync already. The caller writes it while the epoch is closed and nobody has joined,
// and publishes it by opening the next; workers read it only between joining an open epoch and leaving it.
unsafe impl Sync for State {}
// SAFETY: the pointer in `task` is dereferenced only while the caller's borrow is alive (`run` closes the epoch and
// waits for all who joined).
unsafe impl Send for State {}

/// Threads that run the same function side by side; the caller is number 0.
pub(super) struct Pool {
    state: Arc<State>,
    workers: Vec<JoinHandle<()>>,
    cores: Option<Vec<usize>>,
    pinned_caller: Option<std::thread::ThreadId>,
}

impl Pool {
    /// Creates a pool of `threads` threads in all, at least one, pinned to `cores` in order if given (then as many as
    /// threads).
    pub(super) fn new(threads: usize, cores: Option<Vec<usize>>) -> Result<Self, KernelError> {
        let state = Arc::new(State {
            word: AtomicU64::new(0),
            task: UnsafeCell::new(None),
            stop: AtomicBool::new(false),
            asleep: (1..threads).map(|_| AtomicBool::new(false)).collect(),
            caller_asleep: AtomicBool::new(false),
            caller: Mutex::new(None),
            panic: Mutex::new(None),
        });
        let mut pool = Self { state, workers: Vec::new(), cores, pinned_caller: None };
        for index in 1..threads {
            let state = Arc::clone(&pool.state);
            let core = pool.cores.as_ref().map(|cores| cores[index]);
            let worker = std::thread::Builder::new().name(format!("kernel-{index}")).spawn(move || {
                if let Some(core) = core {
                    pin(core);
                }
                work(&state, index);
            });
            let os = |source| KernelError::Os { what: "cannot start a kernel thread".into(), source };
            pool.workers.push(worker.map_err(os)?);
        }
        Ok(pool)
    }

    pub(super) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Pins the calling thread to the first core of the list; cheap to call often.
    pub(super) fn pin_caller(&mut self) {
        let Some(cores) = &self.cores else { return };
        let caller = std::thread::current().id();
        if self.pinned_caller != Some(caller) {
            self.pinned_caller = Some(caller);
            pin(cores[0]);
        }
    }

    /// Runs a task as [`Pool::run`] does, or on the caller alone where `bytes` to be read are so few that a fork would cost more.
    pub(super) fn run_if_worth(&mut self, bytes: usize, task: &(dyn Fn(usize) + Sync)) {
        if bytes <= ALONE_BYTES { task(0) } else { self.run(task) }
    }

    /// Runs `task(thread)` on the caller and on every worker that is free before the caller's is done, and returns
    /// when all are. A task deals out its work by [`Items`], so that it is complete whichever threads took part.
    ///
    /// # Panics
    /// With the panic of `task`, after all participants have finished.
    pub(super) fn run(&mut self, task: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() {
            return task(0);
        }
        let state = &*self.state;
        // SAFETY: this only erases the borrow's lifetime; `finish` below returns after the last worker stopped using it, and
        // after it nobody joins.
        let erased = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), *const Task>(task) };
        // SAFETY: no worker reads `task` now: the previous epoch is closed and left, and `&mut self` excludes another caller.
        unsafe { *state.task.get() = Some(erased) };
        let next = epoch(state.word.load(Ordering::Relaxed)) + 1;
        state.word.store(next << 32 | OPEN, Ordering::SeqCst);
        for (asleep, worker) in state.asleep.iter().zip(&self.workers) {
            if asleep.swap(false, Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        let own = catch_unwind(AssertUnwindSafe(|| task(0)));
        state.finish();
        let theirs = state.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(payload) = own.err().or(theirs) {
            resume_unwind(payload);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::SeqCst);
        self.state.word.fetch_add(1 << 32, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches its task's panics, so joining cannot fail; nothing could be done about it here anyway.
            let _ = worker.join();
        }
    }
}

impl State {
    /// Closes the epoch and waits until all workers have left it; called by the caller of the task.
    fn finish(&self) {
        let mut word = self.word.fetch_and(!OPEN, Ordering::SeqCst);
        for _ in 0..SPINS {
            if word & JOINED == 0 {
                return;
            }
            std::hint::spin_loop();
            word = self.word.load(Ordering::Acquire);
        }
        *self.caller.lock().unwrap_or_else(PoisonError::into_inner) = Some(std::thread::current());
        loop {
            self.caller_asleep.store(true, Ordering::SeqCst);
            if self.word.load(Ordering::SeqCst) & JOINED == 0 {
                self.caller_asleep.store(false, Ordering::SeqCst);
                return;
            }
            std::thread::park();
        }
    }

    /// Waits for an epoch other than `seen`; called by worker `index`.
    fn next_epoch(&self, seen: u64, index: usize) -> u64 {
        for _ in 0..SPINS {
            let now = epoch(self.word.load(Ordering::Acquire));
            if now != seen {
                return now;
            }
            std::hint::spin_loop();
        }
        loop {
            self.asleep[index - 1].store(true, Ordering::SeqCst);
            let now = epoch(self.word.load(Ordering::SeqCst));
            if now != seen {
                self.asleep[index - 1].store(false, Ordering::SeqCst);
                return now;
            }
            std::thread::park();
        }
    }

    /// Joins epoch `wanted` if it is still open.
    fn join(&self, wanted: u64) -> bool {
        let joined = |word: u64| (epoch(word) == wanted && word & OPEN != 0).then_some(word + 1);
        self.word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, joined).is_ok()
    }

    /// Leaves a joined epoch; the last worker wakes the caller.
    fn leave(&self) {
        let before = self.word.fetch_sub(1, Ordering::SeqCst);
        if before & JOINED == 1 && before & OPEN == 0 && self.caller_asleep.swap(false, Ordering::SeqCst) {
            let caller = self.caller.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if let Some(caller) = caller {
                caller.unpark();
            }
        }
    }
}

fn work(state: &State, index: usize) {
    let mut seen = 0;
    loop {
        seen = state.next_epoch(seen, index);
        if state.stop.load(Ordering::SeqCst) {
            return;
        }
        if !state.join(seen) {
            continue;
        }
        // SAFETY: this worker has joined, so the task was written before, and the caller keeps it alive until all have left.
        let task = unsafe { &*(*state.task.get()).expect("an open epoch has a task") };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| task(index))) {
            *state.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(payload);
        }
        state.leave();
    }
}

/// Pins the current thread to `core`. A refusal (a core outside of the process's set) is ignored: pinning is a hint.
pub(super) fn pin(core: usize) {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: an all-zero cpu_set_t is a valid empty set.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        if core < libc::CPU_SETSIZE as usize {
            // SAFETY: `core` is below CPU_SETSIZE (checked above).
            unsafe { libc::CPU_SET(core, &mut set) };
            // SAFETY: pid 0 is the calling thread; the set is valid and of the size given.
            unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = core;
}

/// Dispenser of the items `0..count` to threads, in ascending order.
pub(super) struct Items {
    next: AtomicUsize,
    count: usize,
}

impl Items {
    pub(super) fn new(count: usize) -> Self {
        Self { next: AtomicUsize::new(0), count }
    }

    /// The next item, each given once.
    pub(super) fn take(&self) -> Option<usize> {
        let item = self.next.fetch_add(1, Ordering::Relaxed);
        (item < self.count).then_some(item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_done_once_in_every_round() {
        for threads in [1, 2, 5] {
            let mut pool = Pool::new(threads, None).unwrap();
            for round in 0..300 {
                let (items, done) = (Items::new(round), (0..round).map(|_| AtomicUsize::new(0)).collect::<Vec<_>>());
                pool.run(&|_| {
                    while let Some(item) = items.take() {
                        done[item].fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(done.iter().all(|d| d.load(Ordering::Relaxed) == 1));
            }
        }
    }

    /// Blocks until all `threads` threads of the task have arrived.
    fn meet(here: &AtomicUsize, threads: usize) {
        here.fetch_add(1, Ordering::SeqCst);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while here.load(Ordering::SeqCst) < threads {
            assert!(std::time::Instant::now() < deadline, "a worker does not come");
            std::thread::yield_now();
        }
    }

    #[test]
    fn sleeping_workers_come_to_an_open_task() {
        let mut pool = Pool::new(3, Some(vec![0, 0, 0])).unwrap();
        pool.pin_caller();
        for _ in 0..3 {
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
            while !pool.state.asleep.iter().all(|asleep| asleep.load(Ordering::SeqCst)) {
                assert!(std::time::Instant::now() < deadline, "workers do not park");
                std::thread::yield_now();
            }
            let (here, mask) = (AtomicUsize::new(0), AtomicUsize::new(0));
            pool.run(&|thread| {
                meet(&here, 3);
                mask.fetch_or(1 << thread, Ordering::Relaxed);
            });
            assert_eq!(mask.into_inner(), 0b111);
        }
    }

    #[test]
    fn a_closed_task_is_not_joined() {
        let mut pool = Pool::new(2, None).unwrap();
        for _ in 0..2000 {
            let running = AtomicBool::new(true);
            pool.run(&|_| assert!(running.load(Ordering::SeqCst), "joined after the end"));
            running.store(false, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let mut pool = Pool::new(3, None).unwrap();
        for culprit in [0, 2] {
            let here = AtomicUsize::new(0);
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.run(&|thread| {
                    meet(&here, 3);
                    assert_ne!(thread, culprit, "culprit");
                });
            }));
            assert!(caught.is_err());
            pool.run(&|_| ());
        }
    }
}
