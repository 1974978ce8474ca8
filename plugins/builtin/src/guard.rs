//! Plugin `guard`: looks for words and patterns in prompts and answers, and refuses, masks, or notes them.
//!
//! A prompt with a blocked text is refused (400, `content_policy_violation`) before any model is asked. An answer ends
//! in front of a blocked text, with the finish reason `content_filter`, or breaks with an error (`on_answer =
//! "error"`). Of a stream the last `window` bytes are held back for that, so that no part of the text goes out. The log
//! names the rule, never the text.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use penstock_plugins::text::{self, Form, Writer};
use penstock_plugins::{
    Flow, Hooks, Kind, Needs, Plugin, PluginError, Rejection, RejectionKind, RequestContext, Sees, Settings, Verdict,
};
use penstock_types::{ChatEvent, FinishReason};

use crate::lanes::{Lane, Lanes};
use crate::scan::{Action, Finder, Found, Rule, Rules, Scanner, finder, replaced};

/// Plugin kind `guard`: builds plugins that look for words and patterns in texts.
pub(crate) struct Guard;

/// Default window: the longest match of a pattern that is sure to be found in an answer.
const WINDOW: u64 = 64;

struct Config {
    prompt: Arc<Rules>,
    answer: Arc<Rules>,
    writers: Vec<Writer>,
    message: String,
    stop: bool,
}

const ACTIONS: &[(&str, Action)] = &[("block", Action::Block), ("mask", Action::Mask), ("note", Action::Note)];

impl Kind for Guard {
    fn name(&self) -> &'static str {
        "guard"
    }

    fn build(&self, settings: &Settings<'_>) -> Option<Arc<dyn Plugin>> {
        let window = settings.number("window", 1..=65_536, WINDOW) as usize;
        let (mut prompt, mut answer) = (Vec::new(), Vec::new());
        let tables = settings.tables("rules");
        if tables.is_empty() {
            settings.fault("rules", "needs at least one rule");
        }
        for (at, table) in tables.iter().enumerate() {
            let Some((rule, on_prompt, on_answer)) = rule(table, at) else { continue };
            prompt.extend(on_prompt.then(|| rule.clone()));
            answer.extend((on_answer && rule.action != Action::Note).then_some(rule));
        }
        let longest = answer.iter().filter_map(|rule| match &rule.finder {
            Finder::Words(words, _) => Some(words.max_pattern_len()),
            Finder::Pattern(..) => None,
        });
        let patterns = answer.iter().any(|rule| matches!(rule.finder, Finder::Pattern(..)));
        // Words say themselves how long they are.
        let window = longest.max().unwrap_or(0).max(if patterns { window } else { 1 });
        let config = Config {
            prompt: Arc::new(Rules { rules: prompt, window: usize::MAX / 2 }),
            answer: Arc::new(Rules { rules: answer, window }),
            writers: crate::writers(settings),
            message: settings.text("message").unwrap_or_else(|| "This is against the rules of this service.".into()),
            stop: settings.word("on_answer", &[("stop", true), ("error", false)]),
        };
        Some(Arc::new(Guarded(Arc::new(config))))
    }
}

fn rule(table: &Settings<'_>, at: usize) -> Option<(Rule, bool, bool)> {
    let name = table.text("name").unwrap_or_else(|| format!("rules[{at}]"));
    let action = table.word("action", ACTIONS);
    let (prompt, answer) =
        table.word("on", &[("both", (true, true)), ("prompt", (true, false)), ("answer", (false, true))]);
    if action == Action::Note && !prompt {
        table.fault("action", "note is for prompts: what was in them is noted in the access log");
    }
    let mask = table.text("mask").unwrap_or_else(|| "[removed]".into());
    Some((Rule { name, finder: finder(table)?, action, mask }, prompt, answer))
}

struct Guarded(Arc<Config>);

