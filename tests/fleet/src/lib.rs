//! Helpers of the fleet tests: worker processes that end with the test, pools over them, and streams read to their
//! end.
#![forbid(unsafe_code)]

pub mod apart;
pub mod dial;
pub mod matrix;
pub mod pairs;
pub mod puppet;
pub mod relay;

use penstock_grammar::{CacheSizes, Grammars, TokenText, Vocabulary};
use penstock_link::TlsFiles;
use penstock_pool::{FleetRuntime, GpuLeavers, Job, LocalWorkers, Pool, PoolConfig, PoolEvent, Ticket};
use penstock_proto::frames::{FinishReason, Pooling, Sampling};
use penstock_vocabulary::TokenBytes;
use rustix::process::{Pid, Signal, kill_process};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Longest time of any wait in these tests; far above the time on a loaded machine.
pub const PATIENCE: Duration = Duration::from_secs(40);

/// A temporary directory, removed at the end.
pub struct Dir(PathBuf);

impl Dir {
    /// Makes a directory with a short path, so that sockets fit.
    ///
    /// # Panics
    /// If the directory cannot be made.
    #[expect(clippy::new_without_default, reason = "it makes a directory")]
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("pen-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("temporary directory");
        Self(path)
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Path of a file in the directory.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A worker process, killed at the end.
pub struct Worker {
    child: Child,
    /// Socket of the worker; empty on TCP.
    pub socket: PathBuf,
}

impl Worker {
    /// Starts `binary` on a socket in `dir`.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start(binary: &str, dir: &Dir, name: &str, args: &[&str]) -> Self {
        let socket = dir.file(&format!("{name}.sock"));
        let listen = format!("unix://{}", socket.display());
        Self::listening(Command::new(binary), dir, name, &listen, socket, args)
    }

    /// Starts `command`, which becomes a worker that listens on a TCP address.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start_tcp(command: Command, dir: &Dir, name: &str, listen: &str, args: &[&str]) -> Self {
        Self::listening(command, dir, name, listen, PathBuf::new(), args)
    }

    fn listening(mut command: Command, dir: &Dir, name: &str, listen: &str, socket: PathBuf, args: &[&str]) -> Self {
        let log = std::fs::File::create(dir.file(&format!("{name}.log"))).expect("log file");
        command.args(["--listen", listen]).args(args).stdin(Stdio::null()).stderr(log);
        Self { child: command.spawn().expect("the worker starts"), socket }
    }

    /// Process id of the worker.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    ///
    /// # Panics
    /// If the process is gone.
    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal);
    }

    /// Waits for the worker's end and returns its exit code; `None` when it is still running after [`PATIENCE`] or was
    /// killed.
    pub async fn code(&mut self) -> Option<i32> {
        let child = &mut self.child;
        wait_for(|| child.try_wait().ok().flatten()).await.and_then(|status| status.code())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// TLS files of a member of a pool, in a folder made by [`certify`].
pub fn member_files(folder: &Path) -> TlsFiles {
    let file = |name: &str| folder.join(name);
    TlsFiles { certificate: file("cert.pem"), key: file("key.pem"), ca: file("ca.pem") }
}

/// Makes a certificate that all members of a pool on loopback share, and by which they trust each other.
///
/// # Panics
/// If the files cannot be written.
pub fn certify(folder: &Path) -> TlsFiles {
    certify_for(folder, "127.0.0.1")
}

/// Makes a certificate as [`certify`] does, for members that are known by another name or address.
///
/// # Panics
/// If the files cannot be written.
pub fn certify_for(folder: &Path, name: &str) -> TlsFiles {
    let own = rcgen::generate_simple_self_signed([name.to_owned()]).expect("a certificate");
    let files = member_files(folder);
    for (path, text) in [
        (&files.certificate, own.cert.pem()),
        (&files.ca, own.cert.pem()),
        (&files.key, own.signing_key.serialize_pem()),
    ] {
        std::fs::write(path, text).expect("written");
    }
    files
}

/// A free port of loopback outside the range that the system assigns, for a worker whose address must be known before
/// it listens.
///
/// # Panics
/// If no port is free.
pub fn free_port() -> u16 {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").expect("Linux says so");
    let first_given: u16 = range.split_whitespace().next().and_then(|first| first.parse().ok()).expect("a number");
    let free = |_| {
        // Tests run side by side: each call of each process tries another port.
        let chance = RandomState::new().build_hasher().finish() as u16;
        let port = if first_given > 12_000 { 10_000 + chance % (first_given - 10_000) } else { 0 };
        Some(TcpListener::bind(("127.0.0.1", port)).ok()?.local_addr().expect("it is bound").port())
    };
    (0..1000).find_map(free).expect("a port")
}

/// Sends a signal to a process.
///
/// # Panics
/// If it is gone.
pub fn kill(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid as i32).expect("a pid");
    kill_process(pid, signal).expect("the process is there");
}

