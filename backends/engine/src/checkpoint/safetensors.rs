//! Header of a safetensors file, read as hostile input.
//!
//! Layout (<https://huggingface.co/docs/safetensors>): 8 bytes little-endian length `n`; `n` bytes of JSON that map tensor names
//! to dtype, shape and a byte range relative to the end of the header; then the data, covered by the ranges without holes or
//! overlaps. Nothing is allocated by a number in the file: a shape holds at most [`RANK_MAX`] dimensions and a header at
//! most [`TENSORS_MAX`] tensors.

use std::fmt;
use std::ops::Range;

use penstock_kernels::DType;
use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::model_config::error::{CheckpointError, Shown};

/// Largest header, the same as in the format's own library.
pub const HEADER_BYTES_MAX: usize = 100_000_000;
/// Most tensors of a file, far above any dense checkpoint (a 128-layer model has about 1,500).
pub const TENSORS_MAX: usize = 1 << 18;
/// Most dimensions of a shape, more than any weight has.
pub const RANK_MAX: usize = 8;

/// One tensor in the header of a safetensors file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name of the tensor in the checkpoint.
    pub name: String,
    /// Element type; `Err` holds the name of one that this engine does not read.
    pub dtype: Result<DType, String>,
    /// Shape of the tensor, outermost dimension first; at most [`RANK_MAX`] dimensions.
    pub shape: Vec<usize>,
    /// Byte range of the data, from the start of the file; within the file.
    pub range: Range<usize>,
}

/// Reads and checks the header of a whole file `bytes`; `file` names it in errors. Entries are in the order of their
/// data.
pub fn read_header(file: &str, bytes: &[u8]) -> Result<Vec<Entry>, CheckpointError> {
    let refused = |reason: String| CheckpointError::file(file, reason);
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(refused(format!("{} bytes are too few for a safetensors file", bytes.len())).help("fetch it again"));
    };
    if length == b"version " {
        let help = "run git lfs pull, or download the file itself";
        return Err(refused("is a git-lfs pointer, not the file".into()).help(help));
    }
    let length = u64::from_le_bytes(*length);
    if length > HEADER_BYTES_MAX as u64 {
        let reason = format!("header length {length} is above {HEADER_BYTES_MAX}");
        return Err(refused(reason).help("this is not a safetensors file, or it is damaged"));
    }
    let Some((header, data)) = rest.split_at_checked(length as usize) else {
        let reason = format!("header length {length}, but only {} bytes follow", rest.len());
        return Err(refused(reason).help("the file is cut short: fetch it again"));
    };
    let Header(raw) = serde_json::from_slice(header).map_err(|e| refused(format!("header: {e}")))?;
    let start = bytes.len() - data.len();
    let mut entries =
        raw.into_iter().map(|(name, raw)| check(file, name, &raw, start, data.len())).collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(|entry| (entry.range.start, entry.range.end));
    check_cover(file, &entries, start, bytes.len())?;
    Ok(entries)
}

fn check(file: &str, name: String, raw: &Raw, start: usize, data: usize) -> Result<Entry, CheckpointError> {
    let refused = |reason: String| CheckpointError::tensor(file, &name, reason);
    let [begin, end] = raw.data_offsets;
    if begin > end {
        return Err(refused(format!("data_offsets [{begin}, {end}] run backwards")));
    }
    if end > data as u64 {
        let reason = format!("data_offsets [{begin}, {end}] end after the file's {data} bytes of data");
        return Err(refused(reason).help("the file is cut short or damaged: fetch it again"));
    }
    let shape = raw.shape.as_slice();
    let size = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
    let size = size.ok_or_else(|| refused(format!("shape {shape:?} overflows")))?;
    if let Some(bits) = bits_of(&raw.dtype) {
        let want = size.checked_mul(bits).ok_or_else(|| refused(format!("shape {shape:?} overflows")))?.div_ceil(8);
        if want != end - begin {
            let reason = format!("shape {shape:?} of {} needs {want} bytes, has {}", raw.dtype, end - begin);
            return Err(refused(reason));
        }
    }
    let dtype = match raw.dtype.as_str() {
        "BF16" => Ok(DType::Bf16),
        "F16" => Ok(DType::F16),
        "F32" => Ok(DType::F32),
        other => Err(Shown(other).to_string()),
    };
    let too_big = |_| refused(format!("shape {shape:?} overflows"));
    let shape = shape.iter().map(|&d| usize::try_from(d)).collect::<Result<_, _>>().map_err(too_big)?;
    // Both fit: they are at most `data`, which is a slice's length.
    let range = start + begin as usize..start + end as usize;
    Ok(Entry { name, dtype, shape, range })
}

/// Checks that the ranges follow each other from the header to the end of the file.
fn check_cover(file: &str, entries: &[Entry], start: usize, end: usize) -> Result<(), CheckpointError> {
    let mut at = start;
    for entry in entries {
        if entry.range.start < at {
            let reason = format!("its bytes overlap those of another tensor ({} bytes)", at - entry.range.start);
            return Err(CheckpointError::tensor(file, &entry.name, reason));
        }
        if entry.range.start > at {
            let reason = format!("{} bytes before it belong to no tensor", entry.range.start - at);
            return Err(CheckpointError::tensor(file, &entry.name, reason));
        }
        at = entry.range.end;
    }
    if at < end {
        return Err(CheckpointError::file(file, format!("the last {} bytes belong to no tensor", end - at)));
    }
    Ok(())
}

/// Bits of one element of `dtype`, for every type of the format.
fn bits_of(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => 8,
        "I16" | "U16" | "F16" | "BF16" => 16,
        "I32" | "U32" | "F32" => 32,
        "I64" | "U64" | "F64" | "C64" => 64,
        _ => return None,
    })
}

struct Header(Vec<(String, Raw)>);

#[derive(serde::Deserialize)]
struct Raw {
    dtype: String,
    shape: Dims,
    data_offsets: [u64; 2],
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = Header;
            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(out, "an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut tensors = Vec::new();
                let mut seen = std::collections::HashSet::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    if tensors.len() == TENSORS_MAX {
                        return Err(A::Error::custom(format!("more than {TENSORS_MAX} tensors")));
                    }
                    if !seen.insert(name.clone()) {
                        return Err(A::Error::custom(format!("tensor {} is there twice", Shown(&name))));
                    }
                    let raw = map.next_value();
                    let raw = raw.map_err(|e| A::Error::custom(format!("tensor {}: {e}", Shown(&name))))?;
                    tensors.push((name, raw));
                }
                Ok(Header(tensors))
            }
        }
        deserializer.deserialize_map(Names)
    }
}

/// A shape of bounded rank, read without allocating.
struct Dims {
    dims: [u64; RANK_MAX],
    rank: usize,
}

impl Dims {
    fn as_slice(&self) -> &[u64] {
        &self.dims[..self.rank]
    }
}

impl<'de> Deserialize<'de> for Dims {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Shape;
        impl<'de> Visitor<'de> for Shape {
            type Value = Dims;
            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(out, "a shape of at most {RANK_MAX} dimensions")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Dims, A::Error> {
                let mut shape = Dims { dims: [0; RANK_MAX], rank: 0 };
                while let Some(dim) = seq.next_element()? {
                    let Some(slot) = shape.dims.get_mut(shape.rank) else {
                        return Err(A::Error::invalid_length(RANK_MAX + 1, &self));
                    };
                    *slot = dim;
                    shape.rank += 1;
                }
                Ok(shape)
            }
        }
        deserializer.deserialize_seq(Shape)
    }
}
