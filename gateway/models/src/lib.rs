//! Models on this machine: how they are named, the local store that holds them, and pulls from a hub.
//!
//! - `name.rs`: `ORG/REPO[:QUANT][@REVISION]`
//! - `listing.rs`: a hub's answer about a repository, read as hostile input
//! - `choose.rs`: which files of a repository an engine needs
//! - `sum.rs`: checksums of files
//! - `store.rs`, `manifest.rs`, `facts.rs`: the folder of models, whole or not at all
//! - `pull/`: requests to the hub, ranges, retries
//!
//! Layout of the store:
//!
//! ```text
//! FOLDER/ORG/REPO/VARIANT@COMMIT/manifest.json     what was fetched: sizes, checksums, revision, hub, time
//! FOLDER/ORG/REPO/VARIANT@COMMIT/REPO/...          the files, as `--model` takes them
//! FOLDER/.partial/ORG--REPO--VARIANT@COMMIT/       a pull that has not ended; renamed into its place at its end
//! FOLDER/.partial/removed-.../                     a model that is being deleted; if that was killed, the next removal goes on
//! FOLDER/.locks/ORG--REPO                          held (flock) by a pull or a removal; removed-... by who deletes it
//! ```
//!
//! Deliberately absent: loading a model, pickles (no file of that kind is ever fetched), uploads.
#![forbid(unsafe_code)]

mod choose;
mod facts;
mod listing;
mod manifest;
mod name;
mod pull;
mod store;
mod sum;

pub use choose::{Choice, ChooseError, choose};
pub use facts::Facts;
pub use listing::{Listing, ListingError, RemoteFile};
pub use manifest::{FileRecord, Manifest};
pub use name::{ModelName, NameError};
pub use pull::{Hub, Progress, PullError, Pulled, Request, Stage, pull};
pub use store::{Found, Model, Removed, Store, StoreError, Unfinished};
pub use sum::Sum;
