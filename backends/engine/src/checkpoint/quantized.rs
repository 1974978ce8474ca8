//! Tensors of quantized matrices: found by the names and shapes of their format, and checked before any is read.
//!
//! A needed matrix `x.weight` has in its place the tensors that the config's format names (`x.qweight`, `x.scales`, …), or is there in plain
//! numbers where a module was left as it is. [`Rows`] makes the values while a device packs them.

use std::ops::Range;

use penstock_kernels::cpu::CpuDevice;
use penstock_kernels::{CodeGroups, CodeKind, DType, Held, RowOrder};

use super::rows::{Codes, Groups, Layout, Numbers, Rows, Zeros};
use super::safetensors::Entry;
use super::{Found, Shards, WeightFile};
use crate::families::{self, Architecture};
use crate::model_config::error::CheckpointError;
use crate::model_config::{ModelConfig, Needed, Quantization, Scales};

/// Names of a matrix's codes in the formats of integers in words, behind the module's.
const WORDS: [&str; 2] = ["qweight", "weight_packed"];

/// Tensors of a quantized matrix, beside its codes.
#[derive(Debug)]
pub(super) struct Quantized {
    pub(super) form: Quantization,
    /// Rows of the stored matrix, and the first that belongs to the tensor.
    rows: usize,
    first: usize,
    scales: Place,
    scales_type: DType,
    zeros: Option<Place>,
    /// Rows and columns that share a scale, in formats of bytes; of words, one row and a group of columns.
    block: [usize; 2],
    /// Group of each column, where groups are not runs of columns.
    listed: Option<Place>,
}

/// Place of a tensor's data.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) file: usize,
    pub(super) range: Range<usize>,
}

impl Place {
    fn bytes<'a>(&self, files: &'a [WeightFile]) -> &'a [u8] {
        &files[self.file].bytes.as_slice()[self.range.clone()]
    }
}

impl Quantized {
    /// Places of the tensors beside the codes.
    pub(super) fn places(&self) -> impl Iterator<Item = &Place> {
        [Some(&self.scales), self.zeros.as_ref(), self.listed.as_ref()].into_iter().flatten()
    }

    /// Returns true if the matrix is multiplied as integers of 8 bits with one scale per row.
    pub(super) fn is_integers(&self) -> bool {
        matches!(self.form, Quantization::Int8 { rounds_activations: true, .. })
    }

    /// Bytes of a matrix of `rows` × `columns` with this form in a CPU's memory, if it is held as codes where `held` is asked for; `None` where it is held
    /// in another form.
    pub(super) fn codes_bytes(&self, held: Held, rows: usize, columns: usize) -> Option<u64> {
        let (kind, width) = match self.form {
            Quantization::Float8 { .. } => (CodeKind::Float8, self.block[1]),
            Quantization::Int8 { rounds_activations: true, .. } => return None,
            Quantization::Int8 { .. } => (CodeKind::Eight, self.block[1]),
            Quantization::Gptq { bits: 4, .. } | Quantization::Awq { .. } | Quantization::Packed { bits: 4, .. } => {
                (CodeKind::Four, self.block[1])
            }
            Quantization::Gptq { .. } | Quantization::Packed { .. } => (CodeKind::Eight, self.block[1]),
        };
        let groups = match self.listed {
            Some(_) => CodeGroups::Listed { of: &[], count: columns / width },
            None => CodeGroups::Runs(width),
        };
        if !held.keeps(kind.bits()) {
            return None;
        }
        CpuDevice::codes_bytes(kind, groups, rows, columns)
    }

    /// Bytes of a tensor's share of the stored matrix of `codes` bytes, of which it has `rows` rows.
    pub(super) fn size(&self, codes: usize, rows: usize) -> usize {
        let all = codes + self.places().map(|place| place.range.len()).sum::<usize>();
        if rows == self.rows { all } else { (all as u128 * rows as u128 / self.rows as u128) as usize }
    }

