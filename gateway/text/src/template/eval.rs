//! Evaluation of expressions.
//!
//! Every kind of expression has a function of its own, so that a level of nesting takes little stack.

use std::{cell::Cell, rc::Rc, sync::Arc};

use super::{
    RenderError,
    arguments::{Arguments, integer, string},
    budget::{Run, fault},
    compare,
    machine::{Machine, Scope},
    methods, operate, print,
    syntax::ast::{Args, Call, Comparison, Expr, Filter, Operator},
    time,
    value::{Callable, Dict, Function, Range, Value},
};

/// Items that a range may have, as in Jinja's sandbox.
const RANGE_MAX: usize = 100_000;

impl Machine<'_> {
    pub(super) fn eval(&mut self, expr: &Expr, scope: &Rc<Scope>) -> Run<Value> {
        self.budget.enter()?;
        let value = self.dispatch(expr, scope)?;
        self.budget.leave();
        Ok(value)
    }

    fn dispatch(&mut self, expr: &Expr, scope: &Rc<Scope>) -> Run<Value> {
        match expr {
            Expr::None => Ok(Value::None),
            Expr::Bool(value) => Ok(Value::Bool(*value)),
            Expr::Int(value) => Ok(Value::Int(*value)),
            Expr::Float(value) => Ok(Value::Float(*value)),
            Expr::Str(text) => Ok(Value::Str(text.clone())),
            Expr::Name(name) => Ok(self.variable(*name, scope)),
            Expr::List(items) => self.eval_all(items, scope).and_then(|items| self.budget.list(items)),
            Expr::Tuple(items) => self.eval_all(items, scope).and_then(|items| self.budget.tuple(items)),
            Expr::Dict(entries) => self.eval_dict(entries, scope),
            Expr::Attribute(parts) => self.eval_attribute(&parts.0, &parts.1, scope),
            Expr::Item(parts) => self.eval_item(&parts.0, &parts.1, scope),
            Expr::Slice(parts) => self.eval_slice(&parts.0, &parts.1, scope),
            Expr::Call(call) => self.call(call, scope, None),
            Expr::Filter(parts) => self.eval_filter(&parts.0, &parts.1, scope),
            Expr::Test(parts) => self.eval_test(&parts.0, &parts.1, scope),
            Expr::Negative(operand) => self.eval(operand, scope).and_then(|value| operate::negative(&value, true)),
            Expr::Positive(operand) => self.eval(operand, scope).and_then(|value| operate::negative(&value, false)),
            Expr::Not(operand) => self.eval(operand, scope).map(|value| Value::Bool(!value.truth())),
            Expr::Arithmetic(parts) => self.eval_arithmetic(&parts.0, &parts.1, scope),
            Expr::Concat(parts) => self.eval_concat(parts, scope),
            Expr::And(parts) => self.eval_words(parts, scope, false),
            Expr::Or(parts) => self.eval_words(parts, scope, true),
            Expr::Compare(parts) => self.eval_compare(&parts.0, &parts.1, scope),
            Expr::If(parts) => self.eval_if(parts, scope),
        }
    }

    fn variable(&self, name: u32, scope: &Scope) -> Value {
        scope
            .get(name)
            .or_else(|| global(self.name(name)))
            .unwrap_or_else(|| Value::undefined(format!("'{}' is undefined", self.name(name))))
    }

    fn eval_all(&mut self, exprs: &[Expr], scope: &Rc<Scope>) -> Run<Vec<Value>> {
        exprs.iter().map(|expr| self.eval(expr, scope)).collect()
    }

    fn eval_dict(&mut self, entries: &[(Expr, Expr)], scope: &Rc<Scope>) -> Run<Value> {
        let mut values = Vec::with_capacity(entries.len());
        for (key, value) in entries {
            values.push((self.eval(key, scope)?, self.eval(value, scope)?));
        }
        Ok(Value::Dict(Dict::new(&self.budget, values)?.into()))
    }

    fn eval_attribute(&mut self, object: &Expr, name: &Arc<str>, scope: &Rc<Scope>) -> Run<Value> {
        let object = self.eval(object, scope)?.plain();
        self.attribute(&object, name)
    }

    fn eval_item(&mut self, object: &Expr, key: &Expr, scope: &Rc<Scope>) -> Run<Value> {
        let object = self.eval(object, scope)?.plain();
        let key = self.eval(key, scope)?.plain();
        self.item(&object, &key)
    }

    fn eval_slice(&mut self, object: &Expr, bounds: &[Option<Expr>; 3], scope: &Rc<Scope>) -> Run<Value> {
        let object = self.eval(object, scope)?;
        let mut values = [None; 3];
        for (slot, bound) in values.iter_mut().zip(bounds) {
            if let Some(bound) = bound {
                let value = self.eval(bound, scope)?;
                *slot = if matches!(value, Value::None) { None } else { Some(integer("slice", &value)?) };
            }
        }
        operate::slice(&self.budget, &object, values)
    }

    fn eval_filter(&mut self, input: &Expr, filter: &Filter, scope: &Rc<Scope>) -> Run<Value> {
        let input = self.eval(input, scope)?;
        let args = self.args(&filter.args, scope)?;
        self.filter(&filter.name, input, args)
    }

    fn eval_test(&mut self, input: &Expr, test: &Filter, scope: &Rc<Scope>) -> Run<Value> {
        let input = self.eval(input, scope)?;
        let args = self.args(&test.args, scope)?;
        self.check(&test.name, &input, args).map(Value::Bool)
    }

    fn eval_arithmetic(&mut self, first: &Expr, rest: &[(Operator, Expr)], scope: &Rc<Scope>) -> Run<Value> {
        let mut value = self.eval(first, scope)?;
        for (operator, operand) in rest {
            let operand = self.eval(operand, scope)?;
            value = operate::arithmetic(self, *operator, &value, &operand)?;
        }
        Ok(value)
    }

    fn eval_concat(&mut self, parts: &[Expr], scope: &Rc<Scope>) -> Run<Value> {
        let mut out = String::new();
        for part in parts {
            let value = self.eval(part, scope)?;
            print::write_text(&self.budget, &value, &mut out)?;
        }
        self.budget.text(out)
    }

    /// `or` gives the first true operand and `and` the first false one, else the last.
    fn eval_words(&mut self, parts: &[Expr], scope: &Rc<Scope>, until: bool) -> Run<Value> {
        let mut value = Value::None;
        for part in parts {
            value = self.eval(part, scope)?;
            if value.truth() == until {
                break;
            }
        }
        Ok(value)
    }

    fn eval_compare(&mut self, first: &Expr, rest: &[(Comparison, Expr)], scope: &Rc<Scope>) -> Run<Value> {
        let mut left = self.eval(first, scope)?;
        for (comparison, right) in rest {
            let right = self.eval(right, scope)?;
            if !operate::compare(&self.budget, *comparison, &left, &right)? {
                return Ok(Value::Bool(false));
            }
            left = right;
        }
        Ok(Value::Bool(true))
    }

    fn eval_if(&mut self, parts: &(Expr, Expr, Option<Expr>), scope: &Rc<Scope>) -> Run<Value> {
        let (condition, value, other) = parts;
        if self.eval(condition, scope)?.truth() {
            return self.eval(value, scope);
        }
        match other {
            Some(other) => self.eval(other, scope),
            None => Ok(Value::undefined("the inline if-expression evaluated to false and no else section was defined")),
        }
    }

    /// Arguments of a call, in Python's order of evaluation.
    pub(super) fn args(&mut self, args: &Args, scope: &Rc<Scope>) -> Run<Arguments> {
        let mut values = Arguments { positional: self.eval_all(&args.positional, scope)?, named: Vec::new() };
        for (name, expr) in &args.named {
            values.named.push((name.clone(), self.eval(expr, scope)?));
        }
        if let Some(rest) = &args.rest {
            let rest = self.eval(rest, scope)?.items(&self.budget)?;
            values.positional.extend(rest.items.iter().cloned());
        }
        if let Some(rest) = &args.rest_named {
            let Value::Dict(dict) = self.eval(rest, scope)? else {
                return fault("argument after ** must be a mapping");
            };
            for (key, value) in &dict.entries {
                values.named.push((string("**", key)?.clone(), value.clone()));
            }
        }
        Ok(values)
    }

    /// A call; `caller` is the body of a call block.
    pub(super) fn call(&mut self, call: &Call, scope: &Rc<Scope>, caller: Option<Value>) -> Run<Value> {
        // A method that is called at once needs no value of its own.
        if let Expr::Attribute(parts) = &call.callee {
            let object = self.eval(&parts.0, scope)?.plain();
            if methods::exists(&object, &parts.1) {
                let args = self.args(&call.args, scope)?;
                return methods::call(self, &object, &parts.1, args.plain());
            }
            let callee = self.attribute(&object, &parts.1)?;
            let args = self.args(&call.args, scope)?;
            return self.call_value(&callee, args, caller);
        }
        let callee = self.eval(&call.callee, scope)?;
        let args = self.args(&call.args, scope)?;
        self.call_value(&callee, args, caller)
    }

    fn call_value(&mut self, callee: &Value, args: Arguments, caller: Option<Value>) -> Run<Value> {
        let callable = match callee {
            Value::Callable(callable) => callable,
            Value::Loop(state) => {
                let items = args.one("loop")?;
                return self.recurse(state, &items);
            }
            Value::Undefined(words) => return fault(compare::undefined_words(words.as_deref())),
            _ => return fault(format!("'{}' object is not callable", callee.kind())),
        };
        match &**callable {
            Callable::Method(object, name) => methods::call(self, object, name, args),
            Callable::Function(function) => self.function(*function, args),
            Callable::Macro(node, scope) => self.call_macro(node, scope, args, caller),
            Callable::Cycler(items, at) => {
                args.none("cycler")?;
                Ok(items.items[at.replace((at.get() + 1) % items.items.len())].clone())
            }
            Callable::Joiner(separator, used) => {
                args.none("joiner")?;
                Ok(Value::Str(if used.replace(true) { separator.clone() } else { "".into() }))
            }
        }
    }

    fn function(&mut self, function: Function, args: Arguments) -> Run<Value> {
        match function {
            Function::Range => range(args),
            Function::Dict => Ok(Value::Dict(self.dict(args)?)),
            Function::Namespace => {
                let dict = self.dict(args)?;
                self.namespace(&dict)
            }
            Function::RaiseException => {
                let [words] = args.bind("raise_exception", ["message"], 1)?;
                let words = print::text(&self.budget, &words.unwrap_or(Value::None))?;
                if self.settings.any_order && words.contains(" alternate") {
                    return Ok(Value::Str("".into()));
                }
                Err(RenderError::Refused(crate::error::clip(&words)))
            }
            Function::StrftimeNow => {
                let [format] = args.bind("strftime_now", ["format"], 1)?;
                let format = format.unwrap_or(Value::None);
                let format = string("strftime", &format)?;
                self.budget.step(format.len())?;
                self.budget.text(time::strftime(format, self.settings.now_unix_s))
            }
            Function::Cycler => {
                if args.positional.is_empty() {
                    return fault("at least one item has to be provided");
                }
                let items = self.budget.seq(args.positional)?;
                Ok(Value::Callable(Callable::Cycler(items.into(), Cell::new(0)).into()))
            }
            Function::Joiner => {
                let [separator] = args.bind("joiner", ["sep"], 0)?;
                let separator = separator.map_or(Ok(", ".into()), |text| string("joiner", &text).cloned())?;
                Ok(Value::Callable(Callable::Joiner(separator, Cell::new(false)).into()))
            }
        }
    }

    /// Python's `dict(...)`: of a mapping or pairs, and named values.
    fn dict(&mut self, args: Arguments) -> Run<Rc<Dict>> {
        let mut entries = Vec::new();
        if args.positional.len() > 1 {
            return fault("dict expected at most 1 argument");
        }
        match args.positional.first() {
            None => {}
            Some(Value::Dict(dict)) => entries.extend(dict.entries.iter().cloned()),
            Some(pairs) => {
                for pair in &pairs.items(&self.budget)?.items {
                    match &pair.items(&self.budget)?.items[..] {
                        [key, value] => entries.push((key.clone(), value.clone())),
                        other => {
                            return fault(format!("dictionary update sequence has an item of length {}", other.len()));
                        }
                    }
                }
            }
        }
        entries.extend(args.named.into_iter().map(|(key, value)| (Value::Str(key), value)));
        Ok(Dict::new(&self.budget, entries)?.into())
    }

    /// Jinja's `object.name`: an attribute or method, else an item of that name.
    pub(super) fn attribute(&mut self, object: &Value, name: &Arc<str>) -> Run<Value> {
        if let Value::Undefined(words) = object {
            return fault(compare::undefined_words(words.as_deref()));
        }
        if let Some(value) = self.own_attribute(object, name) {
            return Ok(value);
        }
        if let Value::Dict(dict) = object
            && let Some(value) = dict.get_str(name)
        {
            return Ok(value.clone());
        }
        Ok(absent(object, name))
    }

    /// Jinja's `object[key]`: an item, else an attribute or method of that name.
    pub(super) fn item(&mut self, object: &Value, key: &Value) -> Run<Value> {
        let found = match (object, key) {
            (Value::Undefined(words), _) => return fault(compare::undefined_words(words.as_deref())),
            (Value::Dict(dict), key) => dict.get(&self.budget, key)?.cloned(),
            (Value::List(seq) | Value::Tuple(seq), Value::Int(_) | Value::Bool(_)) => {
                operate::place(seq.items.len(), integer("index", key)?).map(|place| seq.items[place].clone())
            }
            (Value::Str(text), Value::Int(_) | Value::Bool(_)) => {
                let length = object.len(&self.budget)?;
                let place = operate::place(length, integer("index", key)?);
                place.and_then(|place| text.chars().nth(place)).map(|c| Value::Str(c.encode_utf8(&mut [0; 4]).into()))
            }
            (Value::Range(range), Value::Int(index)) => {
                operate::place(range.count(), *index).map(|place| Value::Int(range.at(place)))
            }
            _ => None,
        };
        if let Some(value) = found {
            return Ok(value);
        }
        match key {
            Value::Str(name) => Ok(self.own_attribute(object, name).unwrap_or_else(|| absent(object, name))),
            _ => Ok(Value::undefined(format!("{} object has no such element", object.kind()))),
        }
    }

    fn own_attribute(&mut self, object: &Value, name: &Arc<str>) -> Option<Value> {
        if methods::exists(object, name) {
            return Some(Value::Callable(Callable::Method(object.clone(), name.clone()).into()));
        }
        match object {
            Value::Namespace(number) => self.field(*number, name),
            Value::Loop(state) => Some({
                let (index, count) = (state.index.get(), state.items.items.len());
                let int = |value: usize| Value::Int(value as i128);
                match &**name {
                    "index" => int(index + 1),
                    "index0" => int(index),
                    "revindex" => int(count - index),
                    "revindex0" => int(count - index - 1),
                    "first" => Value::Bool(index == 0),
                    "last" => Value::Bool(index + 1 == count),
                    "length" => int(count),
                    "depth" => int(state.depth + 1),
                    "depth0" => int(state.depth),
                    "previtem" => match index.checked_sub(1) {
                        Some(index) => state.items.items[index].clone(),
                        None => Value::undefined("there is no previous item"),
                    },
                    "nextitem" => match state.items.items.get(index + 1) {
                        Some(item) => item.clone(),
                        None => Value::undefined("there is no next item"),
                    },
                    _ => return None,
                }
            }),
            Value::Range(range) => Some(Value::Int(match &**name {
                "start" => range.start,
                "stop" => range.stop,
                "step" => range.step,
                _ => return None,
            })),
            Value::Int(_) | Value::Bool(_) | Value::Float(_) => match &**name {
                "real" => operate::negative(object, false).ok(),
                "imag" => Some(if matches!(object, Value::Float(_)) { Value::Float(0.0) } else { Value::Int(0) }),
                _ => None,
            },
            Value::Callable(callable) => match (&**callable, &**name) {
                (Callable::Macro(node, _), "name") => Some(Value::Str(node.name.clone())),
                (Callable::Cycler(items, at), "current") => Some(items.items[at.get()].clone()),
                _ => None,
            },
            _ => None,
        }
    }
}

