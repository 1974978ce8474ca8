//! Arguments of calls, bound to parameters as Python binds them.

use std::sync::Arc;

use super::{
    budget::{Run, fault},
    value::Value,
};

/// Evaluated arguments of a call.
#[derive(Debug, Default)]
pub(super) struct Arguments {
    pub(super) positional: Vec<Value>,
    pub(super) named: Vec<(Arc<str>, Value)>,
}

impl Arguments {
    /// Values of `parameters`, the first `required` of which must be given. A parameter whose name begins with `/` is
    /// given by position only.
    pub(super) fn bind<const N: usize>(
        self,
        function: &str,
        parameters: [&str; N],
        required: usize,
    ) -> Run<[Option<Value>; N]> {
        let mut values = [const { None }; N];
        let given = self.positional.len();
        if given > N {
            return fault(format!("{function}() takes at most {N} arguments ({given} given)"));
        }
        for (slot, value) in values.iter_mut().zip(self.positional) {
            *slot = Some(value);
        }
        for (name, value) in self.named {
            match parameters.iter().position(|parameter| **parameter == *name) {
                Some(place) if values[place].is_none() => values[place] = Some(value),
                Some(_) => return fault(format!("{function}() got multiple values for argument '{name}'")),
                None => return fault(format!("{function}() got an unexpected keyword argument '{name}'")),
            }
        }
        match values[..required].iter().position(Option::is_none) {
            Some(place) => {
                fault(format!("{function}() missing argument '{}'", parameters[place].trim_start_matches('/')))
            }
            None => Ok(values),
        }
    }

    /// The arguments with markup as plain texts.
    pub(super) fn plain(self) -> Self {
        Self {
            positional: self.positional.into_iter().map(Value::plain).collect(),
            named: self.named.into_iter().map(|(name, value)| (name, value.plain())).collect(),
        }
    }

    /// Refuses any argument.
    pub(super) fn none(self, function: &str) -> Run<()> {
        self.bind(function, [], 0).map(|[]| ())
    }

    /// The only argument, given by position.
    pub(super) fn one(self, function: &str) -> Run<Value> {
        let [value] = self.bind(function, ["/value"], 1)?;
        Ok(value.unwrap_or(Value::None))
    }
}

/// An argument that must be an integer; truth values count as 0 and 1.
pub(super) fn integer(function: &str, value: &Value) -> Run<i128> {
    match value {
        Value::Int(value) => Ok(*value),
        Value::Bool(value) => Ok(i128::from(*value)),
        Value::Undefined(words) => fault(super::compare::undefined_words(words.as_deref())),
        _ => fault(format!("{function}(): '{}' object cannot be interpreted as an integer", value.kind())),
    }
}

/// An argument that must be a text.
pub(super) fn string<'a>(function: &str, value: &'a Value) -> Run<&'a Arc<str>> {
    match value {
        Value::Str(text) => Ok(text),
        Value::Undefined(words) => fault(super::compare::undefined_words(words.as_deref())),
        _ => fault(format!("{function}() argument must be str, not {}", value.kind())),
    }
}
