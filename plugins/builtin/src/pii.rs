//! Plugin `pii`: takes personal data out of prompts and puts it back into answers.
//!
//! Values (mail addresses, phone numbers, cards, accounts, network addresses, social security numbers, and own
//! patterns) are replaced by placeholders, `[EMAIL_1]`; the same value gets the same placeholder throughout a
//! conversation. Upstreams see only placeholders. Where the answer uses one, the client reads the value again, also
//! when the placeholder comes in several pieces. The table lives as long as the request, and is neither logged nor
//! stored. With `restore = false` the client reads the placeholders too.
//!
//! Values are found by form (and checksum, where there is one), not by meaning: names and places are not found. The work
//! is linear in the request: the hook has no await, so nothing could interrupt more.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::ops::Bound;
use std::sync::Arc;

use async_trait::async_trait;
use penstock_plugins::text::{self, Form, Writer};
use penstock_plugins::{
    Flow, Hooks, Kind, Needs, Plugin, PluginError, Rejection, RejectionKind, RequestContext, Sees, Settings, Verdict,
};
use penstock_types::ChatEvent;
use regex::Regex;

use crate::lanes::{Lane, Lanes, Rewriter};
use crate::scan::{Action, Finder, Rule, Rules, replaced};

/// Plugin kind `pii`: builds plugins that replace personal data by placeholders.
pub(crate) struct Pii;

type Check = fn(&str) -> Option<usize>;

/// Names, patterns and checks of the known kinds. Of two matches that begin at one place the first kind counts.
const KNOWN: [(&str, &str, Check); 6] = [
    ("email", r"(?i)\b[a-z0-9][a-z0-9._%+\-]{0,63}@[a-z0-9](?:[a-z0-9\-]{0,62}\.)+[a-z]{2,24}\b", all),
    ("iban", r"\b[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]){11,30}\b", iban),
    ("card", r"\b[0-9](?:[ \-]?[0-9]){12,18}\b", card),
    ("ssn", r"\b[0-9]{3}-[0-9]{2}-[0-9]{4}\b", ssn),
    ("ip", r"(?i)\b[0-9]{1,3}(?:\.[0-9]{1,3}){3}\b|[0-9a-f]{0,4}(?::{1,2}[0-9a-f]{1,4}){2,7}(?:::)?", address),
    (
        "phone",
        r"(?:\+|\b00)[1-9][0-9 ().\-/]{6,18}[0-9]\b|\([0-9]{3}\) ?[0-9]{3}[ .\-]?[0-9]{4}\b|\b[0-9]{3}[ .\-][0-9]{3}[ .\-][0-9]{4}\b",
        phone,
    ),
];

fn all(found: &str) -> Option<usize> {
    Some(found.len())
}

/// Longest prefix of `found` that ends with a whole group and satisfies `check`.
fn longest(found: &str, check: impl Fn(&str) -> bool) -> Option<usize> {
    let ends = (1..=found.len()).rev().filter(|end| {
        let next = found.as_bytes().get(*end);
        found.as_bytes()[end - 1].is_ascii_alphanumeric() && !next.is_some_and(u8::is_ascii_alphanumeric)
    });
    ends.into_iter().find(|end| check(&found[..*end]))
}

fn digits(text: &str) -> impl DoubleEndedIterator<Item = u32> + '_ {
    text.chars().filter_map(|char| char.to_digit(10))
}

/// Length of a card number by Luhn's checksum.
fn card(found: &str) -> Option<usize> {
    longest(found, |text| {
        let weighed = digits(text).rev().enumerate().map(|(at, digit)| match at % 2 {
            1 if digit > 4 => digit * 2 - 9,
            1 => digit * 2,
            _ => digit,
        });
        let sum: u32 = weighed.sum();
        (13..=19).contains(&digits(text).count()) && sum.is_multiple_of(10) && digits(text).any(|digit| digit > 0)
    })
}

