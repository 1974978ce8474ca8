//! Plugin `tags`: tags on requests, for the access log and the ledger: fixed ones, and those that clients send in
//! header fields or in the body.

use std::sync::Arc;

use async_trait::async_trait;
use http::HeaderName;
use penstock_plugins::{Hooks, Kind, Needs, Plugin, PluginError, RequestContext, Settings, Verdict};
use serde_json::Value;

/// Plugin kind `tags`: builds plugins that tag requests for access log and ledger.
pub(crate) struct Tags;

/// Longest value from a client, in characters; the rest is cut off.
const VALUE_CHARS_MAX: usize = 128;

struct Config {
    set: Vec<(String, String)>,
    headers: Vec<(String, HeaderName)>,
    /// Names, and pointers into the body (RFC 6901).
    body: Vec<(String, String)>,
}

impl Kind for Tags {
    fn name(&self) -> &'static str {
        "tags"
    }

    fn build(&self, settings: &Settings<'_>) -> Option<Arc<dyn Plugin>> {
        let header = |(name, text): (String, String)| {
            let field = HeaderName::try_from(&text);
            field
                .map_err(|_| settings.fault(&format!("headers.{name}"), "is no name of a header field"))
                .ok()
                .map(|field| (name, field))
        };
        let headers = settings.text_map("headers").into_iter().filter_map(header).collect();
        let pointer = |(name, path): (String, String)| (name, format!("/{}", path.replace('.', "/")));
        let body = settings.text_map("body").into_iter().map(pointer).collect();
        Some(Arc::new(Tagged(Arc::new(Config { set: settings.text_map("set"), headers, body }))))
    }
}

struct Tagged(Arc<Config>);

impl Plugin for Tagged {
    fn needs(&self) -> Needs {
        if self.0.body.is_empty() { Needs::Facts } else { Needs::Body }
    }

    fn can_dry_run(&self) -> bool {
        true
    }

    fn begin(&self) -> Box<dyn Hooks> {
        Box::new(Tagging(self.0.clone()))
    }
}

struct Tagging(Arc<Config>);

#[async_trait]
impl Hooks for Tagging {
    async fn on_request(&mut self, request: &mut RequestContext) -> Result<Verdict, PluginError> {
        request.tags.extend(self.0.set.iter().cloned());
        for (name, field) in &self.0.headers {
            let value = request.headers.get(field).and_then(|value| value.to_str().ok()).map(short);
            request.tags.extend(value.map(|value| (name.clone(), value)));
        }
        if self.0.body.is_empty() {
            return Ok(Verdict::Pass);
        }
        let read: Result<Value, _> = serde_json::from_slice(request.body()?);
        let body = read.map_err(|_| PluginError::new("the body is no JSON"))?;
        for (name, pointer) in &self.0.body {
            let value = match body.pointer(pointer) {
                Some(Value::String(text)) => short(text),
                Some(other @ (Value::Number(_) | Value::Bool(_))) => other.to_string(),
                _ => continue,
            };
            request.tags.push((name.clone(), value));
        }
        Ok(Verdict::Pass)
    }
}

fn short(text: &str) -> String {
    text.chars().filter(|char| !char.is_control()).take(VALUE_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use penstock_plugins::testing::{FakeHost, build, now, request};
    use penstock_types::Surface;
    use serde_json::json;

    use super::*;

    #[test]
    fn tags_come_from_everywhere() {
        let settings = json!({
            "set": { "env": "prod" }, "headers": { "team": "X-Team" }, "body": { "project": "metadata.project", "no": "metadata" },
        });
        let plugin = build(&Tags, &settings).expect("valid");
        let long = "p".repeat(500);
        let body = json!({
            "model": "m", "messages": [{ "role": "user", "content": "hi" }], "metadata": { "project": long },
        });
        let mut context = request(Surface::Chat, &body, Arc::new(FakeHost::default()));
        context.headers.insert("x-team", HeaderValue::from_static("search"));
        assert!(now(plugin.begin().on_request(&mut context)).is_ok());
        let tags: Vec<_> = context.tags.iter().map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!(tags, ["env=prod".to_owned(), "team=search".into(), format!("project={}", &long[..128])]);
    }
}
