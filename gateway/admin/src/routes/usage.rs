//! Usage and cost: sums by groups, and the requests behind them.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::{HeaderValue, header};
use penstock_base::clock;
use penstock_store::{
    Entry as StoreEntry, EntryFilter, Group as StoreGroup, Listing, Subject, USAGE_GROUPS_MAX, UsageQuery, UsageRow,
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::error::ApiError;
use crate::extract::{Page, Paging, Params, bounded_limit, number};
use crate::state::Admin;

/// Period of sums without `from`, before their end.
const USUAL_SECONDS: u64 = 30 * 86_400;

/// Filter and groups of a sum.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Query {
    /// Groups, up to four of: key, team, user, model, provider, route, day, hour, tag; separated by commas. Without: one sum of all.
    #[param(
        pattern = "^((key|team|user|model|provider|route|day|hour|tag)(,(key|team|user|model|provider|route|day|hour|tag)){0,3})?$",
        example = "model"
    )]
    group: Option<String>,
    /// Largest number of rows. Default: 100.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// Cursor: `next` of the page before.
    #[param(max_length = 4096)]
    after: Option<String>,
    #[serde(flatten)]
    #[param(ignore)]
    which: Which,
}

/// Filter of requests.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct Which {
    /// Begin of the range in Unix seconds, included. Default: 30 days before until.
    #[param(minimum = 0, maximum = 9_999_999_999_i64)]
    #[serde(default, deserialize_with = "number")]
    from: Option<u64>,
    /// End of the range in Unix seconds, not included. Default: now.
    #[param(minimum = 0, maximum = 9_999_999_999_i64)]
    #[serde(default, deserialize_with = "number")]
    until: Option<u64>,
    /// Only this key. Empty, here and below: requests without one.
    #[param(max_length = 256)]
    key: Option<String>,
    /// Only this team.
    #[param(max_length = 256)]
    team: Option<String>,
    /// Only this user.
    #[param(max_length = 256)]
    user: Option<String>,
    /// Only this model.
    #[param(max_length = 256)]
    model: Option<String>,
    /// Only answers of this pool or provider.
    #[param(max_length = 256)]
    provider: Option<String>,
    /// Only this route.
    #[param(max_length = 256)]
    route: Option<String>,
    /// Only requests with this tag.
    #[param(max_length = 256)]
    tag: Option<String>,
}

impl Which {
    /// Filter in the form that the store takes, with defaults for the times.
    fn filter(self) -> EntryFilter {
        let Self { from, until, key, team, user, model, provider, route, tag } = self;
        let until = until.unwrap_or_else(|| clock::unix_seconds() + 1);
        let from = from.unwrap_or_else(|| until.saturating_sub(USUAL_SECONDS));
        EntryFilter { from, until, key, team, user, model, provider, route, tag }
    }
}

fn groups(text: &str) -> Result<Vec<StoreGroup>, ApiError> {
    let mut groups = Vec::new();
    for name in text.split(',').filter(|name| !name.is_empty()) {
        let known: Vec<_> = StoreGroup::NAMES.iter().map(|(_, name)| *name).collect();
        let group = StoreGroup::parse(name)
            .ok_or_else(|| ApiError::invalid("group", format!("group: {name:?} is none of {}", known.join(", "))))?;
        if !groups.contains(&group) {
            groups.push(group);
        }
    }
    if groups.len() > USAGE_GROUPS_MAX {
        return Err(ApiError::invalid("group", format!("group: at most {USAGE_GROUPS_MAX}")));
    }
    Ok(groups)
}

fn cursor(values: &[String]) -> String {
    URL_SAFE_NO_PAD.encode(serde_json::to_vec(values).unwrap_or_default())
}

/// Values of a cursor; `None`: the text is no cursor of a page with these groups, and there is nothing behind it.
fn read_cursor(text: &str, groups: usize) -> Option<Vec<String>> {
    let bytes = URL_SAFE_NO_PAD.decode(text).ok()?;
    let values: Vec<String> = serde_json::from_slice(&bytes).ok()?;
    (values.len() == groups).then_some(values)
}

/// Sums of a query.
async fn sums(admin: &Admin, query: Query) -> Result<(Vec<StoreGroup>, Listing<UsageRow>), ApiError> {
    let limit = bounded_limit(query.limit)? as u32;
    let groups = groups(query.group.as_deref().unwrap_or_default())?;
    let after = query.after.as_deref().map(|cursor| read_cursor(cursor, groups.len()));
    if after == Some(None) {
        return Ok((groups, Listing { items: Vec::new(), more: false }));
    }
    let query = UsageQuery { filter: query.which.filter(), groups, after: after.flatten(), limit };
    let listing = admin.store.usage(&query).await?;
    Ok((query.groups, listing))
}