/// Length of an account number by ISO 13616: the rest modulo 97 is 1.
fn iban(found: &str) -> Option<usize> {
    longest(found, |text| {
        let plain: Vec<u8> = text.bytes().filter(u8::is_ascii_alphanumeric).collect();
        if !(15..=34).contains(&plain.len()) {
            return false;
        }
        let rotated = plain[4..].iter().chain(&plain[..4]);
        let rest = rotated.fold(0u32, |rest, byte| match byte {
            b'0'..=b'9' => (rest * 10 + u32::from(byte - b'0')) % 97,
            letter => (rest * 100 + u32::from(letter - b'A') + 10) % 97,
        });
        rest == 1
    })
}

/// Social security number outside the ranges that were never issued.
fn ssn(found: &str) -> Option<usize> {
    let area = &found[..3];
    let issued =
        area != "000" && area != "666" && !area.starts_with('9') && &found[4..6] != "00" && &found[7..] != "0000";
    issued.then_some(found.len())
}

fn address(found: &str) -> Option<usize> {
    found.parse::<IpAddr>().ok().map(|_| found.len())
}

fn phone(found: &str) -> Option<usize> {
    (7..=15).contains(&digits(found).count()).then_some(found.len())
}

struct Config {
    rules: Rules,
    writers: Vec<Writer>,
    restore: bool,
}

impl Kind for Pii {
    fn name(&self) -> &'static str {
        "pii"
    }

    fn build(&self, settings: &Settings<'_>) -> Option<Arc<dyn Plugin>> {
        let mut rules: Vec<Rule> = Vec::new();
        for (name, pattern) in settings.text_map("patterns") {
            let label = name.to_ascii_uppercase();
            if label.is_empty()
                || !label.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_')
            {
                settings.fault(
                    &format!("patterns.{name}"),
                    "the name must be of letters, digits and _: it stands in placeholders",
                );
            }
            match Finder::pattern(&pattern) {
                Ok(finder) => rules.push(rule(&label, finder)),
                Err(why) => settings.fault(&format!("patterns.{name}"), why),
            }
        }
        rules.extend(known(settings));
        if rules.is_empty() {
            settings.fault("kinds", "nothing is looked for");
        }
        let rules = Rules { rules, window: usize::MAX / 2 };
        let (writers, restore) = (crate::writers(settings), settings.flag("restore", true));
        Some(Arc::new(Private(Arc::new(Config { rules, writers, restore }))))
    }
}

fn rule(label: &str, finder: Finder) -> Rule {
    Rule { name: label.to_owned(), finder, action: Action::Mask, mask: String::new() }
}

fn known(settings: &Settings<'_>) -> Vec<Rule> {
    let names = settings.texts("kinds");
    for (at, name) in names.iter().enumerate() {
        if !KNOWN.iter().any(|(known, ..)| known == name) {
            let known = KNOWN.map(|(known, ..)| known).join(", ");
            settings.fault(&format!("kinds[{at}]"), format!("must be one of {known}"));
        }
    }
    made(&|name| (names.is_empty() && !settings.has("kinds")) || names.iter().any(|asked| asked == name))
}

fn made(asked: &dyn Fn(&str) -> bool) -> Vec<Rule> {
    let made = KNOWN.iter().filter(|(name, ..)| asked(name)).map(|(name, pattern, check)| {
        let pattern = Regex::new(pattern).expect("the patterns above are tested");
        rule(&name.to_ascii_uppercase(), Finder::Pattern(pattern, *check))
    });
    made.collect()
}

/// Rules of all known kinds, for texts that are written to files.
pub(crate) fn everything() -> Rules {
    Rules { rules: made(&|_| true), window: usize::MAX / 2 }
}

/// Text with the name of its kind in place of every match.
pub(crate) fn redacted(rules: &Rules, text: &str) -> String {
    replaced(text, &rules.all(text), |found, out| {
        out.push('[');
        out.push_str(&rules.rules[found.rule].name);
        out.push(']');
    })
}

struct Private(Arc<Config>);

impl Plugin for Private {
    fn needs(&self) -> Needs {
        Needs::Request
    }

    fn can_dry_run(&self) -> bool {
        true
    }

    fn begin(&self) -> Box<dyn Hooks> {
        Box::new(Redacting { config: self.0.clone(), table: Arc::default(), lanes: Lanes::default() })
    }
}

