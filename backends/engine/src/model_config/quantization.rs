//! `quantization_config`: the stored form of a checkpoint's matrices, where their scales lie in tensors of their own.
//!
//! Which matrices are stored so is told by their tensors, not by the lists of modules in the config (`ignore`,
//! `modules_to_not_convert`): a matrix that is there in plain numbers is read as such. A form that is not known whole is refused here.

use super::error::{CheckpointError, Shown};
use super::fields::{Fields, shown};

/// Field of `config.json`.
const NAME: &str = "quantization_config";
/// Help of a refusal for which there is nothing better.
const OTHERS: &str = "serve the original bf16, f16 or f32 checkpoint, or one in fp8 (E4M3), GPTQ or AWQ with 4 bits, or compressed-tensors' int-quantized, \
     pack-quantized or float-quantized";
/// Largest group and block, more than any matrix has columns.
const GROUP_MAX: usize = 1 << 20;
/// Columns of which a group is a multiple.
pub(crate) const GROUP_STEP: usize = 32;

/// Stored form of the quantized matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantization {
    /// Numbers of 8 bits (E4M3) with scales in f32, bf16 or f16.
    Float8 {
        /// Values that share a scale.
        scales: Scales,
        /// True if the scales' name may be `weight_scale_inv`, as DeepSeek has it.
        inverse_name: bool,
    },
    /// Integers of 8 bits with scales.
    Int8 {
        /// Values that share a scale.
        scales: Scales,
        /// True if they are multiplied with activations that are rounded to 8 bits with one scale per token.
        rounds_activations: bool,
    },
    /// GPTQ: words of integers along the columns, with scales and zero points per group.
    Gptq {
        /// Bits of a weight, 4 or 8.
        bits: u32,
        /// Columns of a group; `None` has one group.
        group: Option<usize>,
        /// Number that is added to each stored zero point: 1 in the first version of the format.
        zero_offset: i32,
    },
    /// AWQ (`gemm`): words of eight rows each, with scales and zero points per group.
    Awq {
        /// Columns of a group; `None` has one group.
        group: Option<usize>,
    },
    /// compressed-tensors' `pack-quantized`: words of integers along the columns, with scales per group or row.
    Packed {
        /// Bits of a weight, 4 or 8.
        bits: u32,
        /// Columns of a group; `None` has one group.
        group: Option<usize>,
        /// True if there are no zero points.
        is_symmetric: bool,
    },
}

/// Values of a matrix that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scales {
    /// All of them, or those of a row: the scales' shape says which.
    Whole,
    /// Blocks of so many rows and columns.
    Blocks([usize; 2]),
}

impl Quantization {
    /// Reads the config of a decoder; `None` for plain numbers.
    pub(crate) fn read(f: &Fields<'_>) -> Result<Option<Self>, CheckpointError> {
        let Some(q) = f.object(NAME)? else { return Ok(None) };
        for name in ["kv_cache_scheme", "adapter", "rotation"] {
            if q.value(name).is_some() {
                return Err(q.refuse(name, "is not supported").help(OTHERS));
            }
        }
        match q.text("quant_method")? {
            Some("fp8") => read_fp8(&q),
            Some("gptq") => read_gptq(&q),
            Some("awq") => read_awq(&q),
            Some("compressed-tensors") => read_compressed(&q),
            Some(other) => Err(q.refuse("quant_method", format!("\"{}\" is not supported", Shown(other))).help(OTHERS)),
            None => Err(q.missing("quant_method").help(OTHERS)),
        }
        .map(Some)
    }

    /// Name of the form, as in numerics strings.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Quantization::Float8 { .. } => "fp8",
            Quantization::Int8 { rounds_activations: true, .. } => "w8a8",
            Quantization::Int8 { rounds_activations: false, .. } => "int8",
            Quantization::Gptq { bits: 4, .. } => "gptq4",
            Quantization::Gptq { .. } => "gptq8",
            Quantization::Awq { .. } => "awq4",
            Quantization::Packed { bits: 4, .. } => "packed4",
            Quantization::Packed { .. } => "packed8",
        }
    }
}

/// Refuses a text that is none of `known`.
fn one_of(q: &Fields<'_>, name: &str, known: &[&str]) -> Result<(), CheckpointError> {
    match q.text(name)? {
        Some(other) if !known.contains(&other) => {
            let reason = format!("\"{}\" is not supported, only {} is", Shown(other), known.join(", "));
            Err(q.refuse(name, reason).help(OTHERS))
        }
        _ => Ok(()),
    }
}

