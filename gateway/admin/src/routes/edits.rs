//! Changes of one object in the config's text: an entry of a table, or an object within one.
//!
//! All of them go one way: the text in force is read and edited under a lock, conditions (`If-Match`, `If-None-Match`) are checked against the
//! object that is there, and the new text is applied as a whole config would be. The answer has the object with its tag, and the config.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use penstock_config::entries::{EntryError, ID_BYTES_MAX};
use penstock_proxy::reload::{Applied as Done, ApplyError, By};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use utoipa::{IntoParams, ToSchema};

use super::config::{NOTE_BYTES_MAX, beside, paths, refusal};
use crate::audit::Did;
use crate::error::{ApiError, Code};
use crate::state::Admin;

/// Entry of a table of the config.
#[derive(Clone, Serialize, ToSchema)]
pub(crate) struct Entry {
    /// Id of the entry: its key `id`, or `name` without one.
    pub(super) id: String,
    /// Keys of the entry as the config has them; possible secrets read "[hidden]".
    #[schema(value_type = Object)]
    pub(super) value: Value,
    /// ETag of the entry, for If-Match.
    pub(super) etag: String,
}

/// Note on a change.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Noted {
    /// Note for the history. Default: the operation and the entry.
    #[serde(default)]
    #[param(max_length = 1000)]
    pub(super) note: String,
}

/// Refusal of a change; the one in force stays.
pub(super) enum Refused {
    Entry(ApiError),
    Config(ApplyError),
}

impl From<ApplyError> for Refused {
    fn from(error: ApplyError) -> Self {
        Self::Config(error)
    }
}

impl From<ApiError> for Refused {
    fn from(error: ApiError) -> Self {
        Self::Entry(error)
    }
}

impl From<EntryError> for Refused {
    fn from(error: EntryError) -> Self {
        Self::Entry(error.into())
    }
}

impl From<EntryError> for ApiError {
    fn from(error: EntryError) -> Self {
        let message = error.to_string();
        match error {
            EntryError::Unknown { .. } => Self::not_found(message),
            EntryError::Taken { .. } | EntryError::Ambiguous { .. } | EntryError::Syntax(_) | EntryError::Spelling => {
                Self::conflict(message)
            }
            EntryError::Unnamed => Self::invalid("id", message),
            EntryError::Hidden(path) | EntryError::Unwritable(path) => Self::invalid(&path, message),
        }
    }
}

/// Id of a path, within its bound; `what`: its name in the document.
pub(super) fn bounded(id: String, what: &'static str) -> Result<String, ApiError> {
    match id.len() > ID_BYTES_MAX {
        true => Err(ApiError::invalid(what, format!("{what}: at most {ID_BYTES_MAX} bytes"))),
        false => Ok(id),
    }
}

pub(super) fn path_error(error: &PathRejection) -> ApiError {
    ApiError::invalid("path", error.body_text())
}

/// ETag of an object: a hash under a key that is this process's.
pub(super) fn tag(admin: &Admin, table: &str, value: &Value) -> String {
    let mut hash = Sha256::new_with_prefix(admin.seal);
    hash.update(table);
    hash.update([0]);
    hash.update(value.to_string());
    let hex: String = hash.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("\"{hex}\"")
}

/// Checks `If-Match` and `If-None-Match` against the object that is there.
pub(super) fn check(headers: &HeaderMap, there: Option<&Entry>) -> Result<(), ApiError> {
    let names = |name, there: &Entry| {
        let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
        values
            .flat_map(|value| value.split(','))
            .any(|one| matches!(one.trim(), tag if tag == "*" || tag == there.etag))
    };
    let failed = |message: &str| Err(ApiError::new(StatusCode::PRECONDITION_FAILED, Code::VersionMismatch, message));
    if headers.contains_key(header::IF_MATCH) && !there.is_some_and(|there| names(header::IF_MATCH, there)) {
        return failed("The entry is another by now, or gone: look at it, then change it again.");
    }
    if there.is_some_and(|there| names(header::IF_NONE_MATCH, there)) {
        return failed("There is an entry of that id; If-None-Match allows no change of it.");
    }
    Ok(())
}

/// Wish for a change of one object.
pub(super) struct Wish {
    /// Actor, with a note; `about` is the note of a wish that has none.
    pub(super) by: By,
    pub(super) about: String,
    pub(super) is_delete: bool,
}

/// Text that an edit has made.
pub(super) struct Edited {
    pub(super) text: String,
    /// Object after the change; `None`: it is removed.
    pub(super) entry: Option<Entry>,
    /// True if the object was not there before.
    pub(super) is_new: bool,
}

/// Change that is in force.
pub(super) struct Made {
    pub(super) done: Done,
    pub(super) entry: Option<Entry>,
    pub(super) is_new: bool,
}

/// Puts the text in force that `edit` makes of the one in force; it runs on another thread than the one that answers.
pub(super) async fn change(
    admin: &Admin,
    wish: Wish,
    edit: impl FnOnce(&str) -> Result<Edited, Refused> + Send + 'static,
) -> Result<Made, ApiError> {
    let Wish { mut by, about, is_delete } = wish;
    if by.note.is_empty() {
        by.note = about;
        by.note.truncate(by.note.floor_char_boundary(NOTE_BYTES_MAX));
    }
    let made = beside(admin, move |live| {
        let (mut entry, mut is_new) = (None, false);
        let done = live.edit(&by, |text| -> Result<String, Refused> {
            let edited = edit(text)?;
            (entry, is_new) = (edited.entry, edited.is_new);
            Ok(edited.text)
        });
        done.map(|done| Made { done, entry, is_new })
    });
    made.await?.map_err(|refused| match refused {
        Refused::Entry(error) => error,
        Refused::Config(error) => needed(refusal(error, "body"), is_delete),
    })
}

/// Refusal of a removal whose object the rest of the config needs.
fn needed(error: ApiError, is_delete: bool) -> ApiError {
    if !is_delete || error.status != StatusCode::BAD_REQUEST {
        return error;
    }
    let message = "The config cannot be used without this entry; nothing has changed.";
    ApiError { details: error.details, ..ApiError::conflict(message) }
}

impl Made {
    /// Event of the change for the audit log.
    pub(super) fn did(&self, target: String) -> Did {
        let detail = serde_json::json!({ "version": self.done.version, "changes": paths(&self.done) });
        Did { target: Some(target), detail }
    }

    /// Status of the answer.
    pub(super) fn status(&self) -> StatusCode {
        if self.is_new { StatusCode::CREATED } else { StatusCode::OK }
    }
}

/// Answer with the tag of its object, if it has one.
pub(super) fn tagged(etag: Option<&str>, answer: impl IntoResponse) -> Response {
    let tag = etag.and_then(|tag| HeaderValue::try_from(tag).ok());
    let mut response = answer.into_response();
    tag.into_iter().for_each(|tag| _ = response.headers_mut().insert(header::ETAG, tag));
    response
}

/// Answer to a change: its status, the event for the audit log, and `body`.
pub(super) fn answered(status: StatusCode, did: Did, etag: Option<&str>, body: impl Serialize) -> Response {
    tagged(etag, (status, axum::Extension(did), Json(body)))
}
