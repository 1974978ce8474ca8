//! Methods of `str`.

use std::sync::Arc;

use super::{
    arguments::{Arguments, integer, string},
    budget::{Budget, Run, fault},
    methods::{has_case, optional, stripped},
    operate,
    print::{self, is_space},
    value::Value,
};

/// Names of all methods of `str` that templates may call. `encode`, `maketrans` and `translate` are missing: there are
/// no bytes and no tables.
pub(super) const NAMES: [&str; 44] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "upper",
    "zfill",
];

/// Calls the method `name`, one of [`NAMES`].
pub(super) fn call(budget: &Budget, text: &Arc<str>, name: &str, args: Arguments) -> Run<Value> {
    budget.scan(text.len())?;
    match name {
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = args.bind(name, ["/chars"], 0)?;
            let chars = optional(name, chars.as_ref())?;
            budget.scan(8 * chars.as_ref().map_or(0, |chars| chars.len()))?;
            budget.text(stripped(text, chars.as_ref(), name != "rstrip", name != "lstrip"))
        }
        "split" | "rsplit" => split(budget, text, name, args),
        "splitlines" => {
            parts(budget, text, |c| !(' '..='~').contains(&c))?;
            let [keep] = args.bind(name, ["keepends"], 0)?;
            list(budget, split_lines(text, keep.is_some_and(|keep| keep.truth())))
        }
        "startswith" | "endswith" => affixes(budget, text, name, args).map(Value::Bool),
        "partition" | "rpartition" => partition(budget, text, name, args),
        "removeprefix" | "removesuffix" => {
            let affix = args.one(name)?;
            let affix = string(name, &affix)?;
            let rest = if name == "removeprefix" { text.strip_prefix(&**affix) } else { text.strip_suffix(&**affix) };
            rest.map_or_else(|| Ok(Value::Str(text.clone())), |rest| budget.text(rest))
        }
        "replace" => {
            let [old, new, count] = args.bind(name, ["/old", "/new", "/count"], 2)?;
            let (old, new) = (old.unwrap_or(Value::None), new.unwrap_or(Value::None));
            let count = count.map_or(Ok(-1), |count| integer(name, &count))?;
            replace(budget, text, string(name, &old)?, string(name, &new)?, count)
        }
        "join" => join(budget, text, args),
        "find" | "rfind" | "index" | "rindex" | "count" => find(budget, text, name, args),
        "center" | "ljust" | "rjust" => {
            let [width, fill] = args.bind(name, ["/width", "/fill"], 1)?;
            let width = integer(name, &width.unwrap_or(Value::None))?;
            let fill = optional(name, fill.as_ref())?.unwrap_or_else(|| " ".into());
            let mut chars = fill.chars();
            let (Some(fill), None) = (chars.next(), chars.next()) else {
                return fault("The fill character must be exactly one character long");
            };
            pad(budget, text, name, width, fill)
        }
        "zfill" => {
            let width = integer(name, &args.one(name)?)?;
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
            let Value::Str(padded) = pad(budget, digits, "rjust", width - sign.len() as i128, '0')? else {
                return fault("zfill: no text");
            };
            budget.text(format!("{sign}{padded}"))
        }
        "expandtabs" => {
            let [size] = args.bind(name, ["tabsize"], 0)?;
            expand_tabs(budget, text, size.map_or(Ok(8), |size| integer(name, &size))?)
        }
        _ => {
            args.none(name)?;
            budget.scan(4 * text.len())?;
            match changed_case(text, name) {
                Some(text) => budget.text(text),
                None => Ok(Value::Bool(has_property(text, name))),
            }
        }
    }
}

fn list<'a>(budget: &Budget, parts: impl IntoIterator<Item = &'a str>) -> Run<Value> {
    let parts = parts.into_iter().map(|part| budget.text(part)).collect::<Run<_>>()?;
    budget.list(parts)
}

