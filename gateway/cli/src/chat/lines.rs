//! Prompts typed at a terminal: edited, of several lines, and kept in a history, by rustyline.
//!
//! rustyline blocks, so it runs on a thread of its own, and only while a prompt is asked for: while an answer comes,
//! the terminal is in its ordinary mode, where Ctrl-C is a signal.

use std::fs::{self, DirBuilder};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use rustyline::error::ReadlineError;
use rustyline::history::DefaultHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Behavior, Cmd, Config, Editor, KeyCode, KeyEvent, Modifiers};
use tokio::signal::unix::Signal;
use tokio::sync::mpsc;

/// Most prompts in the history.
const PROMPTS_MAX: usize = 1000;
/// Longest prompt that goes into the history; a longer one is mostly a pasted file.
const PROMPT_BYTES_MAX: usize = 16 << 10;
/// Largest history file: a larger one was not written by this program.
const FILE_BYTES_MAX: u64 = 2 * (PROMPTS_MAX * PROMPT_BYTES_MAX) as u64;

/// Ends the bracketed paste that rustyline asks the terminal for.
const PASTED_PLAIN: &str = "\x1b[?2004l\r\n";

/// Fence around a prompt of several lines.
const FENCE: &str = "\"\"\"";

/// Outcome of asking for a prompt.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Said {
    Line(String),
    /// Ctrl-C.
    Interrupted,
    /// Ctrl-D on an empty line, or the terminal is gone.
    End,
}

/// Path of the history; `None` where there is no home.
pub(super) fn history_path() -> Option<PathBuf> {
    penstock_config::default_state_dir().ok().map(|dir| dir.join("chat_history"))
}

/// Source of the terminal's prompts.
pub(super) struct Lines {
    ask: mpsc::Sender<()>,
    received: mpsc::Receiver<anyhow::Result<Reply>>,
    /// True while a prompt is asked for and has not come yet.
    is_asked: bool,
    trouble: Option<String>,
    /// Modes of the terminal before anything was read.
    modes: Option<Termios>,
}

impl Drop for Lines {
    /// Restores the terminal where the program ends, by a signal, while a prompt is edited.
    fn drop(&mut self) {
        if let Some(modes) = self.modes.take().filter(|_| self.is_asked) {
            // A terminal that is gone needs no modes.
            let _gone = tcsetattr(std::io::stdin(), OptionalActions::Now, &modes);
            let _gone = std::io::stdout().write_all(PASTED_PLAIN.as_bytes());
        }
    }
}

struct Reply {
    said: Said,
    trouble: Option<String>,
}

impl Lines {
    /// Starts the thread that reads. `history` is the file of earlier prompts.
    pub(super) fn start(history: Option<PathBuf>) -> Self {
        let (ask, asked) = mpsc::channel(1);
        let (send, received) = mpsc::channel(1);
        std::thread::spawn(move || read(history, asked, &send));
        Self { ask, received, is_asked: false, trouble: None, modes: tcgetattr(std::io::stdin()).ok() }
    }

    /// Next prompt.
    ///
    /// Errors: the terminal cannot be read.
    pub(super) async fn next(&mut self, interrupts: &mut Signal) -> anyhow::Result<Said> {
        if !self.is_asked && self.ask.send(()).await.is_err() {
            return Ok(Said::End);
        }
        self.is_asked = true;
        // While rustyline edits, Ctrl-C is a key; it is a signal just before and after, and where rustyline cannot edit.
        let reply = tokio::select! {
            reply = self.received.recv() => reply,
            _ = interrupts.recv() => return Ok(Said::Interrupted),
        };
        self.is_asked = false;
        let Some(reply) = reply.transpose()? else { return Ok(Said::End) };
        self.trouble = self.trouble.take().or(reply.trouble);
        Ok(reply.said)
    }

    /// Reason why prompts are not kept; returned once.
    pub(super) fn trouble(&mut self) -> Option<String> {
        self.trouble.take()
    }
}

/// Body of the thread: reads a prompt whenever one is asked for.
fn read(history: Option<PathBuf>, mut asked: mpsc::Receiver<()>, send: &mpsc::Sender<anyhow::Result<Reply>>) {
    let mut memory = match Memory::open(history) {
        Ok(memory) => memory,
        Err(error) => {
            // The other side may have left.
            let _left = send.blocking_send(Err(error));
            return;
        }
    };
    while asked.blocking_recv().is_some() {
        let reply = match memory.editor.readline("> ") {
            Ok(line) => {
                memory.remember(&line);
                Ok(Said::Line(unfenced(&line).to_owned()))
            }
            Err(ReadlineError::Interrupted) => Ok(Said::Interrupted),
            Err(ReadlineError::Eof) => Ok(Said::End),
            Err(error) => Err(anyhow!(error).context("cannot read the terminal")),
        };
        let reply = reply.map(|said| Reply { said, trouble: memory.trouble.take() });
        if send.blocking_send(reply).is_err() {
            return;
        }
    }
}

/// Editor, and the file of earlier prompts.
struct Memory {
    editor: Editor<Fences, DefaultHistory>,
    /// File of earlier prompts; without one nothing is kept.
    path: Option<PathBuf>,
    trouble: Option<String>,
}

