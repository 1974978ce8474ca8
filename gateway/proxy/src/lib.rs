//! Process `penstock serve`: listeners, the path of a request, streaming, telemetry.
//!
//! Read [`phases`] first: one function, one line per stage. Below it: [`penstock_http`] (strict HTTP on Pingora's
//! listeners and sessions), [`penstock_upstream`] (whatever answers), [`pump`] (events out to the client). [`server`] starts and stops the process.
//!
//! Deliberately absent: knowledge of any API's JSON (dialects) or of what tokens mean (text); Pingora's `ProxyHttp`; prompts in logs.
#![forbid(unsafe_code)]

mod admit;
pub mod answer;
mod background_answer;
mod batch_text;
pub mod batches;
mod certificate;
mod claims;
pub mod console_answer;
pub mod descriptors;
pub mod dry_run;
pub mod endpoint_picker;
mod event_log;
pub mod fleet;
pub mod forward;
pub mod gateway;
pub mod handler;
pub mod keeper;
mod list_query;
pub mod live_requests;
pub mod phases;
pub mod plugins;
pub mod pump;
pub mod reload;
pub mod reload_marks;
mod request_headers;
mod request_log;
mod routes;
mod saving;
pub mod server;
pub mod serving;
pub mod start_checks;
pub mod stored;
#[doc(hidden)]
pub mod untrusted;
pub mod upgrade;
pub mod web;

pub use gateway::Gateway;
pub use penstock_base::Failure;
