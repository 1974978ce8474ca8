//! Inspection of an answer that is forwarded unchanged: ends of events, first content, completeness, cost, errors.
//!
//! A stream is forwarded in whole events, so that the gateway can put a comment, or an error event, between two of
//! them. Once content has been seen, an event costs the search for its end and for a few names; only events with
//! usage, a finish reason or an error are parsed. The buffer holds only the incomplete event.

use bytes::Bytes;
use memchr::memchr2;

use crate::seen::Keep;
pub use crate::seen::Seen;
use crate::{anthropic, gemini, openai};
use penstock_types::codec::{FaultClass, ProviderFault, Surface};
use penstock_types::room::make_room;
use penstock_types::sse::EVENT_BYTES_MAX;

/// Least capacity of the buffer handed out for the next bytes.
const PIECE_BYTES: usize = 128 << 10;

/// Mark that an event stream may begin with (HTML, 9.2.5).
const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// Inspector of one streamed answer.
#[derive(Debug)]
pub struct Watch {
    surface: Surface,
    drop_usage: bool,
    seen: Seen,
    /// Bytes of the stream that have not been forwarded.
    held: Vec<u8>,
    /// Offset up to which line ends have been searched.
    scanned: usize,
    /// Start of the current line in `held`.
    line: usize,
    /// Start of the current event in `held`.
    event: usize,
    /// Data of the current event, in one or several `data` lines.
    data: Data,
    /// True if the last byte searched was CR: an LF behind it belongs to it.
    after_cr: bool,
    /// True if the first line has been looked at, so that a byte order mark is no longer possible.
    begun: bool,
    fault: Option<ProviderFault>,
}

#[derive(Clone, Debug, Default)]
enum Data {
    #[default]
    None,
    One(usize, usize),
    /// Range from the first to the last data line; the lines are joined when the event ends.
    Several(usize, usize),
}

impl Watch {
    /// Creates the inspector for an answer on `surface`. With `drop_usage`, the event that carries only counts is
    /// withheld from the client, which did not ask for it.
    pub fn new(surface: Surface, drop_usage: bool) -> Self {
        Self {
            surface,
            drop_usage,
            seen: Seen::default(),
            held: Vec::new(),
            scanned: 0,
            line: 0,
            event: 0,
            data: Data::None,
            after_cr: false,
            begun: false,
            fault: None,
        }
    }

    /// Facts gathered from the answer so far: usage, finish reason, content.
    pub fn seen(&self) -> &Seen {
        &self.seen
    }

    /// Buffer to which the next bytes are appended; [`Watch::take`] must follow.
    pub fn buffer(&mut self) -> &mut Vec<u8> {
        if self.held.len() > PIECE_BYTES {
            make_room(&mut self.held, PIECE_BYTES);
        }
        &mut self.held
    }

    /// Bytes buffered of the incomplete event.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Takes the complete events, unchanged.
    ///
    /// # Errors
    /// The provider's own error event, or bytes that are no event of its API; the events before it are handed out
    /// first.
    pub fn take(&mut self) -> Result<Option<Bytes>, ProviderFault> {
        if let Some(fault) = &self.fault {
            return Err(fault.clone());
        }
        let mut dropped = Vec::new();
        while let Some(end) = self.next_event(&mut dropped) {
            self.event = end;
        }
        if self.fault.is_none() && self.held.len() - self.event > EVENT_BYTES_MAX {
            let message = format!("an event of the answer is larger than {EVENT_BYTES_MAX} bytes");
            self.fault = Some(ProviderFault::new(FaultClass::AnswerTooLarge, message));
        }
        match (self.split(&dropped), &self.fault) {
            (None, Some(fault)) => Err(fault.clone()),
            (out, _) => Ok(out),
        }
    }

    /// Handles the end of the body: returns the rest, which counts as an event though no empty line ends it.
    ///
    /// # Errors
    /// As [`Watch::take`]; also if the answer is not complete.
    pub fn end(&mut self) -> Result<Option<Bytes>, ProviderFault> {
        if self.fault.is_none() && self.event < self.held.len() {
            self.skip_mark();
            if self.line < self.held.len() {
                self.end_line(self.held.len());
            }
            let mut dropped = Vec::new();
            self.end_event(self.held.len(), &mut dropped);
            (self.event, self.scanned, self.line) = (self.held.len(), self.held.len(), self.held.len());
            if dropped.is_empty() && self.fault.is_none() && self.is_complete() {
                return Ok(self.split(&[]));
            }
        }
        if let Some(fault) = &self.fault {
            return Err(fault.clone());
        }
        if !self.is_complete() {
            let message = "The answer ended before it was complete.";
            self.fault = Some(ProviderFault::new(FaultClass::Truncated, message));
            return Err(ProviderFault::new(FaultClass::Truncated, message));
        }
        Ok(None)
    }

    /// Returns true if the answer is complete if its body ends now.
    fn is_complete(&self) -> bool {
        // Gemini's streams have no end event of their own.
        self.seen.complete || (self.surface == Surface::Generate && self.seen.finish.is_some())
    }

