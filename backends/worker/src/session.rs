//! One connection: handshake, then commands in and frames out, until either end closes it.

use crate::config::{WorkerConfig, random};
use crate::inbox::{Command, StepAge};
use crate::listen::Incoming;
use crate::strangers::{Stranger, Strangers};
use bytes::BytesMut;
use penstock_link::Tls;
use penstock_proto::codec::FRAME_BYTES_MAX;
use penstock_proto::frames::{Down, DownBody, Drain, Hello, Loading, Refused, Step, Up, UpBody};
use penstock_proto::handshake::{Challenge, NONCE_BYTES, PoolKey, Side};
use penstock_proto::parts::PART_BYTES_MAX;
use penstock_proto::{Epoch, ErrorKind, GatewayId, PROTOCOL_VERSION, SessionId, codec};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::timeout;
use tracing::{debug, info};

/// Silence after which a heartbeat is sent.
const HEARTBEAT: Duration = Duration::from_millis(500);

/// Longest handshake of a connection that has not proved itself.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);

/// Largest frame during the handshake, in bytes: a greeting holds two nonces and a number.
const GREETING_BYTES_MAX: usize = 1024;

/// Longest write; a slower one ends the session.
const WRITE_DEADLINE: Duration = Duration::from_secs(10);

/// Frames that may wait for the socket. Tokens are bounded by the windows of the requests; this bounds steps.
const FRAMES_MAX: usize = 1024;

/// Phase of the worker's life, which decides what a new session is told.
#[derive(Clone, Debug)]
pub(crate) enum Phase {
    /// The weights are loading; the value is the last progress reported.
    Loading(Loading),
    /// Serving: the model is loaded, and sessions get a description of the worker.
    Ready,
    /// Loading failed, and the process is about to end.
    Failed(String),
}

/// State shared by all sessions: keys, connection limits, and channels to the engine's thread.
pub(crate) struct Host {
    key: Option<PoolKey>,
    pub(crate) tls: Option<Tls>,
    pub(crate) connections: Arc<Semaphore>,
    /// Peers that have not proved the pool key: they cannot take the places of gateways.
    pub(crate) strangers: Arc<Strangers>,
    connections_max: usize,
    commands: mpsc::Sender<Command>,
    phases: watch::Receiver<Phase>,
    drains: mpsc::Sender<Drain>,
    /// True once the worker was told to drain: reported at once, since the engine's thread says so after its step.
    is_draining: AtomicBool,
    age: StepAge,
    epoch: Epoch,
    next: AtomicU64,
    sessions: AtomicUsize,
    /// Number of sessions whose gateways have asked this worker to exit.
    done: AtomicUsize,
}

/// Guard that decrements a counter of gateway sessions when it is dropped; its creator has incremented the counter.
struct Counted<'a>(&'a AtomicUsize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Reason why a session ended, for the log.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionEnd {
    #[error("the gateway closed the connection")]
    Closed,
    #[error("no valid handshake in time")]
    HandshakeLate,
    #[error("the peer's first frame is not a hello")]
    NotAHello,
    #[error("the gateway speaks version {0}")]
    Version(u32),
    #[error("the proof of the pool key is wrong")]
    Proof,
    #[error("the connection was dropped for a newer one before its handshake was complete")]
    Displaced,
    #[error("unexpected frame")]
    Unexpected,
    #[error("the gateway does not read its frames")]
    Stuck,
    #[error("the worker is ending")]
    Ending,
    #[error(transparent)]
    Codec(#[from] codec::CodecError),
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error("{0}")]
    Random(String),
}

impl Host {
    pub(crate) fn new(
        config: &WorkerConfig,
        commands: mpsc::Sender<Command>,
        phases: watch::Receiver<Phase>,
        drains: mpsc::Sender<Drain>,
        age: StepAge,
        epoch: Epoch,
    ) -> Self {
        Self {
            key: config.key.clone(),
            tls: config.tls.clone(),
            connections: Arc::new(Semaphore::new(config.connections_max)),
            strangers: Strangers::new(config.connections_max.div_ceil(4)),
            connections_max: config.connections_max,
            commands,
            phases,
            drains,
            is_draining: AtomicBool::new(false),
            age,
            epoch,
            next: AtomicU64::new(0),
            sessions: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
        }
    }

