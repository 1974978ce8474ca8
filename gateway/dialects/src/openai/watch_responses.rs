//! Usage and content of Responses API streams that the gateway forwards unchanged.

use std::sync::LazyLock;

use memchr::memmem::Finder;

use super::provider::fault::fault_text;
use super::provider::usage;
use super::watch::tier;
use crate::seen::{Keep, Seen, garbled};
use penstock_types::codec::ProviderFault;
use penstock_types::event::{FinishReason, ServiceTier, Usage};
use penstock_types::json::{Fault, Kind, Reader};

static DELTA: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b".delta\""));

/// Inspects one event of a `/v1/responses` stream.
pub(crate) fn event(data: &[u8], seen: &mut Seen) -> Result<Keep, ProviderFault> {
    if data == b"[DONE]" {
        return Ok(Keep::Yes);
    }
    // The type stands near the front of an event.
    if seen.content && DELTA.find(&data[..data.len().min(96)]).is_some() {
        seen.pieces += 1;
        return Ok(Keep::Yes);
    }
    let read = Top::read(data).map_err(|_| garbled())?;
    // Of a failed response too: what it has used is billed.
    seen.usage = read.usage.or(seen.usage);
    seen.tier = read.tier.or(seen.tier);
    match read.kind.as_str() {
        "response.created" | "response.in_progress" | "response.queued" => {}
        "response.completed" => seen.finish = Some(FinishReason::Stop),
        "response.incomplete" => seen.finish = Some(FinishReason::Length),
        "response.failed" | "error" => return Err(fault_text(read.error.map_or(data, str::as_bytes))),
        // An item without content so far does not bind the gateway to the upstream.
        "response.output_item.added" | "response.content_part.added" | "response.reasoning_summary_part.added" => {}
        _ => {
            seen.content = true;
            seen.pieces += 1;
        }
    }
    seen.complete |= matches!(read.kind.as_str(), "response.completed" | "response.incomplete");
    seen.content |= seen.complete;
    Ok(Keep::Yes)
}

#[derive(Default)]
struct Top<'a> {
    kind: String,
    usage: Option<Usage>,
    tier: Option<ServiceTier>,
    /// Error of the response as JSON text, if it has one.
    error: Option<&'a str>,
}

impl<'a> Top<'a> {
    fn read(data: &'a [u8]) -> Result<Self, Fault> {
        let mut reader = Reader::new(data)?;
        let mut out = Self::default();
        reader.object(|reader, key| {
            if reader.null()? {
                return Ok(());
            }
            match (key.as_ref(), reader.kind()?) {
                ("type", Kind::String) => {
                    out.kind = reader.string()?.chars().take(64).collect();
                    Ok(())
                }
                ("response", Kind::Object) => reader.object(|reader, key| match (key.as_ref(), reader.kind()?) {
                    ("usage", Kind::Object) => usage::read(reader).map(|usage| out.usage = Some(usage)),
                    ("service_tier", Kind::String) => tier(reader).map(|tier| out.tier = tier),
                    ("error", Kind::Object) => reader.raw().map(|raw| out.error = Some(raw.text)),
                    _ => reader.skip(),
                }),
                _ => reader.skip(),
            }
        })?;
        reader.end()?;
        Ok(out)
    }
}
