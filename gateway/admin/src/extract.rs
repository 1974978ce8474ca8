//! Extractors and pages of the routes: parameters and bodies in, lists out, with faults in the one shape.

use std::cmp::Ordering;
use std::fmt::Display;
use std::str::FromStr;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use bytes::Bytes;
use http::request::Parts;
use http::{Method, StatusCode, header};
use penstock_store::{Listing, Order, Page as StorePage};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::error::{ApiError, Code};
use crate::keys::Caller;

/// Items of a page whose request names no limit.
const LIMIT: u32 = 100;
/// Most items of a page.
pub(crate) const LIMIT_MAX: u32 = 1000;

/// Parameters of the query; unknown ones are refused where `T` denies them.
pub(crate) struct Params<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Sync> FromRequestParts<S> for Params<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let Query(value) =
            Query::<T>::try_from_uri(&parts.uri).map_err(|error| ApiError::invalid("query", error.body_text()))?;
        Ok(Self(value))
    }
}

/// Variable part of a path, decoded; a path has one.
pub(crate) struct Id(pub(crate) String);

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let found: Result<Path<String>, PathRejection> = Path::from_request_parts(parts, state).await;
        found.map(|Path(id)| Self(id)).map_err(|error| ApiError::invalid("path", error.body_text()))
    }
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        parts.extensions.get::<Self>().cloned().ok_or_else(|| ApiError::internal(&"a route without a caller"))
    }
}

/// JSON body of a request.
pub(crate) struct Body<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let Unread(bytes) = Unread::from_request(request, state).await?;
        serde_json::from_slice(&bytes).map(Self).map_err(|error| ApiError::invalid("body", error.to_string()))
    }
}

/// Body of a request that is sent as JSON, or as a merge patch where it is one, and read by somebody else.
pub(crate) struct Unread(pub(crate) Bytes);

impl<S: Send + Sync> FromRequest<S> for Unread {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let kind = request.headers().get(header::CONTENT_TYPE).map_or(&b""[..], |kind| kind.as_bytes());
        let kind = kind.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
        let is_patch = request.method() == Method::PATCH && kind.eq_ignore_ascii_case(b"application/merge-patch+json");
        if !kind.eq_ignore_ascii_case(b"application/json") && !is_patch {
            let message = "The body must be JSON: send \"Content-Type: application/json\".";
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, Code::UnsupportedMediaType, message));
        }
        // The gate has read it, within its bounds.
        Bytes::from_request(request, state).await.map(Self).map_err(|error| ApiError::internal(&error))
    }
}

/// Part of a list.
#[derive(Clone, Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// Largest number of items. Default: 100.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// Cursor: `next` of the page before.
    #[param(max_length = 512)]
    pub(crate) after: Option<String>,
}

impl ListQuery {
    /// Limit of the page, checked against its bounds.
    pub(crate) fn limit(&self) -> Result<usize, ApiError> {
        bounded_limit(self.limit)
    }
}

/// Order of a list.
#[derive(Clone, Copy, Debug, Default, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Direction {
    /// Oldest first.
    Asc,
    /// Newest first.
    #[default]
    Desc,
}

impl From<Direction> for Order {
    fn from(direction: Direction) -> Self {
        match direction {
            Direction::Asc => Order::Ascending,
            Direction::Desc => Order::Descending,
        }
    }
}

/// Part of a list that the store cuts.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct Paging {
    /// Largest number of items. Default: 100.
    #[serde(default, deserialize_with = "number")]
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// Cursor: `next` of the page before.
    #[param(max_length = 512)]
    after: Option<String>,
    /// Order of the items. Default: newest first.
    #[serde(default)]
    #[param(inline)]
    order: Direction,
}

impl Paging {
    /// Page in the form that the store takes.
    pub(crate) fn page(&self) -> Result<StorePage, ApiError> {
        let limit = bounded_limit(self.limit)? as u32;
        Ok(StorePage { limit, after: self.after.as_deref().map(storable), order: self.order.into() })
    }
}

/// Text to look up in the store. No text of the store has NUL, which PostgreSQL refuses.
pub(crate) fn storable(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

/// Number in a part of a query that is flattened into another, where serde sees text.
pub(crate) fn number<'de, T, D>(field: D) -> Result<Option<T>, D::Error>
where
    T: FromStr<Err: Display>,
    D: Deserializer<'de>,
{
    let text: Option<String> = Option::deserialize(field)?;
    text.map(|text| text.parse().map_err(|error| D::Error::custom(format!("{text:?}: {error}")))).transpose()
}

/// Deserializes a field for which absent, null and a value differ: null becomes `Some(None)`, a value `Some(Some(_))`.
/// An absent field becomes `None` by the field's default, without a call of this function.
pub(crate) fn double<'de, T: Deserialize<'de>, D: Deserializer<'de>>(field: D) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(field).map(Some)
}

/// Limit of a page within its bounds.
pub(crate) fn bounded_limit(limit: Option<u32>) -> Result<usize, ApiError> {
    match limit.unwrap_or(LIMIT) {
        limit @ 1..=LIMIT_MAX => Ok(limit as usize),
        _ => Err(ApiError::invalid("limit", format!("limit: must be from 1 to {LIMIT_MAX}"))),
    }
}

/// Page of a list.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Page<T> {
    /// The items.
    pub(crate) data: Vec<T>,
    /// Cursor of the next page, for `after`. Null on the last page.
    pub(crate) next: Option<String>,
}

impl<T> Page<T> {
    /// Page that the store has cut.
    pub(crate) fn of<S>(listing: Listing<S>, shown: impl Fn(S) -> T, id: impl Fn(&T) -> &str) -> Self {
        let data: Vec<T> = listing.items.into_iter().map(shown).collect();
        let next = data.last().filter(|_| listing.more).map(|last| id(last).to_owned());
        Self { data, next }
    }

    /// Page cut out of all items, which are sorted by their ids.
    pub(crate) fn cut(mut items: Vec<T>, query: &ListQuery, id: impl Fn(&T) -> &str) -> Result<Json<Self>, ApiError> {
        let limit = query.limit()?;
        items.sort_by(|left, right| id(left).cmp(id(right)));
        if let Some(after) = &query.after {
            items.retain(|item| id(item).cmp(after.as_str()) == Ordering::Greater);
        }
        let next = (items.len() > limit).then(|| id(&items[limit - 1]).to_owned());
        items.truncate(limit);
        Ok(Json(Self { data: items, next }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_join_up() {
        let all: Vec<String> = (0..25).map(|at| format!("m{at:02}")).collect();
        let (mut seen, mut after) = (Vec::new(), None);
        loop {
            let query = ListQuery { limit: Some(10), after };
            let Json(page) = Page::cut(all.iter().rev().cloned().collect(), &query, |id| id).expect("a page");
            seen.extend(page.data);
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        assert_eq!(seen, all);
        for limit in [0, 1001] {
            assert!(ListQuery { limit: Some(limit), after: None }.limit().is_err());
        }
    }
}