    /// Number of gateways connected now.
    pub(crate) fn sessions(&self) -> usize {
        self.sessions.load(Ordering::Relaxed)
    }

    /// Makes all sessions report from now on that the worker drains.
    pub(crate) fn tell_drain(&self) {
        self.is_draining.store(true, Ordering::Relaxed);
    }

    /// Adds to a report what the engine's thread may not know yet.
    fn complete(&self, body: &mut UpBody) {
        let state = match body {
            UpBody::Step(step) => &mut step.state,
            UpBody::Ready(ready) => &mut ready.state,
            _ => return,
        };
        state.iter_mut().for_each(|state| state.draining |= self.is_draining.load(Ordering::Relaxed));
    }

    /// Returns true if the model is still being loaded.
    pub(crate) fn is_loading(&self) -> bool {
        matches!(*self.phases.borrow(), Phase::Loading(_))
    }

    /// Waits until all connections have written their pending frames, or `deadline` passes.
    pub(crate) async fn flush(&self, deadline: Duration) {
        let _ = timeout(deadline, self.connections.acquire_many(self.connections_max as u32)).await;
    }

    /// Serves one connection from its handshake to its end. `stranger`: its place among the peers that have not proved
    /// themselves.
    pub(crate) async fn serve(&self, incoming: Incoming, stranger: Option<Stranger>) {
        // A peer that can open the socket file is authorized already.
        let early = stranger.is_none().then(|| self.connections.try_acquire());
        if matches!(early, Some(Err(_))) {
            return debug!("connection refused: the worker has its maximum of connections");
        }
        let greeted = match stranger {
            Some(stranger) => stranger.within(self.greeted(incoming, true)).await,
            None => Some(self.greeted(incoming, false).await),
        };
        let (mut reader, mut writer, hello) = match greeted.unwrap_or(Err(SessionEnd::Displaced)) {
            Ok(greeted) => greeted,
            Err(why) => return debug!(%why, "connection refused"),
        };
        let Ok(_place) = early.unwrap_or_else(|| self.connections.try_acquire()) else {
            return debug!("connection refused: the worker has its maximum of connections");
        };
        reader.frame_bytes_max = FRAME_BYTES_MAX;
        self.sessions.fetch_add(1, Ordering::Relaxed);
        let _counted = Counted(&self.sessions);
        let session = SessionId(self.next.fetch_add(1, Ordering::Relaxed));
        info!(session = session.0, gateway = format_args!("{:016x}", hello.gateway), "gateway connected");
        let why = tokio::select! {
            end = self.listen(session, &mut reader) => end,
            end = self.speak(session, GatewayId(hello.gateway), &mut writer) => end,
        };
        info!(session = session.0, why = %why.err().unwrap_or(SessionEnd::Closed), "gateway disconnected");
        // Err: the engine has ended, and its requests with it.
        let _ = self.commands.send(Command::Detach { session }).await;
    }

    /// Opens a connection and completes the handshake, within the deadline.
    async fn greeted(&self, incoming: Incoming, prove: bool) -> Result<Greeted, SessionEnd> {
        let (reader, writer) = incoming.open(self.tls.as_ref()).await?;
        let mut reader = Reader { inner: reader, input: BytesMut::new(), frame_bytes_max: GREETING_BYTES_MAX };
        let mut writer = Writer { inner: writer, output: BytesMut::new(), sequence: 0 };
        let greeted = timeout(HANDSHAKE_DEADLINE, self.handshake(&mut reader, &mut writer, prove)).await;
        let hello = greeted.unwrap_or(Err(SessionEnd::HandshakeLate))?;
        Ok((reader, writer, hello))
    }