impl Plugin for Guarded {
    fn needs(&self) -> Needs {
        if self.0.prompt.rules.is_empty() { Needs::Facts } else { Needs::Request }
    }

    fn can_dry_run(&self) -> bool {
        true
    }

    fn begin(&self) -> Box<dyn Hooks> {
        Box::new(Guarding {
            config: self.0.clone(),
            lanes: Lanes::default(),
            hits: Arc::default(),
            noted: BTreeSet::new(),
        })
    }
}

struct Guarding {
    config: Arc<Config>,
    lanes: Lanes<Scanner>,
    hits: Arc<Mutex<Vec<usize>>>,
    noted: BTreeSet<String>,
}

impl Guarding {
    fn refusal(&self, rule: &str) -> Rejection {
        Rejection::new(RejectionKind::Content, self.config.message.clone()).log(format!("rule {rule}"))
    }

    /// Masks the texts of a prompt; the inner error is the name of a rule that blocks it.
    fn prompt(&mut self, request: &mut RequestContext) -> Result<Result<(), String>, PluginError> {
        let config = self.config.clone();
        let rules = &config.prompt;
        let (mut blocked, mut masks, mut named) = (None, 0_usize, 0_usize);
        let noted = &mut self.noted;
        text::each(request.request()?, &mut |writer, text| {
            if !config.writers.contains(&writer) || blocked.is_some() {
                return;
            }
            for found in rules.all(text) {
                let rule = &rules.rules[found.rule];
                noted.insert(rule.name.clone());
                masks += usize::from(rule.action == Action::Mask);
                if rule.action == Action::Block {
                    blocked = Some(rule.name.clone());
                }
            }
        });
        if let Some(rule) = blocked {
            return Ok(Err(rule));
        }
        if masks > 0 {
            text::names(request.request()?, &mut |writer, name| {
                if config.writers.contains(&writer) {
                    named += rules.all(name).iter().filter(|found| is_masked(rules, found)).count();
                }
            });
        }
        // Names stay as they are, and an edit that changes nothing would cost the request what is not understood of it.
        if masks > named {
            text::change(request.edit()?, &mut |writer, form, text| {
                if config.writers.contains(&writer) {
                    mask(rules, form, text);
                }
            });
        }
        Ok(Ok(()))
    }
}

fn is_masked(rules: &Rules, found: &Found) -> bool {
    rules.rules[found.rule].action == Action::Mask
}

/// Replaces the matches of rules that mask.
fn mask(rules: &Rules, form: Form, text: &mut String) {
    let all: Vec<_> = rules.all(text).into_iter().filter(|found| is_masked(rules, found)).collect();
    if all.is_empty() {
        return;
    }
    *text = replaced(text, &all, |found, out| {
        let mask = &rules.rules[found.rule].mask;
        match form {
            Form::Json => out.push_str(&crate::json_inner(mask)),
            Form::Plain => out.push_str(mask),
        }
    });
}

#[async_trait]
impl Hooks for Guarding {
    async fn on_request(&mut self, request: &mut RequestContext) -> Result<Verdict, PluginError> {
        if self.config.prompt.rules.is_empty() {
            return Ok(Verdict::Pass);
        }
        let checked = self.prompt(request)?;
        for rule in &self.noted {
            request.tags.push(("guard".into(), rule.clone()));
        }
        Ok(match checked {
            Ok(()) => Verdict::Pass,
            Err(rule) => Verdict::Reject(self.refusal(&rule)),
        })
    }

    fn sees(&self) -> Sees {
        if self.config.answer.rules.is_empty() { Sees::Nothing } else { Sees::Events }
    }

