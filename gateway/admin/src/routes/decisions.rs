//! Decisions of a pool's router: the worker that each request got, and why.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use penstock_pool::{Decision as Made, Pool};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::error::ApiError;
use crate::extract::{Body, Id, Params};
use crate::state::Admin;

/// Decisions in one answer: the default and the most.
const COUNT: (usize, usize) = (32, 256);
/// Most tokens of a prompt to explain.
const TOKENS_MAX: usize = 65_536;
/// Most characters of a key's id.
const KEY_CHARS_MAX: usize = 512;
/// Most characters of a text to explain.
const TEXT_CHARS_MAX: usize = 262_144;

/// Decision of a pool's router.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Decision {
    /// Number of the request in the pool; 0 for a decision that was only asked about.
    request: u64,
    /// Age of the decision.
    age_seconds: f64,
    /// Time that the request had waited.
    waited_seconds: f64,
    prompt_tokens: u32,
    /// Routing policy: `pools.policy`.
    policy: String,
    /// Reason in one word: `only`, `cached`, `cheaper`, `policy`.
    why: String,
    /// Chosen worker; none where no worker suits.
    worker: Option<String>,
    /// Candidates, cheapest first.
    candidates: Vec<Candidate>,
}

/// Predicted cost of one worker.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Candidate {
    worker: String,
    /// Whether the worker would start the request at its next step.
    free: bool,
    /// Sequences that the worker has.
    sequences: u32,
    /// Price in seconds; the lowest is chosen.
    cost_seconds: f64,
    /// The price by its reasons: queue, own, later, harm, decode, pressure, overdue.
    parts_seconds: BTreeMap<String, f64>,
    /// Prompt tokens by where the worker has them: device, promised, host, disk, remote; and the number to load rather than compute.
    found_tokens: BTreeMap<String, u32>,
    /// Worker that would send missing blocks.
    pull_from: Option<String>,
    /// Predicted time to the first token (TTFT).
    ttft_seconds: f64,
    /// Predicted time between tokens.
    tpot_seconds: f64,
}

impl From<&Made> for Decision {
    fn from(made: &Made) -> Self {
        let offer = |offer: &penstock_pool::Offer| {
            let (all, found) = (&offer.candidate, &offer.candidate.found);
            let parts = &all.parts;
            let seconds = [
                ("queue", parts.queue),
                ("own", parts.own),
                ("later", parts.later),
                ("harm", parts.harm),
                ("decode", parts.decode),
                ("pressure", parts.pressure),
                ("overdue", all.overdue),
            ];
            let tokens = [
                ("device", found.device),
                ("promised", found.promised),
                ("host", found.host),
                ("disk", found.disk),
                ("remote", found.remote),
                ("loaded", found.loaded),
            ];
            Candidate {
                worker: offer.worker.to_string(),
                free: all.free,
                sequences: all.sequences,
                cost_seconds: all.cost(),
                parts_seconds: seconds.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
                found_tokens: tokens.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
                pull_from: offer.pull_from.as_deref().map(str::to_owned),
                ttft_seconds: all.ttft,
                tpot_seconds: all.tpot,
            }
        };
        let mut candidates: Vec<Candidate> = made.offers.iter().map(offer).collect();
        candidates.sort_by(|a, b| a.cost_seconds.total_cmp(&b.cost_seconds));
        Self {
            request: made.request.0,
            age_seconds: made.age.as_secs_f64(),
            waited_seconds: made.waited.as_secs_f64(),
            prompt_tokens: made.tokens,
            policy: made.policy.to_owned(),
            why: made.why.to_owned(),
            worker: made.worker.as_deref().map(str::to_owned),
            candidates,
        }
    }
}

/// Number of decisions.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Count {
    /// Number of decisions, the last ones. Default: 32.
    #[param(minimum = 1, maximum = 256)]
    limit: Option<usize>,
}

/// Last decisions of a pool's router.
#[derive(Serialize, ToSchema)]
pub(crate) struct Decisions {
    /// Decisions, newest first.
    data: Vec<Decision>,
}

