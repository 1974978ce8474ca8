//! Block formats of GGUF: rows of weights as small integers with scales, decoded here, once, for every device.
//!
//! A block is 32 weights with one scale, or 256 weights with one scale and an integer sub-scale per 32 or 16 of them. All of them mean
//!
//! ```text
//! weight = scale · sub_scale · (value − zero) + minimum · sub_minimum
//! ```
//!
//! with `scale` and `minimum` in f16, `value` an integer of at most 8 bits, and sub-scales and sub-minima of 1 where a format has none. MXFP4's values
//! are those that its codes stand for ([`LEVELS`]), and its scales are in bf16, which has all of its powers of two.
//! The byte layouts follow `ggml-common.h` and `ggml-quants.c` of llama.cpp.

use crate::format::DType;

/// Weights that share a line of activations: every format's blocks are multiples of it.
pub(crate) const LINE: usize = 32;

/// Integers of a block format, by the formula above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Bits in which a device holds a value: 4 and 6 are unsigned, 8 is signed.
    pub(crate) bits: u8,
    /// Offset that is subtracted from each value; 0 where values are signed or have a minimum.
    pub(crate) zero: u8,
    /// Lines that share a scale: 1 or 8.
    pub(crate) lines: usize,
    /// Sub-scales per line: 0, 1 or 2.
    pub(crate) subs: usize,
    /// True if the format has minima.
    pub(crate) minimum: bool,
    /// True if values are held as MXFP4's codes, and scales in bf16.
    pub(crate) codes: bool,
}

const fn layout(bits: u8, zero: u8, lines: usize, subs: usize, minimum: bool) -> Option<Layout> {
    Some(Layout { bits, zero, lines, subs, minimum, codes: false })
}

impl Layout {
    /// Integers of a stored format; `None` if it is held as floating-point numbers.
    pub(crate) const fn of(dtype: DType) -> Option<Layout> {
        match dtype {
            DType::Bf16 | DType::F16 | DType::F32 => None,
            DType::Q8_0 | DType::Iq4Nl => layout(8, 0, 1, 0, false),
            DType::Iq4Xs => layout(8, 0, 8, 1, false),
            DType::Q4_0 => layout(4, 8, 1, 0, false),
            DType::Q4_1 => layout(4, 0, 1, 0, true),
            DType::Q5_0 => layout(6, 16, 1, 0, false),
            DType::Q5_1 => layout(6, 0, 1, 0, true),
            DType::Q2K => layout(4, 0, 8, 2, true),
            DType::Q3K => layout(4, 4, 8, 2, false),
            DType::Q4K => layout(4, 0, 8, 1, true),
            DType::Q5K => layout(6, 0, 8, 1, true),
            DType::Q6K => layout(6, 32, 8, 2, false),
            DType::Mxfp4 => Some(Layout { bits: 4, zero: 12, lines: 1, subs: 0, minimum: false, codes: true }),
        }
    }

    /// Value that is held as `held`, before the zero is subtracted; 8 bits are two's complement.
    #[inline(always)]
    pub(crate) fn value(self, held: u8) -> i32 {
        match (self.codes, self.bits) {
            (true, _) => i32::from(LEVELS[usize::from(held)]),
            (false, 8) => i32::from(held as i8),
            (false, _) => i32::from(held),
        }
    }

    /// Number that a scale's bits are.
    #[inline(always)]
    pub(crate) fn scale(self, bits: u16) -> f32 {
        if self.codes { f32::from_bits(u32::from(bits) << 16) } else { from_f16(bits) }
    }
}

/// One row of a block format in its integers. Vectors are reused from row to row.
#[derive(Debug, Default)]
pub(crate) struct RowBlocks {
    /// Values, or codes of values, `[columns]`; signed ones as two's complement.
    pub(crate) values: Vec<u8>,
    /// Scales in f16, those of codes in bf16, `[columns / (32 · lines)]`.
    pub(crate) scales: Vec<u16>,
    /// Minima in f16, signed as they are added, `[columns / (32 · lines)]`; zeros where the format has none.
    pub(crate) minima: Vec<u16>,
    /// Sub-scales, `[columns / 32][2]`; a format with fewer repeats them.
    pub(crate) sub_scales: Vec<[i8; 2]>,
    /// Sub-minima, `[columns / 32][2]`; a format with fewer repeats them.
    pub(crate) sub_minima: Vec<[u8; 2]>,
}

