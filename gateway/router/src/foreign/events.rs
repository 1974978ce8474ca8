//! Events of foreign prefix caches: `KVEventBatch` as vLLM and SGLang publish it, `[time, [event…], data_parallel_rank]`.
//!
//! An event is a map with its type under `type` (vLLM since 0.12) or an array with its type first (vLLM before,
//! SGLang); both are read. Unknown fields are skipped.

use super::ForeignError;
use super::msgpack::Reader;
use penstock_proto::frames::Tier;

/// Most blocks of one event: 4 million tokens of prompt at 16 per block.
const BLOCKS_MAX: usize = 1 << 18;

/// Upper bound of the tokens per block that is accepted in a foreign engine's event.
const BLOCK_TOKENS_MAX: usize = 1 << 14;

/// Hash of a block as the foreign engine computes it; opaque, compared for equality only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ForeignHash(pub u128);

/// A change of the prefix cache of a foreign engine, as it publishes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForeignEvent {
    /// Blocks that can be read from now on: a chain in order.
    Stored {
        /// Hashes of the blocks, in the order of the chain.
        hashes: Vec<ForeignHash>,
        /// Block before the first of the chain; `None` at the beginning of a prompt.
        parent: Option<ForeignHash>,
        /// Tokens of all blocks; empty for blocks that were reported before and are now in one more tier.
        tokens: Vec<u32>,
        /// Tokens per block of the foreign engine.
        block_tokens: usize,
        /// Tier of the KV cache that holds the blocks now.
        tier: Tier,
    },
    /// Blocks that were evicted from one tier.
    Removed {
        /// Hashes of the evicted blocks.
        hashes: Vec<ForeignHash>,
        /// Tier of the KV cache that held the blocks.
        tier: Tier,
    },
    /// All blocks of the engine are gone, in every tier.
    Cleared,
}

/// Events of one payload, in order, each decoded on demand: a few bytes of payload become hundreds in memory, so no
/// more than one event is ever unpacked. `None`: an event of no use here (adapters, images, windows, unknown types). An
/// error is the last item: the payload is not a batch, or incomplete.
pub struct Events<'a> {
    reader: Reader<'a>,
    /// Number of events left, and of the fields of the batch behind them.
    left: usize,
    behind: usize,
}

impl<'a> Events<'a> {
    /// Starts reading a payload.
    ///
    /// # Errors
    /// The payload is not a batch.
    pub fn new(payload: &'a [u8]) -> Result<Self, ForeignError> {
        let mut reader = Reader::new(payload);
        let behind = reader.array()?.checked_sub(2).ok_or(ForeignError::Shape)?;
        reader.skip()?;
        let left = reader.array()?;
        Ok(Self { reader, left, behind })
    }

    /// Skips the fields behind the events: the publisher's data-parallel rank, which its address tells already.
    fn end(&mut self) -> Option<ForeignError> {
        (0..std::mem::take(&mut self.behind)).try_for_each(|_| self.reader.skip()).err()
    }
}

impl Iterator for Events<'_> {
    type Item = Result<Option<ForeignEvent>, ForeignError>;

    fn next(&mut self) -> Option<Self::Item> {
        let Some(left) = self.left.checked_sub(1) else { return self.end().map(Err) };
        self.left = left;
        let event = event(&mut self.reader);
        if event.is_err() {
            (self.left, self.behind) = (0, 0);
        }
        Some(event)
    }
}

/// Fields of an event, in the order of the array form; [`Fields::extra`] and the later ones occur in maps only.
#[derive(Default)]
struct Fields<'a> {
    kind: &'a [u8],
    hashes: Vec<ForeignHash>,
    parent: Option<ForeignHash>,
    tokens: Vec<u32>,
    block_tokens: usize,
    tier: Option<Option<Tier>>,
    /// True if the event concerns an adapter, images, a salt of its own, or a group of layers that does not see the whole prefix.
    special: bool,
}

