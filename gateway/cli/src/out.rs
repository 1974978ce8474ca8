//! Standard output whose reader may leave.
//!
//! `println!` of the standard library panics when its pipe is closed, as by `penstock check | head -1`. The macros here
//! replace it in this crate: on a closed pipe they end the program without a word, as other tools do. An output that
//! cannot be written (a full disk) is an error with a message. Text from elsewhere is printed without control characters ([`harmless`]).

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write};

/// Prints a line; see the module header.
macro_rules! println {
    () => { $crate::out::print(format_args!("\n")) };
    ($($arg:tt)*) => { $crate::out::print(format_args!("{}\n", format_args!($($arg)*))) };
}

/// Prints; see the module header.
macro_rules! print {
    ($($arg:tt)*) => { $crate::out::print(format_args!($($arg)*)) };
}

/// Exit status when the reader of the output has left: a shell reports the same for a program that SIGPIPE has ended.
const LEFT: i32 = 128 + 13;

/// Writes to the standard output, or ends the program.
pub(crate) fn print(text: Arguments<'_>) {
    let mut out = io::stdout().lock();
    if let Err(error) = out.write_fmt(text) {
        drop(out);
        std::process::exit(give_up(&error));
    }
}

/// Standard output for whoever writes piece by piece: a closed pipe ends the program, as it does for the macros.
pub(crate) struct Out;

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        or_leave(io::stdout().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        or_leave(io::stdout().flush())
    }
}

/// The result, or the end of the program where the reader has left.
fn or_leave<T>(done: io::Result<T>) -> io::Result<T> {
    match done {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(LEFT),
        done => done,
    }
}

/// `text` with control characters replaced, which could move the terminal's cursor.
pub(crate) fn harmless(text: &str) -> String {
    text.chars().map(|character| if character.is_control() { '\u{fffd}' } else { character }).collect()
}

/// Exit status after an error of the standard output; every error but a closed pipe is printed on standard error.
fn give_up(error: &io::Error) -> i32 {
    if error.kind() == ErrorKind::BrokenPipe {
        return LEFT;
    }
    eprintln!("penstock: standard output: {error}");
    1
}