impl RowBlocks {
    /// Decodes a row of `columns` weights. `bytes`: whole blocks of a format that has a [`Layout`].
    pub(crate) fn decode(&mut self, dtype: DType, columns: usize, bytes: &[u8]) {
        let layout = Layout::of(dtype).expect("a format of integers");
        let (block, size) = dtype.block();
        self.values.resize(columns, 0);
        self.scales.clear();
        self.minima.clear();
        self.sub_scales.clear();
        self.sub_minima.clear();
        for (bytes, values) in bytes.chunks_exact(size).zip(self.values.chunks_exact_mut(block)) {
            let mut sub = Subs { scales: [[1; 2]; 8], minima: [[1; 2]; 8] };
            let [scale, minimum] = decode_block(dtype, bytes, values, &mut sub);
            self.scales.push(scale);
            self.minima.push(minimum);
            self.sub_scales.extend_from_slice(&sub.scales[..layout.lines]);
            self.sub_minima.extend_from_slice(&sub.minima[..layout.lines]);
        }
    }

    /// Writes the weights as f32, by the formula of this module. `out`: `[columns]`.
    pub(crate) fn to_f32(&self, layout: Layout, out: &mut [f32]) {
        for (k, (out, values)) in out.chunks_exact_mut(LINE).zip(self.values.chunks_exact(LINE)).enumerate() {
            let (scale, minimum) =
                (layout.scale(self.scales[k / layout.lines]), from_f16(self.minima[k / layout.lines]));
            for (i, (out, &value)) in out.iter_mut().zip(values).enumerate() {
                let (sub_scale, sub_minimum) = (self.sub_scales[k][i / 16], self.sub_minima[k][i / 16]);
                *out = weight(
                    scale * f32::from(sub_scale),
                    layout.value(value) - i32::from(layout.zero),
                    minimum,
                    sub_minimum,
                );
            }
        }
    }
}

/// One weight. The products are exact in f32 (at most 11 + 7 + 6 bits), so the sum is rounded once.
#[inline(always)]
pub(crate) fn weight(scale: f32, value: i32, minimum: f32, sub_minimum: u8) -> f32 {
    scale * value as f32 + minimum * f32::from(sub_minimum)
}

/// Converts the bits of a half-precision number, exactly.
#[inline(always)]
pub(crate) fn from_f16(bits: u16) -> f32 {
    half::f16::from_bits(bits).to_f32()
}

struct Subs {
    scales: [[i8; 2]; 8],
    minima: [[u8; 2]; 8],
}

/// Values of the codes of IQ4_NL and IQ4_XS.
const IQ4_NL: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Twice the values of MXFP4's codes (E2M1), plus 12: its zero.
pub(crate) const LEVELS: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// Changes the sign of a half-precision number.
fn negated(bits: u16) -> u16 {
    bits ^ 0x8000
}

/// Decodes one block: values and sub-scales into place; returns scale and minimum.
fn decode_block(dtype: DType, bytes: &[u8], values: &mut [u8], sub: &mut Subs) -> [u16; 2] {
    match dtype {
        DType::Q8_0 => values.copy_from_slice(&bytes[2..34]),
        DType::Q4_0 => nibbles(&bytes[2..18], values),
        DType::Q4_1 => nibbles(&bytes[4..20], values),
        DType::Iq4Nl => {
            nibbles(&bytes[2..18], values);
            from_levels(values);
        }
        DType::Iq4Xs => return decode_iq4xs(bytes, values, sub),
        DType::Q5_0 => fifth_bits(&bytes[2..6], &bytes[6..22], values),
        DType::Q5_1 => fifth_bits(&bytes[4..8], &bytes[8..24], values),
        DType::Q2K => return decode_q2k(bytes, values, sub),
        DType::Q3K => return decode_q3k(bytes, values, sub),
        DType::Q4K | DType::Q5K => return decode_q45k(dtype, bytes, values, sub),
        DType::Q6K => return decode_q6k(bytes, values, sub),
        DType::Mxfp4 => {
            nibbles(&bytes[1..], values);
            return [mxfp4_scale(bytes[0]), 0];
        }
        DType::Bf16 | DType::F16 | DType::F32 => unreachable!("no format of integers"),
    }
    let minimum = if matches!(dtype, DType::Q4_1 | DType::Q5_1) { u16_at(bytes, 2) } else { 0 };
    [u16_at(bytes, 0), minimum]
}