fn event(reader: &mut Reader<'_>) -> Result<Option<ForeignEvent>, ForeignError> {
    let mut fields = Fields::default();
    if reader.is_array()? {
        in_order(reader, &mut fields)?;
    } else {
        for _ in 0..reader.map()? {
            let key = reader.blob()?;
            field(reader, key, &mut fields)?;
        }
    }
    Ok(fields.into_event())
}

fn in_order<'a>(reader: &mut Reader<'a>, fields: &mut Fields<'a>) -> Result<(), ForeignError> {
    const STORED: [&[u8]; 7] =
        [b"block_hashes", b"parent_block_hash", b"token_ids", b"block_size", b"lora_id", b"medium", b"lora_name"];
    const REMOVED: [&[u8]; 2] = [b"block_hashes", b"medium"];
    let count = reader.array()?.checked_sub(1).ok_or(ForeignError::Shape)?;
    fields.kind = reader.blob()?;
    let names: &[&[u8]] = if fields.kind == b"BlockStored" { &STORED } else { &REMOVED };
    for number in 0..count {
        field(reader, names.get(number).copied().unwrap_or_default(), fields)?;
    }
    Ok(())
}

fn field<'a>(reader: &mut Reader<'a>, key: &[u8], fields: &mut Fields<'a>) -> Result<(), ForeignError> {
    match key {
        b"type" => fields.kind = reader.blob()?,
        b"block_hashes" => fields.hashes = many(reader, BLOCKS_MAX, hash)?,
        b"parent_block_hash" => fields.parent = if reader.nil()? { None } else { Some(hash(reader)?) },
        b"token_ids" => fields.tokens = many(reader, BLOCKS_MAX * 16, Reader::u32)?,
        b"block_size" => fields.block_tokens = reader.u32()? as usize,
        b"medium" if !reader.nil()? => {
            fields.tier = Some(match reader.blob()? {
                b"GPU" => Some(Tier::Device),
                b"CPU" | b"CPU_PINNED" | b"CPU_TIER1" | b"CPU_TIER2" => Some(Tier::Host),
                b"STORAGE" | b"DISK" => Some(Tier::Disk),
                b"EXTERNAL" => Some(Tier::Remote),
                _ => None,
            });
        }
        b"medium" => {}
        b"lora_id" | b"lora_name" => fields.special |= present(reader)?,
        b"extra_keys" => fields.special |= any_present(reader)?,
        // Group 0 decides; a group with a window keeps less, and reports it under its own number.
        b"group_idx" => fields.special |= !reader.nil()? && reader.integer()? != 0,
        b"kv_cache_spec_sliding_window" => fields.special |= present(reader)?,
        _ => reader.skip()?,
    }
    Ok(())
}

fn present(reader: &mut Reader<'_>) -> Result<bool, ForeignError> {
    Ok(if reader.nil()? {
        false
    } else {
        reader.skip()?;
        true
    })
}

/// Whether any block has an entry: one per block, where nil or empty means nothing special.
fn any_present(reader: &mut Reader<'_>) -> Result<bool, ForeignError> {
    if reader.nil()? {
        return Ok(false);
    }
    let mut any = false;
    for _ in 0..reader.array()? {
        if reader.nil()? {
            continue;
        }
        let keys = reader.array()?;
        any |= keys > 0;
        (0..keys).try_for_each(|_| reader.skip())?;
    }
    Ok(any)
}

fn many<'a, T>(
    reader: &mut Reader<'a>,
    max: usize,
    one: impl Fn(&mut Reader<'a>) -> Result<T, ForeignError>,
) -> Result<Vec<T>, ForeignError> {
    let count = reader.array()?;
    if count > max {
        return Err(ForeignError::Range);
    }
    let mut out = Vec::with_capacity(count);
    for _ in 0..count {
        out.push(one(reader)?);
    }
    Ok(out)
}

