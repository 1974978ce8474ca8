//! The functions of a request, as far as parsers and grammars need them: names, and types of parameters.

use penstock_grammar::referenced;
use serde_json::{Map, Value, json};

/// Function that an answer may call.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CallableTool {
    /// Name of the function.
    pub name: String,
    /// JSON schema of the arguments; `None` where the request gives none: any object.
    pub parameters: Option<Value>,
    /// True if arguments must match the schema exactly: a grammar that cannot hold them to it is refused, not loosened.
    pub strict: bool,
}

impl CallableTool {
    /// Makes a tool of a request's fields. `parameters` is JSON text; what is no JSON object counts as absent.
    pub fn new(name: &str, parameters: Option<&str>, strict: bool) -> Self {
        let schema = parameters.and_then(|text| serde_json::from_str::<Value>(text).ok()).filter(Value::is_object);
        Self { name: name.into(), parameters: schema, strict }
    }

    /// Schema of the arguments: an object, whatever the request's schema leaves open.
    pub(crate) fn arguments(&self) -> Value {
        let mut schema = self.parameters.clone().unwrap_or_else(|| json!({}));
        if schema.get("$ref").is_none() {
            schema["type"] = "object".into();
        }
        schema
    }

    /// Schemas of the parameters in their order; `None` where the schema lists none.
    pub(crate) fn properties(&self) -> Option<&Map<String, Value>> {
        self.root()?.get("properties")?.as_object()
    }

    /// Schema of the arguments behind a reference at its root.
    pub(crate) fn root(&self) -> Option<&Value> {
        let schema = self.parameters.as_ref()?;
        Some(resolved(schema, schema))
    }

    /// Types that the schema allows for a parameter.
    pub(crate) fn kinds(&self, parameter: &str) -> Kinds {
        let schema = self.properties().and_then(|properties| properties.get(parameter));
        match (schema, &self.parameters) {
            (Some(schema), Some(root)) => Kinds::of(schema, root),
            _ => Kinds::ANY,
        }
    }
}

impl From<&penstock_types::Tool> for CallableTool {
    fn from(tool: &penstock_types::Tool) -> Self {
        Self::new(&tool.name, tool.parameters.as_deref(), tool.strict)
    }
}

/// Types of the parameter `parameter` of the function `name`; any type where no tool says otherwise.
pub(crate) fn kinds(tools: &[CallableTool], name: &str, parameter: &str) -> Kinds {
    tools.iter().find(|tool| tool.name == name).map_or(Kinds::ANY, |tool| tool.kinds(parameter))
}

/// Target of a schema's `$ref` inside `root`; the schema itself where it has none that can be followed.
pub(crate) fn resolved<'a>(schema: &'a Value, root: &'a Value) -> &'a Value {
    let mut at = schema;
    // Bound of the chain: references may form a circle.
    for _ in 0..8 {
        let Some(found) = at["$ref"].as_str().and_then(|target| referenced(root, target)) else { return at };
        at = found;
    }
    at
}

/// Deepest nesting of alternatives and references that [`Kinds::of`] looks at, and most schemas: alternatives may refer
/// to each other.
const KINDS_DEPTH_MAX: u8 = 16;
const KINDS_SCHEMAS_MAX: u32 = 1000;

/// Set of JSON types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kinds(u8);

impl Kinds {
    pub(crate) const STRING: Self = Self(1);
    const NUMBER: Self = Self(2);
    const BOOLEAN: Self = Self(4);
    const NULL: Self = Self(8);
    const OBJECT: Self = Self(16);
    const ARRAY: Self = Self(32);
    pub(crate) const ANY: Self = Self(63);

    /// Types that a schema of the document `root` allows, by its `type`, `enum`, `const`, references and alternatives.
    pub(crate) fn of(schema: &Value, root: &Value) -> Self {
        Self::within(schema, root, 0, &mut { KINDS_SCHEMAS_MAX })
    }

    fn within(schema: &Value, root: &Value, depth: u8, left: &mut u32) -> Self {
        if depth > KINDS_DEPTH_MAX || *left == 0 {
            return Self::ANY;
        }
        *left -= 1;
        let named = |value: &Value| value.as_str().map_or(Self::ANY, Self::named);
        let any = |values: &mut dyn Iterator<Item = Self>| values.fold(Self(0), |all, kind| Self(all.0 | kind.0));
        let mut allowed = match &schema["type"] {
            Value::Null => Self::ANY,
            Value::Array(names) => any(&mut names.iter().map(named)),
            name => named(name),
        };
        if let Some(values) = schema["enum"].as_array() {
            allowed.0 &= any(&mut values.iter().map(Self::of_value)).0;
        }
        if let Some(value) = schema.get("const") {
            allowed.0 &= Self::of_value(value).0;
        }
        if let Some(target) = schema["$ref"].as_str().and_then(|target| referenced(root, target)) {
            allowed.0 &= Self::within(target, root, depth + 1, left).0;
        }
        for schema in schema["allOf"].as_array().into_iter().flatten() {
            allowed.0 &= Self::within(schema, root, depth + 1, left).0;
        }
        for key in ["anyOf", "oneOf"] {
            if let Some(schemas) = schema[key].as_array() {
                allowed.0 &= any(&mut schemas.iter().map(|schema| Self::within(schema, root, depth + 1, left))).0;
            }
        }
        // A schema that allows nothing is the client's mistake: the value is taken as it comes.
        if allowed.0 == 0 { Self::ANY } else { allowed }
    }

