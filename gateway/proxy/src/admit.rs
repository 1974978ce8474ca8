//! What happens to a call between its client and its upstream, for live requests, batches and background responses alike.

use std::sync::Arc;

use crate::auth::Principal;
use crate::call::Call;
use crate::error::Failure;
use crate::relay::models::Entry;
use crate::serving::Serving;
use crate::upstream::{Events, Origin};

/// A call that may be answered, and by whom.
pub(crate) struct Admitted {
    /// The call.
    pub(crate) call: Arc<Call>,
    /// Who answers.
    pub(crate) entry: Entry,
}

/// Finds out whether and by whom a call is answered.
pub(crate) async fn admit(serving: &Serving, principal: &Principal, call: Call) -> Result<Admitted, Failure> {
    let entry = serving.entry(&call.model, principal)?;
    Ok(Admitted { call: Arc::new(call), entry })
}

impl Admitted {
    /// Begins the answer. Whoever needs the body no longer drops the call; its bytes count as request memory until everybody has.
    pub(crate) async fn open(self, origin: Origin) -> Result<Box<dyn Events>, Failure> {
        self.entry.upstream.open(self.call, origin).await
    }
}
