//! Grammars of answers with calls, as text in the Lark dialect of `llguidance`: what a worker holds a model to when a
//! request demands a call, forbids a second one, or names the tools that may be called.
//!
//! ```text
//! required   first call (next call)* close
//! auto       text, or text and the calls behind the mark that opens them
//! ```
//!
//! Each format says what its calls look like ([`Shape`]); this module puts them together. Arguments in JSON follow the
//! tool's schema, with the blanks that the family writes. Marks that are special tokens of the checkpoint are written as
//! tokens, others as text.

pub(super) use penstock_grammar::quoted;
use std::collections::{HashMap, HashSet};

use penstock_grammar::{ANNOTATIONS, TEXT_BYTES_MAX, ends_in_escape, excerpt, merged, referenced, regex, text_pattern};
use serde_json::{Value, json};

use super::{
    CallableTool,
    callable::{Kinds, resolved},
};
use crate::reasoning::ReasoningMarkers;

/// Demand of a request on the calls of its answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CallDemand {
    /// The model decides whether to call; a call that has begun follows the schema of its tool.
    #[default]
    Auto,
    /// The answer is one call, or several.
    Required,
    /// The answer is one call of this function.
    Named(String),
}

/// Reasoning in front of the part that a grammar describes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReasoningPart {
    /// The grammar begins behind the reasoning, or the answer has none.
    #[default]
    Outside,
    /// The prompt has opened the reasoning: the grammar takes it up to its closing mark.
    Opened,
    /// The answer may begin with reasoning between its marks.
    Allowed,
}

/// Form that the text of an answer must have where the answer is not a call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ContentForm {
    /// Any text.
    #[default]
    Free,
    /// A JSON object, without blanks between its parts.
    Object,
    /// A JSON value of a schema, without blanks between its parts; `strict` refuses keywords that are not known.
    Json {
        /// The schema.
        schema: Value,
        /// True if every keyword of the schema must be followed.
        strict: bool,
    },
    /// Text that matches this regular expression as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Text of these rules of Lark, the first of which is named. Their names do not begin with `r` or `T`.
    Rules {
        /// Name of the first rule.
        start: String,
        /// All rules, one a line.
        rules: String,
    },
}

/// Rule of a request about its answer: calls, reasoning, and the form of the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallRule {
    /// Whether and what the model calls.
    pub demand: CallDemand,
    /// Names of the tools that may be called (`allowed_tools`); `None`: all of them.
    pub allowed: Option<Vec<String>>,
    /// True if one answer may hold several calls.
    pub parallel: bool,
    /// Place of the reasoning.
    pub reasoning: ReasoningPart,
    /// Form of the text, where the answer is not a call.
    pub content: ContentForm,
}

impl Default for CallRule {
    fn default() -> Self {
        Self {
            demand: CallDemand::Auto,
            allowed: None,
            parallel: true,
            reasoning: ReasoningPart::Outside,
            content: ContentForm::Free,
        }
    }
}

/// What grammars need to know of a checkpoint.
#[derive(Clone, Copy)]
pub(crate) struct Checkpoint<'a> {
    /// Id of a token by its exact name, and whether it is a special one; `None`: no such token.
    pub(crate) token: &'a dyn Fn(&str) -> Option<(u32, bool)>,
    /// Marks of the model's reasoning.
    pub(crate) reasoning: Option<&'a ReasoningMarkers>,
}

