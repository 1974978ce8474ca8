//! Who asks, and whether it may: the one door of the data listener.
//!
//! A route can only be served with a [`Principal`], and only [`Guard::admit`] makes one from a request. In order: the credential is
//! found (exactly one, [`credential`]), looked up by its digest in memory ([`key`]), and what it stands for is held against the route,
//! dialect, address and time of this request at one place ([`Principal`]). Whatever is not known is refused; an address that guesses
//! is slowed down ([`throttle`]).
//!
//! What a config says is [`Identity`], swapped with the config; what lives as long as the process is [`Guard`].

mod credential;
mod identity;
mod key;
mod principal;
mod throttle;

use std::net::IpAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock};
use std::time::Instant;

use penstock_dialects::{Dialect, Surface};
use penstock_proto::ErrorKind;

pub use identity::{Anonymous, AuthConfig, Identity};
pub use key::{Digest, Key, Proof, Team};
pub use principal::Principal;

use credential::Given;
use identity::Known;
use principal::Use;
use throttle::Throttle;

use crate::call::Ask;
use crate::clock;
use crate::error::Failure;
use crate::http::Exchange;
use crate::route::{AuthClass, Route};
use crate::telemetry::{Metric, Metrics};

/// Whoever uses a route that anybody may use, or a gateway that needs no credentials.
static NOBODY: LazyLock<Arc<Principal>> = LazyLock::new(Arc::default);

/// What authentication keeps for as long as the process lives.
#[derive(Debug)]
pub struct Guard {
    throttle: Throttle,
    metrics: Arc<Metrics>,
}

impl Guard {
    /// Counts in `metrics`.
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self { throttle: Throttle::default(), metrics }
    }

    /// Lets a request in as whom its credential says, or not at all. The client's address, as trusted proxies say it, is noted in the
    /// exchange.
    ///
    /// # Errors
    /// 401 without a good credential, 403 outside of its scope, 429 where somebody guesses.
    pub(crate) async fn admit(
        &self,
        identity: &Identity,
        route: &Route,
        exchange: &mut Exchange,
    ) -> Result<Arc<Principal>, Failure> {
        let head = &exchange.head;
        let address = credential::client(exchange.peer(), &head.headers, &identity.config.trusted_proxies);
        let class = route.auth_class();
        let asked = Use {
            route: route.label(),
            class,
            dialect: exchange.dialect,
            address,
            is_live: true,
            now: clock::unix_seconds(),
        };
        let principal = match class {
            AuthClass::Open => NOBODY.clone(),
            AuthClass::Key | AuthClass::Operator => {
                let principal = match credential::given(&head.target, &head.headers) {
                    Given::One(secret) => self.known(identity, &secret, address),
                    Given::None => self.nobody(identity),
                    Given::Unusable if self.is_open(identity) => Ok(NOBODY.clone()),
                    Given::Unusable => {
                        Err(self.refused("unusable", "Send exactly one API key, as \"Authorization: Bearer KEY\"."))
                    }
                }?;
                principal.check(&asked).inspect_err(|_| self.count("scope"))?;
                principal
            }
        };
        exchange.set_client(address);
        Ok(principal)
    }

    /// Who a tenant is whose request is answered later, without a connection (a batch's line, a response in the background). Its time
    /// may have run out since.
    ///
    /// # Errors
    /// What the batch or the response says.
    pub(crate) fn recall(
        &self,
        identity: &Identity,
        tenant: &str,
        surface: Surface,
    ) -> Result<Arc<Principal>, Failure> {
        if tenant.is_empty() && self.is_open(identity) {
            return Ok(NOBODY.clone());
        }
        let gone = || Failure::new(ErrorKind::Unauthorized, "The API key that asked for this is not known any more.");
        let principal = identity.by_id(tenant).map(|known| known.principal.clone()).ok_or_else(gone)?;
        let route = Route::Ask(Ask::new(surface));
        principal.check(&Use {
            route: route.label(),
            class: route.auth_class(),
            dialect: Dialect::OpenAi,
            address: None,
            is_live: false,
            now: clock::unix_seconds(),
        })?;
        Ok(principal)
    }

    /// Whose key that is. What has been good before is let in however much an address guesses; anything else waits with the guesses.
    fn known(&self, identity: &Identity, secret: &[u8], address: Option<IpAddr>) -> Result<Arc<Principal>, Failure> {
        let found = identity.by_secret(secret);
        if let Some(known) = found.filter(|known| known.is_good()) {
            return Ok(known.principal.clone());
        }
        if self.is_open(identity) {
            return Ok(NOBODY.clone());
        }
        self.unhurried(identity, address)?;
        match found {
            Some(known) => Ok(self.first_use(known)),
            None => {
                self.throttle.failed(address, identity.config.failures_per_minute, Instant::now());
                Err(self.refused("unknown", "Incorrect API key provided."))
            }
        }
    }

    fn first_use(&self, known: &Known) -> Arc<Principal> {
        known.good.store(true, Ordering::Relaxed);
        known.principal.clone()
    }

    /// Whether something unknown from that address is looked at now.
    fn unhurried(&self, identity: &Identity, address: Option<IpAddr>) -> Result<(), Failure> {
        let Some(wait) = self.throttle.wait(address, identity.config.failures_per_minute, Instant::now()) else {
            return Ok(());
        };
        self.count("throttled");
        let message = "Too many wrong API keys came from this address. Wait, and check the key.";
        Err(Failure::new(ErrorKind::RateLimited, message).retry_after(wait))
    }

    fn nobody(&self, identity: &Identity) -> Result<Arc<Principal>, Failure> {
        if self.is_open(identity) {
            return Ok(NOBODY.clone());
        }
        Err(self.refused("missing", "An API key is needed: send it as \"Authorization: Bearer KEY\"."))
    }

    /// Whether whoever comes is served.
    fn is_open(&self, identity: &Identity) -> bool {
        identity.is_open
    }

    fn refused(&self, reason: &'static str, message: &str) -> Failure {
        self.count(reason);
        Failure::new(ErrorKind::Unauthorized, message)
    }

    fn count(&self, reason: &'static str) {
        self.metrics.count(Metric::AuthFailures, &[("reason", reason)]);
    }
}
