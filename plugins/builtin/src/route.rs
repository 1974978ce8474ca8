//! Plugin `route_by_rule`: chooses another model than the one that was asked for: by words, length, tools, images,
//! header fields, key, team, or at random.
//!
//! The first rule whose conditions all hold decides; without one the request keeps its model. The client is answered
//! under the name that it used. The caller need be allowed only one of the two models: the choice is the config's.

use std::sync::Arc;

use async_trait::async_trait;
use http::HeaderName;
use penstock_plugins::text::{self, Writer};
use penstock_plugins::{Hooks, Kind, Needs, Plugin, PluginError, RequestContext, Settings, Verdict};
use penstock_types::{Part, Request};
use regex::Regex;

use crate::scan::{Action, Rule as Looked, Rules};

/// Plugin kind `route_by_rule`: builds plugins that choose another model by rules.
pub(crate) struct RouteByRule;

struct Rule {
    model: String,
    /// Words to find, and whether every text is searched (true) or only the last message of the person.
    says: Option<(Rules, bool)>,
    chars: (u64, u64),
    tools: Option<bool>,
    images: Option<bool>,
    headers: Vec<(HeaderName, Regex)>,
    keys: Vec<String>,
    teams: Vec<String>,
    percent: Option<f64>,
}

impl Kind for RouteByRule {
    fn name(&self) -> &'static str {
        "route_by_rule"
    }

    fn build(&self, settings: &Settings<'_>) -> Option<Arc<dyn Plugin>> {
        let tables = settings.tables("rules");
        if tables.is_empty() {
            settings.fault("rules", "needs at least one rule");
        }
        let rules: Vec<_> = tables.iter().filter_map(rule).collect();
        Some(Arc::new(Routed(Arc::new(rules))))
    }
}

fn rule(table: &Settings<'_>) -> Option<Rule> {
    let anywhere = table.word("in", &[("last", false), ("all", true)]);
    let looks = table.has("words") || table.has("pattern");
    let says = looks.then(|| crate::scan::finder(table)).flatten().map(|finder| {
        let rule = Looked { name: String::new(), finder, action: Action::Note, mask: String::new() };
        (Rules { rules: vec![rule], window: usize::MAX / 2 }, anywhere)
    });
    let header = |(name, pattern): (String, String)| {
        let read = HeaderName::try_from(&name).ok().zip(Regex::new(&format!("^(?:{pattern})$")).ok());
        if read.is_none() {
            table.fault(&format!("headers.{name}"), "is no header field, or no pattern");
        }
        read
    };
    let headers = table.text_map("headers").into_iter().filter_map(header).collect();
    let flag = |name: &str| table.has(name).then(|| table.flag(name, true));
    let chars =
        (table.number("chars_min", 0..=u64::MAX >> 1, 0), table.number("chars_max", 0..=u64::MAX >> 1, u64::MAX >> 1));
    let (tools, images) = (flag("tools"), flag("images"));
    let percent = table.has("percent").then(|| table.decimal("percent", 0.0..=100.0, 0.0));
    let (keys, teams) = (table.texts("keys"), table.texts("teams"));
    Some(Rule { model: table.needed_text("model")?, says, chars, tools, images, headers, keys, teams, percent })
}

struct Routed(Arc<Vec<Rule>>);

impl Rule {
    fn reads(&self) -> bool {
        self.says.is_some() || self.chars != (0, u64::MAX >> 1) || self.tools.is_some() || self.images.is_some()
    }

    /// Returns true if the conditions hold that need no decoded request.
    fn fits(&self, request: &RequestContext) -> bool {
        let named =
            |rules: &[String], name: Option<&String>| rules.is_empty() || name.is_some_and(|name| rules.contains(name));
        let header = |(name, pattern): &(HeaderName, Regex)| {
            request.headers.get_all(name).iter().any(|value| value.to_str().is_ok_and(|value| pattern.is_match(value)))
        };
        named(&self.keys, request.info.key.as_ref())
            && named(&self.teams, request.info.team.as_ref())
            && self.headers.iter().all(header)
    }

