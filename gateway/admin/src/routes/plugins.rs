//! Plugins of the config, in the order in which requests pass them, and what they do to a request that is tried.

use std::collections::BTreeMap;

use axum::extract::State;
use axum::{Extension, Json};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use penstock_config::{OnFail, PluginConfig};
use penstock_proxy::Failure;
use penstock_proxy::dry_run::{self, End, Outcome, Report, Step, Tried};
use penstock_telemetry::Metric;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::playground::refused;
use crate::compare::{Edit, TriedRequest, changes, shown};
use crate::error::{ApiError, Code, ErrorBody};
use crate::extract::{Body, Page};
use crate::gate::Presence;
use crate::state::Admin;

/// Largest body of a request that is tried, in bytes.
const BODY_BYTES_MAX: usize = 256 << 10;
/// Most header fields of a request that is tried, and most bytes of all of them.
const HEADERS_MAX: (usize, usize) = (64, 16 << 10);
/// Longest path of a request that is tried, and longest id of its key, in characters.
const CHARS_MAX: (usize, usize) = (2048, 512);
/// Most bytes of a refusal's body that are shown.
const REFUSAL_BYTES_MAX: usize = 8 << 10;

/// A configured plugin, as the admin API returns it.
#[derive(Serialize, ToSchema)]
pub(crate) struct Plugin {
    /// Name in logs and metrics.
    id: String,
    /// Name of the plugin.
    name: String,
    /// Routes that the plugin handles, as names or prefixes that end in *; empty: all. So for the lists below.
    routes: Vec<String>,
    models: Vec<String>,
    keys: Vec<String>,
    teams: Vec<String>,
    /// Behaviour when the plugin fails: open (the request goes on without the plugin) or closed (the request is refused).
    on_fail: &'static str,
    /// Longest time of one hook.
    timeout_ms: u64,
}

impl From<&PluginConfig> for Plugin {
    fn from(config: &PluginConfig) -> Self {
        Self {
            id: config.id.to_string(),
            name: config.name.clone(),
            routes: config.routes.clone(),
            models: config.models.clone(),
            keys: config.keys.clone(),
            teams: config.teams.clone(),
            on_fail: match config.on_fail {
                OnFail::Open => "open",
                OnFail::Closed => "closed",
            },
            timeout_ms: config.timeout.as_millis() as u64,
        }
    }
}

/// Plugins, in the order of the config.
#[utoipa::path(get, path = "/admin/v1/plugins", tag = "plugins", operation_id = "list_plugins",
    responses((status = 200, description = "Plugins.", body = Page<Plugin>)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn list(State(admin): State<Admin>) -> Json<Page<Plugin>> {
    let serving = admin.gateway.serving();
    Json(Page { data: serving.config.plugins.iter().map(Plugin::from).collect(), next: None })
}

/// Request to try.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Trial {
    /// Path and query of a model operation as on the data port, such as /v1/chat/completions.
    #[schema(max_length = 2048)]
    path: String,
    /// Header fields, at most 64. Credentials among them are dropped.
    #[serde(default)]
    headers: BTreeMap<String, String>,
    /// Body, a JSON object of at most 256 KiB.
    #[schema(value_type = Object)]
    body: Box<RawValue>,
    /// Id of the API key that the request comes with, or console:ID for a person at the console. Default: no key.
    #[schema(max_length = 512)]
    key: Option<String>,
}