    fn on_event(&mut self, events: &mut Vec<ChatEvent>, end: bool) -> Result<Flow, PluginError> {
        let (rules, hits) = (self.config.answer.clone(), self.hits.clone());
        let make = move |_: Lane| Scanner::new(rules.clone(), hits.clone());
        if self.lanes.rewrite(events, end, &make) {
            return Ok(Flow::Go);
        }
        if self.config.stop {
            return Ok(Flow::Stop(FinishReason::ContentFilter));
        }
        // An answer that breaks ends at once, without the events that came before.
        events.clear();
        let hits = self.hits.lock().unwrap_or_else(PoisonError::into_inner);
        let rule = hits.last().map_or("", |rule| &self.config.answer.rules[*rule].name);
        Ok(Flow::Reject(self.refusal(rule)))
    }

    fn release(&mut self, out: &mut Vec<ChatEvent>) {
        self.lanes.release(out);
    }

    fn held_bytes(&self) -> usize {
        self.lanes.held_bytes()
    }
}

#[cfg(test)]
mod tests {
    use penstock_plugins::testing::{FakeHost, build, now, request};
    use penstock_types::{Request, Surface};
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::{Streamed, streamed};

    fn asked(settings: &Value, prompt: &str) -> (Result<Verdict, PluginError>, RequestContext) {
        let plugin = build(&Guard, settings).expect("valid");
        let body = json!({ "model": "m", "messages": [
            { "role": "system", "content": "be a bomb expert" }, { "role": "user", "content": prompt },
        ] });
        let mut context = request(Surface::Chat, &body, Arc::new(FakeHost::default()));
        let verdict = now(plugin.begin().on_request(&mut context));
        (verdict, context)
    }

    fn settings() -> Value {
        json!({ "writers": ["user"], "rules": [
            { "name": "weapons", "words": ["bomb", "gun"] },
            { "name": "codename", "pattern": "(?i)project [a-z]+", "action": "mask", "mask": "the project" },
            { "name": "law", "words": ["lawyer"], "action": "note", "on": "prompt" },
        ] })
    }

    #[test]
    fn a_prompt_is_refused_masked_or_noted() {
        let (verdict, _) = asked(&settings(), "How do I build a BOMB?");
        let Ok(Verdict::Reject(refused)) = verdict else { panic!("{verdict:?}") };
        assert_eq!((refused.kind, refused.log.as_deref()), (RejectionKind::Content, Some("rule weapons")));
        assert!(!refused.message.to_lowercase().contains("bomb"));
        let (verdict, mut context) = asked(&settings(), "my lawyer on Project Zeus, bombastic");
        assert!(matches!(verdict, Ok(Verdict::Pass)));
        let mut user = String::new();
        text::each(context.request().expect("read"), &mut |writer, text| {
            if writer == Writer::User {
                user.push_str(text);
            }
        });
        assert_eq!(user, "my lawyer on the project, bombastic");
        let tags = [("guard".to_owned(), "codename".to_owned()), ("guard".to_owned(), "law".to_owned())];
        assert_eq!(context.tags, tags);
        assert!(context.edit().is_ok());
    }

    fn asked_with(settings: &Value, extra: &Value) -> (Result<Verdict, PluginError>, RequestContext) {
        let mut body = json!({ "model": "m", "messages": [{ "role": "user", "content": "hi" }] });
        body.as_object_mut().expect("a table").extend(extra.as_object().expect("a table").clone());
        let mut context = request(Surface::Chat, &body, Arc::new(FakeHost::default()));
        let verdict = now(build(&Guard, settings).expect("valid").begin().on_request(&mut context));
        (verdict, context)
    }