    /// Reader of the rows of a matrix with these codes.
    pub(super) fn reader<'a>(&self, codes: &'a [u8], columns: usize, files: &'a [WeightFile]) -> Rows<'a> {
        let (block, words) = (self.block, |place: &Place| place.bytes(files).as_chunks::<4>().0);
        let of_words = |bits: u32, layout, offset| Codes::Words {
            words: codes.as_chunks::<4>().0,
            bits: bits as usize,
            layout,
            zeros: match &self.zeros {
                Some(place) => Zeros::Words { words: words(place), offset },
                None => Zeros::Middle,
            },
            groups: match &self.listed {
                Some(place) => Groups::Listed { of: words(place), count: columns / block[1] },
                None => Groups::Equal(block[1]),
            },
        };
        let codes = match self.form {
            Quantization::Float8 { .. } => Codes::Float8 { bytes: codes, block },
            Quantization::Int8 { rounds_activations: as_rows, .. } => Codes::Int8 { bytes: codes, block, as_rows },
            Quantization::Gptq { bits, zero_offset, .. } => {
                let is_middle = self.zeros.as_ref().is_some_and(|place| are_middle(place.bytes(files), bits));
                of_words(bits, Layout::Down, if is_middle { 0 } else { zero_offset })
            }
            Quantization::Awq { .. } => of_words(4, Layout::Across, 0),
            Quantization::Packed { bits, .. } => of_words(bits, Layout::Along, 0),
        };
        let scales = Numbers { dtype: self.scales_type, bytes: self.scales.bytes(files) };
        Rows { rows: self.rows, columns, first: self.first, codes, scales }
    }
}

/// Returns true if all zero points of GPTQ are stored as the middle of the codes. They are meant so, whichever version the config
/// names: some writers of the second version leave the first one's name there, and the first one stores the middle less 1.
fn are_middle(zeros: &[u8], bits: u32) -> bool {
    let middle = if bits == 4 { 0x88 } else { 0x80 };
    zeros.iter().all(|&byte| byte == middle)
}

/// A tensor of a quantized matrix: its file and its entry there.
type Part = (usize, Entry);

/// Finder of the tensors of one quantized matrix.
struct Finder<'a> {
    shards: &'a Shards,
    architecture: &'a Architecture,
    /// Name of the module, before `.qweight`.
    module: &'a str,
    rows: usize,
    columns: usize,
}

impl Finder<'_> {
    fn find(&self, kind: &str) -> Option<Part> {
        self.shards.find(&format!("{}.{kind}", self.module), self.architecture)
    }

    /// Tensor of the type and the shape, which must be there.
    fn need(&self, kind: &str, stored: &str, shape: &[usize]) -> Result<Part, CheckpointError> {
        let part = self.find(kind).ok_or_else(|| self.missing(kind, shape))?;
        self.check(&part, stored, shape)?;
        Ok(part)
    }

    fn check(&self, (file, entry): &Part, stored: &str, shape: &[usize]) -> Result<(), CheckpointError> {
        if !matches!(&entry.dtype, Err(other) if other == stored) {
            let shown = entry.dtype.as_ref().map_or_else(Clone::clone, |dtype| dtype.name().to_owned());
            let reason = format!("type {shown}, quantization_config needs {stored}");
            return Err(self.refuse(*file, &entry.name, reason));
        }
        self.shards.check_shape(*file, entry, shape)
    }

    fn missing(&self, kind: &str, shape: &[usize]) -> CheckpointError {
        let name = format!("{}.{kind}", self.module);
        let file = self.shards.file_of(&name).map_or(&self.shards.listing, |file| &self.shards.files[file].shown);
        CheckpointError::tensor(file, name, format!("is missing (shape {shape:?})"))
    }

    fn refuse(&self, file: usize, name: &str, reason: String) -> CheckpointError {
        CheckpointError::tensor(&self.shards.files[file].shown, name, reason)
    }

    /// Scales of exactly this shape.
    fn scales(&self, kind: &str, shape: &[usize]) -> Result<(Part, DType), CheckpointError> {
        let part = self.find(kind).ok_or_else(|| self.missing(kind, shape))?;
        let dtype = self.shards.number_type(part.0, &part.1)?;
        self.shards.check_shape(part.0, &part.1, shape)?;
        Ok((part, dtype))
    }

    /// Scales of a matrix of bytes, and the rows and columns that share one.
    fn byte_scales(&self, scales: Scales, inverse_name: bool) -> Result<(Part, DType, [usize; 2]), CheckpointError> {
        let (rows, columns) = (self.rows, self.columns);
        let inverse = "weight_scale_inv";
        let kind = if inverse_name && self.find(inverse).is_some() { inverse } else { "weight_scale" };
        if let Scales::Blocks([high, wide]) = scales {
            let (part, dtype) = self.scales(kind, &[rows.div_ceil(high), columns.div_ceil(wide)])?;
            return Ok((part, dtype, [high, wide]));
        }
        let part = self.find(kind).ok_or_else(|| self.missing(kind, &[rows, 1]))?;
        let dtype = self.shards.number_type(part.0, &part.1)?;
        let block = match part.1.shape[..] {
            [] | [1] | [1, 1] => [rows, columns],
            [all] | [all, 1] if all == rows => [1, columns],
            _ => {
                let reason = format!("shape {:?}, needs [1], [{rows}] or [{rows}, 1]", part.1.shape);
                return Err(self.refuse(part.0, &part.1.name, reason));
            }
        };
        Ok((part, dtype, block))
    }

    /// Columns of a group, which must divide the columns.
    fn group(&self, group: Option<usize>, of: &Part) -> Result<usize, CheckpointError> {
        let size = group.unwrap_or(self.columns);
        if self.columns.is_multiple_of(size) {
            return Ok(size);
        }
        let reason = format!("{} columns are not whole groups of {size} (group_size)", self.columns);
        Err(self.refuse(of.0, &of.1.name, reason))
    }

    /// Refuses a matrix whose rows or columns do not fill words.
    fn whole_words(&self, of: &Part, what: &str, count: usize, per_word: usize) -> Result<(), CheckpointError> {
        if count.is_multiple_of(per_word) {
            return Ok(());
        }
        Err(self.refuse(of.0, &of.1.name, format!("{count} {what} are not whole words of {per_word}")))
    }

    /// Groups of the columns, if they are listed and not runs of `size` columns.
    fn listed(&self, kind: &str, size: usize) -> Result<Option<Part>, CheckpointError> {
        let Some(part) = self.find(kind) else { return Ok(None) };
        self.check(&part, "I32", &[self.columns])?;
        let (file, entry) = &part;
        let values = self.shards.files[*file].bytes.as_slice()[entry.range.clone()].as_chunks::<4>().0;
        // compressed-tensors' mark of a matrix that was not ordered.
        if values.iter().all(|value| *value == [u8::MAX; 4]) {
            return Ok(None);
        }
        let groups = self.columns / size;
        let mut is_run = true;
        for (column, value) in values.iter().enumerate() {
            let group = i32::from_le_bytes(*value);
            match usize::try_from(group) {
                Ok(group) if group < groups => is_run &= group == column / size,
                _ => {
                    let reason = format!("column {column} is said to be in group {group}; there are {groups}");
                    return Err(self.refuse(*file, &entry.name, reason));
                }
            }
        }
        Ok(Some(part).filter(|_| !is_run))
    }

    /// Refuses a stored shape that is not that of the matrix.
    fn stored_shape(&self) -> Result<Part, CheckpointError> {
        let part = self.need("weight_shape", "I64", &[2])?;
        let (file, entry) = &part;
        let bytes = &self.shards.files[*file].bytes.as_slice()[entry.range.clone()];
        let stored: Vec<i64> = bytes.as_chunks::<8>().0.iter().map(|v| i64::from_le_bytes(*v)).collect();
        if stored.iter().map(|&n| usize::try_from(n).ok()).eq([Some(self.rows), Some(self.columns)]) {
            return Ok(part);
        }
        Err(self.refuse(
            *file,
            &entry.name,
            format!("is {stored:?}, config.json needs {:?}", [self.rows, self.columns]),
        ))
    }
}

