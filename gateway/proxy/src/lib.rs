//! Process `penstock serve`: listeners, the path of a request, streaming, telemetry.
//!
//! Read [`phases`] first: one function, one line per stage. Below it: [`http`] (strict HTTP on Pingora's listeners and sessions),
//! [`upstream`] (whatever answers), [`pump`] (events out to the client). [`server`] starts and stops the process.
//!
//! Deliberately absent: knowledge of any API's JSON (dialects) or of what tokens mean (text); Pingora's `ProxyHttp`; prompts in logs.
#![forbid(unsafe_code)]

mod admit;
pub mod answer;
pub mod auth;
pub mod batches;
pub mod config;
pub mod fleet;
pub mod forward;
pub mod gateway;
pub mod governed;
pub mod live;
pub mod live_requests;
mod pages;
pub mod phases;
pub mod plugins;
pub mod preflight;
pub mod pump;
pub mod relay;
mod request_headers;
pub mod route;
pub mod server;
pub mod serving;
pub mod stored;
mod trail;
#[doc(hidden)]
pub mod untrusted;
pub mod upgrade;
pub mod web;
mod whole;

pub use gateway::Gateway;
pub use penstock_base::Failure;