    fn holds(&self, request: &Request) -> bool {
        let (mut chars, mut last, mut found) = (0, String::new(), false);
        text::said(request, &mut |writer, text| {
            chars += text.chars().count() as u64;
            match &self.says {
                Some((rules, true)) => found |= !rules.all(text).is_empty(),
                Some((_, false)) if writer == Writer::User => text.clone_into(&mut last),
                _ => {}
            }
        });
        if let Some((rules, false)) = &self.says {
            found = !rules.all(&last).is_empty();
        }
        let (tools, images) = match request {
            Request::Chat(chat) => {
                let image = |part: &Part| matches!(part, Part::Image { .. });
                (!chat.tools.is_empty(), chat.messages.iter().any(|message| message.parts.iter().any(image)))
            }
            _ => (false, false),
        };
        (self.says.is_none() || found)
            && (self.chars.0..=self.chars.1).contains(&chars)
            && self.tools.is_none_or(|wanted| wanted == tools)
            && self.images.is_none_or(|wanted| wanted == images)
    }
}

impl Plugin for Routed {
    fn needs(&self) -> Needs {
        if self.0.iter().any(Rule::reads) { Needs::Request } else { Needs::Facts }
    }

    fn can_dry_run(&self) -> bool {
        true
    }

    fn begin(&self) -> Box<dyn Hooks> {
        Box::new(Routing(self.0.clone()))
    }
}

struct Routing(Arc<Vec<Rule>>);

#[async_trait]
impl Hooks for Routing {
    async fn on_request(&mut self, request: &mut RequestContext) -> Result<Verdict, PluginError> {
        for rule in self.0.iter() {
            if !rule.fits(request) || (rule.reads() && !rule.holds(request.request()?)) {
                continue;
            }
            let drawn = (request.host.random() >> 11) as f64 / ((1u64 << 53) as f64) * 100.0;
            if rule.percent.is_none_or(|percent| drawn < percent) {
                request.model.clone_from(&rule.model);
                break;
            }
        }
        Ok(Verdict::Pass)
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use penstock_plugins::testing::{FakeHost, build, now, request};
    use penstock_types::Surface;
    use serde_json::{Value, json};

    use super::*;

    #[track_caller]
    #[expect(clippy::needless_pass_by_value, reason = "reads as data")]
    fn check(rule: Value, body: Value, expected: bool) {
        let mut settings = json!({ "rules": [rule] });
        settings["rules"][0]["model"] = json!("other");
        let plugin = build(&RouteByRule, &settings).expect("valid");
        let mut full = json!({ "model": "m", "messages": [{ "role": "user", "content": "hi" }] });
        full.as_object_mut().expect("a table").extend(body.as_object().expect("a table").clone());
        let host = FakeHost { randoms: vec![1 << 63].into(), ..FakeHost::default() };
        let mut context = request(Surface::Chat, &full, Arc::new(host));
        context.headers.insert("x-tier", HeaderValue::from_static("gold"));
        assert!(now(plugin.begin().on_request(&mut context)).is_ok());
        assert_eq!(context.model == "other", expected, "{settings} {full}");
    }

    fn said(texts: &[(&str, &str)]) -> Value {
        let messages: Vec<_> = texts.iter().map(|(role, text)| json!({ "role": role, "content": text })).collect();
        json!({ "messages": messages })
    }

    #[test]
    fn every_condition_must_hold() {
        let talk = said(&[("user", "write SQL"), ("assistant", "select"), ("user", "thanks")]);
        check(json!({ "words": ["sql"] }), talk.clone(), false);
        check(json!({ "words": ["sql"], "in": "all" }), talk.clone(), true);
        check(json!({ "pattern": "(?i)thank" }), talk.clone(), true);
        check(json!({ "chars_min": 22 }), talk.clone(), false);
        check(json!({ "chars_min": 21, "chars_max": 21 }), talk, true);
        let tools = json!({ "tools": [{ "type": "function", "function": { "name": "f" } }] });
        check(json!({ "tools": true }), tools.clone(), true);
        check(json!({ "tools": false }), tools, false);
        check(json!({ "headers": { "x-tier": "gold|silver" } }), json!({}), true);
        check(json!({ "headers": { "x-tier": "gol" } }), json!({}), false);
        check(json!({ "keys": ["a"] }), json!({}), false);
        check(json!({ "percent": 50.1 }), json!({}), true);
        check(json!({ "percent": 50 }), json!({}), false);
    }

    #[test]
    fn what_reads_nothing_needs_nothing() {
        let plugin =
            build(&RouteByRule, &json!({ "rules": [{ "model": "x", "headers": { "a": "b" } }] })).expect("valid");
        assert_eq!(plugin.needs(), Needs::Facts);
        assert!(build(&RouteByRule, &json!({ "rules": [{ "words": ["a"] }] })).is_err());
    }
}