    async fn handshake<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
        &self,
        reader: &mut Reader<R>,
        writer: &mut Writer<W>,
        prove: bool,
    ) -> Result<Hello, SessionEnd> {
        let Some(DownBody::Hello(hello)) = reader.next().await? else { return Err(SessionEnd::NotAHello) };
        if prove {
            let key = self.key.as_ref().ok_or(SessionEnd::Proof)?;
            let nonce: [u8; NONCE_BYTES] = random().map_err(|error| SessionEnd::Random(error.to_string()))?;
            let proof = key.proof(Side::Worker, &hello.nonce, &nonce);
            writer.send(UpBody::Challenge(Challenge { nonce: nonce.to_vec(), proof })).await?;
            let Some(DownBody::Proof(answer)) = reader.next().await? else { return Err(SessionEnd::Proof) };
            if !key.verify(Side::Gateway, &hello.nonce, &nonce, &answer.proof) {
                return Err(SessionEnd::Proof);
            }
        }
        if hello.version != PROTOCOL_VERSION {
            let message = format!("this worker speaks version {PROTOCOL_VERSION}, the gateway {}", hello.version);
            writer.send(UpBody::Refused(Refused { kind: ErrorKind::Unavailable as i32, message })).await?;
            return Err(SessionEnd::Version(hello.version));
        }
        Ok(hello)
    }

    /// Forwards frames from the gateway to the engine.
    async fn listen<R: AsyncRead + Unpin>(&self, session: SessionId, reader: &mut Reader<R>) -> Result<(), SessionEnd> {
        let mut done = None;
        loop {
            let command = match reader.next().await? {
                Some(DownBody::Generate(generate)) => {
                    // A gateway whose order was ignored, and that goes on with this worker, needs it.
                    done = None;
                    Command::Generate { session, generate: Box::new(generate) }
                }
                Some(DownBody::Cancel(cancel)) => Command::Cancel { session, cancel },
                Some(DownBody::Window(window)) => Command::Window { session, window },
                Some(DownBody::SetRole(set)) => Command::SetRole { role: set.role() },
                Some(DownBody::Pull(pull)) => Command::Pull { session, pull },
                Some(DownBody::Prefetch(prefetch)) => Command::Prefetch { session, prefetch },
                Some(DownBody::Adapters(order)) => Command::Adapters { session, order },
                Some(DownBody::Drain(drain)) => {
                    if done.is_none() {
                        self.done.fetch_add(1, Ordering::Relaxed);
                        done = Some(Counted(&self.done));
                    }
                    // Other gateways still need this worker.
                    if self.sessions() > self.done.load(Ordering::Relaxed) {
                        info!(session = session.0, "drain ignored: another gateway still uses this worker");
                    } else {
                        let _ = self.drains.send(drain).await;
                    }
                    continue;
                }
                Some(DownBody::Hello(_) | DownBody::Proof(_)) => return Err(SessionEnd::Unexpected),
                // A frame body of a later protocol version.
                None => continue,
            };
            if self.is_loading() {
                return Err(SessionEnd::Unexpected);
            }
            self.commands.send(command).await.map_err(|_| SessionEnd::Ending)?;
        }
    }

    /// Sends progress while the weights load; false if loading failed, which was reported.
    async fn speak_of_loading<W: AsyncWrite + Unpin>(&self, writer: &mut Writer<W>) -> Result<bool, SessionEnd> {
        let mut phases = self.phases.clone();
        loop {
            let phase = phases.borrow_and_update().clone();
            match phase {
                Phase::Loading(loading) => writer.send(UpBody::Loading(loading)).await?,
                Phase::Ready => return Ok(true),
                Phase::Failed(message) => {
                    let refused = Refused { kind: ErrorKind::Unavailable as i32, message };
                    return writer.send(UpBody::Refused(refused)).await.map(|()| false);
                }
            }
            // A timeout sends a heartbeat; an error means that the last phase can be read.
            let _ = timeout(HEARTBEAT, phases.changed()).await;
        }
    }

    /// Sends progress while loading, then frames from the engine, and heartbeats in between.
    async fn speak<W>(&self, session: SessionId, gateway: GatewayId, writer: &mut Writer<W>) -> Result<(), SessionEnd>
    where
        W: AsyncWrite + Unpin,
    {
        if !self.speak_of_loading(writer).await? {
            return Ok(());
        }
        // The engine answers between two steps; until then this frame shows that the connection works.
        writer.send(UpBody::Loading(Loading::joining())).await?;
        let (frames, mut inbox) = mpsc::channel(FRAMES_MAX);
        let attach = Command::Attach { session, gateway, epoch: self.epoch, frames };
        self.commands.send(attach).await.map_err(|_| SessionEnd::Ending)?;
        let mut last = Step::default();
        let mut is_ready = false;
        let mut batch = Vec::new();
        loop {
            match timeout(HEARTBEAT, inbox.recv_many(&mut batch, 32)).await {
                Ok(0) => return Err(SessionEnd::Ending),
                Ok(_) => {
                    for mut body in batch.drain(..) {
                        self.complete(&mut body);
                        match &body {
                            UpBody::Step(step) => {
                                last = Step {
                                    number: step.number,
                                    state: step.state.clone(),
                                    accepted: step.accepted,
                                    ..Default::default()
                                };
                            }
                            UpBody::Ready(ready) => {
                                is_ready = true;
                                last.state.clone_from(&ready.state);
                            }
                            _ => {}
                        }
                        writer.queue(body)?;
                        if writer.output.len() >= PART_BYTES_MAX {
                            writer.flush().await?;
                        }
                    }
                    writer.flush().await?;
                }
                Err(_) if is_ready => {
                    let mut beat = last.clone();
                    if let Some(state) = &mut beat.state {
                        state.step_age_seconds = self.age.seconds();
                    }
                    let mut beat = UpBody::Step(beat);
                    self.complete(&mut beat);
                    writer.send(beat).await?;
                }
                Err(_) => writer.send(UpBody::Loading(Loading::joining())).await?,
            }
        }
    }
}

