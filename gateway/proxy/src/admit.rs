//! Admission of a call between its client and its upstream: plugins' `on_request`, the target, and the reservation
//! against the limits. Live requests, batches and background responses all come through here.

use std::sync::Arc;

use penstock_plugins::Answer;

use crate::gateway::Gateway;
use crate::plugins::{Asked, Shell};
use crate::serving::Serving;
use penstock_auth::Principal;
use penstock_base::error::Failure;
use penstock_governed::Reservation;
use penstock_relay::models::Entry;
use penstock_types::ApiError;
use penstock_upstream::call::Call;
use penstock_upstream::{Events, Open, Origin};

/// A call that was admitted: what is asked, the target that answers it, the plugins around the answer, and its
/// reservation.
pub(crate) struct Admitted {
    /// Request, with the edits of plugins in it.
    pub(crate) call: Arc<Call>,
    /// Model's entry with the upstream that answers the call, its price and its billing.
    pub(crate) entry: Entry,
    /// Plugins that see the answer, in a shell around it; `None`: no plugin does.
    shell: Option<Shell>,
    /// Answer that a plugin gave in place of a model's; `None`: the upstream is asked.
    answer: Option<Answer>,
    /// Amounts reserved from the limits; `None` where no limit counts the call.
    reservation: Option<Reservation>,
    /// Start of the call, where the upstream has measured it.
    opener: Option<Box<dyn Open>>,
}

/// Runs the plugins' `on_request`, finds the target of the call, and reserves its estimated use from the limits.
pub(crate) async fn admit(
    gateway: &Gateway,
    serving: &Serving,
    principal: &Arc<Principal>,
    mut call: Call,
) -> Result<Admitted, Failure> {
    let Asked { mut shell, answer } = serving.plugins.ask(principal, &mut call).await?;
    at_once(&call).map_err(|failure| told(&mut shell, failure))?;
    let entry = serving.entry_of(&call, principal).map_err(|failure| told(&mut shell, failure))?;
    let free = answer.is_some();
    let reserved =
        penstock_governed::admit(&gateway.governor, &serving.rules, principal, &mut call, &entry, free).await;
    let (reservation, opener) = reserved.map_err(|failure| told(&mut shell, failure))?;
    Ok(Admitted { call: Arc::new(call), entry, shell, answer, reservation, opener })
}

/// Checks that the answer is wanted at once. A provider that is sent a body with another wish answers with an id, under
/// which nobody can fetch what it then makes and bills; a response in the background that is kept here is the
/// gateway's own request.
fn at_once(call: &Call) -> Result<(), Failure> {
    match call.peek.later.filter(|_| !call.own) {
        None => Ok(()),
        Some(field) => {
            let message = format!("{field}: an answer cannot be fetched later here; leave the field out");
            Err(ApiError::unsupported_value(field, message).into())
        }
    }
}

/// Tells the plugins of a failure before the answer, and returns the failure for the client.
fn told(shell: &mut Option<Shell>, failure: Failure) -> Failure {
    match shell {
        Some(shell) => shell.failed(failure),
        None => failure,
    }
}

impl Admitted {
    /// Starts the answer. A holder drops the call when it no longer needs the body; the body's bytes count as request
    /// memory until the last holder has dropped it.
    pub(crate) async fn open(self, origin: Origin) -> Result<Box<dyn Events>, Failure> {
        let Self { call, entry, mut shell, answer, reservation, opener } = self;
        let hold = origin.memory.hold();
        if let Some(answer) = answer {
            reservation.into_iter().for_each(Reservation::free);
            return Shell::around_answer(shell, &call, answer, hold);
        }
        let Some(shell) = &mut shell else {
            return penstock_governed::open(&entry, call, origin, reservation, opener).await;
        };
        let opened = penstock_governed::open(&entry, call.clone(), origin, reservation, opener).await;
        let events = opened.map_err(|failure| shell.failed(failure))?;
        shell.take().around(&call, events, hold)
    }
}
