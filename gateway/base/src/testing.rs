//! Means for tests of other crates.

use std::io;
use std::sync::{Arc, Mutex};

/// Log of a test, as bytes.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no panic").extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Lines that this thread logs while `run` runs, with level, target and fields.
///
/// # Panics
/// `run` panics.
pub fn logged(run: impl FnOnce()) -> String {
    let lines = Lines::default();
    let to = lines.clone();
    let log = tracing_subscriber::fmt().with_ansi(false).with_writer(move || to.clone()).finish();
    tracing::subscriber::with_default(log, run);
    let bytes = lines.0.lock().expect("no panic").clone();
    String::from_utf8_lossy(&bytes).into_owned()
}
