//! Web console of the admin listener: its files, the headers that they are served with, and the sessions of the people who have signed in.
//!
//! ```text
//! assets/*  ──include_bytes──▶  Files  ──▶  answers with a strict CSP, an ETag, gzip
//! admin key ──▶  Sessions: cookie + token ──▶  the admin API, with the role of the key
//! sign-in with an identity provider, while the person is there ──▶  Logins: state + cookie
//! ```
//!
//! The pages are plain ES modules and one style sheet, served as they are in the repository: nothing is generated, so no build step can
//! differ from its source. Time and randomness are arguments.
//!
//! Deliberately absent: routes and roles (the admin API's), sockets, clocks, any address but the own origin.
#![forbid(unsafe_code)]

mod cookie;
mod files;
mod logins;
mod sessions;

pub use cookie::{LOGIN_PATH, clear, cookie_name, login_cookie_name, read, set, set_login};
pub use files::{CSP, Files, HOME};
pub use logins::{LOGIN_LIFE, LOGINS_MAX, Login, Logins, PEER_LOGINS_MAX};
pub use sessions::{
    ABSOLUTE, Digest, Fault, Holder, IDLE, KEY_SESSIONS_MAX, Opened, Person, Place, SESSIONS_MAX, STREAMS_MAX,
    Sessions, SignOut, Signed, Stream, digest,
};
