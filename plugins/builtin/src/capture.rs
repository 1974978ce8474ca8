//! Plugin `capture`: writes prompts and answers of the keys, models and routes that the config names into a file, one
//! JSON line per request.
//!
//! Nothing else in the gateway writes down people's texts. Personal data is taken out first, as far as it is found by
//! its form ([`crate::pii`]); `redact = false` keeps it. Texts are cut at a bound. A request without a model's answer
//! is written with the parts that exist.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use penstock_plugins::text::{self, Writer};
use penstock_plugins::{
    EndFacts, Flow, Hooks, Host, Kind, Needs, Plugin, PluginError, RequestContext, RequestInfo, Sees, Settings, Verdict,
};
use penstock_types::ChatEvent;
use serde_json::{Value, json};

use crate::pii;
use crate::scan::Rules;

/// Plugin kind `capture`: builds plugins that write prompts and answers into a file.
pub(crate) struct Capture;

/// Most choices of one request that are kept apart; the text of further ones is left out.
const CHOICES_MAX: usize = 16;

struct Config {
    path: String,
    prompt: bool,
    answer: bool,
    bytes_max: usize,
    redact: Option<Rules>,
}

impl Kind for Capture {
    fn name(&self) -> &'static str {
        "capture"
    }

    fn build(&self, settings: &Settings<'_>) -> Option<Arc<dyn Plugin>> {
        let path = settings.text("path");
        if path.is_none() {
            settings.fault("path", "is missing: the file that lines are appended to");
        }
        let (prompt, answer) = (settings.flag("prompt", true), settings.flag("answer", true));
        let bytes_max = settings.number("text_bytes_max", 1..=16 << 20, 65_536) as usize;
        let redact = settings.flag("redact", true).then(pii::everything);
        Some(Arc::new(Capturing(Arc::new(Config { path: path?, prompt, answer, bytes_max, redact }))))
    }
}

struct Capturing(Arc<Config>);

impl Plugin for Capturing {
    fn needs(&self) -> Needs {
        if self.0.prompt { Needs::Request } else { Needs::Facts }
    }

    fn can_dry_run(&self) -> bool {
        true
    }

    fn begin(&self) -> Box<dyn Hooks> {
        Box::new(Captured { config: self.0.clone(), asked: None, answers: BTreeMap::new() })
    }
}

/// Texts of one request's prompt and answer so far, for its line in the file.
struct Captured {
    config: Arc<Config>,
    asked: Option<Asked>,
    answers: BTreeMap<u32, Said>,
}

struct Asked {
    info: Arc<RequestInfo>,
    host: Arc<dyn Host>,
    texts: Vec<(Writer, String)>,
    tags: Vec<(String, String)>,
}

#[derive(Default)]
struct Said {
    text: String,
    reasoning: String,
    calls: Vec<(String, String)>,
}

impl Config {
    /// Text that is written: cut, then cleared of personal data.
    fn kept(&self, text: &str) -> String {
        let text = &text[..text.floor_char_boundary(self.bytes_max)];
        match &self.redact {
            Some(rules) => pii::redacted(rules, text),
            None => text.to_owned(),
        }
    }

    /// Appends within the bound. One byte more than the bound is held, so that a cut text is known to be cut.
    fn append(&self, to: &mut String, piece: &str) {
        let room = (self.bytes_max + 1).saturating_sub(to.len());
        to.push_str(&piece[..piece.floor_char_boundary(room)]);
    }
}

#[async_trait]
impl Hooks for Captured {
    async fn on_request(&mut self, request: &mut RequestContext) -> Result<Verdict, PluginError> {
        let (mut texts, mut room) = (Vec::new(), self.config.bytes_max);
        if self.config.prompt {
            text::said(request.request()?, &mut |writer, text| {
                let text = &text[..text.floor_char_boundary(room)];
                room -= text.len();
                if !text.is_empty() {
                    texts.push((writer, text.to_owned()));
                }
            });
        }
        let (info, host, tags) = (request.info.clone(), request.host.clone(), request.tags.clone());
        self.asked = Some(Asked { info, host, texts, tags });
        Ok(Verdict::Pass)
    }

    fn sees(&self) -> Sees {
        if self.config.answer { Sees::Events } else { Sees::End }
    }

    fn on_event(&mut self, events: &mut Vec<ChatEvent>, _end: bool) -> Result<Flow, PluginError> {
        let Self { config, answers, .. } = self;
        let mut said = |choice: &u32, piece: &dyn Fn(&mut Said)| {
            if answers.len() < CHOICES_MAX || answers.contains_key(choice) {
                piece(answers.entry(*choice).or_default());
            }
        };
        for event in events.iter() {
            match event {
                ChatEvent::Text { choice, text, .. } | ChatEvent::Refusal { choice, text } => {
                    said(choice, &|said| config.append(&mut said.text, text));
                }
                ChatEvent::Reasoning { choice, text } => {
                    said(choice, &|said| config.append(&mut said.reasoning, text));
                }
                ChatEvent::ToolCallStart { choice, name, .. } => {
                    said(choice, &|said| {
                        if said.calls.len() < CHOICES_MAX {
                            said.calls.push((name.clone(), String::new()));
                        }
                    });
                }
                ChatEvent::ToolCallArguments { choice, call, json } => {
                    said(choice, &|said| {
                        if let Some((_, arguments)) = said.calls.get_mut(*call as usize) {
                            config.append(arguments, json);
                        }
                    });
                }
                _ => {}
            }
        }
        Ok(Flow::Go)
    }

