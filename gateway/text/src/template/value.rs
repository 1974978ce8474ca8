//! Values of a template, as Python has them.
//!
//! Texts, lists and dictionaries never change once made: transformers' sandbox refuses the methods that would change
//! them. Namespaces change; they live with the machine and are known by their number, so no value can hold itself.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    rc::{Rc, Weak},
    sync::Arc,
};

use super::{
    budget::{Budget, Run, fault},
    compare,
    machine::Scope,
    syntax::ast::{For, Macro},
};

/// Dictionaries above this size are searched through an index.
const INDEX_FROM: usize = 12;

/// A value of the template language.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    /// An absent variable or field, with the words of the fault that its use raises.
    Undefined(Option<Arc<str>>),
    None,
    Bool(bool),
    /// Python's `int`, as far as 127 bits hold it.
    Int(i128),
    Float(f64),
    Str(Arc<str>),
    /// A text of the filters `safe` and `escape`: what is added to it is escaped for HTML.
    Markup(Arc<str>),
    List(Rc<Seq>),
    Tuple(Rc<Seq>),
    Dict(Rc<Dict>),
    Range(Range),
    /// `keys()`, `values()` or `items()` of a dictionary.
    View(View, Rc<Dict>),
    /// A generator: what is left of it. Filters such as `map` return one.
    Iter(Rc<Generator>),
    /// A namespace, by its number.
    Namespace(usize),
    Loop(Rc<Loop>),
    Callable(Rc<Callable>),
}

/// Items of a list or tuple.
#[derive(Debug)]
pub(crate) struct Seq {
    pub(crate) items: Vec<Value>,
    /// Levels of containers inside, this one counted.
    pub(crate) nesting: u32,
}

/// A dictionary in order of insertion.
#[derive(Debug)]
pub(crate) struct Dict {
    pub(crate) entries: Vec<(Value, Value)>,
    index: HashMap<Arc<str>, usize>,
    nesting: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum View {
    Keys,
    Values,
    Items,
}

/// Python's `range`; the step is not 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) start: i128,
    pub(crate) stop: i128,
    pub(crate) step: i128,
}

/// What is left of a generator.
#[derive(Debug)]
pub(crate) struct Generator {
    items: RefCell<std::vec::IntoIter<Value>>,
    nesting: u32,
}

/// The variable `loop`.
#[derive(Debug)]
pub(crate) struct Loop {
    pub(super) items: Rc<Seq>,
    pub(super) index: Cell<usize>,
    /// Nesting of a recursive loop, from 0.
    pub(super) depth: usize,
    /// Python text of the last arguments of `changed`: the values themselves could hold the loop.
    pub(super) changed: RefCell<Option<Arc<str>>>,
    /// The loop and its scope if it is marked recursive.
    pub(super) recursive: Option<(Arc<For>, Weak<Scope>)>,
}

/// Something that can be called.
#[derive(Debug)]
pub(crate) enum Callable {
    Method(Value, Arc<str>),
    Function(Function),
    /// A macro and the scope that it was defined in.
    Macro(Arc<Macro>, Weak<Scope>),
    /// Values that a `cycler` shows in turn.
    Cycler(Rc<Seq>, Cell<usize>),
    /// Separator of a `joiner`, and true once it was called.
    Joiner(Arc<str>, Cell<bool>),
}

/// Functions that every template sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Function {
    Range,
    Dict,
    Namespace,
    RaiseException,
    StrftimeNow,
    Cycler,
    Joiner,
}

impl Value {
    pub(super) fn undefined(words: impl Into<Arc<str>>) -> Self {
        Value::Undefined(Some(words.into()))
    }

    pub(super) fn nesting(&self) -> u32 {
        match self {
            Value::List(seq) | Value::Tuple(seq) => seq.nesting,
            Value::Dict(dict) | Value::View(_, dict) => dict.nesting,
            Value::Iter(iter) => iter.nesting,
            Value::Loop(state) => state.items.nesting + 1,
            Value::Callable(callable) => match &**callable {
                Callable::Method(value, _) => value.nesting() + 1,
                Callable::Cycler(seq, _) => seq.nesting + 1,
                _ => 0,
            },
            _ => 0,
        }
    }

