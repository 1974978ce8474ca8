//! The paged KV cache in the layout of a right operand.
//!
//! A page has as many tokens as a panel has columns, 32. So the keys of one page and head are one panel of the product q·Kᵀ
//! (`[head_dim / 32]` blocks, tokens as columns), and its values are one block of each panel of the product p·V (tokens as k):
//!
//! ```text
//! [layer][page][kv_head][K: head_dim / 32 blocks | V: value_dim / 32 blocks]      block: [2 tiles][16 pairs][16][2], see pack.rs
//! ```
//!
//! A latent is the first values of its key, which the two products need in two orders: it is kept in both, and pages that leave the device have
//! it once.
//!
//! Prefill and decode read the same bytes with the same kernels as weights. Values beyond the newest token of a page are kept at
//! zero, since a weight of zero times a stale NaN would be NaN; stale keys need no care, their scores are masked by position.
//! The step that begins a page clears what it leaves of it; steps that go on in the page find it clear.

use super::lanes::from_bf16;
use super::operand::Shared;
use super::pack::BLOCK;
use crate::device::{KernelError, KvSpec, PAGE_TOKENS};
use crate::host::{Arena, Region};

pub(super) struct KvCache {
    pub(super) spec: KvSpec,
    /// Number of blocks of 32 values of a key.
    pub(super) key_blocks: usize,
    /// Number of blocks of 32 values of a value.
    pub(super) value_blocks: usize,
    values: Region<u16>,
}

/// Index of value `d` of token `slot` within the blocks of K.
fn key_at(slot: usize, d: usize) -> usize {
    d / 32 * BLOCK + slot / 16 * 512 + d % 32 / 2 * 32 + slot % 16 * 2 + d % 2
}

/// Index of value `d` of token `slot` within the blocks of V.
fn value_at(slot: usize, d: usize) -> usize {
    d / 32 * BLOCK + d % 32 / 16 * 512 + slot / 2 * 32 + d % 16 * 2 + slot % 2
}

impl KvCache {
    pub(super) fn new(arena: &mut Arena, spec: KvSpec) -> Result<Self, KernelError> {
        let value_dim = spec.latent.unwrap_or(spec.head_dim);
        if spec.latent.is_some() && (spec.kv_heads != 1 || value_dim > spec.head_dim) {
            let (name, got) = ("the KV cache".into(), vec![spec.kv_heads, spec.head_dim, value_dim]);
            return Err(KernelError::Shape { name, got, want: "one KV head whose key has the latent".into() });
        }
        let (key_blocks, value_blocks) = (spec.head_dim.div_ceil(32), value_dim.div_ceil(32));
        let count = [spec.layers, spec.pages, spec.kv_heads, (key_blocks + value_blocks) * BLOCK]
            .iter()
            .try_fold(1usize, |n, &d| n.checked_mul(d))
            .unwrap_or(usize::MAX);
        Ok(Self { spec, key_blocks, value_blocks, values: arena.alloc(count, "the KV cache")? })
    }

    /// Index at which the blocks of K of one page and head begin; those of V follow.
    fn start(&self, layer: usize, page: usize, head: usize) -> usize {
        ((layer * self.spec.pages + page) * self.spec.kv_heads + head) * (self.key_blocks + self.value_blocks) * BLOCK
    }

    /// Parts of a page that leaves the device: K and V, or K alone.
    fn parts(&self) -> usize {
        if self.spec.latent.is_some() { 1 } else { 2 }
    }

    /// Blocks of K of one page and head.
    pub(super) fn keys(&self, layer: usize, page: usize, head: usize) -> &[u16] {
        &self.values[self.start(layer, page, head)..][..self.key_blocks * BLOCK]
    }

    /// Blocks of V of one page and head.
    pub(super) fn values(&self, layer: usize, page: usize, head: usize) -> &[u16] {
        &self.values[self.start(layer, page, head) + self.key_blocks * BLOCK..][..self.value_blocks * BLOCK]
    }

    /// Writer that several threads share to store the keys and values of their rows.
    pub(super) fn writer(&mut self) -> KvWriter {
        let shared = Shared::new(&mut self.values);
        KvWriter { values: shared, spec: self.spec, key_blocks: self.key_blocks, value_blocks: self.value_blocks }
    }