/// Reader, writer and greeting of a connection after its handshake.
type Greeted = (Reader<penstock_link::Reader>, Writer<penstock_link::Writer>, Hello);

struct Reader<R> {
    inner: R,
    input: BytesMut,
    frame_bytes_max: usize,
}

impl<R: AsyncRead + Unpin> Reader<R> {
    /// Reads the body of the next frame; `None` for a body of a later version. Cancel-safe.
    async fn next(&mut self) -> Result<Option<DownBody>, SessionEnd> {
        loop {
            if let Some(Down { body }) = codec::decode_within(&mut self.input, self.frame_bytes_max)? {
                return Ok(body);
            }
            match self.inner.read_buf(&mut self.input).await {
                Ok(0) => return Err(SessionEnd::Closed),
                // A dead peer sends no TLS close notification.
                Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Err(SessionEnd::Closed),
                done => done.map(drop)?,
            }
        }
    }
}

struct Writer<W> {
    inner: W,
    output: BytesMut,
    sequence: u64,
}

impl<W: AsyncWrite + Unpin> Writer<W> {
    fn queue(&mut self, body: UpBody) -> Result<(), SessionEnd> {
        codec::encode(&Up { sequence: self.sequence, body: Some(body) }, &mut self.output)?;
        self.sequence += 1;
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), SessionEnd> {
        // TLS may buffer until it is flushed.
        let written = async {
            self.inner.write_all(&self.output).await?;
            self.inner.flush().await
        };
        timeout(WRITE_DEADLINE, written).await.map_err(|_| SessionEnd::Stuck)??;
        self.output.clear();
        Ok(())
    }

    async fn send(&mut self, body: UpBody) -> Result<(), SessionEnd> {
        self.queue(body)?;
        self.flush().await
    }
}