/// Nibbles of a line: the low ones first, then the high ones.
fn nibbles(packed: &[u8], values: &mut [u8]) {
    let (low, high) = values.split_at_mut(packed.len());
    for ((low, high), byte) in low.iter_mut().zip(high).zip(packed) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
}

/// Replaces codes of IQ4_NL and IQ4_XS by their values.
fn from_levels(values: &mut [u8]) {
    values.iter_mut().for_each(|value| *value = IQ4_NL[usize::from(*value)] as u8);
}

fn fifth_bits(bits: &[u8], packed: &[u8], values: &mut [u8]) {
    nibbles(packed, values);
    for (i, value) in values.iter_mut().enumerate() {
        *value |= (bits[i / 8] >> (i % 8) & 1) << 4;
    }
}

fn decode_q2k(bytes: &[u8], values: &mut [u8], sub: &mut Subs) -> [u16; 2] {
    let (scales, packed) = (&bytes[..16], &bytes[16..80]);
    for (e, value) in values.iter_mut().enumerate() {
        *value = packed[e / 128 * 32 + e % 32] >> (e % 128 / 32 * 2) & 3;
    }
    for (i, scale) in scales.iter().enumerate() {
        sub.scales[i / 2][i % 2] = (scale & 15) as i8;
        sub.minima[i / 2][i % 2] = scale >> 4;
    }
    [u16_at(bytes, 80), negated(u16_at(bytes, 82))]
}

fn decode_q3k(bytes: &[u8], values: &mut [u8], sub: &mut Subs) -> [u16; 2] {
    let (mask, packed, scales) = (&bytes[..32], &bytes[32..96], &bytes[96..108]);
    for (e, value) in values.iter_mut().enumerate() {
        let low = packed[e / 128 * 32 + e % 32] >> (e % 128 / 32 * 2) & 3;
        *value = low | (mask[e % 32] >> (e / 32) & 1) << 2;
    }
    for i in 0..16 {
        let low = if i < 8 { scales[i] & 15 } else { scales[i - 8] >> 4 };
        let high = scales[8 + i % 4] >> (i / 4 * 2) & 3;
        sub.scales[i / 2][i % 2] = (low | high << 4) as i8 - 32;
    }
    [u16_at(bytes, 108), 0]
}

fn decode_q45k(dtype: DType, bytes: &[u8], values: &mut [u8], sub: &mut Subs) -> [u16; 2] {
    let (scales, rest) = (&bytes[4..16], &bytes[16..]);
    let (fifth, packed) = if dtype == DType::Q5K { rest.split_at(32) } else { rest.split_at(0) };
    for (packed, values) in packed.chunks_exact(32).zip(values.chunks_exact_mut(64)) {
        nibbles(packed, values);
    }
    if dtype == DType::Q5K {
        for (e, value) in values.iter_mut().enumerate() {
            *value |= (fifth[e % 32] >> (e / 32) & 1) << 4;
        }
    }
    for line in 0..8 {
        // Six bits each: the first four pairs whole in eight bytes, the other four in the nibbles of four bytes and the
        // high bits of those eight.
        let (scale, minimum) = if line < 4 {
            (scales[line] & 63, scales[line + 4] & 63)
        } else {
            let nibbles = scales[line + 4];
            (nibbles & 15 | (scales[line - 4] >> 6) << 4, nibbles >> 4 | (scales[line] >> 6) << 4)
        };
        (sub.scales[line], sub.minima[line]) = ([scale as i8; 2], [minimum; 2]);
    }
    [u16_at(bytes, 0), negated(u16_at(bytes, 2))]
}

fn decode_q6k(bytes: &[u8], values: &mut [u8], sub: &mut Subs) -> [u16; 2] {
    let (low, high, scales) = (&bytes[..128], &bytes[128..192], &bytes[192..208]);
    for (e, value) in values.iter_mut().enumerate() {
        let (half, part, l) = (e / 128, e % 128 / 32, e % 32);
        let nibble = low[half * 64 + part % 2 * 32 + l] >> (part / 2 * 4) & 15;
        *value = nibble | (high[half * 32 + l] >> (part * 2) & 3) << 4;
    }
    for (i, &scale) in scales.iter().enumerate() {
        sub.scales[i / 2][i % 2] = scale as i8;
    }
    [u16_at(bytes, 208), 0]
}

