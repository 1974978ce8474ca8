//! Parser of statements. Expressions are in `expression.rs`.

use std::{collections::HashMap, sync::Arc};

use super::{
    SyntaxError,
    ast::{Body, Expr, For, Macro, Name, Node, Target, Template},
    lexer::{Token, tokens},
};

/// Nesting of blocks and expressions in a source; the evaluation needs a level for each.
const DEPTH_MAX: usize = 100;

/// Parses a template.
///
/// # Errors
/// [`SyntaxError`] where Jinja raises `TemplateSyntaxError`, and for statements that need other templates.
pub(in crate::template) fn parse(source: &str) -> Result<Template, SyntaxError> {
    let mut parser =
        Parser { tokens: tokens(source)?, at: 0, depth: 0, loops: 0, conditions: 0, names: Names::default() };
    let (body, _) = parser.body(&[])?;
    Ok(Template { body, names: parser.names.list })
}

#[derive(Default)]
struct Names {
    list: Vec<Arc<str>>,
    numbers: HashMap<Arc<str>, Name>,
    /// For each macro that is being parsed: which of `varargs`, `kwargs`, `caller` its body has named.
    used: Vec<[bool; 3]>,
}

pub(super) struct Parser {
    tokens: Vec<(Token, usize)>,
    at: usize,
    depth: usize,
    /// Loops around the current statement, inside of the innermost macro.
    loops: usize,
    /// Conditions around the current statement or expression.
    pub(super) conditions: usize,
    names: Names,
}

pub(super) type Parsed<T> = Result<T, SyntaxError>;

const MACRO_NAMES: [&str; 3] = ["varargs", "kwargs", "caller"];

impl Parser {
    pub(super) fn fail<T>(&self, words: impl Into<String>) -> Parsed<T> {
        Err(SyntaxError { line: self.tokens[self.at].1, words: words.into() })
    }

    pub(super) fn peek(&self) -> &Token {
        &self.tokens[self.at].0
    }

    pub(super) fn look(&self) -> &Token {
        &self.tokens[(self.at + 1).min(self.tokens.len() - 1)].0
    }

    pub(super) fn next(&mut self) -> Token {
        let token = self.tokens[self.at].0.clone();
        self.at = (self.at + 1).min(self.tokens.len() - 1);
        token
    }

    pub(super) fn is_sign(&self, sign: &str) -> bool {
        matches!(self.peek(), Token::Sign(found) if *found == sign)
    }

    pub(super) fn is_word(&self, word: &str) -> bool {
        matches!(self.peek(), Token::Name(found) if found == word)
    }

    pub(super) fn skip_sign(&mut self, sign: &str) -> bool {
        let found = self.is_sign(sign);
        if found {
            self.next();
        }
        found
    }

    pub(super) fn skip_word(&mut self, word: &str) -> bool {
        let found = self.is_word(word);
        if found {
            self.next();
        }
        found
    }

    pub(super) fn expect_sign(&mut self, sign: &str) -> Parsed<()> {
        if self.skip_sign(sign) {
            Ok(())
        } else {
            self.fail(format!("expected '{sign}', got {}", described(self.peek())))
        }
    }

    fn expect(&mut self, token: &Token) -> Parsed<()> {
        if self.peek() == token {
            self.next();
            return Ok(());
        }
        self.fail(format!("expected {}, got {}", described(token), described(self.peek())))
    }

    pub(super) fn word(&mut self) -> Parsed<String> {
        match self.next() {
            Token::Name(name) => Ok(name),
            other => self.fail(format!("expected a name, got {}", described(&other))),
        }
    }

