//! Dry run of a request through the plugins of a gateway, and its result as text for people.

use std::fmt::Write;

use anyhow::{Context, bail};
use hyper::Method;
use serde_json::{Map, Value, json};

use super::arguments::DryRun;
use super::client::Client;
use super::columns::STEPS;
use super::commands::{Show, read};
use super::table::{table, value};
use crate::out::harmless;

/// Longest value of an edit that is shown, in characters; `--json` has more.
const VALUE_CHARS_MAX: usize = 200;

/// Tries a request on the plugins in force, and prints what each does.
pub(super) async fn dry_run(client: &Client, asked: &DryRun, show: Show) -> anyhow::Result<()> {
    let file = asked.file.display();
    let body: Map<String, Value> =
        serde_json::from_str(&read(&asked.file)?).with_context(|| format!("{file} is no JSON object"))?;
    let result = client.change(Method::POST, "/admin/v1/plugins/dry-run", Some(&trial(asked, body)?), None).await?;
    match show.json {
        true => show.one(&result),
        false => print!("{}", told(&result)),
    }
    Ok(())
}

/// Request to the admin API for a body and the options of the command.
fn trial(asked: &DryRun, mut body: Map<String, Value>) -> anyhow::Result<Value> {
    if let Some(model) = &asked.model {
        if ["/models/", "/model/"].iter().any(|part| asked.path.contains(part)) {
            bail!("{}: this path names the model itself; --model is for a body that does", asked.path);
        }
        body.insert("model".to_owned(), model.clone().into());
    }
    let mut headers = Map::new();
    for field in &asked.headers {
        let (name, value) = field.split_once(':').with_context(|| format!("{field}: write NAME: VALUE"))?;
        headers.insert(name.trim().to_owned(), value.trim().into());
    }
    Ok(json!({ "path": asked.path, "headers": headers, "body": body, "key": asked.key }))
}

/// Result of a dry run as text: facts of the request, a table of the plugins, the edits of each, and the end.
fn told(result: &Value) -> String {
    let mut out = String::new();
    for name in ["route", "model", "stream", "key", "team", "user"] {
        let _ = writeln!(out, "{name:<10}{}", value(result, name));
    }
    let steps: &[Value] = result["steps"].as_array().map_or(&[], Vec::as_slice);
    if steps.is_empty() {
        out += "\nno plugins\n";
    } else {
        let _ = write!(out, "\n{}", table(&steps.iter().map(row).collect::<Vec<_>>(), STEPS));
    }
    steps.iter().for_each(|step| details(&mut out, step));
    let end = match result["end"].as_str() {
        Some("passed") => format!("the request goes on to the model {}", value(result, "request.model")),
        Some("answered") => "a plugin answers, and no model is asked".to_owned(),
        _ => refusal(&result["refusal"]),
    };
    let _ = writeln!(out, "\n{end}");
    out
}

/// Row of a plugin in the table.
fn row(step: &Value) -> Value {
    let mut row = step.clone();
    let count = step["changes"].as_array().map_or(0, Vec::len) as u64;
    row["edits"] = (count + step["changes_left_out"].as_u64().unwrap_or(0)).into();
    row["ms"] = format!("{:.2}", 1e3 * step["seconds"].as_f64().unwrap_or(0.0)).into();
    row
}

/// Edits, reason and refusal of one plugin, if it has any.
fn details(out: &mut String, step: &Value) {
    let edits = step["changes"].as_array().map_or(&[][..], Vec::as_slice);
    let has_refusal = step["refusal"].is_object();
    if edits.is_empty() && step["why"].is_null() && !has_refusal {
        return;
    }
    let _ = writeln!(out, "\n{}:", value(step, "plugin"));
    if let Some(why) = step["why"].as_str() {
        let _ = writeln!(out, "  {}", harmless(why));
    }
    for edit in edits {
        let place = match edit["name"].as_str() {
            None | Some("") => value(edit, "part").replace('_', " "),
            Some(name) => format!("{} {}", value(edit, "part").replace('_', " "), harmless(name)),
        };
        let _ = writeln!(out, "  {place}: {} -> {}", side(&edit["before"]), side(&edit["after"]));
    }
    if let Some(count) = step["changes_left_out"].as_u64().filter(|count| *count > 0) {
        let _ = writeln!(out, "  … and {count} more edits");
    }
    if has_refusal {
        let _ = writeln!(out, "  {}", refusal(&step["refusal"]));
    }
}

