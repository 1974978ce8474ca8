//! Structural tags: what their rules accept is what a recogniser of its own accepts, for formats and texts made by chance.

use crate::common::random;
use penstock_grammar::structural_tag::{SpecialTokens, to_rules};
use penstock_grammar::{Grammar, Matcher, Source, TokenText, Vocabulary};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, LazyLock};

/// Characters of all texts, and tokens of several of them.
const CHARACTERS: &str = "<>/ab|{}\":01xyz() ";
const LONGER: [&str; 9] = ["<a", "a>", "</", "</a>", "{\"a\":", "<b>", "||", "xy", "<|c|>"];
const SPECIAL: &str = "<|c|>";

static TOKENS: LazyLock<Vec<String>> =
    LazyLock::new(|| CHARACTERS.chars().map(String::from).chain(LONGER.map(str::to_owned)).collect());

static VOCABULARY: LazyLock<Arc<Vocabulary>> = LazyLock::new(|| {
    let tokens = TOKENS.iter().map(|text| TokenText { bytes: text.as_bytes(), is_special: text == SPECIAL });
    Vocabulary::new(tokens, &[], TOKENS.len()).expect("a vocabulary")
});

struct Specials;

impl SpecialTokens for Specials {
    fn name(&self, id: u32) -> Option<&str> {
        (id as usize + 1 == TOKENS.len()).then_some(SPECIAL)
    }

    fn find(&self, text: &str) -> Vec<(Range<usize>, u32)> {
        let id = (TOKENS.len() - 1) as u32;
        text.match_indices(SPECIAL).map(|(at, name)| (at..at + name.len(), id)).collect()
    }
}

fn grammar(tag: &Value) -> Grammar {
    let rules = to_rules(&tag.to_string(), &Specials).unwrap_or_else(|error| panic!("{tag}: {}: {error}", error.at));
    let text = format!("start: {}\n{}", rules.start, rules.rules);
    Grammar::compile(&Source::lark(&text), &VOCABULARY).unwrap_or_else(|error| panic!("{tag}\n{text}\n{error}"))
}

/// Tokens of a text: the control token by its name, all others by their characters.
fn tokens(text: &str) -> Vec<u32> {
    let (mut out, mut rest) = (Vec::new(), text);
    while !rest.is_empty() {
        let found = TOKENS.iter().rposition(|token| rest.starts_with(token) && (token.len() == 1 || token == SPECIAL));
        let id = found.unwrap_or_else(|| panic!("no token: {rest}"));
        rest = &rest[TOKENS[id].len()..];
        out.push(id as u32);
    }
    out
}

fn accepts(grammar: &Grammar, text: &str) -> bool {
    let mut matcher = grammar.matcher();
    matcher.replay(&tokens(text)).is_ok() && matcher.is_accepting().expect("within limits")
}

type Ends = BTreeSet<usize>;

