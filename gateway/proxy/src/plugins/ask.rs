//! Request side of plugins: `on_request` of every plugin that a request meets, and its effect on the call.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use http::{HeaderMap, header};
use penstock_plugins::{Answer, Hooks, Needs, Parts, RequestContext, RequestInfo, Sees, Verdict};
use penstock_types::codec::{AnswerForm, AnswerMeta};
use penstock_types::{Decoded, Request, StreamEncoder, Surface, WholeCollector};
use tokio::time::error::Elapsed;
use tokio::time::timeout;

use super::chain::{Chain, Link};
use super::convert::codec_of;
use super::host::{Reports, RequestHost};
use super::shell::{Broke, Shell, Stage, refused};
use penstock_auth::Principal;
use penstock_base::error::Failure;
use penstock_base::panics::caught;
use penstock_telemetry::Metric;
use penstock_upstream::call::Call;

/// Result of running `on_request` of the matching plugins.
#[derive(Default)]
pub(crate) struct Asked {
    /// Plugins that see the answer, or want to be told of its end; `None`: none does.
    pub(crate) shell: Option<Shell>,
    /// Answer that a plugin gave in place of a model's.
    pub(crate) answer: Option<Answer>,
}

impl Chain {
    /// Runs every plugin that matches the call; their edits are put into the call.
    ///
    /// # Errors
    /// A plugin refuses the call, or fails with `on_fail` closed.
    pub(crate) async fn ask(&self, principal: &Arc<Principal>, call: &mut Call) -> Result<Asked, Failure> {
        let asked = self.ask_all(principal, call).await;
        call.end_edits();
        asked
    }

    async fn ask_all(&self, principal: &Arc<Principal>, call: &mut Call) -> Result<Asked, Failure> {
        if self.links.is_empty() || call.asked_by_plugin {
            return Ok(Asked::default());
        }
        let info = Arc::new(info(principal, call));
        if self.matching(&info).next().is_none() {
            return Ok(Asked::default());
        }
        Box::pin(self.run(principal, call, info)).await
    }

    async fn run(&self, principal: &Arc<Principal>, call: &mut Call, info: Arc<RequestInfo>) -> Result<Asked, Failure> {
        let host = || RequestHost::new(self.hub.clone(), principal.clone()).for_client(info.client);
        let headers = without_credentials(std::mem::take(&mut call.headers));
        let mut context = RequestContext::new(
            info.clone(),
            headers,
            std::mem::take(&mut call.tags),
            call.body.clone(),
            Arc::new(host()),
        );
        let mut shell = Shell::new(info.clone(), self.metrics.clone());
        let mut answer = None;
        let mut clock = shell.began;
        for link in self.matching(&info) {
            let reports = Reports::new(&self.hub, &link.entry.id, &self.metrics);
            context.host = Arc::new(host().reporting(reports));
            match self.step(link, &mut context, call, &mut shell, &mut clock).await {
                Ok(Verdict::Pass) => {}
                Ok(Verdict::Answer(given)) => {
                    answer = Some(given);
                    break;
                }
                Ok(Verdict::Reject(rejection)) => return Err(shell.rejected(refused(rejection))),
                Err(failure) => return Err(shell.failed(failure)),
            }
        }
        shell.model = (context.model != info.model).then(|| context.model.clone());
        let reads = shell.reads() || answer.is_some();
        if let Err(failure) = self.conclude(call, context, reads).await {
            return Err(shell.failed(failure));
        }
        if reads && call.ask.surface == Surface::Score {
            // No decoder reads this shape of answer, so the provider is asked in a shape that one reads.
            call.own = true;
        }
        Ok(Asked { shell: shell.wanted(), answer })
    }

    /// Puts the edits of all plugins into the call. `reads`: the decoded request is needed, since an answer is looked at or given.
    pub(super) async fn conclude(
        &self,
        call: &mut Call,
        mut context: RequestContext,
        reads: bool,
    ) -> Result<(), Failure> {
        if reads {
            make_request(&mut context, call).await?;
        }
        apply(call, context.into_parts(), self.body_bytes_max).await
    }

    /// Runs one plugin, from `clock` on; the plugin becomes a stage of the shell.
    async fn step(
        &self,
        link: &Link,
        context: &mut RequestContext,
        call: &Call,
        shell: &mut Shell,
        clock: &mut Instant,
    ) -> Result<Verdict, Failure> {
        let entry = &link.entry;
        prepare(entry.plugin.needs(), context, call).await?;
        if entry.plugin.needs() != Needs::Facts {
            // Reading is not the plugin's time.
            *clock = Instant::now();
        }
        let mut hooks = entry.plugin.begin();
        let done = run_hook(entry.timeout, hooks.as_mut(), context).await;
        let outcome = match &done {
            Ok(Verdict::Pass) => "pass",
            Ok(Verdict::Answer(_)) => "answer",
            Ok(Verdict::Reject(_)) => "reject",
            Err(broke) if broke.is_refusal() => "reject",
            Err(_) => "failed",
        };
        let began = std::mem::replace(clock, Instant::now());
        link.seconds.observe((*clock - began).as_secs_f64());
        match outcome {
            "pass" => link.passed.count(),
            _ => {
                let labels = [("plugin", &*entry.id), ("hook", "request"), ("outcome", outcome)];
                self.metrics.count(Metric::PluginCalls, &labels);
            }
        }
        match done {
            Ok(verdict) => {
                // A plugin that ends the request here sees no answer, but learns of the end.
                let sees = if matches!(verdict, Verdict::Pass) { hooks.sees() } else { Sees::End };
                if sees > Sees::Nothing {
                    shell.stages.insert(0, Stage::new(entry.clone(), hooks, sees));
                }
                Ok(verdict)
            }
            Err(broke) => broke.handled(entry, "request", &self.metrics).map(|()| Verdict::Pass),
        }
    }
}

