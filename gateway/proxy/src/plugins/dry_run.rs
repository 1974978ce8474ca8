//! Dry run of a request: `on_request` of every plugin that it meets, and the edits of each, with nothing behind it.
//!
//! Plugins run as for a real request, with a [`DryHost`] in place of the services of the process: nothing is sent, written or
//! counted, and waits are over at once. A plugin that asks a model or a service is stopped there and its edits are taken back, since its
//! verdict would be a guess. A plugin that keeps state of its own ([`Plugin::can_dry_run`](penstock_plugins::Plugin::can_dry_run)) is
//! left out.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use penstock_plugins::{
    AskAs, BoxFuture, Endpoint, Host, HostError, HttpAnswer, HttpAsk, ModelAnswer, RequestContext, RequestInfo, Sees,
    Verdict,
};
use penstock_types::ChatRequest;
use tokio::sync::Notify;

use super::ask::{info, make_body, prepare, run_hook, without_credentials};
use super::chain::{Chain, Link};
use super::host::RequestHost;
use super::shell::{Broke, Shell, Stage, closed, refused};
use penstock_auth::Principal;
use penstock_base::error::Failure;
use penstock_config::OnFail;
use penstock_upstream::call::Call;

/// Request as it stands behind a plugin.
#[derive(Clone, Debug)]
pub struct View {
    /// Name of the model that is asked.
    pub model: String,
    /// Header fields of the client, without credentials.
    pub headers: HeaderMap,
    /// Header fields that plugins add for providers.
    pub send: Vec<(HeaderName, HeaderValue)>,
    /// Tags for the access log and the ledger.
    pub tags: Vec<(String, String)>,
    /// Body in the client's dialect; `None`: an edited request that the dialect cannot express.
    pub body: Option<Bytes>,
}

impl View {
    fn of(context: &mut RequestContext, call: &Call) -> Self {
        // An edit that cannot be encoded fails where somebody needs the bytes, not here.
        let is_said = make_body(context, call).is_ok();
        let body = if is_said { context.body().ok().cloned() } else { None };
        let (headers, send, tags) = (context.headers.clone(), context.send.clone(), context.tags.clone());
        Self { model: context.model.clone(), headers, send, tags, body }
    }
}

/// Outcome of one plugin in a dry run.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// The entry's routes, models, keys or teams do not cover the request.
    Skipped,
    /// An earlier plugin ended the request.
    NotReached,
    /// The plugin has no dry run; text for people.
    NotRun(String),
    /// The plugin passed the request on, with its edits in the step's view.
    Passed,
    /// The plugin gave an answer; no model would be asked.
    Answered,
    /// The plugin refused the request.
    Refused(Box<Failure>),
    /// The plugin failed.
    Failed {
        /// Reason in one word: `error`, `panic`, `timeout`, or `request` where the request cannot be read for it.
        reason: &'static str,
        /// Detail as the log would have it.
        detail: String,
        /// True where the request goes on without the plugin (`on_fail = "open"`).
        goes_on: bool,
    },
}

/// One plugin of the config in a dry run.
#[derive(Clone, Debug)]
pub struct Step {
    /// Id of the entry.
    pub id: String,
    /// Name of the plugin.
    pub name: String,
    /// Outcome of the plugin.
    pub outcome: Outcome,
    /// Time that `on_request` took, without waits.
    pub took: Duration,
    /// Waits that were left out: the plugin would have delayed the request by them.
    pub waits: Duration,
    /// True if the plugin would look at the answer.
    pub sees_answer: bool,
    /// Request behind the plugin; `None`: the plugin did not run to its end.
    pub after: Option<View>,
}

/// End of the request behind the plugins.
#[derive(Clone, Debug)]
pub enum End {
    /// The request goes on to the model of the last view.
    Goes,
    /// A plugin answered.
    Answered,
    /// The request ends with this error.
    Refused(Box<Failure>),
}

/// Result of a dry run.
#[derive(Clone, Debug)]
pub struct Report {
    /// Facts of the request, as plugins see them.
    pub info: Arc<RequestInfo>,
    /// Request in front of the first plugin.
    pub before: View,
    /// Every plugin of the config, in the order of the file.
    pub steps: Vec<Step>,
    /// Request behind the last plugin that ran.
    pub after: View,
    /// End of the request.
    pub end: End,
}

/// Host of one plugin in a dry run. A call to a model or a service never returns; the dry run then stops the plugin.
struct DryHost {
    inner: RequestHost,
    /// Place that the plugin would have called.
    called: Mutex<Option<String>>,
    is_called: Notify,
    waits_ms: AtomicU64,
}

impl DryHost {
    fn new(inner: RequestHost) -> Self {
        Self { inner, called: Mutex::default(), is_called: Notify::new(), waits_ms: AtomicU64::new(0) }
    }