    /// Runs `inner` one level deeper.
    pub(super) fn nested<T>(&mut self, inner: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return self.fail(format!("nested more than {DEPTH_MAX} levels"));
        }
        let result = inner(self);
        self.depth -= 1;
        result
    }

    /// Counts the links of a chain of postfix operators as nesting, up to [`Parser::chain_end`].
    pub(super) fn chain_start(&self) -> usize {
        self.depth
    }

    pub(super) fn chain_link(&mut self) -> Parsed<()> {
        self.depth += 1;
        if self.depth > DEPTH_MAX { self.fail(format!("nested more than {DEPTH_MAX} levels")) } else { Ok(()) }
    }

    pub(super) fn chain_end(&mut self, start: usize) {
        self.depth = start;
    }

    pub(super) fn name(&mut self, name: &str) -> Name {
        if let (Some(place), Some(used)) =
            (MACRO_NAMES.iter().position(|known| *known == name), self.names.used.last_mut())
        {
            used[place] = true;
        }
        self.intern(name)
    }

    fn intern(&mut self, name: &str) -> Name {
        if let Some(&number) = self.names.numbers.get(name) {
            return number;
        }
        let (number, name): (Name, Arc<str>) = (self.names.list.len() as Name, name.into());
        self.names.list.push(name.clone());
        self.names.numbers.insert(name, number);
        number
    }

    /// Statements up to a tag that begins with one of `ends`, and that word.
    fn body(&mut self, ends: &[&str]) -> Parsed<(Body, String)> {
        self.nested(|parser| parser.statements(ends))
    }

    fn statements(&mut self, ends: &[&str]) -> Parsed<(Body, String)> {
        let mut body = Vec::new();
        loop {
            match self.next() {
                Token::End if ends.is_empty() => return Ok((body, String::new())),
                Token::End => return self.fail(format!("unexpected end of template, expected {}", ends.join(" or "))),
                Token::Data(text) => body.push(Node::Data(text.into())),
                Token::PrintBegin => {
                    body.push(Node::Print(self.tuple(true, &[], false)?));
                    self.expect(&Token::PrintEnd)?;
                }
                _ => {
                    if let Token::Name(word) = self.peek()
                        && ends.contains(&word.as_str())
                    {
                        let word = word.clone();
                        self.next();
                        return Ok((body, word));
                    }
                    let node = self.statement()?;
                    self.expect(&Token::BlockEnd)?;
                    body.push(node);
                }
            }
        }
    }

    /// The end of a tag, the statements up to `end`; the end of that tag is left.
    fn block(&mut self, end: &str) -> Parsed<Body> {
        self.expect(&Token::BlockEnd)?;
        Ok(self.body(&[end])?.0)
    }

    fn statement(&mut self) -> Parsed<Node> {
        let word = self.word()?;
        match word.as_str() {
            "for" => self.for_loop(),
            "if" => self.conditions(),
            "set" => self.set(),
            "macro" => self.macro_definition(),
            "call" => self.call_block(),
            "filter" => {
                let filters = self.filters(true)?;
                Ok(Node::FilterBlock(filters, self.block("endfilter")?))
            }
            "with" => self.with(),
            "generation" => Ok(Node::Scope(self.closed_block("endgeneration")?)),
            "block" => {
                self.word()?;
                while self.skip_word("scoped") || self.skip_word("required") {}
                let body = self.closed_block("endblock")?;
                if matches!(self.peek(), Token::Name(_)) {
                    self.next();
                }
                Ok(Node::Block(body))
            }
            "print" => Ok(Node::Print(self.tuple(true, &[], false)?)),
            "break" | "continue" if self.loops == 0 => self.fail(format!("{word} outside of a loop")),
            "break" => Ok(Node::Break),
            "continue" => Ok(Node::Continue),
            "include" | "import" | "from" | "extends" | "autoescape" => {
                self.fail(format!("{word}: a chat template has no other templates"))
            }
            _ => self.fail(format!("Encountered unknown tag '{word}'")),
        }
    }

    /// A block that is a function of its own in Jinja: loops around it cannot be left from inside.
    fn closed_block(&mut self, end: &str) -> Parsed<Body> {
        let loops = std::mem::take(&mut self.loops);
        let body = self.block(end);
        self.loops = loops;
        body
    }

    fn for_loop(&mut self) -> Parsed<Node> {
        let target = self.target(&["in"])?;
        if !self.skip_word("in") {
            return self.fail(format!("expected 'in', got {}", described(self.peek())));
        }
        let items = self.tuple(false, &["recursive"], false)?;
        let condition = if self.skip_word("if") { Some(self.expression()?) } else { None };
        let recursive = self.skip_word("recursive");
        self.expect(&Token::BlockEnd)?;
        self.loops += 1;
        let (body, end) = self.body(&["endfor", "else"])?;
        self.loops -= 1;
        let otherwise = if end == "else" { self.block("endfor")? } else { Vec::new() };
        Ok(Node::For(For { target, items, condition, recursive, body, otherwise }.into()))
    }

    fn conditions(&mut self) -> Parsed<Node> {
        self.conditions += 1;
        let node = self.branches();
        self.conditions -= 1;
        node
    }

    fn branches(&mut self) -> Parsed<Node> {
        let mut branches = Vec::new();
        loop {
            let condition = self.tuple(false, &[], false)?;
            self.expect(&Token::BlockEnd)?;
            let (body, end) = self.body(&["elif", "else", "endif"])?;
            branches.push((condition, body));
            match end.as_str() {
                "elif" => {}
                "else" => return Ok(Node::If(branches, self.block("endif")?)),
                _ => return Ok(Node::If(branches, Vec::new())),
            }
        }
    }

    fn set(&mut self) -> Parsed<Node> {
        let target = self.target(&[])?;
        if self.skip_sign("=") {
            return Ok(Node::Set(target, self.tuple(true, &[], false)?));
        }
        let filters = self.filters(false)?;
        Ok(Node::SetBlock(target, filters, self.block("endset")?))
    }

    fn with(&mut self) -> Parsed<Node> {
        let mut values = Vec::new();
        while *self.peek() != Token::BlockEnd {
            if !values.is_empty() {
                self.expect_sign(",")?;
            }
            let target = self.single_target()?;
            self.expect_sign("=")?;
            values.push((target, self.expression()?));
        }
        Ok(Node::With(values, self.block("endwith")?))
    }

    fn macro_definition(&mut self) -> Parsed<Node> {
        let name = self.word()?;
        let variable = self.intern(&name);
        Ok(Node::Macro(self.signature_and_body(&name, variable)?.into()))
    }

    fn call_block(&mut self) -> Parsed<Node> {
        let start = self.at;
        // The signature stands before the call, and both before the body.
        let parameters = if self.is_sign("(") { self.parameters()? } else { Vec::new() };
        let Expr::Call(call) = self.expression()? else {
            self.at = start;
            return self.fail("expected a call");
        };
        let variable = self.intern("caller");
        let body = self.macro_body("caller", variable, parameters, "endcall")?;
        Ok(Node::CallBlock(*call, body.into()))
    }

    fn signature_and_body(&mut self, name: &str, variable: Name) -> Parsed<Macro> {
        let parameters = self.parameters()?;
        self.macro_body(name, variable, parameters, "endmacro")
    }

    fn parameters(&mut self) -> Parsed<Vec<(Name, Option<Expr>)>> {
        self.expect_sign("(")?;
        let mut parameters: Vec<(Name, Option<Expr>)> = Vec::new();
        while !self.is_sign(")") {
            if !parameters.is_empty() {
                self.expect_sign(",")?;
            }
            let word = self.word()?;
            let name = self.intern(&word);
            let default = if self.skip_sign("=") { Some(self.expression()?) } else { None };
            if default.is_none() && parameters.last().is_some_and(|(_, default)| default.is_some()) {
                return self.fail("non-default argument follows default argument");
            }
            parameters.push((name, default));
        }
        self.expect_sign(")")?;
        Ok(parameters)
    }

    fn macro_body(
        &mut self,
        name: &str,
        variable: Name,
        parameters: Vec<(Name, Option<Expr>)>,
        end: &str,
    ) -> Parsed<Macro> {
        self.names.used.push([false; 3]);
        let body = self.closed_block(end)?;
        let used = self.names.used.pop().unwrap_or_default();
        let mut special = [None; 3];
        for (place, name) in MACRO_NAMES.into_iter().enumerate() {
            if used[place] {
                let number = self.intern(name);
                // A parameter of the same name is the parameter.
                special[place] = parameters.iter().all(|(parameter, _)| *parameter != number).then_some(number);
            }
        }
        let [varargs, kwargs, caller] = special;
        Ok(Macro { name: name.into(), variable, parameters, body, varargs, kwargs, caller })
    }

    /// A target of an assignment: names, tuples, an attribute of a namespace.
    fn target(&mut self, ends: &[&str]) -> Parsed<Target> {
        let mut targets = Vec::new();
        let mut tuple = false;
        loop {
            let ended = matches!(self.peek(), Token::Name(word) if ends.contains(&word.as_str()));
            if tuple && (ended || self.is_sign("=") || self.is_sign(")") || *self.peek() == Token::BlockEnd) {
                break;
            }
            targets.push(self.single_target()?);
            if !self.skip_sign(",") {
                break;
            }
            tuple = true;
        }
        Ok(if tuple || targets.len() != 1 { Target::Tuple(targets) } else { targets.remove(0) })
    }

    fn single_target(&mut self) -> Parsed<Target> {
        if self.skip_sign("(") {
            let target = self.nested(|parser| parser.target(&[]))?;
            self.expect_sign(")")?;
            return Ok(target);
        }
        let word = self.word()?;
        if matches!(word.as_str(), "true" | "false" | "none" | "True" | "False" | "None") {
            return self.fail(format!("can't assign to '{word}'"));
        }
        let name = self.name(&word);
        if !self.skip_sign(".") {
            return Ok(Target::Name(name));
        }
        Ok(Target::Attribute(name, self.word()?.into()))
    }
}

pub(super) fn described(token: &Token) -> String {
    match token {
        Token::Data(_) => "text".into(),
        Token::BlockBegin => "'{%'".into(),
        Token::BlockEnd => "'%}'".into(),
        Token::PrintBegin => "'{{'".into(),
        Token::PrintEnd => "'}}'".into(),
        Token::Name(name) => format!("'{name}'"),
        Token::Str(_) => "a string".into(),
        Token::Int(_) | Token::Float(_) => "a number".into(),
        Token::Sign(sign) => format!("'{sign}'"),
        Token::End => "the end of the template".into(),
    }
}
