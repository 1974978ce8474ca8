//! Evaluation of statements: scopes, loops, macros, output.

use std::{
    cell::{Cell, RefCell},
    rc::{Rc, Weak},
    sync::Arc,
};

use super::{
    RenderError,
    arguments::Arguments,
    budget::{Budget, Run, TEXT_BYTES_MAX, fault},
    print,
    syntax::ast::{Filter, For, Macro, Name, Node, Target, Template},
    value::{Callable, Dict, Loop, Seq, Value},
};

/// Variables of a block, and those around it.
#[derive(Debug, Default)]
pub(crate) struct Scope {
    variables: RefCell<Vec<(Name, Value)>>,
    parent: Option<Rc<Scope>>,
}

/// How a body ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    On,
    Break,
    Continue,
}

/// State of one rendering.
pub(super) struct Machine<'t> {
    pub(super) budget: Budget,
    /// Names of variables, by number.
    names: &'t [Arc<str>],
    /// Fields of each namespace.
    namespaces: Vec<Vec<(Arc<str>, Value)>>,
    out: String,
    root: Rc<Scope>,
    pub(super) settings: Settings,
}

/// Settings of one rendering: the clock, and how strict the template may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    /// Time of `strftime_now`, in Unix seconds.
    pub(super) now_unix_s: i64,
    /// True if a `raise_exception` that says that roles must alternate does nothing.
    pub(super) any_order: bool,
}

/// Renders `template` with these variables.
pub(super) fn render(
    template: &Template,
    variables: impl IntoIterator<Item = (Arc<str>, Value)>,
    settings: Settings,
) -> Run<String> {
    let mut machine = Machine {
        budget: Budget::new(),
        names: &template.names,
        namespaces: Vec::new(),
        out: String::new(),
        root: Rc::default(),
        settings,
    };
    for (name, value) in variables {
        if let Some(number) = template.names.iter().position(|known| *known == name) {
            machine.root.set(number as Name, value);
        }
    }
    let root = machine.root.clone();
    machine.body(&template.body, &root)?;
    Ok(machine.out)
}

impl Scope {
    fn inside(parent: &Rc<Scope>) -> Rc<Self> {
        Rc::new(Self { variables: RefCell::default(), parent: Some(parent.clone()) })
    }

    fn set(&self, name: Name, value: Value) {
        let mut variables = self.variables.borrow_mut();
        match variables.iter_mut().find(|(known, _)| *known == name) {
            Some((_, old)) => *old = value,
            None => variables.push((name, value)),
        }
    }

    pub(super) fn get(&self, name: Name) -> Option<Value> {
        let mut scope = self;
        loop {
            if let Some((_, value)) = scope.variables.borrow().iter().find(|(known, _)| *known == name) {
                return Some(value.clone());
            }
            scope = scope.parent.as_deref()?;
        }
    }
}