    #[test]
    fn tools_schemas_and_names_are_part_of_a_prompt() {
        let all = json!({ "rules": settings()["rules"].clone() });
        let tool = |function: Value| json!({ "tools": [{ "type": "function", "function": function }] });
        let schema = json!({ "type": "object", "properties": { "a": { "description": "how to build a bomb" } } });
        let format = json!({ "type": "json_schema", "json_schema": { "name": "n", "schema": schema } });
        for extra in [
            tool(json!({ "name": "f", "description": "builds a bomb" })),
            tool(json!({ "name": "f", "parameters": schema })),
            tool(json!({ "name": "f", "parameters": { "properties": { "bomb": {} } } })),
            tool(json!({ "name": "bomb" })),
            json!({ "response_format": format }),
            json!({ "chat_template_kwargs": { "topic": "a bomb" } }),
            json!({ "messages": [{ "role": "user", "name": "bomb", "content": "hi" }] }),
        ] {
            assert!(matches!(asked_with(&all, &extra).0, Ok(Verdict::Reject(_))), "{extra}");
        }
        let masked =
            tool(json!({ "name": "f", "description": "of project zeus", "parameters": { "default": "a project x" } }));
        let (verdict, context) = asked_with(&all, &masked);
        assert!(matches!(verdict, Ok(Verdict::Pass)));
        let Request::Chat(chat) = context.request().expect("read") else { panic!("a chat") };
        assert_eq!(chat.tools[0].description.as_deref(), Some("of the project"));
        assert_eq!(chat.tools[0].parameters.as_deref(), Some(r#"{"default":"a the project"}"#));
    }

    #[test]
    fn a_request_with_nothing_to_mask_but_names_is_not_edited() {
        let all = json!({ "rules": settings()["rules"].clone() });
        let tool = |name: &str, description: &str| {
            let schema =
                json!({ "properties": { "project x": { "pattern": "project y" } }, "required": ["project x"] });
            let function = json!({ "name": name, "description": description, "parameters": schema });
            json!({ "tools": [{ "type": "function", "function": function }] })
        };
        for (description, is_edited) in [("of us", false), ("of project zeus", true)] {
            let (verdict, context) = asked_with(&all, &tool("project zeus", description));
            assert!(matches!(verdict, Ok(Verdict::Pass)), "{verdict:?}");
            assert!(context.tags.iter().any(|(_, rule)| rule == "codename"), "it is noted");
            assert_eq!(context.into_parts().request.is_some(), is_edited, "{description}");
        }
    }

    #[test]
    fn masks_cost_one_pass_however_many_there_are() {
        // Moved once for each match, these bytes would be 200 GB.
        let (verdict, context) = asked(&settings(), &"project x ".repeat(200_000));
        assert!(matches!(verdict, Ok(Verdict::Pass)));
        let Request::Chat(chat) = context.request().expect("read") else { panic!("a chat") };
        assert_eq!(chat.messages[1].content.as_deref(), Some("the project ".repeat(200_000).as_str()));
    }

    fn answered(settings: &Value, pieces: &[&str]) -> Streamed {
        streamed(build(&Guard, settings).expect("valid").begin(), pieces)
    }

    #[test]
    fn an_answer_ends_in_front_of_what_is_blocked() {
        for pieces in
            [&["take a bo", "mb and ", "run"][..], &["take a bomb and run"], &["take a b", "o", "m", "b", " and run"]]
        {
            let got = answered(&settings(), pieces);
            assert_eq!((got.text.as_str(), got.flow.as_str()), ("take a ", "Stop(ContentFilter)"), "{pieces:?}");
        }
        let got = answered(&settings(), &["bombastic Proj", "ect ze", "us."]);
        assert_eq!((got.text.as_str(), got.flow.as_str()), ("bombastic the project.", "Go"));
        let mut strict = settings();
        strict["on_answer"] = json!("error");
        assert!(answered(&strict, &["a bomb"]).flow.starts_with("Reject"));
    }

    #[test]
    fn faults_are_named() {
        let settings =
            json!({ "writers": ["usr"], "rules": [{ "pattern": "(" }, { "words": ["a"], "pattern": "b" }, {}] });
        let faults = build(&Guard, &settings).err().expect("faults");
        let paths: Vec<_> = faults.iter().map(|fault| fault.path.as_str()).collect();
        assert_eq!(paths, ["rules[0].pattern", "rules[1]", "rules[2]", "writers[0]"]);
    }
}
