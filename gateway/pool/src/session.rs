//! A session with one worker: connect, handshake, then frames both ways until the session is lost; then the next one, without end.
//!
//! A session is lost at the end of the stream, at a gap in the worker's sequence numbers, at a frame that does not
//! decode, at a long silence of a worker that is not ready yet, or when the actor gives it up. No state of a lost session is used again: the next one starts from the
//! worker's snapshot.

use super::scaler::Action;
use super::supervisor::Update;
use bytes::BytesMut;
use penstock_link::{Reader, Tls, Writer};
use penstock_proto::frames::{
    AdapterReport, Down, DownBody, GpuState, Hello, Loading, Notice, Pulled, Ready, Step, Up, UpBody,
};
use penstock_proto::handshake::{NONCE_BYTES, PoolKey, Proof, Side};
use penstock_proto::{Address, GatewayId, PROTOCOL_VERSION, SessionId, codec};
use penstock_router::WorkerId;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{Notify, mpsc};
use tokio::time::timeout;

/// Capacity of the queue of frames to a worker; a worker that lets it fill up is not alive.
const DOWN_FRAMES_MAX: usize = 16 * 1024;

/// Time limit of the handshake, from the hello to the first frame after it.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);

/// Time limit of one write to the socket; a worker that does not read for so long is given up.
const WRITE_DEADLINE: Duration = Duration::from_secs(10);

/// First and longest backoff between connection attempts.
const RETRY_FIRST: Duration = Duration::from_millis(20);
const RETRY_LAST: Duration = Duration::from_secs(1);

/// Way in which a session with a worker ended; it decides whether the worker counts as dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Loss {
    /// The stream ended: the worker's process is gone, or it closed the connection.
    Ended,
    /// The session was closed from this side, or the worker broke the protocol.
    GivenUp,
    /// The worker refused the session and said why, or it speaks another version of the protocol.
    Refused,
}

/// Message to the actor from a session, a supervisor or a hook.
#[expect(clippy::large_enum_variant, reason = "nearly all of them are steps; a box would cost more than it saves")]
pub(super) enum Event {
    /// The session is connected, and the worker reports how far it has loaded its model.
    Loading { worker: WorkerId, loading: Loading },
    /// The worker is ready to serve; frames to it go through `link`.
    Ready { worker: WorkerId, ready: Box<Ready>, link: Link },
    /// A report on one engine step with its outputs, or a heartbeat without any.
    Step { worker: WorkerId, session: SessionId, step: Step },
    /// A pull of KV blocks from another worker, which the actor asked for, has ended.
    Pulled { worker: WorkerId, session: SessionId, pulled: Pulled },
    /// The worker has loaded or unloaded adapters, or could not.
    Adapters { worker: WorkerId, session: SessionId, report: AdapterReport },
    /// A trouble of the worker that costs time and no request.
    Notice { worker: WorkerId, session: SessionId, notice: Notice },
    /// Figures of the worker's GPU.
    Gpu { worker: WorkerId, session: SessionId, gpu: Box<GpuState> },
    /// The session, or an attempt at one, is over; `why` describes the cause.
    Lost { worker: WorkerId, session: SessionId, loss: Loss, why: String },
    /// A call of the operator's hook to start or stop a worker has ended.
    Asked { worker: WorkerId, action: Action, outcome: Result<(), String> },
    /// The hook's answer on the number of workers; `None`: the hook does not know.
    Counted(Result<Option<usize>, String>),
    /// The supervisor reports that the process of a local worker came or went.
    Process { worker: WorkerId, update: Update },
}

/// The actor's handle of a session with a worker, through which it sends frames and closes the session.
#[derive(Clone)]
pub(super) struct Link {
    /// Number of the session, counted per worker from 1.
    pub(super) session: SessionId,
    pub(super) down: mpsc::Sender<Down>,
    pub(super) close: Arc<Notify>,
}

impl Link {
    /// Queues a frame without waiting; false when the queue is full or closed.
    pub(super) fn send(&self, body: DownBody) -> bool {
        self.down.try_send(Down { body: Some(body) }).is_ok()
    }
}

/// Keeps a session with one worker open, with backoff between attempts.
pub(super) struct Keeper {
    pub(super) worker: WorkerId,
    pub(super) address: Address,
    pub(super) key: Option<PoolKey>,
    /// TLS settings, used for addresses on TCP.
    pub(super) tls: Option<Tls>,
    /// Random id of this gateway process, told to workers in the hello.
    pub(super) gateway: GatewayId,
    /// Silence after which a worker that loads is given up. Once it is ready, the actor judges its silence.
    pub(super) silence_max: Duration,
    pub(super) events: mpsc::Sender<Event>,
}

struct Ended {
    loss: Loss,
    why: String,
}

impl Ended {
    fn new(loss: Loss, why: impl Into<String>) -> Self {
        Self { loss, why: why.into() }
    }
}

