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
//! Integers of 8 bits ([`KvFormat::Int8`]) lie in the same order, and attention expands them to bf16, exactly, a split at a time. Their scales lie beside:
//! `[layer][page][kv_head][K|V][token]`; one scale per key or value goes into its score or its weight.
//!
//! Prefill and decode read the same bytes with the same kernels as weights. Values beyond the newest token of a page are kept at
//! zero, since a weight of zero times a stale NaN would be NaN; stale keys need no care, their scores are masked by position.
//! The step that begins a page clears what it leaves of it; steps that go on in the page find it clear. Of integers the scales of values alone are
//! cleared.

use super::lanes::from_bf16;
use super::operand::Shared;
use super::pack::BLOCK;
use super::vector::PageScales;
use crate::device::{Feature, KernelError, KvFormat, KvSpec, PAGE_TOKENS};
use crate::host::{Arena, Region};

pub(super) struct KvCache {
    pub(super) spec: KvSpec,
    /// Number of blocks of 32 values of a key.
    pub(super) key_blocks: usize,
    /// Number of blocks of 32 values of a value.
    pub(super) value_blocks: usize,
    stored: Stored,
}

/// Keys and values of all layers, in blocks.
enum Stored {
    Halves(Region<u16>),
    /// Integers, and their scales by page and head.
    Codes {
        codes: Region<i8>,
        scales: Region<f32>,
    },
}

/// Scales of one page and head: K and V.
const SCALES: usize = 2 * PAGE_TOKENS;