/// Reads as much of the request as a plugin needs.
pub(super) async fn prepare(needs: Needs, context: &mut RequestContext, call: &Call) -> Result<(), Failure> {
    match needs {
        Needs::Facts => Ok(()),
        Needs::Body => make_body(context, call),
        Needs::Request => make_request(context, call).await,
    }
}

/// Runs `on_request` of one plugin up to `limit`.
pub(super) async fn run_hook(
    limit: Duration,
    hooks: &mut dyn Hooks,
    context: &mut RequestContext,
) -> Result<Verdict, Broke> {
    match within(limit, caught(hooks.on_request(context))).await {
        Ok(Ok(Ok(verdict))) => Ok(verdict),
        Ok(Ok(Err(error))) => Err(Broke::Error(error)),
        Ok(Err(panic)) => Err(Broke::Panic(panic)),
        Err(_) => Err(Broke::Timeout),
    }
}

/// Awaits `work` up to `limit`. Work that is ready at once, as most is, sets no timer.
async fn within<F: Future>(limit: Duration, work: F) -> Result<F::Output, Elapsed> {
    let mut work = pin!(work);
    let first = poll_fn(|context| Poll::Ready(work.as_mut().poll(context))).await;
    match first {
        Poll::Ready(done) => Ok(done),
        Poll::Pending => timeout(limit, work).await,
    }
}

pub(super) fn info(principal: &Principal, call: &Call) -> RequestInfo {
    RequestInfo {
        request_id: call.request_id.clone(),
        route: call.ask.label(),
        surface: call.ask.surface,
        stream: call.stream,
        model: call.model.clone(),
        key: principal.key.clone(),
        team: principal.team.clone(),
        user: principal.user.clone(),
        tenant: principal.tenant().to_owned(),
        client: call.client,
        background: call.background,
        partial: call.unresolved.is_some(),
        dry_run: false,
    }
}

pub(super) fn without_credentials(mut headers: HeaderMap) -> HeaderMap {
    headers.remove(header::AUTHORIZATION);
    headers.remove("x-api-key");
    headers.remove("x-goog-api-key");
    headers
}

/// Encodes an edited request as a body of the client's dialect.
pub(super) fn make_body(context: &mut RequestContext, call: &Call) -> Result<(), Failure> {
    if context.has_body() {
        return Ok(());
    }
    if let Some(unresolved) = &call.unresolved {
        // The edited request lacks the turns that only its provider has, and the name of them.
        return Err((**unresolved).clone());
    }
    let request = context.request().map_err(|error| Failure::internal(error.to_string()))?;
    let body = codec_of(call.ask.surface).encode(request, &context.model)?.body;
    context.put_body(body.into());
    Ok(())
}

/// Decodes the client's body, or the body that a plugin put in its place. Turns that only the provider has are not part
/// of the decoded request.
async fn make_request(context: &mut RequestContext, call: &Call) -> Result<(), Failure> {
    if context.has_request() {
        return Ok(());
    }
    let body = context.body().map_err(|error| Failure::internal(error.to_string()))?.clone();
    let unchanged = body.as_ptr() == call.body.as_ptr() && body.len() == call.body.len();
    let decoded = match (&call.unresolved, unchanged) {
        (None, true) => call.decoded().await?,
        _ => call.decode_edit(body).await?,
    };
    context.put_decoded(decoded);
    Ok(())
}

/// Puts the plugins' edits (model, headers, tags, body, decoded request) back into the call.
async fn apply(call: &mut Call, parts: Parts, body_bytes_max: usize) -> Result<(), Failure> {
    let Parts { model, headers, send, tags, body, decoded, request } = parts;
    (call.headers, call.send, call.tags) = (headers, send, tags);
    if model != call.model {
        call.asked_for = Some(std::mem::replace(&mut call.model, model));
    }
    if let Some(body) = body {
        if body.len() > body_bytes_max {
            return Err(Failure::internal("a plugin made the body larger than server.body_bytes_max"));
        }
        call.set_body(body, decoded.clone()).await?;
    }
    let Some(decoded) = decoded else { return Ok(()) };
    let Some(request) = request else {
        call.put_decoded(decoded);
        return Ok(());
    };
    if let Some(unresolved) = &call.unresolved {
        // The stored response that the body refers to is not kept here, so the edited request cannot be encoded.
        return Err((**unresolved).clone());
    }
    if shape(&request) != shape(&decoded.request) {
        return Err(Failure::internal("a plugin changed how many answers are expected"));
    }
    call.mean(Decoded { form: Box::new(FormOf(decoded)), request });
    Ok(())
}

/// Properties that an answer's form depends on: streamed or not, number of choices.
fn shape(request: &Request) -> (bool, usize) {
    let choices = match request {
        Request::Chat(chat) => chat.n as usize,
        Request::Complete(complete) => complete.prompts.len() * complete.best_of.max(complete.n) as usize,
        Request::Embed(embed) => embed.inputs.len(),
        Request::Rerank(rerank) => rerank.documents.len(),
    };
    (request.stream(), choices)
}

/// Form of the answer to the client's request, for a call that asks something else.
struct FormOf(Arc<Decoded>);

impl AnswerForm for FormOf {
    fn choices(&self) -> usize {
        self.0.form.choices()
    }

    fn stream(&self, meta: &AnswerMeta) -> Box<dyn StreamEncoder> {
        self.0.form.stream(meta)
    }

    fn whole(&self, meta: &AnswerMeta) -> Box<dyn WholeCollector> {
        self.0.form.whole(meta)
    }
}
