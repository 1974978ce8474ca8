//! One worker as the actor sees it: its session, its last report, the requests bound to it, and the rules for suspecting it.

use super::adapters::Adapters;
use super::config::PoolConfig;
use super::session::Link;
use super::status::{AdapterState, LoadedAdapter, WorkerPhase, WorkerStatus};
use super::steering::Steering;
use super::steps::StepTimes;
use super::sums::Lives;
use super::troubles::Troubles;
use penstock_proto::frames::{EngineState, GpuState, Loading, Ready};
use penstock_proto::{AdapterId, Address, Capabilities, Epoch, RequestId};
use std::collections::HashSet;
use std::net::{IpAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Steps after which a worker's speed counts as known.
const KNOWN_AFTER: u64 = 64;

/// Lower bound, in seconds, of the longest step allowed to a known worker.
const STEP_LEAST: f64 = 3.0;

/// Factor by which the recorded longest step time is multiplied at each later report of the engine's state; it halves
/// after about 700 reports.
const FADING: f64 = 0.999;

/// Multiple of a step's bound at which a worker is given up whose step does not end, even if no other worker is ready.
const GIVE_UP: f64 = 4.0;

/// Time in which an engine takes a new session in, unless it is in a long step.
const JOINS_WITHIN: Duration = Duration::from_secs(2);

/// Longest load time that a worker is believed, in seconds.
const LOAD_MOST: f64 = 3600.0;

/// Consequence of a worker's silence or of the age of its step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doubt {
    /// The worker answers in time and may get requests.
    None,
    /// Bind nothing new to the worker; move its requests if another worker is ready.
    Suspect,
    /// Close the session: requests bound to the worker go on elsewhere.
    GiveUp,
}

/// State of the session with a worker, from no connection to serving.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Session {
    /// No connection to the worker; `why` says what ended the last session or attempt.
    Absent { why: String },
    /// Connected to the worker, which is loading its model and serves nothing yet.
    Loading(Loading),
    /// Connected to the worker, which has its model loaded and runs requests.
    Ready,
    /// The worker has been silent for too long, or its step takes too long.
    Suspected,
}

/// Whether a worker shall run, where the number of workers follows the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seat {
    /// The worker is not wanted: no process runs, or none is to be started.
    Off,
    /// The worker is wanted: its process runs, or is to be started.
    On,
    /// To be stopped: its requests move or finish first; since this instant.
    Emptying(Instant),
    /// Asked to end, itself or by the hook; since this instant.
    Ending(Instant),
    /// Ending as asked: the worker drains, or the hook has agreed to stop it; since this instant.
    Going(Instant),
}

/// Process of a local worker, as the supervisor last reported it.
#[derive(Clone, Debug, Default)]
pub(super) struct Process {
    pub(super) starts: u64,
    pub(super) adopted: bool,
    /// The process runs with another share of the machine than a new one would get.
    pub(super) displaced: bool,
    pub(super) is_running: bool,
    /// Instant of the next start, and the cause of the last end.
    pub(super) down: Option<(Instant, String)>,
    /// Description of the last end that a client may read; cleared once the worker serves again.
    pub(super) ended: Option<String>,
    /// The process is in a crash loop and is not counted on.
    pub(super) loops: bool,
}