impl Keeper {
    /// Opens one session after the other until the actor is gone.
    pub(super) async fn run(self) {
        let mut pause = RETRY_FIRST;
        for session in (1..).map(SessionId) {
            let began = Instant::now();
            let ended = match penstock_link::dial(&self.address, self.tls.as_ref()).await {
                Ok((reader, writer)) => self.session(session, reader, writer).await,
                Err(error) => Ended::new(Loss::Ended, format!("connect: {error}")),
            };
            let Ended { loss, why } = ended;
            if self.events.send(Event::Lost { worker: self.worker, session, loss, why }).await.is_err() {
                return;
            }
            let lasted = began.elapsed() > RETRY_LAST;
            pause = if lasted { RETRY_FIRST } else { (pause * 2).min(RETRY_LAST) };
            tokio::time::sleep(pause).await;
        }
    }

    async fn session(&self, session: SessionId, reader: Reader, mut writer: Writer) -> Ended {
        let mut frames = Frames { reader, input: BytesMut::new(), sequence: 0 };
        let first = match timeout(HANDSHAKE_DEADLINE, self.handshake(&mut frames, &mut writer)).await {
            Ok(Ok(first)) => first,
            Ok(Err(ended)) => return ended,
            Err(_) => return Ended::new(Loss::GivenUp, "no answer to the hello"),
        };
        let (down, outbox) = mpsc::channel(DOWN_FRAMES_MAX);
        let close = Arc::new(Notify::new());
        let link = Link { session, down, close: Arc::clone(&close) };
        tokio::select! {
            ended = self.listen(frames, first, link) => ended,
            ended = speak(outbox, writer) => ended,
            () = close.notified() => Ended::new(Loss::GivenUp, "given up"),
        }
    }

    /// Sends the hello and, if the worker asks for it, the proof of the pool key. Returns the first frame after the handshake.
    async fn handshake(&self, frames: &mut Frames, writer: &mut Writer) -> Result<UpBody, Ended> {
        let mut nonce = Vec::new();
        if matches!(self.address, Address::Tcp(_)) {
            nonce.resize(NONCE_BYTES, 0);
            getrandom::fill(&mut nonce)
                .map_err(|error| Ended::new(Loss::GivenUp, format!("random numbers: {error}")))?;
        }
        let hello = Hello { version: PROTOCOL_VERSION, gateway: self.gateway.0, nonce: nonce.clone() };
        send(writer, DownBody::Hello(hello)).await?;
        let first = frames.next().await?;
        let UpBody::Challenge(challenge) = first else {
            // A worker on TCP that does not prove the key may be an impostor: nothing is sent to it.
            return match self.address {
                Address::Unix(_) => Ok(first),
                Address::Tcp(_) => Err(Ended::new(Loss::GivenUp, "the worker did not prove the pool key")),
            };
        };
        let Some(key) = &self.key else {
            return Err(Ended::new(Loss::GivenUp, "the worker asks for a pool key, none is configured"));
        };
        if !key.verify(Side::Worker, &nonce, &challenge.nonce, &challenge.proof) {
            return Err(Ended::new(Loss::GivenUp, "the worker's proof of the pool key is wrong"));
        }
        let proof = key.proof(Side::Gateway, &nonce, &challenge.nonce);
        send(writer, DownBody::Proof(Proof { proof })).await?;
        frames.next().await
    }

    async fn listen(&self, mut frames: Frames, first: UpBody, link: Link) -> Ended {
        let worker = self.worker;
        let session = link.session;
        let mut is_ready = false;
        let mut next = first;
        loop {
            let event = match next {
                UpBody::Loading(loading) => Event::Loading { worker, loading },
                UpBody::Ready(ready) if ready.version != PROTOCOL_VERSION => {
                    let why = format!("the worker speaks version {}, this gateway {PROTOCOL_VERSION}", ready.version);
                    return Ended::new(Loss::Refused, why);
                }
                UpBody::Ready(ready) => Event::Ready { worker, ready: Box::new(ready), link: link.clone() },
                UpBody::Step(step) => Event::Step { worker, session, step },
                UpBody::Pulled(pulled) => Event::Pulled { worker, session, pulled },
                UpBody::Notice(notice) => Event::Notice { worker, session, notice },
                UpBody::Gpu(gpu) => Event::Gpu { worker, session, gpu: Box::new(gpu.checked()) },
                UpBody::Adapters(report) => Event::Adapters { worker, session, report },
                UpBody::Refused(refused) => return Ended::new(Loss::Refused, refused.message),
                UpBody::Challenge(_) => {
                    return Ended::new(Loss::GivenUp, "unexpected challenge frame in the middle of the session");
                }
            };
            is_ready |= matches!(event, Event::Ready { .. });
            if self.events.send(event).await.is_err() {
                return Ended::new(Loss::GivenUp, "the gateway is shutting down");
            }
            let silence_max = if is_ready { Duration::MAX } else { self.silence_max };
            next = match timeout(silence_max, frames.next()).await {
                Ok(Ok(body)) => body,
                Ok(Err(ended)) => return ended,
                Err(_) => return Ended::new(Loss::GivenUp, "no sign of life while it loads its model"),
            };
        }
    }
}