/// Form of the calls of one format.
pub(super) struct Shape {
    /// How the calls begin, and how text in front of them is told from them.
    pub(super) begin: Begin,
    /// Text between the beginning and the first call.
    pub(super) first: &'static str,
    /// Text between two calls.
    pub(super) next: &'static str,
    /// Text behind the last call.
    pub(super) close: &'static str,
    /// Rules of one call, as a sequence; `None` if they cannot hold a strict tool to its schema.
    pub(super) call: fn(&mut Lark<'_>, &CallableTool) -> Option<String>,
}

/// Beginning of the calls.
pub(super) enum Begin {
    /// A mark anywhere in the answer.
    Mark(&'static str),
    /// The answer's first character that is no blank, with a pattern of answers that begin otherwise.
    Answer(&'static str, &'static str),
}

/// Writer of one grammar.
pub(super) struct Lark<'a> {
    checkpoint: Checkpoint<'a>,
    marks: &'static [&'static str],
    /// Text behind the keys and behind the members of the answer's form, where that is JSON.
    separators: [&'static str; 2],
    rules: String,
    count: usize,
}

/// Separators of JSON with a blank behind each, as models write it.
const SPACED: [&str; 2] = [": ", ", "];

/// Text behind the keys and behind the members of JSON in this form; [`SPACED`] where the form is no JSON.
fn separators(form: &ContentForm) -> [&'static str; 2] {
    match form {
        ContentForm::Object => [":", ","],
        ContentForm::Json { schema, .. } if schema[OPTIONS]["item_separator"] != ", " => [":", ","],
        _ => SPACED,
    }
}

/// Grammar of an answer under `rule`; `None` if no tool may be called, or the format cannot hold them to the rule.
pub(super) fn write(
    checkpoint: Checkpoint<'_>,
    shape: &Shape,
    marks: &'static [&'static str],
    tools: &[CallableTool],
    rule: &CallRule,
) -> Option<String> {
    let mut lark = Lark::new(checkpoint, marks);
    lark.separators = separators(&rule.content);
    let mut calls = Vec::new();
    for tool in chosen(tools, rule) {
        calls.push((shape.call)(&mut lark, tool)?);
    }
    let content = lark.content(&rule.content);
    if calls.is_empty() {
        return lark.finish(&content?, rule);
    }
    let call = lark.rule(&calls.join(" | "));
    let (first, next, close) = (lark.literal(shape.first), lark.literal(shape.next), lark.literal(shape.close));
    let several = rule.parallel && !matches!(rule.demand, CallDemand::Named(_));
    let more = if several { format!("({next} {call})*") } else { String::new() };
    let calls = lark.rule(&format!("{first} {call} {more} {close}"));
    let answer = match (&rule.demand, &shape.begin) {
        (CallDemand::Auto, Begin::Mark(begin) | Begin::Answer(begin, _)) if content.is_some() => {
            format!("{} | {} {calls}", content.unwrap_or_default(), lark.literal(begin))
        }
        (CallDemand::Auto, Begin::Mark(mark)) if lark.is_special(mark) => {
            let text = lark.free_text("/(?s:.*)/", mark);
            format!("{text}? ({} {calls})?", lark.literal(mark))
        }
        (CallDemand::Auto, Begin::Mark(mark)) => {
            let text = lark.free_text("/(?s:.*)/", mark);
            let mark = lark.literal(mark);
            // Terminals hold no special tokens.
            let (front, rest) = mark.split_at(mark.find("<[").unwrap_or(mark.len()));
            let head = lark.terminal(&format!("{text}? {front}"));
            format!("{text}? | {head} {rest} {calls}")
        }
        (CallDemand::Auto, Begin::Answer(begin, otherwise)) => {
            let text = lark.free_text(otherwise, "");
            format!("{text}? | {} {calls}", lark.literal(begin))
        }
        (_, Begin::Mark(begin) | Begin::Answer(begin, _)) => format!("{} {calls}", lark.literal(begin)),
    };
    lark.finish(&answer, rule)
}

/// Grammar of an answer without calls, in no format of calls; `None` if its form is free.
pub(crate) fn write_content(checkpoint: Checkpoint<'_>, rule: &CallRule) -> Option<String> {
    let mut lark = Lark::new(checkpoint, &[]);
    let content = lark.content(&rule.content)?;
    lark.finish(&content, rule)
}

/// Tools that an answer may call under `rule`.
pub(super) fn chosen<'a>(tools: &'a [CallableTool], rule: &CallRule) -> Vec<&'a CallableTool> {
    let allowed = |tool: &&CallableTool| {
        let listed = rule.allowed.as_ref().is_none_or(|names| names.contains(&tool.name));
        listed && !matches!(&rule.demand, CallDemand::Named(name) if *name != tool.name)
    };
    tools.iter().filter(allowed).collect()
}

