//! What happens to a call between its client and its upstream, for live requests, batches and background responses alike.

use std::sync::Arc;

use penstock_plugins::Answer;

use crate::auth::Principal;
use crate::call::Call;
use crate::error::Failure;
use crate::gateway::Gateway;
use crate::governed::{self, Governed, Reservation};
use crate::plugins::{Asked, Shell};
use crate::relay::models::Entry;
use crate::serving::Serving;
use crate::upstream::{Events, Origin};

/// A call that may be answered, and by whom.
pub(crate) struct Admitted {
    /// The call.
    pub(crate) call: Arc<Call>,
    /// Who answers.
    pub(crate) entry: Entry,
    /// The plugins around the answer.
    shell: Option<Shell>,
    /// The answer, where a plugin gave it.
    answer: Option<Answer>,
    /// What it holds of its limits.
    reservation: Option<Reservation>,
}

/// Finds out whether and by whom a call is answered, and reserves what it will use.
pub(crate) async fn admit(
    gateway: &Gateway,
    serving: &Serving,
    principal: &Arc<Principal>,
    mut call: Call,
) -> Result<Admitted, Failure> {
    let Asked { mut shell, answer } = serving.plugins.ask(principal, &mut call).await?;
    let entry = serving.entry_of(&call, principal).map_err(|failure| told(&mut shell, failure))?;
    let free = answer.is_some();
    let reserved = governed::admit(&gateway.governor, serving, principal, &mut call, &entry, free).await;
    let reservation = reserved.map_err(|failure| told(&mut shell, failure))?;
    Ok(Admitted { call: Arc::new(call), entry, shell, answer, reservation })
}

/// A failure, of which the plugins learn.
fn told(shell: &mut Option<Shell>, failure: Failure) -> Failure {
    match shell {
        Some(shell) => shell.failed(failure),
        None => failure,
    }
}

impl Admitted {
    /// Begins the answer. Whoever needs the body no longer drops the call; its bytes count as request memory until everybody has.
    pub(crate) async fn open(self, origin: Origin) -> Result<Box<dyn Events>, Failure> {
        let Self { call, entry, mut shell, answer, reservation } = self;
        if let Some(answer) = answer {
            reservation.into_iter().for_each(Reservation::free);
            return Shell::around_answer(shell, &call, answer);
        }
        let Some(shell) = &mut shell else { return opened(&entry, call, origin, reservation).await };
        let opened = opened(&entry, call.clone(), origin, reservation).await;
        let events = opened.map_err(|failure| shell.failed(failure))?;
        shell.take().around(&call, events)
    }
}

/// Asks the upstream. What is reserved travels with its events.
pub(crate) async fn opened(
    entry: &Entry,
    call: Arc<Call>,
    origin: Origin,
    mut reservation: Option<Reservation>,
) -> Result<Box<dyn Events>, Failure> {
    reservation.iter_mut().for_each(|reservation| reservation.goes(&origin.sent));
    let opened = entry.upstream.open(call, origin).await;
    match (opened, reservation) {
        (Ok(events), Some(reservation)) => Ok(Box::new(Governed::new(events, reservation))),
        (Err(failure), Some(reservation)) => {
            reservation.refused(&failure);
            Err(failure)
        }
        (opened, None) => opened,
    }
}