/// Everything that was found of a matrix.
struct Parts {
    codes: Part,
    scales: (Part, DType),
    zeros: Option<Part>,
    listed: Option<Part>,
    /// Tensors that were checked and are not read again.
    others: Vec<Part>,
    block: [usize; 2],
}

impl Finder<'_> {
    /// Finds and checks all tensors of the matrix; `None` if it is stored in plain numbers, or not there.
    fn parts(&self, form: Quantization) -> Result<Option<Parts>, CheckpointError> {
        let (rows, columns) = (self.rows, self.columns);
        let kind = match form {
            Quantization::Gptq { .. } | Quantization::Awq { .. } => WORDS[0],
            Quantization::Packed { .. } => WORDS[1],
            Quantization::Float8 { .. } | Quantization::Int8 { .. } => "weight",
        };
        let Some(codes) = self.find(kind) else { return Ok(None) };
        let (zeros, listed, others) = (None, None, Vec::new());
        let parts = match form {
            Quantization::Float8 { .. } | Quantization::Int8 { .. } if codes.1.dtype.is_ok() => return Ok(None),
            Quantization::Float8 { scales, inverse_name } => {
                self.check(&codes, "F8_E4M3", &[rows, columns])?;
                let (scales, dtype, block) = self.byte_scales(scales, inverse_name)?;
                Parts { codes, scales: (scales, dtype), zeros, listed, others, block }
            }
            Quantization::Int8 { scales, .. } => {
                self.check(&codes, "I8", &[rows, columns])?;
                let (scales, dtype, block) = self.byte_scales(scales, false)?;
                Parts { codes, scales: (scales, dtype), zeros, listed, others, block }
            }
            Quantization::Gptq { bits, group, .. } => {
                let (per_word, size) = (32 / bits as usize, self.group(group, &codes)?);
                self.whole_words(&codes, "columns", columns, per_word)?;
                self.whole_words(&codes, "rows", rows, per_word)?;
                self.check(&codes, "I32", &[columns / per_word, rows])?;
                let zeros = Some(self.need("qzeros", "I32", &[columns / size, rows / per_word])?);
                let (scales, listed) = (self.scales("scales", &[columns / size, rows])?, self.listed("g_idx", size)?);
                let others = self.find("g_idx").into_iter().collect();
                Parts { codes, scales, zeros, listed, others, block: [1, size] }
            }
            Quantization::Awq { group } => {
                let size = self.group(group, &codes)?;
                self.whole_words(&codes, "rows", rows, 8)?;
                self.check(&codes, "I32", &[columns, rows / 8])?;
                let zeros = Some(self.need("qzeros", "I32", &[columns / size, rows / 8])?);
                let scales = self.scales("scales", &[columns / size, rows])?;
                Parts { codes, scales, zeros, listed, others, block: [1, size] }
            }
            Quantization::Packed { bits, group, is_symmetric } => {
                let (per_word, size) = (32 / bits as usize, self.group(group, &codes)?);
                self.check(&codes, "I32", &[rows, columns.div_ceil(per_word)])?;
                let zeros = if is_symmetric {
                    None
                } else {
                    Some(self.need("weight_zero_point", "I32", &[rows.div_ceil(per_word), columns / size])?)
                };
                let scales = self.scales("weight_scale", &[rows, columns / size])?;
                let listed = self.listed("weight_g_idx", size)?;
                let others = self.find("weight_g_idx").into_iter().chain([self.stored_shape()?]).collect();
                Parts { codes, scales, zeros, listed, others, block: [1, size] }
            }
        };
        Ok(Some(parts))
    }
}

