//! Interface between plugins and the gateway: hooks, contexts, verdicts.
//!
//! A [`Kind`] is a plugin's name and the check of its settings; it builds a [`Plugin`], which is one entry of the
//! config, shared by all requests. For each request that the entry matches, the plugin begins a [`Hooks`] with the
//! state of that request, so there is no table of requests and nothing to clean up. The gateway calls the hooks in this
//! order:
//!
//! ```text
//! on_request   in the order of the file    → pass | answer | reject; edits are made in the context
//! on_head      the other way round         → header fields of the answer, or reject
//! on_event     the other way round         → go | wait | stop | reject; edits are made in the events
//! on_end       the other way round         → exactly once, however the request ended
//! ```
//!
//! Plugins stand around a request like shells: the first one to see the question is the last to see the answer. An
//! answer that a plugin gives is seen only by the plugins in front of it.
//!
//! All of this is plain state: everything that takes time (other models, HTTP, a cache, a timer) is a service of the
//! [`Host`].
#![forbid(unsafe_code)]

mod context;
mod host;
mod json_texts;
mod plugin;
mod settings;
mod size;
#[cfg(feature = "testing")]
pub mod testing;
pub mod text;
mod verdict;

pub use context::{AnswerHead, EndFacts, Outcome, Parts, RequestContext, RequestInfo};
pub use host::{AskAs, BoxFuture, Endpoint, Host, HostError, HttpAnswer, HttpAsk, Limited, ModelAnswer};
pub use plugin::{Hooks, Kind, Needs, Plugin, Sees};
pub use settings::{SettingFault, Settings, Surroundings};
pub use size::{event_bytes, logprob_bytes};
pub use verdict::{After, Answer, Flow, PluginError, Rejection, RejectionKind, Verdict};