impl Trial {
    /// Request in the form of the data path, within its bounds.
    fn bounded(self) -> Result<Tried, ApiError> {
        let Self { path, headers: fields, body, key } = self;
        if path.chars().count() > CHARS_MAX.0 {
            return Err(ApiError::invalid("path", format!("path: at most {} characters", CHARS_MAX.0)));
        }
        if key.as_ref().is_some_and(|key| key.chars().count() > CHARS_MAX.1) {
            return Err(ApiError::invalid("key", format!("key: at most {} characters", CHARS_MAX.1)));
        }
        let bytes: usize = fields.iter().map(|(name, value)| name.len() + value.len()).sum();
        if fields.len() > HEADERS_MAX.0 || bytes > HEADERS_MAX.1 {
            let message = format!("headers: at most {} fields of {} bytes together", HEADERS_MAX.0, HEADERS_MAX.1);
            return Err(ApiError::invalid("headers", message));
        }
        let mut headers = HeaderMap::new();
        for (name, value) in &fields {
            let field = HeaderName::from_bytes(name.as_bytes()).ok().zip(HeaderValue::from_str(value).ok());
            let (name, value) = field.ok_or_else(|| ApiError::invalid("headers", "headers: not a valid field"))?;
            headers.append(name, value);
        }
        let body = body.get();
        if body.len() > BODY_BYTES_MAX {
            let message = format!("The body of a request that is tried may have {BODY_BYTES_MAX} bytes.");
            return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, Code::TooLarge, message));
        }
        Ok(Tried { target: path, headers, body: Bytes::copy_from_slice(body.as_bytes()), key })
    }
}

/// Outcome of one plugin.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum StepOutcome {
    /// The plugin ran and changed nothing.
    Passed,
    /// The plugin ran and edited the request.
    Changed,
    /// The plugin answered the request itself, so that no model would be called; the answer is not shown.
    Answered,
    /// The plugin refused the request.
    Refused,
    /// The plugin failed.
    Failed,
    /// The plugin was not run: it would call a model or a service, or keeps state of its own.
    NotRun,
    /// The plugin's entry is not for this request: its models, keys or the like do not cover it.
    Skipped,
    /// An earlier plugin ended the request.
    NotReached,
}

/// Error that the client would get.
#[derive(Serialize, ToSchema)]
struct Refusal {
    status: u16,
    /// Body in the client's API.
    body: String,
}

impl Refusal {
    fn new(failure: &Failure, report: &Report) -> Self {
        let body = failure.body(report.info.dialect(), &report.info.request_id);
        let body = String::from_utf8_lossy(&body[..body.len().min(REFUSAL_BYTES_MAX)]).into_owned();
        Self { status: failure.status(), body }
    }
}

/// Outcome of one plugin in a dry run, with the plugin's edits of the request.
#[derive(Serialize, ToSchema)]
pub(crate) struct TrialStep {
    /// Id of the plugin's entry.
    plugin: String,
    /// Name of the plugin.
    name: String,
    outcome: StepOutcome,
    /// Reason, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    why: Option<String>,
    /// Time that the plugin took.
    seconds: f64,
    /// Delay that the plugin would have added to the request; the dry run did not wait.
    waits_seconds: f64,
    /// True if the plugin would read the model's answer.
    sees_answer: bool,
    /// Edits of the request.
    changes: Vec<Edit>,
    /// Number of edits beyond the 200 that are shown.
    changes_left_out: usize,
    /// Error that the client would get from the plugin.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    refusal: Option<Refusal>,
}

/// Outcome of the whole dry run.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum TrialEnd {
    /// The request would go on to its model, where limits apply.
    Passed,
    /// A plugin would answer the request.
    Answered,
    /// The client would get an error.
    Refused,
}

/// Result of a dry run: outcome of every plugin, and the request after them.
#[derive(Serialize, ToSchema)]
pub(crate) struct TrialResult {
    /// Route of the request, as plugins and scopes name it.
    route: String,
    /// Model that the client asks for.
    model: String,
    stream: bool,
    key: Option<String>,
    team: Option<String>,
    user: Option<String>,
    /// Every plugin of the config, in its order.
    steps: Vec<TrialStep>,
    end: TrialEnd,
    /// Error that the client would get.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    refusal: Option<Refusal>,
    /// Request behind the plugins that ran.
    request: TriedRequest,
}