/// State of one worker of the pool, local or remote; see the module header.
pub(super) struct Member {
    pub(super) name: Arc<str>,
    pub(super) address: Address,
    pub(super) session: Session,
    pub(super) link: Option<Link>,
    pub(super) ready: Option<Box<Ready>>,
    transfer: String,
    pub(super) numerics_id: Arc<str>,
    pub(super) state: EngineState,
    lives: Lives,
    /// Arrival of the worker's last frame, plus delays of the actor itself.
    pub(super) heard: Instant,
    /// Instant since which the worker has answered while its engine has not, plus delays of the actor itself: the engine leaves a new session
    /// unanswered. `None`: it does not, or there is no session.
    pub(super) joining_since: Option<Instant>,
    /// Age in seconds of the step in which the engine was when the last session ended.
    step_age: f64,
    /// Longest reported step in seconds, decaying with each later step.
    longest_step: f64,
    /// Number of steps with a batch that the worker reported in its present life.
    pub(super) steps: u64,
    /// Durations of the steps with decodes in the worker's present life.
    pub(super) decode_steps: StepTimes,
    pub(super) bound: HashSet<RequestId>,
    pub(super) deaths: u64,
    /// Reason that the worker does not suit the pool; `None`: it does.
    pub(super) unsuited: Option<&'static str>,
    /// Order of an operator or a planner in force for the worker.
    pub(super) steering: Steering,
    /// Whether the worker shall run, as the planner of replicas decides.
    pub(super) seat: Seat,
    /// Process of a local worker; `None` for a remote one.
    pub(super) process: Option<Process>,
    /// Duration of the model's last load; `None` until one has ended.
    pub(super) load: Option<Duration>,
    /// Lives whose weights lie in shared memory: packed by the worker itself, and found there.
    loads: [u64; 2],
    /// Instant at which the load of the model in progress began; `None` while none is in progress.
    pub(super) loading_since: Option<Instant>,
    /// Troubles that the worker has reported and that may persist; they cost time but no request.
    pub(super) troubles: Troubles,
    /// Last figures of the worker's GPU; `None` without a session, and where there are none.
    pub(super) gpu: Option<Box<GpuState>>,
}

impl Member {
    pub(super) fn new(name: String, address: Address, is_local: bool, now: Instant) -> Self {
        Self {
            name: name.into(),
            address,
            session: Session::Absent { why: "not connected yet".into() },
            link: None,
            ready: None,
            transfer: String::new(),
            numerics_id: "".into(),
            state: EngineState::default(),
            lives: Lives::default(),
            heard: now,
            joining_since: None,
            step_age: 0.0,
            longest_step: 0.0,
            steps: 0,
            decode_steps: StepTimes::default(),
            bound: HashSet::new(),
            deaths: 0,
            unsuited: None,
            steering: Steering::Free,
            seat: Seat::On,
            process: is_local.then(Process::default),
            load: None,
            loads: [0; 2],
            loading_since: None,
            troubles: Troubles::default(),
            gpu: None,
        }
    }

    /// Takes in a new session of a worker that is ready, perhaps the same life as before.
    pub(super) fn begin(&mut self, ready: Box<Ready>, link: Link, now: Instant) {
        self.session = Session::Ready;
        self.unsuited = None;
        self.link = Some(link);
        self.numerics_id = ready.numerics_id.as_str().into();
        self.heard = now;
        self.answers();
        self.longest_step = 0.0;
        self.steps = 0;
        self.decode_steps = StepTimes::default();
        let is_new = self.lives.begin(Epoch(ready.epoch));
        // An earlier gateway counted the start of a worker that was adopted.
        let is_start = is_new && self.process.as_ref().is_some_and(|process| !process.adopted);
        if is_start && ready.shared_weights_bytes > 0 {
            self.loads[usize::from(ready.found_weights)] += 1;
        }
        self.say(ready.state.as_ref());
        self.transfer = reached_at(&ready.transfer, &self.address);
        self.load = load(ready.load_seconds).or(self.load);
        self.loading_since = None;
        // A trouble that persists is reported again, and so are the figures of the GPU.
        (self.troubles, self.gpu) = (Troubles::default(), None);
        self.process.iter_mut().for_each(|process| process.ended = None);
        self.ready = Some(ready);
    }

    /// Address at which other workers reach this one for KV; empty: nowhere.
    pub(super) fn transfer_address(&self) -> &str {
        &self.transfer
    }

    /// Takes in a report of the engine's state.
    pub(super) fn say(&mut self, state: Option<&EngineState>) {
        if let Some(state) = state {
            if state.step_seconds.is_finite() {
                self.longest_step = state.step_seconds.max(self.longest_step * FADING);
            }
            self.lives.say(state);
            self.state = state.clone();
        }
    }