/// Ends of the texts of a format that begin at `at`, with one of `marks` behind them if there are any.
fn ends(format: &Value, text: &str, at: usize, marks: &[String]) -> Ends {
    let strings = |key: &str| -> Vec<String> {
        format[key].as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let elements = || format["elements"].as_array().expect("elements");
    let content = || &format["content"];
    let plain: Ends = match format["type"].as_str().expect("a type") {
        "any_text" => return free(text, at, marks, &[], &strings("excludes")),
        "or" => return elements().iter().flat_map(|element| ends(element, text, at, marks)).collect(),
        "sequence" => {
            let mut from = Ends::from([at]);
            let all = elements();
            for (index, element) in all.iter().enumerate() {
                let last = index + 1 == all.len();
                // Free text in front of a mark ends with its first occurrence.
                let mark = all.get(index + 1).and_then(|next| next["value"].as_str().or(next["begin"].as_str()));
                from = match mark.filter(|_| !last) {
                    Some(mark) if is_free(element) => {
                        let after = |at: &usize| ends(element, text, *at, &[mark.to_owned()]);
                        from.iter().flat_map(after).map(|end| end - mark.len()).collect()
                    }
                    _ => from.iter().flat_map(|at| ends(element, text, *at, if last { marks } else { &[] })).collect(),
                };
            }
            return from;
        }
        "tag" => {
            let begin = format["begin"].as_str().expect("begin");
            if !text[at..].starts_with(begin) {
                return Ends::new();
            }
            let closing = strings("end");
            let closing =
                if closing.is_empty() { vec![format["end"].as_str().expect("end").to_owned()] } else { closing };
            ends(content(), text, at + begin.len(), &closing)
        }
        "triggered_tags" => return triggered(format, text, at, marks),
        "tags_with_separator" => {
            let tags = format["tags"].as_array().expect("tags");
            let one = |at: usize| tags.iter().flat_map(|tag| ends(tag, text, at, &[])).collect::<Ends>();
            let mut all = if format["at_least_one"] == true { Ends::new() } else { Ends::from([at]) };
            let mut last = one(at);
            while !last.is_empty() {
                all.extend(&last);
                let separator = format["separator"].as_str().expect("separator");
                let next = last.iter().filter(|at| text[**at..].starts_with(separator)).map(|at| at + separator.len());
                last = if format["stop_after_first"] == true { Ends::new() } else { next.flat_map(one).collect() };
            }
            all
        }
        "const_string" => {
            let value = format["value"].as_str().expect("a value");
            text[at..].starts_with(value).then_some(at + value.len()).into_iter().collect()
        }
        "json_schema" => ["{\"a\":0}", "{\"a\":1}", "{\"a\":true}"]
            .iter()
            .filter(|value| text[at..].starts_with(**value))
            .map(|value| at + value.len())
            .collect(),
        // One to three of a and b.
        "regex" => (1..=3)
            .filter(|count| text[at..].len() >= *count && text[at..at + count].bytes().all(|b| b"ab".contains(&b)))
            .map(|count| at + count)
            .collect(),
        "grammar" => nested(text, at),
        "optional" => [Ends::from([at]), ends(content(), text, at, &[])].concat_all(),
        "repeat" => {
            let (mut all, mut from) = (Ends::new(), Ends::from([at]));
            for count in 0..=3 {
                if count >= 1 {
                    all.extend(&from);
                }
                from = from.iter().flat_map(|at| ends(content(), text, *at, &[])).collect();
            }
            all
        }
        other => panic!("{other}"),
    };
    match marks {
        [] => plain,
        _ => {
            let closed = |at: &usize| {
                marks
                    .iter()
                    .filter(|mark| text[*at..].starts_with(*mark))
                    .map(|mark| *at + mark.len())
                    .collect::<Vec<_>>()
            };
            plain.iter().flat_map(closed).collect()
        }
    }
}

trait ConcatAll {
    fn concat_all(self) -> Ends;
}

impl ConcatAll for [Ends; 2] {
    fn concat_all(self) -> Ends {
        self.into_iter().flatten().collect()
    }
}

fn is_free(format: &Value) -> bool {
    matches!(format["type"].as_str(), Some("any_text" | "triggered_tags"))
}

/// `(`…`)` around a z, any number of times.
fn nested(text: &str, at: usize) -> Ends {
    match text[at..].chars().next() {
        Some('z') => Ends::from([at + 1]),
        Some('(') => {
            nested(text, at + 1).into_iter().filter(|at| text[*at..].starts_with(')')).map(|at| at + 1).collect()
        }
        _ => Ends::new(),
    }
}

/// First place at which one of `stops` is complete.
fn first_stop(text: &str, at: usize, stops: &[String]) -> Option<usize> {
    (at..=text.len()).find(|end| stops.iter().any(|stop| text[at..*end].ends_with(stop.as_str())))
}

/// Ends of free text: behind its first mark; without marks, anywhere in front of the first of `barred`.
fn free(text: &str, at: usize, marks: &[String], barred: &[String], excludes: &[String]) -> Ends {
    let stops = [marks, barred].concat();
    let stop = first_stop(text, at, &stops);
    let barred = |text: &str| text.contains(SPECIAL) || excludes.iter().any(|exclude| text.contains(exclude.as_str()));
    let is_clean = |end: usize| !barred(&text[at..end]);
    if marks.is_empty() {
        let most = stop.map_or(text.len() + 1, |stop| stop);
        return (at..most.min(text.len() + 1)).filter(|end| is_clean(*end)).collect();
    }
    let Some(stop) = stop else { return Ends::new() };
    let closes = |mark: &&String| text[at..stop].ends_with(mark.as_str()) && is_clean(stop - mark.len());
    marks.iter().any(|mark| closes(&mark)).then_some(stop).into_iter().collect()
}

fn triggered(format: &Value, text: &str, at: usize, marks: &[String]) -> Ends {
    let triggers: Vec<String> =
        format["triggers"].as_array().expect("triggers").iter().map(|t| t.as_str().expect("text").to_owned()).collect();
    let tags = format["tags"].as_array().expect("tags");
    let closed = |at: usize| -> Vec<usize> {
        match marks {
            [] => vec![at],
            _ => {
                marks.iter().filter(|mark| text[at..].starts_with(mark.as_str())).map(|mark| at + mark.len()).collect()
            }
        }
    };
    let (mut all, mut done, mut from) = (Ends::new(), Ends::new(), vec![(at, true)]);
    let stops = [&triggers[..], marks].concat();
    while let Some((at, first)) = from.pop() {
        let must = first && format["at_least_one"] == true;
        if !must {
            all.extend(free(text, at, marks, &triggers, &[]));
        }
        let Some(stop) = first_stop(text, at, &stops) else { continue };
        for tag in tags {
            let begin = tag["begin"].as_str().expect("begin");
            let trigger = triggers.iter().find(|trigger| begin.starts_with(trigger.as_str())).expect("a trigger");
            let Some(start) = stop.checked_sub(trigger.len()).filter(|start| *start >= at && (!must || *start == at))
            else {
                continue;
            };
            if text[at..start].contains(SPECIAL) {
                continue;
            }
            for end in ends(tag, text, start, &[]) {
                if format["stop_after_first"] == true {
                    all.extend(closed(end));
                } else if done.insert(end) {
                    from.push((end, false));
                }
            }
        }
    }
    all
}

fn recognises(tag: &Value, text: &str) -> bool {
    ends(&tag["format"], text, 0, &[]).contains(&text.len())
}

struct Chance {
    seed: u64,
    at: usize,
}

impl Chance {
    fn below(&mut self, bound: usize) -> usize {
        self.at += 1;
        random(self.seed, self.at) % bound
    }

    fn pick<'a>(&mut self, all: &[&'a str]) -> &'a str {
        all[self.below(all.len())]
    }

    fn one_in(&mut self, bound: usize) -> bool {
        self.below(bound) == 0
    }

    /// A format with an end of its own.
    fn closed(&mut self, depth: usize) -> Value {
        match self.below(if depth > 2 { 4 } else { 9 }) {
            0 => json!({"type": "const_string", "value": self.pick(&["x", "yy", "<b>", "|"])}),
            1 => json!({"type": "json_schema", "json_schema": {
                "type": "object", "properties": {"a": {"enum": [0, 1, true]}}, "required": ["a"], "additionalProperties": false,
            }}),
            2 => json!({"type": "regex", "pattern": "^[ab]{1,3}$"}),
            3 => json!({"type": "grammar", "grammar": "root ::= \"(\" root \")\" | \"z\""}),
            4 => self.tag(depth),
            5 => {
                // A border between the elements, since a lexeme is as long as it can be.
                let elements =
                    [self.closed(depth + 1), json!({"type": "const_string", "value": " "}), self.closed(depth + 1)];
                json!({"type": "sequence", "elements": elements})
            }
            6 => json!({"type": "or", "elements": [self.closed(depth + 1), self.closed(depth + 1)]}),
            7 => {
                let (at_least_one, stop_after_first) = (self.one_in(2), self.one_in(3));
                json!({"type": "tags_with_separator", "tags": [self.tag(depth + 1), self.tag(depth + 1)],
                    "separator": self.pick(&["|", " "]), "at_least_one": at_least_one, "stop_after_first": stop_after_first})
            }
            _ if self.one_in(2) => json!({"type": "optional", "content": self.tag(depth + 1)}),
            _ => json!({"type": "repeat", "min": 1, "max": 3, "content": self.tag(depth + 1)}),
        }
    }

    fn tag(&mut self, depth: usize) -> Value {
        let content = self.format(depth + 1);
        let end = if self.one_in(4) { json!(["</b>", "</a>"]) } else { json!(self.pick(&["</a>", "/", "<|c|>"])) };
        json!({"type": "tag", "begin": self.pick(&["<a>", "<b>", "<a|"]), "content": content, "end": end})
    }

    fn format(&mut self, depth: usize) -> Value {
        match self.below(6) {
            0 if self.one_in(3) => json!({"type": "any_text", "excludes": ["xy"]}),
            0 => json!({"type": "any_text"}),
            1 if depth < 3 => self.triggered(depth),
            2 if depth < 3 => {
                let (first, last) = (self.format(depth + 1), self.format(depth + 1));
                let mark = json!({"type": "const_string", "value": self.pick(&["||", " : "])});
                json!({"type": "sequence", "elements": [first, mark, last]})
            }
            _ => self.closed(depth),
        }
    }

    fn triggered(&mut self, depth: usize) -> Value {
        let mut tags = vec![self.tag(depth + 1), self.tag(depth + 1)];
        tags[0]["begin"] = json!("<a>");
        tags[1]["begin"] = json!(self.pick(&["<a|", "<b>"]));
        let triggers = if self.one_in(2) { json!(["<a", "<b"]) } else { json!(["<"]) };
        json!({"type": "triggered_tags", "triggers": triggers, "tags": tags, "at_least_one": self.one_in(3),
            "stop_after_first": self.one_in(3)})
    }
}

