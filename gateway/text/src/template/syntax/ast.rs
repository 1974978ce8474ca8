//! Tree of a template.

use std::sync::Arc;

/// Number of a name in [`Template::names`].
pub(crate) type Name = u32;

/// Statements in order.
pub(crate) type Body = Vec<Node>;

#[derive(Debug)]
pub(crate) struct Template {
    pub(crate) body: Body,
    /// All names of variables, by number.
    pub(crate) names: Vec<Arc<str>>,
}

#[derive(Debug)]
pub(crate) enum Node {
    Data(Box<str>),
    Print(Expr),
    /// Branches with their conditions, and the rest.
    If(Vec<(Expr, Body)>, Body),
    For(Arc<For>),
    Set(Target, Expr),
    /// `{% set name | filter %} body {% endset %}`.
    SetBlock(Target, Vec<Filter>, Body),
    Macro(Arc<Macro>),
    /// A call whose macro may print the body through `caller()`.
    CallBlock(Call, Arc<Macro>),
    FilterBlock(Vec<Filter>, Body),
    With(Vec<(Target, Expr)>, Body),
    /// A body with variables of its own (`{% generation %}`).
    Scope(Body),
    /// A named block: its body sees the variables of the top level only.
    Block(Body),
    Break,
    Continue,
}

#[derive(Debug)]
pub(crate) enum Target {
    Name(Name),
    Tuple(Vec<Target>),
    /// An attribute of a namespace.
    Attribute(Name, Arc<str>),
}

#[derive(Debug)]
pub(crate) struct For {
    pub(crate) target: Target,
    pub(crate) items: Expr,
    pub(crate) condition: Option<Expr>,
    pub(crate) recursive: bool,
    pub(crate) body: Body,
    pub(crate) otherwise: Body,
}

#[derive(Debug)]
pub(crate) struct Macro {
    pub(crate) name: Arc<str>,
    pub(crate) variable: Name,
    /// Parameters with their defaults.
    pub(crate) parameters: Vec<(Name, Option<Expr>)>,
    pub(crate) body: Body,
    /// Names of `varargs`, `kwargs` and `caller` if the body uses them.
    pub(crate) varargs: Option<Name>,
    pub(crate) kwargs: Option<Name>,
    pub(crate) caller: Option<Name>,
}

#[derive(Debug)]
pub(crate) enum Expr {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<str>),
    Name(Name),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    Attribute(Box<(Expr, Arc<str>)>),
    Item(Box<(Expr, Expr)>),
    Slice(Box<(Expr, [Option<Expr>; 3])>),
    Call(Box<Call>),
    Filter(Box<(Expr, Filter)>),
    Test(Box<(Expr, Filter)>),
    Negative(Box<Expr>),
    Positive(Box<Expr>),
    Not(Box<Expr>),
    /// A first operand, and operators with their right operands, from left to right.
    Arithmetic(Box<(Expr, Vec<(Operator, Expr)>)>),
    Concat(Vec<Expr>),
    And(Vec<Expr>),
    Or(Vec<Expr>),
    Compare(Box<(Expr, Vec<(Comparison, Expr)>)>),
    /// Condition, value, other value.
    If(Box<(Expr, Expr, Option<Expr>)>),
}

#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) callee: Expr,
    pub(crate) args: Args,
}

/// A filter or test with its arguments.
#[derive(Debug)]
pub(crate) struct Filter {
    pub(crate) name: Arc<str>,
    pub(crate) args: Args,
}

#[derive(Debug, Default)]
pub(crate) struct Args {
    pub(crate) positional: Vec<Expr>,
    pub(crate) named: Vec<(Arc<str>, Expr)>,
    /// `*expression`.
    pub(crate) rest: Option<Expr>,
    /// `**expression`.
    pub(crate) rest_named: Option<Expr>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operator {
    Add,
    Subtract,
    Multiply,
    Divide,
    FloorDivide,
    Remainder,
    Power,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    In,
    NotIn,
}
