//! Scene of one cell: the workers, the networks between them, and the fault.

use super::{AHEAD, Cell, Fault, HALF, OUTPUT, PROMPT, Point, Rest, Victim, Way, request};
use crate::matrix::descriptors;
use crate::relay::Relay;
use crate::{Dir, Worker, job, wait_for};
use penstock_pool::{FleetRuntime, Pool, PoolConfig, Steer, Ticket, WorkerPhase};
use penstock_proto::BLOCK_TOKENS;
use penstock_proto::frames::{EngineState, TransferState};
use rustix::process::Signal;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

impl Way {
    /// Bytes between the two workers after which the network stops: some blocks have come, most have not.
    fn part(self) -> u64 {
        match self {
            Way::Socket => 400_000,
            // A page needs only some twenty bytes about its slot.
            Way::Memory => 400,
        }
    }

    /// Network in front of a worker's transfer socket.
    fn before(self, socket: &Path) -> Relay {
        match self {
            Way::Socket => Relay::before(socket),
            Way::Memory => Relay::within(socket),
        }
    }
}

/// A worker that prefills for others, and its networks.
struct Prefill {
    worker: Worker,
    session: Relay,
    /// Network to the decode worker.
    kv: Relay,
}

impl Prefill {
    async fn new(dir: &Dir, name: &str, worker: Worker, cell: Cell) -> Self {
        let transfers = PathBuf::from(format!("{}.kv", worker.socket.display()));
        assert!(wait_for(|| transfers.exists().then_some(())).await.is_some(), "it listens for transfers");
        let kv = cell.way.before(&transfers);
        if cell.point == Point::Transferring {
            kv.hold_after(cell.way.part());
        }
        let session = Relay::start(dir, name, &worker.socket);
        Self { worker, session, kv }
    }
}

/// The separate workers, and a spare one.
pub(super) struct Scene {
    dir: Dir,
    pub(super) pool: Pool,
    prefills: Vec<Prefill>,
    decode: Worker,
    decode_session: Relay,
    spare: Option<Worker>,
}

impl Scene {
    pub(super) async fn new(binary: &str, runtime: &FleetRuntime, cell: Cell) -> Self {
        let dir = Dir::new();
        let gate = |context: usize| ["--gate".to_owned(), format!("{context}:{}", dir.path().display())];
        let (mut at_prefill, mut at_decode) = (Vec::new(), Vec::new());
        match cell.point {
            Point::Queued => at_prefill.extend(gate(AHEAD)),
            Point::Computing => at_prefill.extend(gate(HALF)),
            Point::Transferring => {}
            Point::First => at_decode.extend(gate(PROMPT + 1)),
            Point::Middle => at_decode.extend(gate(PROMPT + OUTPUT / 2)),
            Point::Last => at_decode.extend(gate(PROMPT + OUTPUT - 1)),
        }
        let start = |name: &str, role: &str, gate: &[String]| {
            let mut args = vec!["--demo", "--role", role];
            args.extend(gate.iter().map(String::as_str));
            Worker::start(binary, &dir, name, &args)
        };
        let names: &[&str] = if cell.rest == Rest::Another { &["p", "q"] } else { &["p"] };
        let prefilling: Vec<_> = names.iter().map(|name| (*name, start(name, "prefill", &at_prefill))).collect();
        let decode = start("d", "decode", &at_decode);
        let needs_spare = cell.victim == Victim::Decode && cell.fault != Fault::Leave;
        let spare = needs_spare.then(|| start("s", "decode", &[]));
        let mut prefills = Vec::new();
        for (name, worker) in prefilling {
            prefills.push(Prefill::new(&dir, name, worker, cell).await);
        }
        let decode_session = Relay::start(&dir, "d", &decode.socket);
        let mut config = PoolConfig::new("apart");
        (config.weights.apart_tokens_decode, config.balance) = (BLOCK_TOKENS, false);
        let sessions = prefills.iter().map(|prefill| &prefill.session).chain([&decode_session]).map(Relay::socket);
        config.connect = sessions.chain(spare.as_ref().map(|worker| worker.socket.as_path())).map(address).collect();
        let pool = Pool::start(runtime, config).expect("the pool starts");
        let scene = Self { dir, pool, prefills, decode, decode_session, spare };
        scene.ready(scene.workers().count()).await;
        scene
    }

