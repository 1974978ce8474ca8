//! A Rust source file as lines, with comments and strings distinguished well enough for the rules here.

/// One tracked `.rs` file.
pub struct Source {
    /// Path relative to the root.
    pub path: String,
    /// Lines of the file, unchanged.
    pub lines: Vec<String>,
}

impl Source {
    /// All tracked Rust files of the workspace's crates.
    pub fn all() -> Vec<Self> {
        let paths = crate::tracked().into_iter().filter(|path| path.ends_with(".rs"));
        paths.map(|path| Self { lines: crate::read(&path).lines().map(str::to_owned).collect(), path }).collect()
    }

    /// Returns true if the file lies in a folder of tests or benches and is not part of a program.
    pub fn is_test(&self) -> bool {
        let under =
            |folder: &str| self.path.starts_with(&format!("{folder}/")) || self.path.contains(&format!("/{folder}/"));
        under("tests") || under("benches") || under("examples") || self.path.ends_with("tests.rs")
    }

    /// Number of lines before the unit tests at its end.
    pub fn program_lines(&self) -> usize {
        let tests = self.lines.windows(2).position(|pair| {
            pair[0].trim() == "#[cfg(test)]" && pair[1].trim_start().starts_with("mod ") && pair[1].contains('{')
        });
        tests.unwrap_or(self.lines.len())
    }

    /// Lines of the program (before its unit tests), numbered from 1, without line comments and contents of strings.
    pub fn code(&self) -> impl Iterator<Item = (usize, String)> {
        let lines = self.lines[..self.program_lines()].iter().enumerate();
        lines.map(|(index, line)| (index + 1, code_of(line)))
    }

    /// Comment and attribute lines directly above line `number`, and the line itself.
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

/// `line` without its comment and without the content of its strings. Strings over several lines are not followed.
fn code_of(line: &str) -> String {
    let (mut out, mut quoted, mut escaped) = (String::new(), false, false);
    let mut rest = line.chars().peekable();
    while let Some(c) = rest.next() {
        match c {
            '"' if !escaped => quoted = !quoted,
            '/' if !quoted && rest.peek() == Some(&'/') => break,
            _ if !quoted => out.push(c),
            _ => {}
        }
        escaped = c == '\\' && !escaped;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_strings_are_no_code() {
        assert_eq!(code_of("let x = 1; // unsafe {"), "let x = 1; ");
        assert_eq!(code_of(r#"let u = "http://x"; // y"#), "let u = ; ");
        assert_eq!(code_of(r#"f("a \" unsafe", 2)"#), "f(, 2)");
        assert_eq!(code_of("/// doc"), "");
    }

    #[test]
    fn unit_tests_are_not_program() {
        let lines = ["fn a() {}", "", "#[cfg(test)]", "mod tests {", "}"].map(str::to_owned).to_vec();
        assert_eq!(Source { path: "x.rs".into(), lines }.program_lines(), 2);
    }
}
