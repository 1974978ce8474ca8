//! Rules of normalization of a SentencePiece model (`precompiled_charsmap`): a trie of what is replaced, and the texts that replace it.
//!
//! ```text
//! u32 size of the trie in bytes | units of the trie, u32 each | texts, each ended by a NUL
//! ```
//!
//! All numbers are little-endian. A unit is a node, with a label (bits 0 to 7), a flag that it ends a key (bit 8) and the distance to its children
//! (bits 10 to 30, times 256 if bit 9 is set), or the end of a key (bit 31), with the index of its text. The child for a byte lies at (index of the node) ^
//! distance ^ byte, the end of a key at (index) ^ distance (Yata et al., darts-clone). The library that walks the trie checks no index, so all are
//! checked here.

use crate::{Gguf, GgufError, Value};

const KEY: &str = "tokenizer.ggml.precompiled_charsmap";
/// Flag of a unit that is the end of a key.
const IS_END: u32 = 1 << 31;
/// Longest text that replaces another, in bytes: each letter of a prompt may become one. The longest of Unicode's
/// compatibility forms has 33 (U+FDFA).
const TEXT_BYTES_MAX: usize = 256;

/// Rules of the file; `None` if it has none.
pub(crate) fn read(gguf: &Gguf) -> Result<Option<Vec<u8>>, GgufError> {
    let list = match gguf.metadata.get(KEY) {
        None => return Ok(None),
        Some(Value::Integers(list)) if list.is_empty() => return Ok(None),
        Some(Value::Integers(list)) => list,
        Some(other) => return Err(gguf.refuse(KEY, format!("is {}, needs a list of bytes", other.shown()))),
    };
    // Converters write bytes with a sign or without.
    let byte = |number: &i64| (-128..256).contains(number).then_some(*number as u8);
    let bytes: Option<Vec<u8>> = list.iter().map(byte).collect();
    let sound = bytes.filter(|bytes| is_sound(bytes));
    let refused = || {
        let reason = "is damaged: an index leads out of the rules, or a text is too long";
        gguf.refuse(KEY, reason).help("fetch the file again, or serve the original checkpoint with its tokenizer.json")
    };
    sound.map(Some).ok_or_else(refused)
}

/// Returns true if no walk through the trie leaves it, and every end of a key has a text, which is short.
fn is_sound(bytes: &[u8]) -> bool {
    let Some((size, rest)) = bytes.split_first_chunk::<4>() else { return false };
    let size = u32::from_le_bytes(*size) as usize;
    if size == 0 || !size.is_multiple_of(4) || size > rest.len() {
        return false;
    }
    let (units, texts) = rest.split_at(size);
    let units: Vec<u32> = units.as_chunks::<4>().0.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
    let Ok(texts) = std::str::from_utf8(texts) else { return false };
    let has_text = |unit: u32| {
        let at = (unit & !IS_END) as usize;
        let is_within = unit & IS_END != 0 && at < texts.len() && texts.is_char_boundary(at);
        is_within && texts.as_bytes()[at..].iter().take(TEXT_BYTES_MAX + 1).any(|byte| *byte == 0)
    };
    let is_node_sound = |at: usize, unit: u32| {
        let children = at ^ ((unit >> 10) << ((unit & (1 << 9)) >> 6)) as usize;
        let ends_key = unit & (1 << 8) != 0;
        // The walk begins at the first unit without a look at its flags; with a label it may come back there.
        let is_root = at == 0 && (unit & IS_END != 0 || unit & 0xff == 0);
        (children | 0xff) < units.len() && (is_root || !ends_key || has_text(units[children]))
    };
    let is_unit_sound = |(at, unit): (usize, &u32)| match at > 0 && unit & IS_END != 0 {
        true => has_text(*unit),
        false => is_node_sound(at, *unit),
    };
    texts.ends_with('\0') && units.iter().enumerate().all(is_unit_sound)
}

/// Longest text of the rules in base64, in bytes, as a tokenizer.json holds them; `None` if they are no base64, an index leads
/// out of them, or a text is too long.
pub fn longest_of_charsmap(text: &str) -> Option<usize> {
    let bytes = from_base64(text)?;
    let size = u32::from_le_bytes(*bytes.first_chunk()?) as usize;
    let texts = is_sound(&bytes).then(|| bytes.get(4 + size..))??;
    texts.split(|byte| *byte == 0).map(|text| text.len().min(TEXT_BYTES_MAX)).max()
}