/// Prompt to explain: a text, or its tokens.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Question {
    /// Prompt as text, tokenized as a completion's prompt.
    #[schema(max_length = 262144)]
    prompt: Option<String>,
    /// Prompt as token ids, as /tokenize returns them.
    #[schema(min_items = 1, max_items = 65536)]
    tokens: Option<Vec<u32>>,
    /// Name of an adapter of the pool's model that the prompt is for. Default: the model alone.
    #[schema(max_length = 512)]
    adapter: Option<String>,
    /// Id of the API key whose prefix cache counts. Default: that of requests without a key.
    #[schema(max_length = 512)]
    key: Option<String>,
}

fn pool(admin: &Admin, id: &str) -> Result<Pool, ApiError> {
    let found = admin.fleet.pools().into_iter().find(|(pool, _)| pool == id);
    found.map(|(_, pool)| pool).ok_or_else(|| ApiError::not_found("There is no pool of that name."))
}

/// Last decisions of a pool's router, newest first: all candidates, their prices in seconds by reasons, and the chosen worker.
#[utoipa::path(get, path = "/admin/v1/pools/{id}/decisions", tag = "workers", operation_id = "list_decisions",
    params(("id" = String, Path, max_length = 512, description = "Id of the pool; a slash in it is sent as %2F."), Count),
    responses((status = 200, description = "Decisions.", body = Decisions)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn list(
    State(admin): State<Admin>,
    Id(id): Id,
    Params(count): Params<Count>,
) -> Result<Json<Decisions>, ApiError> {
    let count = count.limit.unwrap_or(COUNT.0);
    if !(1..=COUNT.1).contains(&count) {
        return Err(ApiError::invalid("limit", format!("limit: must be from 1 to {}", COUNT.1)));
    }
    let made = pool(&admin, &id)?.decisions(count).await.map_err(|error| ApiError::conflict(error.to_string()))?;
    Ok(Json(Decisions { data: made.iter().map(Decision::from).collect() }))
}

/// Explains which worker would get a prompt now. Nothing is sent.
#[utoipa::path(post, path = "/admin/v1/pools/{id}/explain", tag = "workers", operation_id = "explain_choice",
    params(("id" = String, Path, max_length = 512, description = "Id of the pool; a slash in it is sent as %2F.")),
    request_body = Question,
    responses((status = 200, description = "The decision that would be made now.", body = Decision)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn explain(
    State(admin): State<Admin>,
    Id(id): Id,
    Body(question): Body<Question>,
) -> Result<Json<Decision>, ApiError> {
    let pool = pool(&admin, &id)?;
    if question.key.as_ref().is_some_and(|key| key.chars().count() > KEY_CHARS_MAX) {
        return Err(ApiError::invalid("key", format!("key: at most {KEY_CHARS_MAX} characters")));
    }
    let tokens = match (question.prompt, question.tokens) {
        (Some(text), None) if text.chars().count() <= TEXT_CHARS_MAX => {
            let tokens = admin.fleet.tokens(&id, text).await;
            let tokens = tokens.map_err(|failure| ApiError::conflict(failure.message))?;
            tokens.ok_or_else(|| ApiError::not_found("There is no pool of that name."))?
        }
        (None, Some(tokens)) if (1..=TOKENS_MAX).contains(&tokens.len()) => tokens,
        (Some(_), None) => return Err(ApiError::invalid("prompt", format!("at most {TEXT_CHARS_MAX} characters"))),
        (None, Some(_)) => return Err(ApiError::invalid("tokens", format!("must have 1 to {TOKENS_MAX} entries"))),
        _ => return Err(ApiError::invalid("prompt", "give either prompt or tokens")),
    };
    let (model, adapter) = match question.adapter {
        None => (id, None),
        Some(name) => {
            let id = pool.adapter(&name);
            (name, Some(id.ok_or_else(|| ApiError::not_found("No worker of the pool has an adapter of that name."))?))
        }
    };
    let salt = penstock_generate::prefix_salt(question.key.as_deref().unwrap_or_default(), &model, adapter);
    let made = pool.explain(tokens.into(), Arc::from(salt), adapter).await;
    made.map(|made| Json(Decision::from(&made))).map_err(|error| ApiError::conflict(error.to_string()))
}