    fn named(name: &str) -> Self {
        match name {
            "string" => Self::STRING,
            "integer" | "number" => Self::NUMBER,
            "boolean" => Self::BOOLEAN,
            "null" => Self::NULL,
            "object" => Self::OBJECT,
            "array" => Self::ARRAY,
            _ => Self::ANY,
        }
    }

    fn of_value(value: &Value) -> Self {
        match value {
            Value::Null => Self::NULL,
            Value::Bool(_) => Self::BOOLEAN,
            Value::Number(_) => Self::NUMBER,
            Value::String(_) => Self::STRING,
            Value::Array(_) => Self::ARRAY,
            Value::Object(_) => Self::OBJECT,
        }
    }

    /// Returns true if all values are numbers, truth values or null: the same text in most languages.
    pub(crate) fn are_plain(self) -> bool {
        self.0 & (Self::STRING.0 | Self::OBJECT.0 | Self::ARRAY.0) == 0
    }

    fn allows(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// JSON text of a value that the model wrote without JSON's quotes: a JSON value if it reads as one of these
    /// types, a string otherwise.
    pub(crate) fn json(self, written: &str) -> String {
        let text = written.trim();
        if self != Self::STRING {
            if let Ok(value) = serde_json::from_str::<Value>(text)
                && (self.allows(Self::of_value(&value)) || !self.allows(Self::STRING))
            {
                // As written, so that no number loses a digit; JSON's own blanks stay.
                return text.to_owned();
            }
            // Words as Python writes them.
            let word = match text {
                "True" | "TRUE" if self.allows(Self::BOOLEAN) => Some("true"),
                "False" | "FALSE" if self.allows(Self::BOOLEAN) => Some("false"),
                "None" if self.allows(Self::NULL) => Some("null"),
                _ => None,
            };
            if let Some(word) = word {
                return word.to_owned();
            }
            if text.starts_with(['[', '{', '('])
                && self.allows(Self(Self::ARRAY.0 | Self::OBJECT.0))
                && let Some(json) = super::loose::python_value(text)
            {
                return json;
            }
        }
        let mut json = String::with_capacity(written.len() + 2);
        json.push('"');
        written.chars().for_each(|c| escape(c, &mut json));
        json.push('"');
        json
    }
}

/// Appends a character of a JSON string, escaped where JSON asks for it.
pub(crate) fn escape(c: char, json: &mut String) {
    match c {
        '"' => json.push_str("\\\""),
        '\\' => json.push_str("\\\\"),
        '\n' => json.push_str("\\n"),
        '\r' => json.push_str("\\r"),
        '\t' => json.push_str("\\t"),
        '\0'..='\x1f' => {
            use std::fmt::Write;
            _ = write!(json, "\\u{:04x}", u32::from(c));
        }
        _ => json.push(c),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(schema: &Value, written: &str, json: &str) {
        assert_eq!(Kinds::of(schema, schema).json(written), json, "{schema}");
    }

    #[test]
    fn values_take_the_types_of_the_schema() {
        check(&json!({"type": "string"}), "5", r#""5""#);
        check(&json!({"type": "integer"}), "5", "5");
        check(&json!({"type": "integer"}), "five", r#""five""#);
        check(&json!({"type": "number"}), " 1.50 ", "1.50");
        check(&json!({"type": "boolean"}), "True", "true");
        check(&json!({"type": ["string", "null"]}), "null", "null");
        check(&json!({"type": ["string", "null"]}), "5", r#""5""#);
        check(&json!({"anyOf": [{"type": "integer"}, {"type": "string"}]}), "12", "12");
        check(&json!({"enum": ["1", "2"]}), "1", r#""1""#);
        check(&json!({"enum": [1, 2]}), "1", "1");
        check(&json!({"type": "array"}), "['a', {'b': None}]", r#"["a",{"b":null}]"#);
        check(&json!({"type": "object"}), "{\"a\": [1]}", r#"{"a": [1]}"#);
        check(&json!({"type": "object"}), "{oops", r#""{oops""#);
        check(&json!({}), "a \"b\"\n", r#""a \"b\"\n""#);
        check(&json!({}), "true", "true");
        check(&json!({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}), "7", "7");
        check(&json!({"$ref": "#", "type": "integer"}), "7", "7");
        let text = json!({"type": "string"});
        check(&json!({"$ref": "#/$defs/List%3Cs%3E", "$defs": {"List<s>": text}}), "7", r#""7""#);
        check(&json!({"$ref": "#/$defs/a~1b", "$defs": {"a/b": text}}), "true", r#""true""#);
        check(&json!({"allOf": [{"$ref": "#/$defs/e"}], "$defs": {"e": {"enum": ["5"]}}}), "5", r#""5""#);
        check(&json!({"$ref": "#/$defs/e", "type": "string", "$defs": {"e": {}}}), "5", r#""5""#);
    }

    #[test]
    fn types_of_alternatives_that_refer_to_each_other_take_little_work() {
        let alternatives: Vec<Value> = (0..100).map(|n| json!({"$ref": format!("#/$defs/{}", n % 3)})).collect();
        let one = json!({"anyOf": alternatives});
        let schema = json!({"$ref": "#/$defs/0", "$defs": {"0": one, "1": one, "2": one}});
        // Without a bound these are 100 to the power of the depth.
        assert_eq!(Kinds::of(&schema, &schema), Kinds::ANY);
    }
}
