//! An upstream that follows the prompt's commands, and counts.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use penstock_kv_feed::Feed;
use penstock_proto::ErrorKind;
use penstock_proxy::Failure;
use penstock_telemetry::Gauge;
use penstock_types::{ChatEvent, FinishReason, Prompt, Request, Usage};
use penstock_types::{DetokenizeRequest, TokenizeRequest};
use penstock_upstream::Forward;
use penstock_upstream::Forwarded;
use penstock_upstream::call::Call;
use penstock_upstream::{Card, Events, Facts, Origin, Prepared, Upstream};
use tokio::time::{Sleep, sleep};

/// Name of the upstream's model.
pub const MODEL: &str = "puppet";

/// Commands of a prompt: `say 5`, `pace 5` (one token in 5 ms), `flood` (1 KiB tokens without end), `hang`, `refuse`,
/// `break 3` (fails after 3 tokens), `short 3` (ends after 3 without finishing), `panic`, `stall` (never opens).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Script {
    Say(usize),
    Pace(usize),
    Flood,
    Hang,
    Refuse,
    Break(usize),
    Short(usize),
    Panic,
    Stall,
}

/// Scripted upstream.
#[derive(Debug, Default)]
pub struct Puppet {
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    open: AtomicUsize,
    opened: AtomicUsize,
    tokens: AtomicUsize,
}

impl Puppet {
    /// Number of requests open now.
    pub fn open(&self) -> usize {
        self.counts.open.load(Ordering::SeqCst)
    }

    /// Number of requests so far.
    pub fn opened(&self) -> usize {
        self.counts.opened.load(Ordering::SeqCst)
    }

    /// Number of tokens taken so far.
    pub fn tokens(&self) -> usize {
        self.counts.tokens.load(Ordering::SeqCst)
    }
}

fn script(request: &Request) -> Script {
    let text = match request {
        Request::Chat(chat) => chat.messages.last().and_then(|message| message.content.clone()).unwrap_or_default(),
        Request::Complete(complete) => match complete.prompts.first() {
            Some(Prompt::Text(text)) => text.clone(),
            _ => String::new(),
        },
        Request::Embed(_) | Request::Rerank(_) => String::new(),
    };
    let (verb, count) = text.split_once(' ').unwrap_or((text.as_str(), "1"));
    let count = count.trim_end().parse().unwrap_or(1);
    match verb {
        "pace" => Script::Pace(count),
        "flood" => Script::Flood,
        "hang" => Script::Hang,
        "refuse" => Script::Refuse,
        "break" => Script::Break(count),
        "short" => Script::Short(count),
        "panic" => Script::Panic,
        "stall" => Script::Stall,
        _ => Script::Say(count),
    }
}

#[async_trait]
impl Upstream for Puppet {
    fn card(&self) -> Card {
        Card { id: MODEL.into(), created: 0, context_tokens: 1000, task: None, parent: None }
    }

    fn unready(&self) -> Option<String> {
        None
    }

    async fn open(&self, call: Arc<Call>, _: Origin) -> Result<Box<dyn Events>, Failure> {
        let request = &call.decoded().await?.request;
        self.counts.opened.fetch_add(1, Ordering::SeqCst);
        if script(request) == Script::Stall {
            std::future::pending::<()>().await;
        }
        self.counts.open.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(Strings { script: script(request), said: 0, timer: None, counts: self.counts.clone() }))
    }

    async fn count(&self, _: Arc<Call>) -> Result<Option<u64>, Failure> {
        Ok(None)
    }

    async fn measure(self: Arc<Self>, _: &Call) -> Result<Prepared, Failure> {
        Ok(Prepared::default())
    }

    async fn forward(&self, _: Arc<Forward>) -> Result<Forwarded, Failure> {
        Err(Failure::new(ErrorKind::Unsupported, "A puppet passes nothing on."))
    }

    async fn tokenize(&self, _: TokenizeRequest) -> Result<Vec<u8>, Failure> {
        Err(Failure::new(ErrorKind::Unsupported, "A puppet has no tokens."))
    }

    async fn detokenize(&self, _: DetokenizeRequest) -> Result<Vec<u8>, Failure> {
        Err(Failure::new(ErrorKind::Unsupported, "A puppet has no tokens."))
    }

    fn feed(&self) -> Option<Arc<Feed>> {
        None
    }

    fn gauges(&self, _: &mut dyn FnMut(Gauge, f64)) {}
}

/// An answer in progress.
struct Strings {
    script: Script,
    said: usize,
    timer: Option<Pin<Box<Sleep>>>,
    counts: Arc<Counts>,
}

impl Drop for Strings {
    fn drop(&mut self) {
        self.counts.open.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Strings {
    fn token(&mut self, text: String, out: &mut Vec<ChatEvent>) {
        self.said += 1;
        self.counts.tokens.fetch_add(1, Ordering::SeqCst);
        out.push(ChatEvent::Text { choice: 0, text, logprobs: Vec::new(), tokens: Vec::new() });
    }

    fn end(&self, out: &mut Vec<ChatEvent>) -> Poll<Result<bool, Failure>> {
        out.push(ChatEvent::Finish { choice: 0, reason: FinishReason::Stop, stop: None });
        out.push(ChatEvent::Usage(Usage { completion_tokens: self.said as u64, ..Usage::default() }));
        Poll::Ready(Ok(false))
    }

    fn failure() -> Failure {
        Failure::new(ErrorKind::WorkerFailed, "The puppet failed.").log("as told")
    }
}

impl Events for Strings {
    fn poll_events(&mut self, context: &mut Context<'_>, out: &mut Vec<ChatEvent>) -> Poll<Result<bool, Failure>> {
        match self.script {
            Script::Hang | Script::Stall => return Poll::Pending,
            Script::Panic => panic!("as told"),
            Script::Refuse => return Poll::Ready(Err(Self::failure())),
            Script::Say(count) if self.said >= count => return self.end(out),
            Script::Pace(count) if self.said >= count => return self.end(out),
            Script::Break(count) if self.said >= count => return Poll::Ready(Err(Self::failure())),
            Script::Short(count) if self.said >= count => return Poll::Ready(Ok(false)),
            Script::Pace(_) => {
                let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(Duration::from_millis(5))));
                if timer.as_mut().poll(context).is_pending() {
                    return Poll::Pending;
                }
                self.timer = None;
            }
            Script::Say(_) | Script::Break(_) | Script::Short(_) | Script::Flood => {}
        }
        let text = if self.script == Script::Flood { "x".repeat(1024) } else { format!("t{} ", self.said) };
        self.token(text, out);
        Poll::Ready(Ok(true))
    }

    fn facts(&self) -> Facts {
        Facts { prompt_tokens: 1, completion_tokens: self.said as u64, ..Facts::default() }
    }
}