/// A walk through the grammar by chance; every text on it that may end there.
fn walk(matcher: &mut Matcher, chance: &mut Chance) -> Vec<String> {
    let (mut text, mut ended) = (String::new(), Vec::new());
    for _ in 0..48 {
        if matcher.is_accepting().expect("within limits") {
            ended.push(text.clone());
        }
        if matcher.is_complete() {
            break;
        }
        let mask = matcher.mask().expect("within limits");
        let allowed: Vec<u32> =
            (0..TOKENS.len() as u32).filter(|token| mask.bits[*token as usize / 32] >> (token % 32) & 1 == 1).collect();
        if allowed.is_empty() {
            break;
        }
        // Long tokens are parts of marks.
        let long: Vec<u32> = allowed.iter().copied().filter(|token| TOKENS[*token as usize].len() > 1).collect();
        let from = if long.is_empty() || chance.one_in(2) { &allowed } else { &long };
        let token = from[chance.below(from.len())];
        matcher.consume(token).expect("it is allowed");
        text.push_str(&TOKENS[token as usize]);
    }
    ended
}

/// Formats made by chance whose closing marks contain no trigger.
fn formats() -> impl Iterator<Item = (u64, Value)> {
    (0..400).filter_map(|seed| {
        let tag = json!({"format": Chance { seed, at: 0 }.format(0)});
        match to_rules(&tag.to_string(), &Specials) {
            Ok(_) => Some((seed, tag)),
            Err(error) => {
                assert!(
                    error.what.contains("contains a trigger") || error.what.contains("free text"),
                    "{tag}: {error}"
                );
                None
            }
        }
    })
}