struct Redacting {
    config: Arc<Config>,
    /// Placeholders of the request; set once, when the prompt has been read.
    table: Arc<Table>,
    lanes: Lanes<Restorer>,
}

/// Most different values in one request. Each takes about 200 bytes until the answer has ended; a person's request has tens.
const VALUES_MAX: usize = 10_000;

/// Placeholders that the client's own text uses: the place of the first rule with the label, and the number.
#[derive(Default)]
struct Taken(HashSet<(usize, u64)>);

impl Taken {
    /// Notes the placeholders in `text` that have the label of a rule, up to one more than there may be.
    fn note(&mut self, rules: &Rules, text: &str) {
        for inner in text.split('[').skip(1) {
            let Some((name, _)) = inner.split_once(']') else { continue };
            let Some((label, number)) = name.rsplit_once('_') else { continue };
            let Ok(number) = number.parse() else { continue };
            if let Some(place) = place_of(rules, label) {
                self.0.insert((place, number));
            }
            if self.0.len() > VALUES_MAX {
                return;
            }
        }
    }
}

/// Place of the first rule with a label.
fn place_of(rules: &Rules, label: &str) -> Option<usize> {
    rules.rules.iter().position(|rule| rule.name == label)
}

/// Placeholders of one request and the values that they stand for. A value costs the same however many there are.
#[derive(Default)]
struct Table {
    /// Values by placeholder, in order: those that begin with a text are beside each other.
    values: BTreeMap<String, Arc<str>>,
    placeholders: HashMap<Arc<str>, String>,
    /// Last number that was tried for each label; none is tried twice.
    numbers: HashMap<String, u64>,
    /// Length of the longest placeholder, in bytes.
    longest: usize,
}

impl Table {
    /// Placeholder of a value; `None`: the request has too many values.
    fn placeholder(&mut self, rules: &Rules, label: &str, value: &str, taken: &Taken) -> Option<&str> {
        if !self.placeholders.contains_key(value) {
            if self.placeholders.len() == VALUES_MAX {
                return None;
            }
            let mut number = self.numbers.get(label).copied().unwrap_or(0) + 1;
            let place = place_of(rules, label).unwrap_or_default();
            while taken.0.contains(&(place, number)) {
                number += 1;
            }
            let name = format!("[{label}_{number}]");
            self.numbers.insert(label.to_owned(), number);
            self.longest = self.longest.max(name.len());
            let value: Arc<str> = value.into();
            self.values.insert(name.clone(), value.clone());
            self.placeholders.insert(value, name);
        }
        self.placeholders.get(value).map(String::as_str)
    }

    /// Beginning of `text`, whose first byte is `[`, compared with the placeholders. At most [`Table::longest`] bytes are looked at.
    fn at(&self, text: &str) -> Begins<'_> {
        let shown = &text.as_bytes()[..text.len().min(self.longest)];
        let Some(close) = shown.iter().position(|byte| *byte == b']') else {
            let mut behind = self.values.range::<str, _>((Bound::Included(text), Bound::Unbounded));
            let is_open = text.len() < self.longest && behind.next().is_some_and(|(name, _)| name.starts_with(text));
            return if is_open { Begins::Maybe } else { Begins::Other };
        };
        let name = &text[..=close];
        self.values.get(name).map_or(Begins::Other, |value| Begins::Placeholder(name.len(), value))
    }
}

/// Beginning of a text, compared with the placeholders of a request.
enum Begins<'t> {
    /// A placeholder of that length, and its value.
    Placeholder(usize, &'t str),
    /// The beginning of a placeholder, if the text goes on so.
    Maybe,
    /// No placeholder.
    Other,
}

