//! Plugin `prompt`: puts messages in front of and behind the client's, and keeps templates that clients use by name.
//!
//! All texts are templates (Jinja) over facts of the request; a client's text is only ever a value in them. A client
//! uses a template with a message that begins `{template://NAME}`; the rest of the message is `input` there. With
//! `templates_only` any other message is refused.

use std::sync::Arc;

use async_trait::async_trait;
use minijinja::{Environment, UndefinedBehavior, Value, context};
use penstock_plugins::{
    Hooks, Kind, Needs, Plugin, PluginError, Rejection, RejectionKind, RequestContext, Settings, Verdict,
};
use penstock_types::{ChatRequest, Message, Prompt as Text, Request, Role};

/// Plugin kind `prompt`: builds plugins that add messages from templates.
pub(crate) struct Prompt;

/// Most steps of the template engine for one template; then rendering fails.
const FUEL: u64 = 100_000;
/// Longest text of one template, in bytes.
const TEXT_BYTES_MAX: usize = 1 << 20;
/// Mark at the beginning of a message that uses a template.
const MARK: &str = "{template://";

const ROLES: &[(&str, Role)] = &[("system", Role::System), ("user", Role::User), ("assistant", Role::Assistant)];

struct Config {
    environment: Environment<'static>,
    /// Role of each message in front, and its template's name in the environment.
    prepend: Vec<(Role, String)>,
    append: Vec<(Role, String)>,
    templates: Vec<(String, String)>,
    templates_only: bool,
    variables: Value,
}

impl Kind for Prompt {
    fn name(&self) -> &'static str {
        "prompt"
    }

    fn build(&self, settings: &Settings<'_>) -> Option<Arc<dyn Plugin>> {
        let mut environment = Environment::new();
        environment.set_fuel(Some(FUEL));
        environment.set_undefined_behavior(UndefinedBehavior::Strict);
        environment.set_recursion_limit(32);
        let prepend = messages(settings, "prepend", &mut environment);
        let append = messages(settings, "append", &mut environment);
        let mut templates = Vec::new();
        for (name, text) in settings.text_map("templates") {
            let place = format!("templates.{name}");
            add(settings, &mut environment, &place, text);
            templates.push((name, place));
        }
        let templates_only = settings.flag("templates_only", false);
        if prepend.is_empty() && append.is_empty() && templates.is_empty() {
            settings.fault("", "needs prepend, append or templates");
        }
        let variables: std::collections::BTreeMap<_, _> = settings.text_map("variables").into_iter().collect();
        let variables = Value::from_serialize(variables);
        let config = Config { environment, prepend, append, templates, templates_only, variables };
        Some(Arc::new(Decorated(Arc::new(config))))
    }
}

fn messages(settings: &Settings<'_>, name: &str, environment: &mut Environment<'static>) -> Vec<(Role, String)> {
    let mut out = Vec::new();
    for (at, table) in settings.tables(name).iter().enumerate() {
        let role = table.word("role", ROLES);
        if let Some(text) = table.needed_text("content") {
            let place = format!("{name}[{at}].content");
            add(settings, environment, &place, text);
            out.push((role, place));
        }
    }
    out
}

fn add(settings: &Settings<'_>, environment: &mut Environment<'static>, place: &str, text: String) {
    if let Err(error) = environment.add_template_owned(place.to_owned(), text) {
        let detail = error.detail().unwrap_or("cannot be read").to_owned();
        settings.fault(place, format!("is no template: {detail}"));
    }
}

impl Config {
    fn render(&self, place: &str, facts: &Value) -> Result<String, PluginError> {
        // The message of an error can quote values: only its kind is passed on.
        let failed = |error: minijinja::Error| PluginError::new(format!("{place}: {:?}", error.kind()));
        let text = self.environment.get_template(place).and_then(|template| template.render(facts)).map_err(failed)?;
        if text.len() > TEXT_BYTES_MAX {
            return Err(PluginError::new(format!("{place} makes a text of more than {TEXT_BYTES_MAX} bytes")));
        }
        Ok(text)
    }

    fn facts(&self, request: &RequestContext, input: &str) -> Value {
        let info = &request.info;
        let headers: std::collections::BTreeMap<String, String> = request
            .headers
            .iter()
            .filter_map(|(name, value)| Some((name.as_str().replace('-', "_"), value.to_str().ok()?.to_owned())))
            .collect();
        context! {
            input => input, model => request.model, route => info.route, key => info.key, team => info.team, user => info.user,
            headers => headers, variables => self.variables,
        }
    }

    /// Replaces the messages that use templates by their text; returns the name of a template that does not exist, or
    /// the empty name for a message without a template under `templates_only`.
    fn fill(&self, chat: &mut ChatRequest, context: &dyn Fn(&str) -> Value) -> Result<Option<String>, PluginError> {
        for message in chat.messages.iter_mut().filter(|message| message.role == Role::User) {
            let asked = message.content.as_deref().and_then(|text| text.trim_start().strip_prefix(MARK));
            let Some((name, input)) = asked.and_then(|rest| rest.split_once('}')) else {
                if self.templates_only {
                    return Ok(Some(String::new()));
                }
                continue;
            };
            let Some((_, place)) = self.templates.iter().find(|(have, _)| have == name) else {
                return Ok(Some(name.chars().take(64).collect()));
            };
            let text = self.render(place, &context(input.trim_start()))?;
            (message.content, message.parts) = (Some(text), Vec::new());
        }
        Ok(None)
    }
}

struct Decorated(Arc<Config>);

impl Plugin for Decorated {
    fn needs(&self) -> Needs {
        Needs::Request
    }

    fn can_dry_run(&self) -> bool {
        true
    }

