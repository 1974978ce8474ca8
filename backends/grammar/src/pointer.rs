//! References within a schema: JSON pointers (RFC 6901) in the fragment of a URI, so `%` and `~` begin escapes.
//!
//! The grammar library takes the parts of a reference as they are, so references are written to it without escapes. A
//! part with a slash cannot be written so: a copy of its schema, under a name without one, is referred to instead.

use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};

/// Key in the root under which schemas with a slash in their name are copied; `_` is added while the schema has that
/// key itself.
const COPIES: &str = "x-penstock-copies";

/// Longest reference that is followed, in bytes: each of many references may lead to a long one.
pub(crate) const POINTER_BYTES_MAX: usize = 4 << 10;

/// Target of a reference inside `root`, and the parts of its path, an index in its shortest spelling; `None` if it is not
/// there, or longer than [`POINTER_BYTES_MAX`].
pub(crate) fn resolve<'a>(root: &'a Value, target: &str) -> Option<(&'a Value, Vec<String>)> {
    let pointer = target.strip_prefix("#/").filter(|_| target.len() <= POINTER_BYTES_MAX)?;
    // Some generators do not escape the names that they refer to.
    let spellings = [decoded(pointer), Some(parts(pointer).map(str::to_owned).collect())];
    spellings.into_iter().flatten().find_map(|path| follow(root, path))
}

/// Target of a reference inside `root`; `None` if it is not there, in another document, or named by more than 4 KiB.
pub fn referenced<'a>(root: &'a Value, target: &str) -> Option<&'a Value> {
    if target == "#" { Some(root) } else { resolve(root, target).map(|(found, _)| found) }
}

/// Value at the end of a path, and the path with its indices in their shortest spelling: `00` and `+0` are the same place.
fn follow(root: &Value, path: Vec<String>) -> Option<(&Value, Vec<String>)> {
    let mut value = root;
    let mut plain = Vec::with_capacity(path.len());
    for part in path {
        let part = match value {
            Value::Array(_) => part.parse::<usize>().ok()?.to_string(),
            _ => part,
        };
        value = step(value, &part)?;
        plain.push(part);
    }
    Some((value, plain))
}

/// Target of a reference for change; see [`resolve`].
pub(crate) fn resolve_mut<'a>(root: &'a mut Value, target: &str) -> Option<&'a mut Value> {
    let (_, path) = resolve(root, target)?;
    path.iter().try_fold(root, |value, part| match value {
        Value::Array(list) => list.get_mut(part.parse::<usize>().ok()?),
        value => value.get_mut(part),
    })
}

fn step<'a>(value: &'a Value, part: &str) -> Option<&'a Value> {
    match value {
        Value::Array(list) => list.get(part.parse::<usize>().ok()?),
        value => value.get(part),
    }
}

fn parts(pointer: &str) -> std::str::Split<'_, char> {
    pointer.split('/')
}

/// Parts of a pointer without escapes; `None` if they are no text.
fn decoded(pointer: &str) -> Option<Vec<String>> {
    let mut bytes = Vec::with_capacity(pointer.len());
    let mut rest = pointer.as_bytes();
    while let Some((&first, behind)) = rest.split_first() {
        let digit = |at: usize| behind.get(at).and_then(|digit| char::from(*digit).to_digit(16));
        match (first, digit(0), digit(1)) {
            (b'%', Some(high), Some(low)) => {
                bytes.push((high * 16 + low) as u8);
                rest = &behind[2..];
            }
            _ => {
                bytes.push(first);
                rest = behind;
            }
        }
    }
    let pointer = String::from_utf8(bytes).ok()?;
    // In this order: `~01` is `~1`.
    Some(parts(&pointer).map(|part| part.replace("~1", "/").replace("~0", "~")).collect())
}

/// Returns true if a reference may have escapes.
pub(crate) fn has_escapes(target: &str) -> bool {
    target.contains(['%', '~'])
}

/// References with escapes of one schema document, as they are written to the library.
pub(crate) struct Plain {
    /// Key of the copies in the root.
    key: String,
    /// Paths of the schemas that are copied, with the numbers of their copies.
    copied: HashMap<Vec<String>, usize>,
    /// Addresses of schemas whose reference has been written; a second pass would read it as if it still had escapes.
    written: HashSet<*const Map<String, Value>>,
}