/// Sum of a group.
#[derive(Serialize, ToSchema)]
pub(crate) struct Usage {
    /// Group values by group name; those of day and hour are the Unix second of the beginning. Empty: none, or unknown.
    groups: BTreeMap<&'static str, String>,
    requests: u64,
    /// Part of the requests that failed.
    failed: u64,
    /// Prompt tokens, all.
    input_tokens: u64,
    /// Part of the prompt tokens that was read from a cache.
    input_cached_tokens: u64,
    /// Part of the prompt tokens that was written to a cache and billed.
    input_written_tokens: u64,
    /// Completion tokens, all.
    output_tokens: u64,
    /// Part of the completion tokens that was reasoning.
    reasoning_tokens: u64,
    /// Cost in dollars.
    usd: f64,
}

impl Usage {
    fn new(groups: &[StoreGroup], row: UsageRow) -> Self {
        Self {
            groups: groups.iter().map(|group| group.name()).zip(row.values).collect(),
            requests: row.requests,
            failed: row.failed,
            input_tokens: row.tokens.input,
            input_cached_tokens: row.tokens.input_cached,
            input_written_tokens: row.tokens.input_written,
            output_tokens: row.tokens.output,
            reasoning_tokens: row.tokens.reasoning,
            usd: row.micro_usd as f64 / 1e6,
        }
    }
}

/// Usage and cost, summed by groups.
#[utoipa::path(get, path = "/admin/v1/usage", tag = "usage", operation_id = "list_usage", params(Query, Which),
    responses((status = 200, description = "Sums, in the order of their groups.", body = Page<Usage>)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn list(
    State(admin): State<Admin>,
    Params(query): Params<Query>,
) -> Result<Json<Page<Usage>>, ApiError> {
    let (groups, Listing { items, more }) = sums(&admin, query).await?;
    let next = items.last().filter(|_| more).map(|last| cursor(&last.values));
    Ok(Json(Page { data: items.into_iter().map(|row| Usage::new(&groups, row)).collect(), next }))
}

/// Usage and cost as CSV, with a header line. The header x-next is the next page's after.
#[utoipa::path(get, path = "/admin/v1/usage.csv", tag = "usage", operation_id = "list_usage_csv", params(Query, Which),
    responses((status = 200, description = "Sums, in the order of their groups.", body = String, content_type = "text/csv",
        headers(("x-next" = String, description = "Cursor of the next page; absent on the last page.")))),
    security(("admin_key" = ["viewer"])))]
pub(crate) async fn csv(State(admin): State<Admin>, Params(query): Params<Query>) -> Result<Response, ApiError> {
    let (groups, Listing { items, more }) = sums(&admin, query).await?;
    let next = items.last().filter(|_| more).map(|last| cursor(&last.values));
    let kind = HeaderValue::from_static("text/csv; charset=utf-8");
    let mut response = ([(header::CONTENT_TYPE, kind)], table(&groups, &items)).into_response();
    if let Some(next) = next.and_then(|next| HeaderValue::try_from(next).ok()) {
        response.headers_mut().insert("x-next", next);
    }
    Ok(response)
}

/// CSV of the rows (RFC 4180). A text that a spreadsheet would take for a formula gets a quote in front: clients choose
/// some of these names.
fn table(groups: &[StoreGroup], rows: &[UsageRow]) -> String {
    let mut out = String::new();
    for group in groups {
        let _ = write!(out, "{},", group.name());
    }
    out +=
        "requests,failed,input_tokens,input_cached_tokens,input_written_tokens,output_tokens,reasoning_tokens,usd\r\n";
    for UsageRow { values, requests, failed, tokens, micro_usd } in rows {
        for value in values {
            let guard = if value.starts_with(['=', '+', '-', '@', '\t', '\r']) { "'" } else { "" };
            let _ = write!(out, "\"{guard}{}\",", value.replace('"', "\"\""));
        }
        let _ = write!(
            out,
            "{requests},{failed},{},{},{},{},{},{}.{:06}\r\n",
            tokens.input,
            tokens.input_cached,
            tokens.input_written,
            tokens.output,
            tokens.reasoning,
            micro_usd / 1_000_000,
            micro_usd % 1_000_000,
        );
    }
    out
}

/// Filter of the requests.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EntryQuery {
    #[serde(flatten)]
    paging: Paging,
    #[serde(flatten)]
    which: Which,
}