impl From<&Report> for TrialResult {
    fn from(report: &Report) -> Self {
        let mut last = &report.before;
        let steps = report.steps.iter().map(|step| {
            let (changes, changes_left_out) = step.after.as_ref().map(|after| changes(last, after)).unwrap_or_default();
            last = step.after.as_ref().unwrap_or(last);
            TrialStep { changes, changes_left_out, ..told(step, report) }
        });
        let steps = steps.map(|step| TrialStep {
            outcome: match step.outcome {
                StepOutcome::Passed if !step.changes.is_empty() => StepOutcome::Changed,
                outcome => outcome,
            },
            ..step
        });
        let info = &report.info;
        let (end, failure) = match &report.end {
            End::Goes => (TrialEnd::Passed, None),
            End::Answered => (TrialEnd::Answered, None),
            End::Refused(failure) => (TrialEnd::Refused, Some(failure)),
        };
        Self {
            route: info.route.to_owned(),
            model: info.model.clone(),
            stream: info.stream,
            key: info.key.clone(),
            team: info.team.clone(),
            user: info.user.clone(),
            steps: steps.collect(),
            end,
            refusal: failure.map(|failure| Refusal::new(failure, report)),
            request: shown(&report.after, &report.before),
        }
    }
}

fn told(step: &Step, report: &Report) -> TrialStep {
    let (outcome, why, refusal) = match &step.outcome {
        Outcome::Skipped => (StepOutcome::Skipped, None, None),
        Outcome::NotReached => (StepOutcome::NotReached, None, None),
        Outcome::NotRun(why) => (StepOutcome::NotRun, Some(why.clone()), None),
        Outcome::Passed => (StepOutcome::Passed, None, None),
        Outcome::Answered => (StepOutcome::Answered, None, None),
        Outcome::Refused(failure) => (StepOutcome::Refused, None, Some(Refusal::new(failure, report))),
        Outcome::Failed { reason, detail, goes_on } => {
            let end = if *goes_on { "the request goes on without the plugin" } else { "the request ends" };
            (StepOutcome::Failed, Some(format!("{reason}: {detail}; {end}")), None)
        }
    };
    TrialStep {
        plugin: step.id.clone(),
        name: step.name.clone(),
        outcome,
        why,
        seconds: step.took.as_secs_f64(),
        waits_seconds: step.waits.as_secs_f64(),
        sees_answer: step.sees_answer,
        changes: Vec::new(),
        changes_left_out: 0,
        refusal,
    }
}

/// Dry run of a request: runs the request side of its plugins and returns the edits of each. Nothing is sent, stored, counted or logged.
#[utoipa::path(post, path = "/admin/v1/plugins/dry-run", tag = "plugins", operation_id = "try_plugins",
    request_body = Trial,
    responses((status = 200, description = "Outcome of each plugin, and the request after the last one that ran.", body = TrialResult),
        (status = 429, description = "Too many dry runs are in progress; Retry-After says when to try again.", body = ErrorBody),
        (status = 503, description = "The dry run did not end in time.", body = ErrorBody)), security(("admin_key" = ["operator"])))]
pub(crate) async fn dry_run(
    State(admin): State<Admin>,
    Extension(presence): Extension<Presence>,
    Body(trial): Body<Trial>,
) -> Result<Json<TrialResult>, ApiError> {
    let tried = trial.bounded()?;
    let (gateway, store) = (admin.gateway.clone(), admin.store.clone());
    let work = move || async move {
        dry_run::run(&gateway, store.as_ref(), tried).await.map(|report| TrialResult::from(&report))
    };
    let (outcome, result) = tokio::select! {
        biased;
        result = admin.dry_runs.run(work) => match result {
            Err(error) if error.status == StatusCode::TOO_MANY_REQUESTS => ("refused", Err(error)),
            Err(error) => ("failed", Err(error)),
            Ok(done) => ("done", Ok(done)),
        },
        () = presence.left() => ("left", Err(ApiError::unavailable("The client left before the end of the dry run."))),
    };
    admin.gateway.metrics.count(Metric::DryRuns, &[("outcome", outcome)]);
    result?.map(Json).map_err(|failure| refused(&failure))
}
