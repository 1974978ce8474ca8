//! Server-sent events, bytes in and `data` payloads out.
//!
//! Only the parts of the format that an answer stream uses: `data` fields, joined by line ends when there are several;
//! comments and other fields are skipped (WHATWG HTML, section 9.2.6).

/// Longest line of an answer stream: one event holds a few tokens.
const LINE_BYTES_MAX: usize = 4 << 20;

/// Error of a line that is too long to be an event.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooLong;

/// Decoder that collects bytes until events are complete.
#[derive(Debug, Default)]
pub(super) struct Events {
    line: Vec<u8>,
    data: Option<String>,
    after_return: bool,
}

impl Events {
    /// Takes `bytes`, which may end anywhere, and appends the payloads of the events they complete to `out`.
    pub(super) fn push(&mut self, bytes: &[u8], out: &mut Vec<String>) -> Result<(), TooLong> {
        for &byte in bytes {
            let after_return = std::mem::replace(&mut self.after_return, byte == b'\r');
            match byte {
                b'\n' if after_return => {}
                b'\n' | b'\r' => self.end_line(out),
                _ if self.line.len() == LINE_BYTES_MAX => return Err(TooLong),
                _ => self.line.push(byte),
            }
        }
        Ok(())
    }

    fn end_line(&mut self, out: &mut Vec<String>) {
        let line = String::from_utf8_lossy(&self.line);
        if line.is_empty() {
            out.extend(self.data.take());
        } else if let Some(value) = line.strip_prefix("data:") {
            let value = value.strip_prefix(' ').unwrap_or(value);
            match &mut self.data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(value);
                }
                None => self.data = Some(value.to_owned()),
            }
        }
        self.line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks a stream whole, and cut in two at every byte.
    #[track_caller]
    fn check(stream: &str, want: &[&str]) {
        for cut in 0..=stream.len() {
            let (mut events, mut out) = (Events::default(), Vec::new());
            let (head, tail) = stream.as_bytes().split_at(cut);
            events.push(head, &mut out).unwrap();
            events.push(tail, &mut out).unwrap();
            assert_eq!(out, want, "cut at {cut}");
        }
    }

    #[test]
    fn payloads_come_out_wherever_the_bytes_are_cut() {
        check("data: a\n\ndata: b\n\n", &["a", "b"]);
        check("data:a\r\n\r\ndata:  é\r\n\r\n", &["a", " é"]);
        check("data: a\rdata: b\r\r", &["a\nb"]);
        check(": comment\n\nevent: x\nid: 7\ndata: a\ndata: b\n\n", &["a\nb"]);
        check("data\n\ndata: unfinished\n", &[]);
    }

    #[test]
    fn endless_lines_are_refused() {
        let mut events = Events::default();
        let line = vec![b'x'; LINE_BYTES_MAX + 1];
        assert_eq!(events.push(&line, &mut Vec::new()), Err(TooLong));
    }
}