    /// Ends the session: nothing that the worker ran or held counts any more.
    pub(super) fn end(&mut self, why: &str) {
        self.session = Session::Absent { why: why.into() };
        (self.troubles, self.gpu) = (Troubles::default(), None);
        self.loading_since = None;
        self.step_age = self.step_age.max(self.state.step_age_seconds);
        self.state = EngineState { draining: self.state.draining, role: self.state.role, ..EngineState::default() };
    }

    /// Takes in the worker's report on the progress of loading its model.
    pub(super) fn loads(&mut self, loading: Loading, now: Instant) {
        self.heard = now;
        self.loading_since.get_or_insert(now);
        if loading.is_joining() {
            self.joining_since.get_or_insert(now);
        } else {
            self.answers();
        }
        self.session = Session::Loading(loading);
    }

    /// Forgets a step that did not end: the engine is not in it any more, or another process has taken its place.
    pub(super) fn answers(&mut self) {
        (self.joining_since, self.step_age) = (None, 0.0);
    }

    /// Returns true if the worker is connected, and neither drains nor has an order that keeps requests away.
    pub(super) fn serves(&self) -> bool {
        self.link.is_some() && !self.state.draining && self.steering == Steering::Free
    }

    /// Returns true if new requests may be bound to the worker.
    pub(super) fn takes_requests(&self) -> bool {
        self.session == Session::Ready && !self.state.draining && self.steering == Steering::Free
    }

    /// Judges the worker's silence and the age of its step. `ahead`: predicted seconds of the prefill queued at the worker.
    pub(super) fn doubt_now(&self, config: &PoolConfig, ahead: f64, now: Instant) -> Doubt {
        if !matches!(self.session, Session::Ready | Session::Suspected | Session::Loading(_)) {
            return Doubt::None;
        }
        let silence = now.saturating_duration_since(self.heard);
        let patience = self.patience(config, ahead);
        let age = self.state.step_age_seconds;
        if silence > config.give_up_after || age > GIVE_UP * patience {
            Doubt::GiveUp
        } else if silence > config.suspect_after || age > patience {
            Doubt::Suspect
        } else {
            Doubt::None
        }
    }

    /// Returns true if the worker's process answers and its engine does not come out of a step: for `hang_after`, and for as long as a step may
    /// take before the worker is given up. What this gateway knows of the worker's steps may be short beside a prompt of another gateway, so that
    /// being given up is no reason to kill. The session that waits for the answer counts, and the age of the step in the session before; after a
    /// pause of both this process and the worker, the age alone says nothing.
    pub(super) fn hangs(&self, config: &PoolConfig, now: Instant) -> bool {
        let Some(since) = self.joining_since else { return false };
        let waited = now.saturating_duration_since(since);
        let bound = config.hang_after.as_secs_f64().max(GIVE_UP * self.patience(config, 0.0));
        waited > config.give_up_after && self.step_age + waited.as_secs_f64() > bound
    }

    /// Seconds that a step may take. Before the first step there is no measure, and a cold start may take long: 60 s.
    /// For a worker of known speed the bound is the largest of 3 s (or `step_max`, if less), ten times the longest
    /// step, and four times the prefill ahead; until then `step_max` takes the place of the 3 s.
    fn patience(&self, config: &PoolConfig, ahead: f64) -> f64 {
        let most = config.step_max.as_secs_f64();
        match self.steps {
            _ if self.longest_step <= 0.0 => 60.0,
            KNOWN_AFTER.. => most.min(STEP_LEAST).max(4.0 * ahead).max(10.0 * self.longest_step),
            _ => most.max(10.0 * self.longest_step),
        }
    }

