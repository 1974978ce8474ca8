//! Structural tags, xgrammar's notation (vLLM's and SGLang's `structural_tag`), rewritten as rules of Lark.
//!
//! ```text
//! {"format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [{"begin": "<f=a>", "content": {…}, "end": "</f>"}]}}
//! {"structures": [{"begin": "<f=a>", "schema": {…}, "end": "</f>"}], "triggers": ["<f="]}                    older form
//! ```
//!
//! The parser takes the longest lexeme that matches, so texts that stand side by side without a border are made
//! one lexeme. Free text and the mark that ends it are one regular expression: any text in which the mark occurs first at
//! the very end. A format is written with the marks that must follow it, so that free text inside of it knows its end.

mod fields;
mod tag;

use crate::error::shown;
use crate::expression::{ANY, SOME, ends_in_escape, quoted, regex, without};
use crate::gbnf;
use crate::kind::Kind;
use crate::schema;
use crate::source::TEXT_BYTES_MAX;
use fields::{Place, Written, flag, known, list, object, once, string, strings};
use serde_json::{Map, Value};
use std::fmt::Write as _;
use std::ops::Range;
use tag::{Flow, Tag, closed, is_open};

/// Deepest nesting of formats.
const DEPTH_MAX: usize = 32;
/// Most formats of a tag. The lists of each have a bound of their own.
const FORMATS_MAX: usize = 2048;
/// Most closing marks of one tag: free text has an expression for each of them.
const ENDS_MAX: usize = 64;
/// Most bytes of closing marks that are searched for triggers: a hundredth of a second.
const SEARCHED_BYTES_MAX: usize = 16 << 20;
/// Largest bound of a repetition.
const REPEAT_MAX: u64 = 10_000;
/// Most keywords named by one refusal.
const NAMED_MAX: usize = 4;

/// Fields of each format.
const FIELDS: [(&str, &[&str]); 15] = [
    ("any_text", &["excludes"]),
    ("const_string", &["value"]),
    // Properties in the order of the schema are in any order, too.
    ("json_schema", &["json_schema", "style", "any_order"]),
    ("regex", &["pattern"]),
    ("grammar", &["grammar"]),
    ("sequence", &["elements"]),
    ("or", &["elements"]),
    ("optional", &["content"]),
    ("plus", &["content"]),
    ("star", &["content"]),
    ("repeat", &["content", "min", "max"]),
    ("token", &["token"]),
    ("triggered_tags", &["tags", "triggers", "at_least_one", "stop_after_first", "excludes"]),
    ("tags_with_separator", &["tags", "separator", "at_least_one", "stop_after_first"]),
    ("dispatch", &["rules", "loop", "excludes"]),
];

/// Refusal of a structural tag.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct TagError {
    /// Place of the fault within the tag: `format.tags[0].content`; empty for the whole.
    pub at: String,
    /// Description of the fault.
    pub what: String,
}

/// Rules of Lark, and the name of the one to begin with. Names begin with `s` and `S`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TagRules {
    /// Name of the first rule.
    pub start: String,
    /// All rules, one a line.
    pub rules: String,
}

/// Control tokens of a model, which no text contains.
pub trait SpecialTokens {
    /// Name of the control token `id`; `None`: `id` is no control token with a name.
    fn name(&self, id: u32) -> Option<&str>;

    /// Names in `text` with their tokens, in order and without overlaps: each is the first behind the one before, and the
    /// longest of those that begin there.
    fn find(&self, text: &str) -> Vec<(Range<usize>, u32)>;
}

/// Writes a structural tag as rules. A mark that has the name of one of `specials` in it is followed as that token.
///
/// Cost: proportional to the text and to the rules, which are at most as long as a grammar's text may be.
///
/// # Errors
/// [`TagError`] for the first part that is malformed, cannot be enforced, or makes the rules too long.
pub fn to_rules(text: &str, specials: &dyn SpecialTokens) -> Result<TagRules, TagError> {
    let fault = |what: String| TagError { at: String::new(), what };
    if text.len() > TEXT_BYTES_MAX {
        return Err(fault(format!("has {} bytes, limit {TEXT_BYTES_MAX}", text.len())));
    }
    let tag: Value = serde_json::from_str(text).map_err(|error| fault(format!("not valid JSON: {error}")))?;
    let mut writer = Writer {
        specials,
        rules: String::new(),
        written: 0,
        searched: 0,
        count: 0,
        formats: 0,
        depth: 0,
        spent: schema::Spent::default(),
    };
    let (row, at) = match tag.get("format") {
        Some(format) => {
            let at = Place::root("format");
            (writer.format(format, &at, &[])?, at)
        }
        None => (writer.legacy(&tag)?, Place::root("")),
    };
    let start = writer.rule(row, &at)?;
    Ok(TagRules { start, rules: writer.rules })
}