    /// One page of one layer in the canonical order `[K|V][kv_head][token][dim]`.
    pub(super) fn page(&self, layer: usize, page: usize) -> Vec<f32> {
        let mut out = Vec::with_capacity(self.page_bytes() / 2);
        for part in 0..self.parts() {
            for head in 0..self.spec.kv_heads {
                let (blocks, at): (_, fn(usize, usize) -> usize) = if part == 0 {
                    (self.keys(layer, page, head), key_at)
                } else {
                    (self.values(layer, page, head), value_at)
                };
                for slot in 0..PAGE_TOKENS {
                    out.extend((0..self.spec.head_dim).map(|d| from_bf16(blocks[at(slot, d)])));
                }
            }
        }
        out
    }

    /// Bytes of one page of one layer in wire order.
    pub(super) fn page_bytes(&self) -> usize {
        self.parts() * self.spec.kv_heads * PAGE_TOKENS * self.spec.head_dim * 2
    }

    /// Copies a page out in wire order, `[K|V][kv_head][token][dim]` of bf16.
    pub(super) fn read_page(&self, layer: usize, page: usize, out: &mut [u8]) {
        assert_eq!(out.len(), self.page_bytes(), "bytes of a page");
        let (dim, heads) = (self.spec.head_dim, self.spec.kv_heads);
        let rows = out.chunks_exact_mut(2 * dim);
        for (at, row) in rows.enumerate() {
            let (slot, head, part) = (at % PAGE_TOKENS, at / PAGE_TOKENS % heads, at / (PAGE_TOKENS * heads));
            let (row, _) = row.as_chunks_mut::<2>();
            if part == 0 {
                let blocks = self.keys(layer, page, head);
                row.iter_mut().enumerate().for_each(|(d, to)| *to = blocks[key_at(slot, d)].to_le_bytes());
            } else {
                let blocks = self.values(layer, page, head);
                row.iter_mut().enumerate().for_each(|(d, to)| *to = blocks[value_at(slot, d)].to_le_bytes());
            }
        }
    }

    /// Writes a page from wire order; columns beyond the head's width become zero, as in pages that the device writes.
    pub(super) fn write_page(&mut self, layer: usize, page: usize, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.page_bytes(), "bytes of a page");
        let (dim, heads, latent) = (self.spec.head_dim, self.spec.kv_heads, self.spec.latent);
        let (keys, both) = (self.key_blocks * BLOCK, (self.key_blocks + self.value_blocks) * BLOCK);
        let start = self.start(layer, page, 0);
        let all = &mut self.values[start..][..heads * both];
        if !dim.is_multiple_of(32) || latent.is_some_and(|latent| !latent.is_multiple_of(32)) {
            all.fill(0);
        }
        for (at, row) in bytes.chunks_exact(2 * dim).enumerate() {
            let (slot, head, part) = (at % PAGE_TOKENS, at / PAGE_TOKENS % heads, at / (PAGE_TOKENS * heads));
            let (of_keys, of_values) = all[head * both..][..both].split_at_mut(keys);
            let (row, _) = row.as_chunks::<2>();
            if part == 0 {
                row.iter().enumerate().for_each(|(d, from)| of_keys[key_at(slot, d)] = u16::from_le_bytes(*from));
            }
            // The values of their own, or the latent at the front of the key.
            let values = if part == 1 { row } else { &row[..latent.unwrap_or(0)] };
            values.iter().enumerate().for_each(|(d, from)| of_values[value_at(slot, d)] = u16::from_le_bytes(*from));
        }
    }
}

/// Writer of single tokens; threads write different (token, head) pairs.
pub(super) struct KvWriter {
    values: Shared<u16>,
    spec: KvSpec,
    key_blocks: usize,
    value_blocks: usize,
}

/// Position of a token in the cache.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) layer: usize,
    pub(super) page: usize,
    pub(super) slot: usize,
}

