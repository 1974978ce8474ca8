//! Requests with grammars, and for vectors, on the engine's thread, with the demo model.

use super::*;
use crate::config::WorkerConfig;
use crate::model::build;
use crate::options::ModelOptions;
use penstock_proto::frames::{
    ChoiceStart, EngineState, Finish, FinishReason, Guide, GuideKind, Pooling, Ready, Sampling,
};
use penstock_proto::{Address, Capability, Epoch, ErrorKind, GatewayId, SessionId};
use tokio::runtime::Runtime;

const SESSION: SessionId = SessionId(1);

/// A running engine thread with one session.
struct Worker {
    commands: mpsc::Sender<Command>,
    frames: mpsc::Receiver<UpBody>,
    ready: Ready,
    _runtime: Runtime,
}

impl Worker {
    /// Begins a session of another gateway; its first frame is read.
    fn attach(&self, session: SessionId) -> mpsc::Receiver<UpBody> {
        let (sender, mut frames) = mpsc::channel(1024);
        self.send(Command::Attach { session, gateway: GatewayId(session.0), epoch: Epoch(3), frames: sender });
        assert!(matches!(frames.blocking_recv(), Some(UpBody::Ready(_))), "the first frame describes the worker");
        frames
    }

    fn start() -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let (commands, inbox) = mpsc::channel(64);
        let config = WorkerConfig::new(Address::Unix("/nonexistent/worker.sock".into()));
        let wiring = Wiring {
            tiers: TierOptions::default(),
            commands: commands.downgrade(),
            peers: Arc::new(Peers::new(&config, &commands, String::new())),
            runtime: runtime.handle().clone(),
        };
        let (phase, _) = watch::channel(Phase::Ready);
        let model = ModelOptions { threads: 1, kv_bytes_max: 8 << 20, ..ModelOptions::default() };
        EngineThread::start(build(model), phase, inbox, wiring).expect("started");
        let (sender, mut frames) = mpsc::channel(1024);
        commands
            .blocking_send(Command::Attach { session: SESSION, gateway: GatewayId(7), epoch: Epoch(3), frames: sender })
            .unwrap_or_else(|_| panic!("the thread listens"));
        let Some(UpBody::Ready(ready)) = frames.blocking_recv() else { panic!("the first frame describes the worker") };
        Self { commands, frames, ready, _runtime: runtime }
    }

    fn send(&self, command: Command) {
        self.commands.blocking_send(command).unwrap_or_else(|_| panic!("the thread listens"));
    }

    fn generate(&self, request: u64, grammar: Option<Guide>, choices: u32) {
        let generate = text(request, grammar, choices);
        self.send(Command::Generate { session: SESSION, generate: Box::new(generate) });
    }

    /// Sends requests of two gateways, the first of which has by far the most that wait, and cancels them.
    fn ask_and_leave(&mut self, other: SessionId) {
        for (session, waiting) in [(SESSION, u32::MAX), (other, 1)] {
            let generate = Generate { waiting, ..text(1, None, 1) };
            self.send(Command::Generate { session, generate: Box::new(generate) });
        }
        for session in [SESSION, other] {
            self.send(Command::Cancel { session, cancel: Cancel { request: 1, choices: Vec::new() } });
        }
        // A gateway that leaves its frames unread would lose its session.
        while self.frames.try_recv().is_ok() {}
    }

    /// Reads frames until `ends` choices have ended; returns the tokens and the end of each, by request and choice.
    fn read(&mut self, ends: usize) -> BTreeMap<(u64, u32), (usize, Finish)> {
        let (mut tokens, mut ended) = (HashMap::<(u64, u32), usize>::new(), BTreeMap::new());
        while ended.len() < ends {
            let UpBody::Step(step) = self.frames.blocking_recv().expect("the thread lives") else { continue };
            for output in step.outputs {
                let key = (output.request, output.choice);
                *tokens.entry(key).or_default() += output.tokens.len();
                if let Some(finish) = output.finish {
                    assert!(ended.insert(key, (tokens[&key], finish)).is_none(), "it ends once");
                }
            }
        }
        ended
    }
}

