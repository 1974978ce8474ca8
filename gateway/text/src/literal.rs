//! Search for one fixed string in a stream of characters (Knuth–Morris–Pratt).

/// Search state for one string. Amortised O(1) per character.
#[derive(Clone, Debug)]
pub(crate) struct Prefix {
    pattern: Vec<char>,
    /// Failure function: `fallback[k]` is the longest proper prefix of the pattern that ends its first `k` characters.
    fallback: Vec<usize>,
    /// Byte length of each prefix of the pattern.
    bytes: Vec<usize>,
    matched: usize,
}

impl Prefix {
    /// Creates a search; `pattern` must not be empty.
    pub(crate) fn new(pattern: &str) -> Self {
        let pattern: Vec<char> = pattern.chars().collect();
        let mut fallback = vec![0; pattern.len() + 1];
        let mut k = 0;
        for index in 1..pattern.len() {
            while k > 0 && pattern[k] != pattern[index] {
                k = fallback[k];
            }
            k += usize::from(pattern[k] == pattern[index]);
            fallback[index + 1] = k;
        }
        let bytes = std::iter::once(0)
            .chain(pattern.iter().scan(0, |sum, c| {
                *sum += c.len_utf8();
                Some(*sum)
            }))
            .collect();
        Self { pattern, fallback, bytes, matched: 0 }
    }

    /// Takes a character; true when it completes the string, after which the search starts anew.
    pub(crate) fn push(&mut self, c: char) -> bool {
        while self.matched > 0 && self.pattern[self.matched] != c {
            self.matched = self.fallback[self.matched];
        }
        self.matched += usize::from(self.pattern[self.matched] == c);
        let found = self.matched == self.pattern.len();
        if found {
            self.matched = 0;
        }
        found
    }

    /// Number of bytes at the end of the stream that may be the beginning of the string.
    pub(crate) fn held_bytes(&self) -> usize {
        self.bytes[self.matched]
    }
}

/// Search for one string in a text, together with the text held back while the string may be complete later.
#[derive(Clone, Debug)]
pub(crate) struct Literal {
    prefix: Prefix,
    held: String,
}

impl Literal {
    pub(crate) fn new(pattern: &str) -> Self {
        Self { prefix: Prefix::new(pattern), held: String::new() }
    }

    /// Takes a character; true when it completes the string, and then nothing is held.
    pub(crate) fn push(&mut self, c: char) -> bool {
        self.held.push(c);
        let found = self.prefix.push(c);
        if found {
            self.held.clear();
        }
        found
    }

    /// Returns true if no part of the string is pending.
    pub(crate) fn is_idle(&self) -> bool {
        self.prefix.held_bytes() == 0
    }

    /// Number of bytes held back, because they may belong to the string.
    pub(crate) fn held_bytes(&self) -> usize {
        self.held.len()
    }

    /// Returns true if all held text may still belong to the string.
    pub(crate) fn released_is_empty(&self) -> bool {
        self.held.len() == self.prefix.held_bytes()
    }

    /// Takes the held text that cannot belong to the string any more.
    pub(crate) fn take_released(&mut self) -> String {
        let rest = self.held.split_off(self.held.len() - self.prefix.held_bytes());
        std::mem::replace(&mut self.held, rest)
    }

    /// Takes all held text; the search starts anew.
    pub(crate) fn take_all(&mut self) -> String {
        self.prefix.matched = 0;
        std::mem::take(&mut self.held)
    }
}
