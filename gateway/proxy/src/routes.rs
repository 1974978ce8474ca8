//! Routes that no model answers: models, tokenizing and counting, health, readiness, metrics.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, header};
use penstock_dialects::openai::{self, ModelCard};
use penstock_dialects::{anthropic, gemini, ollama};
use penstock_proto::ErrorKind;
use penstock_types::{Dialect, Request};

use crate::gateway::Gateway;
use crate::handler::{End, decoded, read_body, watched};
use crate::plugins::Asked;
use crate::serving::Serving;
use crate::stored;
use penstock_auth::Principal;
use penstock_auth::route::Route;
use penstock_base::error::Failure;
use penstock_governed::{Plain, Uses};
use penstock_http::Exchange;
use penstock_relay::models::Entry;
use penstock_types::ask::Ask;
use penstock_upstream::Card;
use penstock_upstream::call::Call;

const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// Serves the route if it is one of these; else returns the operation for a model.
pub(crate) async fn serve(
    gateway: &Gateway,
    serving: &Serving,
    exchange: &mut Exchange,
    route: Route,
    principal: &Arc<Principal>,
) -> Result<Option<Ask>, End> {
    match route {
        Route::Ask(ask) => return Ok(Some(ask)),
        Route::Count(ask) => count(gateway, serving, exchange, ask, principal).await?,
        Route::Models => {
            let cards: Vec<_> = serving.cards(principal).iter().map(model_card).collect();
            let list = match exchange.dialect {
                Dialect::Anthropic => anthropic::models_list(&cards),
                Dialect::Gemini => gemini::models_list(&cards),
                Dialect::Ollama => ollama::models_list(&cards),
                Dialect::OpenAi => openai::models_list(&cards),
            };
            json(exchange, list).await?;
        }
        Route::Model(id) => {
            let card = model_card(&serving.upstream(&id, principal)?.card());
            let model = match exchange.dialect {
                Dialect::Anthropic => anthropic::model(&card),
                Dialect::Gemini => gemini::model(&card),
                Dialect::Ollama => ollama::model(&card),
                Dialect::OpenAi => openai::model(&card),
            };
            json(exchange, model).await?;
        }
        Route::Running => {
            let cards: Vec<_> = serving.loaded(principal).iter().map(model_card).collect();
            json(exchange, ollama::running(&cards)).await?;
        }
        Route::Show => show(gateway, serving, exchange, principal).await?,
        Route::Forward(_) | Route::Realtime => return Err(Failure::internal("a route of another place").into()),
        Route::Health => json(exchange, br#"{"status":"ok"}"#.to_vec()).await?,
        Route::Ready => ready(serving, exchange).await?,
        Route::Ping => exchange.respond(200, &[], Bytes::new()).await?,
        Route::Version => json(exchange, concat!(r#"{"version":""#, env!("CARGO_PKG_VERSION"), r#""}"#)).await?,
        Route::Metrics => {
            let text = [(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8"))];
            exchange.respond(200, &text, gateway.render_metrics().into()).await?;
        }
        Route::Status => {
            let (effect, from) = (serving.effect(), exchange.client());
            let status = penstock_governed::status(&gateway.governor, &effect, principal, from).await;
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
        task: card.task,
        parent: card.parent.clone(),
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

/// Facts about the model that the body names.
async fn show(gateway: &Gateway, serving: &Serving, exchange: &mut Exchange, principal: &Principal) -> Result<(), End> {
    let headers = std::mem::take(&mut exchange.head.headers);
    let body = read_body(&gateway.bodies, exchange, &headers).await?;
    let (id, _lease) = decoded(body, ollama::model_asked).await?;
    json(exchange, ollama::model(&model_card(&serving.upstream(&id, principal)?.card()))).await
}

/// Header that marks a count as a guess.
const ESTIMATE: HeaderName = HeaderName::from_static("x-penstock-estimate");

/// Counts input tokens through the upstream; where the upstream cannot count, the answer is a guess and says so in a
/// header.
async fn count(
    gateway: &Gateway,
    serving: &Serving,
    exchange: &mut Exchange,
    ask: Ask,
    principal: &Arc<Principal>,
) -> Result<(), End> {
    let headers = std::mem::take(&mut exchange.head.headers);
    let body = read_body(&gateway.bodies, exchange, &headers).await?;
    let mut call = Call::new(ask, body, exchange.request_id.clone(), headers, penstock_dialects::decode).await?;
    call.client = exchange.client();
    call.signer = gateway.signer(call.ask.surface, principal).await;
    let dialect = call.dialect();
    let mut call = stored::recall_count(gateway, principal, call).await?;
    // Plugins come first: what they take out of a prompt, whoever counts it does not see either.
    let asked = watched(exchange, Box::pin(serving.plugins.ask(principal, &mut call))).await??;
    let Asked { mut shell, answer } = asked;
    let work = async {
        let entry = serving.entry_of(&call, principal)?;
        let plain = plain(exchange, call.ask.label(), dialect);
        let held = penstock_governed::admit_plain(&gateway.governor, &serving.rules, principal, &entry, &plain).await?;
        let fields = held.as_ref().map_or(Vec::new(), |held| held.fields().to_vec());
        // Where a plugin would answer, the upstream is not asked for the count either.
        let counted = watched(exchange, counted(&entry, Arc::new(call), answer.is_none())).await?;
        penstock_governed::close(held, counted.as_ref().err());
        Ok((counted?, fields))
    };
    let ended: Result<_, End> = work.await;
    shell.iter_mut().for_each(|shell| match &ended {
        Ok(_) => shell.counted(),
        Err(End::Failed(failure)) => drop(shell.failed(failure.clone())),
        Err(End::Gone) => {}
    });
    let ((tokens, is_guess), mut fields) = ended?;
    fields.push((header::CONTENT_TYPE, JSON));
    fields.extend(is_guess.then_some((ESTIMATE, HeaderValue::from_static("true"))));
    let body = match dialect {
        Dialect::Gemini => gemini::count_body(tokens),
        // Ollama counts no tokens without an answer.
        Dialect::Ollama => openai::count_body(tokens),
        Dialect::Anthropic => anthropic::count_body(tokens),
        Dialect::OpenAi => openai::count_body(tokens),
    };
    Ok(exchange.respond(200, &fields, body.into()).await?)
}

/// Token count of a prompt, and whether it is a guess.
async fn counted(entry: &Entry, call: Arc<Call>, asks: bool) -> Result<(u64, bool), Failure> {
    if asks && let Some(tokens) = entry.upstream.count(call.clone()).await? {
        return Ok((tokens, false));
    }
    match &call.decoded().await?.request {
        Request::Chat(chat) => Ok((anthropic::estimate(chat), true)),
        _ => Err(Failure::internal("counting what is no conversation")),
    }
}

/// Limits' view of a request that makes no tokens.
fn plain(exchange: &Exchange, route: &'static str, dialect: Dialect) -> Plain<'static> {
    Plain { uses: Uses::Nothing, dialect, from: exchange.client(), route }
}

/// Facts about the client of `/tokenize` or `/detokenize`, for limits and scopes.
struct Asker<'a> {
    gateway: &'a Gateway,
    serving: &'a Serving,
    principal: &'a Principal,
    route: &'static str,
}

impl Asker<'_> {
    /// Sends the tokenizer's reply, counted as one request to its model.
    async fn answer(
        &self,
        exchange: &mut Exchange,
        entry: &Entry,
        reply: impl Future<Output = Result<Vec<u8>, Failure>>,
    ) -> Result<(), End> {
        let plain = plain(exchange, self.route, Dialect::OpenAi);
        let governor = &self.gateway.governor;
        let held = penstock_governed::admit_plain(governor, &self.serving.rules, self.principal, entry, &plain).await?;
        let mut fields = held.as_ref().map_or(Vec::new(), |held| held.fields().to_vec());
        fields.push((header::CONTENT_TYPE, JSON));
        let reply = watched(exchange, reply).await?;
        penstock_governed::close(held, reply.as_ref().err());
        Ok(exchange.respond(200, &fields, reply?.into()).await?)
    }
}

async fn tokenize(
    gateway: &Gateway,
    serving: &Serving,
    exchange: &mut Exchange,
    principal: &Principal,
) -> Result<(), End> {
    let headers = std::mem::take(&mut exchange.head.headers);
    let body = read_body(&gateway.bodies, exchange, &headers).await?;
    let (request, _lease) = decoded(body, openai::decode_tokenize).await?;
    let entry = serving.entry_or_only(request.model.as_deref(), principal)?;
    let asked = Asker { gateway, serving, principal, route: "/tokenize" };
    asked.answer(exchange, &entry, entry.upstream.tokenize(request)).await
}

async fn detokenize(
    gateway: &Gateway,
    serving: &Serving,
    exchange: &mut Exchange,
    principal: &Principal,
) -> Result<(), End> {
    let headers = std::mem::take(&mut exchange.head.headers);
    let body = read_body(&gateway.bodies, exchange, &headers).await?;
    let (request, _lease) = decoded(body, openai::decode_detokenize).await?;
    let entry = serving.entry_or_only(request.model.as_deref(), principal)?;
    let asked = Asker { gateway, serving, principal, route: "/detokenize" };
    asked.answer(exchange, &entry, entry.upstream.detokenize(request)).await
}