fn decode_iq4xs(bytes: &[u8], values: &mut [u8], sub: &mut Subs) -> [u16; 2] {
    let (high, low, packed) = (u16_at(bytes, 2), &bytes[4..8], &bytes[8..136]);
    for (packed, values) in packed.chunks_exact(16).zip(values.chunks_exact_mut(LINE)) {
        nibbles(packed, values);
    }
    from_levels(values);
    for (line, scales) in sub.scales.iter_mut().enumerate() {
        let four = low[line / 2] >> (line % 2 * 4) & 15;
        let two = (high >> (2 * line) & 3) as u8;
        *scales = [(four | two << 4) as i8 - 32; 2];
    }
    [u16_at(bytes, 0), 0]
}

/// Half of `2^(exponent − 127)` in bf16, since the levels are twice the codes' values.
fn mxfp4_scale(exponent: u8) -> u16 {
    let exponent = u16::from(exponent);
    // The two smallest are subnormal.
    if exponent < 2 { 0x20 << exponent } else { (exponent - 1) << 7 }
}

#[cfg(test)]
mod tests {
    use crate::device::{DType, HostTensor, RowOrder};
    use crate::source::Source;

    fn bytes(hex: &str) -> Vec<u8> {
        hex.as_bytes().chunks(2).map(|two| u8::from_str_radix(str::from_utf8(two).unwrap(), 16).unwrap()).collect()
    }

    #[test]
    fn weights_are_those_of_the_formats_own_library() {
        let mut seen = Vec::new();
        for line in include_str!("../../tests/goldens/blocks.txt").lines() {
            let mut words = line.split(' ');
            let name = words.next().unwrap();
            let dtype = DType::ALL.into_iter().find(|dtype| dtype.name() == name).unwrap();
            let (blocks, want) = (bytes(words.next().unwrap()), bytes(words.next().unwrap()));
            let tensor =
                HostTensor { name, dtype, shape: &[1, 256], bytes: &blocks, order: RowOrder::Plain, reader: None };
            let got = Source::new(&tensor, 2).unwrap().to_f32();
            for (i, (got, want)) in got.iter().zip(want.as_chunks::<4>().0).enumerate() {
                assert_eq!(*got, f32::from_le_bytes(*want), "{name} [{i}]");
            }
            seen.push(dtype);
        }
        assert!(DType::ALL.into_iter().filter(|dtype| dtype.is_blocks()).all(|dtype| seen.contains(&dtype)));
    }

    #[test]
    fn rows_in_pairs_are_read_as_halves() {
        let values: Vec<u8> = (0..8u32).flat_map(|row| (row as f32).to_le_bytes()).collect();
        let order = RowOrder::Pairs { head_dim: 4, plain: 0, rotated: 4 };
        let tensor = HostTensor { name: "q", dtype: DType::F32, shape: &[8, 1], bytes: &values, order, reader: None };
        // A head (a0 a1 b0 b1) is stored as a0 b0 a1 b1.
        let want = [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0];
        assert_eq!(Source::new(&tensor, 2).unwrap().to_f32(), want);
        let bias = HostTensor { shape: &[8], ..tensor.clone() };
        assert_eq!(Source::new(&bias, 1).unwrap().to_vector(), want);
        for (head_dim, plain, rotated) in [(3, 0, 3), (4, 0, 3), (4, 0, 0), (4, 2, 4), (4, usize::MAX, 2)] {
            let torn = HostTensor { order: RowOrder::Pairs { head_dim, plain, rotated }, ..tensor.clone() };
            assert!(Source::new(&torn, 2).is_err(), "{head_dim} {plain} {rotated}");
        }
        // A head (p a0 a1 b0 b1 q q q) is stored as p a0 b0 a1 b1 q q q.
        let between = HostTensor { order: RowOrder::Pairs { head_dim: 8, plain: 1, rotated: 4 }, ..tensor };
        assert_eq!(Source::new(&between, 2).unwrap().to_f32(), [0.0, 1.0, 3.0, 2.0, 4.0, 5.0, 6.0, 7.0]);
    }
}
