//! Parser of expressions, with Jinja's precedence.

use super::{
    ast::{Args, Call, Comparison, Expr, Filter, Operator},
    lexer::Token,
    parser::{Parsed, Parser, described},
};
use crate::template::{checks, filters};

impl Parser {
    /// An expression or, with commas, a tuple, up to one of `ends` or the end of the tag.
    pub(super) fn tuple(&mut self, conditional: bool, ends: &[&str], parentheses: bool) -> Parsed<Expr> {
        let mut items = Vec::new();
        let mut tuple = false;
        loop {
            let ended = match self.peek() {
                Token::BlockEnd | Token::PrintEnd | Token::Sign(")") => true,
                Token::Name(word) => ends.contains(&word.as_str()),
                _ => false,
            };
            if ended {
                break;
            }
            items.push(if conditional { self.expression()? } else { self.nested(Self::or)? });
            if !self.skip_sign(",") {
                break;
            }
            tuple = true;
        }
        if !tuple {
            if let Some(item) = items.pop() {
                return Ok(item);
            }
            if !parentheses {
                return self.fail(format!("Expected an expression, got {}", described(self.peek())));
            }
        }
        Ok(Expr::Tuple(items))
    }

    pub(super) fn expression(&mut self) -> Parsed<Expr> {
        self.nested(Self::conditional)
    }

    fn conditional(&mut self) -> Parsed<Expr> {
        let mut value = self.or()?;
        while self.skip_word("if") {
            let condition = self.or()?;
            let other = if self.skip_word("else") { Some(self.expression()?) } else { None };
            value = Expr::If(Box::new((condition, value, other)));
        }
        Ok(value)
    }

    fn or(&mut self) -> Parsed<Expr> {
        self.words("or", Self::and, Expr::Or)
    }

    fn and(&mut self) -> Parsed<Expr> {
        self.words("and", Self::not, Expr::And)
    }

    fn words(
        &mut self,
        word: &str,
        operand: fn(&mut Self) -> Parsed<Expr>,
        make: fn(Vec<Expr>) -> Expr,
    ) -> Parsed<Expr> {
        let first = operand(self)?;
        if !self.is_word(word) {
            return Ok(first);
        }
        let mut operands = vec![first];
        while self.skip_word(word) {
            operands.push(operand(self)?);
        }
        Ok(make(operands))
    }

    fn not(&mut self) -> Parsed<Expr> {
        if self.skip_word("not") { Ok(Expr::Not(Box::new(self.nested(Self::not)?))) } else { self.compare() }
    }

    fn compare(&mut self) -> Parsed<Expr> {
        let first = self.sum()?;
        let mut rest = Vec::new();
        loop {
            let comparison = match self.peek() {
                Token::Sign("==") => Comparison::Equal,
                Token::Sign("!=") => Comparison::NotEqual,
                Token::Sign("<") => Comparison::Less,
                Token::Sign("<=") => Comparison::LessEqual,
                Token::Sign(">") => Comparison::Greater,
                Token::Sign(">=") => Comparison::GreaterEqual,
                Token::Name(word) if word == "in" => Comparison::In,
                Token::Name(word) if word == "not" && matches!(self.look(), Token::Name(next) if next == "in") => {
                    self.next();
                    Comparison::NotIn
                }
                _ => break,
            };
            self.next();
            rest.push((comparison, self.sum()?));
        }
        Ok(if rest.is_empty() { first } else { Expr::Compare(Box::new((first, rest))) })
    }

    fn sum(&mut self) -> Parsed<Expr> {
        self.arithmetic(&[("+", Operator::Add), ("-", Operator::Subtract)], Self::concat)
    }

    fn concat(&mut self) -> Parsed<Expr> {
        let first = self.product()?;
        if !self.is_sign("~") {
            return Ok(first);
        }
        let mut parts = vec![first];
        while self.skip_sign("~") {
            parts.push(self.product()?);
        }
        Ok(Expr::Concat(parts))
    }

    fn product(&mut self) -> Parsed<Expr> {
        const OPERATORS: [(&str, Operator); 4] = [
            ("*", Operator::Multiply),
            ("/", Operator::Divide),
            ("//", Operator::FloorDivide),
            ("%", Operator::Remainder),
        ];
        self.arithmetic(&OPERATORS, |parser| parser.arithmetic(&[("**", Operator::Power)], |parser| parser.unary(true)))
    }

