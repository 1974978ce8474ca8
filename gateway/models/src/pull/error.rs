//! Reasons why a pull ends, each with what can be done.

use std::io;
use std::path::Path;

use crate::choose::ChooseError;
use crate::listing::ListingError;
use crate::store::StoreError;

/// Reason why a model could not be pulled.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// The endpoint's address cannot be used.
    #[error("{endpoint}: {reason}")]
    Endpoint {
        /// Address of the endpoint.
        endpoint: String,
        /// Fault of it.
        reason: String,
    },
    /// A token would go over an open network.
    #[error("{0}: a token is only sent over https, or to this machine: give the endpoint as https://, or no token")]
    OpenToken(String),
    /// No answer after several attempts.
    #[error(
        "{url}: {reason}, after {attempts} attempts; what was fetched is kept: the same command goes on from there"
    )]
    Unreachable {
        /// Address that was asked.
        url: String,
        /// Last failure.
        reason: String,
        /// Attempts that brought nothing.
        attempts: u32,
    },
    /// The hub refused the credential, or wants one.
    #[error(
        "{url}: status 401{said}: the hub knows no such repository, or it is not public: check the name, and set a token that may read it \
             (HF_TOKEN, or hub.token_env or hub.token_file of the config)"
    )]
    Unauthorized {
        /// Address that was asked.
        url: String,
        /// Message of the hub.
        said: String,
    },
    /// The hub does not let this credential have it.
    #[error("{url}: status 403{said}: {advice}")]
    Forbidden {
        /// Address that was asked.
        url: String,
        /// Message of the hub.
        said: String,
        /// What can be done.
        advice: String,
    },
    /// Nothing of that name.
    #[error("{url}: status 404{said}: {advice}")]
    NotFound {
        /// Address that was asked.
        url: String,
        /// Message of the hub.
        said: String,
        /// What can be done.
        advice: String,
    },
    /// The hub allows no more requests for now.
    #[error(
        "{url}: status 429{said}: the hub limits requests; wait some minutes and run the same command, which goes on where it was; a token \
             (HF_TOKEN) has a higher limit, and hub.connections fewer requests at once"
    )]
    Limited {
        /// Address that was asked.
        url: String,
        /// Message of the hub.
        said: String,
    },
    /// Another status.
    #[error("{url}: status {status}{said}")]
    Status {
        /// Address that was asked.
        url: String,
        /// Status of the answer.
        status: u16,
        /// Message of the hub.
        said: String,
    },
    /// Redirect that is not followed.
    #[error("{url}: redirected to {to:?}, which is not followed: {reason}")]
    Redirect {
        /// Address that was asked.
        url: String,
        /// Place that the answer names.
        to: String,
        /// Reason of the refusal.
        reason: &'static str,
    },
    /// Answer that is not what a hub sends.
    #[error("{url}: {reason}")]
    Answer {
        /// Address that was asked.
        url: String,
        /// Fault of the answer.
        reason: String,
    },
    /// Description of the repository that cannot be read.
    #[error("{url}: {error}")]
    Listing {
        /// Address that was asked.
        url: String,
        /// Fault of the description.
        error: ListingError,
    },
    /// Nothing to be fetched.
    #[error("{name} {error}")]
    Choice {
        /// Name of the repository.
        name: String,
        /// Reason.
        error: ChooseError,
    },
    /// Too little space.
    #[error("{folder}: {:.1} GB are needed and {:.1} GB are free: make space, or set another folder (hub.folder, --models-dir)", *needed as f64 / 1e9, *free as f64 / 1e9)]
    Space {
        /// Folder of the store.
        folder: String,
        /// Bytes that are missing of the model.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// Content that is not what the hub says.
    #[error(
        "{names}: fetched twice from {endpoint}, and not what its checksum says both times: something on the way changes it; nothing was stored"
    )]
    Damaged {
        /// Names of the files.
        names: String,
        /// Address of the endpoint.
        endpoint: String,
    },
    /// Model in the store with other files.
    #[error(
        "{name}@{commit} is in the store, with other files than {endpoint} lists under this commit: what is stored came from another \
             endpoint; if you trust this one, penstock models remove {name}@{commit} and pull again"
    )]
    Other {
        /// Name of the model.
        name: String,
        /// Commit of both.
        commit: String,
        /// Address of the endpoint that was asked.
        endpoint: String,
    },
    /// Failure of the store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The program is ending.
    #[error("interrupted; what was fetched is kept: the same command goes on from there")]
    Interrupted,
}

impl PullError {
    pub(super) fn file(path: &Path, source: io::Error) -> Self {
        Self::Store(StoreError::Io { what: path.display().to_string(), source })
    }

    /// Returns true if another endpoint may have what this one has not.
    pub(super) fn may_be_elsewhere(&self) -> bool {
        !matches!(self, Self::Space { .. } | Self::Store(_) | Self::Interrupted | Self::OpenToken(_))
    }
}