    /// All workers, in the order of the pool.
    fn workers(&self) -> impl Iterator<Item = &Worker> {
        self.prefills.iter().map(|prefill| &prefill.worker).chain([&self.decode]).chain(&self.spare)
    }

    /// `at`: the prefill worker that has the request.
    fn victim(&self, victim: Victim, at: usize) -> &Worker {
        match victim {
            Victim::Prefill => &self.prefills[at].worker,
            Victim::Decode => &self.decode,
        }
    }

    /// Index of the victim in the pool.
    fn place(&self, victim: Victim, at: usize) -> usize {
        match victim {
            Victim::Prefill => at,
            Victim::Decode => self.prefills.len(),
        }
    }

    async fn ready(&self, count: usize) {
        let is_ready = || {
            let status = self.pool.status();
            let ready = status.workers.iter().filter(|worker| worker.phase == WorkerPhase::Ready).count();
            (ready >= count).then_some(())
        };
        assert!(wait_for(is_ready).await.is_some(), "{:?}", self.pool.status());
    }

    async fn steer(&self, at: usize, steer: Steer) {
        let name = self.pool.status().workers[at].name.clone();
        self.pool.steer(&name, steer).await.expect("steered");
    }

    /// Steers the spare decode worker: no requests, or all.
    pub(super) async fn steer_spare(&self, steer: Steer) {
        if self.spare.is_some() {
            self.steer(self.prefills.len() + 1, steer).await;
        }
    }

    /// Sends a request to every prefill worker, which waits there at its gate.
    pub(super) async fn occupy(&self) -> Vec<Ticket> {
        let mut ahead = Vec::new();
        for (at, prefill) in self.prefills.iter().enumerate() {
            let others: Vec<usize> = (0..self.prefills.len()).filter(|other| *other != at).collect();
            for other in &others {
                self.steer(*other, Steer::Hold).await;
            }
            let prompt: Vec<u32> = (0..AHEAD as u32).map(|token| 2 + 300 * at as u32 + token).collect();
            ahead.push(self.pool.submit(job(prompt, 1, 4)).expect("taken"));
            let reached = wait_for(|| self.has_reached_gate(&prefill.worker).then_some(())).await;
            assert!(reached.is_some(), "the gate of {at} is reached");
            for other in &others {
                self.steer(*other, Steer::Release).await;
            }
        }
        ahead
    }

    fn has_reached_gate(&self, worker: &Worker) -> bool {
        self.dir.file(&format!("reached-{}", worker.pid())).exists()
    }

    /// Waits until the request is at its point; returns the prefill worker that has it.
    pub(super) async fn wait_for_point(&self, point: Point) -> usize {
        let is_at = |prefill: &Prefill| match point {
            // The request ahead has asked before. This one was welcomed, and is told that it waits.
            Point::Queued => prefill.kv.answers(1) >= 2,
            Point::Computing => self.has_reached_gate(&prefill.worker),
            Point::Transferring => prefill.kv.is_holding(),
            // At any prefill worker.
            Point::First | Point::Middle | Point::Last => self.has_reached_gate(&self.decode),
        };
        wait_for(|| self.prefills.iter().position(is_at)).await.unwrap_or_else(|| panic!("it comes to {point:?}"))
    }

    fn mend_kv(&self) {
        self.prefills.iter().for_each(|prefill| prefill.kv.mend());
    }