impl<'a> Lark<'a> {
    pub(super) fn new(checkpoint: Checkpoint<'a>, marks: &'static [&'static str]) -> Self {
        Self { checkpoint, marks, separators: SPACED, rules: String::new(), count: 0 }
    }

    /// The whole grammar, with the reasoning where `rule` puts it; `None` if text and reasoning cannot be told apart.
    pub(super) fn finish(mut self, answer: &str, rule: &CallRule) -> Option<String> {
        let answer = self.rule(answer);
        let markers = self.checkpoint.reasoning.cloned();
        let start = match (rule.reasoning, markers) {
            (ReasoningPart::Outside, _) | (_, None) => answer,
            (ReasoningPart::Opened, Some(ReasoningMarkers { close, .. })) => {
                let reasoning = self.text_until(&close);
                format!("{reasoning} BLANKS? {answer}")
            }
            (ReasoningPart::Allowed, Some(ReasoningMarkers { open, close })) => {
                let is_free = rule.demand == CallDemand::Auto && rule.content == ContentForm::Free;
                if is_free && !self.is_special(&open) {
                    return None;
                }
                let reasoning = self.text_until(&close);
                format!("({} {reasoning} BLANKS?)? {answer}", self.literal(&open))
            }
        };
        Some(format!("start: {start}\nBLANKS: /\\n{{1,2}}/\n{}", self.rules))
    }

    fn add(&mut self, name: &str, options: &str, body: &str) -> String {
        let name = self.name(name);
        self.define(&name, options, body);
        name
    }

    fn name(&mut self, name: &str) -> String {
        self.count += 1;
        format!("{name}{}", self.count)
    }

    fn define(&mut self, name: &str, options: &str, body: &str) {
        if !self.is_full() {
            self.rules.push_str(&format!("{name}{options}: {body}\n"));
        }
    }

    /// Returns true once the rules are longer than any grammar may be: more of them would not be read.
    pub(super) fn is_full(&self) -> bool {
        self.rules.len() > TEXT_BYTES_MAX
    }

    pub(super) fn rule(&mut self, body: &str) -> String {
        self.add("r", "", body)
    }

    /// Name of a rule that [`Self::set_rule`] writes later, so that it may refer to itself.
    pub(super) fn rule_name(&mut self) -> String {
        self.name("r")
    }

    pub(super) fn set_rule(&mut self, name: &str, body: &str) {
        self.define(name, "", body);
    }

    pub(super) fn terminal(&mut self, body: &str) -> String {
        self.add("T", "", body)
    }

    /// Returns true if the text is a special token of the checkpoint.
    pub(super) fn is_special(&self, text: &str) -> bool {
        self.special(text).is_some()
    }

    fn special(&self, text: &str) -> Option<u32> {
        (self.checkpoint.token)(text).filter(|&(_, special)| special).map(|(id, _)| id)
    }

    /// A fixed text as a sequence: the special tokens in it as tokens, the rest as text.
    pub(super) fn literal(&self, text: &str) -> String {
        let reasoning = self.checkpoint.reasoning.map(|markers| [markers.open.as_str(), markers.close.as_str()]);
        let marks = self.marks.iter().copied().chain(reasoning.into_iter().flatten());
        let first = marks.filter_map(|mark| Some((text.find(mark)?, mark, self.special(mark)?)));
        match first.min_by_key(|&(at, mark, _)| (at, std::cmp::Reverse(mark.len()))) {
            Some((at, mark, id)) => {
                let (front, rest) = (self.literal(&text[..at]), self.literal(&text[at + mark.len()..]));
                format!("{front} <[{id}]> {rest}").trim().to_owned()
            }
            None if text.is_empty() => String::new(),
            None => quoted(text),
        }
    }

    /// Adds a grammar rule that matches any text up to and including the first `close`. Returns the expression that
    /// refers to the rule.
    pub(super) fn text_until(&mut self, close: &str) -> String {
        let sequence = self.literal(close);
        let Some(at) = sequence.find("<[") else {
            return self.add("r", "[lazy]", &format!("/(?s:.*)/ {sequence}"));
        };
        // A special token ends the text, and what stands in front of the token belongs to the same lexeme. The mark's
        // characters are excluded from the text, too: readers cannot tell them from the token.
        let text = format!("(/(?s:.*)/ & ~/(?s:.*){}(?s:.*)/)", escaped(close));
        let front = self.terminal(&format!("{text} {}", &sequence[..at]));
        format!("{front}{} {}", if at == 0 { "?" } else { "" }, &sequence[at..])
    }

    /// Text of a terminal's `pattern`, up to and including `end`. They are one lexeme as far as `end` is text: a lexeme is
    /// as long as it can be, so a pattern by itself would take what `end` begins with.
    pub(super) fn pattern_until(&mut self, pattern: &str, end: &str) -> String {
        let sequence = self.literal(end);
        // Terminals hold no special tokens.
        let (front, rest) = sequence.split_at(sequence.find("<[").unwrap_or(sequence.len()));
        let front = self.terminal(&format!("{pattern} {front}"));
        format!("{front} {rest}")
    }

    /// Text of an answer without calls: what matches `pattern` and contains no mark of the format.
    pub(super) fn free_text(&mut self, pattern: &str, begin: &str) -> String {
        let marks = self.marks.iter().copied().filter(|mark| *mark != begin).chain([begin]);
        let marks: Vec<String> = marks.filter(|mark| !mark.is_empty()).map(escaped).collect();
        match marks.is_empty() {
            true => self.terminal(pattern),
            false => self.terminal(&format!("({pattern} & ~/(?s:.*)({})(?s:.*)/ & /(?s:.*)/)", marks.join("|"))),
        }
    }

    /// A JSON value in a call, under the schema of a document: with a blank behind each comma and colon, as templates
    /// write calls that a model has made before, so that the model writes as it was taught to.
    pub(super) fn json(&mut self, schema: &Value, strict: bool) -> String {
        self.json_with(schema, strict, spaced())
    }

    /// A JSON value in a call, under a part of a document; see [`Self::json`].
    pub(super) fn part(&mut self, part: Part<'_>, strict: bool) -> String {
        match self.is_full() {
            true => String::new(),
            false => self.json(&excerpt(part.schema, part.whole), strict),
        }
    }

    /// A JSON value under a schema, without blanks between its parts.
    pub(super) fn compact_json(&mut self, schema: &Value, strict: bool) -> String {
        self.json_with(schema, strict, json!({}))
    }

    fn json_with(&mut self, schema: &Value, strict: bool, mut options: Value) -> String {
        let mut schema = schema.as_object().cloned().unwrap_or_default();
        options["whitespace_flexible"] = false.into();
        options["lenient"] = (!strict).into();
        options["coerce_one_of"] = (!strict).into();
        schema.insert(OPTIONS.into(), options);
        self.rule(&format!("%json {}", Value::Object(schema)))
    }

    /// Text of the form that is demanded; `None` where the form is free.
    pub(super) fn content(&mut self, form: &ContentForm) -> Option<String> {
        match form {
            ContentForm::Free => None,
            ContentForm::Object => Some(self.compact_json(&json!({ "type": "object" }), false)),
            ContentForm::Json { schema, strict } => {
                let is_spaced = separators(form) == SPACED;
                Some(self.json_with(schema, *strict, if is_spaced { spaced() } else { json!({}) }))
            }
            ContentForm::Regex(pattern) => Some(self.terminal(&regex(pattern))),
            ContentForm::Rules { start, rules } => {
                self.rules.push_str(rules);
                Some(start.clone())
            }
            ContentForm::Choice(choices) => {
                let choices: Vec<String> = choices.iter().map(|choice| quoted(choice)).collect();
                Some(self.rule(&choices.join(" | ")))
            }
        }
    }

    /// The arguments of a tool as a JSON object.
    pub(super) fn arguments(&mut self, tool: &CallableTool) -> String {
        self.json(&tool.arguments(), tool.strict)
    }

    /// The arguments of a tool as a JSON object without blanks between its parts.
    pub(super) fn compact_arguments(&mut self, tool: &CallableTool) -> String {
        self.compact_json(&tool.arguments(), tool.strict)
    }

    /// An object with a name and arguments, the latter under this key.
    pub(super) fn object(&mut self, tool: &CallableTool, key: &str) -> String {
        let arguments = self.arguments(tool);
        let head = format!("{{\"name\": {}, \"{key}\": ", Value::from(tool.name.as_str()));
        format!("{} {arguments} {}", quoted(&head), quoted("}"))
    }

    /// [`Self::object`] in the lexemes of JSON, for a format without a mark in front of the object. Beside an answer in JSON a lexeme of several of them would keep
    /// the answer from beginning: the lexer does not go back when the text goes on otherwise. The head has the answer's own separators, so that no blank
    /// behind a first key `name` makes a call of the answer.
    pub(super) fn object_in_lexemes(&mut self, tool: &CallableTool, key: &str) -> String {
        let arguments = self.arguments(tool);
        let (name, key) = (Value::from(tool.name.as_str()).to_string(), Value::from(key).to_string());
        let [colon, comma] = self.separators;
        let head = ["{", "\"name\"", colon, &name, comma, &key, colon].map(quoted).join(" ");
        format!("{head} {arguments} {}", quoted("}"))
    }

    /// Members of an object or call in the order of the schema, `separator` between them; those that are not required
    /// may be absent.
    pub(super) fn members(&mut self, members: &[(String, bool)], separator: &str) -> String {
        let (mut head, mut tail) = (String::new(), String::new());
        for (member, required) in members.iter().rev() {
            let separator = quoted(separator);
            head = match (required, head.is_empty()) {
                (true, _) => self.rule(&format!("{member} {tail}")),
                (false, true) => format!("({member} {tail})?"),
                (false, false) => self.rule(&format!("{member} {tail} | {head}")),
            };
            tail = if *required {
                self.rule(&format!("{separator} {member} {tail}"))
            } else {
                self.rule(&format!("({separator} {member})? {tail}"))
            };
        }
        head
    }
}

/// Field of a schema with the grammar library's options.
const OPTIONS: &str = "x-guidance";

fn spaced() -> Value {
    json!({ "item_separator": ", ", "key_separator": ": " })
}

/// A schema inside of a document, where its references lead.
#[derive(Clone, Copy)]
pub(super) struct Part<'a> {
    pub(super) schema: &'a Value,
    pub(super) whole: &'a Value,
}

