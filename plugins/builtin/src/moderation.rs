//! Plugin `moderation`: asks another model whether a prompt, or an answer, may pass.
//!
//! The judge is either `/v1/moderations` of a provider, or any chat model of this gateway with instructions and a
//! pattern of a refusal (Llama Guard and its like). An answer is held back until it has been judged as a whole: a
//! stream comes at once, behind its end.

use std::sync::Arc;

use async_trait::async_trait;
use penstock_plugins::text;
use penstock_plugins::{
    After, AskAs, Flow, Hooks, Host, Kind, Needs, Plugin, PluginError, Rejection, RejectionKind, RequestContext, Sees,
    Settings, Verdict,
};
use penstock_types::{ChatEvent, ChatRequest, Message, Role};
use regex::Regex;
use serde_json::{Value, json};

use crate::held::HeldBack;

/// Plugin kind `moderation`: builds plugins that have another model judge prompts and answers.
pub(crate) struct Moderation;

/// Default number of characters that are judged; of a longer text, the end.
const CHARS_MAX: u64 = 100_000;
/// Most text of an answer that is judged, in bytes.
const JUDGED_BYTES_MAX: usize = 16 << 20;
const INSTRUCTIONS: &str = "You judge whether a text is safe. Answer with the one word \"safe\" or \"unsafe\".";

struct Config {
    model: String,
    judge: Judge,
    ask_as: AskAs,
    prompts: bool,
    answers: bool,
    chars_max: usize,
    message: String,
}

enum Judge {
    /// Score per category from which on it is refused; without any the model's own flag counts.
    Moderations(Vec<(String, f64)>),
    /// Instructions, and the pattern of a refusal.
    Chat(String, Regex),
}

impl Kind for Moderation {
    fn name(&self) -> &'static str {
        "moderation"
    }

    fn build(&self, settings: &Settings<'_>) -> Option<Arc<dyn Plugin>> {
        let chat = settings.word("via", &[("moderations", false), ("chat", true)]);
        let judge = match chat {
            false => Judge::Moderations(scores(settings)),
            true => {
                let pattern = settings.text("unsafe").unwrap_or_else(|| "(?i)\\bunsafe\\b".into());
                let pattern = Regex::new(&pattern).map_err(|_| settings.fault("unsafe", "is no pattern")).ok();
                Judge::Chat(settings.text("instructions").unwrap_or_else(|| INSTRUCTIONS.into()), pattern?)
            }
        };
        let (prompts, answers) =
            settings.word("on", &[("prompt", (true, false)), ("answer", (false, true)), ("both", (true, true))]);
        let config = Config {
            judge,
            ask_as: crate::ask_as(settings),
            prompts,
            answers,
            chars_max: settings.number("chars_max", 1..=10_000_000, CHARS_MAX) as usize,
            message: settings.text("message").unwrap_or_else(|| "This is against the rules of this service.".into()),
            model: settings.needed_text("model")?,
        };
        Some(Arc::new(Moderated(Arc::new(config))))
    }
}

fn scores(settings: &Settings<'_>) -> Vec<(String, f64)> {
    let Some(table) = settings.json("scores").and_then(Value::as_object) else { return Vec::new() };
    let read = |(name, value): (&String, &Value)| {
        let score = value.as_f64().filter(|score| (0.0..=1.0).contains(score));
        if score.is_none() {
            settings.fault(&format!("scores.{name}"), "must be a number from 0 to 1");
        }
        score.map(|score| (name.clone(), score))
    };
    table.iter().filter_map(read).collect()
}

impl Config {
    /// Reason why the text may not pass; `None`: it may.
    async fn judged(&self, host: &Arc<dyn Host>, text: &str) -> Result<Option<String>, PluginError> {
        let skipped = text.chars().count().saturating_sub(self.chars_max);
        let text: String = text.chars().skip(skipped).collect();
        match &self.judge {
            Judge::Moderations(scores) => {
                let body = json!({ "model": self.model, "input": text }).to_string();
                let answer = host.operation("/v1/moderations", &self.model, body.into(), self.ask_as).await?;
                if answer.status != 200 {
                    return Err(PluginError::new(format!("{} answered {}", self.model, answer.status)));
                }
                verdict(&answer.body, scores)
            }
            Judge::Chat(instructions, pattern) => {
                let message = |role, text: &str| Message { role, content: Some(text.into()), ..Message::default() };
                let messages = vec![message(Role::System, instructions), message(Role::User, &text)];
                let mut request = ChatRequest::new(self.model.clone(), messages);
                (request.sampling.temperature, request.sampling.max_tokens) = (Some(0.0), Some(64));
                let said = host.chat(request, self.ask_as).await?.text();
                if said.trim().is_empty() {
                    return Err(PluginError::new(format!("{} said nothing", self.model)));
                }
                Ok(pattern.is_match(&said).then(|| "unsafe".into()))
            }
        }
    }

