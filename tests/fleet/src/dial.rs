//! Gateway's end of a session, driven by hand: for frames that a pool never sends, or sends only when it chooses.

use crate::{PATIENCE, Worker, wait_for};
use bytes::BytesMut;
use penstock_pool::Job;
use penstock_proto::frames::{
    ChoiceStart, Down, DownBody, Generate, Hello, Output, Pull, Pulled, Ready, Step, Up, UpBody,
};
use penstock_proto::{PROTOCOL_VERSION, codec};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// A session that has been greeted.
pub struct Session {
    stream: UnixStream,
    input: BytesMut,
    /// Greeting of the worker.
    pub ready: Ready,
}

/// Frame in which a gateway sends a job.
pub fn generate(request: u64, job: Job) -> Generate {
    Generate {
        request,
        prompt: job.prompt.to_vec(),
        choices: (0..job.choices).map(|index| ChoiceStart { index, emitted: Vec::new() }).collect(),
        sampling: Some(job.sampling),
        salt: job.salt.to_vec(),
        ..Generate::default()
    }
}

/// Output of one choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Told {
    /// Tokens of the choice.
    pub tokens: Vec<u32>,
    /// Prompt tokens that were read from the cache.
    pub cached: u32,
    /// Number of the finish reason.
    pub reason: i32,
}

impl Session {
    /// Connects to a worker and waits until it serves.
    ///
    /// # Panics
    /// If the worker does not serve within [`PATIENCE`].
    pub async fn with(worker: &Worker) -> Self {
        let socket = &worker.socket;
        assert!(wait_for(|| socket.exists().then_some(())).await.is_some(), "the worker listens");
        let stream = UnixStream::connect(socket).await.expect("the worker listens");
        let mut session = Self { stream, input: BytesMut::new(), ready: Ready::default() };
        session.say(DownBody::Hello(Hello { version: PROTOCOL_VERSION, gateway: 1, nonce: Vec::new() })).await;
        session.ready = loop {
            match session.hear().await {
                UpBody::Ready(ready) => break ready,
                UpBody::Loading(_) => {}
                other => panic!("{other:?}"),
            }
        };
        session
    }

    /// Sends a frame.
    ///
    /// # Panics
    /// If the worker does not read.
    pub async fn say(&mut self, body: DownBody) {
        let mut bytes = BytesMut::new();
        codec::encode(&Down { body: Some(body) }, &mut bytes).expect("a small frame");
        self.stream.write_all(&bytes).await.expect("the worker reads");
    }

    /// Reads the next frame.
    ///
    /// # Panics
    /// If no frame comes within [`PATIENCE`].
    pub async fn hear(&mut self) -> UpBody {
        loop {
            if let Some(Up { body, .. }) = codec::decode(&mut self.input).expect("workers speak the contract") {
                return body.expect("a body that is known");
            }
            let read = timeout(PATIENCE, self.stream.read_buf(&mut self.input)).await.expect("in time");
            assert_ne!(read.expect("it reads"), 0, "the worker closed the session");
        }
    }

    /// Reads the next step, or heartbeat.
    ///
    /// # Panics
    /// As [`Self::hear`].
    pub async fn step(&mut self) -> Step {
        loop {
            if let UpBody::Step(step) = self.hear().await {
                return step;
            }
        }
    }

    /// Waits for a step for which `holds` is true.
    ///
    /// # Panics
    /// As [`Self::hear`].
    pub async fn until(&mut self, holds: impl Fn(&Step) -> bool) -> Step {
        let began = std::time::Instant::now();
        loop {
            let step = self.step().await;
            if holds(&step) {
                return step;
            }
            assert!(began.elapsed() < PATIENCE, "it never comes: {step:?}");
        }
    }

    /// Waits until the worker runs nothing and holds no page.
    ///
    /// # Panics
    /// As [`Self::hear`].
    pub async fn idle(&mut self) {
        self.until(|step| {
            let state = step.state.as_ref().expect("always there");
            state.running + state.waiting == 0 && state.blocks_free == state.blocks_total
        })
        .await;
    }

    /// Reads outputs of one request until choice 0 ends, or has `tokens` tokens.
    ///
    /// # Panics
    /// If tokens are missing or come twice.
    pub async fn read(&mut self, request: u64, told: &mut Told, tokens: usize) {
        while told.tokens.len() < tokens {
            for output in
                self.step().await.outputs.into_iter().filter(|output| output.request == request && output.choice == 0)
            {
                let Output { at, tokens, finish, cached_tokens, .. } = output;
                assert!(at as usize == told.tokens.len() || tokens.is_empty(), "exactly once, in order");
                // Only the first output has the count; a continuation's count is not of this request's prompt alone.
                if told.tokens.is_empty() {
                    told.cached = cached_tokens.unwrap_or(told.cached);
                }
                told.tokens.extend(tokens.iter().map(|token| token.id));
                if let Some(finish) = finish {
                    told.reason = finish.reason;
                    return;
                }
            }
        }
    }

    /// Runs one request to its end.
    ///
    /// # Panics
    /// As [`Self::read`].
    pub async fn run(&mut self, generate: Generate) -> Told {
        let request = generate.request;
        self.say(DownBody::Generate(generate)).await;
        let mut told = Told::default();
        self.read(request, &mut told, usize::MAX).await;
        told
    }

    /// Has blocks fetched from another worker.
    ///
    /// # Panics
    /// As [`Self::hear`].
    pub async fn pull(&mut self, pull: Pull) -> Pulled {
        self.say(DownBody::Pull(pull)).await;
        loop {
            if let UpBody::Pulled(pulled) = self.hear().await {
                return pulled;
            }
        }
    }
}