    fn held_bytes(&self) -> usize {
        // At most so many texts as the bounds of choices and calls allow.
        let calls = |said: &Said| said.calls.iter().map(|(name, json)| name.len() + json.len()).sum::<usize>();
        self.answers.values().map(|said| said.text.len() + said.reasoning.len() + calls(said)).sum()
    }

    fn on_end(&mut self, facts: &EndFacts) {
        let Some(Asked { info, host, texts, tags }) = self.asked.take() else { return };
        let config = &self.config;
        let mut line = json!({
            "time_ms": host.since_epoch().as_millis() as u64,
            "request_id": info.request_id,
            "route": info.route,
            "model": info.model,
            "key": info.key,
            "team": info.team,
            "user": info.user,
            "outcome": facts.outcome.name(),
        });
        if !tags.is_empty() {
            line["tags"] = tags.into_iter().map(|(name, value)| (name, Value::from(value))).collect();
        }
        if config.prompt {
            let texts = texts.iter().map(|(writer, text)| json!({ "by": name(*writer), "text": config.kept(text) }));
            line["prompt"] = texts.collect();
        }
        if config.answer {
            line["answer"] = self.answers.values().map(|said| told(config, said)).collect();
        }
        let mut bytes = line.to_string().into_bytes();
        bytes.push(b'\n');
        host.append(&config.path, bytes);
    }
}

fn told(config: &Config, said: &Said) -> Value {
    let mut out = json!({ "text": config.kept(&said.text) });
    if !said.reasoning.is_empty() {
        out["reasoning"] = config.kept(&said.reasoning).into();
    }
    if !said.calls.is_empty() {
        let calls = said.calls.iter();
        out["calls"] = calls.map(|(name, json)| json!({ "name": name, "arguments": config.kept(json) })).collect();
    }
    out
}

fn name(writer: Writer) -> &'static str {
    match writer {
        Writer::System => "system",
        Writer::User => "user",
        Writer::Assistant => "assistant",
        Writer::Tool => "tool",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use penstock_plugins::Outcome;
    use penstock_plugins::testing::{FakeHost, build, now, request};
    use penstock_types::{Surface, Usage};

    use super::*;

    fn say(choice: u32, text: &str) -> ChatEvent {
        ChatEvent::Text { choice, text: text.into(), logprobs: Vec::new(), tokens: Vec::new() }
    }

    /// Line that a request with this prompt and this answer leaves in the file, as JSON.
    fn line(settings: &Value, prompt: &str, events: &[ChatEvent]) -> Value {
        let host = Arc::new(FakeHost::default());
        let body = json!({ "model": "m", "messages": [{ "role": "user", "content": prompt }] });
        let mut context = request(Surface::Chat, &body, host.clone());
        let mut hooks = build(&Capture, settings).expect("valid").begin();
        assert!(now(hooks.on_request(&mut context)).is_ok());
        let mut seen = events.to_vec();
        hooks.on_event(&mut seen, true).expect("it only looks");
        assert_eq!(seen, events);
        let facts = EndFacts {
            outcome: Outcome::Complete,
            model: "m".into(),
            target: None,
            usage: Usage::default(),
            duration: Duration::ZERO,
        };
        hooks.on_end(&facts);
        let lines = host.appended.lock().expect("no panic");
        let [(path, line)] = lines.as_slice() else { panic!("one line: {lines:?}") };
        assert_eq!((path.as_str(), line.last()), ("/log/c", Some(&b'\n')));
        serde_json::from_slice(line).expect("JSON")
    }

    #[test]
    fn what_is_kept_has_no_personal_data_unless_asked_for() {
        // The address comes in two pieces.
        let events = || vec![say(0, "Write to ann@exa"), say(0, "mple.com"), say(1, "no")];
        let kept = line(&json!({ "path": "/log/c" }), "I am bob@example.com", &events());
        assert_eq!(kept["prompt"], json!([{ "by": "user", "text": "I am [EMAIL]" }]));
        assert_eq!(kept["answer"], json!([{ "text": "Write to [EMAIL]" }, { "text": "no" }]));
        assert_eq!((kept["outcome"].as_str(), kept["request_id"].as_str()), (Some("complete"), Some("req_test")));
        let plain = line(&json!({ "path": "/log/c", "redact": false }), "I am bob@example.com", &events());
        assert!(plain.to_string().contains("bob@example.com") && plain.to_string().contains("ann@example.com"));
    }

    #[test]
    fn texts_have_a_bound_and_parts_can_be_left_out() {
        let settings = json!({ "path": "/log/c", "text_bytes_max": 4, "redact": false });
        let kept = line(&settings, "aääz", &[say(0, "12"), say(0, "3456")]);
        assert_eq!(
            (kept["prompt"][0]["text"].as_str(), kept["answer"][0]["text"].as_str()),
            (Some("aä"), Some("1234"))
        );
        let kept = line(&json!({ "path": "/log/c", "prompt": false }), "secret", &[say(0, "x")]);
        assert!(kept.get("prompt").is_none() && !kept.to_string().contains("secret"));
        assert!(build(&Capture, &json!({})).is_err(), "a path is needed");
    }
}