impl Shards {
    /// Finds a needed matrix in the checkpoint's quantized form; `None` if it is stored in plain numbers, or not there.
    pub(super) fn take_quantized(
        &mut self,
        needed: &Needed,
        config: &ModelConfig,
        architecture: &Architecture,
    ) -> Result<Option<Found>, CheckpointError> {
        let (stored, part) = (needed.part.as_ref().map_or(&needed.name, |part| &part.tensor), &needed.part);
        let module = stored.strip_suffix(".weight");
        let (Some(form), Some(module), &[rows, columns]) = (config.quantization, module, &needed.shape[..]) else {
            return Ok(None);
        };
        let (first, rows) = part.as_ref().map_or((0, rows), |part| (part.first, part.rows));
        let finder = Finder { shards: self, architecture, module, rows, columns };
        let Some(Parts { codes, scales: (scales, scales_type), zeros, listed, others, block }) = finder.parts(form)?
        else {
            return Ok(None);
        };
        let all = [Some(&codes), Some(&scales), zeros.as_ref(), listed.as_ref()].into_iter().flatten().chain(&others);
        let names: Vec<String> = all.map(|(_, entry)| entry.name.clone()).collect();
        self.taken.extend(names);
        let place = |(file, entry): Part| Place { file, range: entry.range };
        let (zeros, listed) = (zeros.map(place), listed.map(place));
        let quantized = Quantized { form, rows, first, scales: place(scales), scales_type, zeros, block, listed };
        let Place { file, range } = place(codes);
        let (dtype, shape, order) = (DType::F32, needed.shape.clone(), RowOrder::Plain);
        Ok(Some(Found { file, dtype, shape, range, order, stacked: None, quantized: Some(Box::new(quantized)) }))
    }

    /// Refuses a quantized head where the config ties the head to the embedding.
    pub(super) fn check_tied_words(&self, config: &ModelConfig) -> Result<(), CheckpointError> {
        let module = families::HEAD.strip_suffix(".weight").unwrap_or_default();
        for name in WORDS.map(|kind| format!("{module}.{kind}")) {
            if let Some(file) = self.file_of(&name)
                && config.tie_word_embeddings
                && self.entries[file].contains_key(&name)
            {
                let reason = "is there, though config.json says tie_word_embeddings: true".to_owned();
                let help = "set tie_word_embeddings to what the model was trained with";
                return Err(CheckpointError::tensor(&self.files[file].shown, name, reason).help(help));
            }
        }
        Ok(())
    }

    /// Returns true if a matrix is stored as words of integers, of which the config then has to say the format.
    pub(super) fn has_words(&self, name: &str, architecture: &Architecture) -> bool {
        let Some(module) = name.strip_suffix(".weight") else { return false };
        WORDS.iter().any(|kind| self.find(&format!("{module}.{kind}"), architecture).is_some())
    }
}