    /// Makes the fault. `at`: the prefill worker that has the request.
    pub(super) async fn strike(&self, cell: Cell, at: usize) {
        let victim = self.victim(cell.victim, at);
        match cell.fault {
            Fault::Kill => victim.signal(Signal::KILL),
            Fault::Stop => victim.signal(Signal::STOP),
            Fault::End => victim.signal(Signal::TERM),
            Fault::Hold => self.steer(self.place(cell.victim, at), Steer::Hold).await,
            Fault::Cut | Fault::Leave => {}
        }
        match (cell.fault, cell.victim) {
            (Fault::Cut, Victim::Prefill) => {
                self.mend_kv();
                self.prefills[at].session.hold();
                self.prefills[at].kv.hold();
            }
            (Fault::Cut, Victim::Decode) => {
                self.decode_session.hold();
                // Only the decode worker's connection to it: later connections are not cut off.
                self.prefills[at].kv.hold_after(u64::MAX);
                self.prefills[at].kv.hold_open();
            }
            _ => self.mend_kv(),
        }
        std::fs::write(self.dir.file("open"), b"").expect("the gate opens");
    }

    /// Returns true if no worker holds anything of the requests.
    fn is_clean(&self, alive: usize) -> bool {
        let status = self.pool.status();
        let ready = status.workers.iter().filter(|worker| worker.phase == WorkerPhase::Ready);
        let is_idle =
            |state: &EngineState| state.running + state.waiting == 0 && state.blocks_free == state.blocks_total;
        let bound: usize = status.workers.iter().map(|worker| worker.bound).sum();
        status.open + status.waiting + bound == 0
            && ready.clone().count() == alive
            && ready.clone().all(|worker| is_idle(&worker.state))
    }

    /// Mends the fault as far as possible; then nothing may be left: no block, no descriptor, no shared memory, no
    /// request.
    pub(super) async fn settle(&self, cell: Cell, at: usize, fds: &[usize]) {
        let victim = self.victim(cell.victim, at);
        match cell.fault {
            Fault::Stop => victim.signal(Signal::CONT),
            Fault::Hold => self.steer(self.place(cell.victim, at), Steer::Release).await,
            Fault::Kill | Fault::Cut | Fault::Leave | Fault::End => {}
        }
        self.prefills.iter().map(|prefill| &prefill.session).chain([&self.decode_session]).for_each(Relay::mend);
        self.mend_kv();
        let dead = usize::from(matches!(cell.fault, Fault::Kill | Fault::End));
        let alive = self.workers().count() - dead;
        self.ready(alive).await;
        let clean = wait_for(|| self.is_clean(alive).then_some(())).await;
        assert!(clean.is_some(), "left behind: {:?}", self.pool.status());
        let is_dead = |worker: &Worker| dead == 1 && worker.pid() == victim.pid();
        let fewer = || {
            let mut workers = self.workers().zip(fds);
            let has_no_more =
                |worker: &Worker, fds: usize| descriptors(worker.pid()) <= fds && mappings(worker.pid()) == 0;
            workers.all(|(worker, fds)| is_dead(worker) || has_no_more(worker, *fds)).then_some(())
        };
        let now =
            || self.workers().map(|worker| (descriptors(worker.pid()), mappings(worker.pid()))).collect::<Vec<_>>();
        assert!(wait_for(fewer).await.is_some(), "descriptors: {fds:?}, now with mapped memory {:?}", now());
    }

    pub(super) fn descriptors(&self) -> Vec<usize> {
        self.workers().map(|worker| descriptors(worker.pid())).collect()
    }

    /// Checks by the workers' counters that pages took the intended transport and that the intended worker computed
    /// the rest.
    ///
    /// # Panics
    /// If not.
    pub(super) fn check_ways(&self, cell: Cell, at: usize) {
        let status = self.pool.status();
        let told: Vec<TransferState> =
            status.workers.iter().map(|worker| worker.state.transfers.unwrap_or_default()).collect();
        let sum = |count: fn(&TransferState) -> u64| told.iter().map(count).sum::<u64>();
        let (bytes, through_memory) = (sum(|told| told.bytes_in), sum(|told| told.memory_bytes));
        assert_eq!(through_memory, if cell.way == Way::Memory { bytes } else { 0 }, "{cell:?}: {told:?}");
        let is_asked_anew = cell.rest == Rest::Another || cell.victim == Victim::Decode && cell.point.is_early();
        assert!(bytes > 0 || !is_asked_anew && cell.point != Point::Transferring, "{cell:?}: nothing came: {told:?}");
        let decode = &told[self.prefills.len()];
        if cell.rest == Rest::Another {
            // A request ahead had no other worker to go to, and there was only one.
            let expected = if cell.point == Point::Queued { (2, 2, 1) } else { (1, 1, 1) };
            let log = self.log("d");
            assert_eq!((decode.completed, decode.failed, decode.asked_next), expected, "{cell:?}: {told:?}\n{log}");
            assert!(told[1 - at].bytes_out > 0, "{cell:?}: the other one has sent something: {told:?}");
        } else {
            assert_eq!(sum(|told| told.asked_next), 0, "{cell:?}: {told:?}");
        }
    }