impl<'a> Part<'a> {
    /// Another schema of the document.
    pub(super) fn of(self, schema: &'a Value) -> Self {
        Self { schema, ..self }
    }

    pub(super) fn kinds(self) -> Kinds {
        Kinds::of(self.schema, self.whole)
    }

    /// The schema that this one stands for: itself, or the one that its reference or only `allOf` names. `None` if
    /// other keywords stand beside that.
    pub(super) fn target(self) -> Option<Self> {
        let mut at = self.schema;
        // Bound of the chain: references may form a circle.
        for _ in 0..8 {
            let Some(map) = at.as_object() else { break };
            let next = match (map.get("$ref"), map.get("allOf")) {
                (None, None) => break,
                (Some(Value::String(target)), None) => referenced(self.whole, target)?,
                (None, Some(Value::Array(list))) => list.first().filter(|_| list.len() == 1)?,
                _ => return None,
            };
            if map.keys().any(|key| key != "$ref" && key != "allOf" && !ANNOTATIONS.contains(&key.as_str())) {
                return None;
            }
            at = next;
        }
        Some(self.of(at))
    }

    /// Keywords that constrain a value; `None` if they are no list.
    pub(super) fn keywords(self) -> Option<Keywords<'a>> {
        merged(self.schema, self.whole)
    }
}

