//! Chat templates: a checkpoint's Jinja, rendered as Hugging Face transformers renders it.
//!
//! A template is code from a model file: it runs with fuel, a bounded output and no loader, and sees plain data only.
//! Templates are compiled once at load; templates from requests are never accepted.

mod python;
mod time;

use std::io;

use minijinja::{Environment, ErrorKind, Value as Jinja, context, value::merge_maps};
use serde_json::Value;

use crate::error::{TextError, clip};

pub(crate) use python::jinja_value;

/// Instructions per rendering. A conversation of a thousand turns with tools takes about 200 thousand; at some 30 ns
/// each, an endless template is stopped after a fraction of a second.
const FUEL: u64 = 5_000_000;
/// Largest rendered prompt. Request bodies are bounded by 32 MiB; templates add marks around messages.
const OUTPUT_BYTES_MAX: usize = 64 << 20;
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
    environment: Environment<'static>,
    source: String,
    named_tokens: Jinja,
    knows_null_content: bool,
}

impl ChatTemplate {
    /// Compiles chat_template.jinja or, if absent, `chat_template` of tokenizer_config.json (one, or a list of named
    /// ones).
    pub(crate) fn load(
        jinja: Option<&[u8]>,
        config: &Value,
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
                Value::Null => {}
                Value::String(text) => templates.push((CONFIG, DEFAULT.into(), text.clone())),
                Value::Array(list) => {
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
        let mut environment = environment();
        let mut source = String::new();
        for (file, name, text) in templates {
            if text.len() > SOURCE_BYTES_MAX {
                let (bytes, limit) = (text.len() as u64, SOURCE_BYTES_MAX as u64);
                return Err(TextError::TooLarge { file, bytes, limit });
            }
            source.push_str(&text);
            source.push('\0');
            environment.add_template_owned(name.clone(), without_generation_tags(&text)).map_err(|error| {
                TextError::malformed(file, format!("chat template {name}, line {}: {error}", error.line().unwrap_or(0)))
            })?;
        }
        Ok(Self {
            environment,
            knows_null_content: knows_null_content(&source),
            source,
            named_tokens: named_tokens.into_iter().map(|(k, v)| (k, Jinja::from(v))).collect(),
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

    /// Renders `variables` (`messages`, `tools`, …); `now_unix_s` is the time of `strftime_now`, in UTC.
    pub(crate) fn render(&self, variables: Jinja, with_tools: bool, now_unix_s: i64) -> Result<String, RenderError> {
        let template = with_tools
            .then(|| self.environment.get_template(TOOL_USE).ok())
            .flatten()
            .or_else(|| self.environment.get_template(DEFAULT).ok())
            .ok_or(RenderError::NoDefault)?;
        let clock =
            context! { strftime_now => Jinja::from_function(move |format: &str| time::strftime(format, now_unix_s)) };
        let mut output = Bounded(Vec::new());
        let result =
            template.render_captured_to(merge_maps([variables, self.named_tokens.clone(), clock]), &mut output);
        match result {
            Ok(_) => String::from_utf8(output.0).map_err(|_| RenderError::Failed("output is not UTF-8".into())),
            Err(error) => Err(render_error(&error)),
        }
    }
}

fn knows_null_content(source: &str) -> bool {
    ["'content']", "\"content\"]", ".content"]
        .iter()
        .flat_map(|field| source.split(field).skip(1))
        .any(|rest| rest.starts_with(" is none") || rest.starts_with(" is not none"))
}

/// Jinja environment that behaves as transformers' does.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    python::install(&mut environment);
    environment
}

fn render_error(error: &minijinja::Error) -> RenderError {
    if let Some(words) = python::refusal(error) {
        return RenderError::Refused(clip(words));
    }
    match error.kind() {
        ErrorKind::OutOfFuel | ErrorKind::WriteFailure => RenderError::TooMuch,
        _ => RenderError::Failed(clip(&error.to_string())),
    }
}

/// A buffer that refuses to grow beyond [`OUTPUT_BYTES_MAX`].
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > OUTPUT_BYTES_MAX {
            return Err(io::Error::other("rendered prompt too large"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Replaces `{% generation %}` tags by `{% if true %}`: they mark training data and print their body, and the
/// replacement keeps the whitespace control of the tags.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let (before, tag) = rest.split_at(open + 2);
        out.push_str(before);
        rest = tag;
        let Some(close) = tag.find("%}") else { break };
        let inner = &tag[..close];
        let word = inner.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        let replacement = match word {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => continue,
        };
        out.push_str(&inner.replacen(word, replacement, 1));
        rest = &tag[close..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(template: &str, variables: Jinja) -> Result<String, RenderError> {
        let config = serde_json::json!({ "chat_template": template });
        let template = ChatTemplate::load(None, &config, Vec::new()).unwrap().unwrap();
        template.render(variables, false, 1_700_000_000)
    }

    #[track_caller]
    fn check(template: &str, expected: &str) {
        let variables = context! {
            text => "a<b & 'c' \u{e9}", none => (), list => vec![1, 2, 3],
            tool => jinja_value(&serde_json::json!({"b": [1, 2.5, 1e20], "a": {"x": null, "y": true}}), &|text| text.into()),
        };
        assert_eq!(render(template, variables).as_deref(), Ok(expected), "{template}");
    }

    #[test]
    fn json_is_written_as_python_does() {
        check("{{ text | tojson }}", "\"a<b & 'c' \u{e9}\"");
        check("{{ text | tojson(ensure_ascii=true) }}", "\"a<b & 'c' \\u00e9\"");
        check("{{ tool | tojson }}", r#"{"b": [1, 2.5, 1e+20], "a": {"x": null, "y": true}}"#);
        check("{{ tool.a | tojson(indent=2) }}", "{\n  \"x\": null,\n  \"y\": true\n}");
        check("{{ tool.b | tojson(separators=(',', ':')) }}", "[1,2.5,1e+20]");
        check("{{ tool | tojson(sort_keys=true) }}", r#"{"a": {"x": null, "y": true}, "b": [1, 2.5, 1e+20]}"#);
        check("{{ [] | tojson(indent=2) }}{{ {} | tojson(indent=2) }}", "[]{}");
    }

    #[test]
    fn values_print_as_python_does() {
        check("{{ none }} {{ true }} {{ 1.0 }} {{ list }}", "None True 1.0 [1, 2, 3]");
        check("{{ tool.a }} {{ ['x', \"it's\"] }}", "{'x': None, 'y': True} ['x', \"it's\"]");
    }

    #[test]
    fn jinja_features_that_templates_use() {
        check("{% for i in list %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13");
        check("{% set ns = namespace(n=0) %}{% for i in list %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "6");
        check("{% for k, v in tool.items() %}{{ k }}{% endfor %}", "ba");
        check("{% macro f(x, y='d') %}{{ x }}{{ y }}{% endmacro %}{{ f('a') }}{{ f('b', y='c') }}", "adbc");
        check("{{ list[::-1] | list }}{{ list[1:] | list }}{{ text[-1] }}", "[3, 2, 1][2, 3]\u{e9}");
        check("  {% generation %}\nx\n  {% endgeneration %}\ny", "x\ny");
        check("a {%- generation -%} x {%- endgeneration %} b", "ax b");
        check("{{ strftime_now('%d %b %Y') }}", "14 Nov 2023");
        check("{{ '</think>x'.split('</think>')[-1].lstrip('\\n') }}{{ 'ab'.removeprefix('a') }}", "xb");
        check(
            "{{ text is iterable }}{{ none is iterable }}{{ tool is sequence }}{{ tool is mapping }}",
            "TrueFalseTrueTrue",
        );
    }

    #[test]
    fn a_template_refuses_in_its_own_words() {
        let refused = render("{{ raise_exception('roles must alternate') }}", context! {});
        assert_eq!(refused, Err(RenderError::Refused("roles must alternate".into())));
    }

    #[test]
    fn a_template_that_never_ends_is_stopped() {
        let forever = "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}";
        assert_eq!(render(forever, context! {}), Err(RenderError::TooMuch));
        let large = "{% set x = 'x' * 1000000 %}{% for a in range(100) %}{{ x }}{% endfor %}";
        assert_eq!(render(large, context! {}), Err(RenderError::TooMuch));
    }

    #[test]
    fn a_broken_template_is_refused_at_load() {
        let config = serde_json::json!({ "chat_template": "{% if %}" });
        let error = ChatTemplate::load(None, &config, Vec::new()).err().unwrap().to_string();
        assert!(error.starts_with("tokenizer_config.json: chat template default, line 1"), "{error}");
    }

    #[test]
    fn named_templates_are_chosen_by_tools() {
        let config = serde_json::json!({ "chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}] });
        let template = ChatTemplate::load(None, &config, Vec::new()).unwrap().unwrap();
        assert_eq!(template.render(context! {}, false, 0).as_deref(), Ok("d"));
        assert_eq!(template.render(context! {}, true, 0).as_deref(), Ok("t"));
    }
}