    /// Log lines of a worker about transfers.
    fn log(&self, name: &str) -> String {
        let log = std::fs::read_to_string(self.dir.file(&format!("{name}.log"))).unwrap_or_default();
        log.lines().filter(|line| line.contains("transfer")).collect::<Vec<_>>().join("\n")
    }

    /// Checks that a drained worker has first finished its work for others.
    ///
    /// # Panics
    /// If not.
    pub(super) fn check_order(&self, cell: Cell) {
        let status = self.pool.status();
        let told = status.workers[self.prefills.len()].state.transfers.unwrap_or_default();
        if cell.victim == Victim::Prefill {
            let asked = 1 + u64::from(cell.point == Point::Queued);
            let log = self.log("d");
            assert_eq!((told.completed, told.failed), (asked, 0), "{cell:?}: {told:?}\n{log}");
        }
        let counts = status.counts;
        let moved = u64::from(cell.victim == Victim::Decode);
        // What was ahead of it may have ended before.
        let ahead = u64::from(cell.point == Point::Queued);
        assert!((moved..=moved + ahead).contains(&counts.moves[1]), "{cell:?}: {counts:?}");
        assert_eq!(counts.resumed, 0, "{cell:?}: {counts:?}");
    }

    /// Lets the client leave: both workers stop their work for it at once, not when it is done.
    pub(super) async fn leave(&self, cell: Cell, fds: &[usize]) -> Duration {
        let began = Instant::now();
        if cell.point == Point::Transferring {
            self.mend_kv();
        }
        // The engine of one worker waits at its gate and cannot be told; the rest of that worker is told, and closes
        // the transfer's connection.
        let ahead = usize::from(cell.point == Point::Queued);
        let told = || (descriptors(self.prefills[0].worker.pid()) <= fds[0] + ahead).then_some(());
        assert!(wait_for(told).await.is_some(), "the prefill worker is told");
        // The gate opens after the gateway was told too: a device at a gate cannot be blamed for missing the message.
        assert!(wait_for(|| (self.pool.status().open == ahead).then_some(())).await.is_some(), "the gateway is told");
        self.strike(cell, 0).await;
        assert!(wait_for(|| self.is_clean(2).then_some(())).await.is_some(), "left behind: {:?}", self.pool.status());
        let gone = began.elapsed();
        let states = [0, 1].map(|at| self.pool.status().workers[at].state.clone());
        // Tokens computed by the prefill worker, and emitted by the decode worker.
        let computed = match cell.point {
            Point::Queued => AHEAD,
            Point::Computing => HALF,
            _ => PROMPT,
        };
        assert!(states[0].blocks_cached as usize <= computed / BLOCK_TOKENS, "{cell:?}: it went on: {:?}", states[0]);
        if matches!(cell.point, Point::Computing | Point::Transferring | Point::First | Point::Middle) {
            let whole = (OUTPUT * request(cell.kind).choices as usize) as u64;
            assert!(states[1].output_tokens < whole, "{cell:?}: it went on: {:?}", states[1]);
        }
        gone
    }
}

/// Number of memory pieces that a process has mapped to share pages.
fn mappings(pid: u32) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    maps.lines().filter(|line| line.contains("penstock-kv")).count()
}

fn address(path: &Path) -> penstock_proto::Address {
    format!("unix://{}", path.display()).parse().expect("an address")
}