/// Value of one side of an edit, cut to a line.
fn side(value: &Value) -> String {
    let Some(text) = value.as_str() else { return "(none)".to_owned() };
    let text = harmless(text);
    match text.char_indices().nth(VALUE_CHARS_MAX) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

/// Error that the client would get.
fn refusal(refusal: &Value) -> String {
    format!("the client gets {}: {}", value(refusal, "status"), value(refusal, "body"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(path: &str, model: Option<&str>, headers: &[&str]) -> DryRun {
        DryRun {
            file: "-".into(),
            path: path.to_owned(),
            model: model.map(str::to_owned),
            key: Some("search".to_owned()),
            headers: headers.iter().map(|field| (*field).to_owned()).collect(),
        }
    }

    fn body() -> Map<String, Value> {
        [("model".to_owned(), "a".into())].into_iter().collect()
    }

    #[test]
    fn options_become_the_request_to_the_api() {
        let made = trial(&asked("/v1/messages", Some("b"), &["x-team: blue:1", "x-b:c"]), body()).expect("valid");
        let headers = json!({ "x-team": "blue:1", "x-b": "c" });
        assert_eq!(
            made,
            json!({ "path": "/v1/messages", "headers": headers, "body": { "model": "b" }, "key": "search" })
        );
        assert!(trial(&asked("/v1/messages", None, &["x-team"]), body()).is_err());
        assert!(trial(&asked("/v1beta/models/m:generateContent", Some("b"), &[]), body()).is_err());
    }

    #[test]
    fn a_result_is_told_plugin_by_plugin() {
        let step = |plugin: &str, outcome: &str, more: Value| {
            let mut step = json!({
                "plugin": plugin, "name": plugin, "outcome": outcome, "seconds": 0.0015, "waits_seconds": 0.0, "sees_answer": false,
                "changes": [], "changes_left_out": 0,
            });
            more.as_object().into_iter().flatten().for_each(|(name, value)| step[name] = value.clone());
            step
        };
        let edits = json!([
            { "part": "upstream_header", "name": "x-team", "before": null, "after": "red" },
            { "part": "body", "name": "/seed", "before": "7", "after": null },
        ]);
        let steps = [
            step("headers", "changed", json!({ "changes": edits, "changes_left_out": 3 })),
            step("hook", "not_run", json!({ "why": "it would call\u{1b}[2J its service" })),
            step("guard", "refused", json!({ "refusal": { "status": 400, "body": "{\"error\":1}" } })),
            step("tags", "not_reached", json!({})),
        ];
        let result = json!({
            "route": "/v1/chat/completions", "model": "chat", "stream": false, "key": "search", "team": null, "user": null,
            "steps": steps, "end": "refused", "refusal": { "status": 400, "body": "{\"error\":1}" }, "request": { "model": "chat" },
        });
        let want = "\
route     /v1/chat/completions
model     chat
stream    no
key       search
team      -
user      -

plugin   kind     outcome      edits  ms    waits s  sees answer
headers  headers  changed      5      1.50  0.0      no
hook     hook     not_run      0      1.50  0.0      no
guard    guard    refused      0      1.50  0.0      no
tags     tags     not_reached  0      1.50  0.0      no

headers:
  upstream header x-team: (none) -> red
  body /seed: 7 -> (none)
  … and 3 more edits

hook:
  it would call\u{fffd}[2J its service

guard:
  the client gets 400: {\"error\":1}

the client gets 400: {\"error\":1}
";
        assert_eq!(told(&result), want);
        let passed = json!({ "steps": [], "end": "passed", "request": { "model": "other" } });
        assert!(
            told(&passed).ends_with("\nno plugins\n\nthe request goes on to the model other\n"),
            "{}",
            told(&passed)
        );
    }

    #[test]
    fn a_long_value_is_cut_to_a_line() {
        assert_eq!(side(&"é".repeat(300).into()).chars().count(), VALUE_CHARS_MAX + 1);
        assert_eq!(side(&"a\nb".into()), "a\u{fffd}b");
    }
}
