//! `KVEventBatch` as vLLM and SGLang publish it: `[time, [event…], data_parallel_rank]`.
//!
//! An event is a map with its type under `type` (vLLM since 0.12) or an array with its type first (vLLM before, SGLang); both are read.
//! Fields that are not known are passed over.

use super::ForeignError;
use super::msgpack::Reader;
use penstock_proto::frames::Tier;

/// Blocks of one event at most: 4 million tokens of prompt at 16 per block.
const BLOCKS_MAX: usize = 1 << 18;

/// Tokens per foreign block at most.
const BLOCK_TOKENS_MAX: usize = 1 << 14;

/// A batch of one publisher.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// What happened, in order.
    pub events: Vec<ForeignEvent>,
    /// Events that were there and are of no use here: adapters, images, windows, unknown types.
    pub skipped: usize,
    /// Data-parallel rank of the publisher, where it says one.
    pub rank: Option<u32>,
}

/// A foreign engine's name for a block: opaque.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ForeignHash(pub u128);

/// A change of a foreign prefix cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForeignEvent {
    /// Blocks that can be read from now on, a chain in order.
    Stored {
        /// Their names.
        hashes: Vec<ForeignHash>,
        /// The block before the first.
        parent: Option<ForeignHash>,
        /// All their tokens; empty for blocks that were told before and are now in one more tier.
        tokens: Vec<u32>,
        /// Tokens per block.
        block_tokens: usize,
        /// Where they are.
        tier: Tier,
    },
    /// Blocks that are gone.
    Removed {
        /// Their names.
        hashes: Vec<ForeignHash>,
        /// From where.
        tier: Tier,
    },
    /// Everything is gone.
    Cleared,
}

/// Reads one payload.
///
/// # Errors
/// It is not a batch, or not whole.
pub fn decode(payload: &[u8]) -> Result<Batch, ForeignError> {
    let mut reader = Reader::new(payload);
    let fields = reader.array()?;
    if fields < 2 {
        return Err(ForeignError::Shape);
    }
    reader.skip()?;
    let mut batch = Batch::default();
    for _ in 0..reader.array()? {
        match event(&mut reader)? {
            Some(event) => batch.events.push(event),
            None => batch.skipped += 1,
        }
    }
    if fields > 2 && !reader.nil()? {
        batch.rank = Some(reader.u32()?);
    }
    for _ in 3..fields {
        reader.skip()?;
    }
    Ok(batch)
}

/// Fields of an event in the order of the array form; [`Fields::extra`] and what follows stand in maps only.
#[derive(Default)]
struct Fields {
    kind: Vec<u8>,
    hashes: Vec<ForeignHash>,
    parent: Option<ForeignHash>,
    tokens: Vec<u32>,
    block_tokens: usize,
    tier: Option<Option<Tier>>,
    /// It is of an adapter, of images, of a salt of its own, or of a group of layers that does not see the whole prefix.
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

fn in_order(reader: &mut Reader<'_>, fields: &mut Fields) -> Result<(), ForeignError> {
    const STORED: [&[u8]; 7] =
        [b"block_hashes", b"parent_block_hash", b"token_ids", b"block_size", b"lora_id", b"medium", b"lora_name"];
    const REMOVED: [&[u8]; 2] = [b"block_hashes", b"medium"];
    let count = reader.array()?.checked_sub(1).ok_or(ForeignError::Shape)?;
    fields.kind = reader.blob()?.to_vec();
    let names: &[&[u8]] = if fields.kind == b"BlockStored" { &STORED } else { &REMOVED };
    for number in 0..count {
        field(reader, names.get(number).copied().unwrap_or_default(), fields)?;
    }
    Ok(())
}

fn field(reader: &mut Reader<'_>, key: &[u8], fields: &mut Fields) -> Result<(), ForeignError> {
    match key {
        b"type" => fields.kind = reader.blob()?.to_vec(),
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
        // Layers of the group 0 decide; a group with a window keeps less, and says so under its own number.
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

/// One entry per block; nil or empty: nothing special about that block.
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
    (0..count).map(|_| one(reader)).collect()
}

/// A number, or bytes of which the first 16 are as good as all.
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

impl Fields {
    fn into_event(self) -> Option<ForeignEvent> {
        let tier = self.tier.unwrap_or(Some(Tier::Device));
        match self.kind.as_slice() {
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
