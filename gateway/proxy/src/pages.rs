//! The routes that no model answers: models, tokenizing and counting, health, readiness, metrics.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, header};
use penstock_dialects::openai::{self, ModelCard};
use penstock_dialects::{Dialect, Request, anthropic, gemini};
use penstock_proto::ErrorKind;

use crate::auth::Principal;
use crate::call::{Ask, Call};
use crate::error::Failure;
use crate::gateway::Gateway;
use crate::governed;
use crate::http::Exchange;
use crate::phases::{End, decoded, read_body, watched};
use crate::route::Route;
use crate::serving::Serving;
use crate::stored;
use crate::upstream::Card;

const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// Serves the route if it is one of these; else returns what a model is to answer.
pub(crate) async fn serve(
    gateway: &Gateway,
    serving: &Serving,
    exchange: &mut Exchange,
    route: Route,
    principal: &Principal,
) -> Result<Option<Ask>, End> {
    match route {
        Route::Ask(ask) => return Ok(Some(ask)),
        Route::Count(ask) => count(gateway, serving, exchange, ask, principal).await?,
        Route::Models => {
            let cards: Vec<_> = serving.cards(principal).iter().map(model_card).collect();
            let list = match exchange.dialect {
                Dialect::Anthropic => anthropic::models_list(&cards),
                Dialect::Gemini => gemini::models_list(&cards),
                Dialect::OpenAi => openai::models_list(&cards),
            };
            json(exchange, list).await?;
        }
        Route::Model(id) => {
            let card = model_card(&serving.upstream(&id, principal)?.card());
            let model = match exchange.dialect {
                Dialect::Anthropic => anthropic::model(&card),
                Dialect::Gemini => gemini::model(&card),
                Dialect::OpenAi => openai::model(&card),
            };
            json(exchange, model).await?;
        }
        Route::Forward(_) | Route::Realtime => return Err(Failure::internal("a route of another place").into()),
        Route::Health => json(exchange, br#"{"status":"ok"}"#.to_vec()).await?,
        Route::Ready => ready(serving, exchange).await?,
        Route::Metrics => {
            let text = [(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8"))];
            exchange.respond(200, &text, gateway.render_metrics().into()).await?;
        }
        Route::Status => {
            let status = governed::status(&gateway.governor, serving, principal, exchange.client());
            json(exchange, status.to_string()).await?;
        }
        Route::Stored(route) => Box::pin(stored::serve(gateway, exchange, route, principal)).await?,
        Route::Tokenize => tokenize(gateway, serving, exchange, principal).await?,
        Route::Detokenize => detokenize(gateway, serving, exchange, principal).await?,
    }
    Ok(None)
}

fn model_card(card: &Card) -> ModelCard {
    ModelCard {
        id: card.id.clone(),
        created: card.created,
        owned_by: "penstock".into(),
        context_tokens: Some(u64::from(card.context_tokens)).filter(|tokens| *tokens > 0),
    }
}

async fn json(exchange: &mut Exchange, body: impl Into<Bytes>) -> Result<(), End> {
    Ok(exchange.respond(200, &[(header::CONTENT_TYPE, JSON)], body.into()).await?)
}

async fn ready(serving: &Serving, exchange: &mut Exchange) -> Result<(), End> {
    let unready = serving.unready();
    if unready.is_empty() {
        return json(exchange, br#"{"status":"ready"}"#.to_vec()).await;
    }
    let failure = Failure::new(ErrorKind::Unavailable, format!("Not ready. {}", unready.join("; ")));
    Err(failure.retry_after(std::time::Duration::from_secs(1)).into())
}

/// Says that a count was guessed.
const ESTIMATE: HeaderName = HeaderName::from_static("x-penstock-estimate");

/// Counts through the upstream; where that cannot count, the answer is a guess and says so.
async fn count(
    gateway: &Gateway,
    serving: &Serving,
    exchange: &mut Exchange,
    ask: Ask,
    principal: &Principal,
) -> Result<(), End> {
    let headers = std::mem::take(&mut exchange.head.headers);
    let body = read_body(gateway, exchange, &headers).await?;
    let call = Arc::new(Call::new(ask, body, exchange.request_id.clone(), headers).await?);
    let upstream = serving.upstream(&call.model, principal)?;
    let body = |tokens| match call.dialect() {
        Dialect::Gemini => gemini::count_body(tokens),
        Dialect::Anthropic | Dialect::OpenAi => anthropic::count_body(tokens),
    };
    if let Some(tokens) = watched(exchange, upstream.count(call.clone())).await?? {
        return json(exchange, body(tokens)).await;
    }
    let tokens = match &call.decoded().await?.request {
        Request::Chat(chat) => anthropic::estimate(chat),
        _ => return Err(Failure::internal("counting what is no conversation").into()),
    };
    let headers = [(header::CONTENT_TYPE, JSON), (ESTIMATE, HeaderValue::from_static("true"))];
    Ok(exchange.respond(200, &headers, body(tokens).into()).await?)
}

async fn tokenize(
    gateway: &Gateway,
    serving: &Serving,
    exchange: &mut Exchange,
    principal: &Principal,
) -> Result<(), End> {
    let headers = std::mem::take(&mut exchange.head.headers);
    let body = read_body(gateway, exchange, &headers).await?;
    let (request, _lease) = decoded(body, openai::decode_tokenize).await?;
    let upstream = serving.upstream_or_only(request.model.as_deref(), principal)?;
    let reply = watched(exchange, upstream.tokenize(request)).await??;
    json(exchange, reply).await
}

async fn detokenize(
    gateway: &Gateway,
    serving: &Serving,
    exchange: &mut Exchange,
    principal: &Principal,
) -> Result<(), End> {
    let headers = std::mem::take(&mut exchange.head.headers);
    let body = read_body(gateway, exchange, &headers).await?;
    let (request, _lease) = decoded(body, openai::decode_detokenize).await?;
    let upstream = serving.upstream_or_only(request.model.as_deref(), principal)?;
    let reply = watched(exchange, upstream.detokenize(request)).await??;
    json(exchange, reply).await
}
