//! Tool calls of one choice, put in order from the deltas that providers stream.
//!
//! Providers' deltas differ: an id in every delta or a new one in each, an empty id, a name repeated or in the first
//! only, no index, one index for all, arguments as an object. One rule tells a new call from more of an old one: a new
//! call carries its name; under an index that is taken, it also has another id, or the old call's arguments are
//! complete and new ones begin.

use crate::answer_json as value;
use penstock_types::codec::{FaultClass, ProviderFault};
use penstock_types::event::ChatEvent;
use penstock_types::json::{Fault, Reader};

/// Most calls of one choice; an answer with more is refused as garbled.
const CALLS_MAX: usize = 1_024;

/// Fields of a call in one delta.
#[derive(Default)]
pub(super) struct CallDelta {
    index: Option<u64>,
    id: Option<String>,
    name: Option<String>,
    arguments: Option<String>,
    signature: Option<String>,
}

impl CallDelta {
    /// Reads an element of `tool_calls`.
    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, Fault> {
        let mut delta = Self::default();
        value::fields(reader, |reader, key| {
            match key {
                "index" => delta.index = value::count(reader)?,
                "id" => delta.id = value::string_or_json(reader)?.filter(|id| !id.is_empty()),
                "function" => delta.function(reader)?,
                "extra_content" => delta.signature = signature(reader)?,
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        Ok(delta)
    }

    /// Reads `{name, arguments}`: of a call, or the whole of the deprecated `function_call`.
    pub(super) fn function(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        value::fields(reader, |reader, key| {
            match key {
                "name" => self.name = value::string(reader)?.map(Into::into).filter(|name: &String| !name.is_empty()),
                "arguments" => self.arguments = value::string_or_json(reader)?,
                _ => reader.skip()?,
            }
            Ok(())
        })
    }
}

/// Reads the signature of a call from `{"google":{"thought_signature":…}}`.
pub(super) fn signature(reader: &mut Reader<'_>) -> Result<Option<String>, Fault> {
    let mut found = None;
    value::fields(reader, |reader, key| match key {
        "google" => value::fields(reader, |reader, key| {
            match key {
                "thought_signature" => found = value::string(reader)?.map(Into::into),
                _ => reader.skip()?,
            }
            Ok(())
        }),
        _ => reader.skip(),
    })?;
    Ok(found)
}

struct Call {
    index: Option<u64>,
    id: Option<String>,
    /// Function name; `None` until the provider sends it, and arguments wait for it.
    name: Option<String>,
    waiting: String,
    arguments: Balance,
    signature: Option<String>,
}

/// Tool calls of one choice, collected until they are complete.
#[derive(Default)]
pub(super) struct Calls {
    all: Vec<Call>,
}

impl Calls {
    /// Returns true if the choice has no tool call.
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Adds a delta to the calls of choice `choice`; `answer` is the provider's id of the answer.
    pub(super) fn take(
        &mut self,
        delta: CallDelta,
        answer: &str,
        choice: u32,
        out: &mut Vec<ChatEvent>,
    ) -> Result<(), ProviderFault> {
        let at = match self.find(&delta) {
            Some(at) => at,
            None if self.all.len() == CALLS_MAX => {
                let message = format!("The provider's answer has more than {CALLS_MAX} tool calls.");
                return Err(ProviderFault::new(FaultClass::Garbled, message));
            }
            None => {
                let (index, id) = (delta.index, delta.id.clone());
                let (waiting, arguments) = (String::new(), Balance::default());
                self.all.push(Call { index, id, name: None, waiting, arguments, signature: None });
                self.all.len() - 1
            }
        };
        let call = &mut self.all[at];
        call.id = call.id.take().or(delta.id);
        call.signature = call.signature.take().or(delta.signature);
        if let (None, Some(name)) = (&call.name, delta.name) {
            let id = call.id.clone().unwrap_or_else(|| made_id(answer, choice, at, &name));
            let signature = call.signature.clone();
            call.name = Some(name.clone());
            out.push(ChatEvent::ToolCallStart { choice, call: at as u32, id, name, signature });
        }
        let mut json = std::mem::take(&mut call.waiting);
        json.push_str(delta.arguments.as_deref().unwrap_or_default());
        call.arguments.take(delta.arguments.as_deref().unwrap_or_default());
        if call.name.is_none() {
            call.waiting = json;
        } else if !json.is_empty() {
            out.push(ChatEvent::ToolCallArguments { choice, call: at as u32, json });
        }
        Ok(())
    }

    /// Finishes the calls of a complete choice: a call without arguments gets `{}`.
    pub(super) fn finish(&self, choice: u32, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        for (at, call) in self.all.iter().enumerate() {
            if call.name.is_none() {
                return Err(ProviderFault::new(
                    FaultClass::Garbled,
                    "The provider's answer has a call without a name.",
                ));
            }
            if !call.arguments.begun {
                let json = "{}".to_owned();
                out.push(ChatEvent::ToolCallArguments { choice, call: at as u32, json });
            }
        }
        Ok(())
    }

    /// Index of the call that a delta continues; `None` if the delta begins a new one.
    fn find(&self, delta: &CallDelta) -> Option<usize> {
        let same_id = || self.all.iter().rposition(|call| delta.id.is_some() && call.id == delta.id);
        let at = match delta.index {
            Some(_) => self.all.iter().rposition(|call| call.index == delta.index),
            None => same_id().or(self.all.len().checked_sub(1)),
        }?;
        let call = &self.all[at];
        let other_id = delta.id.is_some() && call.id.is_some() && delta.id != call.id;
        let begins_again =
            call.arguments.is_complete() && delta.arguments.as_deref().is_some_and(|json| json.starts_with('{'));
        let same = delta.name.is_none() || call.name.is_none() || !(other_id || begins_again);
        same.then_some(at)
    }
}

/// Makes an id for a call without one. The id is the same for the same answer, so that a replay gets it too.
fn made_id(answer: &str, choice: u32, call: usize, name: &str) -> String {
    // FNV-1a, 64 bits.
    let text = format!("{answer}/{choice}/{call}/{name}");
    let hash = text
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    format!("call_{hash:016x}")
}

/// Bracket balance of JSON text that comes in pieces, to know when the object is complete.
#[derive(Default)]
pub(crate) struct Balance {
    begun: bool,
    depth: u32,
    inside: bool,
    escaped: bool,
}

impl Balance {
    /// Counts the brackets of the next piece, which may be cut anywhere between characters.
    pub(crate) fn take(&mut self, json: &str) {
        for byte in json.bytes() {
            self.begun |= !byte.is_ascii_whitespace();
            match (self.inside, byte) {
                (true, _) if std::mem::take(&mut self.escaped) => {}
                (true, b'\\') => self.escaped = true,
                (_, b'"') => self.inside = !self.inside,
                (false, b'{' | b'[') => self.depth += 1,
                (false, b'}' | b']') => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
    }

    /// Returns true if the text so far is a complete object.
    pub(crate) fn is_complete(&self) -> bool {
        self.begun && self.depth == 0 && !self.inside
    }
}
