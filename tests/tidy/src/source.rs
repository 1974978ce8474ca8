//! A Rust source file as lines, with comments and strings told apart well enough for the rules here.

/// One tracked `.rs` file.
pub struct Source {
    /// Path relative to the root.
    pub path: String,
    /// Its lines as they are.
    pub lines: Vec<String>,
}

impl Source {
    /// All tracked Rust files of the workspace's crates.
    pub fn all() -> Vec<Self> {
        let paths = crate::tracked().into_iter().filter(|path| path.ends_with(".rs"));
        paths.map(|path| Self { lines: crate::read(&path).lines().map(str::to_owned).collect(), path }).collect()
    }

    /// Whether it lies in a folder of tests or benches: not part of a program.
    pub fn is_test(&self) -> bool {
        let under =
            |folder: &str| self.path.starts_with(&format!("{folder}/")) || self.path.contains(&format!("/{folder}/"));
        under("tests") || under("benches") || under("examples") || self.path.ends_with("/tests.rs")
    }

    /// Number of lines before the unit tests at its end.
    pub fn program_lines(&self) -> usize {
        let tests = self.lines.windows(2).position(|pair| {
            pair[0].trim() == "#[cfg(test)]" && pair[1].trim_start().starts_with("mod ") && pair[1].contains('{')
        });
        tests.unwrap_or(self.lines.len())
    }

    /// Lines of the program (before its unit tests) that are code, numbered from 1, line comments cut off.
    pub fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let lines = self.lines[..self.program_lines()].iter().enumerate();
        lines.map(|(index, line)| (index + 1, cut_comment(line)))
    }

    /// The comment and attribute lines directly above line `number`, and what stands on the line itself.
    pub fn above(&self, number: usize) -> String {
        let is_remark = |line: &&String| {
            let line = line.trim_start();
            line.starts_with("//") || line.starts_with("#[") || line.starts_with("#![") || line.ends_with(")]")
        };
        let mut text: Vec<&str> =
            self.lines[..number - 1].iter().rev().take_while(is_remark).map(String::as_str).collect();
        text.push(&self.lines[number - 1]);
        text.join("\n")
    }
}

/// `line` without a trailing `//` comment; a `//` inside a string literal stays.
fn cut_comment(line: &str) -> &str {
    let mut quoted = false;
    let bytes = line.as_bytes();
    for at in 0..bytes.len() {
        match bytes[at] {
            b'"' if at == 0 || bytes[at - 1] != b'\\' => quoted = !quoted,
            b'/' if !quoted && bytes.get(at + 1) == Some(&b'/') => return &line[..at],
            _ => {}
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_are_cut() {
        assert_eq!(cut_comment("let x = 1; // unsafe {"), "let x = 1; ");
        assert_eq!(cut_comment(r#"let u = "http://x"; // y"#), r#"let u = "http://x"; "#);
        assert_eq!(cut_comment("/// doc"), "");
    }

    #[test]
    fn unit_tests_are_not_program() {
        let lines = ["fn a() {}", "", "#[cfg(test)]", "mod tests {", "}"].map(str::to_owned).to_vec();
        assert_eq!(Source { path: "x.rs".into(), lines }.program_lines(), 2);
    }
}
