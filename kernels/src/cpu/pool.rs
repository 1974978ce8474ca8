//! The pinned thread pool: a fork and a join per operation, both of them barriers that spin first and sleep later.
//!
//! A decode step makes some hundred and fifty forks of tens of microseconds each, so workers spin for [`SPINS`] before they park; an
//! idle engine costs nothing. How items are dealt out never affects a result: every item is computed whole by one thread.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};

use crate::device::KernelError;

/// About 30–60 µs of `pause`: longer than the gap between two operations of a step, shorter than that between two steps.
const SPINS: u32 = 2000;

type Task = dyn Fn(usize) + Sync;

struct State {
    /// Grows by one per fork; workers wait for it to change.
    epoch: AtomicU32,
    /// The task of this epoch. Written by the caller before `epoch`, read by workers after it.
    task: UnsafeCell<Option<*const Task>>,
    /// Workers that have not finished this epoch.
    running: AtomicUsize,
    stop: AtomicBool,
    asleep: Vec<AtomicBool>,
    caller_asleep: AtomicBool,
    caller: Mutex<Option<Thread>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `task` is the only part that is not Sync already. The caller writes it while no worker runs (`running` is 0) and
// publishes it with the store to `epoch`; workers only read it after having seen that store, and before they lower `running`.
unsafe impl Sync for State {}
// SAFETY: the pointer in `task` is dereferenced only while the caller's borrow is alive (`run` waits for all workers).
unsafe impl Send for State {}

/// Threads that run the same function side by side; the caller is number 0.
pub(super) struct Pool {
    state: Arc<State>,
    workers: Vec<JoinHandle<()>>,
    cores: Option<Vec<usize>>,
    pinned_caller: Option<std::thread::ThreadId>,
}

impl Pool {
    /// `threads` in all, at least one, pinned to `cores` in order if given (then as many as threads).
    pub(super) fn new(threads: usize, cores: Option<Vec<usize>>) -> Result<Self, KernelError> {
        let state = Arc::new(State {
            epoch: AtomicU32::new(0),
            task: UnsafeCell::new(None),
            running: AtomicUsize::new(0),
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

    /// Runs `task(thread)` on every thread and returns when all are done.
    ///
    /// # Panics
    /// With the panic of `task`, after all threads have finished.
    pub(super) fn run(&mut self, task: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() {
            return task(0);
        }
        let state = &*self.state;
        // SAFETY: this only erases the borrow's lifetime; `finish` below returns after the last worker stopped using it.
        let erased = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), *const Task>(task) };
        // SAFETY: no worker reads `task` now: the previous epoch is finished and `&mut self` excludes another caller.
        unsafe { *state.task.get() = Some(erased) };
        state.running.store(self.workers.len(), Ordering::Relaxed);
        state.epoch.fetch_add(1, Ordering::SeqCst);
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
        self.state.epoch.fetch_add(1, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches its task's panics, so joining cannot fail; nothing could be done about it here anyway.
            let _ = worker.join();
        }
    }
}

impl State {
    /// Waits on the caller's side until no worker runs.
    fn finish(&self) {
        for _ in 0..SPINS {
            if self.running.load(Ordering::Acquire) == 0 {
                return;
            }
            std::hint::spin_loop();
        }
        *self.caller.lock().unwrap_or_else(PoisonError::into_inner) = Some(std::thread::current());
        loop {
            self.caller_asleep.store(true, Ordering::SeqCst);
            if self.running.load(Ordering::SeqCst) == 0 {
                self.caller_asleep.store(false, Ordering::SeqCst);
                return;
            }
            std::thread::park();
        }
    }

    /// Waits on worker `index`'s side for an epoch other than `seen`.
    fn next_epoch(&self, seen: u32, index: usize) -> u32 {
        for _ in 0..SPINS {
            let epoch = self.epoch.load(Ordering::Acquire);
            if epoch != seen {
                return epoch;
            }
            std::hint::spin_loop();
        }
        loop {
            self.asleep[index - 1].store(true, Ordering::SeqCst);
            let epoch = self.epoch.load(Ordering::SeqCst);
            if epoch != seen {
                self.asleep[index - 1].store(false, Ordering::SeqCst);
                return epoch;
            }
            std::thread::park();
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
        // SAFETY: the epoch was published after the task was written, and the caller keeps it alive until `running` is 0.
        let task = unsafe { &*(*state.task.get()).expect("an epoch has a task") };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| task(index))) {
            *state.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(payload);
        }
        if state.running.fetch_sub(1, Ordering::SeqCst) == 1 && state.caller_asleep.swap(false, Ordering::SeqCst) {
            let caller = state.caller.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if let Some(caller) = caller {
                caller.unpark();
            }
        }
    }
}

/// Pins the current thread to `core`. A refusal (a core outside of the process's set) is left alone: pinning is a hint.
fn pin(core: usize) {
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

/// Deals out `0..count` to threads in ascending order.
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

    #[test]
    fn every_thread_runs_after_all_slept() {
        let mut pool = Pool::new(3, Some(vec![0, 0, 0])).unwrap();
        pool.pin_caller();
        for _ in 0..3 {
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
            while !pool.state.asleep.iter().all(|asleep| asleep.load(Ordering::SeqCst)) {
                assert!(std::time::Instant::now() < deadline, "workers do not park");
                std::thread::yield_now();
            }
            let mask = AtomicUsize::new(0);
            pool.run(&|thread| {
                mask.fetch_or(1 << thread, Ordering::Relaxed);
            });
            assert_eq!(mask.into_inner(), 0b111);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let mut pool = Pool::new(3, None).unwrap();
        for culprit in [0, 2] {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.run(&|thread| assert_ne!(thread, culprit, "culprit"));
            }));
            assert!(caught.is_err());
            pool.run(&|_| ());
        }
    }
}