fn split(budget: &Budget, text: &str, name: &str, args: Arguments) -> Run<Value> {
    let [separator, most] = args.bind(name, ["sep", "maxsplit"], 0)?;
    let most = most.map_or(Ok(-1), |most| integer(name, &most))?;
    let most = usize::try_from(most).map_or(usize::MAX, |most| most.saturating_add(1));
    let from_right = name == "rsplit";
    let Some(separator) = optional(name, separator.as_ref())? else {
        parts(budget, text, is_space)?;
        return list(budget, words(text, most, from_right));
    };
    if separator.is_empty() {
        return fault("empty separator");
    }
    budget.bytes(size_of::<&str>() * text.matches(&*separator).count())?;
    if !from_right {
        return list(budget, text.splitn(most, &*separator));
    }
    let mut parts: Vec<&str> = text.rsplitn(most, &*separator).collect();
    parts.reverse();
    list(budget, parts)
}

/// Takes the bytes of a list of the parts of a text, which ends of parts separate: before the list is made.
fn parts(budget: &Budget, text: &str, ends: impl Fn(char) -> bool) -> Run<()> {
    budget.bytes(size_of::<&str>() * text.chars().filter(|&c| ends(c)).count())
}

/// Words between white space, at most `most`: the last one (or first one, from the right) keeps the rest.
fn words(text: &str, most: usize, from_right: bool) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text;
    loop {
        rest = if from_right { rest.trim_end_matches(is_space) } else { rest.trim_start_matches(is_space) };
        if rest.is_empty() {
            break;
        }
        if parts.len() + 1 == most {
            parts.push(rest);
            break;
        }
        if from_right {
            let start = rest.rfind(is_space).map_or(0, |at| at + rest[at..].chars().next().map_or(0, char::len_utf8));
            parts.push(&rest[start..]);
            rest = &rest[..start];
        } else {
            let end = rest.find(is_space).unwrap_or(rest.len());
            parts.push(&rest[..end]);
            rest = &rest[end..];
        }
    }
    if from_right {
        parts.reverse();
    }
    parts
}

/// Lines as Python's `splitlines` finds them.
pub(super) fn split_lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let ends = |c: char| matches!(c, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(ends).unwrap_or(rest.len());
        let mark =
            if rest[end..].starts_with("\r\n") { 2 } else { rest[end..].chars().next().map_or(0, char::len_utf8) };
        lines.push(&rest[..end + if keep_ends { mark } else { 0 }]);
        rest = &rest[end + mark..];
    }
    lines
}

/// The part of a text between optional positions, and the number of characters before it; `None` if the start lies
/// behind the end.
fn window<'a>(text: &'a str, name: &str, start: Option<Value>, stop: Option<Value>) -> Run<Option<(&'a str, usize)>> {
    if start.is_none() && stop.is_none() {
        return Ok(Some((text, 0)));
    }
    let length = text.chars().count() as i128;
    let bound = |bound: Option<Value>, default: i128| match bound {
        None | Some(Value::None) => Ok(default),
        Some(bound) => integer(name, &bound).map(|bound| if bound < 0 { (bound + length).max(0) } else { bound }),
    };
    let (start, stop) = (bound(start, 0)?, bound(stop, length)?.min(length));
    if start > stop {
        return Ok(None);
    }
    let byte = |place: i128| text.char_indices().nth(place as usize).map_or(text.len(), |(at, _)| at);
    Ok(Some((&text[byte(start)..byte(stop)], start as usize)))
}