impl Memory {
    fn open(path: Option<PathBuf>) -> anyhow::Result<Self> {
        let config = Config::builder()
            .max_history_size(PROMPTS_MAX)
            .and_then(|config| config.history_ignore_dups(true))
            .context("the line editor cannot be set up")?
            .history_ignore_space(true)
            // The answer may go elsewhere: `penstock chat > answers.txt`.
            .behavior(Behavior::PreferTerm)
            .build();
        let mut editor = Editor::with_config(config).context("the terminal cannot be used")?;
        editor.set_helper(Some(Fences));
        editor.bind_sequence(KeyEvent(KeyCode::Enter, Modifiers::ALT), Cmd::Newline);
        let mut memory = Self { editor, path, trouble: None };
        if let Some(path) = memory.path.clone()
            && let Err(error) = memory.load(&path)
        {
            memory.forget(&path, &error);
        }
        Ok(memory)
    }

    /// Makes the folder, and loads the earlier prompts.
    fn load(&mut self, path: &Path) -> anyhow::Result<()> {
        let folder = path.parent().context("the path has no folder")?;
        if !folder.is_dir() {
            DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        }
        let Ok(facts) = fs::metadata(path) else { return Ok(()) };
        anyhow::ensure!(facts.is_file() && facts.len() <= FILE_BYTES_MAX, "the file is not a history of prompts");
        // The file may be from elsewhere, or have been made readable.
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        Ok(self.editor.load_history(path)?)
    }

    /// Writes a prompt to the file at once, so that a killed program keeps it too.
    fn remember(&mut self, line: &str) {
        if line.trim().is_empty() || line.len() > PROMPT_BYTES_MAX {
            return;
        }
        let kept = self.editor.add_history_entry(line);
        let Some(path) = self.path.clone() else { return };
        // rustyline makes the file with mode 0600, and locks it: several conversations may go on at once.
        let done = kept.and_then(|is_new| if is_new { self.editor.append_history(&path) } else { Ok(()) });
        if let Err(error) = done {
            self.forget(&path, &error.into());
        }
    }

    /// Goes on without the file.
    fn forget(&mut self, path: &Path, error: &anyhow::Error) {
        self.trouble = Some(format!("prompts are not kept in {}: {error:#}", path.display()));
        self.path = None;
    }
}

/// Validator that knows when a prompt of several lines is complete.
struct Fences;

impl rustyline::Helper for Fences {}

impl rustyline::completion::Completer for Fences {
    type Candidate = String;
}

impl rustyline::highlight::Highlighter for Fences {}

impl rustyline::hint::Hinter for Fences {
    type Hint = String;
}

impl Validator for Fences {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(if is_open(context.input()) { ValidationResult::Incomplete } else { ValidationResult::Valid(None) })
    }
}

/// Whether a fence was opened and not closed.
fn is_open(text: &str) -> bool {
    text.trim_start().strip_prefix(FENCE).is_some_and(|rest| !rest.trim_end().ends_with(FENCE))
}

/// Prompt without the fence around it.
fn unfenced(text: &str) -> &str {
    let inner = text.trim().strip_prefix(FENCE).and_then(|rest| rest.strip_suffix(FENCE));
    inner.map_or(text, |inner| inner.trim_matches('\n'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fence_holds_several_lines() {
        for (text, open, meant) in [
            ("Hi", false, "Hi"),
            ("Hi \\", false, "Hi \\"),
            ("\"\"\"", true, "\"\"\""),
            ("\"\"\"a\n", true, "\"\"\"a\n"),
            ("\"\"\"\na\n b\n\"\"\"", false, "a\n b"),
            (" \"\"\"a\"\"\" ", false, "a"),
            ("\"\"\"\"\"\"", false, ""),
            ("a \"\"\"", false, "a \"\"\""),
            ("a\nb", false, "a\nb"),
        ] {
            assert_eq!((is_open(text), unfenced(text)), (open, meant), "{text:?}");
        }
    }

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("penstock-chat-{name}-{}", std::process::id()));
        let _absent = fs::remove_dir_all(&folder);
        folder
    }

    fn kept(memory: &Memory) -> Vec<String> {
        memory.editor.history().iter().cloned().collect()
    }

    #[test]
    fn prompts_are_remembered_for_their_owner_alone_and_bounded() {
        let folder = folder("bounded");
        let path = folder.join("state/penstock/chat_history");
        let mut memory = Memory::open(Some(path.clone())).unwrap();
        for prompt in ["one", "two\nlines", "two\nlines", " a secret", "", &"x".repeat(PROMPT_BYTES_MAX + 1)] {
            memory.remember(prompt);
        }
        assert_eq!(memory.trouble, None);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().permissions().mode() & 0o777, 0o700);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let mut next = Memory::open(Some(path.clone())).unwrap();
        assert_eq!(kept(&next), ["one", "two\nlines"]);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600, "and so it stays");
        for number in 0..PROMPTS_MAX + 50 {
            next.remember(&format!("prompt {number}"));
        }
        // Another conversation, that goes on meanwhile, adds to what this one wrote.
        memory.remember("three");
        let last = Memory::open(Some(path)).unwrap();
        assert_eq!(kept(&last).len(), PROMPTS_MAX);
        assert_eq!(kept(&last).last().map(String::as_str), Some("three"));
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_conversation_goes_on_where_nothing_can_be_kept() {
        let folder = folder("unkept");
        fs::create_dir_all(&folder).unwrap();
        let file = folder.join("file");
        fs::write(&file, "not a folder").unwrap();
        let mut memory = Memory::open(Some(file.join("chat_history"))).unwrap();
        let said = memory.trouble.take().expect("it is said");
        assert!(said.contains("prompts are not kept in") && said.contains("chat_history: "), "{said}");
        memory.remember("one");
        assert_eq!((kept(&memory), memory.trouble), (vec!["one".to_owned()], None));
        fs::remove_dir_all(&folder).unwrap();
    }
}