/// Columns of a group: a positive multiple of 32, or −1 for one group.
fn group(q: &Fields<'_>) -> Result<Option<usize>, CheckpointError> {
    const NAME: &str = "group_size";
    let Some(value) = q.value(NAME) else { return Err(q.missing(NAME)) };
    if value.as_i64() == Some(-1) {
        return Ok(None);
    }
    let size = q.required(NAME, 1, GROUP_MAX)?;
    if !size.is_multiple_of(GROUP_STEP) {
        let reason = format!("is {size}, needs a multiple of {GROUP_STEP}, or -1 for one group per row");
        return Err(q.refuse(NAME, reason).help(OTHERS));
    }
    Ok(Some(size))
}

fn bits(q: &Fields<'_>, name: &str, known: &[u32]) -> Result<u32, CheckpointError> {
    let bits = q.required(name, 1, 64)?;
    known.iter().copied().find(|known| *known as usize == bits).ok_or_else(|| {
        let known: Vec<String> = known.iter().map(u32::to_string).collect();
        q.refuse(name, format!("is {bits}, supported: {}", known.join(", "))).help(OTHERS)
    })
}

/// Two sizes of a block, rows and columns.
fn block(q: &Fields<'_>, name: &str) -> Result<Option<[usize; 2]>, CheckpointError> {
    let Some(value) = q.value(name) else { return Ok(None) };
    let size = |value: &serde_json::Value| {
        value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| (1..=GROUP_MAX).contains(n))
    };
    let sizes: Option<Vec<usize>> = value.as_array().and_then(|list| list.iter().map(size).collect());
    let sizes = sizes.and_then(|sizes| <[usize; 2]>::try_from(sizes).ok());
    let refused = || q.refuse(name, format!("is {}, needs two sizes from 1 to {GROUP_MAX}", shown(value)));
    sizes.map(Some).ok_or_else(refused)
}

/// fp8 as DeepSeek and Qwen store it, and as AutoFP8 does. Scales of activations are not read: activations keep 16 bits.
fn read_fp8(q: &Fields<'_>) -> Result<Quantization, CheckpointError> {
    one_of(q, "fmt", &["e4m3"])?;
    one_of(q, "activation_scheme", &["dynamic", "static"])?;
    let scales = block(q, "weight_block_size")?.map_or(Scales::Whole, Scales::Blocks);
    Ok(Quantization::Float8 { scales, inverse_name: true })
}

fn read_gptq(q: &Fields<'_>) -> Result<Quantization, CheckpointError> {
    let versions = ["gptq", "gptq_v2"];
    // GPTQModel has had both names of the field.
    one_of(q, "checkpoint_format", &versions)?;
    one_of(q, "format", &versions)?;
    one_of(q, "pack_dtype", &["int32"])?;
    if q.flag("is_marlin_format", false)? {
        return Err(q.refuse("is_marlin_format", "is true: weights in Marlin's order are not supported").help(OTHERS));
    }
    // Rules per module: those that begin with "-:" leave a module as it is, which its tensors tell.
    if let Some(rules) = q.object("dynamic")?
        && let Some(rule) = rules.names().find(|rule| !rule.starts_with("-:"))
    {
        return Err(rules.refuse(rule, "bits or groups that differ between modules are not supported").help(OTHERS));
    }
    let is_second = [q.text("checkpoint_format")?, q.text("format")?].contains(&Some("gptq_v2"));
    Ok(Quantization::Gptq {
        bits: bits(q, "bits", &[4, 8])?,
        group: group(q)?,
        zero_offset: if is_second { 0 } else { 1 },
    })
}

fn read_awq(q: &Fields<'_>) -> Result<Quantization, CheckpointError> {
    one_of(q, "version", &["gemm", "GEMM"])?;
    bits(q, "bits", &[4])?;
    if !q.flag("zero_point", true)? {
        return Err(q.refuse("zero_point", "is false, which the gemm version of AWQ does not have").help(OTHERS));
    }
    Ok(Quantization::Awq { group: group(q)? })
}