    /// The worker's state as one row of the pool's status snapshot.
    pub(super) fn status(&self, pool: &Adapters, now: Instant) -> WorkerStatus {
        let process = self.process.clone().unwrap_or_default();
        WorkerStatus {
            name: self.name.to_string(),
            phase: self.phase(now),
            pid: self.ready.as_ref().map_or(0, |ready| ready.pid),
            epoch: self.epoch(),
            device: self.ready.as_ref().map_or_else(String::new, |ready| ready.device.clone()),
            numerics_id: Arc::clone(&self.numerics_id),
            grammar: self.ready.as_ref().map_or_else(String::new, |ready| ready.grammar.clone()),
            capabilities: self.ready.as_ref().map_or(Capabilities::NONE, |ready| ready.has()),
            adapters: self.adapters(pool),
            adapters_pending: self
                .ready
                .iter()
                .flat_map(|ready| &ready.adapters_pending)
                .map(AdapterState::from)
                .collect(),
            adapter_orders: self.ready.as_ref().is_some_and(|ready| ready.adapter_orders),
            state: self.state.clone(),
            decode_steps: self.decode_steps.summary(),
            sums: self.lives.sums(),
            bound: self.bound.len(),
            deaths: self.deaths,
            starts: process.starts,
            adopted: process.adopted,
            ended: process.ended,
            load: self.load,
            shared_loads: self.loads,
            shared_weights_bytes: self.ready.as_ref().map_or(0, |ready| ready.shared_weights_bytes),
            troubles: self.troubles.lines(),
            gpu: self.gpu.clone(),
        }
    }

    /// Adapters that the worker announces, as the pool sees them.
    fn adapters(&self, pool: &Adapters) -> Vec<LoadedAdapter> {
        let loaded = self.ready.iter().flat_map(|ready| &ready.adapters);
        let known = loaded.filter_map(|adapter| {
            let id = AdapterId::from_bytes(&adapter.id)?;
            let superseded = pool.is_superseded(&adapter.name, &adapter.key);
            Some(LoadedAdapter { name: adapter.name.clone(), id, superseded })
        });
        known.collect()
    }

    /// Id of the adapter that the worker announces under a name for an order of that key.
    pub(super) fn announces(&self, name: &str, key: &str) -> Option<AdapterId> {
        let mut loaded = self.ready.iter().flat_map(|ready| &ready.adapters);
        let found = loaded.find(|adapter| adapter.name == name && adapter.key == key)?;
        AdapterId::from_bytes(&found.id)
    }

    pub(super) fn phase(&self, now: Instant) -> WorkerPhase {
        if let Some(why) = self.unsuited {
            return WorkerPhase::Down { retry_in: Duration::from_secs(1), why: why.into() };
        }
        match &self.session {
            Session::Absent { .. } if self.seat == Seat::Off => WorkerPhase::Stopped,
            Session::Ready if self.state.draining || self.steering != Steering::Free => WorkerPhase::Draining,
            Session::Ready => WorkerPhase::Ready,
            Session::Suspected => WorkerPhase::Suspected,
            Session::Loading(_) if self.joining_since.is_some_and(|since| now > since + JOINS_WITHIN) => {
                WorkerPhase::Down { retry_in: Duration::from_secs(1), why: "a step of its engine does not end".into() }
            }
            Session::Loading(loading) => WorkerPhase::Loading {
                stage: loading.stage.clone(),
                bytes_done: loading.bytes_done,
                bytes_total: loading.bytes_total,
            },
            Session::Absent { why } => match &self.process {
                Some(Process { down: Some((until, why)), .. }) => {
                    WorkerPhase::Down { retry_in: until.saturating_duration_since(now), why: why.clone() }
                }
                Some(Process { is_running: true, .. }) => WorkerPhase::Starting,
                Some(_) => WorkerPhase::Starting,
                None => WorkerPhase::Down { retry_in: Duration::from_secs(1), why: why.clone() },
            },
        }
    }
}