/// A request for 60 tokens of each choice.
fn text(request: u64, grammar: Option<Guide>, choices: u32) -> Generate {
    let sampling = Sampling {
        top_p: 1.0,
        repetition_penalty: 1.0,
        max_tokens: 60,
        logprobs: -1,
        prompt_logprobs: -1,
        ..Sampling::default()
    };
    Generate {
        request,
        prompt: (0..40).map(|n| 300 + n).collect(),
        choices: (0..choices).map(|index| ChoiceStart { index, emitted: Vec::new() }).collect(),
        sampling: Some(sampling),
        grammar,
        ..Generate::default()
    }
}

/// Does `meanwhile` again and again until a session is told a state as wanted; false if that does not happen.
fn comes(
    frames: &mut mpsc::Receiver<UpBody>,
    wanted: impl Fn(&EngineState) -> bool,
    mut meanwhile: impl FnMut(),
) -> bool {
    let until = Instant::now() + Duration::from_secs(60);
    let mut told = None;
    while Instant::now() < until {
        meanwhile();
        std::thread::sleep(Duration::from_millis(10));
        while let Ok(body) = frames.try_recv() {
            if let UpBody::Step(Step { state: Some(state), .. }) = body {
                told = Some(state);
            }
        }
        if told.as_ref().is_some_and(&wanted) {
            return true;
        }
    }
    false
}

fn guide(kind: GuideKind, text: &str) -> Option<Guide> {
    Some(Guide { kind: kind as i32, text: text.to_owned(), begins_after: Vec::new() })
}

fn reason((_, finish): &(usize, Finish)) -> FinishReason {
    finish.reason()
}