    fn arithmetic(
        &mut self,
        operators: &[(&str, Operator)],
        operand: impl Fn(&mut Self) -> Parsed<Expr>,
    ) -> Parsed<Expr> {
        let first = operand(self)?;
        let mut rest = Vec::new();
        while let Some(&(_, operator)) = operators.iter().find(|(sign, _)| self.is_sign(sign)) {
            self.next();
            rest.push((operator, operand(self)?));
        }
        Ok(if rest.is_empty() { first } else { Expr::Arithmetic(Box::new((first, rest))) })
    }

    fn unary(&mut self, with_filter: bool) -> Parsed<Expr> {
        let mut expr = if self.skip_sign("-") {
            Expr::Negative(Box::new(self.nested(|parser| parser.unary(false))?))
        } else if self.skip_sign("+") {
            Expr::Positive(Box::new(self.nested(|parser| parser.unary(false))?))
        } else {
            self.primary()?
        };
        expr = self.postfix(expr)?;
        if !with_filter {
            return Ok(expr);
        }
        // Each filter, test and call holds the one before it, so a chain of them counts as nesting.
        let depth = self.chain_start();
        loop {
            if self.skip_sign("|") {
                let filter = self.filter()?;
                expr = Expr::Filter(Box::new((expr, filter)));
            } else if self.skip_word("is") {
                expr = self.test(expr)?;
            } else if self.is_sign("(") {
                expr = Expr::Call(Box::new(Call { callee: expr, args: self.args()? }));
            } else {
                break;
            }
            self.chain_link()?;
        }
        self.chain_end(depth);
        Ok(expr)
    }

    fn primary(&mut self) -> Parsed<Expr> {
        Ok(match self.next() {
            Token::Name(name) => match name.as_str() {
                "true" | "True" => Expr::Bool(true),
                "false" | "False" => Expr::Bool(false),
                "none" | "None" => Expr::None,
                _ => Expr::Name(self.name(&name)),
            },
            Token::Str(mut text) => {
                while let Token::Str(more) = self.peek() {
                    text.push_str(more);
                    self.next();
                }
                Expr::Str(text.into())
            }
            Token::Int(value) => Expr::Int(value),
            Token::Float(value) => Expr::Float(value),
            Token::Sign("(") => {
                let expr = self.nested(|parser| parser.tuple(true, &[], true))?;
                self.expect_sign(")")?;
                expr
            }
            Token::Sign("[") => Expr::List(self.listed("]", Self::expression)?),
            Token::Sign("{") => Expr::Dict(self.listed("}", |parser| {
                let key = parser.expression()?;
                parser.expect_sign(":")?;
                Ok((key, parser.expression()?))
            })?),
            other => return self.fail(format!("unexpected {}", described(&other))),
        })
    }

    fn listed<T>(&mut self, end: &str, item: impl Fn(&mut Self) -> Parsed<T>) -> Parsed<Vec<T>> {
        let mut items = Vec::new();
        while !self.is_sign(end) {
            if !items.is_empty() {
                self.expect_sign(",")?;
                if self.is_sign(end) {
                    break;
                }
            }
            items.push(item(self)?);
        }
        self.expect_sign(end)?;
        Ok(items)
    }

    fn postfix(&mut self, mut expr: Expr) -> Parsed<Expr> {
        let depth = self.chain_start();
        loop {
            if self.skip_sign(".") {
                expr = match self.next() {
                    Token::Name(name) => Expr::Attribute(Box::new((expr, name.into()))),
                    Token::Int(index) => Expr::Item(Box::new((expr, Expr::Int(index)))),
                    _ => return self.fail("expected name or number"),
                };
            } else if self.skip_sign("[") {
                expr = self.subscript(expr)?;
            } else if self.is_sign("(") {
                expr = Expr::Call(Box::new(Call { callee: expr, args: self.args()? }));
            } else {
                break;
            }
            self.chain_link()?;
        }
        self.chain_end(depth);
        Ok(expr)
    }