impl KvWriter {
    fn blocks(&self, place: Place, head: usize, part: usize) -> *mut u16 {
        let spec = &self.spec;
        assert!(place.layer < spec.layers && place.page < spec.pages && head < spec.kv_heads, "place in the KV cache");
        let index = (place.layer * spec.pages + place.page) * spec.kv_heads + head;
        self.values.at((index * (self.key_blocks + self.value_blocks) + part * self.key_blocks) * BLOCK)
    }

    /// Writes a key, padded to whole blocks with zeros.
    ///
    /// # Safety
    /// No other thread writes this token and head now, and none reads the page.
    pub(super) unsafe fn key(&self, place: Place, head: usize, values: &[u16]) {
        let blocks = self.blocks(place, head, 0);
        assert!(values.len() == self.key_blocks * 32 && place.slot < PAGE_TOKENS, "place in a page");
        for (block, values) in values.as_chunks::<32>().0.iter().enumerate() {
            for (pair, values) in values.as_chunks::<2>().0.iter().enumerate() {
                let at = key_at(place.slot, block * 32 + pair * 2);
                // SAFETY: inside of the `key_blocks` blocks at `blocks` (asserted), and this thread's alone.
                unsafe { blocks.add(at).cast::<[u16; 2]>().write(*values) };
            }
        }
    }