#[test]
fn requests_wait_for_their_grammar_and_follow_it() {
    let mut worker = Worker::start();
    assert!(worker.ready.grammar.starts_with(penstock_grammar::VERSION), "{}", worker.ready.grammar);
    worker.generate(1, guide(GuideKind::Choice, r#"["a fixed answer of several tokens"]"#), 1);
    worker.generate(2, None, 1);
    worker.generate(3, guide(GuideKind::Regex, "("), 2);
    worker.generate(4, guide(GuideKind::Choice, r#"["a fixed answer of several tokens"]"#), 2);
    let ended = worker.read(6);
    assert_eq!(reason(&ended[&(1, 0)]), FinishReason::Stop);
    assert!((3..20).contains(&ended[&(1, 0)].0), "{:?}", ended[&(1, 0)]);
    assert_eq!((ended[&(2, 0)].0, reason(&ended[&(2, 0)])), (60, FinishReason::Length));
    for choice in 0..2 {
        let (tokens, finish) = &ended[&(3, choice)];
        assert_eq!((*tokens, finish.error_kind), (0, ErrorKind::InvalidRequest as i32), "{finish:?}");
        assert_eq!(ended[&(4, choice)], ended[&(1, 0)]);
    }
}

#[test]
fn a_vector_comes_with_the_end_of_its_request() {
    let mut worker = Worker::start();
    assert!(worker.ready.has().has(Capability::Vectors.into()), "the worker announces it");
    let pooled = |request, length: u32| Generate {
        request,
        prompt: (0..length).map(|n| 300 + n).collect(),
        choices: vec![ChoiceStart { index: 0, emitted: Vec::new() }],
        pooling: Pooling::Last as i32,
        ..Generate::default()
    };
    for request in 1..=4 {
        worker.send(Command::Generate { session: SESSION, generate: Box::new(pooled(request, 40)) });
    }
    worker.generate(9, None, 1);
    let (mut vectors, mut text_ended) = (Vec::new(), false);
    while vectors.len() < 4 || !text_ended {
        let UpBody::Step(step) = worker.frames.blocking_recv().expect("the thread lives") else { continue };
        for output in step.outputs {
            assert_eq!(output.vector.is_empty(), output.request == 9, "{output:?}");
            text_ended |= output.request == 9 && output.finish.is_some();
            if output.request != 9 {
                assert_eq!((output.finish.map(|end| end.reason()), output.tokens.len()), (Some(FinishReason::Stop), 0));
                vectors.push(output.vector);
            }
        }
    }
    assert!(vectors.iter().all(|vector| vector.len() == 256 && *vector == vectors[0]));
}

#[test]
fn a_gateway_gets_the_credits_of_an_idle_engine_when_another_one_wants_them_no_more() {
    const OTHER: SessionId = SessionId(2);
    let mut worker = Worker::start();
    let mut others = worker.attach(OTHER);
    let is_denied = |state: &EngineState| state.credits == 0 && state.running + state.waiting == 0;
    let is_granted = |state: &EngineState| state.credits > 0;
    assert!(comes(&mut others, is_denied, || worker.ask_and_leave(OTHER)), "none is left for the other one");
    assert!(comes(&mut others, is_granted, || worker.send(Command::Tick)), "what waits elsewhere is not said again");
    assert!(comes(&mut others, is_denied, || worker.ask_and_leave(OTHER)));
    worker.send(Command::Detach { session: SESSION });
    assert!(comes(&mut others, is_granted, || {}), "the first gateway has left");
}

#[test]
fn requests_that_wait_for_their_grammar_can_be_cancelled() {
    let mut worker = Worker::start();
    // Costly enough to be compiled still when the commands behind it are read.
    let slow = |number: u32| {
        let names: Vec<String> =
            (0..300).map(|n| format!(r#""p{number}x{n}":{{"type":"string","maxLength":{n}}}"#)).collect();
        guide(GuideKind::JsonSchema, &format!(r#"{{"type":"object","properties":{{{}}}}}"#, names.join(",")))
    };
    worker.generate(1, slow(1), 1);
    worker.generate(2, slow(2), 2);
    worker.send(Command::Cancel { session: SESSION, cancel: Cancel { request: 1, choices: Vec::new() } });
    worker.send(Command::Cancel { session: SESSION, cancel: Cancel { request: 2, choices: vec![1] } });
    worker.send(Command::Window { session: SESSION, window: Window { request: 2, choice: 0, tokens: 8 } });
    let ended = worker.read(3);
    assert_eq!(reason(&ended[&(1, 0)]), FinishReason::Cancelled);
    assert_eq!(reason(&ended[&(2, 1)]), FinishReason::Cancelled);
    assert!(matches!(reason(&ended[&(2, 0)]), FinishReason::Stop | FinishReason::Length));
}

#[test]
fn a_drain_lets_a_request_go_on_whose_grammar_is_being_compiled() {
    let mut worker = Worker::start();
    worker.generate(1, guide(GuideKind::Regex, "[a-z]{3,5}"), 1);
    worker.send(Command::Drain { exit: true });
    assert_eq!(reason(&worker.read(1)[&(1, 0)]), FinishReason::Stop);
    while worker.frames.blocking_recv().is_some() {}
}

#[test]
fn a_draining_worker_refuses_a_new_request_whose_grammar_it_does_not_know() {
    let mut worker = Worker::start();
    // The index of the vocabulary is made before the first grammar, so this request waits, and keeps the worker up.
    worker.generate(1, guide(GuideKind::Regex, "[a-z]{3,5}"), 1);
    worker.send(Command::Drain { exit: false });
    worker.generate(2, guide(GuideKind::Regex, "[A-Z]{3,5}"), 2);
    worker.generate(3, None, 1);
    let ended = worker.read(4);
    assert_eq!(reason(&ended[&(1, 0)]), FinishReason::Stop, "accepted before the drain");
    for refused in [(2, 0), (2, 1), (3, 0)] {
        let (tokens, finish) = &ended[&refused];
        assert_eq!((*tokens, finish.error_kind), (0, ErrorKind::Draining as i32), "{finish:?}");
    }
}