    /// Notes what the plugin calls, and never returns.
    async fn stop<T>(&self, what: String) -> T {
        self.called.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(what);
        self.is_called.notify_one();
        std::future::pending().await
    }

    /// Waits until the plugin has called somebody, and returns what it called.
    async fn stopped(&self) -> String {
        self.is_called.notified().await;
        self.called.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default()
    }
}

#[async_trait]
impl Host for DryHost {
    async fn chat(&self, request: ChatRequest, _: AskAs) -> Result<ModelAnswer, HostError> {
        self.stop(format!("the model {}", request.model)).await
    }

    async fn embed(&self, model: &str, _: Vec<String>, _: AskAs) -> Result<Vec<Vec<f32>>, HostError> {
        self.stop(format!("the model {model}")).await
    }

    async fn operation(&self, path: &str, model: &str, _: Bytes, _: AskAs) -> Result<HttpAnswer, HostError> {
        self.stop(format!("{path} of the model {model}")).await
    }

    async fn http(&self, _: &Endpoint, _: HttpAsk) -> Result<HttpAnswer, HostError> {
        // The URL may hold a secret.
        self.stop("its service".into()).await
    }

    async fn cache_get(&self, key: &str) -> Result<Option<Bytes>, HostError> {
        self.inner.cache_get(key).await
    }

    async fn cache_put(&self, _: &str, _: Bytes, _: Duration) -> Result<(), HostError> {
        Ok(())
    }

    fn append(&self, _: &str, _: Vec<u8>) {}

    fn sleep(&self, time: Duration) -> BoxFuture<()> {
        self.waits_ms.fetch_add(time.as_millis() as u64, Ordering::Relaxed);
        Box::pin(async {})
    }

    fn spawn(&self, _: BoxFuture<()>) -> bool {
        true
    }

    fn since_epoch(&self) -> Duration {
        self.inner.since_epoch()
    }

    fn random(&self) -> u64 {
        self.inner.random()
    }
}

impl Chain {
    /// Runs every plugin that matches the call, up to the one that ends it. The call goes nowhere.
    pub(crate) async fn dry_run(&self, principal: &Arc<Principal>, mut call: Call) -> Report {
        let info = Arc::new(RequestInfo { dry_run: true, ..info(principal, &call) });
        let headers = without_credentials(std::mem::take(&mut call.headers));
        let host = || Arc::new(DryHost::new(RequestHost::new(self.hub.clone(), principal.clone())));
        let mut shell = Shell::new(info.clone(), self.metrics.clone());
        let mut context = RequestContext::new(info.clone(), headers, Vec::new(), call.body.clone(), host());
        let before = View::of(&mut context, &call);
        let (mut steps, mut end) = (Vec::new(), None);
        for link in &self.links {
            let mut step = Step {
                id: link.entry.id.to_string(),
                name: link.entry.name.clone(),
                outcome: Outcome::Skipped,
                took: Duration::ZERO,
                waits: Duration::ZERO,
                sees_answer: false,
                after: None,
            };
            if end.is_some() {
                step.outcome = Outcome::NotReached;
            } else if link.is_for(&info) {
                end = try_plugin(link, host(), &mut context, &call, &mut shell, &mut step).await;
                // Whoever waits for the run may be gone: plugins that never give way would keep it going to the end.
                tokio::task::yield_now().await;
            }
            steps.push(step);
        }
        let after = View::of(&mut context, &call);
        let reads = shell.reads() || matches!(end, Some(End::Answered));
        let end = match end {
            Some(refused @ End::Refused(_)) => refused,
            end => match self.conclude(&mut call, context, reads).await {
                Ok(()) => end.unwrap_or(End::Goes),
                Err(failure) => End::Refused(Box::new(failure)),
            },
        };
        Report { info, before, steps, after, end }
    }
}