/// A key or a value to write, padded to whole blocks with zeros.
#[derive(Clone, Copy)]
pub(super) enum Row<'a> {
    Halves(&'a [u16]),
    /// Integers and their scale.
    Codes(&'a [i8], f32),
}

/// Index of value `d` of token `slot` within the blocks of K.
fn key_at(slot: usize, d: usize) -> usize {
    d / 32 * BLOCK + slot / 16 * 512 + d % 32 / 2 * 32 + slot % 16 * 2 + d % 2
}

/// Index of value `d` of token `slot` within the blocks of V.
fn value_at(slot: usize, d: usize) -> usize {
    d / 32 * BLOCK + d % 32 / 16 * 512 + slot / 2 * 32 + d % 16 * 2 + slot % 2
}

/// Part, head and token of a row of a page in wire order.
fn place_of(row: usize, heads: usize) -> (usize, usize, usize) {
    (row / (PAGE_TOKENS * heads), row / PAGE_TOKENS % heads, row % PAGE_TOKENS)
}

impl KvCache {
    pub(super) fn new(arena: &mut Arena, spec: KvSpec) -> Result<Self, KernelError> {
        let value_dim = spec.latent.unwrap_or(spec.head_dim);
        if spec.latent.is_some() && (spec.kv_heads != 1 || value_dim > spec.head_dim) {
            let (name, got) = ("the KV cache".into(), vec![spec.kv_heads, spec.head_dim, value_dim]);
            return Err(KernelError::Shape { name, got, want: "one KV head whose key has the latent".into() });
        }
        if spec.latent.is_some() && spec.format != KvFormat::Own {
            let why = "latents are kept in bf16 alone".into();
            return Err(KernelError::Unavailable { what: Feature::IntegerKv.name().into(), why });
        }
        let (key_blocks, value_blocks) = (spec.head_dim.div_ceil(32), value_dim.div_ceil(32));
        let heads = [spec.layers, spec.pages, spec.kv_heads];
        let count = |each: usize| heads.iter().try_fold(each, |n, &d| n.checked_mul(d)).unwrap_or(usize::MAX);
        let (blocks, what) = ((key_blocks + value_blocks) * BLOCK, "the KV cache");
        let stored = match spec.format {
            KvFormat::Own => Stored::Halves(arena.alloc(count(blocks), what)?),
            KvFormat::Int8 => {
                Stored::Codes { codes: arena.alloc(count(blocks), what)?, scales: arena.alloc(count(SCALES), what)? }
            }
        };
        Ok(Self { spec, key_blocks, value_blocks, stored })
    }

    /// Index of one page and head.
    fn index(&self, layer: usize, page: usize, head: usize) -> usize {
        (layer * self.spec.pages + page) * self.spec.kv_heads + head
    }

    /// Values of the blocks of one page and head.
    fn size(&self) -> usize {
        (self.key_blocks + self.value_blocks) * BLOCK
    }

    /// Parts of a page that leaves the device: K and V, or K alone.
    fn parts(&self) -> usize {
        if self.spec.latent.is_some() { 1 } else { 2 }
    }

    /// Blocks of one page and head, K and then V, in bf16.
    ///
    /// # Panics
    /// If the cache keeps integers.
    pub(super) fn halves(&self, layer: usize, page: usize, head: usize) -> &[u16] {
        let Stored::Halves(values) = &self.stored else { panic!("the KV cache has integers") };
        &values[self.index(layer, page, head) * self.size()..][..self.size()]
    }

    /// Blocks of one page and head, K and then V, as integers, with their scales; `None` if the cache keeps bf16.
    pub(super) fn codes(&self, layer: usize, page: usize, head: usize) -> Option<(&[i8], &PageScales)> {
        let Stored::Codes { codes, scales } = &self.stored else { return None };
        let index = self.index(layer, page, head);
        let scales = scales[index * SCALES..][..SCALES].as_chunks::<16>().0;
        let scales = scales.as_array().expect("scales of 32 keys and 32 values");
        Some((&codes[index * self.size()..][..self.size()], scales))
    }

    /// True if pages are integers.
    pub(super) fn has_codes(&self) -> bool {
        matches!(self.stored, Stored::Codes { .. })
    }

    /// Writer that several threads share to store the keys and values of their rows.
    pub(super) fn writer(&mut self) -> KvWriter {
        let stored = match &mut self.stored {
            Stored::Halves(values) => Writable::Halves(Shared::new(values)),
            Stored::Codes { codes, scales } => {
                Writable::Codes { codes: Shared::new(codes), scales: Shared::new(scales) }
            }
        };
        KvWriter { stored, spec: self.spec, key_blocks: self.key_blocks, value_blocks: self.value_blocks }
    }

    /// Index of value `d` of token `slot` of a part (0 is K, 1 is V) within the blocks of one page and head.
    fn at(&self, part: usize, slot: usize, d: usize) -> usize {
        if part == 0 { key_at(slot, d) } else { self.key_blocks * BLOCK + value_at(slot, d) }
    }

    /// One page of one layer in the canonical order `[K|V][kv_head][token][dim]`.
    pub(super) fn page(&self, layer: usize, page: usize) -> Vec<f32> {
        let mut out = Vec::with_capacity(self.parts() * self.spec.kv_heads * PAGE_TOKENS * self.spec.head_dim);
        for part in 0..self.parts() {
            for head in 0..self.spec.kv_heads {
                for slot in 0..PAGE_TOKENS {
                    let at = (0..self.spec.head_dim).map(|d| self.at(part, slot, d));
                    match self.codes(layer, page, head) {
                        Some((codes, scales)) => {
                            let scale = scales.as_flattened()[part * PAGE_TOKENS + slot];
                            out.extend(at.map(|at| f32::from(codes[at]) * scale));
                        }
                        None => {
                            let blocks = self.halves(layer, page, head);
                            out.extend(at.map(|at| from_bf16(blocks[at])));
                        }
                    }
                }
            }
        }
        out
    }

    /// Bytes of one page of one layer in wire order.
    pub(super) fn page_bytes(&self) -> usize {
        self.parts() * self.spec.kv_heads * PAGE_TOKENS * self.row_bytes()
    }

    fn row_bytes(&self) -> usize {
        self.spec.format.row_bytes(self.spec.head_dim)
    }

    /// Copies a page out in wire order, `[K|V][kv_head][token][dim]` of bf16, or of integers behind their scale.
    pub(super) fn read_page(&self, layer: usize, page: usize, out: &mut [u8]) {
        assert_eq!(out.len(), self.page_bytes(), "bytes of a page");
        for (row, to) in out.chunks_exact_mut(self.row_bytes()).enumerate() {
            let (part, head, slot) = place_of(row, self.spec.kv_heads);
            match self.codes(layer, page, head) {
                Some((codes, scales)) => {
                    let (scale, to) = to.split_at_mut(size_of::<f32>());
                    scale.copy_from_slice(&scales.as_flattened()[part * PAGE_TOKENS + slot].to_le_bytes());
                    to.iter_mut().enumerate().for_each(|(d, to)| *to = codes[self.at(part, slot, d)] as u8);
                }
                None => {
                    let (blocks, (to, _)) = (self.halves(layer, page, head), to.as_chunks_mut::<2>());
                    to.iter_mut().enumerate().for_each(|(d, to)| *to = blocks[self.at(part, slot, d)].to_le_bytes());
                }
            }
        }
    }

    /// Writes a page from wire order; columns beyond the head's width become zero, as in pages that the device writes.
    pub(super) fn write_page(&mut self, layer: usize, page: usize, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.page_bytes(), "bytes of a page");
        let KvSpec { head_dim: dim, kv_heads: heads, latent, .. } = self.spec;
        let (first, size, row_bytes) = (self.index(layer, page, 0), self.size(), self.row_bytes());
        let is_padded = !dim.is_multiple_of(32) || latent.is_some_and(|latent| !latent.is_multiple_of(32));
        let rows = bytes.chunks_exact(row_bytes).enumerate().map(|(at, row)| (place_of(at, heads), row));
        let key_size = self.key_blocks * BLOCK;
        match &mut self.stored {
            Stored::Halves(values) => {
                let all = &mut values[first * size..][..heads * size];
                if is_padded {
                    all.fill(0);
                }
                for ((part, head, slot), row) in rows {
                    let (of_keys, of_values) = all[head * size..][..size].split_at_mut(key_size);
                    let (row, _) = row.as_chunks::<2>();
                    if part == 0 {
                        row.iter()
                            .enumerate()
                            .for_each(|(d, from)| of_keys[key_at(slot, d)] = u16::from_le_bytes(*from));
                    }
                    // The values of their own, or the latent at the front of the key.
                    let row = if part == 1 { row } else { &row[..latent.unwrap_or(0)] };
                    let values = row.iter().enumerate();
                    values.for_each(|(d, from)| of_values[value_at(slot, d)] = u16::from_le_bytes(*from));
                }
            }
            Stored::Codes { codes, scales } => {
                let all = &mut codes[first * size..][..heads * size];
                if is_padded {
                    all.fill(0);
                }
                for ((part, head, slot), row) in rows {
                    let (of_keys, of_values) = all[head * size..][..size].split_at_mut(key_size);
                    let Some((scale, row)) = row.split_first_chunk() else { unreachable!("rows begin with a scale") };
                    scales[(first + head) * SCALES + part * PAGE_TOKENS + slot] = f32::from_le_bytes(*scale);
                    let values = row.iter().map(|code| *code as i8).enumerate();
                    match part {
                        0 => values.for_each(|(d, code)| of_keys[key_at(slot, d)] = code),
                        _ => values.for_each(|(d, code)| of_values[value_at(slot, d)] = code),
                    }
                }
            }
        }
    }
}

