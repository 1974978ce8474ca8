//! Cost of moving KV from one worker to another, by transport: `cargo bench -p penstock-worker --bench transfer`.
//!
//! Two real worker processes with a device that is plain memory: pages of the shape of Qwen3-0.6B (28 layers of 128
//! KiB a block), no computation. One worker is asked to pull a prompt of 2,048 tokens (235 MB) from the other, again
//! and again; the transports take turns, so that all see the same machine. Seconds are those of the asker's answer,
//! CPU seconds those of both processes. Medians of the rounds; ratios are to the Unix socket.
//!
//!   ROUNDS=9   pulls of each way        STREAMS=4   connections of the last way

use bytes::BytesMut;
use penstock_engine::{AfterLayer, Engine, EngineConfig, Forward, Geometry, Pages};
use penstock_kernels::{KernelError, StepBatch};
use penstock_link::{Reader, Tls, TlsFiles, Writer};
use penstock_proto::frames::{ChoiceStart, Down, DownBody, Generate, Hello, Pull, Pulled, Ready, Sampling, Up, UpBody};
use penstock_proto::handshake::{NONCE_BYTES, PoolKey, Proof, Side};
use penstock_proto::{Address, BLOCK_TOKENS, BlockHasher, PROTOCOL_VERSION, codec};
use penstock_worker::{ReadyInfo, WorkerConfig, run};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

const LAYERS: usize = 28;
const PAGE_BYTES: usize = 128 << 10;
const PROMPT: u32 = 2048;
/// Pages of the device that have memory of their own; the others alias them.
const REAL_PAGES: usize = 64;
const KEY: &[u8] = b"a key for a benchmark only";

/// A device that computes nothing and moves pages.
struct Memory {
    bytes: Vec<u8>,
    logits: Vec<f32>,
}

impl Memory {
    fn place(layer: usize, page: u32) -> std::ops::Range<usize> {
        let begin = (page as usize % REAL_PAGES * LAYERS + layer) * PAGE_BYTES;
        begin..begin + PAGE_BYTES
    }
}

impl Forward for Memory {
    fn geometry(&self) -> Geometry {
        Geometry {
            vocab_size: 8,
            context_tokens: 1 << 14,
            pages: 1 << 12,
            rows_max: 4096,
            sampled_max: 8,
            numerics: "memory".into(),
            layers: LAYERS,
            page_bytes: PAGE_BYTES,
            ..Geometry::default()
        }
    }

    fn forward(&mut self, batch: &StepBatch<'_>, _: AfterLayer<'_>) -> Result<&[f32], KernelError> {
        Ok(&self.logits[..batch.sampled.len() * 8])
    }

    fn pages(&self) -> &dyn Pages {
        self
    }

    fn write_page(&mut self, layer: usize, page: u32, bytes: &[u8]) {
        self.bytes[Self::place(layer, page)].copy_from_slice(bytes);
    }
}

impl Pages for Memory {
    fn read_page(&self, layer: usize, page: u32, out: &mut [u8]) {
        out.copy_from_slice(&self.bytes[Self::place(layer, page)]);
    }
}

/// Process of a worker: `worker LISTEN STREAMS MEMORY [TLS-FOLDER]`.
fn worker(args: &[String]) {
    let [listen, streams, memory, rest @ ..] = args else { panic!("{args:?}") };
    let mut config = WorkerConfig::new(listen.parse().expect("an address"));
    config.key = Some(PoolKey::new(KEY).expect("long enough"));
    config.transfer_streams = streams.parse().expect("a number");
    config.shares_memory = memory == "shared";
    config.tls = rest.first().map(|folder| Tls::read(&files(Path::new(folder))).expect("certificates"));
    let build: penstock_worker::Build = Box::new(|_| {
        let bytes = vec![7; REAL_PAGES * LAYERS * PAGE_BYTES];
        let model = Memory { bytes, logits: vec![0.5; 8 * 8] };
        let config = EngineConfig { batch_tokens: 4096, chunk_tokens: 4096, ..EngineConfig::default() };
        let info = ReadyInfo { numerics_id: "memory".into(), vocab_size: 8, ..ReadyInfo::default() };
        Ok((Engine::new(Box::new(model), &config), info))
    });
    run(config, build).expect("it serves");
}

fn files(folder: &Path) -> TlsFiles {
    TlsFiles { certificate: folder.join("cert.pem"), key: folder.join("key.pem"), ca: folder.join("ca.pem") }
}