    pub(super) fn is_undefined(&self) -> bool {
        matches!(self, Value::Undefined(_))
    }

    pub(crate) fn as_str(&self) -> Option<&str> {
        if let Value::Str(text) | Value::Markup(text) = self { Some(text) } else { None }
    }

    /// The value, of markup its plain text.
    pub(super) fn plain(self) -> Self {
        if let Value::Markup(text) = self { Value::Str(text) } else { self }
    }

    /// Python's `bool(value)`.
    pub(super) fn truth(&self) -> bool {
        match self {
            Value::Undefined(_) | Value::None => false,
            Value::Bool(value) => *value,
            Value::Int(value) => *value != 0,
            Value::Float(value) => *value != 0.0,
            Value::Str(text) | Value::Markup(text) => !text.is_empty(),
            Value::List(seq) | Value::Tuple(seq) => !seq.items.is_empty(),
            Value::Dict(dict) | Value::View(_, dict) => !dict.entries.is_empty(),
            Value::Range(range) => range.count() > 0,
            Value::Loop(state) => !state.items.items.is_empty(),
            Value::Iter(_) | Value::Namespace(_) | Value::Callable(_) => true,
        }
    }

    /// Name of the type in Python's words.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Value::Undefined(_) => "Undefined",
            Value::None => "NoneType",
            Value::Bool(_) => "bool",
            Value::Int(_) => "int",
            Value::Float(_) => "float",
            Value::Str(_) => "str",
            Value::Markup(_) => "Markup",
            Value::List(_) => "list",
            Value::Tuple(_) => "tuple",
            Value::Dict(_) => "dict",
            Value::Range(_) => "range",
            Value::View(View::Keys, _) => "dict_keys",
            Value::View(View::Values, _) => "dict_values",
            Value::View(View::Items, _) => "dict_items",
            Value::Iter(_) => "generator",
            Value::Namespace(_) => "Namespace",
            Value::Loop(_) => "LoopContext",
            Value::Callable(_) => "function",
        }
    }

    /// Python's `len(value)`.
    pub(super) fn len(&self, budget: &Budget) -> Run<usize> {
        Ok(match self {
            Value::Undefined(_) => 0,
            Value::Str(text) | Value::Markup(text) => {
                budget.scan(text.len())?;
                text.chars().count()
            }
            Value::List(seq) | Value::Tuple(seq) => seq.items.len(),
            Value::Dict(dict) | Value::View(_, dict) => dict.entries.len(),
            Value::Range(range) => range.count(),
            Value::Loop(state) => state.items.items.len(),
            _ => return fault(format!("object of type '{}' has no len()", self.kind())),
        })
    }

    pub(super) fn is_iterable(&self) -> bool {
        !matches!(
            self,
            Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) | Value::Namespace(_) | Value::Callable(_)
        )
    }

    /// All items that iterating over the value yields; a generator is empty afterwards.
    pub(super) fn items(&self, budget: &Budget) -> Run<Rc<Seq>> {
        let items: Vec<Value> = match self {
            Value::List(seq) | Value::Tuple(seq) => return Ok(seq.clone()),
            Value::Undefined(_) => Vec::new(),
            Value::Str(text) | Value::Markup(text) => {
                budget.bytes(text.len() * 16)?;
                budget.step(text.len())?;
                text.chars().map(|c| Value::Str(c.encode_utf8(&mut [0; 4]).into())).collect()
            }
            Value::Dict(dict) => dict.entries.iter().map(|(key, _)| key.clone()).collect(),
            Value::View(view, dict) => {
                let entries = dict.entries.iter();
                match view {
                    View::Keys => entries.map(|(key, _)| key.clone()).collect(),
                    View::Values => entries.map(|(_, value)| value.clone()).collect(),
                    View::Items => entries
                        .map(|(key, value)| budget.tuple(vec![key.clone(), value.clone()]))
                        .collect::<Run<_>>()?,
                }
            }
            Value::Range(range) => {
                budget.step(range.count())?;
                (0..range.count()).map(|index| Value::Int(range.at(index))).collect()
            }
            Value::Iter(iter) => iter.items.borrow_mut().by_ref().collect(),
            _ => return fault(format!("'{}' object is not iterable", self.kind())),
        };
        Ok(budget.seq(items)?.into())
    }

    /// A generator of `items`.
    pub(super) fn generator(budget: &Budget, items: Vec<Value>) -> Run<Self> {
        let seq = budget.seq(items)?;
        Ok(Value::Iter(Rc::new(Generator { items: RefCell::new(seq.items.into_iter()), nesting: seq.nesting })))
    }

    /// The next item of a generator.
    pub(super) fn next(generator: &Generator) -> Option<Self> {
        generator.items.borrow_mut().next()
    }
}

