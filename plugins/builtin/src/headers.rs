//! Plugin `headers`: sets and removes header fields of requests to providers, and of answers to clients.
//!
//! Framing, content type and credentials are out of its reach ([`crate::fields`]). Error replies do not pass through
//! it.

use std::sync::Arc;

use async_trait::async_trait;
use http::{HeaderName, HeaderValue};
use penstock_plugins::{
    AnswerHead, Hooks, Kind, Plugin, PluginError, Rejection, RequestContext, Sees, Settings, Verdict,
};

use crate::fields;

/// Plugin kind `headers`: builds plugins that set and remove header fields.
pub(crate) struct Headers;

#[derive(Debug, Default)]
struct Edits {
    set: Vec<(HeaderName, HeaderValue)>,
    remove: Vec<HeaderName>,
}

impl Edits {
    fn read(settings: &Settings<'_>) -> Self {
        Self { set: fields::to_set(settings, "set"), remove: fields::to_remove(settings, "remove") }
    }

    fn is_empty(&self) -> bool {
        self.set.is_empty() && self.remove.is_empty()
    }
}

struct Rules {
    request: Edits,
    response: Edits,
}

impl Kind for Headers {
    fn name(&self) -> &'static str {
        "headers"
    }

    fn build(&self, settings: &Settings<'_>) -> Option<Arc<dyn Plugin>> {
        let request = Edits::read(&settings.table("request"));
        let response = Edits::read(&settings.table("response"));
        Some(Arc::new(Edited(Arc::new(Rules { request, response }))))
    }
}

struct Edited(Arc<Rules>);

impl Plugin for Edited {
    fn can_dry_run(&self) -> bool {
        true
    }

    fn begin(&self) -> Box<dyn Hooks> {
        Box::new(Editing(self.0.clone()))
    }
}

struct Editing(Arc<Rules>);

#[async_trait]
impl Hooks for Editing {
    async fn on_request(&mut self, request: &mut RequestContext) -> Result<Verdict, PluginError> {
        let Edits { set, remove } = &self.0.request;
        for name in remove {
            request.headers.remove(name);
            request.send.retain(|(have, _)| have != name);
        }
        for (name, value) in set {
            request.headers.insert(name.clone(), value.clone());
            request.send.retain(|(have, _)| have != name);
            request.send.push((name.clone(), value.clone()));
        }
        Ok(Verdict::Pass)
    }

    fn sees(&self) -> Sees {
        if self.0.response.is_empty() { Sees::Nothing } else { Sees::Head }
    }

    fn on_head(&mut self, head: &mut AnswerHead) -> Result<Option<Rejection>, PluginError> {
        let Edits { set, remove } = &self.0.response;
        remove.iter().for_each(|name| head.remove(name));
        set.iter().for_each(|(name, value)| head.set(name.clone(), value.clone()));
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use penstock_plugins::testing::{FakeHost, build, now, request};
    use penstock_types::Surface;
    use serde_json::json;

    use super::*;

    fn shown(fields: &[(HeaderName, HeaderValue)]) -> Vec<String> {
        fields.iter().map(|(name, value)| format!("{name}: {}", value.to_str().expect("text"))).collect()
    }

    #[test]
    fn fields_are_set_and_removed_both_ways() {
        let settings = json!({
            "request": { "set": { "x-team": "search" }, "remove": ["anthropic-beta"] },
            "response": { "set": { "x-served": "here" }, "remove": ["x-upstream-request-id"] },
        });
        let plugin = build(&Headers, &settings).expect("valid");
        let body = json!({ "model": "m", "messages": [{ "role": "user", "content": "hi" }] });
        let mut context = request(Surface::Chat, &body, Arc::new(FakeHost::default()));
        context.headers.insert("anthropic-beta", HeaderValue::from_static("x"));
        context.send.push((HeaderName::from_static("x-team"), HeaderValue::from_static("old")));
        let mut hooks = plugin.begin();
        assert!(matches!(now(hooks.on_request(&mut context)), Ok(Verdict::Pass)));
        assert_eq!(shown(&context.send), ["x-team: search"]);
        assert!(context.headers.get("anthropic-beta").is_none());
        assert_eq!(hooks.sees(), Sees::Head);
        let mut head = AnswerHead::default();
        head.set(HeaderName::from_static("x-upstream-request-id"), HeaderValue::from_static("7"));
        hooks.on_head(&mut head).expect("no failure");
        assert_eq!(shown(&head.headers), ["x-served: here"]);
    }

    #[test]
    fn an_answer_costs_nothing_where_only_requests_are_edited() {
        let plugin = build(&Headers, &json!({ "request": { "set": { "x-team": "a" } } })).expect("valid");
        assert_eq!(plugin.begin().sees(), Sees::Nothing);
    }

    #[test]
    fn framing_and_credentials_are_not_its_to_touch() {
        let settings =
            json!({ "request": { "set": { "Host": "x" } }, "response": { "remove": ["x", "content-length"] } });
        let faults = build(&Headers, &settings).err().expect("refused");
        let paths: Vec<_> = faults.iter().map(|fault| fault.path.as_str()).collect();
        assert_eq!(paths, ["request.set.host", "response.remove[1]"]);
    }
}