/// Load time as the worker reports it; `None` for an implausible value.
fn load(seconds: f64) -> Option<Duration> {
    (seconds > 0.0 && seconds <= LOAD_MOST).then(|| Duration::from_secs_f64(seconds))
}

/// Address at which other workers reach a worker that calls itself `told` and that this gateway reaches at `ours`.
///
/// Over TCP the host is the one where this gateway reaches the worker: the worker's own name may mean nothing
/// elsewhere, and its certificate is for the gateway's host. Exception: if the gateway reaches it on loopback, the
/// worker may name another address of this same machine. An address of any other machine is rejected, because the
/// pool's workers would send there with the pool's key. If the config says `localhost` and the worker names loopback,
/// the config's name stays, which the certificate is for.
fn reached_at(told: &str, ours: &Address) -> String {
    match (told.parse(), ours) {
        (Ok(Address::Tcp(theirs)), Address::Tcp(ours)) => {
            let (named, port) = theirs.rsplit_once(':').unwrap_or_default();
            let (host, _) = ours.rsplit_once(':').unwrap_or_default();
            let is_here = matches!(host, "127.0.0.1" | "[::1]" | "localhost");
            let is_open = matches!(named, "0.0.0.0" | "[::]");
            let is_same = host == "localhost" && matches!(named, "127.0.0.1" | "[::1]" | "localhost");
            match is_here && !is_open && !is_same {
                true if is_of_this_machine(named) => told.to_owned(),
                true => String::new(),
                false => Address::Tcp(format!("{host}:{port}")).to_string(),
            }
        }
        // A Unix socket is reachable on its own machine only: no peer is sent from TCP to a path, or from a path to TCP.
        (Ok(Address::Unix(_)), Address::Tcp(_)) | (Ok(Address::Tcp(_)), Address::Unix(_)) => String::new(),
        _ => told.to_owned(),
    }
}

