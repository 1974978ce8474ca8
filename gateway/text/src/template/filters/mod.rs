//! Jinja's filters, and `tojson` of transformers.

mod number;
mod order;

use std::{rc::Rc, sync::Arc};

use super::{
    arguments::{Arguments, integer, string},
    budget::{Run, fault},
    format, json,
    machine::Machine,
    methods::{optional, stripped},
    print, strings,
    value::{Seq, Value},
};

/// Names of all filters. Of Jinja's own, those for web pages are missing (`forceescape`, `striptags`, `urlize`,
/// `xmlattr`), and `pprint`, `random` and `wordwrap`.
pub(super) const NAMES: [&str; 47] = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "filesizeformat",
    "first",
    "float",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "wordcount",
];

impl Machine<'_> {
    /// `value | name(args)`.
    pub(super) fn filter(&mut self, name: &str, value: Value, args: Arguments) -> Run<Value> {
        self.budget.enter()?;
        if matches!(name, "safe" | "escape" | "e" | "string")
            && let Value::Markup(_) = value
        {
            args.none(name)?;
            self.budget.leave();
            return Ok(value);
        }
        let (value, args) = (value.plain(), args.plain());
        let result = match name {
            "map" => self.map(&value, args),
            "select" | "reject" | "selectattr" | "rejectattr" => self.select(name, &value, args),
            "format" => format::filter(self, &value, args),
            "attr" => {
                let name = args.one("attr")?;
                self.attribute(&value, string("attr", &name)?)
            }
            "tojson" => self.dumps(&value, args),
            "default" | "d" => {
                let [other, boolean] = args.bind(name, ["default_value", "boolean"], 0)?;
                let absent = value.is_undefined() || (boolean.is_some_and(|on| on.truth()) && !value.truth());
                Ok(if absent { other.unwrap_or_else(|| Value::Str("".into())) } else { value })
            }
            "sort" | "unique" | "min" | "max" | "dictsort" | "groupby" => self.ordered(name, &value, args),
            "abs" | "round" | "int" | "float" | "filesizeformat" | "sum" => self.numeric(name, &value, args),
            "first" | "last" | "length" | "count" | "list" | "items" | "reverse" | "batch" | "slice" | "join" => {
                self.sequence(name, &value, args)
            }
            _ => self.textual(name, &value, args),
        };
        self.budget.leave();
        result
    }

    fn textual(&mut self, name: &str, value: &Value, args: Arguments) -> Run<Value> {
        if name == "urlencode" && !matches!(value, Value::Str(_)) && value.is_iterable() {
            args.none(name)?;
            return self.url_pairs(value);
        }
        let text = print::text(&self.budget, value)?;
        let budget = &self.budget;
        budget.scan(4 * text.len())?;
        match name {
            "trim" => {
                let [chars] = args.bind(name, ["chars"], 0)?;
                let chars = optional(name, chars.as_ref())?;
                budget.scan(8 * chars.as_ref().map_or(0, |chars| chars.len()))?;
                budget.text(stripped(&text, chars.as_ref(), true, true))
            }
            "replace" => {
                let [old, new, count] = args.bind(name, ["old", "new", "count"], 2)?;
                let old = print::text(budget, &old.unwrap_or(Value::None))?;
                let new = print::text(budget, &new.unwrap_or(Value::None))?;
                let count = match count {
                    None | Some(Value::None) => -1,
                    Some(count) => integer(name, &count)?,
                };
                strings::replace(budget, &text, &old, &new, count)
            }
            "indent" => {
                let [width, first, blank] = args.bind(name, ["width", "first", "blank"], 0)?;
                let indention: Arc<str> = match width.unwrap_or(Value::Int(4)) {
                    Value::Str(text) => text,
                    width => {
                        let width = usize::try_from(integer(name, &width)?.max(0)).unwrap_or(usize::MAX);
                        budget.room(width)?;
                        " ".repeat(width).into()
                    }
                };
                let on = |flag: Option<Value>| flag.is_some_and(|flag| flag.truth());
                if !matches!(value, Value::Str(_)) {
                    return fault(format!("unsupported operand type(s) for +=: '{}' and 'str'", value.kind()));
                }
                strings::indent(budget, &text, &indention, on(first), on(blank))
            }
            "truncate" => match value {
                Value::Str(_) => self.truncate(&text, args),
                _ => {
                    value.len(budget)?;
                    Ok(value.clone())
                }
            },
            "center" => {
                let [width] = args.bind(name, ["width"], 0)?;
                let width = width.map_or(Ok(80), |width| integer(name, &width))?;
                strings::pad(budget, &text, name, width, ' ')
            }
            _ => {
                args.none(name)?;
                match name {
                    "upper" => budget.text(text.to_uppercase()),
                    "lower" => budget.text(text.to_lowercase()),
                    "capitalize" => budget.text(strings::capitalized(&text)),
                    "title" => budget.text(titled(&text)),
                    "wordcount" => Ok(Value::Int(word_count(&text))),
                    "escape" | "e" => {
                        budget.room(text.len().saturating_mul(5))?;
                        let text = escaped(&text);
                        budget.bytes(text.len())?;
                        Ok(Value::Markup(text.into()))
                    }
                    "safe" => Ok(Value::Markup(text)),
                    "urlencode" => budget.text(url_quoted(&text)),
                    "string" => Ok(Value::Str(text)),
                    _ => fault(format!("No filter named '{name}'")),
                }
            }
        }
    }

    /// `urlencode` of a mapping or of pairs.
    fn url_pairs(&self, value: &Value) -> Run<Value> {
        let pairs = match value {
            Value::Dict(dict) => Value::View(super::value::View::Items, dict.clone()).items(&self.budget)?,
            _ => value.items(&self.budget)?,
        };
        let mut out = String::new();
        for pair in &pairs.items {
            let pair = pair.items(&self.budget)?;
            let [key, value] = &pair.items[..] else { return fault("urlencode: not a pair") };
            for (value, mark) in [(key, "="), (value, "&")] {
                let text = print::text(&self.budget, value)?;
                self.budget.bytes(3 * text.len())?;
                self.budget.room(out.len() + 3 * text.len())?;
                out.push_str(&url_quoted(&text).replace('/', "%2F").replace("%20", "+"));
                out.push_str(mark);
            }
        }
        out.pop();
        self.budget.text(out)
    }

    fn truncate(&self, text: &str, args: Arguments) -> Run<Value> {
        let [length, kill, end, leeway] = args.bind("truncate", ["length", "killwords", "end", "leeway"], 0)?;
        let length = length.map_or(Ok(255), |length| integer("truncate", &length))?;
        let end = optional("truncate", end.as_ref())?.unwrap_or_else(|| "...".into());
        let leeway = match leeway {
            None | Some(Value::None) => 5,
            Some(leeway) => integer("truncate", &leeway)?,
        };
        let kept = length - end.chars().count() as i128;
        if kept < 0 || leeway < 0 {
            return fault("truncate: length or leeway too small");
        }
        if text.chars().count() as i128 <= length.saturating_add(leeway) {
            return self.budget.text(text);
        }
        let head = strings::prefix(text, kept);
        let kill = kill.is_some_and(|kill| kill.truth());
        let head = if kill { head } else { head.rsplit_once(' ').map_or(head, |(before, _)| before) };
        self.budget.text(format!("{head}{end}"))
    }

    fn sequence(&mut self, name: &str, value: &Value, args: Arguments) -> Run<Value> {
        let budget = &self.budget;
        match name {
            "length" | "count" => {
                args.none(name)?;
                Ok(Value::Int(value.len(budget)? as i128))
            }
            "list" => {
                args.none(name)?;
                Ok(Value::List(value.items(budget)?))
            }
            "first" => {
                args.none(name)?;
                let first = match value {
                    Value::Iter(generator) => Value::next(generator),
                    _ => value.items(budget)?.items.first().cloned(),
                };
                Ok(first.unwrap_or_else(|| Value::undefined("No first item, sequence was empty.")))
            }
            "last" => {
                args.none(name)?;
                if matches!(value, Value::Iter(_)) {
                    return fault("'generator' object is not reversible");
                }
                let last = value.items(budget)?.items.last().cloned();
                Ok(last.unwrap_or_else(|| Value::undefined("No last item, sequence was empty.")))
            }
            "items" => {
                args.none(name)?;
                match value {
                    Value::Undefined(_) => Value::generator(budget, Vec::new()),
                    Value::Dict(dict) => {
                        let view = Value::View(super::value::View::Items, dict.clone());
                        Value::generator(budget, view.items(budget)?.items.clone())
                    }
                    _ => fault("Can only get item pairs from a mapping."),
                }
            }
            "reverse" => {
                args.none(name)?;
                if let Value::Str(text) = value {
                    return budget.text(text.chars().rev().collect::<String>());
                }
                Value::generator(budget, value.items(budget)?.items.iter().rev().cloned().collect())
            }
            "join" => self.join(value, args),
            _ => self.columns(name, value, args),
        }
    }

    fn join(&mut self, value: &Value, args: Arguments) -> Run<Value> {
        let [separator, attribute] = args.bind("join", ["d", "attribute"], 0)?;
        let separator = separator.map_or(Ok("".into()), |separator| print::text(&self.budget, &separator))?;
        let items = value.items(&self.budget)?;
        let mut out = String::new();
        for (index, item) in items.items.iter().enumerate() {
            self.budget.scan(separator.len())?;
            self.budget.room(out.len() + separator.len())?;
            if index > 0 {
                out.push_str(&separator);
            }
            let item = self.path(item, attribute.as_ref(), None)?;
            print::write_text(&self.budget, &item, &mut out)?;
        }
        self.budget.text(out)
    }

    /// `batch` and `slice`.
    fn columns(&self, name: &str, value: &Value, args: Arguments) -> Run<Value> {
        let [count, fill] = args.bind(name, [if name == "batch" { "linecount" } else { "slices" }, "fill_with"], 1)?;
        let fill = fill.filter(|fill| !matches!(fill, Value::None));
        let count = integer(name, &count.unwrap_or(Value::None))?;
        let Ok(count @ 1..=100_000) = usize::try_from(count) else {
            return fault(format!("{name}: count out of range"));
        };
        let items = value.items(&self.budget)?;
        let mut lists = Vec::new();
        if name == "batch" {
            for part in items.items.chunks(count) {
                let mut part = part.to_vec();
                if let Some(fill) = &fill {
                    self.budget.bytes(size_of::<Value>() * count)?;
                    part.resize(count, fill.clone());
                }
                lists.push(self.budget.list(part)?);
            }
            return Value::generator(&self.budget, lists);
        }
        let (each, extra) = (items.items.len() / count, items.items.len() % count);
        let mut start = 0;
        for index in 0..count {
            let end = start + each + usize::from(index < extra);
            let mut part = items.items[start..end].to_vec();
            part.extend(fill.clone().filter(|_| index >= extra));
            lists.push(self.budget.list(part)?);
            start = end;
        }
        Value::generator(&self.budget, lists)
    }

    /// The value at `attribute` (a name, a number, or a path with dots) in `item`; the item itself without one.
    pub(super) fn path(&mut self, item: &Value, attribute: Option<&Value>, default: Option<&Value>) -> Run<Value> {
        let mut value = item.clone();
        let parts: Vec<Value> = match attribute {
            None | Some(Value::None) => Vec::new(),
            Some(Value::Str(path)) => {
                self.budget.scan(path.len())?;
                let part = |part: &str| part.parse().ok().filter(|_| !part.starts_with(['-', '+'])).map(Value::Int);
                path.split('.').map(|name| part(name).unwrap_or_else(|| Value::Str(name.into()))).collect()
            }
            Some(other) => vec![other.clone()],
        };
        for part in &parts {
            value = self.item(&value, part)?;
            if let (true, Some(default)) = (value.is_undefined(), default) {
                value = default.clone();
            }
        }
        Ok(value)
    }

    fn map(&mut self, value: &Value, mut args: Arguments) -> Run<Value> {
        let items = value_items(self, value)?;
        let mut out = Vec::with_capacity(items.items.len());
        if args.positional.is_empty() && args.named.iter().any(|(name, _)| &**name == "attribute") {
            let [attribute, default] = args.bind("map", ["attribute", "default"], 1)?;
            let default = default.filter(|default| !matches!(default, Value::None));
            for item in &items.items {
                out.push(self.path(item, attribute.as_ref(), default.as_ref())?);
            }
            return Value::generator(&self.budget, out);
        }
        if args.positional.is_empty() {
            return fault("map requires a filter argument");
        }
        let name = args.positional.remove(0);
        let name = string("map", &name)?;
        if !NAMES.contains(&&**name) {
            return fault(format!("No filter named '{name}'."));
        }
        for item in &items.items {
            let args = Arguments { positional: args.positional.clone(), named: args.named.clone() };
            out.push(self.filter(name, item.clone(), args)?);
        }
        Value::generator(&self.budget, out)
    }

    fn select(&mut self, name: &str, value: &Value, mut args: Arguments) -> Run<Value> {
        let items = value_items(self, value)?;
        let attribute = match name {
            "selectattr" | "rejectattr" if args.positional.is_empty() => {
                return fault("Missing parameter for attribute name");
            }
            "selectattr" | "rejectattr" => Some(args.positional.remove(0)),
            _ => None,
        };
        let test = if args.positional.is_empty() { None } else { Some(args.positional.remove(0)) };
        let keep = name.starts_with("select");
        let mut out = Vec::new();
        for item in &items.items {
            let subject = self.path(item, attribute.as_ref(), None)?;
            let accepted = match &test {
                None => subject.truth(),
                Some(test) => {
                    let args = Arguments { positional: args.positional.clone(), named: args.named.clone() };
                    self.check(string(name, test)?, &subject, args)?
                }
            };
            if accepted == keep {
                out.push(item.clone());
            }
        }
        Value::generator(&self.budget, out)
    }

    fn dumps(&mut self, value: &Value, args: Arguments) -> Run<Value> {
        const PARAMETERS: [&str; 4] = ["ensure_ascii", "indent", "separators", "sort_keys"];
        let [ascii, indent, separators, sort] = args.bind("tojson", PARAMETERS, 0)?;
        let on = |flag: Option<Value>| flag.is_some_and(|flag| flag.truth());
        let indent = match indent {
            None | Some(Value::None) => None,
            Some(Value::Str(text)) => Some(text.to_string()),
            Some(width) => {
                let width = usize::try_from(integer("indent", &width)?.max(0)).unwrap_or(usize::MAX);
                self.budget.room(width.saturating_mul(1 << 10))?;
                Some(" ".repeat(width))
            }
        };
        let comma = if indent.is_some() { "," } else { ", " };
        let (comma, colon) = match separators {
            None | Some(Value::None) => (comma.into(), ": ".into()),
            Some(pair) => match &pair.items(&self.budget)?.items[..] {
                [comma, colon] => (string("separators", comma)?.clone(), string("separators", colon)?.clone()),
                _ => return fault("separators must be a pair"),
            },
        };
        let style = json::Style { ascii: on(ascii), sort: on(sort), indent, comma, colon };
        json::dumps(&self.budget, value, &style)
    }
}

/// Items for `map` and `select`, which take a false value as empty.
fn value_items(machine: &Machine<'_>, value: &Value) -> Run<Rc<Seq>> {
    if value.truth() { value.items(&machine.budget) } else { Ok(machine.budget.seq(Vec::new())?.into()) }
}

/// Jinja's `title`: words begin behind white space, hyphens and opening brackets.
fn titled(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut begins = true;
    for c in text.chars() {
        if begins {
            out.extend(c.to_uppercase());
        } else {
            out.extend(c.to_lowercase());
        }
        begins = is_word_break(c);
    }
    out
}

fn is_word_break(c: char) -> bool {
    print::is_space(c) || matches!(c, '-' | '(' | '{' | '[' | '<')
}

fn word_count(text: &str) -> i128 {
    text.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty()).count() as i128
}

/// A text with the characters of HTML escaped, as MarkupSafe writes them.
pub(super) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

fn url_quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-' | b'~' | b'/') {
            out.push(byte.into());
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}