#[test]
fn what_is_accepted_is_of_the_format() {
    let (mut count, mut texts) = (0, 0);
    for (seed, tag) in formats() {
        let grammar = grammar(&tag);
        count += 1;
        for round in 0..6 {
            let mut chance = Chance { seed: seed * 31 + round, at: 1000 };
            for text in walk(&mut grammar.matcher(), &mut chance) {
                texts += 1;
                assert!(recognises(&tag, &text), "{tag}\naccepts {text:?}");
            }
        }
    }
    assert!(count > 200 && texts > 2000, "{count} formats, {texts} texts");
}

#[test]
fn what_is_of_the_format_is_accepted() {
    let (mut good, mut bad) = (0, 0);
    for (seed, tag) in formats() {
        let grammar = grammar(&tag);
        for round in 0..4 {
            let mut chance = Chance { seed: seed * 17 + round, at: 2000 };
            let Some(text) = walk(&mut grammar.matcher(), &mut chance).pop() else { continue };
            // A text near one of the format's: some are of it, most are not.
            let mut near: Vec<char> = text.chars().collect();
            let (at, characters) = (chance.below(near.len() + 1), CHARACTERS.chars().collect::<Vec<_>>());
            match chance.below(3) {
                0 if at < near.len() => drop(near.remove(at)),
                1 if at < near.len() => near[at] = characters[chance.below(characters.len())],
                _ => near.insert(at, characters[chance.below(characters.len())]),
            }
            let near: String = near.into_iter().collect();
            if near.replace(SPECIAL, "").contains('c') {
                // The control token is broken, and no other token has this character.
                continue;
            }
            let is_of = recognises(&tag, &near);
            assert_eq!(accepts(&grammar, &near), is_of, "{tag}\n{near:?}");
            good += usize::from(is_of);
            bad += usize::from(!is_of);
        }
    }
    assert!(good > 100 && bad > 100, "{good} of the formats, {bad} not");
}