impl Redacting {
    /// Replaces the values in a request; `Err` is the reason why it cannot be asked.
    fn redact(&self, request: &mut RequestContext) -> Result<Result<Table, String>, PluginError> {
        let Config { rules, writers, .. } = &*self.config;
        let (mut any, mut taken, mut named) = (false, Taken::default(), false);
        text::each(request.request()?, &mut |writer, text| {
            any = any || (writers.contains(&writer) && !rules.all(text).is_empty());
        });
        if !any {
            return Ok(Ok(Table::default()));
        }
        text::each(request.request()?, &mut |_, text| taken.note(rules, text));
        if taken.0.len() > VALUES_MAX {
            return Ok(Err(format!(
                "More than {VALUES_MAX} different texts in the form of placeholders are in this request."
            )));
        }
        text::names(request.request()?, &mut |writer, name| {
            named |= writers.contains(&writer) && !rules.all(name).is_empty();
        });
        if named {
            let place = "a name or a pattern of the tools, of the calls or of the schema";
            return Ok(Err(format!("Personal data is in {place}, where it cannot be replaced.")));
        }
        let (mut table, mut fits) = (Table::default(), true);
        text::change(request.edit()?, &mut |writer, _: Form, text| {
            if !writers.contains(&writer) || !fits {
                return;
            }
            let (mut out, mut from) = (String::with_capacity(text.len()), 0);
            for found in rules.all(text) {
                let label = &rules.rules[found.rule].name;
                let Some(placeholder) = table.placeholder(rules, label, &text[found.start..found.end], &taken) else {
                    fits = false;
                    return;
                };
                out.push_str(&text[from..found.start]);
                out.push_str(placeholder);
                from = found.end;
            }
            out.push_str(&text[from..]);
            *text = out;
        });
        let many = || format!("More than {VALUES_MAX} different values of personal data are in this request.");
        Ok(if fits { Ok(table) } else { Err(many()) })
    }
}

#[async_trait]
impl Hooks for Redacting {
    async fn on_request(&mut self, request: &mut RequestContext) -> Result<Verdict, PluginError> {
        let table = match self.redact(request)? {
            Ok(table) => table,
            Err(why) => return Ok(Verdict::Reject(Rejection::new(RejectionKind::Invalid, why))),
        };
        if !table.values.is_empty() {
            request.tags.push(("pii".into(), table.values.len().to_string()));
        }
        self.table = Arc::new(table);
        Ok(Verdict::Pass)
    }

    fn sees(&self) -> Sees {
        if self.config.restore && !self.table.values.is_empty() { Sees::Events } else { Sees::Nothing }
    }

    fn on_event(&mut self, events: &mut Vec<ChatEvent>, end: bool) -> Result<Flow, PluginError> {
        let table = self.table.clone();
        let make = move |lane| {
            let json = matches!(lane, Lane::Arguments(_));
            Restorer { table: table.clone(), json, held: String::new() }
        };
        self.lanes.rewrite(events, end, &make);
        Ok(Flow::Go)
    }

    fn release(&mut self, out: &mut Vec<ChatEvent>) {
        self.lanes.release(out);
    }

    fn held_bytes(&self) -> usize {
        self.lanes.held_bytes()
    }
}

/// Rewriter that puts values back in place of placeholders.
struct Restorer {
    table: Arc<Table>,
    /// True in JSON text, where a value must be escaped.
    json: bool,
    /// End of the text so far that may be the beginning of a placeholder.
    held: String,
}

impl Restorer {
    fn step(&mut self, complete: bool, out: &mut String) {
        let text = std::mem::take(&mut self.held);
        let mut rest = text.as_str();
        while let Some(at) = rest.find('[') {
            out.push_str(&rest[..at]);
            rest = &rest[at..];
            match self.table.at(rest) {
                Begins::Placeholder(length, value) => {
                    match self.json {
                        true => out.push_str(&crate::json_inner(value)),
                        false => out.push_str(value),
                    }
                    rest = &rest[length..];
                }
                Begins::Maybe if !complete => {
                    self.held = rest.to_owned();
                    return;
                }
                Begins::Maybe | Begins::Other => {
                    out.push('[');
                    rest = &rest[1..];
                }
            }
        }
        out.push_str(rest);
    }
}

impl Rewriter for Restorer {
    fn push(&mut self, piece: &str, out: &mut String) -> bool {
        if self.held.is_empty() && !piece.contains('[') {
            out.push_str(piece);
            return true;
        }
        self.held.push_str(piece);
        self.step(false, out);
        true
    }