    fn refusal(&self, why: &str) -> Rejection {
        Rejection::new(RejectionKind::Content, self.message.clone()).log(format!("judged by {}: {why}", self.model))
    }
}

/// Reads the answer of a moderations endpoint.
fn verdict(body: &[u8], scores: &[(String, f64)]) -> Result<Option<String>, PluginError> {
    let answer: Value = serde_json::from_slice(body).map_err(|_| PluginError::new("the verdict is no JSON"))?;
    let results = answer["results"].as_array().filter(|results| !results.is_empty());
    let results = results.ok_or_else(|| PluginError::new("the verdict has no results"))?;
    for result in results {
        if scores.is_empty() {
            let flagged = result["flagged"].as_bool().ok_or_else(|| PluginError::new("the verdict has no flag"))?;
            if flagged {
                let categories = result["categories"].as_object().into_iter().flatten();
                let named = categories.filter(|(_, hit)| hit.as_bool() == Some(true)).map(|(name, _)| name.as_str());
                return Ok(Some(named.collect::<Vec<_>>().join(", ")));
            }
            continue;
        }
        for (name, limit) in scores {
            let score = result["category_scores"][name.as_str()].as_f64();
            let score = score.ok_or_else(|| PluginError::new(format!("the verdict has no score for {name}")))?;
            if score >= *limit {
                return Ok(Some(name.clone()));
            }
        }
    }
    Ok(None)
}

struct Moderated(Arc<Config>);

impl Plugin for Moderated {
    fn needs(&self) -> Needs {
        if self.0.prompts { Needs::Request } else { Needs::Facts }
    }

    fn can_dry_run(&self) -> bool {
        true
    }

    fn begin(&self) -> Box<dyn Hooks> {
        let (config, held) = (self.0.clone(), HeldBack::default());
        Box::new(Moderating { config, host: None, held, said: String::new(), said_bytes: 0 })
    }
}

struct Moderating {
    config: Arc<Config>,
    host: Option<Arc<dyn Host>>,
    held: HeldBack,
    /// Text of the answer for the judge, who takes it at the end.
    said: String,
    said_bytes: usize,
}

#[async_trait]
impl Hooks for Moderating {
    async fn on_request(&mut self, request: &mut RequestContext) -> Result<Verdict, PluginError> {
        self.host = Some(request.host.clone());
        if !self.config.prompts {
            return Ok(Verdict::Pass);
        }
        let mut all = String::new();
        text::each(request.request()?, &mut |_, text| {
            all.push_str(text);
            all.push('\n');
        });
        if all.trim().is_empty() {
            return Ok(Verdict::Pass);
        }
        Ok(match self.config.judged(&request.host, &all).await? {
            Some(why) => Verdict::Reject(self.config.refusal(&why)),
            None => Verdict::Pass,
        })
    }

    fn sees(&self) -> Sees {
        if self.config.answers { Sees::Events } else { Sees::Nothing }
    }

    fn on_event(&mut self, events: &mut Vec<ChatEvent>, end: bool) -> Result<Flow, PluginError> {
        for event in events.iter() {
            let text = match event {
                ChatEvent::Text { text, .. } | ChatEvent::Reasoning { text, .. } | ChatEvent::Refusal { text, .. } => {
                    text
                }
                ChatEvent::ToolCallArguments { json, .. } => json,
                _ => continue,
            };
            self.said.push_str(text);
        }
        self.said_bytes = self.said.len();
        if self.said_bytes > JUDGED_BYTES_MAX {
            return Err(PluginError::new("the answer is too long to be judged"));
        }
        self.held.add(events)?;
        if !end {
            return Ok(Flow::Go);
        }
        let said = std::mem::take(&mut self.said);
        let Some(host) = self.host.clone().filter(|_| !said.trim().is_empty()) else {
            *events = self.held.take();
            return Ok(Flow::Go);
        };
        // Taken when the judge has spoken: one who fails leaves the events here.
        let (config, held) = (self.config.clone(), self.held.clone());
        Ok(Flow::Wait(Box::pin(async move {
            Ok(match config.judged(&host, &said).await? {
                Some(why) => After::Reject(config.refusal(&why)),
                None => After::Go(held.take()),
            })
        })))
    }

    fn release(&mut self, out: &mut Vec<ChatEvent>) {
        out.append(&mut self.held.take());
    }

    fn held_bytes(&self) -> usize {
        self.held.bytes() + self.said_bytes
    }
}

#[cfg(test)]
mod tests {
    use http::StatusCode;
    use penstock_plugins::testing::{FakeHost, build, http_answer, now, request};
    use penstock_plugins::{HostError, event_bytes};
    use penstock_types::{FinishReason, Surface};

    use super::*;
    use crate::testing::text;