/// Bytes of a text in base64 with its padding; `None`: it is something else.
fn from_base64(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=').bytes().map(|digit| match digit {
        b'A'..=b'Z' => Some(digit - b'A'),
        b'a'..=b'z' => Some(digit - b'a' + 26),
        b'0'..=b'9' => Some(digit - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    });
    let digits: Vec<u8> = digits.collect::<Option<_>>()?;
    if !text.len().is_multiple_of(4) || text.len() - digits.len() > 2 {
        return None;
    }
    let group = |group: &[u8]| {
        let bits = group.iter().fold(0_u32, |bits, digit| bits << 6 | u32::from(*digit)) << (6 * (4 - group.len()));
        bits.to_be_bytes().into_iter().skip(1).take(group.len() - 1).collect::<Vec<u8>>()
    };
    Some(digits.chunks(4).flat_map(group).collect())
}

/// Bytes in base64 (RFC 4648, section 4).
pub(crate) fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits = group.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
        for at in 0..4 {
            let digit = char::from(DIGITS[(bits >> (18 - 6 * at) & 63) as usize]);
            text.push(if at <= group.len() { digit } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_the_rfc() {
        let all =
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("foobar", "Zm9vYmFy")];
        for (bytes, text) in all {
            assert_eq!(base64(bytes.as_bytes()), text);
            assert_eq!(from_base64(text).as_deref(), Some(bytes.as_bytes()));
        }
        assert_eq!(base64(&[0xff, 0xef, 0xbe]), "/+++");
        assert_eq!(from_base64("/+++").as_deref(), Some(&[0xff, 0xef, 0xbe][..]));
        for text in ["Zg", "Zg=", "Z===", "====", "Zg==Zg==", "Z.==", "Zg==="] {
            assert_eq!(from_base64(text), None, "{text}");
        }
    }

    /// Trie of the one key "a", whose text begins at `text`.
    fn rules(text: u32) -> Vec<u8> {
        let mut units = vec![0u32; 1024];
        units[0] = 256 << 10;
        units[256 ^ usize::from(b'a')] = 512 << 10 | 1 << 8 | u32::from(b'a');
        units[256 ^ 512 ^ usize::from(b'a')] = IS_END | text;
        let bytes = units.iter().flat_map(|unit| unit.to_le_bytes());
        4096u32.to_le_bytes().into_iter().chain(bytes).chain("é\0b\0".bytes()).collect()
    }

    #[test]
    fn indices_that_lead_out_are_found() {
        assert!(is_sound(&rules(0)) && is_sound(&rules(3)));
        // In the middle of a letter, at the end of the texts, behind it.
        assert!([1, 5, 1 << 20].iter().all(|text| !is_sound(&rules(*text))));
        let good = rules(0);
        assert!((0..=4 + 4096 + 2).all(|cut| !is_sound(&good[..cut])));
        let with = |at: usize, unit: u32| {
            let mut bytes = good.clone();
            bytes[4 + 4 * at..][..4].copy_from_slice(&unit.to_le_bytes());
            bytes
        };
        let node = 256 ^ usize::from(b'a');
        assert!(is_sound(&with(3, 256 << 10)));
        assert!(!is_sound(&with(0, 1024 << 10)), "children behind the trie");
        assert!(!is_sound(&with(0, IS_END | 1 << 20)), "a first unit that looks like an end");
        assert!(!is_sound(&with(node, 4 << 10 | 1 << 9 | u32::from(b'a'))), "a distance times 256");
        assert!(!is_sound(&with(node, 256 << 10 | 1 << 8 | u32::from(b'a'))), "a key that ends nowhere");
        // The first unit has a label and ends a key, and the units below 256 are children of another one.
        let first = 256 << 10 | 1 << 8;
        assert!(is_sound(&with(0, first)), "the empty key, which no walk asks for");
        assert!(!is_sound(&with(0, first | u32::from(b'a'))), "the first unit as a node whose key ends nowhere");
    }

    #[test]
    fn the_longest_text_is_told_of_sound_rules_alone() {
        assert_eq!(longest_of_charsmap(&base64(&rules(0))), Some(2));
        assert_eq!(longest_of_charsmap(&base64(&rules(1))), None);
        assert_eq!(longest_of_charsmap(&base64(&[0xff; 4])), None, "a trie of 4 GiB that is not there");
        assert_eq!(longest_of_charsmap(""), None);
    }

    #[test]
    fn texts_are_short() {
        let with = |bytes: usize| {
            let mut all = rules(0);
            all.truncate(4 + 4096);
            all.extend("é".repeat(bytes / 2).bytes().chain([0]));
            all
        };
        assert!(is_sound(&with(TEXT_BYTES_MAX)));
        assert!(!is_sound(&with(TEXT_BYTES_MAX + 2)));
    }
}