    fn end(&mut self, out: &mut String) -> bool {
        self.step(true, out);
        true
    }

    fn held(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    fn held_bytes(&self) -> usize {
        self.held.len()
    }
}

#[cfg(test)]
mod tests {
    use penstock_plugins::testing::{FakeHost, build, now, request};
    use penstock_types::{Request, Surface};
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::streamed;

    fn redacted(settings: &Value, prompt: &str) -> (String, Box<dyn Hooks>) {
        let plugin = build(&Pii, settings).expect("valid");
        let body = json!({ "model": "m", "messages": [{ "role": "user", "content": prompt }] });
        let mut context = request(Surface::Chat, &body, Arc::new(FakeHost::default()));
        let mut hooks = plugin.begin();
        assert!(matches!(now(hooks.on_request(&mut context)), Ok(Verdict::Pass)));
        let mut out = String::new();
        text::each(context.request().expect("read"), &mut |_, text| out.push_str(text));
        (out, hooks)
    }

    #[track_caller]
    fn check(prompt: &str, expected: &str) {
        assert_eq!(redacted(&json!({}), prompt).0, expected);
    }

    #[test]
    fn personal_data_is_found_by_its_form() {
        check("mail ann.lee+x@mail.example.com, please", "mail [EMAIL_1], please");
        check("a@b.de and c@d.de and a@b.de", "[EMAIL_1] and [EMAIL_2] and [EMAIL_1]");
        check("card 4111 1111 1111 1111 exp", "card [CARD_1] exp");
        check("card 4111-1111-1111-1112 exp", "card 4111-1111-1111-1112 exp");
        check("IBAN DE89 3704 0044 0532 0130 00 AND more", "IBAN [IBAN_1] AND more");
        check("GB82WEST12345698765432.", "[IBAN_1].");
        check("DE89370400440532013001", "DE89370400440532013001");
        check("from 192.168.7.12 or 2001:db8::8a2e:370:7334", "from [IP_1] or [IP_2]");
        check("version 1.2.3.400 at 12:30:45", "version 1.2.3.400 at 12:30:45");
        check("ssn 078-05-1120, not 000-12-3456", "ssn [SSN_1], not 000-12-3456");
        check("call +49 (30) 901820-0 or (555) 123-4567 or 555-123-4567", "call [PHONE_1] or [PHONE_2] or [PHONE_3]");
        check("2026-11-21, 100000000, 3.14159265", "2026-11-21, 100000000, 3.14159265");
        check("nothing here", "nothing here");
    }

    #[test]
    fn own_patterns_come_first_and_kinds_can_be_chosen() {
        let settings = json!({ "kinds": ["ip"], "patterns": { "staff": "\\bP[0-9]{6}\\b" } });
        assert_eq!(redacted(&settings, "P123456 a@b.de 10.0.0.1").0, "[STAFF_1] a@b.de [IP_1]");
        let faults =
            build(&Pii, &json!({ "kinds": ["mail"], "patterns": { "a b": "x", "c": "(" } })).err().expect("faults");
        let paths: Vec<_> = faults.iter().map(|fault| fault.path.as_str()).collect();
        assert_eq!(paths, ["patterns.a b", "patterns.c", "kinds[0]"]);
    }

    #[test]
    fn a_placeholder_of_the_clients_own_stays_its_own() {
        let (prompt, hooks) = redacted(&json!({}), "keep [EMAIL_1], hide a@b.de");
        assert_eq!(prompt, "keep [EMAIL_1], hide [EMAIL_2]");
        assert_eq!(streamed(hooks, &["[EMAIL_1] [EMAIL_2]"]).text, "[EMAIL_1] a@b.de");
    }