    fn subscript(&mut self, expr: Expr) -> Parsed<Expr> {
        let bound = |parser: &mut Self| {
            let absent = parser.is_sign(":") || parser.is_sign("]");
            if absent { Ok(None) } else { parser.expression().map(Some) }
        };
        let start = bound(self)?;
        if !self.skip_sign(":") {
            let Some(first) = start else { return self.fail("expected subscript expression") };
            if !self.is_sign(",") {
                self.expect_sign("]")?;
                return Ok(Expr::Item(Box::new((expr, first))));
            }
            let mut items = vec![first];
            while self.skip_sign(",") {
                items.push(self.expression()?);
            }
            self.expect_sign("]")?;
            return Ok(Expr::Item(Box::new((expr, Expr::Tuple(items)))));
        }
        let stop = bound(self)?;
        let step = if self.skip_sign(":") { bound(self)? } else { None };
        self.expect_sign("]")?;
        Ok(Expr::Slice(Box::new((expr, [start, stop, step]))))
    }

    pub(super) fn args(&mut self) -> Parsed<Args> {
        self.expect_sign("(")?;
        self.nested(|parser| {
            let mut args = Args::default();
            let mut first = true;
            while !parser.is_sign(")") {
                if !first {
                    parser.expect_sign(",")?;
                    if parser.is_sign(")") {
                        break;
                    }
                }
                first = false;
                parser.arg(&mut args)?;
            }
            parser.expect_sign(")")?;
            Ok(args)
        })
    }

    fn arg(&mut self, args: &mut Args) -> Parsed<()> {
        const WORDS: &str = "invalid syntax for function call expression";
        let keyword = matches!(self.peek(), Token::Name(_)) && *self.look() == Token::Sign("=");
        if self.skip_sign("*") {
            if args.rest.is_some() || args.rest_named.is_some() {
                return self.fail(WORDS);
            }
            args.rest = Some(self.expression()?);
        } else if self.skip_sign("**") {
            if args.rest_named.is_some() {
                return self.fail(WORDS);
            }
            args.rest_named = Some(self.expression()?);
        } else if keyword {
            if args.rest_named.is_some() {
                return self.fail(WORDS);
            }
            let name = self.word()?;
            self.expect_sign("=")?;
            args.named.push((name.into(), self.expression()?));
        } else {
            if args.rest.is_some() || args.rest_named.is_some() || !args.named.is_empty() {
                return self.fail(WORDS);
            }
            args.positional.push(self.expression()?);
        }
        Ok(())
    }

    /// Filters of a `filter` or `set` block.
    pub(super) fn filters(&mut self, inline: bool) -> Parsed<Vec<Filter>> {
        let mut filters = Vec::new();
        if inline {
            filters.push(self.filter()?);
        }
        while self.skip_sign("|") {
            filters.push(self.filter()?);
        }
        Ok(filters)
    }

    fn filter(&mut self) -> Parsed<Filter> {
        let name = self.word()?;
        // As in Jinja, a filter that nobody has may stand where it is not reached.
        if self.conditions == 0 && !filters::NAMES.contains(&name.as_str()) {
            return self.fail(format!("No filter named '{name}'"));
        }
        let args = if self.is_sign("(") { self.args()? } else { Args::default() };
        Ok(Filter { name: name.into(), args })
    }

    fn test(&mut self, expr: Expr) -> Parsed<Expr> {
        let negated = self.skip_word("not");
        let name = self.word()?;
        if self.conditions == 0 && !checks::NAMES.contains(&name.as_str()) {
            return self.fail(format!("No test named '{name}'"));
        }
        let bare = match self.peek() {
            Token::Name(word) => !matches!(word.as_str(), "else" | "or" | "and"),
            Token::Str(_) | Token::Int(_) | Token::Float(_) | Token::Sign("[" | "{") => true,
            _ => false,
        };
        let args = if self.is_sign("(") {
            self.args()?
        } else if bare {
            if self.is_word("is") {
                return self.fail("You cannot chain multiple tests with is");
            }
            let arg = self.primary()?;
            Args { positional: vec![self.postfix(arg)?], ..Args::default() }
        } else {
            Args::default()
        };
        let test = Expr::Test(Box::new((expr, Filter { name: name.into(), args })));
        Ok(if negated { Expr::Not(Box::new(test)) } else { test })
    }
}