/// Runs one plugin; the end of the request, if the plugin ends it.
async fn try_plugin(
    link: &Link,
    host: Arc<DryHost>,
    context: &mut RequestContext,
    call: &Call,
    shell: &mut Shell,
    step: &mut Step,
) -> Option<End> {
    let entry = &link.entry;
    if !entry.plugin.can_dry_run() {
        step.outcome = Outcome::NotRun("the plugin keeps state of its own, which a dry run would change".into());
        return None;
    }
    if let Err(failure) = prepare(entry.plugin.needs(), context, call).await {
        let detail = failure.message.to_string();
        step.outcome = Outcome::Failed { reason: "request", detail, goes_on: false };
        return Some(End::Refused(Box::new(failure)));
    }
    let untouched = context.clone();
    context.host = host.clone();
    let mut hooks = entry.plugin.begin();
    let began = Instant::now();
    let done = tokio::select! {
        biased;
        done = run_hook(entry.timeout, hooks.as_mut(), context) => Ok(done),
        called = host.stopped() => Err(called),
    };
    step.took = began.elapsed();
    step.waits = Duration::from_millis(host.waits_ms.load(Ordering::Relaxed));
    let done = match done {
        Ok(Ok(_)) if step.waits > entry.timeout => Err(Broke::Timeout),
        Ok(done) => done,
        Err(called) => {
            *context = untouched;
            step.outcome = Outcome::NotRun(format!("the plugin would call {called}, and a dry run calls nothing"));
            return None;
        }
    };
    let (outcome, end) = match done {
        Ok(Verdict::Pass) => {
            let sees = hooks.sees();
            step.sees_answer = sees >= Sees::Head;
            step.after = Some(View::of(context, call));
            if sees > Sees::Nothing {
                shell.stages.insert(0, Stage::new(entry.clone(), hooks, sees));
            }
            (Outcome::Passed, None)
        }
        Ok(Verdict::Answer(_)) => (Outcome::Answered, Some(End::Answered)),
        Ok(Verdict::Reject(rejection)) => {
            let failure = Box::new(refused(rejection));
            (Outcome::Refused(failure.clone()), Some(End::Refused(failure)))
        }
        Err(broke) => {
            let ((reason, detail), goes_on) = (broke.told(entry), entry.on_fail == OnFail::Open);
            let end = (!goes_on).then(|| End::Refused(Box::new(closed(&entry.id))));
            (Outcome::Failed { reason, detail, goes_on }, end)
        }
    };
    step.outcome = outcome;
    end
}

#[cfg(test)]
mod tests {
    use penstock_plugins::{Answer, EndFacts, Hooks, Needs, Plugin, PluginError, Rejection, RejectionKind};
    use penstock_types::{Message, Request, Role};

    use super::super::tests::{call, chain, entry_of};
    use super::*;

    /// Action of a scripted plugin on a request.
    #[derive(Clone, Copy, Debug)]
    enum Act {
        Pass,
        Tag,
        Instruct,
        Redirect,
        Wait(u64),
        EditAndAsk,
        Write,
        Answer,
        Reject,
        Fail,
        Panic,
        /// Passes, and says that it has no dry run.
        Unfit,
    }

    #[derive(Clone)]
    struct Acting {
        act: Act,
        ends: Arc<AtomicU64>,
        host: Option<Arc<dyn Host>>,
    }

    impl Plugin for Acting {
        fn needs(&self) -> Needs {
            match self.act {
                Act::Instruct | Act::EditAndAsk => Needs::Request,
                _ => Needs::Body,
            }
        }

        fn begin(&self) -> Box<dyn Hooks> {
            Box::new(self.clone())
        }

        fn can_dry_run(&self) -> bool {
            !matches!(self.act, Act::Unfit)
        }
    }

    #[async_trait]
    impl Hooks for Acting {
        async fn on_request(&mut self, request: &mut RequestContext) -> Result<Verdict, PluginError> {
            assert!(request.info.dry_run, "plugins are told");
            self.host = Some(request.host.clone());
            match self.act {
                Act::Pass | Act::Unfit => {}
                Act::Tag => request.tags.push(("team".into(), "red".into())),
                Act::Instruct | Act::EditAndAsk => {
                    let Request::Chat(chat) = request.edit()? else { return Err(PluginError::new("no chat")) };
                    let content = Some("Be brief.".into());
                    chat.messages.insert(0, Message { role: Role::System, content, ..Message::default() });
                    if matches!(self.act, Act::EditAndAsk) {
                        request.host.embed("e", Vec::new(), AskAs::Plugin).await?;
                    }
                }
                Act::Redirect => request.model = "other".into(),
                Act::Wait(ms) => request.host.sleep(Duration::from_millis(ms)).await,
                Act::Write => {
                    request.host.append("/nonexistent/penstock", b"line".to_vec());
                    let spawned = request.host.spawn(Box::pin(async { panic!("no work is done") }));
                    assert!(spawned);
                    request.host.cache_put("a", Bytes::new(), Duration::from_secs(1)).await?;
                }
                Act::Answer => return Ok(Verdict::Answer(Answer { events: Vec::new(), headers: Vec::new() })),
                Act::Reject => return Ok(Verdict::Reject(Rejection::new(RejectionKind::Content, "Not this."))),
                Act::Fail => return Err(PluginError::new("broken")),
                Act::Panic => panic!("a bug"),
            }
            Ok(Verdict::Pass)
        }

        fn sees(&self) -> Sees {
            Sees::End
        }

        fn on_end(&mut self, _: &EndFacts) {
            self.ends.fetch_add(1, Ordering::Relaxed);
            self.host.iter().for_each(|host| host.append("/nonexistent/penstock", b"end".to_vec()));
        }
    }

