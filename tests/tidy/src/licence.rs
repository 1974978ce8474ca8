//! Reader of SPDX expressions, complete enough to check one against an allow-list.

/// Returns true if `allowed` licences satisfy `expression`: one side of each OR, both sides of each AND.
/// `/` is the old way to write OR; `WITH exception` is part of the licence's name.
///
/// An expression that cannot be read is not satisfied.
pub fn satisfied(expression: &str, allowed: &[&str]) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut reader = Reader { words: &words, at: 0, allowed };
    matches!((reader.alternatives(), reader.at), (Some(true), at) if at == words.len())
}

struct Reader<'a> {
    words: &'a [&'a str],
    at: usize,
    allowed: &'a [&'a str],
}

impl Reader<'_> {
    fn next_is(&mut self, word: &str) -> bool {
        let found = self.words.get(self.at) == Some(&word);
        self.at += usize::from(found);
        found
    }

    fn alternatives(&mut self) -> Option<bool> {
        let mut value = self.conjunction()?;
        while self.next_is("OR") {
            value |= self.conjunction()?;
        }
        Some(value)
    }

    fn conjunction(&mut self) -> Option<bool> {
        let mut value = self.term()?;
        while self.next_is("AND") {
            value &= self.term()?;
        }
        Some(value)
    }

    fn term(&mut self) -> Option<bool> {
        if self.next_is("(") {
            let value = self.alternatives()?;
            return self.next_is(")").then_some(value);
        }
        let mut name = (*self.words.get(self.at)?).to_owned();
        self.at += 1;
        if self.next_is("WITH") {
            name = format!("{name} WITH {}", self.words.get(self.at)?);
            self.at += 1;
        }
        Some(self.allowed.contains(&name.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::satisfied;

    #[track_caller]
    fn check(expression: &str, want: bool) {
        assert_eq!(
            satisfied(expression, &["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"]),
            want,
            "{expression}"
        );
    }

    #[test]
    fn expressions() {
        check("MIT", true);
        check("GPL-3.0", false);
        check("MIT OR LGPL-2.1", true);
        check("MIT/GPL-2.0", true);
        check("MIT AND LGPL-2.1", false);
        check("(MIT OR GPL-2.0) AND Apache-2.0", true);
        check("(GPL-2.0 OR MPL-2.0) AND Apache-2.0", false);
        check("Apache-2.0 WITH LLVM-exception", true);
        check("GPL-2.0 WITH LLVM-exception", false);
        check("(MIT", false);
        check("", false);
        check("MIT MIT", false);
    }
}
