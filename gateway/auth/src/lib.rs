//! Authentication and authorization of the data listener.
//!
//! A route can only be served with a [`Principal`], and only `Guard::admit` makes one from a request. The steps: find
//! the credential (exactly one: `credential`); look up its principal in memory (issued keys: `directory`; tokens:
//! `jwt`; keys of the config and certificates: `identity`); check the principal against the route, dialect, address and
//! time of the request in one place (`principal`). An unknown credential is refused; an address with many failures is
//! throttled (`throttle`). `route` finds the route of a URL, and the kind of credential that it needs.
//!
//! [`Identity`] is built from a config and swapped with it; [`Guard`] lives as long as the process and is kept current
//! by one thread ([`start`]). Keys are issued at the [`Desk`].
#![forbid(unsafe_code)]

#[doc(hidden)]
pub mod check;
mod credential;
mod directory;
mod follow;
mod guard;
mod idempotency;
mod identity;
pub mod jwt;
mod key;
mod key_issuing;
mod marker;
mod owners;
mod pepper;
mod principal;
pub mod route;
mod secret;
mod standing;
mod stored_route;
mod throttle;

pub use credential::has_credential;
pub use directory::DEPTH_MAX;
pub use follow::{Guarded, start};
pub use guard::Guard;
pub use idempotency::Idempotency;
pub use identity::{Anonymous, AuthConfig, AuthSettings, Identity};
pub use jwt::{IssuerConfig, KeySource};
pub use key::{Digest, Key, Proof, Team};
pub use key_issuing::{Desk, DeskError, GRACE_MAX, Issued, NewKey, check_scope};
pub use pepper::{Pepper, PepperPlace, PepperSource};
pub use principal::{DIALECTS, Parent, Principal};
pub use secret::PREFIX;
pub use standing::Standing;
pub use stored_route::StoredRoute;
