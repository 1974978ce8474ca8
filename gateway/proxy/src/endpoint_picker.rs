//! The gateway as the chooser of the endpoint picker: a request that another proxy forwards gets the target that its own
//! would get.
//!
//! The proxy has let the client in: neither keys nor limits nor plugins of this gateway see these requests. Each client
//! address is an asker of its own for the breakers, as far as `x-forwarded-for` tells. The access log has a line for each
//! request, as for the gateway's own.

use std::net::IpAddr;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use http::header::CONTENT_ENCODING;
use penstock_auth::Principal;
use penstock_auth::route::Route;
use penstock_base::asker::Asker;
use penstock_base::error::Failure;
use penstock_http::{Body, BodyLease, HttpLimits};
use penstock_picker::{Asked, Chooser, Chosen, Outcome, Refusal};
use penstock_proto::ErrorKind;
use penstock_relay::Wanted;
use penstock_telemetry::{Metric, Record};
use penstock_types::{Bounds, Surface, peek};
use penstock_upstream::Origin;
use penstock_upstream::call::Call;

use crate::gateway::Gateway;
use crate::serving::Serving;

#[async_trait]
impl Chooser for Gateway {
    fn limits(&self) -> Arc<HttpLimits> {
        self.serving().config.http.clone()
    }

    fn lease(&self, client: Option<IpAddr>) -> BodyLease {
        self.bodies.lease_of(Asker::new("", client))
    }

    fn answer_lease(&self) -> BodyLease {
        self.answers.lease()
    }

    fn is_ready(&self) -> bool {
        !self.is_leaving() && self.serving().models().pickable() > 0
    }

    async fn choose(&self, asked: Asked) -> Result<Chosen, Refusal> {
        let serving = self.serving();
        let endpoints_max = serving.config.endpoint_picker.as_ref().map_or(1, |picker| picker.endpoints_max);
        let origin = Origin::default();
        let among = asked.among.clone();
        let wanted = Wanted { origin: &origin, among: among.as_deref(), endpoints_max };
        let route = Route::parse(&asked.method, &asked.target);
        match (route, asked.body) {
            (Ok(Route::Ask(ask) | Route::Count(ask)), Some(body)) => {
                if asked
                    .headers
                    .get(CONTENT_ENCODING)
                    .is_some_and(|coding| !coding.as_bytes().eq_ignore_ascii_case(b"identity"))
                {
                    let message = "Compressed request bodies are not accepted.";
                    return Err(Failure::new(ErrorKind::UnsupportedMedia, message).into());
                }
                let decode = penstock_dialects::decode;
                let mut call = Call::new(ask, body, asked.request_id, asked.headers, decode).await?;
                call.client = asked.client;
                let stream = Some(call.stream);
                let entry = serving.entry(&call.model, &Principal::default());
                let entry = entry.map_err(|failure| Refusal { failure, model: None, stream })?;
                let pick = serving.models().pick(&entry.name, &call, &wanted).await;
                let pick = pick.map_err(|failure| refused(failure, &entry.name, stream))?;
                let renamed = renamed(&call, pick.model());
                Ok(Chosen {
                    surface: Some(call.ask.surface),
                    stream,
                    body: renamed,
                    pick: Box::new(pick),
                    hold: Some(Box::new(call)),
                })
            }
            (_, Some(body)) => other(&serving, body, &wanted),
            (_, None) => {
                let pick = Box::new(serving.models().pick_any(&wanted)?);
                Ok(Chosen { surface: None, stream: None, body: None, pick, hold: None })
            }
        }
    }

    fn count(&self, outcome: Outcome<'_>) {
        let Outcome { model, outcome, reason, took } = outcome;
        self.metrics.count(Metric::Picks, &[("model", model), ("outcome", outcome), ("reason", reason)]);
        self.metrics.observe(Metric::PickSeconds, &[("outcome", outcome)], took.as_secs_f64());
    }

    fn ended(&self, record: &Record<'_>) {
        let model = record.model.as_deref().unwrap_or_default();
        self.metrics.count(Metric::PickEnds, &[("model", model), ("end", record.end)]);
        self.access_log.write(record);
    }

    fn panicked(&self) {
        self.metrics.count(Metric::Panics, &[]);
    }
}

/// Refusal of a request for the entry `model`. A model without `[[models]]` has no entry, and is no label.
fn refused(failure: Failure, model: &str, stream: Option<bool>) -> Refusal {
    let has_entry = failure.kind != ErrorKind::ModelNotFound;
    Refusal { failure, model: has_entry.then(|| model.into()), stream }
}

/// Chooses for an operation that is not read: by the model that a JSON body names, without a prompt.
fn other(serving: &Serving, body: Body, wanted: &Wanted<'_>) -> Result<Chosen, Refusal> {
    let named = peek::peek(&body.bytes, None, &Bounds::default()).ok().and_then(|peek| peek.model);
    let pick = match named {
        Some(model) => {
            let entry = serving.entry(&model, &Principal::default())?;
            let pick = serving.models().pick_unread(&entry.name, wanted);
            pick.map_err(|failure| refused(failure, &entry.name, None))?
        }
        None => serving.models().pick_any(wanted)?,
    };
    Ok(Chosen { surface: None, stream: None, body: None, pick: Box::new(pick), hold: Some(Box::new(body)) })
}

/// Body with the model's name at the endpoint, where that is another.
fn renamed(call: &Call, model: &str) -> Option<Vec<Bytes>> {
    if call.ask.surface == Surface::Generate || call.peek.model.as_deref() == Some(model) {
        return None;
    }
    let at = call.peek.model_at.as_ref()?;
    Some(peek::renamed(&call.body, at, model))
}