/// Stream of frames from the worker, checked for gaps in their sequence numbers.
struct Frames {
    reader: Reader,
    input: BytesMut,
    sequence: u64,
}

impl Frames {
    async fn next(&mut self) -> Result<UpBody, Ended> {
        loop {
            match codec::decode::<Up>(&mut self.input) {
                Err(error) => return Err(Ended::new(Loss::GivenUp, error.to_string())),
                Ok(Some(Up { sequence, .. })) if sequence != self.sequence => {
                    return Err(Ended::new(
                        Loss::GivenUp,
                        format!("frame {sequence} received where frame {} was expected", self.sequence),
                    ));
                }
                Ok(Some(Up { body, .. })) => {
                    self.sequence += 1;
                    // A body of a later protocol version is skipped.
                    let Some(body) = body else { continue };
                    return Ok(body);
                }
                Ok(None) => match self.reader.read_buf(&mut self.input).await {
                    Ok(0) => return Err(Ended::new(Loss::Ended, "the worker closed the connection")),
                    Ok(_) => {}
                    // A peer that is killed does not close TLS properly.
                    Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                        return Err(Ended::new(Loss::Ended, "the worker closed the connection"));
                    }
                    Err(error) => return Err(Ended::new(Loss::Ended, error.to_string())),
                },
            }
        }
    }
}

async fn send(writer: &mut Writer, body: DownBody) -> Result<(), Ended> {
    let mut bytes = BytesMut::new();
    codec::encode(&Down { body: Some(body) }, &mut bytes)
        .map_err(|error| Ended::new(Loss::GivenUp, error.to_string()))?;
    written(writer, &bytes).await.map_err(|error| Ended::new(Loss::Ended, error.to_string()))
}

/// Writes and flushes: TLS may keep bytes that are not flushed.
async fn written(writer: &mut Writer, bytes: &[u8]) -> std::io::Result<()> {
    writer.write_all(bytes).await?;
    writer.flush().await
}

/// Writes queued frames to the worker, up to 64 per write.
async fn speak(mut outbox: mpsc::Receiver<Down>, mut writer: Writer) -> Ended {
    let mut frames = Vec::new();
    let mut bytes = BytesMut::new();
    while outbox.recv_many(&mut frames, 64).await > 0 {
        for frame in frames.drain(..) {
            if let Err(error) = codec::encode(&frame, &mut bytes) {
                return Ended::new(Loss::GivenUp, error.to_string());
            }
        }
        match timeout(WRITE_DEADLINE, written(&mut writer, &bytes)).await {
            Ok(Ok(())) => bytes.clear(),
            Ok(Err(error)) => return Ended::new(Loss::Ended, error.to_string()),
            Err(_) => return Ended::new(Loss::GivenUp, "the worker does not read its connection"),
        }
    }
    // The actor dropped the link; the reading side decides when the session ends.
    std::future::pending().await
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::UnixListener;

    /// Takes a connection, its hello unread, and reports progress with sequence number `number`.
    async fn report(listener: &UnixListener, number: u64) -> tokio::net::UnixStream {
        let (mut stream, _) = listener.accept().await.expect("the gateway dials");
        let body = Some(UpBody::Loading(Loading { stage: "weights".into(), ..Loading::default() }));
        let mut bytes = BytesMut::new();
        codec::encode(&Up { sequence: number, body }, &mut bytes).expect("a small frame");
        stream.write_all(&bytes).await.expect("the gateway reads");
        stream
    }

    #[tokio::test]
    async fn a_worker_that_falls_silent_while_it_loads_is_dialled_again() {
        let path = std::env::temp_dir().join(format!("pen-silent-{}.sock", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).expect("a socket");
        let address = format!("unix://{}", path.display()).parse().expect("an address");
        let (events, mut heard) = mpsc::channel(8);
        let (worker, gateway, silence_max) = (WorkerId(0), GatewayId(1), Duration::from_millis(100));
        let keeper = Keeper { worker, address, key: None, tls: None, gateway, silence_max, events };
        let running = tokio::spawn(keeper.run());
        let told = async {
            let _silent = report(&listener, 0).await;
            assert!(matches!(heard.recv().await, Some(Event::Loading { .. })));
            let Some(Event::Lost { loss, why, .. }) = heard.recv().await else { panic!("the session goes on") };
            assert_eq!((loss, why.contains("no sign of life")), (Loss::GivenUp, true), "{why}");
            let _again = report(&listener, 0).await;
            assert!(matches!(heard.recv().await, Some(Event::Loading { .. })));
        };
        timeout(Duration::from_secs(40), told).await.expect("the worker is dialled again");
        running.abort();
        let _ = std::fs::remove_file(&path);
    }
}
