//! Standard output whose reader may leave.
//!
//! `println!` of the standard library panics when its pipe is closed, as by `penstock check | head -1`. The macros here, which take its
//! place in this crate, end the program without a word then, as other tools do; an output that cannot be written (a full disk) is an
//! error with a message.

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

/// Exit status when the reader of the output has left: what a shell reports for a program that SIGPIPE has ended.
const LEFT: i32 = 128 + 13;

/// Writes to the standard output, or ends the program.
pub(crate) fn print(text: Arguments<'_>) {
    let mut out = io::stdout().lock();
    if let Err(error) = out.write_fmt(text) {
        drop(out);
        std::process::exit(give_up(&error));
    }
}

/// The exit status after an error of the standard output, which is said where somebody may read it.
fn give_up(error: &io::Error) -> i32 {
    if error.kind() == ErrorKind::BrokenPipe {
        return LEFT;
    }
    eprintln!("penstock: standard output: {error}");
    1
}
