//! An answer that is passed on untouched, read in passing: where its events end, whether it has begun to say something, whether it is
//! complete, what it cost, whether it is an error after all.
//!
//! A stream is handed on in whole events, so that whoever stands between can put a comment, or an error event, between two of them. Once
//! content has been seen, an event costs the search for its end and for a few names; only those that carry usage, a finish reason or an
//! error are read. What a stream holds is the event that has not ended.

use bytes::Bytes;
use memchr::{memchr2, memmem};

use crate::codec::{FaultClass, ProviderFault, Surface};
use crate::event::{FinishReason, ServiceTier, Usage};
use crate::room::make_room;
use crate::sse::EVENT_BYTES_MAX;
use crate::{anthropic, gemini, openai};

/// At least what is appended at once.
const PIECE_BYTES: usize = 128 << 10;

/// What has been seen of an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Something binding was said: content, a tool call, the end of a choice. Before it, another upstream could still answer.
    pub content: bool,
    /// The answer says that it is complete.
    pub complete: bool,
    /// Token counts, as last said.
    pub usage: Option<Usage>,
    /// The service tier that it says it was made in.
    pub tier: Option<ServiceTier>,
    /// Why it ended; of several choices, the last that did.
    pub finish: Option<FinishReason>,
    /// Events with content.
    pub pieces: u64,
}

/// What happens to an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    /// It is passed on.
    Yes,
    /// It carries nothing but the counts that the client did not ask for.
    OnlyUsage,
}

/// Watches one streamed answer.
#[derive(Debug)]
pub struct Watch {
    surface: Surface,
    drop_usage: bool,
    seen: Seen,
    /// What has not been handed on.
    held: Vec<u8>,
    /// Searched for line ends up to here.
    scanned: usize,
    /// Where the line being read begins.
    line: usize,
    /// Where the event being read begins.
    event: usize,
    /// Data of the event so far, where it has several `data` lines.
    data: Data,
    /// The last byte searched was CR: an LF behind it belongs to it.
    after_cr: bool,
    fault: Option<ProviderFault>,
}

#[derive(Clone, Debug, Default)]
enum Data {
    #[default]
    None,
    One(usize, usize),
    /// From the first to the last; they are joined when the event ends.
    Several(usize, usize),
}

impl Watch {
    /// Of an answer on that surface. `drop_usage`: the event that carries only the counts is kept from the client, who did not ask for it.
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
            fault: None,
        }
    }

    /// What has been seen.
    pub fn seen(&self) -> &Seen {
        &self.seen
    }

    /// Where the next bytes are appended; then comes [`Watch::take`].
    pub fn buffer(&mut self) -> &mut Vec<u8> {
        if self.held.len() > PIECE_BYTES {
            make_room(&mut self.held, PIECE_BYTES);
        }
        &mut self.held
    }

    /// Bytes held of the event that has not ended.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// The whole events that are there, as they came.
    ///
    /// # Errors
    /// The provider's own error event, or what is no event of its API; what came before it is handed out first.
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
            self.fault = Some(ProviderFault::new(FaultClass::Garbled, message));
        }
        match (self.split(&dropped), &self.fault) {
            (None, Some(fault)) => Err(fault.clone()),
            (out, _) => Ok(out),
        }
    }

    /// The body has ended: what is left, which counts as an event though no empty line ends it.
    ///
    /// # Errors
    /// As [`Watch::take`]; and the answer is not complete.
    pub fn end(&mut self) -> Result<Option<Bytes>, ProviderFault> {
        if self.fault.is_none() && self.event < self.held.len() {
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

    /// Whether the answer is complete when its body ends now.
    fn is_complete(&self) -> bool {
        // Gemini's streams have no last event of their own.
        self.seen.complete || (self.surface == Surface::Generate && self.seen.finish.is_some())
    }

    /// Reads to the end of the next event; where that is.
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

    /// Notes what the line up to `end` carries.
    fn end_line(&mut self, end: usize) {
        let line = &self.held[self.line..end];
        let Some(value) = line.strip_prefix(b"data:") else { return };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        let from = end - value.len();
        self.data = match std::mem::take(&mut self.data) {
            Data::None => Data::One(from, end),
            // From the beginning of the first line.
            Data::One(first, _) => Data::Several(first - self.name_before(first), end),
            Data::Several(first, _) => Data::Several(first, end),
        };
    }

    /// Bytes of `data:` and its space before a value.
    fn name_before(&self, value: usize) -> usize {
        if self.held[..value].ends_with(b"data: ") { 6 } else { 5 }
    }

    /// Reads the event that ends at `end`.
    fn end_event(&mut self, end: usize, dropped: &mut Vec<(usize, usize)>) {
        let data = std::mem::take(&mut self.data);
        let joined;
        let bytes = match data {
            Data::None => return,
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

    /// Takes the whole events out of what is held.
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

/// The values of several `data` lines, between which others may stand.
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
        crate::Dialect::OpenAi => openai::watch::event(surface, data, seen),
        crate::Dialect::Anthropic => anthropic::watch::event(data, seen),
        crate::Dialect::Gemini => gemini::watch::event(data, seen),
    }
}

/// Reads a whole answer: that it is one, and what it cost.
///
/// # Errors
/// It is an error after all, or not JSON.
pub fn whole(surface: Surface, body: &[u8]) -> Result<Seen, ProviderFault> {
    let mut seen = Seen { content: true, complete: true, pieces: 1, ..Seen::default() };
    match surface.dialect() {
        crate::Dialect::OpenAi => openai::watch::whole(surface, body, &mut seen)?,
        crate::Dialect::Anthropic => anthropic::watch::whole(body, &mut seen)?,
        crate::Dialect::Gemini => gemini::watch::whole(body, &mut seen)?,
    }
    Ok(seen)
}

/// Whether a field of that name stands in the event with anything but null. `name` comes with its quotes; inside JSON text a name cannot
/// be mistaken, since quotes in strings are escaped.
pub(crate) fn has(data: &[u8], name: &memmem::Finder<'_>) -> bool {
    let mut rest = data;
    while let Some(at) = name.find(rest) {
        rest = &rest[at + name.needle().len()..];
        let value = rest.trim_ascii_start().strip_prefix(b":").map(<[u8]>::trim_ascii_start);
        if value.is_some_and(|value| !value.starts_with(b"null")) {
            return true;
        }
    }
    false
}

/// What is not JSON, or not the JSON that the API promises.
pub(crate) fn garbled() -> ProviderFault {
    ProviderFault::new(FaultClass::Garbled, "The upstream's answer is not what its API promises.")
}

#[cfg(test)]
#[path = "watch_tests.rs"]
mod tests;