/// Asks `question` again and again until it has an answer; `None` after [`PATIENCE`].
pub async fn wait_for<T>(mut question: impl FnMut() -> Option<T>) -> Option<T> {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = question() {
            return Some(answer);
        }
        if Instant::now() > until {
            return None;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A pool over sockets of running workers.
///
/// # Panics
/// If it cannot be started.
pub fn pool(runtime: &FleetRuntime, workers: &[&Worker], change: impl FnOnce(&mut PoolConfig)) -> Pool {
    let mut config = PoolConfig::new("test");
    let address = |worker: &&Worker| format!("unix://{}", worker.socket.display()).parse().expect("an address");
    config.connect = workers.iter().map(address).collect();
    change(&mut config);
    Pool::start(runtime, config).expect("the pool starts")
}

/// Sets limits of silence that no load of the machine reaches: for tests in which a worker that is left would be a fault.
pub fn patient(config: &mut PoolConfig) {
    [config.suspect_after, config.give_up_after, config.kill_after] = [30, 60, 90].map(Duration::from_secs);
    config.step_max = Duration::from_secs(30);
}

/// Local workers of `binary` with their state in `dir`.
pub fn local(binary: &str, dir: &Dir, count: usize, args: &[&str]) -> LocalWorkers {
    LocalWorkers {
        count,
        varies: false,
        program: binary.into(),
        args: args.iter().map(Into::into).collect(),
        cores: Vec::new(),
        state_dir: dir.path().into(),
        identity: String::new(),
        exit_deadline: Duration::from_secs(10),
        weights: None,
        gpu_leavers: GpuLeavers::default(),
    }
}

/// Rows of the fake model's logits.
const FAKE_ROWS: usize = 256;

/// Grammars over the fake model's tokens: a token is the ASCII character of its id, or a control token.
pub fn fake_grammars() -> Arc<Grammars> {
    let bytes: Vec<[u8; 1]> = (0..=u8::MAX).map(|byte| [byte]).collect();
    let tokens = bytes.iter().map(|bytes| TokenText { bytes, is_special: !(b' '..=b'~').contains(&bytes[0]) });
    let vocabulary = Vocabulary::new(tokens, &[], FAKE_ROWS).expect("the fake vocabulary");
    Arc::new(Grammars::new(vocabulary, CacheSizes::default()))
}

/// Grammars over the demo model's tokens.
///
/// # Panics
/// If the demo model's tokenizer cannot be read.
pub fn demo_grammars() -> Arc<Grammars> {
    let json = include_bytes!("../../../models/penstock-demo/tokenizer.json");
    let table = TokenBytes::from_json(json).expect("the demo tokenizer");
    let tokens = (0..table.count()).map(|id| TokenText { bytes: table.token(id), is_special: table.is_special(id) });
    let vocabulary = Vocabulary::new(tokens, &[], table.count() as usize).expect("the demo vocabulary");
    Arc::new(Grammars::new(vocabulary, CacheSizes::default()))
}

/// A request for `max_tokens` tokens of each choice; sampled, so that a wrong position of the random numbers shows.
pub fn job(prompt: impl Into<Arc<[u32]>>, choices: u32, max_tokens: u32) -> Job {
    let sampling = Sampling {
        temperature: 1.0,
        top_p: 1.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.25,
        seed: 7,
        max_tokens,
        logprobs: -1,
        prompt_logprobs: -1,
        // The fake model answers with NaN behind its token 0.
        logit_bias: vec![penstock_proto::frames::LogitBias { token: 0, bias: -100.0 }],
        ..Default::default()
    };
    let (salt, tenant) = (Arc::from(&b"t"[..]), Arc::default());
    Job {
        prompt: prompt.into(),
        choices,
        sampling,
        salt,
        priority: 0,
        deadline: None,
        tenant,
        weight: 1,
        session: None,
        keyed: false,
        grammar: None,
        adapter: None,
        pooling: Pooling::None,
        second_text: 0,
        dense_layers: 0,
        pooled_from: 0,
        explain: false,
        sent: Default::default(),
    }
}

/// Answer to a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// Tokens per choice.
    pub tokens: Vec<Vec<u32>>,
    /// Log-probabilities of the tokens, and of the prompt, if asked for; as text, so that they compare bit by bit.
    pub logprobs: Vec<String>,
    /// Choices that finished with a reason of their own.
    pub finished: usize,
    /// Continuations, each with whether it was exact.
    pub resumed: Vec<bool>,
    /// Number of moves.
    pub moved: usize,
    /// Gaps without a token while the worker changed.
    pub gaps: Vec<Duration>,
    /// The failure, if it ended in one.
    pub failed: Option<(penstock_proto::ErrorKind, String)>,
}

impl Answer {
    /// Handles an event.
    ///
    /// # Panics
    /// If tokens come twice or with a hole.
    pub fn add(&mut self, event: PoolEvent) {
        match event {
            PoolEvent::Output(output) => {
                let choice = output.choice as usize;
                if self.tokens.len() <= choice {
                    self.tokens.resize(choice + 1, Vec::new());
                }
                assert_eq!(output.at as usize, self.tokens[choice].len(), "choice {choice}: exactly once, in order");
                self.tokens[choice].extend(output.tokens.iter().map(|token| token.id));
                if !output.prompt_logprobs.is_empty() || output.tokens.iter().any(|token| token.logprobs.is_some()) {
                    self.logprobs.resize(self.tokens.len().max(self.logprobs.len()), String::new());
                    let tokens = output.tokens.iter().filter_map(|token| token.logprobs.as_ref());
                    for told in output.prompt_logprobs.iter().chain(tokens) {
                        self.logprobs[choice] += &format!("{told:?}");
                    }
                }
                if let Some(finish) = output.finish {
                    assert_ne!(finish.reason, FinishReason::Failed as i32, "{}", finish.message);
                    self.finished += 1;
                }
            }
            PoolEvent::Resumed { exact } => self.resumed.push(exact),
            PoolEvent::Failed { kind, message, .. } => self.failed = Some((kind, message)),
            PoolEvent::Moved { .. } => self.moved += 1,
            PoolEvent::Gap { time, .. } => self.gaps.push(time),
            PoolEvent::Bound { .. } => {}
        }
    }
}

/// Reads a ticket to its end.
///
/// # Panics
/// If the ticket has no end within [`PATIENCE`].
pub async fn read(ticket: &mut Ticket) -> Answer {
    let mut answer = Answer::default();
    read_into(ticket, &mut answer, usize::MAX).await;
    answer
}

/// Reads a ticket until choice 0 has `tokens` tokens, or to its end.
///
/// # Panics
/// If neither comes within [`PATIENCE`].
pub async fn read_into(ticket: &mut Ticket, answer: &mut Answer, tokens: usize) {
    while answer.tokens.first().is_none_or(|choice| choice.len() < tokens) {
        let event = tokio::time::timeout(PATIENCE, ticket.next()).await.expect("an event in time");
        match event {
            Some(event) => answer.add(event),
            None => return,
        }
    }
}