/// Part of a sequence.
#[derive(Clone, Debug, PartialEq)]
enum Piece {
    /// Expression of a terminal: neighbours become one lexeme.
    Text(String),
    /// Reference to a rule or a token.
    Rule(String),
}

impl Piece {
    fn len(&self) -> usize {
        let (Self::Text(text) | Self::Rule(text)) = self;
        text.len()
    }
}

type Row = Vec<Piece>;

/// Borders of free text, as expressions that are written once for all of its ends.
struct Borders {
    /// One of the marks that end the text.
    stops: String,
    /// One of the texts that are not in it.
    excludes: Option<String>,
}

struct Writer<'a> {
    specials: &'a dyn SpecialTokens,
    rules: String,
    /// Bytes of all expressions so far, each of which becomes part of the rules.
    written: usize,
    /// Bytes of closing marks that were searched for a trigger so far.
    searched: usize,
    count: usize,
    formats: usize,
    depth: usize,
    /// Totals over the schemas so far.
    spent: schema::Spent,
}

impl Writer<'_> {
    /// A format, and behind it one of `ends`, if there are any.
    fn format(&mut self, format: &Value, at: &Place, ends: &[String]) -> Written<Row> {
        self.formats += 1;
        if self.formats > FORMATS_MAX || self.depth >= DEPTH_MAX {
            return at.fault(format!("the tag has more than {FORMATS_MAX} formats, or {DEPTH_MAX} levels"));
        }
        self.depth += 1;
        let written = self.by_type(format, at, ends);
        self.depth -= 1;
        written
    }

    fn by_type(&mut self, format: &Value, at: &Place, ends: &[String]) -> Written<Row> {
        let fields = object(format, at)?;
        let kind = string(fields, "type", at)?;
        if let Some((_, names)) = FIELDS.iter().find(|(known, _)| *known == kind) {
            known(fields, at, names)?;
        }
        let whole = match kind {
            "any_text" => {
                return self.until(ends, &strings(fields, "excludes", at)?, at);
            }
            "sequence" => return self.sequence(fields, at, ends),
            "triggered_tags" => return self.triggered_tags(fields, at, ends),
            "dispatch" => return self.dispatch(fields, at, ends),
            "or" => {
                let elements = list(fields, "elements", at)?;
                let each = |(index, element)| {
                    let row = self.format(element, &at.field("elements").item(index), ends)?;
                    Ok(row)
                };
                let rows = elements.iter().enumerate().map(each).collect::<Written<Vec<Row>>>()?;
                return self.either(rows, at);
            }
            "tag" => {
                let tag = self.tag(format, at)?;
                let mut row = self.literal(&tag.begin, at)?;
                row.extend(self.inside(&tag, ends)?);
                return Ok(row);
            }
            "const_string" => self.literal(string(fields, "value", at)?, at)?,
            "json_schema" => self.json(fields, at)?,
            "regex" => {
                let pattern = string(fields, "pattern", at)?;
                if ends_in_escape(pattern) {
                    return at.field("pattern").fault("ends in a backslash");
                }
                let expression = regex(pattern);
                self.charge(expression.len(), at)?;
                vec![Piece::Text(expression)]
            }
            "grammar" => {
                let text = string(fields, "grammar", at)?;
                self.count += 1;
                let rules = gbnf::to_rules(text, &format!("s{}g", self.count));
                let (start, rules) = rules.or_else(|error| at.field("grammar").fault(error.to_string()))?;
                self.charge(rules.len(), at)?;
                self.rules.push_str(&rules);
                vec![Piece::Rule(start)]
            }
            "optional" => self.repeated(fields, at, "?")?,
            "plus" => self.repeated(fields, at, "+")?,
            "star" => self.repeated(fields, at, "*")?,
            "repeat" => {
                let bounds = (fields.get("min").and_then(Value::as_u64), fields.get("max").and_then(Value::as_i64));
                let range = match bounds {
                    (Some(min), Some(-1)) if min <= REPEAT_MAX => format!("{{{min},}}"),
                    (Some(min), Some(max)) if u64::try_from(max).is_ok_and(|max| min <= max && max <= REPEAT_MAX) => {
                        format!("{{{min},{max}}}")
                    }
                    _ => {
                        let bounds = format!("min is an integer from 0 to {REPEAT_MAX}");
                        return at.fault(format!("{bounds}, max one from min to {REPEAT_MAX}, or -1 for no bound"));
                    }
                };
                self.repeated(fields, at, &range)?
            }
            "token" => {
                let name = self.token(fields, at)?;
                self.literal(&name, at)?
            }
            "tags_with_separator" => self.tags_with_separator(fields, at)?,
            other => return at.field("type").fault(format!("`{}` is not supported", shown(other))),
        };
        self.followed(whole, ends, at)
    }

    /// Older form: tags in free text, each with a schema.
    fn legacy(&mut self, tag: &Value) -> Written<Row> {
        let root = Place::root("");
        let fields = object(tag, &root)?;
        let triggers = strings(fields, "triggers", &root)?;
        let at = Place::root("structures");
        let mut read = Vec::new();
        for (index, structure) in list(fields, "structures", &root)?.iter().enumerate() {
            let at = at.item(index);
            let fields = object(structure, &at)?;
            let Some(schema) = fields.get("schema") else { return at.field("schema").fault("required, but missing") };
            let content = serde_json::json!({ "type": "json_schema", "json_schema": schema });
            let (begin, end) = (string(fields, "begin", &at)?, string(fields, "end", &at)?);
            read.push((at, begin.to_owned(), content, vec![end.to_owned()]));
        }
        let tags: Vec<Tag<'_>> = read
            .iter()
            .map(|(at, begin, content, ends)| Tag {
                begin: begin.clone(),
                at_begin: at.field("begin"),
                content,
                at_content: at.field("schema"),
                ends: ends.clone(),
            })
            .collect();
        self.triggered(&tags, &triggers, &Flow::default(), &root, &[])
    }

    fn sequence(&mut self, fields: &Map<String, Value>, at: &Place, ends: &[String]) -> Written<Row> {
        let (elements, at) = (list(fields, "elements", at)?, at.field("elements"));
        let mut row = Row::new();
        let mut index = 0;
        while let Some(element) = elements.get(index) {
            let (here, next) = (at.item(index), elements.get(index + 1));
            index += 1;
            let Some(next) = next else {
                row.extend(self.format(element, &here, ends)?);
                return Ok(row);
            };
            if !is_open(element) {
                row.extend(self.format(element, &here, &[])?);
                continue;
            }
            // Free text goes on to the mark that begins the next element.
            let there = at.item(index);
            let ends = if index + 1 == elements.len() { ends } else { &[] };
            match next.get("type").and_then(Value::as_str) {
                Some("const_string") => {
                    let mark = string(object(next, &there)?, "value", &there)?.to_owned();
                    if mark.is_empty() {
                        return there.fault("an empty string does not end the free text in front of it");
                    }
                    row.extend(self.format(element, &here, &[mark])?);
                    row.extend(self.ends(ends, &there)?);
                }
                Some("tag") => {
                    let tag = self.tag(next, &there)?;
                    if tag.begin.is_empty() {
                        return there.fault("an empty mark does not end the free text in front of it");
                    }
                    row.extend(self.format(element, &here, std::slice::from_ref(&tag.begin))?);
                    row.extend(self.inside(&tag, ends)?);
                }
                _ => return here.fault("free text is the last element, or stands in front of a const_string or a tag"),
            }
            index += 1;
        }
        Ok(row)
    }

    fn repeated(&mut self, fields: &Map<String, Value>, at: &Place, how_often: &str) -> Written<Row> {
        let Some(content) = fields.get("content") else { return at.field("content").fault("required, but missing") };
        let at = at.field("content");
        if is_open(content) {
            return at.fault("free text that nothing ends cannot be optional or repeated");
        }
        let row = self.format(content, &at, &[])?;
        Ok(vec![match row.as_slice() {
            [Piece::Text(text)] => Piece::Text(format!("({text}){how_often}")),
            _ => Piece::Rule(format!("{}{how_often}", self.rule(row, &at)?)),
        }])
    }

    fn json(&mut self, fields: &Map<String, Value>, at: &Place) -> Written<Row> {
        if fields.get("style").is_some_and(|style| style != "json") {
            return at.field("style").fault("styles other than `json` are not supported");
        }
        let Some(schema) = fields.get("json_schema") else {
            return at.field("json_schema").fault("required, but missing");
        };
        let prepared = schema::prepare_value(Kind::JsonSchema, schema.clone(), &mut self.spent);
        let (_, unenforced) = prepared.or_else(|error| at.field("json_schema").fault(error.to_string()))?;
        if !unenforced.is_empty() {
            let named: Vec<String> = unenforced.iter().take(NAMED_MAX).map(ToString::to_string).collect();
            return at.field("json_schema").fault(format!("not supported: {}", named.join(", ")));
        }
        // The schema is prepared where the whole text is.
        let schema = if schema.is_object() { schema.to_string() } else { "{}".to_owned() };
        self.charge(schema.len(), at)?;
        Ok(vec![Piece::Rule(self.define("s", &format!("%json {schema}"), at)?)])
    }

    fn tag<'t>(&self, format: &'t Value, at: &Place) -> Written<Tag<'t>> {
        let fields = object(format, at)?;
        known(fields, at, &["begin", "content", "end"])?;
        if fields.get("type").is_some_and(|kind| kind != "tag") {
            return at.field("type").fault("must be `tag`");
        }
        let mark = |name: &str, value: Option<&Value>| match value {
            Some(Value::String(text)) => Ok(text.clone()),
            Some(Value::Object(token)) => self.token(token, &at.field(name)),
            _ => at.field(name).fault("must be a string or a token"),
        };
        let ends = match fields.get("end") {
            Some(Value::Array(ends)) if !ends.is_empty() && ends.len() <= ENDS_MAX => {
                once(ends.iter().map(|end| mark("end", Some(end))).collect::<Written<_>>()?)
            }
            Some(Value::Array(_)) => {
                return at.field("end").fault(format!("must be a mark, or a list of 1 to {ENDS_MAX} marks"));
            }
            end => vec![mark("end", end)?],
        };
        let Some(content) = fields.get("content") else { return at.field("content").fault("required, but missing") };
        let begin = mark("begin", fields.get("begin"))?;
        Ok(Tag { begin, at_begin: at.field("begin"), content, at_content: at.field("content"), ends })
    }

    /// Content and closing mark of a tag, and behind them one of `ends`.
    fn inside(&mut self, tag: &Tag<'_>, ends: &[String]) -> Written<Row> {
        if tag.ends.iter().all(String::is_empty) {
            return self.format(tag.content, &tag.at_content, ends);
        }
        let row = self.format(tag.content, &tag.at_content, &tag.ends)?;
        self.followed(row, ends, &tag.at_content)
    }

    /// A row, and behind it one of `ends`.
    fn followed(&mut self, mut row: Row, ends: &[String], at: &Place) -> Written<Row> {
        row.extend(self.ends(ends, at)?);
        Ok(row)
    }

    fn tags_with_separator(&mut self, fields: &Map<String, Value>, at: &Place) -> Written<Row> {
        let flow = Flow::of(fields, at)?;
        let separator = self.literal(string(fields, "separator", at)?, at)?;
        let mut rows = Vec::new();
        for (index, tag) in list(fields, "tags", at)?.iter().enumerate() {
            let at = at.field("tags").item(index);
            let tag = self.tag(tag, &at)?;
            closed(&tag)?;
            let mut row = self.literal(&tag.begin, &at)?;
            row.extend(self.inside(&tag, &[])?);
            rows.push(row);
        }
        let one = self.either(rows, at)?;
        let one = self.rule(one, at)?;
        let separator = self.rule(separator, at)?;
        let all = if flow.stop_after_first { one } else { format!("{one} ({separator} {one})*") };
        let all = self.define("s", &all, at)?;
        Ok(vec![Piece::Rule(if flow.at_least_one { all } else { format!("{all}?") })])
    }

    fn triggered_tags(&mut self, fields: &Map<String, Value>, at: &Place, ends: &[String]) -> Written<Row> {
        let tags = list(fields, "tags", at)?.iter().enumerate();
        let tags =
            tags.map(|(index, tag)| self.tag(tag, &at.field("tags").item(index))).collect::<Written<Vec<_>>>()?;
        self.triggered(&tags, &strings(fields, "triggers", at)?, &Flow::of(fields, at)?, at, ends)
    }

    fn dispatch(&mut self, fields: &Map<String, Value>, at: &Place, ends: &[String]) -> Written<Row> {
        let at_rules = at.field("rules");
        let mut tags = Vec::new();
        for (index, rule) in list(fields, "rules", at)?.iter().enumerate() {
            let at = at_rules.item(index);
            match rule.as_array().map(Vec::as_slice) {
                Some([Value::String(begin), content]) => {
                    tags.push(Tag {
                        begin: begin.clone(),
                        at_begin: at.item(0),
                        content,
                        at_content: at.item(1),
                        ends: vec![String::new()],
                    });
                }
                _ => return at.fault("must be a string and a format"),
            }
        }
        let triggers: Vec<String> = tags.iter().map(|tag| tag.begin.clone()).collect();
        let excludes = strings(fields, "excludes", at)?;
        let stop_after_first = !flag(fields, "loop", true, at)?;
        self.triggered(&tags, &triggers, &Flow { at_least_one: false, stop_after_first, excludes }, at, ends)
    }

    /// Free text in which each trigger begins one of the tags, and behind it one of `ends`.
    fn triggered(
        &mut self,
        tags: &[Tag<'_>],
        triggers: &[String],
        flow: &Flow,
        at: &Place,
        ends: &[String],
    ) -> Written<Row> {
        if tags.is_empty() || triggers.is_empty() || triggers.iter().any(String::is_empty) {
            return at.fault("needs tags, and triggers that are not empty");
        }
        let ends: Vec<String> = ends.iter().filter(|end| !end.is_empty()).cloned().collect();
        let borders = self.borders(triggers.iter().chain(&ends), &flow.excludes, at)?;
        // An automaton of a client's texts can take quadratic time to build: each mark is searched for each trigger.
        self.searched += ends.iter().map(String::len).sum::<usize>().saturating_mul(triggers.len());
        if self.searched > SEARCHED_BYTES_MAX {
            return at.fault("too many triggers in front of such long closing marks");
        }
        if let Some(end) = ends.iter().find(|end| triggers.iter().any(|trigger| end.contains(trigger.as_str()))) {
            return at.fault(format!("the closing mark {:?} contains a trigger", shown(end)));
        }
        let (mut items, mut firsts) = (Vec::new(), Vec::new());
        for tag in tags {
            let mut fitting = triggers.iter().filter(|trigger| tag.begin.starts_with(trigger.as_str()));
            let (Some(trigger), None) = (fitting.next(), fitting.next()) else {
                return tag.at_begin.fault(format!("exactly one trigger must begin {:?}", shown(&tag.begin)));
            };
            closed(tag)?;
            let inside = self.inside(tag, &[])?;
            self.charge(inside.iter().map(Piece::len).sum(), &tag.at_content)?;
            let mut item = self.up_to(&tag.begin, trigger.len(), &borders, &tag.at_begin)?;
            item.extend(inside.clone());
            items.push(item);
            let mut first = self.literal(&tag.begin, &tag.at_begin)?;
            first.extend(inside);
            firsts.push(first);
        }
        let tail = if ends.is_empty() { self.unended(&borders, at)? } else { self.free(&ends, &borders, at)? };
        let (items, firsts) = (self.either(items, at)?, self.either(firsts, at)?);
        let (items, firsts, tail) = (self.rule(items, at)?, self.rule(firsts, at)?, self.rule(tail, at)?);
        let ends = self.ends(&ends, at)?;
        let ends = if ends.is_empty() { String::new() } else { self.rule(ends, at)? };
        let whole = match (flow.at_least_one, flow.stop_after_first) {
            (false, false) => format!("{items}* {tail}"),
            (true, false) => format!("{firsts} {items}* {tail}"),
            (false, true) => format!("{items} {ends} | {tail}"),
            (true, true) => format!("{firsts} {ends}"),
        };
        Ok(vec![Piece::Rule(self.define("s", &whole, at)?)])
    }

    /// Any text up to and with the first of `ends`, without the strings of `excludes`; without `ends`, to the end of
    /// the answer.
    fn until(&mut self, ends: &[String], excludes: &[String], at: &Place) -> Written<Row> {
        let closing: Vec<String> = ends.iter().filter(|end| !end.is_empty()).cloned().collect();
        if closing.len() < ends.len() && !closing.is_empty() {
            return at.fault("free text has several ends, one of which is empty");
        }
        // What ends the text cannot be inside of it.
        let inside = |exclude: &&String| !closing.iter().any(|end| exclude.contains(end.as_str()));
        let excludes: Vec<String> = excludes.iter().filter(inside).cloned().collect();
        if closing.is_empty() {
            let excludes = self.one_of(&excludes, at)?;
            return Ok(vec![self.text(without(excludes.as_deref()), at)?]);
        }
        let borders = self.borders(closing.iter(), &excludes, at)?;
        self.free(&closing, &borders, at)
    }

    fn borders<'s>(
        &mut self,
        stops: impl Iterator<Item = &'s String>,
        excludes: &[String],
        at: &Place,
    ) -> Written<Borders> {
        let stops = self.one_of(&stops.cloned().collect::<Vec<_>>(), at)?.unwrap_or_default();
        Ok(Borders { stops, excludes: self.one_of(excludes, at)? })
    }

    /// Any text up to and with the first of `ends`, which are among the stops of `borders`.
    fn free(&mut self, ends: &[String], borders: &Borders, at: &Place) -> Written<Row> {
        let rows = ends.iter().map(|end| self.up_to(end, end.len(), borders, at)).collect::<Written<_>>()?;
        self.either(rows, at)
    }

    /// Any text that crosses none of `borders`.
    fn unended(&mut self, borders: &Borders, at: &Place) -> Written<Row> {
        let barred = match &borders.excludes {
            Some(excludes) => format!("({} | {excludes})", borders.stops),
            None => borders.stops.clone(),
        };
        Ok(vec![self.text(without(Some(&barred)), at)?])
    }

    /// Any text in front of `mark`, and the mark. Its first `first` bytes are where one of the stops occurs first.
    fn up_to(&mut self, mark: &str, first: usize, borders: &Borders, at: &Place) -> Written<Row> {
        let pieces = self.split(mark);
        let front = match pieces.first() {
            Some(Part::Text(text)) => *text,
            _ => "",
        };
        if front.len() >= first {
            let (first, rest) = mark.split_at(first);
            let (text, stops) = (without(borders.excludes.as_deref()), &borders.stops);
            let head = self.text(format!("((({text}) {}) & ~({ANY} {stops} {SOME}))", quoted(first)), at)?;
            return Ok([vec![head], self.literal(rest, at)?].concat());
        }
        // A control token ends the text. Its name is kept out of the text, too: readers cannot tell the two apart.
        let mut row = self.unended(borders, at)?;
        if !front.is_empty() {
            row.push(self.text(quoted(front), at)?);
        }
        row.extend(self.literal(&mark[front.len()..], at)?);
        Ok(row)
    }

    /// Rules that match one of the closing marks; empty if no mark closes anything.
    fn ends(&mut self, ends: &[String], at: &Place) -> Written<Row> {
        if ends.iter().all(String::is_empty) {
            return Ok(Row::new());
        }
        let rows = ends.iter().map(|end| self.literal(end, at)).collect::<Written<_>>()?;
        self.either(rows, at)
    }

    /// Expression that matches one of `texts`, by a name if there are several; `None`: there are none.
    fn one_of(&mut self, texts: &[String], at: &Place) -> Written<Option<String>> {
        let mut all = String::new();
        for text in texts {
            let text = quoted(text);
            self.charge(text.len(), at)?;
            all.push_str(if all.is_empty() { "" } else { " | " });
            all.push_str(&text);
        }
        match texts {
            [] => Ok(None),
            [_] => Ok(Some(all)),
            _ => self.define("S", &all, at).map(Some),
        }
    }

    fn text(&mut self, expression: String, at: &Place) -> Written<Piece> {
        self.charge(expression.len(), at)?;
        Ok(Piece::Text(expression))
    }

    /// A fixed text: control tokens in it as tokens, the rest as text.
    fn literal(&mut self, text: &str, at: &Place) -> Written<Row> {
        let part = |part: Part<'_>| match part {
            Part::Text(text) => Piece::Text(quoted(text)),
            Part::Token(id) => Piece::Rule(format!("<[{id}]>")),
        };
        let row: Row = self.split(text).into_iter().map(part).collect();
        self.charge(row.iter().map(Piece::len).sum(), at)?;
        Ok(row)
    }

    fn split<'t>(&self, text: &'t str) -> Vec<Part<'t>> {
        let (mut parts, mut done) = (Vec::new(), 0);
        for (range, id) in self.specials.find(text) {
            parts.extend((range.start > done).then(|| Part::Text(&text[done..range.start])));
            parts.push(Part::Token(id));
            done = range.end;
        }
        parts.extend((done < text.len()).then(|| Part::Text(&text[done..])));
        parts
    }

    /// Name of a token, which is its text unless it is a control token.
    fn token(&self, fields: &Map<String, Value>, at: &Place) -> Written<String> {
        match fields.get("token") {
            Some(Value::String(name)) if !name.is_empty() => Ok(name.clone()),
            Some(Value::Number(id)) => {
                let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
                let Some(name) = id.and_then(|id| self.specials.name(id)) else {
                    return at.field("token").fault("is not a control token of the model");
                };
                Ok(name.to_owned())
            }
            _ => at.field("token").fault("must be the name or the id of a token"),
        }
    }

    fn either(&mut self, mut rows: Vec<Row>, at: &Place) -> Written<Row> {
        if rows.len() == 1 {
            return Ok(rows.pop().unwrap_or_default());
        }
        let texts: Option<Vec<String>> = rows.iter().map(|row| as_text(row)).collect();
        if let Some(texts) = texts {
            return Ok(vec![Piece::Text(format!("({})", texts.join(" | ")))]);
        }
        let names = rows.into_iter().map(|row| self.rule(row, at)).collect::<Written<Vec<_>>>()?;
        Ok(vec![Piece::Rule(self.define("s", &names.join(" | "), at)?)])
    }

    /// Name of a rule for a row, in which neighbouring texts are one lexeme.
    fn rule(&mut self, row: Row, at: &Place) -> Written<String> {
        let mut names: Vec<String> = Vec::new();
        let mut pieces = row.into_iter().peekable();
        while let Some(piece) = pieces.next() {
            names.push(match piece {
                Piece::Rule(name) => name,
                Piece::Text(mut text) => {
                    while let Some(Piece::Text(more)) = pieces.next_if(|piece| matches!(piece, Piece::Text(_))) {
                        text.push(' ');
                        text.push_str(&more);
                    }
                    self.define("S", &text, at)?
                }
            });
        }
        match names.as_slice() {
            [] => self.define("s", "\"\"", at),
            _ => self.define("s", &names.join(" "), at),
        }
    }

    fn define(&mut self, prefix: &str, body: &str, at: &Place) -> Written<String> {
        self.bound(self.rules.len() + body.len(), at)?;
        self.count += 1;
        let name = format!("{prefix}{}", self.count);
        // Writing to a string does not fail.
        let _ = writeln!(self.rules, "{name}: {body}");
        Ok(name)
    }

    /// Counts the bytes of an expression. The rules hold each expression at least once, so that a tag whose rules are
    /// within their bound is never refused here; and what is counted bounds the memory that is held meanwhile.
    fn charge(&mut self, bytes: usize, at: &Place) -> Written<()> {
        self.written = self.written.saturating_add(bytes);
        self.bound(self.written, at)
    }

    fn bound(&self, bytes: usize, at: &Place) -> Written<()> {
        if bytes > TEXT_BYTES_MAX {
            return at.fault(format!("up to here the tag takes a grammar of more than {TEXT_BYTES_MAX} bytes"));
        }
        Ok(())
    }
}

/// Part of a fixed text.
enum Part<'a> {
    Text(&'a str),
    Token(u32),
}

/// Row as one expression of a terminal, if it is text alone.
fn as_text(row: &[Piece]) -> Option<String> {
    let texts: Option<Vec<&str>> = row
        .iter()
        .map(|piece| match piece {
            Piece::Text(text) => Some(text.as_str()),
            Piece::Rule(_) => None,
        })
        .collect();
    texts.map(|texts| if texts.is_empty() { "\"\"".to_owned() } else { texts.join(" ") })
}