impl Dict {
    /// Builds a dictionary; of entries with the same key, the first gives the place and the last the value.
    pub(crate) fn new(budget: &Budget, entries: impl IntoIterator<Item = (Value, Value)>) -> Run<Self> {
        let mut dict = Dict { entries: Vec::new(), index: HashMap::new(), nesting: 1 };
        for (key, value) in entries {
            let key = key.plain();
            if !hashable(&key) {
                return fault(format!("unhashable type: '{}'", key.kind()));
            }
            match dict.position(budget, &key)? {
                Some(place) => dict.entries[place].1 = value,
                None => {
                    if let Value::Str(text) = &key {
                        dict.index.insert(text.clone(), dict.entries.len());
                    }
                    dict.entries.push((key, value));
                }
            }
        }
        if dict.entries.len() < INDEX_FROM {
            dict.index = HashMap::new();
        }
        budget.bytes(size_of::<(Value, Value)>() * dict.entries.len() + 64)?;
        dict.nesting = budget.nesting(dict.entries.iter().flat_map(|(key, value)| [key, value]))?;
        Ok(dict)
    }

    fn position(&self, budget: &Budget, key: &Value) -> Run<Option<usize>> {
        if let Value::Str(text) = key {
            if !self.index.is_empty() {
                return Ok(self.index.get(&**text).copied());
            }
            return Ok(self.entries.iter().position(|(other, _)| other.as_str() == Some(text)));
        }
        budget.step(self.entries.len() / 8)?;
        for (place, (other, _)) in self.entries.iter().enumerate() {
            if compare::equal(budget, other, key)? {
                return Ok(Some(place));
            }
        }
        Ok(None)
    }

    pub(super) fn get(&self, budget: &Budget, key: &Value) -> Run<Option<&Value>> {
        Ok(self.position(budget, key)?.map(|place| &self.entries[place].1))
    }

    pub(super) fn get_str(&self, key: &str) -> Option<&Value> {
        if !self.index.is_empty() {
            return self.index.get(key).map(|&place| &self.entries[place].1);
        }
        self.entries.iter().find(|(other, _)| other.as_str() == Some(key)).map(|(_, value)| value)
    }
}

/// Returns true if Python takes the value as a key.
pub(super) fn hashable(value: &Value) -> bool {
    match value {
        Value::List(_) | Value::Dict(_) | Value::View(..) => false,
        Value::Tuple(seq) => seq.items.iter().all(hashable),
        _ => true,
    }
}

impl Range {
    /// Number of items. Ranges are made with at most 100000.
    pub(super) fn count(&self) -> usize {
        let span = if self.step > 0 { self.stop - self.start } else { self.start - self.stop };
        let step = self.step.abs();
        if span <= 0 { 0 } else { ((span + step - 1) / step) as usize }
    }

    pub(super) fn at(&self, index: usize) -> i128 {
        self.start + self.step * index as i128
    }
}
