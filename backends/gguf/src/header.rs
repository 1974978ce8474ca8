//! The header of a GGUF file.
//!
//! Layout (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>, versions 2 and 3), little-endian: `GGUF`, u32 version, u64 tensors,
//! u64 keys; then each key (text, u32 type, value) and each tensor (name, u32 dimensions, u64 each, u32 type, u64 offset); then the
//! data, from the next multiple of `general.alignment` on. A text is a u64 length and bytes; a list is a u32 type, a u64 count and values.
//!
//! Nothing is allocated by a number in the file: lists grow as their values arrive, and all of the header has a bound, as has the memory of all values, which
//! can be eight times what the file has (a list of bytes, or of empty texts).

use std::collections::HashMap;
use std::io::Read;

use crate::error::shown as shown_text;
use crate::{GgufError, Tensor, Value};

/// Largest header; that of a vocabulary of 262 thousand tokens with merges takes 20 MB.
const HEADER_BYTES_MAX: u64 = 256 << 20;
/// Most memory of all values; a vocabulary of 262 thousand tokens with merges takes 50 MB.
const VALUES_BYTES_MAX: usize = 256 << 20;
/// Memory that an allocator takes for a text at least, and beside each.
const TEXT_BYTES_MIN: usize = 32;
/// Most keys; real files have fewer than a hundred.
const KEYS_MAX: u64 = 4096;
/// Most tensors of one file, far above any model.
const TENSORS_MAX: u64 = 1 << 17;
/// Longest name of a key or a tensor, in bytes.
const NAME_BYTES_MAX: u64 = 1 << 16;
/// Most values of a list: the largest vocabularies have 262 thousand tokens and half a million merges.
const LIST_MAX: u64 = 1 << 22;
/// Most dimensions of a tensor, as in ggml.
const RANK_MAX: u32 = 4;
/// Alignment of the data where the file does not say.
const ALIGNMENT: u64 = 32;

/// Contents of one file's header.
pub(crate) struct Header {
    pub(crate) metadata: HashMap<String, Value>,
    /// Tensors, with `file` 0.
    pub(crate) tensors: HashMap<String, Tensor>,
}

struct Reader<'a> {
    shown: &'a str,
    bytes: &'a mut dyn Read,
    at: u64,
    /// First byte that does not belong to the header any more: the end of the file, or the bound.
    end: u64,
    size: u64,
    /// Memory that the values may take yet.
    room: usize,
}

/// Reads the header of a file of `size` bytes.
pub(crate) fn read(shown: &str, bytes: &mut dyn Read, size: u64) -> Result<Header, GgufError> {
    read_within(VALUES_BYTES_MAX, shown, bytes, size)
}

/// Reads a header whose values take at most `room` bytes of memory.
fn read_within(room: usize, shown: &str, bytes: &mut dyn Read, size: u64) -> Result<Header, GgufError> {
    let mut reader = Reader { shown, bytes, at: 0, end: size.min(HEADER_BYTES_MAX), size, room };
    let (tensors, keys) = reader.start()?;
    let mut metadata = HashMap::new();
    for _ in 0..keys {
        let key = reader.text("a key", NAME_BYTES_MAX)?;
        let kind = reader.u32()?;
        let value = reader.value(&key, kind)?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(GgufError::field(shown, &key, "is there twice"));
        }
    }
    let alignment = match metadata.get("general.alignment") {
        None => ALIGNMENT,
        Some(Value::Integer(number)) if (1..=1 << 20).contains(number) && number & (number - 1) == 0 => *number as u64,
        Some(other) => {
            let reason = format!("is {}, needs a power of two", other.shown());
            return Err(GgufError::field(shown, "general.alignment", reason));
        }
    };
    let mut list = Vec::new();
    for _ in 0..tensors {
        list.push(reader.tensor()?);
    }
    // Both are at most the file's size, so nothing overflows.
    let start = reader.at.next_multiple_of(alignment);
    let mut found = HashMap::new();
    for (name, mut tensor) in list {
        let begin = tensor.start.checked_add(start).filter(|&begin| begin <= size && tensor.start % alignment == 0);
        let Some(begin) = begin else {
            let reason = format!(
                "tensor {}: offset {} is not a multiple of {alignment} inside of the file's {size} bytes",
                shown_text(&name),
                tensor.start
            );
            return Err(GgufError::new(shown, reason).help("the file is cut short or damaged: fetch it again"));
        };
        tensor.start = begin;
        if found.insert(name.clone(), tensor).is_some() {
            return Err(GgufError::new(shown, format!("tensor {} is there twice", shown_text(&name))));
        }
    }
    Ok(Header { metadata, tensors: found })
}