    fn begin(&self) -> Box<dyn Hooks> {
        Box::new(Decorating(self.0.clone()))
    }
}

struct Decorating(Arc<Config>);

/// Puts messages in front of a conversation. Instructions join those that are there: models know one place for them.
fn in_front(chat: &mut ChatRequest, texts: Vec<(Role, String)>) {
    let first = chat.messages.first_mut().filter(|first| first.role == Role::System && first.parts.is_empty());
    let (mut texts, mut joined) = (texts, String::new());
    if let (Some(first), Some((Role::System, _))) = (first, texts.last()) {
        let (_, text) = texts.pop().unwrap_or_default();
        joined.push_str(&text);
        joined.push_str("\n\n");
        first.content = Some(joined + first.content.as_deref().unwrap_or_default());
    }
    let made = texts.into_iter().map(|(role, text)| Message { role, content: Some(text), ..Message::default() });
    chat.messages.splice(0..0, made);
}

#[async_trait]
impl Hooks for Decorating {
    async fn on_request(&mut self, request: &mut RequestContext) -> Result<Verdict, PluginError> {
        let config = &self.0;
        if matches!(request.request()?, Request::Embed(_) | Request::Rerank(_)) {
            return Ok(Verdict::Pass);
        }
        let facts = config.facts(request, "");
        let render = |list: &[(Role, String)]| {
            let one = |(role, place): &(Role, String)| Ok((*role, config.render(place, &facts)?));
            list.iter().map(one).collect::<Result<Vec<_>, PluginError>>()
        };
        let (prepend, append) = (render(&config.prepend)?, render(&config.append)?);
        let with_input = |input: &str| context! { input => input, ..facts.clone() };
        match request.edit()? {
            Request::Chat(chat) => {
                if let Some(name) = config.fill(chat, &with_input)? {
                    let message = match name.as_str() {
                        "" => "Only templates can be asked here: begin the message with {template://NAME}.".to_owned(),
                        name => format!("There is no template {name:?}."),
                    };
                    return Ok(Verdict::Reject(Rejection::new(RejectionKind::Invalid, message)));
                }
                in_front(chat, prepend);
                let made =
                    append.into_iter().map(|(role, text)| Message { role, content: Some(text), ..Message::default() });
                chat.messages.extend(made);
            }
            Request::Complete(complete) => {
                for prompt in &mut complete.prompts {
                    if let Text::Text(text) = prompt {
                        let before = prepend.iter().map(|(_, text)| text.as_str());
                        let behind = append.iter().map(|(_, text)| text.as_str());
                        *text = before.chain([text.as_str()]).chain(behind).collect::<Vec<_>>().join("\n");
                    }
                }
            }
            Request::Embed(_) | Request::Rerank(_) => {}
        }
        Ok(Verdict::Pass)
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use penstock_plugins::testing::{FakeHost, build, now, request};
    use penstock_types::Surface;
    use serde_json::json;

    use super::*;

    #[expect(clippy::needless_pass_by_value, reason = "reads as data")]
    fn decorated(settings: &serde_json::Value, messages: serde_json::Value) -> Result<Vec<String>, String> {
        let plugin = build(&Prompt, settings).expect("valid");
        let body = json!({ "model": "m", "messages": messages });
        let mut context = request(Surface::Chat, &body, Arc::new(FakeHost::default()));
        context.headers.insert("x-lang", HeaderValue::from_static("German"));
        match now(plugin.begin().on_request(&mut context)) {
            Ok(Verdict::Pass) => {}
            Ok(Verdict::Reject(rejection)) => return Err(rejection.message),
            other => return Err(format!("{other:?}")),
        }
        let Request::Chat(chat) = context.request().expect("read") else { panic!("a chat") };
        let shown =
            |message: &Message| format!("{:?}: {}", message.role, message.content.as_deref().unwrap_or_default());
        Ok(chat.messages.iter().map(shown).collect())
    }

    #[test]
    fn messages_stand_around_the_conversation() {
        let settings = json!({
            "prepend": [{ "content": "Answer in {{ headers.x_lang }} for {{ variables.shop }}." }],
            "append": [{ "role": "user", "content": "Be brief." }],
            "variables": { "shop": "ACME" },
        });
        let plain = decorated(&settings, json!([{ "role": "user", "content": "{{ 1 + 1 }}" }]));
        assert_eq!(
            plain.expect("passes"),
            ["System: Answer in German for ACME.", "User: {{ 1 + 1 }}", "User: Be brief."]
        );
        let with = json!([{ "role": "system", "content": "Old." }, { "role": "user", "content": "hi" }]);
        assert_eq!(decorated(&settings, with).expect("passes")[0], "System: Answer in German for ACME.\n\nOld.");
    }

    #[test]
    fn templates_are_asked_by_name() {
        let settings = json!({ "templates": { "sum": "Summarize: {{ input }}" }, "templates_only": true });
        let ask = |text: &str| decorated(&settings, json!([{ "role": "user", "content": text }]));
        assert_eq!(ask("{template://sum}\n{{ key }} text").expect("passes"), ["User: Summarize: {{ key }} text"]);
        assert_eq!(ask("{template://no}").expect_err("refused"), "There is no template \"no\".");
        assert!(ask("do something else").expect_err("refused").starts_with("Only templates"));
    }

    #[test]
    fn a_template_that_runs_away_is_a_failure() {
        let settings = json!({ "prepend": [{ "content": "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}" }] });
        assert!(decorated(&settings, json!([{ "role": "user", "content": "x" }])).expect_err("fails").contains("Fuel"));
        let faults = build(&Prompt, &json!({ "prepend": [{ "content": "{% if %}" }] })).err().expect("faults");
        assert_eq!(faults[0].path, "prepend[0].content");
    }
}