/// Keywords of a schema, with those that it takes from others.
pub(super) type Keywords<'a> = HashMap<&'a str, &'a Value>;

/// Parameters of a tool for formats that write them one by one.
pub(super) enum Parameters<'a> {
    /// Listed parameters: name, schema, and whether it must be there.
    Listed(Vec<(&'a str, Part<'a>, bool)>),
    /// Any parameters, their values under this schema.
    Any(Part<'a>),
}

/// Keywords of an object's schema that a list of parameters cannot follow.
const BEYOND_LISTS: [&str; 13] = [
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "if",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
];

/// Schema of any value.
static ANYTHING: Value = Value::Bool(true);

/// Parameters of a tool; `None` if it is strict and has keywords that a list cannot follow.
pub(super) fn parameters(tool: &CallableTool) -> Option<Parameters<'_>> {
    let whole = tool.parameters.as_ref().unwrap_or(&ANYTHING);
    members(Part { schema: whole, whole }, tool.strict)
}

/// Members of an object's schema; `None` if `strict` and the schema has keywords that a list cannot follow.
pub(super) fn members(part: Part<'_>, strict: bool) -> Option<Parameters<'_>> {
    let keywords = part.keywords();
    if strict && keywords.as_ref().is_none_or(|all| BEYOND_LISTS.iter().any(|key| all.contains_key(key))) {
        return None;
    }
    // Keywords that are no list: those behind the reference.
    let root = resolved(part.schema, part.whole);
    let keyword = |key: &str| keywords.as_ref().map_or(root.get(key), |all| all.get(key).copied());
    let required: Vec<&str> =
        keyword("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
    let properties = keyword("properties").and_then(Value::as_object).filter(|properties| !properties.is_empty());
    if properties.is_none() && required.is_empty() {
        return Some(match keyword("additionalProperties") {
            Some(Value::Bool(false)) => Parameters::Listed(Vec::new()),
            schema => Parameters::Any(part.of(schema.unwrap_or(&ANYTHING))),
        });
    }
    let names: HashSet<&str> = required.iter().copied().collect();
    let listed = properties.into_iter().flatten().map(|(name, schema)| (name.as_str(), schema));
    // A property under the schema `false` is never there.
    let listed = listed.filter(|(name, schema)| *schema != &Value::Bool(false) || names.contains(name));
    let listed = listed.map(|(name, schema)| (name, part.of(schema), names.contains(name)));
    let is_unlisted = |name: &&&str| properties.is_none_or(|properties| !properties.contains_key(**name));
    let unlisted = required.iter().filter(is_unlisted).map(|name| (*name, part.of(&ANYTHING), true));
    let all: Vec<_> = listed.chain(unlisted).collect();
    let is_impossible = all.iter().any(|(_, part, _)| part.schema == &Value::Bool(false));
    if strict && is_impossible { None } else { Some(Parameters::Listed(all)) }
}

/// Pattern of a parameter's name where the schema names none.
pub(super) const ANY_KEY: &str = "/[A-Za-z_][A-Za-z0-9_]{0,63}/";

/// Texts that a string's schema allows, as a terminal without `end` in it; `Ok(None)`: any text. `Err`: the schema has
/// keywords that a text between marks cannot be held to.
pub(super) fn string_pattern(part: Part<'_>, end: &str) -> Result<Option<String>, ()> {
    let schema = part.keywords().ok_or(())?;
    let listed = schema.get("enum").and_then(|values| values.as_array()).map(Vec::as_slice);
    let listed = listed.or(schema.get("const").map(|value| std::slice::from_ref(*value)));
    let mut parts = Vec::new();
    if let Some(values) = listed {
        let constant = schema.get("const").copied();
        let texts: Vec<String> = values
            .iter()
            .filter(|value| constant.is_none_or(|constant| constant == *value))
            .filter_map(Value::as_str)
            .filter(|text| end.is_empty() || !text.contains(end))
            .map(quoted)
            .collect();
        if texts.is_empty() {
            return Err(());
        }
        parts.push(format!("({})", texts.join(" | ")));
    } else if ["format", "anyOf", "oneOf", "not", "contentEncoding"].iter().any(|key| schema.contains_key(key)) {
        return Err(());
    }
    let count = |key: &str| schema.get(key).and_then(|count| count.as_u64());
    let (least, most) = (count("minLength"), count("maxLength"));
    if least.is_some_and(|least| least > 0) || most.is_some() {
        let most = most.map(|most| most.to_string()).unwrap_or_default();
        parts.push(format!("/(?s:.){{{},{most}}}/", least.unwrap_or(0)));
    }
    if let Some(pattern) = schema.get("pattern").and_then(|pattern| pattern.as_str()) {
        parts.push(whole_pattern(pattern)?);
    }
    if parts.is_empty() {
        return Ok(None);
    }
    if !end.is_empty() && (listed.is_none() || parts.len() > 1) {
        parts.push(format!("~/(?s:.*){}(?s:.*)/", escaped(end)));
        parts.push("/(?s:.*)/".into());
    }
    Ok(Some(format!("({})", parts.join(" & "))))
}

/// A pattern of JSON Schema, which is searched for, as one of the whole text. `Err` for anchors that are not at its
/// ends.
fn whole_pattern(pattern: &str) -> Result<String, ()> {
    if ends_in_escape(pattern) {
        return Err(());
    }
    let inner = pattern.strip_prefix('^').unwrap_or(pattern);
    let front = if inner.len() < pattern.len() { "" } else { "(?s:.*)" };
    let backslashes = |text: &str| text.chars().rev().take_while(|c| *c == '\\').count();
    let anchored = inner.strip_suffix('$').is_some_and(|rest| backslashes(rest) % 2 == 0);
    let (inner, back) = if anchored { (&inner[..inner.len() - 1], "") } else { (inner, "(?s:.*)") };
    let mut escaped = false;
    let is_plain = |c: &char| {
        let is_plain = !escaped && *c != '\\';
        escaped = !escaped && !is_plain;
        is_plain
    };
    let plain = inner.chars().filter(is_plain).collect::<String>().replace("[^", "");
    // An anchor outside a group binds to one alternative only.
    if plain.contains(['^', '$', '\n', '\r'])
        || inner.contains("(?")
        || (inner.contains('|') && (front.is_empty() != back.is_empty()))
    {
        return Err(());
    }
    let inner = text_pattern(inner);
    if inner.is_empty() && front.is_empty() && back.is_empty() {
        return Err(());
    }
    Ok(format!("/{front}({inner}){back}/"))
}

/// A text as a part of a regular expression.
fn escaped(text: &str) -> String {
    text.chars().fold(String::new(), |mut all, c| {
        if "\\.+*?()|[]{}^$/".contains(c) {
            all.push('\\');
        }
        all.push(c);
        all
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_of_the_whole_text() {
        assert_eq!(whole_pattern("^a+$").as_deref(), Ok("/(a+)/"));
        assert_eq!(whole_pattern("a/b").as_deref(), Ok("/(?s:.*)(a\\/b)(?s:.*)/"));
        assert_eq!(whole_pattern(r"a\/[\\/]").as_deref(), Ok(r"/(?s:.*)(a\/[\\\/])(?s:.*)/"));
        assert_eq!(whole_pattern("^(a|b)$").as_deref(), Ok("/((a|b))/"));
        assert_eq!(whole_pattern("^[^a]$").as_deref(), Ok("/([^a])/"));
        assert_eq!(whole_pattern(r"^a\\$").as_deref(), Ok(r"/(a\\)/"));
        assert_eq!(whole_pattern(r"^a\$").as_deref(), Ok(r"/(a\$)(?s:.*)/"));
        assert_eq!(whole_pattern(r"^\d\W$").as_deref(), Ok(r"/([0-9][^0-9a-zA-Z_])/"));
        assert_eq!(whole_pattern(r"a\\^b"), Err(()));
        assert_eq!(whole_pattern("^a|b"), Err(()));
        assert_eq!(whole_pattern("a$b"), Err(()));
        assert_eq!(whole_pattern("(?=a)"), Err(()));
        assert_eq!(whole_pattern("a\\"), Err(()), "it would escape what follows it");
    }
}
