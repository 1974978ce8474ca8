//! Chat templates: a checkpoint's Jinja, rendered as Hugging Face transformers renders it.
//!
//! A template is code from a model file, written against Python. So the evaluator is our own, with Python's values and
//! operators, and with a bound on everything that a template may use up; it has no loader and sees plain data only
//! ([ADR 18](../../../../docs/adr/0018-own-template-evaluator.md)). Templates are compiled once at load; templates from
//! requests are never accepted.
//!
//! ```text
//! source ─▶ syntax (lexer, parser) ─▶ tree ─▶ machine (statements) ─▶ prompt
//!                                             eval (expressions), operate, compare
//!                                             filters, checks, methods, strings, format
//!                                             budget (steps, bytes, levels)
//! ```

mod arguments;
mod budget;
mod checks;
mod compare;
mod eval;
mod filters;
mod format;
mod json;
mod machine;
mod methods;
mod operate;
mod print;
mod strings;
mod syntax;
mod time;
mod value;

use std::sync::Arc;

use serde_json::Value as Config;

use crate::error::{TextError, clip};

use syntax::ast::Template;

pub(crate) use budget::Budget;
pub(crate) use json::{Json, text as json_text};
pub(crate) use value::{Dict, Value};

/// Largest template source; public ones stay below 64 KiB.
const SOURCE_BYTES_MAX: usize = 1 << 20;

const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

/// Reason why a prompt could not be rendered, worded for the client.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RenderError {
    /// The template refused the conversation (`raise_exception`), in its own words.
    Refused(String),
    /// The template used up its fuel or its output.
    TooMuch,
    /// The template failed, with this message of the template engine.
    Failed(String),
    /// The checkpoint has several templates, none of which serves this request.
    NoDefault,
}

/// Chat template of a checkpoint, compiled; some checkpoints have several, by name.
pub(crate) struct ChatTemplate {
    /// Templates by name.
    templates: Vec<(String, Template)>,
    source: String,
    named_tokens: Vec<(Arc<str>, Arc<str>)>,
    knows_null_content: bool,
}

