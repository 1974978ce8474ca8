//! The input file of a batch: one request per line.
//!
//! A file with a line that is no request of the batch's endpoint is refused whole, with every fault that was found and
//! its line. Faults inside a request's body are found when the line runs, and are that line's own error.

use std::collections::HashSet;

use bytes::{Bytes, BytesMut};
use penstock_store::{BatchRecord, NewLine, Store, StoreError, Tenant};

use crate::batch_text::{BatchFault, fault, request};

/// Bytes of the input file read from the store per call.
const READ_BYTES: u64 = 1 << 20;
/// Lines of a batch given to the store per call.
const ADMIT_LINES: usize = 1000;
/// Most faults that are reported; a file with more is the wrong file.
const FAULTS_MAX: usize = 100;

/// Bounds that every file of batch requests is checked against.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Most requests (lines) in one file.
    pub(crate) lines: u32,
    /// Largest single request of the file, in bytes.
    pub(crate) line_bytes: usize,
}

/// Splitter of a file's bytes into lines, fed piece by piece.
#[derive(Default)]
struct Scanner {
    buffer: BytesMut,
    /// Offset of the buffer's beginning in the file.
    at: u64,
    /// Bytes at the buffer's beginning that hold no line end.
    seen: usize,
}

impl Scanner {
    fn feed(&mut self, piece: &[u8]) {
        self.buffer.extend_from_slice(piece);
    }

    /// Bytes of the line that has not ended.
    fn waiting(&self) -> usize {
        self.buffer.len()
    }

    /// Next whole line, with its offset in the file; `last`: the rest of the buffer is a line.
    fn next(&mut self, last: bool) -> Option<(u64, Bytes)> {
        let found = self.buffer[self.seen..].iter().position(|byte| *byte == b'\n');
        let (text, end) = match found {
            Some(end) => (self.seen + end, 1),
            None if last && !self.buffer.is_empty() => (self.buffer.len(), 0),
            None => {
                self.seen = self.buffer.len();
                return None;
            }
        };
        let place = self.at;
        let mut line = self.buffer.split_to(text + end);
        line.truncate(text);
        (self.at, self.seen) = (place + (text + end) as u64, 0);
        Some((place, line.freeze()))
    }
}

/// Checks the whole file and gives the store its lines. A returned fault means that the file cannot be used.
pub(super) async fn admit(
    store: &dyn Store,
    tenant: &Tenant,
    batch: &BatchRecord,
    limits: Limits,
) -> Result<Vec<BatchFault<'static>>, StoreError> {
    let mut check = Check {
        endpoint: &batch.endpoint,
        limits,
        line: 0,
        ids: HashSet::new(),
        lines: Vec::new(),
        faults: Vec::new(),
    };
    let (mut scanner, mut at) = (Scanner::default(), 0);
    loop {
        let Some(piece) = store.read(tenant, &batch.input, at..at + READ_BYTES).await? else {
            return Ok(vec![fault("file_not_found", Some("input_file_id"), "The input file was deleted.")]);
        };
        let last = (piece.len() as u64) < READ_BYTES;
        at += piece.len() as u64;
        scanner.feed(&piece);
        while let Some((place, text)) = scanner.next(last) {
            check.line(place, &text);
        }
        if scanner.waiting() > limits.line_bytes {
            check.too_long();
        }
        if check.faults.is_empty() && check.lines.len() >= ADMIT_LINES {
            store.admit_lines(&batch.id, std::mem::take(&mut check.lines)).await?;
        }
        if last || check.is_hopeless() {
            break;
        }
    }
    if check.faults.is_empty() && check.ids.is_empty() {
        check.faults.push(fault("empty_file", None, "The file has no requests."));
    }
    if check.faults.is_empty() {
        for lines in check.lines.chunks(ADMIT_LINES) {
            store.admit_lines(&batch.id, lines.to_vec()).await?;
        }
    }
    Ok(check.faults)
}

/// State of the check of one input file: line number, ids seen, accepted lines and faults.
struct Check<'a> {
    endpoint: &'a str,
    limits: Limits,
    /// Number of the current line, from 1, empty lines included.
    line: u32,
    ids: HashSet<String>,
    lines: Vec<NewLine>,
    faults: Vec<BatchFault<'static>>,
}

impl Check<'_> {
    fn is_hopeless(&self) -> bool {
        self.faults.len() >= FAULTS_MAX || self.ids.len() > self.limits.lines as usize
    }

    fn fault(&mut self, fault: BatchFault<'static>) {
        if self.faults.len() < FAULTS_MAX {
            self.faults.push(BatchFault { line: Some(self.line), ..fault });
        }
    }

    fn too_long(&mut self) {
        self.line += 1;
        let message = format!("A line may have {} bytes.", self.limits.line_bytes);
        self.fault(fault("line_too_long", None, message));
        // The rest of it would only be more faults.
        self.limits.lines = 0;
        self.ids.insert(String::new());
    }

    fn line(&mut self, at: u64, text: &Bytes) {
        self.line += 1;
        if text.trim_ascii().is_empty() || self.is_hopeless() {
            return;
        }
        if text.len() > self.limits.line_bytes {
            let message = format!("A line may have {} bytes.", self.limits.line_bytes);
            return self.fault(fault("line_too_long", None, message));
        }
        match request(text, self.endpoint) {
            Ok(request) if self.ids.contains(&request.custom_id) => {
                let message = "This custom_id is used by an earlier line.";
                self.fault(fault("duplicate_custom_id", Some("custom_id"), message));
            }
            Ok(request) => {
                self.ids.insert(request.custom_id.clone());
                if self.ids.len() > self.limits.lines as usize {
                    let message = format!("A batch may have {} requests.", self.limits.lines);
                    return self.fault(fault("too_many_requests", None, message));
                }
                let line = self.line - 1;
                self.lines.push(NewLine { line, custom_id: request.custom_id, at, bytes: text.len() as u32 });
            }
            Err(fault) => self.fault(fault),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_wherever_the_file_is_cut() {
        let file = b"one\ntwo\r\n\nthree";
        for cut in 0..=file.len() {
            let (mut scanner, mut found) = (Scanner::default(), Vec::new());
            for (piece, last) in [(&file[..cut], false), (&file[cut..], true)] {
                scanner.feed(piece);
                while let Some((at, line)) = scanner.next(last) {
                    assert_eq!(&file[at as usize..at as usize + line.len()], &line[..]);
                    found.push(line);
                }
            }
            assert_eq!(found, [&b"one"[..], b"two\r", b"", b"three"], "cut at {cut}");
        }
    }
}