fn read_compressed(q: &Fields<'_>) -> Result<Quantization, CheckpointError> {
    if let Some(sparsity) = q.object("sparsity_config")? {
        one_of(&sparsity, "format", &["dense"])?;
    }
    let is_set = |value: &serde_json::Value| value.as_object().is_none_or(|map| !map.is_empty());
    if let Some(transforms) = q.object("transform_config")?
        && let Some(name) = transforms.names().find(|name| transforms.value(name).is_some_and(is_set))
    {
        return Err(transforms.refuse(name, "transforms of weights or activations are not supported").help(OTHERS));
    }
    let Some(groups) = q.object("config_groups")? else { return Err(q.missing("config_groups")) };
    let names: Vec<&str> = groups.names().collect();
    let [name] = names[..] else {
        let reason = format!("has {} groups: forms that differ between modules are not supported", names.len());
        return Err(q.refuse("config_groups", reason).help(OTHERS));
    };
    let Some(scheme) = groups.object(name)? else { return Err(groups.missing(name)) };
    if scheme.value("output_activations").is_some() {
        return Err(scheme.refuse("output_activations", "is not supported").help(OTHERS));
    }
    let Some(weights) = scheme.object("weights")? else { return Err(scheme.missing("weights").help(OTHERS)) };
    let activations = scheme.object("input_activations")?;
    let format = scheme.text("format")?.map_or_else(|| q.text("format"), |format| Ok(Some(format)))?;
    match format {
        Some("float-quantized") => read_floats(&weights),
        Some("int-quantized") => read_integers(&weights, activations.as_ref()),
        Some("pack-quantized") => read_packed(&weights, &scheme),
        Some(other) => Err(q.refuse("format", format!("\"{}\" is not supported", Shown(other))).help(OTHERS)),
        None => Err(q.missing("format").help(OTHERS)),
    }
}

/// Scales of a matrix, one, one per row, or one per block.
fn strategy(weights: &Fields<'_>) -> Result<Scales, CheckpointError> {
    one_of(weights, "strategy", &["tensor", "channel", "block"])?;
    match weights.text("strategy")? {
        None => Err(weights.missing("strategy")),
        Some("block") => {
            let sizes = block(weights, "block_structure")?.ok_or_else(|| weights.missing("block_structure"))?;
            Ok(Scales::Blocks(sizes))
        }
        Some(_) => Ok(Scales::Whole),
    }
}

fn symmetric(fields: &Fields<'_>) -> Result<(), CheckpointError> {
    if fields.flag("symmetric", true)? {
        return Ok(());
    }
    Err(fields.refuse("symmetric", "is false: zero points are not supported in this format").help(OTHERS))
}

fn read_floats(weights: &Fields<'_>) -> Result<Quantization, CheckpointError> {
    one_of(weights, "type", &["float"])?;
    bits(weights, "num_bits", &[8])?;
    symmetric(weights)?;
    Ok(Quantization::Float8 { scales: strategy(weights)?, inverse_name: false })
}

fn read_integers(weights: &Fields<'_>, activations: Option<&Fields<'_>>) -> Result<Quantization, CheckpointError> {
    one_of(weights, "type", &["int"])?;
    bits(weights, "num_bits", &[8])?;
    symmetric(weights)?;
    let scales = strategy(weights)?;
    let Some(activations) = activations else { return Ok(Quantization::Int8 { scales, rounds_activations: false }) };
    one_of(activations, "type", &["int"])?;
    bits(activations, "num_bits", &[8])?;
    symmetric(activations)?;
    one_of(activations, "strategy", &["token"])?;
    if activations.value("dynamic").and_then(serde_json::Value::as_bool) != Some(true) {
        return Err(activations
            .refuse("dynamic", "is not true: fixed scales of activations are not supported")
            .help(OTHERS));
    }
    if let Scales::Blocks(_) = scales {
        return Err(weights.refuse("strategy", "\"block\" is not supported with activations of 8 bits").help(OTHERS));
    }
    Ok(Quantization::Int8 { scales, rounds_activations: true })
}

fn read_packed(weights: &Fields<'_>, scheme: &Fields<'_>) -> Result<Quantization, CheckpointError> {
    if scheme.value("input_activations").is_some() {
        let reason = "is not supported with weights of this format";
        return Err(scheme.refuse("input_activations", reason).help(OTHERS));
    }
    one_of(weights, "type", &["int"])?;
    let bits = bits(weights, "num_bits", &[4, 8])?;
    one_of(weights, "strategy", &["group", "channel"])?;
    let group = match weights.text("strategy")? {
        Some("channel") => None,
        _ => group(weights)?,
    };
    Ok(Quantization::Packed { bits, group, is_symmetric: weights.flag("symmetric", true)? })
}