fn affixes(budget: &Budget, text: &str, name: &str, args: Arguments) -> Run<bool> {
    let [affixes, start, stop] = args.bind(name, ["/affix", "/start", "/stop"], 1)?;
    let affixes = affixes.unwrap_or(Value::None);
    let Some((text, _)) = window(text, name, start, stop)? else { return Ok(false) };
    let matches = |affix: &Value| -> Run<bool> {
        let affix = string(name, affix)?;
        budget.scan(affix.len())?;
        Ok(if name == "startswith" { text.starts_with(&**affix) } else { text.ends_with(&**affix) })
    };
    let Value::Tuple(choices) = &affixes else { return matches(&affixes) };
    for affix in &choices.items {
        if matches(affix)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn partition(budget: &Budget, text: &str, name: &str, args: Arguments) -> Run<Value> {
    let separator = args.one(name)?;
    let separator = string(name, &separator)?;
    if separator.is_empty() {
        return fault("empty separator");
    }
    let left = name == "partition";
    let found = if left { text.split_once(&**separator) } else { text.rsplit_once(&**separator) };
    let parts = match found {
        Some((before, after)) => [before, separator, after],
        None if left => [text, "", ""],
        None => ["", "", text],
    };
    budget.tuple(parts.into_iter().map(|part| budget.text(part)).collect::<Run<_>>()?)
}

/// Python's `replace`; all occurrences if `count` is negative.
pub(super) fn replace(budget: &Budget, text: &str, old: &str, new: &str, count: i128) -> Run<Value> {
    budget.scan(text.len())?;
    let places = if old.is_empty() { text.chars().count() + 1 } else { text.matches(old).count() };
    let count = usize::try_from(count).map_or(places, |count| count.min(places));
    budget.room(text.len().saturating_add(count.saturating_mul(new.len())))?;
    budget.text(text.replacen(old, new, count))
}

fn join(budget: &Budget, separator: &str, args: Arguments) -> Run<Value> {
    let items = args.one("join")?.items(budget)?;
    let mut out = String::new();
    for (index, item) in items.items.iter().enumerate() {
        let Value::Str(item) = item else {
            return fault(format!("sequence item {index}: expected str instance, {} found", item.kind()));
        };
        budget.scan(item.len() + separator.len())?;
        budget.room(out.len() + item.len() + separator.len())?;
        if index > 0 {
            out.push_str(separator);
        }
        out.push_str(item);
    }
    budget.text(out)
}

fn find(budget: &Budget, text: &str, name: &str, args: Arguments) -> Run<Value> {
    let [wanted, start, stop] = args.bind(name, ["/sub", "/start", "/stop"], 1)?;
    let wanted = wanted.unwrap_or(Value::None);
    let wanted = string(name, &wanted)?;
    budget.scan(text.len())?;
    let window = window(text, name, start, stop)?;
    if name == "count" {
        let Some((text, _)) = window else { return Ok(Value::Int(0)) };
        let count = if wanted.is_empty() { text.chars().count() + 1 } else { text.matches(&**wanted).count() };
        return Ok(Value::Int(count as i128));
    }
    let found = window.and_then(|(text, before)| {
        let at = if name.starts_with('r') { text.rfind(&**wanted) } else { text.find(&**wanted) };
        at.map(|at| before + text[..at].chars().count())
    });
    match found {
        Some(place) => Ok(Value::Int(place as i128)),
        None if name.ends_with("index") => fault("substring not found"),
        None => Ok(Value::Int(-1)),
    }
}

/// Python's `ljust`, `rjust` and `center`.
pub(super) fn pad(budget: &Budget, text: &str, name: &str, width: i128, fill: char) -> Run<Value> {
    let missing = usize::try_from(width.max(0)).unwrap_or(usize::MAX).saturating_sub(text.chars().count());
    budget.room(missing.saturating_mul(fill.len_utf8()).saturating_add(text.len()))?;
    let left = match name {
        "ljust" => 0,
        "rjust" => missing,
        // Python's own rounding: an odd rest goes left where the width is odd, too.
        _ => missing / 2 + (missing & usize::try_from(width).unwrap_or(0) & 1),
    };
    let mut out = String::with_capacity(text.len() + missing * fill.len_utf8());
    out.extend(std::iter::repeat_n(fill, left));
    out.push_str(text);
    out.extend(std::iter::repeat_n(fill, missing - left));
    budget.text(out)
}

fn expand_tabs(budget: &Budget, text: &str, size: i128) -> Run<Value> {
    let size = usize::try_from(size).unwrap_or(0);
    budget.room(text.matches('\t').count().saturating_mul(size).saturating_add(text.len()))?;
    let (mut out, mut column) = (String::new(), 0);
    for c in text.chars() {
        match c {
            '\t' if size > 0 => {
                let blanks = size - column % size;
                out.extend(std::iter::repeat_n(' ', blanks));
                column += blanks;
            }
            '\t' => {}
            c => {
                out.push(c);
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    budget.text(out)
}

fn changed_case(text: &str, name: &str) -> Option<String> {
    Some(match name {
        "upper" => text.to_uppercase(),
        "lower" => text.to_lowercase(),
        "casefold" => text.to_lowercase().replace('ß', "ss").replace('ς', "σ"),
        "capitalize" => capitalized(text),
        "swapcase" => text.chars().flat_map(swapped).collect(),
        "title" => titled(text),
        _ => return None,
    })
}

/// First character in title case, the others in lower case.
pub(super) fn capitalized(text: &str) -> String {
    let Some(first) = text.chars().next() else { return String::new() };
    // The rest is changed with the first character, because a final sigma depends on what stands before.
    let lower = text.to_lowercase();
    let skipped = first.to_lowercase().map(char::len_utf8).sum();
    title_case(first) + &lower[skipped..]
}

/// A character in title case: of a digraph or ligature, the first letter in upper case.
fn title_case(c: char) -> String {
    match c {
        'Ǆ'..='ǆ' => 'ǅ'.into(),
        'Ǉ'..='ǉ' => 'ǈ'.into(),
        'Ǌ'..='ǌ' => 'ǋ'.into(),
        'Ǳ'..='ǳ' => 'ǲ'.into(),
        _ => {
            let mut upper = c.to_uppercase();
            upper.next().into_iter().chain(upper.flat_map(char::to_lowercase)).collect()
        }
    }
}

fn swapped(c: char) -> Vec<char> {
    if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() }
}

fn titled(text: &str) -> String {
    let cased = |c: char| c.is_uppercase() || c.is_lowercase() || matches!(c, 'ǅ' | 'ǈ' | 'ǋ' | 'ǲ');
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        let start = rest.find(cased).unwrap_or(rest.len());
        let end = rest[start..].find(|c| !cased(c)).map_or(rest.len(), |end| start + end);
        out.push_str(&rest[..start]);
        out.push_str(&capitalized(&rest[start..end]));
        rest = &rest[end..];
    }
    out
}

fn has_property(text: &str, name: &str) -> bool {
    let all = |is: fn(char) -> bool| !text.is_empty() && text.chars().all(is);
    match name {
        "isalnum" => all(char::is_alphanumeric),
        "isalpha" => all(char::is_alphabetic),
        "isascii" => text.is_ascii(),
        "isdecimal" | "isdigit" => {
            all(|c| c.is_ascii_digit() || (!c.is_ascii() && c.is_numeric() && !c.is_alphabetic()))
        }
        "isnumeric" => all(char::is_numeric),
        "isidentifier" => all(|c| c.is_alphanumeric() || c == '_') && !text.starts_with(|c: char| c.is_numeric()),
        "islower" => has_case(text, false),
        "isupper" => has_case(text, true),
        "isprintable" => text.chars().all(print::is_printable),
        "isspace" => all(is_space),
        _ => titled(text) == text && text.chars().any(|c| c.is_uppercase() || c.is_lowercase()),
    }
}

/// Jinja's `indent` filter.
pub(super) fn indent(budget: &Budget, text: &str, indention: &str, first: bool, blank: bool) -> Run<Value> {
    parts(budget, text, |c| !(' '..='~').contains(&c))?;
    let lines = split_lines(text, false);
    budget.room(text.len() + indention.len().saturating_mul(lines.len() + 1))?;
    // Jinja adds a line break before it splits: a text that ends with one keeps it.
    let ends_open = text.is_empty()
        || split_lines(text, true).last().is_some_and(|line| line.len() != lines[lines.len() - 1].len());
    let mut out = String::new();
    for (index, line) in lines.iter().copied().chain(ends_open.then_some("")).enumerate() {
        if index > 0 {
            out.push('\n');
        }
        let indented = if index == 0 { first } else { blank || !line.is_empty() };
        if indented {
            out.push_str(indention);
        }
        out.push_str(line);
    }
    budget.text(out)
}

/// Number of characters of `text`, or of its first `most` ones in bytes.
pub(super) fn prefix(text: &str, most: i128) -> &str {
    match operate::place(usize::MAX, most) {
        Some(most) => &text[..text.char_indices().nth(most).map_or(text.len(), |(at, _)| at)],
        None => text,
    }
}
