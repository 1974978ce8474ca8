//! Differences between two states of a request, as the admin API shows them. Values whose names are those of secrets are masked, as in a
//! config.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use penstock_proxy::dry_run::View;
use penstock_proxy::reload::{is_secret_name, plain};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

/// Most differences of one plugin that are shown.
const CHANGES_MAX: usize = 200;
/// Longest value of a difference, in bytes of its JSON text.
const VALUE_BYTES_MAX: usize = 2048;
/// Largest body that is shown whole, in bytes.
const BODY_BYTES_MAX: usize = 1 << 20;
/// Value in place of one that may be a secret.
const MASK: &str = "[hidden]";

/// Part of a request that a plugin can edit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum RequestPart {
    /// Name of the model that the request goes to.
    Model,
    /// Header field of the client.
    Header,
    /// Header field that plugins add to the request to the provider.
    UpstreamHeader,
    /// Tag for the access log and the ledger.
    Tag,
    /// Value in the body.
    Body,
}

/// Edit of a request by a plugin. Possible secrets are shown as "[hidden]"; long values are cut.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct Edit {
    part: RequestPart,
    /// Name of the header field or tag, or in a body a JSON pointer to the value; empty: the whole model name or body.
    name: String,
    /// Value before the plugin ran; in a body as JSON. None: there was no value.
    before: Option<String>,
    /// Value after the plugin ran. None: the plugin removed it.
    after: Option<String>,
}

/// Name and value of a header field or a tag.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct NamedValue {
    name: String,
    value: String,
}

/// A request, with possible secrets as "[hidden]".
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct TriedRequest {
    /// Name of the model that the request goes to.
    model: String,
    /// Header fields of the client. A provider with the same API receives a few of these fields.
    headers: Vec<NamedValue>,
    /// Header fields that plugins add to the request to the provider.
    upstream_headers: Vec<NamedValue>,
    /// Tags for the access log and the ledger.
    tags: Vec<NamedValue>,
    /// Body as JSON, in the client's API. None: the client's API cannot express the edited request, or the body is larger than 1 MiB.
    body: Option<String>,
}

/// Request as it may be shown. Values of `pasted`, which came with the call, are no secrets to the caller.
pub(crate) fn shown(view: &View, pasted: &View) -> TriedRequest {
    let pairs = |fields: BTreeMap<String, String>| {
        fields.into_iter().map(|(name, value)| NamedValue { value: masked(&name, value), name }).collect()
    };
    let body = view.body.as_ref().filter(|body| body.len() <= BODY_BYTES_MAX).and_then(|body| {
        let mut value: Value = serde_json::from_slice(body).ok()?;
        mask(&mut value, json(pasted).as_ref(), false);
        Some(value.to_string())
    });
    TriedRequest {
        model: view.model.clone(),
        headers: pairs(headers(view)),
        upstream_headers: pairs(sent(view)),
        tags: pairs(view.tags.iter().cloned().collect()),
        body,
    }
}

/// Differences from `before` to `after`, and the number of those beyond the bound.
pub(crate) fn changes(before: &View, after: &View) -> (Vec<Edit>, usize) {
    let mut out = Edits::default();
    if before.model != after.model {
        out.add(|| {
            let (before, after) = (Some(before.model.clone()), Some(after.model.clone()));
            Edit { part: RequestPart::Model, name: String::new(), before, after }
        });
    }
    let tags = |view: &View| view.tags.iter().cloned().collect();
    pairs(RequestPart::Header, &headers(before), &headers(after), &mut out);
    pairs(RequestPart::UpstreamHeader, &sent(before), &sent(after), &mut out);
    pairs(RequestPart::Tag, &tags(before), &tags(after), &mut out);
    if before.body != after.body {
        let (before, after) = (json(before), json(after));
        Bodies { at: Vec::new(), out: &mut out }.compare(before.as_ref(), after.as_ref(), false);
    }
    (out.kept, out.left_out)
}

/// Edits up to [`CHANGES_MAX`], and the number of the others.
#[derive(Default)]
struct Edits {
    kept: Vec<Edit>,
    left_out: usize,
}

impl Edits {
    /// Adds what `make` returns, or counts it: an edit that is not shown costs nothing.
    fn add(&mut self, make: impl FnOnce() -> Edit) {
        if self.kept.len() < CHANGES_MAX {
            self.kept.push(make());
        } else {
            self.left_out += 1;
        }
    }
}

fn json(view: &View) -> Option<Value> {
    serde_json::from_slice(view.body.as_ref()?).ok()
}

fn headers(view: &View) -> BTreeMap<String, String> {
    let mut out: BTreeMap<String, String> = BTreeMap::new();
    for (name, value) in &view.headers {
        let value = String::from_utf8_lossy(value.as_bytes());
        let all = out.entry(name.to_string()).or_default();
        if !all.is_empty() {
            all.push_str(", ");
        }
        all.push_str(&value);
    }
    out
}