/// Request that has ended.
#[derive(Serialize, ToSchema)]
pub(crate) struct Entry {
    request_id: String,
    /// Arrival in Unix seconds.
    at: u64,
    key: String,
    team: String,
    user: String,
    model: String,
    provider: String,
    route: String,
    tags: Vec<String>,
    input_tokens: u64,
    input_cached_tokens: u64,
    input_written_tokens: u64,
    output_tokens: u64,
    reasoning_tokens: u64,
    /// Cost in dollars.
    usd: f64,
    /// Dollars reserved before the request was sent on.
    reserved_usd: f64,
    /// HTTP status; 0: none was sent.
    status: u16,
    /// Outcome of the request.
    outcome: String,
    attempts: u32,
    /// Milliseconds to the first token; 0: none came.
    first_ms: u64,
    total_ms: u64,
    /// Whether its gateway died, so that the reservation stands for the usage.
    assumed: bool,
}

impl From<StoreEntry> for Entry {
    fn from(entry: StoreEntry) -> Self {
        let StoreEntry { opened, tokens, micro_usd, status, outcome, attempts, first_ms, total_ms, assumed } = entry;
        let Subject { key, team, user, model, provider, route, tags } = Arc::unwrap_or_clone(opened.subject);
        Self {
            request_id: opened.request,
            at: opened.at,
            key,
            team,
            user,
            model,
            provider,
            route,
            tags,
            input_tokens: tokens.input,
            input_cached_tokens: tokens.input_cached,
            input_written_tokens: tokens.input_written,
            output_tokens: tokens.output,
            reasoning_tokens: tokens.reasoning,
            usd: micro_usd as f64 / 1e6,
            reserved_usd: opened.held.micro_usd as f64 / 1e6,
            status,
            outcome: outcome.into_owned(),
            attempts,
            first_ms,
            total_ms,
            assumed,
        }
    }
}

/// Requests that have ended, with the cost of each.
#[utoipa::path(get, path = "/admin/v1/usage/requests", tag = "usage", operation_id = "list_usage_requests", params(Paging, Which),
    responses((status = 200, description = "Requests.", body = Page<Entry>)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn entries(
    State(admin): State<Admin>,
    Params(query): Params<EntryQuery>,
) -> Result<Json<Page<Entry>>, ApiError> {
    let (filter, page) = (query.which.filter(), query.paging.page()?);
    let Listing { items, more } = admin.store.entries(&filter, &page).await?;
    let next = items.last().filter(|_| more).map(|last| last.opened.place());
    Ok(Json(Page { data: items.into_iter().map(Entry::from).collect(), next }))
}

#[cfg(test)]
mod tests {
    use penstock_store::Order;

    use super::*;

    #[test]
    fn a_table_cannot_run_anything() {
        let row = |value: &str| UsageRow {
            values: vec![value.into()],
            requests: 1,
            micro_usd: 1_500_001,
            ..UsageRow::default()
        };
        let text = table(&[StoreGroup::Key], &[row("a\"b,c"), row("=1+1"), row("-x")]);
        let lines: Vec<_> = text.split("\r\n").collect();
        assert!(lines[0].starts_with("key,requests,failed,"));
        assert_eq!(lines[1], "\"a\"\"b,c\",1,0,0,0,0,0,0,1.500001");
        assert!(lines[2].starts_with("\"'=1+1\",") && lines[3].starts_with("\"'-x\","));
    }

    #[test]
    fn groups_are_known_and_few() {
        assert_eq!(groups("key,model").map(|groups| groups.len()), Ok(2));
        assert_eq!(groups("key,key").map(|groups| groups.len()), Ok(1));
        assert_eq!(groups("").map(|groups| groups.len()), Ok(0));
        for wrong in ["colour", "key,team,user,model,route"] {
            assert!(groups(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_asked_is_read_whole_or_refused() {
        let read = |query: &str| {
            let uri = format!("/usage?{query}").parse().expect("a URI");
            axum::extract::Query::<EntryQuery>::try_from_uri(&uri).map(|query| query.0).ok()
        };
        let query = read("from=5&until=9&key=&limit=7&order=asc&after=5.r").expect("read");
        let page = query.paging.page().expect("a page");
        assert_eq!((page.limit, page.after.as_deref(), page.order), (7, Some("5.r"), Order::Ascending));
        let filter = query.which.filter();
        assert_eq!((filter.from, filter.until, filter.key.as_deref(), filter.tag), (5, 9, Some(""), None));
        for wrong in ["colour=red", "from=x", "limit=-1", "order=up", "from="] {
            assert!(read(wrong).is_none(), "{wrong}");
        }
    }

    #[test]
    fn a_cursor_comes_back() {
        let values = vec!["a,b".to_owned(), "\u{e9}".to_owned()];
        assert_eq!(read_cursor(&cursor(&values), 2), Some(values.clone()));
        assert!(read_cursor(&cursor(&values), 1).is_none() && read_cursor("!", 0).is_none());
    }
}