/// Writer of single tokens; threads write different (token, head) pairs.
pub(super) struct KvWriter {
    stored: Writable,
    spec: KvSpec,
    key_blocks: usize,
    value_blocks: usize,
}

/// Pages that several threads write.
#[derive(Clone, Copy)]
enum Writable {
    Halves(Shared<u16>),
    Codes { codes: Shared<i8>, scales: Shared<f32> },
}

/// Position of a token in the cache.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) layer: usize,
    pub(super) page: usize,
    pub(super) slot: usize,
}

impl KvWriter {
    /// Index of one page and head; checks that they are in the cache, and the row of `blocks` blocks.
    fn index(&self, place: Place, head: usize, row: &Row<'_>, blocks: usize) -> usize {
        let spec = &self.spec;
        assert!(place.layer < spec.layers && place.page < spec.pages && head < spec.kv_heads, "place in the KV cache");
        let values = match row {
            Row::Halves(values) => values.len(),
            Row::Codes(values, _) => values.len(),
        };
        assert!(values == blocks * 32 && place.slot < PAGE_TOKENS, "place in a page");
        (place.layer * spec.pages + place.page) * spec.kv_heads + head
    }

    /// Address of the first value of a part in the blocks of a page and head.
    fn blocks<T: Copy>(&self, values: Shared<T>, index: usize, part: usize) -> *mut T {
        values.at((index * (self.key_blocks + self.value_blocks) + part * self.key_blocks) * BLOCK)
    }