    #[test]
    fn a_number_is_tried_once_however_many_values_there_are() {
        let mut table = Table::default();
        let (mut taken, rules) = (Taken::default(), everything());
        taken.note(&rules, &(1..=3000).map(|number| format!("[EMAIL_{number}] [OTHER_{number}]")).collect::<String>());
        assert_eq!(taken.0.len(), 3000, "labels of no rule are nobody's");
        for number in 0..5000 {
            let value = format!("a{number}@b.de");
            let name = table.placeholder(&rules, "EMAIL", &value, &taken).expect("fits").to_owned();
            assert_eq!(table.placeholder(&rules, "EMAIL", &value, &taken), Some(name.as_str()));
        }
        // Every number up to there was tried, and none of them twice.
        assert_eq!((table.numbers["EMAIL"], table.values.len()), (8000, 5000));
        assert_eq!(table.values.first_key_value().expect("some").0, "[EMAIL_3001]");
    }

    #[test]
    fn a_request_of_as_many_values_as_there_may_be_is_read_and_restored() {
        let values = |count: usize| (0..count).map(|at| format!("a{at}@b.de ")).collect::<String>();
        let prompt = values(VALUES_MAX) + &"[EMAIL_".repeat(20_000);
        let (redacted, hooks) = redacted(&json!({}), &prompt);
        assert!(!redacted.contains('@') && redacted.contains(&format!("[EMAIL_{VALUES_MAX}]")));
        // An answer of brackets, too, is looked at no further than a placeholder is long.
        let hostile = "[".repeat(300_000) + "[EMAIL_1";
        assert_eq!(streamed(hooks, &[&redacted, &hostile, "]"]).text, prompt + &"[".repeat(300_000) + "a0@b.de");
        let plugin = build(&Pii, &json!({})).expect("valid");
        let body = json!({ "model": "m", "messages": [{ "role": "user", "content": values(VALUES_MAX + 1) }] });
        let mut context = request(Surface::Chat, &body, Arc::new(FakeHost::default()));
        let verdict = now(plugin.begin().on_request(&mut context));
        let Ok(Verdict::Reject(refused)) = verdict else { panic!("{verdict:?}") };
        assert!(refused.kind == RejectionKind::Invalid && refused.message.contains("10000"), "{refused:?}");
    }

    #[test]
    fn placeholders_of_the_clients_own_are_bounded_where_they_are_noted() {
        let placeholders = |count: usize| (1..=count).map(|at| format!("[IP_{at}]")).collect::<String>();
        let said = |prompt: String| asked(&json!({ "messages": [{ "role": "user", "content": prompt }] })).0;
        let most = placeholders(VALUES_MAX);
        assert!(matches!(said(most.clone() + " 10.0.0.1"), Ok(Verdict::Pass)));
        let more = placeholders(VALUES_MAX + 1);
        assert!(matches!(said(more.clone()), Ok(Verdict::Pass)), "nothing is replaced");
        let verdict = said(more + " 10.0.0.1");
        let Ok(Verdict::Reject(refused)) = verdict else { panic!("{verdict:?}") };
        assert!(refused.kind == RejectionKind::Invalid && refused.message.contains("placeholders"), "{refused:?}");
        let mut taken = Taken::default();
        taken.note(&everything(), &most.repeat(2));
        assert_eq!(taken.0.len(), VALUES_MAX);
        taken.note(&everything(), &placeholders(20 * VALUES_MAX));
        assert_eq!(taken.0.len(), VALUES_MAX + 1);
    }

    #[test]
    fn kinds_of_one_label_share_their_numbers() {
        let settings = json!({ "kinds": ["email"], "patterns": { "email": "\\bmail of [a-z]+\\b" } });
        let (prompt, _) = redacted(&settings, "[EMAIL_1] mail of ann, a@b.de");
        assert_eq!(prompt, "[EMAIL_1] [EMAIL_2], [EMAIL_3]");
    }

    fn asked(body: &Value) -> (Result<Verdict, PluginError>, RequestContext) {
        let mut full =
            json!({ "model": "m", "messages": [{ "role": "user", "content": "ask a@b.de", "name": "c@d.de" }] });
        full.as_object_mut().expect("a table").extend(body.as_object().expect("a table").clone());
        let mut context = request(Surface::Chat, &full, Arc::new(FakeHost::default()));
        let verdict = now(build(&Pii, &json!({})).expect("valid").begin().on_request(&mut context));
        (verdict, context)
    }

