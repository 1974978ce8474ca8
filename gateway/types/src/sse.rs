//! Server-sent events, read in pieces cut anywhere (WHATWG HTML, section 9.2.6).
//!
//! Lines end in LF, CR or CR LF; comments and unknown fields are skipped; several `data` lines are joined by LF. Only
//! the incomplete event is buffered, and its size is bounded by [`EVENT_BYTES_MAX`].

use crate::room::{append, clear};

/// Longest event, in bytes. An event can carry an image in base64.
pub const EVENT_BYTES_MAX: usize = 32 << 20;

/// Error of an event larger than [`EVENT_BYTES_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a server-sent event is larger than {EVENT_BYTES_MAX} bytes")]
pub struct TooLarge;

/// Reader of one event stream.
#[derive(Debug, Default)]
pub struct SseReader {
    /// Bytes of the current line that came in earlier pieces.
    line: Vec<u8>,
    event: Vec<u8>,
    data: Vec<u8>,
    has_data: bool,
    /// True if the last piece ended in CR: an LF at the start of the next belongs to it.
    after_cr: bool,
    /// True if the stream has begun, so that a byte order mark is no longer possible.
    begun: bool,
}

impl SseReader {
    /// Takes the next bytes and calls `each` with name (empty where none is given) and data of every event that they
    /// complete. An error of `each` stops the reading.
    ///
    /// # Errors
    /// [`TooLarge`], or the error that `each` returned.
    pub fn push<E: From<TooLarge>>(
        &mut self,
        mut bytes: &[u8],
        mut each: impl FnMut(&[u8], &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        while !bytes.is_empty() {
            if std::mem::take(&mut self.after_cr) && bytes[0] == b'\n' {
                bytes = &bytes[1..];
                continue;
            }
            let Some(end) = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r')) else {
                self.hold(bytes)?;
                return Ok(());
            };
            let (piece, rest) = (&bytes[..end], &bytes[end + 1..]);
            self.after_cr = bytes[end] == b'\r';
            bytes = rest;
            if self.line.is_empty() {
                self.line(piece, &mut each)?;
            } else {
                self.hold(piece)?;
                let line = std::mem::take(&mut self.line);
                let Some(mut line) = self.whole_event(line) else { continue };
                self.line(&line, &mut each)?;
                // The buffer keeps its capacity for the next line that is cut.
                clear(&mut line);
                self.line = line;
            }
        }
        Ok(())
    }

    /// Returns true if an event has begun and not ended.
    pub fn is_inside(&self) -> bool {
        self.has_data || !self.line.is_empty()
    }

    /// Bytes buffered of an incomplete event.
    pub fn held(&self) -> usize {
        self.line.len() + self.data.len()
    }

    /// Turns a large line that is the first data of its event into the event's data without a second copy; else
    /// returns the line.
    fn whole_event(&mut self, mut line: Vec<u8>) -> Option<Vec<u8>> {
        const LARGE_BYTES: usize = 64 << 10;
        if !self.begun || self.has_data || line.len() < LARGE_BYTES || !line.starts_with(b"data:") {
            return Some(line);
        }
        line.drain(..if line.starts_with(b"data: ") { 6 } else { 5 });
        (self.data, self.has_data) = (line, true);
        None
    }

    fn hold(&mut self, bytes: &[u8]) -> Result<(), TooLarge> {
        if self.line.len() + self.data.len() + bytes.len() > EVENT_BYTES_MAX {
            return Err(TooLarge);
        }
        append(&mut self.line, bytes);
        Ok(())
    }

    fn line<E: From<TooLarge>>(
        &mut self,
        line: &[u8],
        each: &mut impl FnMut(&[u8], &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let line = match std::mem::replace(&mut self.begun, true) {
            false => line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line),
            true => line,
        };
        if line.is_empty() {
            let done = if std::mem::take(&mut self.has_data) { each(&self.event, &self.data) } else { Ok(()) };
            self.event.clear();
            clear(&mut self.data);
            return done;
        }
        let (name, value) = match line.iter().position(|byte| *byte == b':') {
            Some(0) => return Ok(()),
            Some(colon) => (&line[..colon], line[colon + 1..].strip_prefix(b" ").unwrap_or(&line[colon + 1..])),
            None => (line, &[][..]),
        };
        match name {
            b"event" => {
                self.event.clear();
                self.event.extend_from_slice(value);
            }
            b"data" => {
                if self.data.len() + value.len() >= EVENT_BYTES_MAX {
                    return Err(TooLarge.into());
                }
                if std::mem::replace(&mut self.has_data, true) {
                    self.data.push(b'\n');
                }
                append(&mut self.data, value);
            }
            _ => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pieces: &[&[u8]]) -> Vec<(String, String)> {
        let mut reader = SseReader::default();
        let mut all = Vec::new();
        for piece in pieces {
            let each = |name: &[u8], data: &[u8]| {
                all.push((String::from_utf8_lossy(name).into_owned(), String::from_utf8_lossy(data).into_owned()));
                Ok::<(), TooLarge>(())
            };
            reader.push(piece, each).expect("small");
        }
        all
    }

    #[test]
    fn events_are_the_same_however_they_are_cut() {
        let text = b"\xef\xbb\xbf: hello\nevent: a\r\ndata: 1\r\ndata:  2\r\rdata\n\nid: 7\n\nevent: lost\n\ndata: {\"x\":\"\xc3\xa4\"}\n\ndata: open";
        let expected =
            [("a", "1\n 2"), ("", ""), ("", "{\"x\":\"\u{e4}\"}")].map(|(a, b)| (a.to_owned(), b.to_owned()));
        assert_eq!(read(&[text]), expected);
        for cut in 0..text.len() {
            for second in cut..text.len() {
                assert_eq!(read(&[&text[..cut], &text[cut..second], &text[second..]]), expected, "{cut} {second}");
            }
        }
    }

    #[test]
    fn a_large_event_is_the_same_and_leaves_nothing() {
        let text = "x".repeat(300_000);
        let stream = format!("\u{feff}data: {text}\ndata: y\n\ndata:{text}\n\ndata: z\ndata: {text}\n\n");
        let expected = [format!("{text}\ny"), text.clone(), format!("z\n{text}")];
        for size in [1 << 20, 70_000, 4096] {
            let (mut reader, mut all, mut most) = (SseReader::default(), Vec::new(), 0);
            for piece in stream.as_bytes().chunks(size) {
                let each = |_: &[u8], data: &[u8]| {
                    all.push(String::from_utf8_lossy(data).into_owned());
                    Ok::<(), TooLarge>(())
                };
                reader.push(piece, each).expect("small enough");
                most = most.max(reader.held());
            }
            assert!(all == expected, "pieces of {size}");
            assert_eq!(reader.held(), 0);
            assert!(reader.data.capacity() + reader.line.capacity() <= 128 << 10, "what was large is given back");
            assert!(most <= 400_000, "{most} held in pieces of {size}");
        }
    }

    #[test]
    fn an_endless_event_is_refused() {
        let mut reader = SseReader::default();
        let piece = vec![b'x'; 1 << 20];
        let each = |_: &[u8], _: &[u8]| Ok::<(), TooLarge>(());
        let refused = (0..64).find_map(|_| reader.push(&piece, each).err());
        assert_eq!(refused, Some(TooLarge));
        let mut reader = SseReader::default();
        let mut line = b"data: ".to_vec();
        line.resize(1 << 20, b'x');
        line.push(b'\n');
        assert_eq!((0..64).find_map(|_| reader.push(&line, each).err()), Some(TooLarge));
    }
}