/// Hash as a number, or as bytes of which the first 16 suffice.
fn hash(reader: &mut Reader<'_>) -> Result<ForeignHash, ForeignError> {
    if !reader.is_blob()? {
        return reader.integer().map(|number| ForeignHash(number.into()));
    }
    let bytes = reader.blob()?;
    let mut head = [0; 16];
    let count = bytes.len().min(16);
    head[..count].copy_from_slice(&bytes[..count]);
    Ok(ForeignHash(u128::from_le_bytes(head)))
}

impl Fields<'_> {
    fn into_event(self) -> Option<ForeignEvent> {
        let tier = self.tier.unwrap_or(Some(Tier::Device));
        match self.kind {
            b"AllBlocksCleared" => Some(ForeignEvent::Cleared),
            _ if self.special => None,
            b"BlockRemoved" => Some(ForeignEvent::Removed { hashes: self.hashes, tier: tier? }),
            b"BlockStored" => {
                let (blocks, block_tokens) = (self.hashes.len(), self.block_tokens);
                let whole = (1..=BLOCK_TOKENS_MAX).contains(&block_tokens)
                    && (self.tokens.len() == blocks * block_tokens || self.tokens.is_empty());
                let (hashes, parent, tokens) = (self.hashes, self.parent, self.tokens);
                whole.then_some(ForeignEvent::Stored { hashes, parent, tokens, block_tokens, tier: tier? })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Payload `[null, [event…], 3]` with `count` events.
    fn batch(events: &[u8], count: u32) -> Vec<u8> {
        let mut out = vec![0x93, 0xc0, 0xdd];
        out.extend_from_slice(&count.to_be_bytes());
        [&out[..], events, &[3]].concat()
    }

    const CLEARED: &[u8] = b"\x91\xb0AllBlocksCleared";

    #[test]
    fn a_batch_is_read_event_by_event_and_to_its_end() {
        let whole = batch(&[CLEARED, b"\x91\xa1?", CLEARED].concat(), 3);
        let read: Result<Vec<_>, _> = Events::new(&whole).expect("a batch").collect();
        assert_eq!(read, Ok(vec![Some(ForeignEvent::Cleared), None, Some(ForeignEvent::Cleared)]));
        for cut in 0..whole.len() {
            let read: Result<Vec<_>, _> = Events::new(&whole[..cut]).and_then(Iterator::collect);
            assert_eq!(read, Err(ForeignError::Short), "cut at {cut}");
        }
        let mut broken = Events::new(&whole[..20]).expect("its beginning");
        assert_eq!(broken.by_ref().last(), Some(Err(ForeignError::Short)), "nothing is read behind an error");
        assert_eq!((Events::new(&[0x91, 0xc0]).err(), broken.next()), (Some(ForeignError::Shape), None));
    }

    /// 16 bytes of payload are an event of more than a hundred; a payload of 28 MiB must not unpack into that many.
    #[test]
    fn only_one_event_is_unpacked_at_a_time() {
        let small = b"\x92\xacBlockRemoved\x90";
        let whole = batch(&small.repeat(2_000_000), 2_000_000);
        assert!(whole.len() > 28 << 20);
        let mut count = 0;
        for event in Events::new(&whole).expect("a batch") {
            let Ok(Some(ForeignEvent::Removed { hashes, .. })) = event else { panic!("{event:?}") };
            assert_eq!(hashes.capacity(), 0);
            count += 1;
        }
        assert_eq!(count, 2_000_000);
        // The largest event takes the memory of its elements and no spare room.
        let many = [&b"\x92\xacBlockRemoved\xdd"[..], &(BLOCKS_MAX as u32).to_be_bytes(), &[7; BLOCKS_MAX]].concat();
        let payload = batch(&many, 1);
        let Some(Ok(Some(ForeignEvent::Removed { hashes, .. }))) = Events::new(&payload).expect("a batch").next()
        else {
            panic!("an event")
        };
        assert_eq!((hashes.len(), hashes.capacity()), (BLOCKS_MAX, BLOCKS_MAX));
    }
}