fn absent(object: &Value, name: &str) -> Value {
    Value::undefined(format!("'{} object' has no attribute '{name}'", object.kind()))
}

/// Functions that every template sees.
fn global(name: &str) -> Option<Value> {
    let function = match name {
        "range" => Function::Range,
        "dict" => Function::Dict,
        "namespace" => Function::Namespace,
        "raise_exception" => Function::RaiseException,
        "strftime_now" => Function::StrftimeNow,
        "cycler" => Function::Cycler,
        "joiner" => Function::Joiner,
        _ => return None,
    };
    Some(Value::Callable(Callable::Function(function).into()))
}

fn range(args: Arguments) -> Run<Value> {
    let [first, second, step] = args.bind("range", ["/start", "/stop", "/step"], 1)?;
    let int = |value: Option<Value>| value.map(|value| integer("range", &value)).transpose();
    let (first, second, step) = (int(first)?.unwrap_or(0), int(second)?, int(step)?.unwrap_or(1));
    let (start, stop) = match second {
        Some(stop) => (first, stop),
        None => (0, first),
    };
    if step == 0 {
        return fault("range() arg 3 must not be zero");
    }
    if [start, stop, step].iter().any(|bound| bound.unsigned_abs() > 1 << 100) {
        return fault("Range too big");
    }
    let range = Range { start, stop, step };
    let span = if step > 0 { stop - start } else { start - stop };
    if span > 0 && (span - 1) / step.abs() + 1 > RANGE_MAX as i128 {
        return fault(format!("Range too big. The sandbox blocks ranges larger than MAX_RANGE ({RANGE_MAX})."));
    }
    Ok(Value::Range(range))
}