    /// Writes a key.
    ///
    /// # Safety
    /// No other thread writes this token and head now, and none reads the page.
    pub(super) unsafe fn key(&self, place: Place, head: usize, row: Row<'_>) {
        let index = self.index(place, head, &row, self.key_blocks);
        match (self.stored, row) {
            // SAFETY: the place and the size of the row are checked; passed on to the caller.
            (Writable::Halves(values), Row::Halves(row)) => unsafe {
                key(self.blocks(values, index, 0), place.slot, row)
            },
            (Writable::Codes { codes, scales }, Row::Codes(row, scale)) => {
                // SAFETY: as above.
                unsafe { key(self.blocks(codes, index, 0), place.slot, row) };
                // SAFETY: as above; each token and head has a scale of its own.
                unsafe { scales.set(index * SCALES + place.slot, scale) };
            }
            _ => panic!("a row in the form of the KV cache"),
        }
    }

    /// Writes a value; `clears`: the rest of the page becomes zero, of integers their scales.
    ///
    /// # Safety
    /// As [`KvWriter::key`]; with `clears`, no other thread writes later tokens of the page.
    pub(super) unsafe fn value(&self, place: Place, head: usize, row: Row<'_>, clears: bool) {
        let index = self.index(place, head, &row, self.value_blocks);
        match (self.stored, row) {
            (Writable::Halves(values), Row::Halves(row)) => {
                // SAFETY: the place and the size of the row are checked; passed on to the caller.
                unsafe { value(self.blocks(values, index, 1), place.slot, row, clears) }
            }
            (Writable::Codes { codes, scales }, Row::Codes(row, scale)) => {
                // SAFETY: as above. Integers of later tokens may be what they are: the weight of such a token is zero.
                unsafe { value(self.blocks(codes, index, 1), place.slot, row, false) };
                let at = index * SCALES + PAGE_TOKENS + place.slot;
                let count = if clears { PAGE_TOKENS - place.slot } else { 1 };
                // SAFETY: as above; with `clears` the scales of later tokens are nobody's either.
                let scales = unsafe { scales.slice(at, count) };
                scales.fill(0.0);
                scales[0] = scale;
            }
            _ => panic!("a row in the form of the KV cache"),
        }
    }
}

/// Writes a key into the blocks at `blocks`, two values at a time.
///
/// # Safety
/// The blocks of the key are behind `blocks`, and the token's places in them nobody else's.
unsafe fn key<T: Copy>(blocks: *mut T, slot: usize, values: &[T]) {
    for (block, values) in values.as_chunks::<32>().0.iter().enumerate() {
        for (pair, values) in values.as_chunks::<2>().0.iter().enumerate() {
            let at = key_at(slot, block * 32 + pair * 2);
            // SAFETY: inside of the key's blocks, and this thread's alone (the caller's promise).
            unsafe { blocks.add(at).cast::<[T; 2]>().write(*values) };
        }
    }
}