    /// Scans to the end of the next event and returns its offset.
    fn next_event(&mut self, dropped: &mut Vec<(usize, usize)>) -> Option<usize> {
        loop {
            if self.fault.is_some() {
                return None;
            }
            if self.after_cr {
                if *self.held.get(self.scanned)? == b'\n' {
                    (self.scanned, self.line) = (self.scanned + 1, self.line + 1);
                }
                self.after_cr = false;
            }
            let Some(found) = memchr2(b'\n', b'\r', &self.held[self.scanned..]) else {
                self.scanned = self.held.len();
                return None;
            };
            let end = self.scanned + found;
            let mut next = end + 1;
            if self.held[end] == b'\r' {
                match self.held.get(next) {
                    Some(b'\n') => next += 1,
                    Some(_) => {}
                    None => self.after_cr = true,
                }
            }
            self.skip_mark();
            let empty = end == self.line;
            if !empty {
                self.end_line(end);
            }
            (self.scanned, self.line) = (next, next);
            if empty {
                self.end_event(next, dropped);
                return self.fault.is_none().then_some(next);
            }
        }
    }

    /// Skips the byte order mark that the stream's first line may begin with; it is forwarded with its event.
    fn skip_mark(&mut self) {
        if !std::mem::replace(&mut self.begun, true) && self.held[self.line..].starts_with(BYTE_ORDER_MARK) {
            self.line += BYTE_ORDER_MARK.len();
        }
    }

    /// Records the data of the line that ends at `end`.
    fn end_line(&mut self, end: usize) {
        let line = &self.held[self.line..end];
        let Some(value) = line.strip_prefix(b"data:") else { return };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        let from = end - value.len();
        self.data = match std::mem::take(&mut self.data) {
            Data::None => Data::One(from, end),
            // The range begins with the name of the first line.
            Data::One(first, _) => Data::Several(first - self.name_before(first), end),
            Data::Several(first, _) => Data::Several(first, end),
        };
    }

    /// Length of `data:` and its space in front of a value.
    fn name_before(&self, value: usize) -> usize {
        if self.held[..value].ends_with(b"data: ") { 6 } else { 5 }
    }

    /// Inspects the event that ends at `end`.
    fn end_event(&mut self, end: usize, dropped: &mut Vec<(usize, usize)>) {
        let data = std::mem::take(&mut self.data);
        let joined;
        let bytes = match data {
            Data::None => {
                // Google's SDKs take a comment for a broken chunk; empty lines they skip.
                let lines = &self.held[self.event..end];
                let lines = lines.strip_prefix(BYTE_ORDER_MARK).unwrap_or(lines);
                if self.surface == Surface::Generate && lines.iter().any(|byte| !matches!(byte, b'\n' | b'\r')) {
                    dropped.push((self.event, end));
                }
                return;
            }
            Data::One(from, to) => &self.held[from..to],
            Data::Several(from, to) => {
                joined = join(&self.held[from..to]);
                &joined
            }
        };
        match event(self.surface, bytes, &mut self.seen) {
            Ok(Keep::OnlyUsage) if self.drop_usage => dropped.push((self.event, end)),
            Ok(_) => {}
            Err(fault) => self.fault = Some(fault),
        }
    }

    /// Splits the complete events off the buffer.
    fn split(&mut self, dropped: &[(usize, usize)]) -> Option<Bytes> {
        let end = std::mem::take(&mut self.event);
        if end == 0 {
            return None;
        }
        let rest = if end == self.held.len() { Vec::new() } else { self.held[end..].to_vec() };
        let mut out = std::mem::replace(&mut self.held, rest);
        out.truncate(end);
        self.scanned -= end;
        self.line -= end;
        if let Data::One(from, to) | Data::Several(from, to) = &mut self.data {
            (*from, *to) = (*from - end, *to - end);
        }
        for (from, to) in dropped.iter().rev() {
            out.drain(from..to);
        }
        (!out.is_empty()).then(|| out.into())
    }
}

/// Joins the values of several `data` lines, between which other lines may stand.
fn join(lines: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(lines.len());
    let values = lines.split(|byte| matches!(byte, b'\n' | b'\r')).filter_map(|line| line.strip_prefix(b"data:"));
    for (nth, value) in values.enumerate() {
        if nth > 0 {
            out.push(b'\n');
        }
        out.extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
    }
    out
}

fn event(surface: Surface, data: &[u8], seen: &mut Seen) -> Result<Keep, ProviderFault> {
    match surface.dialect() {
        penstock_types::Dialect::OpenAi => openai::watch::event(surface, data, seen),
        penstock_types::Dialect::Anthropic => anthropic::watch::event(data, seen),
        penstock_types::Dialect::Gemini => gemini::watch::event(data, seen),
        penstock_types::Dialect::Ollama => Err(unspoken()),
    }
}

/// Fault of an answer in an API that no provider is asked in.
fn unspoken() -> ProviderFault {
    ProviderFault::new(FaultClass::Garbled, "No provider is asked in this API.")
}

/// Inspects a whole answer: whether it is one, and its usage. A response that has not ended is not complete.
///
/// # Errors
/// The body is an error under a 2xx status, or is not JSON.
pub fn whole(surface: Surface, body: &[u8]) -> Result<Seen, ProviderFault> {
    let mut seen = Seen { content: true, complete: true, pieces: 1, ..Seen::default() };
    match surface.dialect() {
        penstock_types::Dialect::OpenAi => openai::watch::whole(surface, body, &mut seen)?,
        penstock_types::Dialect::Anthropic => anthropic::watch::whole(body, &mut seen)?,
        penstock_types::Dialect::Gemini => gemini::watch::whole(body, &mut seen)?,
        penstock_types::Dialect::Ollama => return Err(unspoken()),
    }
    Ok(seen)
}

#[cfg(test)]
#[path = "watch_tests.rs"]
mod tests;