/// Header fields for providers; the last of a name counts.
fn sent(view: &View) -> BTreeMap<String, String> {
    let text = |value: &http::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    view.send.iter().map(|(name, value)| (name.to_string(), text(value))).collect()
}

fn pairs(part: RequestPart, before: &BTreeMap<String, String>, after: &BTreeMap<String, String>, out: &mut Edits) {
    let names: BTreeSet<_> = before.keys().chain(after.keys()).collect();
    for name in names.into_iter().filter(|name| before.get(*name) != after.get(*name)) {
        let value = |of: &BTreeMap<String, String>| of.get(name).map(|value| cut(masked(name, value.clone())));
        out.add(|| Edit { part, name: name.clone(), before: value(before), after: value(after) });
    }
}

/// Comparison of two bodies.
struct Bodies<'a> {
    /// Names and indexes down to the values that are compared.
    at: Vec<Cow<'a, str>>,
    out: &'a mut Edits,
}

impl<'a> Bodies<'a> {
    /// Adds the differences of two values, as JSON pointers (RFC 6901). In lists of different lengths the equal ends are left aside. `hidden`: a value
    /// around these is a secret by its name.
    fn compare(&mut self, before: Option<&'a Value>, after: Option<&'a Value>, hidden: bool) {
        match (before, after) {
            (before, after) if before == after => {}
            (Some(Value::Object(before)), Some(Value::Object(after))) => {
                let added = after.keys().filter(|name| !before.contains_key(*name));
                for name in before.keys().chain(added) {
                    self.at.push(Cow::Borrowed(name));
                    self.compare(before.get(name), after.get(name), hidden || is_secret(name));
                    self.at.pop();
                }
            }
            (Some(Value::Array(before)), Some(Value::Array(after))) => {
                let front = before.iter().zip(after).take_while(|(one, other)| one == other).count();
                let rest = before.len().min(after.len()) - front;
                let pairs = before.iter().rev().zip(after.iter().rev());
                let back = pairs.take(rest).take_while(|(one, other)| one == other).count();
                let (gone, new) = (&before[front..before.len() - back], &after[front..after.len() - back]);
                for index in 0..gone.len().max(new.len()) {
                    self.at.push(Cow::Owned((front + index).to_string()));
                    self.compare(gone.get(index), new.get(index), hidden);
                    self.at.pop();
                }
            }
            _ => {
                let Self { at, out } = self;
                let text = |value: &Value| match value {
                    Value::String(_) if hidden => MASK.to_owned(),
                    value => {
                        let mut value = value.clone();
                        mask(&mut value, None, hidden);
                        cut(value.to_string())
                    }
                };
                out.add(|| Edit {
                    part: RequestPart::Body,
                    name: at.iter().map(|name| format!("/{}", escaped(name))).collect(),
                    before: before.map(text),
                    after: after.map(text),
                });
            }
        }
    }
}

fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

fn cut(mut text: String) -> String {
    if text.len() > VALUE_BYTES_MAX {
        text.truncate(text.floor_char_boundary(VALUE_BYTES_MAX));
        text.push('…');
    }
    text
}

/// Value of a header field or a tag as it may be shown. Digits alone are a number.
fn masked(name: &str, value: String) -> String {
    let is_number = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
    if is_secret_name(name, is_number) { MASK.into() } else { value }
}

/// Returns true if texts of a field of a body, and all texts in it, may be secrets. Addresses are not: images have them. Numbers are never masked.
fn is_secret(name: &str) -> bool {
    is_secret_name(name, false) && !plain(name).contains("url")
}

