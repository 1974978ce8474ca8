//! Output to the person: the answer as it is, reasoning dim, notes apart from both.
//!
//! On a terminal, control characters of the answer are shown as symbols: a model must not be able to move the cursor, set the
//! title or fill the clipboard. Piped output is the answer's bytes, without reasoning.

use std::borrow::Cow;
use std::io::{self, Write};

use super::client::Delta;

const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

/// Writer of an answer as it comes.
pub(super) struct Screen<W> {
    out: W,
    terminal: bool,
    dim: bool,
    line_begun: bool,
}

impl<W: Write> Screen<W> {
    /// Screen on `out`; `terminal`: colours and notes are shown.
    pub(super) fn new(out: W, terminal: bool) -> Self {
        Self { out, terminal, dim: false, line_begun: false }
    }

    /// Writes a piece of the answer at once.
    pub(super) fn show(&mut self, delta: &Delta) -> io::Result<()> {
        match delta {
            Delta::Reasoning(_) if !self.terminal => Ok(()),
            Delta::Reasoning(text) => self.write(text, true),
            Delta::Text(text) => self.write(text, false),
        }
    }

    /// Ends the line and the colours.
    pub(super) fn end_answer(&mut self) -> io::Result<()> {
        self.set_dim(false)?;
        if std::mem::take(&mut self.line_begun) {
            writeln!(self.out)?;
        }
        self.out.flush()
    }

    /// Writes a note that is not part of an answer. Nothing when piped.
    pub(super) fn note(&mut self, text: &str) -> io::Result<()> {
        self.end_answer()?;
        if self.terminal {
            writeln!(self.out, "{DIM}{}{PLAIN}", harmless(text))?;
        }
        self.out.flush()
    }

    fn write(&mut self, text: &str, dim: bool) -> io::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        if self.dim && !dim && self.line_begun {
            writeln!(self.out)?;
        }
        self.set_dim(dim)?;
        let shown = if self.terminal { harmless(text) } else { Cow::Borrowed(text) };
        self.out.write_all(shown.as_bytes())?;
        self.line_begun = !text.ends_with('\n');
        self.out.flush()
    }

    fn set_dim(&mut self, dim: bool) -> io::Result<()> {
        if self.terminal && self.dim != dim {
            write!(self.out, "{}", if dim { DIM } else { PLAIN })?;
        }
        self.dim = dim;
        Ok(())
    }
}

/// `text` with control characters as their symbols; line ends and tabs stay.
fn harmless(text: &str) -> Cow<'_, str> {
    let controls = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(controls) {
        return Cow::Borrowed(text);
    }
    let symbol = |c: char| match c {
        // U+2400 onwards draws the C0 controls.
        '\0'..='\x1f' => char::from_u32(0x2400 + c as u32).unwrap_or('\u{fffd}'),
        _ => '\u{fffd}',
    };
    Cow::Owned(text.chars().map(|c| if controls(c) { symbol(c) } else { c }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(terminal: bool, deltas: &[Delta], want: &str) {
        let mut screen = Screen::new(Vec::new(), terminal);
        for delta in deltas {
            screen.show(delta).unwrap();
        }
        screen.end_answer().unwrap();
        assert_eq!(String::from_utf8(screen.out).unwrap(), want);
    }

    fn reasoning(text: &str) -> Delta {
        Delta::Reasoning(text.to_owned())
    }

    fn text(text: &str) -> Delta {
        Delta::Text(text.to_owned())
    }

    #[test]
    fn piped_output_is_the_answer_alone() {
        check(false, &[reasoning("hm"), text("a"), text("b")], "ab\n");
        check(false, &[text("a\n")], "a\n");
        check(false, &[], "");
    }

    #[test]
    fn reasoning_is_dim_and_on_lines_of_its_own() {
        check(true, &[reasoning("hm"), text("a")], "\x1b[2mhm\n\x1b[0ma\n");
        check(true, &[reasoning("hm")], "\x1b[2mhm\x1b[0m\n");
    }

    #[test]
    fn an_answer_cannot_steer_the_terminal() {
        check(true, &[text("a\x1b]0;title\x07b\u{9b}c\td")], "a␛]0;title␇b\u{fffd}c\td\n");
        check(false, &[text("\x1b[1m")], "\x1b[1m\n");
    }
}
