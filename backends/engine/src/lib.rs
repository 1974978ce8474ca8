//! The engine: sequences, scheduler, sampler, weights, models, and one synchronous [`Engine::step`].
//!
//! No async, no clock, and no threads but one that computes masks within a step where asked: `now` and random numbers come in as arguments, so a seed replays
//! everything. One rule schedules: each sequence has tokens computed and tokens wanted; a step moves the first towards
//! the second. Prefill, chunking, prefix hits, resume after preemption are cases of it.
//!
//! - `engine.rs`: `step()` = schedule → forward → sample → publish
//! - `engine/`: `intake.rs` requests in, `pass.rs` one pass of the model, `blocks.rs` blocks in and out, `outbox.rs` outputs that wait for a frame
//! - `forward.rs`: the seam to a model (or to a fake one in simulations)
//! - `request.rs`: a request checked against every bound, once; `params.rs`: its sampling parameters; `limits.rs`: the bounds
//! - `scheduler.rs`, `sequence.rs`: what runs next
//! - `draw.rs`: from a sampled row to a token or a vector
//! - `lookup.rs`: draft tokens copied from earlier in the text
//! - `sampler.rs`, `filter.rs`, `logits.rs`, `random.rs`: from logits to a token, counter-based
//! - `guide.rs`: output that follows a grammar; `mark.rs`: the text in front of it
//! - `stats.rs`: load in seconds, credits
//! - `transfer.rs`: KV that comes from and goes to other engines
//! - `output.rs`: what the gateway gets of a step
//! - `first.rs`: first tokens that other engines drew
//! - `measure.rs`: throughput with synthetic prompts
//! - `model_config/`: config.json as checked values, what is wrong with a checkpoint, and the least work of a step
//! - `checkpoint/`: safetensors, GGUF, checked before use
//! - `adapter.rs`, `slots.rs`, `engine/adapters.rs`: LoRA adapters: checked before use, their places, loaded between steps
//! - `families/`: one file per architecture
//! - `models/`: the decoder and the encoder that they share, on a device
#![forbid(unsafe_code)]

pub mod adapter;
pub mod checkpoint;
mod config;
mod draw;
mod engine;
mod families;
mod filter;
mod first;
pub mod forward;
mod guide;
mod limits;
mod logits;
mod lookup;
mod mark;
pub mod measure;
mod model_config;
pub mod models;
mod output;
mod params;
pub mod random;
mod reasoning;
mod request;
pub mod sampler;
mod scheduler;
mod sequence;
mod slots;
mod stats;
mod transfer;

pub use adapter::{Adapter, AdapterError};
pub use config::EngineConfig;
pub use engine::adapters::AdapterLoad;
pub use engine::{Clock, Engine, Imported, Offload};
pub use forward::{AfterLayer, EncoderGeometry, Forward, Geometry, Pages};
pub use guide::{Allowed, source};
pub use params::Params;
pub use request::{Drawing, Prefill};
pub use transfer::{Missing, PageSink};