impl<'t> Machine<'t> {
    pub(super) fn name(&self, name: Name) -> &'t Arc<str> {
        &self.names[name as usize]
    }

    fn number(&self, name: &str) -> Option<Name> {
        self.names.iter().position(|known| **known == *name).map(|number| number as Name)
    }

    fn body(&mut self, body: &[Node], scope: &Rc<Scope>) -> Run<Flow> {
        self.budget.enter()?;
        for node in body {
            let flow = self.node(node, scope)?;
            if flow != Flow::On {
                self.budget.leave();
                return Ok(flow);
            }
        }
        self.budget.leave();
        Ok(Flow::On)
    }

    fn node(&mut self, node: &Node, scope: &Rc<Scope>) -> Run<Flow> {
        match node {
            Node::Data(text) => self.write(text)?,
            Node::Print(expr) => {
                let value = self.eval(expr, scope)?;
                self.print(&value)?;
            }
            Node::If(branches, otherwise) => {
                for (condition, body) in branches {
                    if self.eval(condition, scope)?.truth() {
                        return self.body(body, scope);
                    }
                }
                return self.body(otherwise, scope);
            }
            Node::For(node) => self.for_loop(node, scope)?,
            Node::Set(target, expr) => {
                let value = self.eval(expr, scope)?;
                self.assign(target, value, scope)?;
            }
            Node::SetBlock(target, filters, body) => self.set_block(target, filters, body, scope)?,
            Node::Macro(node) => {
                let value = Callable::Macro(node.clone(), Rc::downgrade(scope));
                scope.set(node.variable, Value::Callable(value.into()));
            }
            Node::CallBlock(call, body) => {
                let caller = Value::Callable(Callable::Macro(body.clone(), Rc::downgrade(scope)).into());
                let value = self.call(call, scope, Some(caller))?;
                self.print(&value)?;
            }
            Node::FilterBlock(filters, body) => {
                let value = self.captured(filters, body, scope)?;
                self.print(&value)?;
            }
            Node::With(values, body) => self.with(values, body, scope)?,
            Node::Scope(body) => {
                self.body(body, &Scope::inside(scope))?;
            }
            Node::Block(body) => {
                let scope = Scope::inside(&self.root);
                self.body(body, &scope)?;
            }
            Node::Break => return Ok(Flow::Break),
            Node::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::On)
    }

    fn write(&mut self, text: &str) -> Run<()> {
        self.budget.scan(text.len())?;
        if self.out.len() + text.len() > TEXT_BYTES_MAX {
            return Err(RenderError::TooMuch);
        }
        self.out.push_str(text);
        Ok(())
    }

    fn print(&mut self, value: &Value) -> Run<()> {
        match value {
            Value::Str(text) => self.write(text),
            _ => print::write_text(&self.budget, value, &mut self.out),
        }
    }

    fn with(&mut self, values: &[(Target, super::syntax::ast::Expr)], body: &[Node], scope: &Rc<Scope>) -> Run<()> {
        let inside = Scope::inside(scope);
        for (target, expr) in values {
            let value = self.eval(expr, scope)?;
            self.assign(target, value, &inside)?;
        }
        self.body(body, &inside).map(|_| ())
    }

    fn set_block(&mut self, target: &Target, filters: &[Filter], body: &[Node], scope: &Rc<Scope>) -> Run<()> {
        let value = self.captured(filters, body, scope)?;
        self.assign(target, value, scope)
    }

    /// What `body` prints, through `filters`.
    fn captured(&mut self, filters: &[Filter], body: &[Node], scope: &Rc<Scope>) -> Run<Value> {
        let outer = std::mem::take(&mut self.out);
        self.body(body, &Scope::inside(scope))?;
        let text = std::mem::replace(&mut self.out, outer);
        let mut value = self.budget.text(text)?;
        for filter in filters {
            let args = self.args(&filter.args, scope)?;
            value = self.filter(&filter.name, value, args)?;
        }
        Ok(value)
    }

    fn assign(&mut self, target: &Target, value: Value, scope: &Rc<Scope>) -> Run<()> {
        match target {
            Target::Name(name) => scope.set(*name, value),
            Target::Tuple(targets) => {
                let items = value.items(&self.budget)?;
                if items.items.len() != targets.len() {
                    let (expected, found) = (targets.len(), items.items.len());
                    return fault(format!("cannot unpack {found} values into {expected} names"));
                }
                for (target, item) in targets.iter().zip(&items.items) {
                    self.assign(target, item.clone(), scope)?;
                }
            }
            Target::Attribute(name, field) => {
                let Some(Value::Namespace(number)) = scope.get(*name) else {
                    return fault("cannot assign attribute on non-namespace object");
                };
                self.set_field(number, field.clone(), value)?;
            }
        }
        Ok(())
    }

    /// Makes a namespace with these fields.
    pub(super) fn namespace(&mut self, dict: &Dict) -> Run<Value> {
        let number = self.namespaces.len();
        self.namespaces.push(Vec::new());
        for (key, value) in &dict.entries {
            let Value::Str(key) = key else { return fault("keywords must be strings") };
            self.set_field(number, key.clone(), value.clone())?;
        }
        Ok(Value::Namespace(number))
    }

    fn set_field(&mut self, number: usize, field: Arc<str>, value: Value) -> Run<()> {
        if field.starts_with('_') {
            return fault(format!("chat templates cannot store {field} on a namespace"));
        }
        self.budget.bytes(size_of::<(Arc<str>, Value)>())?;
        let fields = &mut self.namespaces[number];
        match fields.iter_mut().find(|(known, _)| *known == field) {
            Some((_, old)) => *old = value,
            None => fields.push((field, value)),
        }
        Ok(())
    }

    pub(super) fn field(&self, number: usize, field: &str) -> Option<Value> {
        self.namespaces[number].iter().find(|(known, _)| **known == *field).map(|(_, value)| value.clone())
    }

    fn for_loop(&mut self, node: &Arc<For>, scope: &Rc<Scope>) -> Run<()> {
        let items = self.eval(&node.items, scope)?.items(&self.budget)?;
        self.iterate(node, items, scope, 0)
    }

    /// Runs a loop over `items`; `depth` counts the calls of a recursive loop.
    fn iterate(&mut self, node: &Arc<For>, items: Rc<Seq>, scope: &Rc<Scope>, depth: usize) -> Run<()> {
        let items = self.chosen(node, items, scope)?;
        let variable = self.number("loop");
        let recursive = node.recursive.then(|| (node.clone(), Rc::downgrade(scope)));
        let state =
            Rc::new(Loop { items: items.clone(), index: Cell::new(0), depth, changed: RefCell::new(None), recursive });
        let mut inside = Scope::inside(scope);
        for (index, item) in items.items.iter().enumerate() {
            state.index.set(index);
            match Rc::get_mut(&mut inside) {
                Some(reused) => reused.variables.get_mut().clear(),
                // A macro of the last turn still knows the scope.
                None => inside = Scope::inside(scope),
            }
            if let Some(name) = variable {
                inside.set(name, Value::Loop(state.clone()));
            }
            self.assign(&node.target, item.clone(), &inside)?;
            if self.body(&node.body, &inside)? == Flow::Break {
                break;
            }
        }
        if items.items.is_empty() {
            self.body(&node.otherwise, &Scope::inside(scope))?;
        }
        Ok(())
    }

    /// Items of a loop that its condition accepts.
    fn chosen(&mut self, node: &For, items: Rc<Seq>, scope: &Rc<Scope>) -> Run<Rc<Seq>> {
        let Some(condition) = &node.condition else { return Ok(items) };
        let mut chosen = Vec::new();
        for item in &items.items {
            let inside = Scope::inside(scope);
            self.assign(&node.target, item.clone(), &inside)?;
            if self.eval(condition, &inside)?.truth() {
                chosen.push(item.clone());
            }
        }
        Ok(self.budget.seq(chosen)?.into())
    }

    /// Calls a recursive loop with the items of a deeper level.
    pub(super) fn recurse(&mut self, state: &Loop, items: &Value) -> Run<Value> {
        let Some((node, scope)) = &state.recursive else {
            return fault("The loop must have the 'recursive' marker to be called recursively.");
        };
        let scope = alive(scope)?;
        let items = items.items(&self.budget)?;
        let outer = std::mem::take(&mut self.out);
        self.iterate(node, items, &scope, state.depth + 1)?;
        let text = std::mem::replace(&mut self.out, outer);
        self.budget.text(text)
    }

    /// Calls a macro; `caller` is the body of a call block.
    pub(super) fn call_macro(
        &mut self,
        node: &Macro,
        scope: &Weak<Scope>,
        args: Arguments,
        caller: Option<Value>,
    ) -> Run<Value> {
        let outside = alive(scope)?;
        let scope = Scope::inside(&outside);
        let name = &node.name;
        let mut positional = args.positional.into_iter();
        let mut named = args.named;
        for (parameter, default) in &node.parameters {
            let key = self.name(*parameter);
            let by_name = named.iter().position(|(known, _)| known == key).map(|place| named.remove(place).1);
            let value = match (positional.next(), by_name) {
                (Some(_), Some(_)) => return fault(format!("macro '{name}' got two values for '{key}'")),
                (Some(value), None) | (None, Some(value)) => value,
                (None, None) => match default {
                    Some(default) => self.eval(default, &scope)?,
                    None => Value::undefined(format!("parameter {key:?} was not provided")),
                },
            };
            scope.set(*parameter, value);
        }
        let caller = named
            .iter()
            .position(|(key, _)| &**key == "caller" && node.caller.is_some())
            .map(|place| named.remove(place).1)
            .or(caller);
        match (node.caller, caller) {
            (Some(name), caller) => {
                scope.set(name, caller.unwrap_or_else(|| Value::undefined("No caller defined")));
            }
            (None, Some(_)) => return fault(format!("macro '{name}' was invoked with a caller and takes none")),
            (None, None) => {}
        }
        let rest: Vec<Value> = positional.collect();
        match node.varargs {
            Some(name) => scope.set(name, self.budget.tuple(rest)?),
            None if !rest.is_empty() => {
                return fault(format!("macro '{name}' takes not more than {} argument(s)", node.parameters.len()));
            }
            None => {}
        }
        match node.kwargs {
            Some(name) => {
                let entries = named.into_iter().map(|(key, value)| (Value::Str(key), value));
                scope.set(name, Value::Dict(Dict::new(&self.budget, entries)?.into()));
            }
            None if !named.is_empty() => {
                return fault(format!("macro '{name}' takes no keyword argument '{}'", named[0].0));
            }
            None => {}
        }
        let outer = std::mem::take(&mut self.out);
        self.body(&node.body, &scope)?;
        let text = std::mem::replace(&mut self.out, outer);
        self.budget.text(text)
    }
}

fn alive(scope: &Weak<Scope>) -> Run<Rc<Scope>> {
    match scope.upgrade() {
        Some(scope) => Ok(scope),
        None => fault("a macro or loop is called after the block that it was defined in"),
    }
}