#[test]
fn the_older_form_is_tags_in_free_text() {
    let schema = json!({"type": "object", "properties": {"a": {"enum": [0, 1]}}, "required": ["a"], "additionalProperties": false});
    let tag = json!({"triggers": ["<a"], "structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}]});
    let grammar = grammar(&tag);
    for (text, is_of) in [
        ("", true),
        ("xy", true),
        ("x<a>{\"a\":1}</a>y<a>{\"a\":0}</a>", true),
        ("<a>{\"a\":1}", false),
        ("<a", false),
        ("<a>{\"a\":x}</a>", false),
    ] {
        assert_eq!(accepts(&grammar, text), is_of, "{text}");
    }
}

#[test]
fn what_cannot_be_enforced_is_refused_by_its_place() {
    let text = json!({"type": "any_text"});
    let tag = |begin: &str, end: Value, content: &Value| json!({"type": "tag", "begin": begin, "content": content, "end": end});
    let triggered = |trigger: &str, tag: Value| json!({"type": "triggered_tags", "triggers": [trigger], "tags": [tag]});
    let repeat = |min: Value, max: Value| json!({"type": "repeat", "content": {"type": "regex", "pattern": "a"}, "min": min, "max": max});
    let closed = json!({"type": "const_string", "value": "x"});
    let unique = json!({"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": true}});
    for (format, at, what) in [
        (json!({"type": "any_tokens"}), "format.type", "any_tokens"),
        (json!({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}), "format.style", "json"),
        (json!({"type": "any_text", "max_tokens": 5}), "format.max_tokens", "not supported"),
        (tag("<a>", json!("</a>"), &unique), "format.content.json_schema", "uniqueItems"),
        (json!({"type": "grammar", "grammar": "start: \"a\""}), "format.grammar", "expected `::=`"),
        (json!({"type": "sequence", "elements": [text, unique]}), "format.elements[0]", "free text"),
        (json!({"type": "star", "content": text}), "format.content", "free text"),
        (json!({"type": "repeat", "content": text, "min": 3, "max": 2}), "format", "max"),
        (triggered("<b", tag("<a>", json!("</a>"), &text)), "format.tags[0].begin", "exactly one trigger"),
        (
            json!({"type": "dispatch", "rules": [["<a", closed], ["<a>", closed]]}),
            "format.rules[1][0]",
            "exactly one trigger",
        ),
        (repeat(json!(u64::MAX), json!(3)), "format", "from 0 to 10000"),
        (repeat(json!(10001), json!(-1)), "format", "from 0 to 10000"),
        (repeat(json!(0), json!(-2)), "format", "-1 for no bound"),
        (tag("<a>", json!(vec!["x"; 65]), &text), "format.end", "1 to 64 marks"),
        (triggered("<a", tag("<a>", json!(""), &text)), "format.tags[0].content", "closing mark"),
        (
            tag("(", json!("<a>"), &triggered("<", tag("<b>", json!("/"), &text))),
            "format.content",
            "contains a trigger",
        ),
        (json!({"type": "token", "token": 3}), "format.token", "control token"),
        (json!({"type": "regex", "pattern": "a\\"}), "format.pattern", "ends in a backslash"),
        (json!({"type": "tag", "begin": "a", "end": "b"}), "format.content", "missing"),
        (json!({"type": "sequence", "elements": []}), "format.elements", "1 to"),
        (json!("x"), "format", "an object"),
    ] {
        let error = to_rules(&json!({"format": format}).to_string(), &Specials).expect_err("refused");
        assert!(error.at == at && error.what.contains(what), "{format}: {}: {error}", error.at);
    }
    let older = json!({"triggers": ["<b"], "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}]});
    assert_eq!(to_rules(&older.to_string(), &Specials).expect_err("refused").at, "structures[0].begin");
    assert_eq!(to_rules("{\"structures\": []}", &Specials).expect_err("refused").at, "structures");
    let deep = (0..200).fold(text, |content, _| tag("<", json!(">"), &content));
    assert!(to_rules(&json!({"format": deep}).to_string(), &Specials).is_err(), "too deep");
    let wide = json!({"format": {"type": "or", "elements": vec![json!({"type": "const_string", "value": "x"}); 3000]}});
    assert!(to_rules(&wide.to_string(), &Specials).is_err(), "too wide");
}