/// Writes a value into the blocks at `blocks`; `clears`: the rest of the page becomes zero.
///
/// # Safety
/// As [`key`]; with `clears` no other thread has later tokens of the page.
unsafe fn value<T: Copy + Default>(blocks: *mut T, slot: usize, values: &[T], clears: bool) {
    for (tile, values) in values.as_chunks::<16>().0.iter().enumerate() {
        let start = value_at(slot, tile * 16);
        for (d, &value) in values.iter().enumerate() {
            // SAFETY: inside of the value's blocks, and this thread's alone (the caller's promise).
            unsafe { blocks.add(start + d * 2).write(value) };
            if clears && slot.is_multiple_of(2) {
                // SAFETY: the other token of the pair, in the same tile; nobody writes it now (the caller's promise).
                unsafe { blocks.add(start + d * 2 + 1).write(T::default()) };
            }
        }
        // The pairs behind this token's are one run to the end of the tile.
        let next = slot / 2 + 1;
        if clears && next < PAGE_TOKENS / 2 {
            // SAFETY: from the next pair to the end of the tile of 512 values; nobody writes these now.
            unsafe { blocks.add(value_at(next * 2, tile * 16)).write_bytes(0, 512 - next * 32) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(kv: &mut KvCache, value: u16) {
        let Stored::Halves(values) = &mut kv.stored else { panic!("bf16") };
        values.fill(value);
    }

    #[test]
    fn tokens_come_back_in_canonical_order() {
        use crate::cpu::lanes::to_bf16;
        let spec = KvSpec { layers: 2, kv_heads: 3, head_dim: 40, latent: None, format: KvFormat::Own, pages: 2 };
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
                unsafe { writer.key(place, head, Row::Halves(&row(0))) };
                // SAFETY: one thread.
                unsafe { writer.value(place, head, Row::Halves(&row(1)), slot == 4) };
            }
        }
        let page = kv.page(1, 1);
        for (i, got) in page.iter().enumerate() {
            let (d, slot, head, part) = (i % 40, i / 40 % 32, i / 1280 % 3, i / 3840);
            assert_eq!(*got, of(part, head, slot, d), "{part} {head} {slot} {d}");
        }
        assert!(kv.page(1, 0).iter().chain(&kv.page(0, 1)).all(|v| *v == 0.0));
        // SAFETY: one thread.
        unsafe { kv.writer().value(Place { layer: 1, page: 1, slot: 9 }, 2, Row::Halves(&[0x3f80; 64]), true) };
        let page = kv.page(1, 1);
        assert!(page[3840 + 2 * 1280 + 10 * 40..].iter().all(|v| *v == 0.0));
    }

    #[test]
    fn clearing_touches_what_comes_after_in_the_page_and_nothing_else() {
        use crate::cpu::lanes::to_bf16;
        let spec = KvSpec { layers: 1, kv_heads: 2, head_dim: 40, latent: None, format: KvFormat::Own, pages: 2 };
        for slot in 0..PAGE_TOKENS {
            let mut kv = KvCache::new(&mut Arena::default(), spec).unwrap();
            fill(&mut kv, to_bf16(3.0));
            // SAFETY: one thread.
            unsafe { kv.writer().value(Place { layer: 0, page: 1, slot }, 0, Row::Halves(&[to_bf16(1.0); 64]), true) };
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
            let spec =
                KvSpec { layers: 1, kv_heads: 1, head_dim, latent: Some(latent), format: KvFormat::Own, pages: 2 };
            let [mut from, mut to] = [0; 2].map(|_| KvCache::new(&mut Arena::default(), spec).unwrap());
            fill(&mut to, to_bf16(3.0));
            let writer = from.writer();
            for slot in 0..PAGE_TOKENS {
                let value = |d: usize, end: usize| if d < end { to_bf16((slot * 100 + d) as f32) } else { 0 };
                let row = |end: usize| (0..end.next_multiple_of(32)).map(|d| value(d, end)).collect::<Vec<_>>();
                let place = Place { layer: 0, page: 1, slot };
                // SAFETY: one thread.
                unsafe { writer.key(place, 0, Row::Halves(&row(head_dim))) };
                // SAFETY: one thread.
                unsafe { writer.value(place, 0, Row::Halves(&row(latent)), slot == 0) };
            }
            let mut bytes = vec![0; from.page_bytes()];
            assert_eq!(bytes.len(), PAGE_TOKENS * head_dim * 2, "keys alone");
            from.read_page(0, 1, &mut bytes);
            to.write_page(0, 0, &bytes);
            assert!(to.halves(0, 0, 0) == from.halves(0, 1, 0), "keys and values of {latent}");
            assert_eq!(to.page(0, 0), from.page(0, 1));
        }
    }

    #[test]
    fn integers_come_back_with_their_scales_and_later_values_are_nothing() {
        let spec = KvSpec { layers: 1, kv_heads: 2, head_dim: 40, latent: None, format: KvFormat::Int8, pages: 2 };
        let mut kv = KvCache::new(&mut Arena::default(), spec).unwrap();
        let code = |part: usize, slot: usize, d: usize| if d < 40 { (part * 64 + slot + d) as i8 } else { 0 };
        let scale = |part: usize, slot: usize| (1 + part + 2 * slot) as f32;
        let write = |kv: &mut KvCache, slot: usize, clears: bool| {
            let row = |part: usize| (0..64).map(|d| code(part, slot, d)).collect::<Vec<_>>();
            let place = Place { layer: 0, page: 1, slot };
            // SAFETY: one thread.
            unsafe { kv.writer().key(place, 1, Row::Codes(&row(0), scale(0, slot))) };
            // SAFETY: one thread.
            unsafe { kv.writer().value(place, 1, Row::Codes(&row(1), scale(1, slot)), clears) };
        };
        (0..PAGE_TOKENS).for_each(|slot| write(&mut kv, slot, false));
        let of_head = |kv: &KvCache, part: usize| {
            let at = (part * 2 + 1) * PAGE_TOKENS * 40;
            kv.page(0, 1)[at..at + PAGE_TOKENS * 40].to_vec()
        };
        for part in 0..2 {
            for (i, got) in of_head(&kv, part).into_iter().enumerate() {
                let (slot, d) = (i / 40, i % 40);
                assert_eq!(got, f32::from(code(part, slot, d)) * scale(part, slot), "{part} {slot} {d}");
            }
        }
        assert!(kv.page(0, 0).iter().all(|value| *value == 0.0), "the other page");
        let keys = of_head(&kv, 0);
        write(&mut kv, 9, true);
        assert_eq!(of_head(&kv, 0), keys, "keys stay");
        let values = of_head(&kv, 1);
        assert!(
            values[..10 * 40].iter().skip(40).any(|value| *value != 0.0) && values[10 * 40..].iter().all(|v| *v == 0.0)
        );
    }

    #[test]
    fn a_page_moves_bit_for_bit() {
        let formats = [KvFormat::Own, KvFormat::Int8];
        for (head_dim, format) in [40, 64, 128].into_iter().flat_map(|dim| formats.map(|format| (dim, format))) {
            let spec = KvSpec { layers: 2, kv_heads: 2, head_dim, latent: None, format, pages: 3 };
            let mut kv = KvCache::new(&mut Arena::default(), spec).unwrap();
            let bytes: Vec<u8> = (0..kv.page_bytes()).map(|i| (i * 131 % 251) as u8).collect();
            kv.write_page(1, 2, &bytes);
            let mut back = vec![0; bytes.len()];
            kv.read_page(1, 2, &mut back);
            assert!(back == bytes, "head_dim {head_dim}, {format:?}");
            // The kernels read the page as if they had written it: the same page as f32.
            let first = match (format, bytes.as_chunks::<4>().0[0], bytes[4]) {
                (KvFormat::Own, [a, b, ..], _) => from_bf16(u16::from_le_bytes([a, b])),
                (KvFormat::Int8, scale, code) => f32::from(code as i8) * f32::from_le_bytes(scale),
            };
            assert_eq!(kv.page(1, 2)[0].to_bits(), first.to_bits());
            assert!(kv.page(1, 1).iter().chain(&kv.page(0, 2)).all(|value| *value == 0.0), "neighbours are untouched");
        }
    }
}