impl ChatTemplate {
    /// Compiles chat_template.jinja or, if absent, `chat_template` of tokenizer_config.json (one, or a list of named
    /// ones).
    pub(crate) fn load(
        jinja: Option<&[u8]>,
        config: &Config,
        named_tokens: Vec<(String, String)>,
    ) -> Result<Option<Self>, TextError> {
        const CONFIG: &str = "tokenizer_config.json";
        let mut templates: Vec<(&'static str, String, String)> = Vec::new();
        if let Some(bytes) = jinja {
            const FILE: &str = "chat_template.jinja";
            let text = std::str::from_utf8(bytes).map_err(|error| TextError::malformed(FILE, error))?;
            templates.push((FILE, DEFAULT.into(), text.into()));
        } else {
            match &config["chat_template"] {
                Config::Null => {}
                Config::String(text) => templates.push((CONFIG, DEFAULT.into(), text.clone())),
                Config::Array(list) => {
                    for entry in list {
                        let (Some(name), Some(text)) = (entry["name"].as_str(), entry["template"].as_str()) else {
                            return Err(TextError::malformed(
                                CONFIG,
                                "chat_template: an entry without name and template",
                            ));
                        };
                        templates.push((CONFIG, name.into(), text.into()));
                    }
                }
                _ => return Err(TextError::malformed(CONFIG, "chat_template: neither text nor a list")),
            }
        }
        if templates.is_empty() { Ok(None) } else { Self::compile(templates, named_tokens).map(Some) }
    }

    fn compile(
        templates: Vec<(&'static str, String, String)>,
        named_tokens: Vec<(String, String)>,
    ) -> Result<Self, TextError> {
        let mut source = String::new();
        let mut compiled = Vec::with_capacity(templates.len());
        for (file, name, text) in templates {
            if text.len() > SOURCE_BYTES_MAX {
                let (bytes, limit) = (text.len() as u64, SOURCE_BYTES_MAX as u64);
                return Err(TextError::TooLarge { file, bytes, limit });
            }
            source.push_str(&text);
            source.push('\0');
            let template = syntax::parse(&text).map_err(|error| {
                TextError::malformed(file, format!("chat template {name}, line {}: {}", error.line, error.words))
            })?;
            compiled.push((name, template));
        }
        Ok(Self {
            templates: compiled,
            knows_null_content: knows_null_content(&source),
            source,
            named_tokens: named_tokens.into_iter().map(|(name, token)| (name.into(), token.into())).collect(),
        })
    }

    /// Source of all templates, to be searched for marks.
    pub(crate) fn source(&self) -> &str {
        &self.source
    }

    /// Returns true if the template tests if a message's content is `none`. Other templates print "None" or fail, so they get
    /// an empty text for an absent content.
    pub(crate) fn knows_null_content(&self) -> bool {
        self.knows_null_content
    }

    /// Returns true if the template writes calls of earlier turns.
    pub(crate) fn reads_calls(&self) -> bool {
        self.source.contains("tool_calls")
    }

    /// Returns true if the template takes the tools from a field of a message, as text, and neither the request's tools nor calls from elsewhere.
    pub(crate) fn reads_tools_of_message(&self) -> bool {
        let reads = ["message['tools']", "message[\"tools\"]"].iter().any(|field| self.source.contains(field));
        let variable = self.templates.iter().any(|(_, template)| template.names.iter().any(|name| **name == *"tools"));
        reads && !variable && !self.reads_calls()
    }

    /// Renders `variables` (`messages`, `tools`, …); `now_unix_s` is the time of `strftime_now`, in UTC.
    pub(crate) fn render(
        &self,
        variables: Vec<(Arc<str>, Value)>,
        with_tools: bool,
        now_unix_s: i64,
    ) -> Result<String, RenderError> {
        self.render_with(variables, with_tools, machine::Settings { now_unix_s, any_order: false })
    }

    /// Renders like [`Self::render`], without the template's own check that the roles of the messages alternate.
    pub(crate) fn render_in_any_order(
        &self,
        variables: Vec<(Arc<str>, Value)>,
        with_tools: bool,
        now_unix_s: i64,
    ) -> Result<String, RenderError> {
        self.render_with(variables, with_tools, machine::Settings { now_unix_s, any_order: true })
    }

    fn render_with(
        &self,
        variables: Vec<(Arc<str>, Value)>,
        with_tools: bool,
        settings: machine::Settings,
    ) -> Result<String, RenderError> {
        let named = |wanted: &str| self.templates.iter().find(|(name, _)| name == wanted).map(|(_, template)| template);
        let template =
            with_tools.then(|| named(TOOL_USE)).flatten().or_else(|| named(DEFAULT)).ok_or(RenderError::NoDefault)?;
        // The model's own tokens come last: no variable of a request replaces them.
        let tokens = self.named_tokens.iter().map(|(name, token)| (name.clone(), Value::Str(token.clone())));
        let rendered = guarded(|| machine::render(template, variables.into_iter().chain(tokens), settings));
        rendered.map_err(|error| match error {
            RenderError::Refused(words) => RenderError::Refused(clip(&words)),
            RenderError::Failed(words) => RenderError::Failed(clip(&words)),
            other => other,
        })
    }
}

/// Runs the evaluator behind a panic guard: a template that finds a defect of the evaluator fails, and ends nothing else.
fn guarded<T>(work: impl FnOnce() -> Result<T, RenderError>) -> Result<T, RenderError> {
    let panicked = |_| RenderError::Failed("the template evaluator panicked on it".to_owned());
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).map_err(panicked)?
}

fn knows_null_content(source: &str) -> bool {
    ["'content']", "\"content\"]", ".content"]
        .iter()
        .flat_map(|field| source.split(field).skip(1))
        .any(|rest| rest.starts_with(" is none") || rest.starts_with(" is not none"))
}

#[cfg(test)]
mod tests;