impl Plain {
    pub(crate) fn new(root: &Value) -> Self {
        let mut key = COPIES.to_owned();
        while root.get(&key).is_some() {
            key.push('_');
        }
        Self { key, copied: HashMap::new(), written: HashSet::new() }
    }

    /// Writes the reference of a schema without escapes, once. `root`: the document before any of its references was
    /// written; `map`: a schema of the document that becomes the written one, and is not moved meanwhile.
    pub(crate) fn write(&mut self, root: &Value, map: &mut Map<String, Value>) {
        if !self.written.insert(std::ptr::from_ref(map)) {
            return;
        }
        let Some(Value::String(target)) = map.get_mut("$ref") else { return };
        if !has_escapes(target) {
            return;
        }
        let Some((_, path)) = resolve(root, target) else { return };
        *target = if path.iter().any(|part| part.contains('/')) {
            let next = self.copied.len();
            let number = self.copied.entry(path).or_insert(next);
            format!("#/{}/{number}", self.key)
        } else {
            format!("#/{}", path.join("/"))
        };
    }

    /// Schemas that will be copied, each with the number of its copy.
    pub(crate) fn originals<'a>(&self, root: &'a Value) -> impl Iterator<Item = (usize, &'a Value)> {
        let find = move |path: &Vec<String>| path.iter().try_fold(root, |value, part| step(value, part));
        self.copied.iter().filter_map(move |(path, number)| Some((*number, find(path)?)))
    }

    /// Copies the schemas whose names have slashes, once all references are written.
    pub(crate) fn copy(self, root: &mut Value) {
        let copies: Map<_, _> =
            self.originals(root).map(|(number, schema)| (number.to_string(), schema.clone())).collect();
        if let (Value::Object(root), false) = (root, copies.is_empty()) {
            root.insert(self.key, Value::Object(copies));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn one_place_has_one_copy_however_its_index_is_written() {
        let root = json!({"$defs": {"/": {"allOf": [{"const": "x".repeat(1000)}]}}});
        let mut plain = Plain::new(&root);
        let spellings = ["0", "00", "000", "+0", "+00"];
        let mut maps = spellings.map(|index| {
            let schema = json!({"$ref": format!("#/$defs/~1/allOf/{index}")});
            schema.as_object().expect("an object").clone()
        });
        maps.iter_mut().for_each(|map| plain.write(&root, map));
        assert!(maps.iter().all(|map| *map == maps[0]), "{maps:?}");
        assert_eq!(plain.originals(&root).count(), 1);
    }

    #[test]
    fn escapes_of_fragment_and_pointer_are_read_once_each() {
        let root = json!({"d": {"a/b": 1, "a~b": 2, "a~1b": 3, "L<s>": 4, "ä%": 5, "50%25": 6, "": 7, "x": [8, 9]}});
        let at = |target: &str| resolve(&root, target).and_then(|(value, _)| value.as_u64());
        for (target, value) in [
            ("#/d/a~1b", Some(1)),
            ("#/d/a%2Fb", None),
            ("#/d/a~0b", Some(2)),
            ("#/d/a%7E0b", Some(2)),
            ("#/d/a~b", Some(2)),
            ("#/d/a~01b", Some(3)),
            ("#/d/L%3Cs%3e", Some(4)),
            ("#/d/L<s>", Some(4)),
            ("#/d/%C3%A4%25", Some(5)),
            ("#/d/50%2525", Some(6)),
            ("#/d/50%25", Some(6)),
            ("#/d/", Some(7)),
            ("#/d/x/1", Some(9)),
            ("#/d/x/01", Some(9)),
            ("#/d/%FF", None),
            ("#/d/%", None),
            ("#/d/%C", None),
            ("#", None),
        ] {
            assert_eq!(at(target), value, "{target}");
        }
        let long = |length: usize| format!("#/{}", "a".repeat(length));
        let root = json!({"a".repeat(POINTER_BYTES_MAX - 2): 1, "a".repeat(POINTER_BYTES_MAX - 1): 2});
        let at = |target: &str| referenced(&root, target).and_then(Value::as_u64);
        assert_eq!([2, 1].map(|less| at(&long(POINTER_BYTES_MAX - less))), [Some(1), None]);
    }
}