    #[test]
    fn tools_schemas_and_names_of_people_are_redacted() {
        let schema = json!({ "type": "object", "properties": { "to": { "enum": ["a@b.de", "e@f.de"] } } });
        let function = json!({ "name": "mail", "description": "Mails g@h.de.", "parameters": schema });
        let format = json!({ "type": "json_schema", "json_schema": { "name": "n", "schema": schema } });
        let body = json!({ "tools": [{ "type": "function", "function": function }], "response_format": format });
        let (verdict, context) = asked(&body);
        assert!(matches!(verdict, Ok(Verdict::Pass)), "{verdict:?}");
        let Request::Chat(chat) = context.request().expect("read") else { panic!("a chat") };
        let tool = &chat.tools[0];
        assert_eq!(tool.description.as_deref(), Some("Mails [EMAIL_1]."));
        let held = format!("{chat:?}");
        assert!(!held.contains('@') && tool.json.contains(r#"["[EMAIL_2]","[EMAIL_3]"]"#), "{held}");
        assert_eq!(chat.messages[0].content.as_deref(), Some("ask [EMAIL_2]"));
    }

    #[test]
    fn a_name_that_holds_personal_data_is_refused() {
        let schema = json!({ "type": "object", "properties": { "a@b.de": {} } });
        for function in [json!({ "name": "a@b.de" }), json!({ "name": "f", "parameters": schema })] {
            let (verdict, _) = asked(&json!({ "tools": [{ "type": "function", "function": function }] }));
            assert!(matches!(verdict, Ok(Verdict::Reject(_))), "{function} {verdict:?}");
        }
    }

    #[test]
    fn answers_without_anything_to_restore_are_not_looked_at() {
        assert_eq!(redacted(&json!({}), "hello").1.sees(), Sees::Nothing);
        assert_eq!(redacted(&json!({ "restore": false }), "a@b.de").1.sees(), Sees::Nothing);
        assert_eq!(redacted(&json!({}), "a@b.de").1.sees(), Sees::Events);
    }

    #[test]
    fn values_are_escaped_in_arguments() {
        let settings = json!({ "kinds": [], "patterns": { "q": "\"[a-z]+\"" } });
        let (prompt, mut hooks) = redacted(&settings, "say \"hello\"");
        assert_eq!(prompt, "say [Q_1]");
        let arguments = |json: &str| ChatEvent::ToolCallArguments { choice: 0, call: 0, json: json.into() };
        let mut events = vec![arguments("{\"x\":\"[Q"), arguments("_1]\"}")];
        hooks.on_event(&mut events, true).expect("no failure");
        let pieces = events.iter().map(|event| match event {
            ChatEvent::ToolCallArguments { json, .. } => json.as_str(),
            other => panic!("{other:?}"),
        });
        let said: String = pieces.collect();
        assert_eq!(serde_json::from_str::<Value>(&said).expect("JSON"), json!({ "x": "\"hello\"" }));
    }

    proptest! {
        /// Redacting and restoring give the same text, however the answer is cut, and no value is left in the prompt.
        #[test]
        fn redacting_and_restoring_is_the_identity(
            words in prop::collection::vec(prop_oneof![
                Just("a@b.example".to_owned()), Just("4111111111111111".to_owned()), Just("10.1.2.3".to_owned()),
                Just("[EMAIL_".to_owned()), Just("[".to_owned()), Just("]".to_owned()), "[a-zé ]{0,5}",
            ], 0..12),
            cut in 1usize..7,
        ) {
            let prompt = words.join(" ");
            let (redacted, hooks) = redacted(&json!({ "kinds": ["email", "card", "ip"] }), &prompt);
            prop_assert!(!redacted.contains("a@b.example") && !redacted.contains("4111") && !redacted.contains("10.1"));
            let chars: Vec<char> = redacted.chars().collect();
            let pieces: Vec<String> = chars.chunks(cut).map(|chunk| chunk.iter().collect()).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(streamed(hooks, &pieces).text, prompt);
        }
    }
}
