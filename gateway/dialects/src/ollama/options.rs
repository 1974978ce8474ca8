//! `options`: parameters of sampling, under llama.cpp's names.

use penstock_types::Bounds;
use penstock_types::error::ApiErrorKind;
use penstock_types::fields;
use penstock_types::json::{Fault, Names, Reader, Within, short};
use penstock_types::request::SamplingParams;

/// Reads the object. Parameters of the machine (threads, layers on a GPU, the size of a batch), and those of a sampler that is off,
/// change no answer and are skipped. `ignored` gets the names of the others that have no effect here.
pub(super) fn options(
    reader: &mut Reader<'_>,
    sampling: &mut SamplingParams,
    ignored: &mut Vec<String>,
    bounds: &Bounds,
) -> Result<(), Fault> {
    let mut names = Names::new(bounds.fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        if reader.null()? {
            return Ok(());
        }
        option(reader, &key, sampling, ignored, bounds).within(&key)
    })
}

fn option(
    reader: &mut Reader<'_>,
    key: &str,
    sampling: &mut SamplingParams,
    ignored: &mut Vec<String>,
    bounds: &Bounds,
) -> Result<(), Fault> {
    match key {
        "temperature" => sampling.temperature = Some(fields::number(reader, 0.0..=2.0, false)?),
        // 0 is off in llama.cpp, as 1 is.
        "top_p" => {
            sampling.top_p = Some(fields::number(reader, 0.0..=1.0, false)?).map(|p| if p == 0.0 { 1.0 } else { p });
        }
        "min_p" => sampling.min_p = Some(fields::number(reader, 0.0..=1.0, false)?),
        "top_k" => sampling.top_k = Some(fields::integer(reader, -1..=i128::from(u32::MAX))?.max(0) as u32),
        "presence_penalty" => sampling.presence_penalty = fields::number(reader, -2.0..=2.0, false)?,
        "frequency_penalty" => sampling.frequency_penalty = fields::number(reader, -2.0..=2.0, false)?,
        "repeat_penalty" => sampling.repetition_penalty = Some(fields::number(reader, 0.0..=2.0, true)?),
        // -1 is any seed.
        "seed" => {
            let seed = fields::integer(reader, i128::from(i64::MIN)..=i128::from(u64::MAX))?;
            sampling.seed = (seed != -1).then_some(seed as u64); // a negative seed is its two's complement
        }
        "stop" => {
            sampling.stop = fields::strings(reader, bounds.stop_max, bounds.stop_chars_max)?;
        }
        // -1 has no bound, -2 fills the context: the context is the bound of both.
        "num_predict" => {
            let tokens = fields::integer(reader, -2..=i128::from(u32::MAX))?;
            sampling.max_tokens = u32::try_from(tokens).ok().filter(|tokens| *tokens > 0);
        }
        // 1 is off; so is 0, which older clients of llama.cpp send.
        "tfs_z" | "typical_p" => neutral(reader, key, &[0.0, 1.0])?,
        "mirostat" => neutral(reader, key, &[0.0])?,
        "mirostat_tau" | "mirostat_eta" | "num_thread" | "num_gpu" | "main_gpu" | "num_batch" | "numa" | "low_vram"
        | "vocab_only" | "use_mmap" | "use_mlock" | "f16_kv" | "logits_all" | "embedding_only" => reader.skip()?,
        _ => {
            reader.skip()?;
            if ignored.len() < bounds.ignored_max {
                ignored.push(format!("options.{}", short(key)));
            }
        }
    }
    Ok(())
}

/// Accepts a parameter of a sampler that is not built only where it switches the sampler off.
fn neutral(reader: &mut Reader<'_>, key: &str, off: &[f64]) -> Result<(), Fault> {
    let lexeme = reader.number()?;
    if lexeme.parse::<f64>().is_ok_and(|value| off.contains(&value)) {
        return Ok(());
    }
    Err(Fault::of(ApiErrorKind::UnsupportedValue, format!("{key} is not built: got {}", short(lexeme))))
}
