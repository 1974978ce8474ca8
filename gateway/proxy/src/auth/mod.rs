//! Who asks, and whether it may: the one door of the data listener.
//!
//! A route can only be served with a [`Principal`], and only `Guard::admit` makes one from a request. In order: the credential is
//! found (exactly one: `credential`), what it stands for is found in memory (issued keys: `directory`; tokens: `jwt`; keys of the config
//! and certificates: `identity`), and that is held against the route, dialect, address and time of this request at one place
//! (`principal`). Whatever is not known is refused; an address that guesses is slowed down (`throttle`).
//!
//! What a config says is [`Identity`], swapped with the config; what lives as long as the process is [`Guard`], kept current by one
//! thread ([`start`]). Keys are issued at the [`Desk`].

pub(crate) mod certificate;
mod check;
mod credential;
mod desk;
mod directory;
mod follow;
mod guard;
mod idempotency;
mod identity;
pub(crate) mod jwt;
mod key;
mod owners;
mod pepper;
mod principal;
mod secret;
mod standing;
mod throttle;

pub(crate) use check::{check_address, check_credential, check_key_set, check_token};
pub(crate) use credential::has_credential;
pub use desk::{Desk, DeskError, GRACE_MAX, Issued, NewKey, check_scope};
pub use follow::start;
pub use guard::Guard;
pub(crate) use idempotency::Idempotency;
pub use identity::{Anonymous, AuthConfig, Identity, is_open};
pub use jwt::{IssuerConfig, KeySource};
pub use key::{Digest, Key, Proof, Team};
pub use pepper::{Pepper, PepperSource};
pub use principal::{Parent, Principal};
pub use secret::PREFIX;
pub use standing::Standing;

pub(crate) use directory::DEPTH_MAX;
pub(crate) use principal::DIALECTS;