    /// Writes a value, padded as a key is; `clears`: the rest of the page becomes zero.
    ///
    /// # Safety
    /// As [`KvWriter::key`]; with `clears`, no other thread writes later tokens of the page.
    pub(super) unsafe fn value(&self, place: Place, head: usize, values: &[u16], clears: bool) {
        let blocks = self.blocks(place, head, 1);
        assert!(values.len() == self.value_blocks * 32 && place.slot < PAGE_TOKENS, "place in a page");
        for (tile, values) in values.as_chunks::<16>().0.iter().enumerate() {
            let start = value_at(place.slot, tile * 16);
            for (d, &value) in values.iter().enumerate() {
                // SAFETY: inside of the `value_blocks` blocks at `blocks` (asserted), and this thread's alone.
                unsafe { blocks.add(start + d * 2).write(value) };
                if clears && place.slot.is_multiple_of(2) {
                    // SAFETY: the other token of the pair, in the same tile; nobody writes it now (the caller's promise).
                    unsafe { blocks.add(start + d * 2 + 1).write(0) };
                }
            }
            // The pairs behind this token's are one run to the end of the tile.
            let next = place.slot / 2 + 1;
            if clears && next < PAGE_TOKENS / 2 {
                // SAFETY: from the next pair to the end of the tile of 512 values; nobody writes these now.
                unsafe { blocks.add(value_at(next * 2, tile * 16)).write_bytes(0, 512 - next * 32) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back_in_canonical_order() {
        use crate::cpu::lanes::to_bf16;
        let spec = KvSpec { layers: 2, kv_heads: 3, head_dim: 40, latent: None, pages: 2 };
        let mut kv = KvCache::new(&mut Arena::default(), spec).unwrap();
        let of = |part: usize, head: usize, slot: usize, d: usize| (part * 64 + head * 16 + slot * 2 + d) as f32;
        let writer = kv.writer();
        for head in 0..3 {
            for slot in 0..PAGE_TOKENS {
                let place = Place { layer: 1, page: 1, slot };
                let row = |part| {
                    let values = (0..64).map(|d| if d < 40 { of(part, head, slot, d) } else { 0.0 });
                    values.map(to_bf16).collect::<Vec<_>>()
                };
                // SAFETY: one thread.
                unsafe { writer.key(place, head, &row(0)) };
                // SAFETY: one thread.
                unsafe { writer.value(place, head, &row(1), slot == 4) };
            }
        }
        let page = kv.page(1, 1);
        for (i, got) in page.iter().enumerate() {
            let (d, slot, head, part) = (i % 40, i / 40 % 32, i / 1280 % 3, i / 3840);
            assert_eq!(*got, of(part, head, slot, d), "{part} {head} {slot} {d}");
        }
        assert!(kv.page(1, 0).iter().chain(&kv.page(0, 1)).all(|v| *v == 0.0));
        // SAFETY: one thread.
        unsafe { kv.writer().value(Place { layer: 1, page: 1, slot: 9 }, 2, &[0x3f80; 64], true) };
        let page = kv.page(1, 1);
        assert!(page[3840 + 2 * 1280 + 10 * 40..].iter().all(|v| *v == 0.0));
    }

    #[test]
    fn clearing_touches_what_comes_after_in_the_page_and_nothing_else() {
        use crate::cpu::lanes::to_bf16;
        let spec = KvSpec { layers: 1, kv_heads: 2, head_dim: 40, latent: None, pages: 2 };
        for slot in 0..PAGE_TOKENS {
            let mut kv = KvCache::new(&mut Arena::default(), spec).unwrap();
            kv.values.fill(to_bf16(3.0));
            // SAFETY: one thread.
            unsafe { kv.writer().value(Place { layer: 0, page: 1, slot }, 0, &[to_bf16(1.0); 64], true) };
            let (page, values) = (kv.page(0, 1), 2 * PAGE_TOKENS * 40);
            assert!(kv.page(0, 0).iter().chain(&page[..values]).all(|value| *value == 3.0), "keys and other pages");
            assert!(page[values + PAGE_TOKENS * 40..].iter().all(|value| *value == 3.0), "the other head");
            for (at, got) in page[values..values + PAGE_TOKENS * 40].chunks_exact(40).enumerate() {
                let want = [3.0, 1.0, 0.0][1 + usize::from(at > slot) - usize::from(at < slot)];
                assert!(got.iter().all(|value| *value == want), "token {at} after a write of {slot}");
            }
        }
    }

    #[test]
    fn a_page_of_latents_moves_with_its_values() {
        use crate::cpu::lanes::to_bf16;
        for (latent, head_dim) in [(64, 96), (40, 52), (33, 34)] {
            let spec = KvSpec { layers: 1, kv_heads: 1, head_dim, latent: Some(latent), pages: 2 };
            let [mut from, mut to] = [0; 2].map(|_| KvCache::new(&mut Arena::default(), spec).unwrap());
            to.values.fill(to_bf16(3.0));
            let writer = from.writer();
            for slot in 0..PAGE_TOKENS {
                let value = |d: usize, end: usize| if d < end { to_bf16((slot * 100 + d) as f32) } else { 0 };
                let row = |end: usize| (0..end.next_multiple_of(32)).map(|d| value(d, end)).collect::<Vec<_>>();
                let place = Place { layer: 0, page: 1, slot };
                // SAFETY: one thread.
                unsafe { writer.key(place, 0, &row(head_dim)) };
                // SAFETY: one thread.
                unsafe { writer.value(place, 0, &row(latent), slot == 0) };
            }
            let mut bytes = vec![0; from.page_bytes()];
            assert_eq!(bytes.len(), PAGE_TOKENS * head_dim * 2, "keys alone");
            from.read_page(0, 1, &mut bytes);
            to.write_page(0, 0, &bytes);
            assert!(to.keys(0, 0, 0) == from.keys(0, 1, 0), "keys of {latent}");
            assert!(to.values(0, 0, 0) == from.values(0, 1, 0), "values of {latent}");
            assert_eq!(to.page(0, 0), from.page(0, 1));
        }
    }

    #[test]
    fn a_page_moves_bit_for_bit() {
        for head_dim in [40, 64, 128] {
            let spec = KvSpec { layers: 2, kv_heads: 2, head_dim, latent: None, pages: 3 };
            let mut kv = KvCache::new(&mut Arena::default(), spec).unwrap();
            let bytes: Vec<u8> = (0..kv.page_bytes()).map(|i| (i * 131 % 251) as u8).collect();
            kv.write_page(1, 2, &bytes);
            let mut back = vec![0; bytes.len()];
            kv.read_page(1, 2, &mut back);
            assert!(back == bytes, "head_dim {head_dim}");
            // The kernels read the page as if they had written it: the same page as f32.
            let first = u16::from_le_bytes([bytes[0], bytes[1]]);
            assert_eq!(kv.page(1, 2)[0].to_bits(), from_bf16(first).to_bits());
            assert!(kv.page(1, 1).iter().chain(&kv.page(0, 2)).all(|value| *value == 0.0), "neighbours are untouched");
        }
    }
}
