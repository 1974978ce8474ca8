//! Jinja's filters, and `tojson` of transformers.

use std::{rc::Rc, sync::Arc};

use super::{
    arguments::{Arguments, integer, string},
    budget::{Run, fault},
    compare::{self, Number},
    format, json,
    machine::Machine,
    methods::{optional, stripped},
    operate, print, strings,
    syntax::ast::Operator,
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
            "tojson" => self.to_json(&value, args),
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
    fn path(&mut self, item: &Value, attribute: Option<&Value>, default: Option<&Value>) -> Run<Value> {
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

    fn to_json(&mut self, value: &Value, args: Arguments) -> Run<Value> {
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

    fn ordered(&mut self, name: &str, value: &Value, args: Arguments) -> Run<Value> {
        let on = |flag: Option<Value>| flag.is_some_and(|flag| flag.truth());
        match name {
            "dictsort" => {
                let [sensitive, by, reverse] = args.bind(name, ["case_sensitive", "by", "reverse"], 0)?;
                let place = match by.as_ref().map(Value::as_str) {
                    None | Some(Some("key")) => 0,
                    Some(Some("value")) => 1,
                    _ => return fault("You can only sort by either \"key\" or \"value\""),
                };
                let Value::Dict(dict) = value else {
                    return fault(format!("'{} object' has no attribute 'items'", value.kind()));
                };
                let pairs = Value::View(super::value::View::Items, dict.clone()).items(&self.budget)?;
                self.sorted(&pairs, Some(&Value::Int(place)), !on(sensitive), on(reverse))
                    .and_then(|list| self.budget.list(list))
            }
            "sort" => {
                let [reverse, sensitive, attribute] = args.bind(name, ["reverse", "case_sensitive", "attribute"], 0)?;
                let items = value.items(&self.budget)?;
                let sorted = self.sorted(&items, attribute.as_ref(), !on(sensitive), on(reverse))?;
                self.budget.list(sorted)
            }
            "unique" => {
                let [sensitive, attribute] = args.bind(name, ["case_sensitive", "attribute"], 0)?;
                let (items, folds) = (value.items(&self.budget)?, !on(sensitive));
                let (mut seen, mut out) = (Vec::new(), Vec::new());
                for item in &items.items {
                    let key = self.key(item, attribute.as_ref(), folds)?;
                    let known = Value::List(Rc::new(Seq { items: std::mem::take(&mut seen), nesting: 1 }));
                    let repeated = compare::contains(&self.budget, &known, &key)?;
                    if let Value::List(known) = known {
                        seen = Rc::try_unwrap(known).map(|known| known.items).unwrap_or_default();
                    }
                    if !repeated {
                        seen.push(key);
                        out.push(item.clone());
                    }
                }
                Value::generator(&self.budget, out)
            }
            "groupby" => {
                let [attribute, default, sensitive] = args.bind(name, ["attribute", "default", "case_sensitive"], 1)?;
                self.groups(value, attribute.as_ref(), default.as_ref(), !on(sensitive))
            }
            _ => {
                let [sensitive, attribute] = args.bind(name, ["case_sensitive", "attribute"], 0)?;
                let items = value.items(&self.budget)?;
                let mut best: Option<(Value, &Value)> = None;
                for item in &items.items {
                    let key = self.key(item, attribute.as_ref(), !on(sensitive.clone()))?;
                    let better = match &best {
                        None => true,
                        Some((other, _)) if name == "min" => {
                            compare::order(&self.budget, &key, other, "<")?.is_some_and(std::cmp::Ordering::is_lt)
                        }
                        Some((other, _)) => {
                            compare::order(&self.budget, &key, other, ">")?.is_some_and(std::cmp::Ordering::is_gt)
                        }
                    };
                    if better {
                        best = Some((key, item));
                    }
                }
                Ok(best.map_or_else(
                    || Value::undefined("No aggregated item, sequence was empty."),
                    |(_, item)| item.clone(),
                ))
            }
        }
    }

    fn key(&mut self, item: &Value, attribute: Option<&Value>, folds: bool) -> Run<Value> {
        let key = self.path(item, attribute, None)?;
        match &key {
            Value::Str(text) if folds => self.budget.text(text.to_lowercase()),
            _ => Ok(key),
        }
    }

    /// Items in the order of their values at `attribute`: of several, where commas separate names.
    fn sorted(&mut self, items: &Seq, attribute: Option<&Value>, folds: bool, reverse: bool) -> Run<Vec<Value>> {
        let mut keyed = Vec::with_capacity(items.items.len());
        for item in &items.items {
            let key = match attribute {
                Some(Value::Str(names)) if names.contains(',') => {
                    let mut keys = Vec::new();
                    for name in names.split(',') {
                        keys.push(self.key(item, Some(&Value::Str(name.into())), folds)?);
                    }
                    self.budget.tuple(keys)?
                }
                _ => self.key(item, attribute, folds)?,
            };
            keyed.push((key, item.clone()));
        }
        compare::sort_by_key(&self.budget, keyed, reverse)
    }

    fn groups(&mut self, value: &Value, by: Option<&Value>, default: Option<&Value>, folds: bool) -> Run<Value> {
        let items = value.items(&self.budget)?;
        let mut keyed = Vec::new();
        for item in &items.items {
            let key = self.path(item, by, default)?;
            let folded = match &key {
                Value::Str(text) if folds => self.budget.text(text.to_lowercase())?,
                _ => key.clone(),
            };
            keyed.push((folded.clone(), self.budget.tuple(vec![folded, key, item.clone()])?));
        }
        let mut groups: Vec<(Value, Value, Vec<Value>)> = Vec::new();
        for entry in compare::sort_by_key(&self.budget, keyed, false)? {
            let Value::Tuple(entry) = entry else { continue };
            let [folded, key, item] = &entry.items[..] else { continue };
            match groups.last_mut() {
                Some((last, _, members)) if compare::equal(&self.budget, last, folded)? => members.push(item.clone()),
                _ => groups.push((folded.clone(), key.clone(), vec![item.clone()])),
            }
        }
        let pairs = groups.into_iter().map(|(_, key, members)| {
            let members = self.budget.list(members)?;
            self.budget.tuple(vec![key, members])
        });
        let pairs = pairs.collect::<Run<_>>()?;
        self.budget.list(pairs)
    }

    fn numeric(&mut self, name: &str, value: &Value, args: Arguments) -> Run<Value> {
        match name {
            "abs" => {
                args.none(name)?;
                let negative = matches!(Number::of(value), Some(Number::Int(..0)))
                    || matches!(value, Value::Float(number) if number.is_sign_negative());
                operate::negative(value, negative)
            }
            "round" => round(value, args),
            "int" => {
                let [default, base] = args.bind(name, ["default", "base"], 0)?;
                let base = base.map_or(Ok(10), |base| integer(name, &base))?;
                to_int(value, default.unwrap_or(Value::Int(0)), base)
            }
            "float" => {
                let [default] = args.bind(name, ["default"], 0)?;
                if let Value::Undefined(words) = value {
                    return fault(compare::undefined_words(words.as_deref()));
                }
                Ok(read_float(value).map_or(default.unwrap_or(Value::Float(0.0)), Value::Float))
            }
            "sum" => {
                let [attribute, start] = args.bind(name, ["attribute", "start"], 0)?;
                let mut total = start.unwrap_or(Value::Int(0));
                if matches!(total, Value::Str(_)) {
                    return fault("sum() can't sum strings [use ''.join(seq) instead]");
                }
                for item in &value.items(&self.budget)?.items {
                    let item = self.path(item, attribute.as_ref(), None)?;
                    total = operate::arithmetic(self, Operator::Add, &total, &item)?;
                }
                Ok(total)
            }
            _ => {
                let [binary] = args.bind(name, ["binary"], 0)?;
                let Some(bytes) = read_float(value) else { return fault("filesizeformat: not a number") };
                self.budget.text(file_size(bytes, binary.is_some_and(|binary| binary.truth())))
            }
        }
    }
}

/// Items for `map` and `select`, which take a false value as empty.
fn value_items(machine: &Machine<'_>, value: &Value) -> Run<Rc<Seq>> {
    if value.truth() { value.items(&machine.budget) } else { Ok(machine.budget.seq(Vec::new())?.into()) }
}

fn round(value: &Value, args: Arguments) -> Run<Value> {
    let [precision, method] = args.bind("round", ["precision", "method"], 0)?;
    let precision = precision.map_or(Ok(0), |precision| integer("round", &precision))?;
    let Some(number) = Number::of(value) else {
        return fault(format!("type {} doesn't define __round__ method", value.kind()));
    };
    let Ok(digits @ -300..=300) = i32::try_from(precision) else { return fault("round: precision out of range") };
    let scale = 10_f64.powi(digits.abs());
    match method.as_ref().map(Value::as_str) {
        None | Some(Some("common")) => {}
        Some(Some(method @ ("ceil" | "floor"))) => {
            let scaled = if digits >= 0 { number.float() * scale } else { number.float() / scale };
            let whole = if method == "ceil" { scaled.ceil() } else { scaled.floor() };
            // Python's `ceil` and `floor` give an integer, which has no negative zero.
            let whole = if whole == 0.0 { 0.0 } else { whole };
            return Ok(Value::Float(if digits >= 0 { whole / scale } else { whole * scale }));
        }
        _ => return fault("method must be common, ceil or floor"),
    }
    match number {
        Number::Int(number) if digits >= 0 => Ok(Value::Int(number)),
        Number::Int(number) => {
            // To the nearest multiple, of two equally near ones the even one.
            let Some(step) = 10_i128.checked_pow(digits.unsigned_abs()) else { return Ok(Value::Int(0)) };
            let (down, rest) = (number.div_euclid(step), number.rem_euclid(step));
            let up = rest * 2 > step || (rest * 2 == step && down % 2 != 0);
            Ok(Value::Int((down + i128::from(up)) * step))
        }
        Number::Float(number) if !number.is_finite() => Ok(Value::Float(number)),
        Number::Float(number) if digits >= 0 => {
            let decimals = digits.unsigned_abs() as usize;
            Ok(Value::Float(format!("{number:.decimals$}").parse().unwrap_or(number)))
        }
        Number::Float(number) => Ok(Value::Float((number / scale).round_ties_even() * scale)),
    }
}

/// Jinja's `int`: a text in `base`, else as a float without its fraction, else the default.
fn to_int(value: &Value, default: Value, base: i128) -> Run<Value> {
    match value {
        Value::Undefined(words) => return fault(compare::undefined_words(words.as_deref())),
        Value::Float(number) if number.is_infinite() => return fault("cannot convert float infinity to integer"),
        _ => {}
    }
    if let Some(Number::Int(number)) = Number::of(value) {
        return Ok(Value::Int(number));
    }
    if let Value::Str(text) = value
        && let Some(number) = read_int(text, base)
    {
        return Ok(Value::Int(number));
    }
    match read_float(value) {
        Some(number) if number.is_finite() && number.abs() < 1e38 => Ok(Value::Int(number.trunc() as i128)),
        _ => Ok(default),
    }
}

/// Python's `int(text, base)`.
fn read_int(text: &str, base: i128) -> Option<i128> {
    let text = text.trim_matches(print::is_space);
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let mut base = u32::try_from(base).ok().filter(|base| matches!(base, 0 | 2..=36))?;
    let lower = digits.to_ascii_lowercase();
    let mut digits = lower.as_str();
    for (mark, marked) in [("0x", 16), ("0o", 8), ("0b", 2)] {
        if let Some(rest) = digits.strip_prefix(mark)
            && (base == 0 || base == marked)
        {
            (digits, base) = (rest.strip_prefix('_').unwrap_or(rest), marked);
            break;
        }
    }
    if digits.starts_with(['_', '-', '+']) || digits.ends_with('_') || digits.contains("__") {
        return None;
    }
    let base = if base == 0 { 10 } else { base };
    let number = i128::from_str_radix(&digits.replace('_', ""), base).ok()?;
    Some(if negative { -number } else { number })
}

/// Python's `float(value)`.
fn read_float(value: &Value) -> Option<f64> {
    if let Some(number) = Number::of(value) {
        return Some(number.float());
    }
    let text = value.as_str()?.trim_matches(print::is_space);
    if text.starts_with('_') || text.ends_with('_') || text.contains("__") {
        return None;
    }
    text.replace('_', "").parse().ok()
}

fn file_size(bytes: f64, binary: bool) -> String {
    let base: f64 = if binary { 1024.0 } else { 1000.0 };
    if bytes == 1.0 {
        return "1 Byte".into();
    }
    if bytes < base {
        return format!("{} Bytes", bytes.trunc() as i128);
    }
    let (mut unit, mut prefix) = (base, 'k');
    for (power, next) in (1..).zip(['k', 'M', 'G', 'T', 'P', 'E', 'Z', 'Y']) {
        (unit, prefix) = (base.powi(power), next);
        if bytes < unit * base {
            break;
        }
    }
    let prefix = if binary { format!("{}iB", prefix.to_ascii_uppercase()) } else { format!("{prefix}B") };
    format!("{:.1} {prefix}", bytes / unit)
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