impl Reader<'_> {
    fn refused(&self, reason: impl Into<String>) -> GgufError {
        GgufError::new(self.shown, reason)
    }

    /// Reads magic, version and counts.
    fn start(&mut self) -> Result<(u64, u64), GgufError> {
        let magic: [u8; 4] = self.array()?;
        if &magic != b"GGUF" {
            let error = self.refused("is not a GGUF file: it does not begin with \"GGUF\"");
            return Err(if &magic == b"vers" {
                error.help("a git-lfs pointer is in its place: run git lfs pull, or download the file itself")
            } else {
                error
            });
        }
        let version = self.u32()?;
        if !(2..=3).contains(&version) {
            let error = self.refused(format!("is of GGUF version {version}, versions 2 and 3 are supported"));
            return Err(match version.swap_bytes() {
                2 | 3 => error.help("the file is big-endian: fetch or convert a little-endian one"),
                _ => error.help("convert the model again with a newer llama.cpp"),
            });
        }
        let (tensors, keys) = (self.u64()?, self.u64()?);
        if tensors > TENSORS_MAX || keys > KEYS_MAX {
            let reason = format!("{tensors} tensors and {keys} keys; at most {TENSORS_MAX} and {KEYS_MAX} are allowed");
            return Err(self.refused(reason));
        }
        Ok((tensors, keys))
    }

    fn fill(&mut self, out: &mut [u8]) -> Result<(), GgufError> {
        let count = out.len() as u64;
        self.left(count)?;
        self.bytes.read_exact(out).map_err(|error| self.refused(format!("cannot be read: {error}")))?;
        self.at += count;
        Ok(())
    }

    /// Checks that `count` more bytes of the header exist.
    fn left(&self, count: u64) -> Result<(), GgufError> {
        if count > self.end - self.at {
            let cut = self.end == self.size;
            let reason =
                if cut { "ends within its header".to_owned() } else { format!("header above {} bytes", self.end) };
            return Err(self.refused(reason).help("the file is cut short or damaged: fetch it again"));
        }
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], GgufError> {
        let mut out = [0; N];
        self.fill(&mut out)?;
        Ok(out)
    }

    fn u32(&mut self) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn text(&mut self, what: &str, limit: u64) -> Result<String, GgufError> {
        let length = self.u64()?;
        if length > limit {
            let reason = format!("{what} has {length} bytes; at most {limit} are allowed");
            return Err(self.refused(reason).help("the file is damaged: fetch it again"));
        }
        self.left(length)?;
        let mut bytes = vec![0; length as usize];
        self.fill(&mut bytes)?;
        String::from_utf8(bytes).map_err(|_| self.refused(format!("{what} is not UTF-8")))
    }

    /// Reads an integer, float or truth value of a type for `key`; `None` for another type.
    fn scalar(&mut self, key: &str, kind: u32) -> Result<Option<Value>, GgufError> {
        Ok(Some(match kind {
            0 => Value::Integer(self.array::<1>()?[0].into()),
            1 => Value::Integer(i8::from_le_bytes(self.array()?).into()),
            2 => Value::Integer(u16::from_le_bytes(self.array()?).into()),
            3 => Value::Integer(i16::from_le_bytes(self.array()?).into()),
            4 => Value::Integer(self.u32()?.into()),
            5 => Value::Integer(i32::from_le_bytes(self.array()?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array()?).into()),
            7 => match self.array::<1>()?[0] {
                0 => Value::Bool(false),
                1 => Value::Bool(true),
                other => {
                    let reason = format!("has a truth value of {other}, needs 0 or 1");
                    return Err(GgufError::field(self.shown, key, reason));
                }
            },
            10 => Value::Integer(self.u64()?.into()),
            11 => Value::Integer(i64::from_le_bytes(self.array()?).into()),
            12 => Value::Float(f64::from_le_bytes(self.array()?)),
            _ => return Ok(None),
        }))
    }

    /// Takes the memory of a value of `key` from what the values may take.
    fn charge(&mut self, key: &str, bytes: usize) -> Result<(), GgufError> {
        let Some(room) = self.room.checked_sub(bytes) else {
            let reason = "needs more memory than all values may take together";
            return Err(GgufError::field(self.shown, key, reason).help("the file is damaged: fetch it again"));
        };
        self.room = room;
        Ok(())
    }

    /// Reads a text that is the value of `key` or in a list of it.
    fn value_text(&mut self, key: &str) -> Result<String, GgufError> {
        let text = self.text(key, HEADER_BYTES_MAX)?;
        self.charge(key, size_of::<String>() + TEXT_BYTES_MIN + text.len())?;
        Ok(text)
    }

    fn value(&mut self, key: &str, kind: u32) -> Result<Value, GgufError> {
        match kind {
            8 => Ok(Value::Text(self.value_text(key)?)),
            9 => self.list(key, 0),
            _ => {
                let value = self.scalar(key, kind)?;
                value.ok_or_else(|| GgufError::field(self.shown, key, format!("has the unknown type {kind}")))
            }
        }
    }

    fn list(&mut self, key: &str, depth: usize) -> Result<Value, GgufError> {
        let (kind, count) = (self.u32()?, self.u64()?);
        let refused = |reason: String| Err(GgufError::field(self.shown, key, reason));
        if count > LIST_MAX {
            return refused(format!("is a list of {count}; at most {LIST_MAX} values are allowed"));
        }
        match kind {
            8 => {
                let texts = (0..count).map(|_| self.value_text(key));
                Ok(Value::Texts(texts.collect::<Result<_, _>>()?))
            }
            9 if depth >= 4 => refused("is a list of lists, too deep".into()),
            9 => {
                for _ in 0..count {
                    let room = self.room;
                    self.list(key, depth + 1)?;
                    // It is not kept.
                    self.room = room;
                }
                Ok(Value::Nested)
            }
            6 | 12 => {
                let mut floats = Vec::new();
                for _ in 0..count {
                    self.charge(key, size_of::<f32>())?;
                    if let Some(Value::Float(float)) = self.scalar(key, kind)? {
                        floats.push(float as f32);
                    }
                }
                Ok(Value::Floats(floats))
            }
            0..=5 | 7 | 10 | 11 => {
                let mut integers = Vec::new();
                for _ in 0..count {
                    self.charge(key, size_of::<i64>())?;
                    integers.push(match self.scalar(key, kind)? {
                        Some(Value::Integer(number)) => i64::try_from(number).unwrap_or(i64::MAX),
                        Some(Value::Bool(flag)) => i64::from(flag),
                        _ => unreachable!("types of integers and truth values"),
                    });
                }
                Ok(Value::Integers(integers))
            }
            _ => refused(format!("is a list of the unknown type {kind}")),
        }
    }

    fn tensor(&mut self) -> Result<(String, Tensor), GgufError> {
        let name = self.text("a tensor's name", NAME_BYTES_MAX)?;
        let rank = self.u32()?;
        if rank == 0 || rank > RANK_MAX {
            return Err(self.refused(format!("tensor {}: {rank} dimensions", shown_text(&name))));
        }
        let mut shape = Vec::with_capacity(rank as usize);
        for _ in 0..rank {
            shape.push(self.u64()?);
        }
        shape.reverse();
        let (kind, start) = (self.u32()?, self.u64()?);
        Ok((name, Tensor { shape, kind, file: 0, start }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_all_values_has_a_bound() {
        // Lists of bytes, of truth values and of empty texts take eight times, and seven times, what they are in the file.
        for (kind, size) in [(0_u32, 1), (7, 1), (8, 8)] {
            let count = 1000;
            let file = |lists: u64| {
                let mut bytes = [*b"GGUF", 3_u32.to_le_bytes()].concat();
                bytes.extend([0, lists].map(u64::to_le_bytes).concat());
                for number in 0..lists {
                    bytes.extend(1_u64.to_le_bytes());
                    bytes.push(b'a' + number as u8);
                    bytes.extend([9, kind].map(u32::to_le_bytes).concat());
                    bytes.extend((count as u64).to_le_bytes());
                    bytes.resize(bytes.len() + count * size, 0);
                }
                bytes
            };
            let read = |bytes: Vec<u8>| read_within(60_000, "m.gguf", &mut &bytes[..], bytes.len() as u64);
            assert!(read(file(1)).is_ok(), "{kind}");
            let error = read(file(8)).err().expect("refused").to_string();
            assert!(error.contains("needs more memory than all values may take together"), "{kind}: {error}");
        }
    }

    #[test]
    fn a_bad_truth_value_is_refused_by_its_key() {
        let mut writer = crate::Writer::default();
        writer.key("tokenizer.ggml.add_bos_token", &Value::Bool(true));
        let mut bytes = writer.finish();
        let at = bytes.iter().rposition(|byte| *byte == 1).expect("the value");
        bytes[at] = 7;
        let error = read("m.gguf", &mut &bytes[..], bytes.len() as u64).err().expect("refused").to_string();
        assert_eq!(error, "m.gguf: tokenizer.ggml.add_bos_token: has a truth value of 7, needs 0 or 1");
    }
}