    /// Outcomes of these plugins, the end, and the last model and body.
    async fn tried(acts: &[(Act, OnFail)]) -> (Report, String) {
        let ends: Arc<AtomicU64> = Arc::default();
        let plugin = |act: Act| Arc::new(Acting { act, ends: ends.clone(), host: None });
        let entries = acts.iter().enumerate().map(|(at, (act, on_fail))| {
            let id = format!("p{at}");
            entry_of(&id, plugin(*act), *on_fail)
        });
        let chain = chain(entries.collect());
        let report = chain.dry_run(&Arc::default(), call(false).await).await;
        let words = report.steps.iter().map(|step| match &step.outcome {
            Outcome::Skipped => "skipped".into(),
            Outcome::NotReached => "not reached".into(),
            Outcome::NotRun(why) => format!("not run: {why}"),
            Outcome::Passed => "passed".into(),
            Outcome::Answered => "answered".into(),
            Outcome::Refused(failure) => format!("refused {}", failure.status()),
            Outcome::Failed { reason, detail, goes_on } => format!("{reason} {detail} {goes_on}"),
        });
        let words: Vec<String> = words.collect();
        let passed = report.steps.iter().filter(|step| matches!(step.outcome, Outcome::Passed)).count() as u64;
        assert_eq!(ends.load(Ordering::Relaxed), passed, "whoever has seen the request is told of its end");
        let text = chain.metrics.render(&[]);
        assert!(!text.contains("penstock_plugin_failures_total{") && !text.contains("outcome=\"reject\""), "{text}");
        assert_eq!(chain.hub.lines_lost(), 0);
        (report, words.join(" | "))
    }

    fn end(report: &Report) -> u16 {
        match &report.end {
            End::Goes => 0,
            End::Answered => 200,
            End::Refused(failure) => failure.status(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn steps_show_what_each_plugin_did() {
        let closed = |act| (act, OnFail::Closed);
        let (report, words) = tried(&[Act::Tag, Act::Instruct, Act::Redirect, Act::Write].map(closed)).await;
        assert_eq!((words.as_str(), end(&report)), ("passed | passed | passed | passed", 0));
        let views: Vec<_> = report.steps.iter().map(|step| step.after.as_ref().expect("ran")).collect();
        assert_eq!(views[0].tags, [("team".to_owned(), "red".to_owned())]);
        assert_eq!(views[0].body, report.before.body, "an unchanged body is the client's own bytes");
        let body = |view: &View| String::from_utf8(view.body.clone().expect("said").to_vec()).expect("text");
        assert!(body(views[1]).contains("Be brief."), "{}", body(views[1]));
        assert_eq!((views[1].model.as_str(), report.after.model.as_str()), ("m", "other"));
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_is_asked_and_edits_before_a_call_are_taken_back() {
        let (report, words) = tried(&[(Act::EditAndAsk, OnFail::Closed), (Act::Unfit, OnFail::Closed)]).await;
        let expected = "not run: the plugin would call the model e, and a dry run calls nothing | not run: the plugin keeps state of its own, which a dry run would change";
        assert_eq!((words.as_str(), end(&report)), (expected, 0));
        assert_eq!(report.after.body, report.before.body);
        let (report, words) = tried(&[(Act::Wait(49), OnFail::Closed), (Act::Wait(51), OnFail::Closed)]).await;
        assert_eq!((words.as_str(), end(&report)), ("passed | timeout no end within 50 ms false", 500));
        assert_eq!(report.steps[0].waits, Duration::from_millis(49), "which did not pass");
    }

    #[tokio::test(start_paused = true)]
    async fn an_end_keeps_the_rest_from_running() {
        let check = async |acts: &[(Act, OnFail)], expected: &str, status: u16| {
            let (report, words) = tried(acts).await;
            assert_eq!((words.as_str(), end(&report)), (expected, status));
        };
        let pass = (Act::Pass, OnFail::Closed);
        check(&[(Act::Reject, OnFail::Open), pass], "refused 400 | not reached", 400).await;
        check(&[(Act::Answer, OnFail::Open), pass], "answered | not reached", 200).await;
        check(&[(Act::Fail, OnFail::Closed), pass], "error broken false | not reached", 500).await;
        check(&[(Act::Fail, OnFail::Open), pass], "error broken true | passed", 0).await;
        check(&[(Act::Panic, OnFail::Open), pass], "panic a bug true | passed", 0).await;
    }

    #[tokio::test]
    async fn entries_for_other_requests_are_skipped() {
        let plugin = Arc::new(Acting { act: Act::Reject, ends: Arc::default(), host: None });
        let mut other = entry_of("p", plugin, OnFail::Closed);
        other.keys = vec!["vip".into()];
        let report = chain(vec![other]).dry_run(&Arc::default(), call(false).await).await;
        assert!(matches!((&report.steps[0].outcome, &report.end), (Outcome::Skipped, End::Goes)));
    }
}