    fn host() -> Arc<FakeHost> {
        let http = |path: &str, ask: &penstock_plugins::HttpAsk| {
            assert_eq!(path, "/v1/moderations");
            let body: Value = serde_json::from_slice(&ask.body).expect("JSON");
            let bad = body["input"].as_str().expect("text").contains("bad");
            if body["input"].as_str().expect("text").contains("broken") {
                return Ok(http_answer(StatusCode::BAD_GATEWAY, "no"));
            }
            let result = json!({ "flagged": bad, "categories": { "violence": bad, "hate": false },
                "category_scores": { "violence": if bad { 0.6 } else { 0.1 } } });
            Ok(http_answer(StatusCode::OK, json!({ "results": [result] }).to_string()))
        };
        let chat = |request: &ChatRequest| {
            let text = request.messages[1].content.clone().unwrap_or_default();
            if text.contains("broken") {
                return Err(HostError::Timeout("judge".into()));
            }
            Ok(if text.contains("bad") { "unsafe\nS1" } else { "safe" }.to_owned())
        };
        Arc::new(FakeHost { chat: Some(Box::new(chat)), http: Some(Box::new(http)), ..FakeHost::default() })
    }

    fn asked(settings: &Value, said: &str) -> (Result<Verdict, PluginError>, Box<dyn Hooks>) {
        let plugin = build(&Moderation, settings).expect("valid");
        let body = json!({ "model": "m", "messages": [{ "role": "user", "content": said }] });
        let mut hooks = plugin.begin();
        let verdict = now(hooks.on_request(&mut request(Surface::Chat, &body, host())));
        (verdict, hooks)
    }

    #[test]
    fn prompts_are_judged() {
        for settings in [
            json!({ "model": "judge" }),
            json!({ "model": "judge", "scores": { "violence": 0.5 } }),
            json!({ "model": "judge", "via": "chat" }),
        ] {
            assert!(matches!(asked(&settings, "fine").0, Ok(Verdict::Pass)), "{settings}");
            let (verdict, _) = asked(&settings, "bad");
            let Ok(Verdict::Reject(refused)) = verdict else { panic!("{settings}: {verdict:?}") };
            assert!(refused.log.expect("a reason").starts_with("judged by judge: "));
            assert!(asked(&settings, "broken").0.is_err(), "{settings}");
        }
        assert!(matches!(asked(&json!({ "model": "j", "scores": { "violence": 0.7 } }), "bad").0, Ok(Verdict::Pass)));
        assert!(asked(&json!({ "model": "j", "scores": { "harm": 0.7 } }), "bad").0.is_err());
    }

    #[test]
    fn tools_schemas_and_names_are_judged() {
        let tool = |function: Value| json!({ "tools": [{ "type": "function", "function": function }] });
        let schema = json!({ "type": "object", "properties": { "a": { "enum": ["something bad"] } } });
        for extra in [
            tool(json!({ "name": "f", "description": "does bad things" })),
            tool(json!({ "name": "f", "parameters": schema })),
            json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "n", "schema": schema } } }),
            json!({ "messages": [{ "role": "user", "name": "bad", "content": "hi" }] }),
        ] {
            let mut body = json!({ "model": "m", "messages": [{ "role": "user", "content": "fine" }] });
            body.as_object_mut().expect("a table").extend(extra.as_object().expect("a table").clone());
            let mut hooks = build(&Moderation, &json!({ "model": "judge" })).expect("valid").begin();
            let verdict = now(hooks.on_request(&mut request(Surface::Chat, &body, host())));
            assert!(matches!(verdict, Ok(Verdict::Reject(_))), "{extra} {verdict:?}");
        }
    }

    fn answered(said: &[&str]) -> Result<After, PluginError> {
        let (verdict, mut hooks) = asked(&json!({ "model": "judge", "on": "answer" }), "bad");
        assert!(matches!(verdict, Ok(Verdict::Pass)), "prompts are not judged");
        let finish = ChatEvent::Finish { choice: 0, reason: FinishReason::Stop, stop: None };
        for piece in said {
            let mut events = vec![text(piece)];
            assert!(matches!(hooks.on_event(&mut events, false), Ok(Flow::Go)));
            assert!(events.is_empty(), "held back");
        }
        let mut last = vec![finish];
        let Ok(Flow::Wait(work)) = hooks.on_event(&mut last, true) else { panic!("it waits") };
        let waiting = hooks.held_bytes();
        let after = now(work);
        hooks.release(&mut last);
        match &after {
            Err(_) => assert_eq!(last.len(), said.len() + 1, "nothing is lost with the judge"),
            Ok(After::Go(events)) => {
                assert!(last.is_empty(), "and nothing is there twice");
                let size: usize = events.iter().map(event_bytes).sum();
                assert!(waiting > size && hooks.held_bytes() == waiting - size, "{waiting} {size}");
            }
            Ok(_) => {}
        }
        after
    }

    #[test]
    fn answers_are_held_until_they_are_judged() {
        assert!(matches!(answered(&["fi", "ne"]), Ok(After::Go(events)) if events.len() == 3));
        assert!(matches!(answered(&["b", "ad"]), Ok(After::Reject(_))));
        assert!(answered(&["bro", "ken"]).is_err());
    }
}