/// Returns true if a host is an address of this machine: only such an address can be bound.
fn is_of_this_machine(host: &str) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    host == "localhost" || address.is_ok_and(|address| UdpSocket::bind((address, 0)).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(steps: u64, step_seconds: f64, age: f64) -> (Member, Instant) {
        let now = Instant::now();
        let address = "unix:///tmp/a.sock".parse().expect("an address");
        let mut member = Member::new("a".into(), address, false, now);
        member.session = Session::Ready;
        member.say(Some(&EngineState { step_seconds, step_age_seconds: age, ..Default::default() }));
        member.steps = steps;
        (member, now)
    }

    #[track_caller]
    fn check(steps: u64, step_seconds: f64, ahead: f64, age: f64, expected: Doubt) {
        let (member, now) = member(steps, step_seconds, age);
        assert_eq!(member.doubt_now(&PoolConfig::new("a"), ahead, now), expected);
    }

    #[test]
    fn a_step_is_too_long_by_what_is_known_of_the_worker() {
        check(0, 0.0, 0.0, 50.0, Doubt::None);
        check(1, 0.01, 0.0, 9.0, Doubt::None);
        check(1, 0.01, 0.0, 11.0, Doubt::Suspect);
        check(100, 0.01, 0.0, 2.9, Doubt::None);
        check(100, 0.01, 0.0, 3.1, Doubt::Suspect);
        check(100, 0.01, 0.0, 12.1, Doubt::GiveUp);
        // A long prompt was sent to the worker, or its steps are long.
        check(100, 0.01, 2.0, 7.9, Doubt::None);
        check(100, 1.5, 0.0, 14.0, Doubt::None);
    }

    #[test]
    fn a_worker_sends_others_only_to_itself() {
        let told_at = |told: &str, ours: &str| reached_at(told, &ours.parse().expect("an address"));
        assert_eq!(told_at("tcp://10.9.9.9:77", "tcp://10.0.0.1:70"), "tcp://10.0.0.1:77");
        assert_eq!(told_at("unix:///run/a.sock.kv", "unix:///run/a.sock"), "unix:///run/a.sock.kv");
        assert_eq!(told_at("unix:///run/other.sock", "tcp://10.0.0.1:70"), "");
        assert_eq!(told_at("tcp://10.9.9.9:77", "unix:///run/a.sock"), "");
        // On this machine a worker may name the address at which others reach it, if that is an address of this machine.
        assert_eq!(told_at("tcp://0.0.0.0:77", "tcp://127.0.0.1:70"), "tcp://127.0.0.1:77");
        assert_eq!(told_at("tcp://127.0.0.2:77", "tcp://localhost:70"), "tcp://127.0.0.2:77");
        // A certificate for `localhost` is none for 127.0.0.1: peers go where the gateway goes.
        assert_eq!(told_at("tcp://127.0.0.1:77", "tcp://localhost:70"), "tcp://localhost:77");
        assert_eq!(told_at("tcp://[::1]:77", "tcp://localhost:70"), "tcp://localhost:77");
        assert_eq!(told_at("tcp://127.0.0.1:77", "tcp://127.0.0.1:70"), "tcp://127.0.0.1:77");
        for elsewhere in ["192.0.2.1", "[2001:db8::1]", "example.org", "127.0.0.1x"] {
            assert_eq!(told_at(&format!("tcp://{elsewhere}:77"), "tcp://127.0.0.1:70"), "", "{elsewhere}");
        }
    }

    #[test]
    fn one_long_step_is_not_remembered_for_ever() {
        let (mut member, _) = member(1, 60.0, 0.0);
        for _ in 0..5000 {
            member.say(Some(&EngineState { step_seconds: 0.01, ..Default::default() }));
        }
        assert!((0.01..0.5).contains(&member.longest_step), "{}", member.longest_step);
    }

    #[test]
    fn an_engine_that_leaves_a_session_unanswered_hangs_after_ten_minutes_or_the_time_of_long_steps() {
        let config = PoolConfig::new("a");
        let hangs =
            |member: &Member, since: Instant, seconds| member.hangs(&config, since + Duration::from_secs(seconds));
        // Steps, longest step, age at the end of the session; seconds after which the worker hangs.
        for (steps, step_seconds, age, expected) in [
            (100, 0.01, 0.0, 600),
            (100, 0.01, 13.0, 587),
            // A pause of the machine counts as age: the engine has the time of a silent worker to answer.
            (100, 0.01, 3600.0, 10),
            (100, 20.0, 0.0, 800),
            (100, 20.0, 500.0, 300),
            // A first prompt may be long beside the step that the worker told, or the first one of all.
            (1, 0.01, 41.0, 559),
            (0, 0.0, 0.0, 600),
        ] {
            let (mut member, now) = member(steps, step_seconds, age);
            // Told twice, by this side and by the session.
            member.end("given up");
            member.end("given up");
            assert!(!hangs(&member, now, 10_000), "no session");
            member.loads(Loading::joining(), now);
            member.loads(Loading::joining(), now + Duration::from_secs(1));
            let shown = |seconds| member.phase(now + Duration::from_secs(seconds));
            assert!(matches!(shown(2), WorkerPhase::Loading { .. }) && matches!(shown(3), WorkerPhase::Down { .. }));
            assert!(!hangs(&member, now, expected), "{steps} {step_seconds} {age}");
            assert!(hangs(&member, now, expected + 1), "{steps} {step_seconds} {age}");
            member.loads(Loading { stage: "weights".into(), ..Loading::default() }, now);
            assert!(!hangs(&member, now, 10_000), "another process loads");
        }
    }

    #[test]
    fn silence_is_suspected_and_then_given_up() {
        let (member, now) = member(100, 0.01, 0.0);
        let after = |seconds| member.doubt_now(&PoolConfig::new("a"), 0.0, now + Duration::from_secs_f64(seconds));
        assert_eq!([1.9, 2.1, 10.1].map(after), [Doubt::None, Doubt::Suspect, Doubt::GiveUp]);
    }
}