/// Masks texts that may be secrets and that are not those of `pasted`, at the same place. `hidden`: a value around this one is a secret by its name.
fn mask(value: &mut Value, pasted: Option<&Value>, hidden: bool) {
    match value {
        Value::String(text) if hidden && pasted.and_then(Value::as_str) != Some(text) => *value = MASK.into(),
        Value::Object(fields) => {
            for (name, field) in fields {
                mask(field, pasted.and_then(|pasted| pasted.get(name)), hidden || is_secret(name));
            }
        }
        Value::Array(items) => {
            for (at, item) in items.iter_mut().enumerate() {
                mask(item, pasted.and_then(|pasted| pasted.get(at)), hidden);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderName, HeaderValue};
    use serde_json::json;

    use super::*;

    fn view(body: &Value) -> View {
        View {
            model: "m".into(),
            headers: HeaderMap::new(),
            send: Vec::new(),
            tags: Vec::new(),
            body: Some(body.to_string().into()),
        }
    }

    /// Changes as lines: place, value before, value after.
    fn lines(before: &View, after: &View) -> Vec<String> {
        let said = |value: &Option<String>| value.clone().unwrap_or_else(|| "-".into());
        let (all, left_out) = changes(before, after);
        assert_eq!(left_out, 0);
        all.iter()
            .map(|one| format!("{:?} {} {} {}", one.part, one.name, said(&one.before), said(&one.after)))
            .collect()
    }

    #[test]
    fn bodies_differ_by_their_places() {
        let check = |before: Value, after: Value, expected: &[&str]| {
            assert_eq!(lines(&view(&before), &view(&after)), expected, "{before} {after}");
        };
        check(json!({ "a": 1, "b": 2 }), json!({ "b": 2, "a": 1 }), &[]);
        check(
            json!({ "a": 1, "b": [1] }),
            json!({ "b": [2], "c/d": "x" }),
            &["Body /a 1 -", "Body /b/0 1 2", "Body /c~1d - \"x\""],
        );
        let said = |texts: &[&str]| json!({ "messages": texts.iter().map(|text| json!({ "content": text })).collect::<Value>() });
        check(said(&["a", "b"]), said(&["new", "a", "b"]), &["Body /messages/0 - {\"content\":\"new\"}"]);
        check(said(&["a", "b", "c"]), said(&["a", "x", "c"]), &["Body /messages/1/content \"b\" \"x\""]);
        check(said(&["a", "a"]), said(&["a"]), &["Body /messages/1 {\"content\":\"a\"} -"]);
    }

    #[test]
    fn secrets_are_masked_wherever_they_are_put() {
        for part in [
            json!({ "metadata": { "token": "s3cret" } }),
            json!({ "tools": [{ "headers": { "Authorization": "s3cret", "X-Other": "s3cret" } }] }),
            json!({ "authorization": "s3cret" }),
            json!({ "a": { "Authorization": "s3cret", "apiKey": "s3cret", "api-key": "s3cret", "ACCESS_TOKENS": ["s3cret"] } }),
            json!({ "token": ["s3cret", { "value": "s3cret" }] }),
            json!({ "credentials": { "password": { "a": ["s3cret"] } }, "Set-Cookie": "s3cret" }),
            json!({ "tokens_per_team": { "a": "s3cret" }, "tokenLimit": "s3cret" }),
        ] {
            for (before, after) in
                [(json!({ "b": 1 }), part.clone()), (json!({ "tools": [], "a": 1, "metadata": "x" }), part.clone())]
            {
                let (before, after) = (view(&before), view(&after));
                let said = format!("{:?} {:?}", lines(&before, &after), shown(&after, &before).body);
                assert!(!said.contains("s3cret") && said.contains(MASK), "{said}");
            }
            let shown = shown(&view(&part), &view(&part)).body;
            assert_eq!(shown, Some(part.to_string()), "what came with the call is no secret to the caller");
        }
        let open = json!({ "max_tokens": 5, "tokens_per_minute": 6, "stop": ["a"], "tools": [{ "image_url": "u", "keyboard": "k" }] });
        assert_eq!(shown(&view(&open), &view(&json!({}))).body, Some(open.to_string()));
    }

    #[test]
    fn many_edits_under_a_long_name_are_counted() {
        let long = "n".repeat(100_000);
        let many = |value: u32| view(&json!({ long.clone(): (0..20_000).map(|at| at + value).collect::<Vec<_>>() }));
        let (all, left_out) = changes(&many(0), &many(50_000));
        assert_eq!((all.len(), left_out), (200, 19_800));
    }

    #[test]
    fn possible_secrets_are_masked_and_lists_are_bounded() {
        let before = view(&json!({ "metadata": { "api_key": "mine" } }));
        let mut after = view(&json!({ "metadata": { "api_key": "mine", "token": "theirs" }, "image_url": "u" }));
        for (name, value) in [
            ("authorization", "Bearer a"),
            ("x-api-key", "b"),
            ("x-team", "c"),
            ("x-token-limit", "40000"),
            ("x-token-per-team", "tok-1"),
        ] {
            after.send.push((HeaderName::from_static(name), HeaderValue::from_static(value)));
        }
        after.headers.insert("cookie", HeaderValue::from_static("d"));
        assert_eq!(
            lines(&before, &after),
            [
                "Header cookie - [hidden]",
                "UpstreamHeader authorization - [hidden]",
                "UpstreamHeader x-api-key - [hidden]",
                "UpstreamHeader x-team - c",
                "UpstreamHeader x-token-limit - 40000",
                "UpstreamHeader x-token-per-team - [hidden]",
                "Body /metadata/token - [hidden]",
                "Body /image_url - \"u\"",
            ]
        );
        let all = shown(&after, &before);
        let body = r#"{"metadata":{"api_key":"mine","token":"[hidden]"},"image_url":"u"}"#;
        assert_eq!(all.body.as_deref(), Some(body), "what came with the call is no secret to the caller");
        assert!(all.upstream_headers.iter().all(|one| ["[hidden]", "c", "40000"].contains(&one.value.as_str())));
        let many = view(&(0..300).map(|number| (number.to_string(), json!(number))).collect());
        let (all, left_out) = changes(&view(&json!({})), &many);
        assert_eq!((all.len(), left_out), (200, 100));
        let long = changes(&view(&json!({})), &view(&json!({ "a": "ä".repeat(4000) }))).0;
        assert!(long[0].after.as_ref().is_some_and(|text| text.len() < 2100 && text.ends_with('…')));
    }
}