fn certificates(folder: &Path) {
    let mut params = CertificateParams::new(Vec::<String>::new()).expect("no names");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("an authority");
    let key = KeyPair::generate().expect("a key");
    let certificate = CertificateParams::new(["127.0.0.1".to_owned()]).expect("a name").signed_by(&key, &issuer);
    let files = files(folder);
    std::fs::write(files.ca, issuer.pem()).expect("written");
    std::fs::write(files.certificate, certificate.expect("signed").pem()).expect("written");
    std::fs::write(files.key, key.serialize_pem()).expect("written");
}

/// A gateway's session with a worker process that ends with it.
struct Session {
    process: Child,
    /// Awaited bodies; all others are read and dropped, so that the worker never waits for this end.
    heard: mpsc::Receiver<UpBody>,
    writer: Writer,
    ready: Ready,
}

/// Reads the session to its end, and forwards every body but idle steps to `heard`.
async fn hear_all(mut reader: Reader, heard: mpsc::Sender<UpBody>) {
    let mut input = BytesMut::new();
    while reader.read_buf(&mut input).await.is_ok_and(|read| read > 0) {
        while let Some(Up { body, .. }) = codec::decode(&mut input).expect("the contract") {
            let body = body.expect("a body");
            let is_idle = matches!(&body, UpBody::Step(step) if step.outputs.is_empty());
            if !is_idle && heard.send(body).await.is_err() {
                return;
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Session {
    async fn start(way: &Way, folder: &Path, name: &str) -> Self {
        let port =
            std::net::TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port();
        let listen = match way.tcp {
            true => format!("tcp://127.0.0.1:{port}"),
            false => format!("unix://{}", folder.join(format!("{name}.sock")).display()),
        };
        let mut command = Command::new(std::env::current_exe().expect("a path"));
        command.args(["worker", &listen, &way.streams.to_string(), if way.memory { "shared" } else { "apart" }]);
        command.args(way.tls.then_some(folder)).stdin(Stdio::null());
        let process = command.spawn().expect("it starts");
        let tls = way.tls.then(|| Tls::read(&files(folder)).expect("certificates"));
        let address: Address = listen.parse().expect("an address");
        let until = Instant::now() + Duration::from_secs(30);
        let (reader, writer) = loop {
            match penstock_link::dial(&address, tls.as_ref()).await {
                Ok(link) => break link,
                Err(error) => assert!(Instant::now() < until, "{listen}: {error}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        let (sender, heard) = mpsc::channel(1024);
        tokio::spawn(hear_all(reader, sender));
        let mut session = Self { process, heard, writer, ready: Ready::default() };
        session.greet(way.tcp).await;
        session
    }

    async fn greet(&mut self, prove: bool) {
        let nonce = if prove { vec![7; NONCE_BYTES] } else { Vec::new() };
        self.say(DownBody::Hello(Hello { version: PROTOCOL_VERSION, gateway: 1, nonce: nonce.clone() })).await;
        self.ready = loop {
            match self.hear().await {
                UpBody::Challenge(challenge) => {
                    let key = PoolKey::new(KEY).expect("long enough");
                    let proof = key.proof(Side::Gateway, &nonce, &challenge.nonce);
                    self.say(DownBody::Proof(Proof { proof })).await;
                }
                UpBody::Ready(ready) => break ready,
                _ => {}
            }
        };
    }

    async fn say(&mut self, body: DownBody) {
        let mut bytes = BytesMut::new();
        codec::encode(&Down { body: Some(body) }, &mut bytes).expect("a small frame");
        self.writer.write_all(&bytes).await.expect("it reads");
        self.writer.flush().await.expect("it reads");
    }

    async fn hear(&mut self) -> UpBody {
        self.heard.recv().await.expect("the worker lives")
    }

    /// Runs a prompt, so that its blocks are there.
    async fn compute(&mut self, prompt: Vec<u32>, salt: &[u8]) {
        let sampling = Sampling {
            top_p: 1.0,
            repetition_penalty: 1.0,
            max_tokens: 1,
            logprobs: -1,
            prompt_logprobs: -1,
            ..Sampling::default()
        };
        let choices = vec![ChoiceStart { index: 0, emitted: Vec::new() }];
        let (sampling, salt) = (Some(sampling), salt.to_vec());
        self.say(DownBody::Generate(Generate { request: 1, prompt, choices, sampling, salt, ..Generate::default() }))
            .await;
        loop {
            if let UpBody::Step(step) = self.hear().await
                && step.outputs.iter().any(|output| output.finish.is_some())
            {
                return;
            }
        }
    }

    async fn pull(&mut self, from: &str, prompt: &[u32], salt: &[u8]) -> Pulled {
        let chain = BlockHasher::for_request(salt, "memory").chain(prompt);
        let hashes = chain.into_iter().map(|hash| hash.to_bytes().to_vec()).collect();
        self.say(DownBody::Pull(Pull { id: 1, from: from.to_owned(), hashes, deadline_seconds: 60.0 })).await;
        loop {
            if let UpBody::Pulled(pulled) = self.hear().await {
                return pulled;
            }
        }
    }

    /// CPU seconds of the process so far.
    fn cpu(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process.id())).expect("it lives");
        let fields: Vec<&str> = stat.rsplit_once(')').expect("a name").1.split_whitespace().collect();
        let ticks = |at: usize| fields[at].parse::<f64>().expect("a number");
        (ticks(11) + ticks(12)) / 100.0
    }
}

/// One transport of the KV bytes under measurement: shared memory, Unix socket, TCP or TLS, and its results.
struct Way {
    name: String,
    memory: bool,
    tcp: bool,
    tls: bool,
    streams: usize,
    folder: PathBuf,
    pair: Option<[Session; 2]>,
    /// Rate of each pull in bytes per second.
    rates: Vec<f64>,
    cpu: f64,
    bytes: u64,
}

impl Way {
    fn new(name: &str, root: &Path, memory: bool, tcp: bool, tls: bool, streams: usize) -> Self {
        let folder = root.join(name.replace([' ', ','], "-"));
        std::fs::create_dir_all(&folder).expect("a folder");
        if tls {
            certificates(&folder);
        }
        Self { name: name.into(), memory, tcp, tls, streams, folder, pair: None, rates: Vec::new(), cpu: 0.0, bytes: 0 }
    }

    async fn round(&mut self, number: u32) {
        if self.pair.is_none() {
            let start = |name| Session::start(self, &self.folder, name);
            self.pair = Some([start("a").await, start("b").await]);
        }
        let [a, b] = self.pair.as_mut().expect("set above");
        let (prompt, salt) = ((0..PROMPT).map(|at| at % 7).collect::<Vec<_>>(), number.to_le_bytes());
        a.compute(prompt.clone(), &salt).await;
        let before = a.cpu() + b.cpu();
        let pulled = b.pull(&a.ready.transfer.clone(), &prompt, &salt).await;
        assert_eq!(pulled.blocks, PROMPT / BLOCK_TOKENS as u32, "{}: {}", self.name, pulled.why);
        // The first round is a warm-up: untouched memory, code, certificates.
        if number > 0 {
            self.cpu += a.cpu() + b.cpu() - before;
            self.bytes += pulled.bytes;
            self.rates.push(pulled.bytes as f64 / pulled.seconds);
        }
    }

    fn rate(&self) -> f64 {
        let mut rates = self.rates.clone();
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    }
}

fn number(name: &str, default: u32) -> u32 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if args.get(1).is_some_and(|first| first == "worker") {
        return worker(&args[2..]);
    }
    let root = std::env::temp_dir().join(format!("pen-bench-{}", std::process::id()));
    let streams = number("STREAMS", 4) as usize;
    let mut ways = [
        Way::new("shared memory", &root, true, false, false, 1),
        Way::new("Unix socket", &root, false, false, false, 1),
        Way::new("TCP", &root, false, true, false, 1),
        Way::new(&format!("TCP, {streams} streams"), &root, false, true, false, streams),
        Way::new("TLS", &root, false, true, true, 1),
        Way::new(&format!("TLS, {streams} streams"), &root, false, true, true, streams),
    ];
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        for round in 0..=number("ROUNDS", 9) {
            for way in &mut ways {
                way.round(round).await;
            }
        }
    });
    let base = ways[1].rate();
    println!("| way | GB/s | ratio | CPU s per GB |\n|---|---|---|---|");
    for way in &ways {
        let per_gb = way.cpu / (way.bytes as f64 / 1e9);
        println!("| {} | {:.2} | {:.2} | {per_gb:.2} |", way.name, way.rate() / 1e9, way.rate() / base);
    }
    ways.iter_mut().for_each(|way| way.pair = None);
    let _ = std::fs::remove_dir_all(root);
}
