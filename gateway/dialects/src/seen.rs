//! Facts that the inspection of a forwarded answer gathers, and the readers that the dialects' inspectors share.

use memchr::memmem;

use penstock_types::codec::{FaultClass, ProviderFault};
use penstock_types::event::{FinishReason, ServiceTier, Usage};
use penstock_types::json::{Fault, Reader};

/// Facts about an answer, gathered while it passes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// True if something binding was sent: content, a tool call, the end of a choice. Before that, another upstream
    /// could still answer.
    pub content: bool,
    /// True if the answer has said that it is complete.
    pub complete: bool,
    /// Token counts as the answer last reported them; `None` until it has.
    pub usage: Option<Usage>,
    /// Part of `usage` that the answer reports beside its own counts: Anthropic's compactions.
    pub(crate) compacted: Usage,
    /// Service tier that the answer reports.
    pub tier: Option<ServiceTier>,
    /// Finish reason; of several choices, the last that finished.
    pub finish: Option<FinishReason>,
    /// Number of events that carried content so far.
    pub pieces: u64,
}

/// Treatment of an event of a stream that is forwarded unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    /// The event is forwarded to the client.
    Yes,
    /// The event carries nothing but counts that the client did not ask for, and may be dropped.
    OnlyUsage,
}

/// Returns true if the event has the field `name` with a value other than null. `name` comes with its quotes; inside a JSON
/// string it cannot match, since quotes in strings are escaped.
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

/// Fault of an answer that is not JSON, or not the JSON of the API.
pub(crate) fn garbled() -> ProviderFault {
    ProviderFault::new(FaultClass::Garbled, "The upstream's answer is not what its API promises.")
}

/// Reads a count in any number format; 0 where the value is not a count.
pub(crate) fn count(reader: &mut Reader<'_>, out: &mut u64) -> Result<(), Fault> {
    let text = reader.number()?;
    *out = text.parse().ok().or_else(|| text.parse::<f64>().ok().map(|value| value as u64)).unwrap_or(0);
    Ok(())
}
