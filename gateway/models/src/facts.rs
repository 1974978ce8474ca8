//! Facts about a stored model for lists: format, quantization, context length. Read from the headers, never from weights.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use penstock_gguf::{Gguf, Value};
use serde::{Deserialize, Serialize};

/// Largest config.json that is read, in bytes.
const CONFIG_BYTES_MAX: u64 = 4 << 20;

/// Longest fact in characters: headers come from whoever made the model.
const FACT_MAX: usize = 200;

/// Format and sizes of a model, as far as its headers tell.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// `gguf` or `safetensors`.
    pub format: String,
    /// Type of most weights: `Q4_K_M`, `bf16`.
    pub quantization: Option<String>,
    /// Architecture as the model names it: `qwen3`, `Qwen3ForCausalLM`.
    pub architecture: Option<String>,
    /// Longest context in tokens.
    pub context_tokens: Option<u64>,
}

/// Facts of the model at `path`, a checkpoint folder or a GGUF file of `variant`.
pub(crate) fn read(path: &Path, variant: &str) -> Facts {
    if path.is_dir() { of_config(path).unwrap_or_default() } else { of_gguf(path, variant).unwrap_or_default() }
}

#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    architectures: Vec<String>,
    #[serde(alias = "torch_dtype")]
    dtype: Option<String>,
    max_position_embeddings: Option<u64>,
    quantization_config: Option<serde_json::Value>,
}

/// Name of a checkpoint's quantization: `gptq 4 bits`, `fp8`, `compressed-tensors pack-quantized`.
fn quantized(config: &serde_json::Value) -> Option<String> {
    let text = |name: &str| config.get(name).and_then(serde_json::Value::as_str);
    let method = text("quant_method")?;
    let format = text("format").filter(|_| method == "compressed-tensors").map(str::to_owned);
    let bits = config.get("bits").and_then(serde_json::Value::as_u64).map(|bits| format!("{bits} bits"));
    Some([Some(method.to_owned()), format, bits].into_iter().flatten().collect::<Vec<_>>().join(" "))
}

fn of_config(folder: &Path) -> Option<Facts> {
    let mut bytes = Vec::new();
    File::open(folder.join("config.json")).ok()?.take(CONFIG_BYTES_MAX).read_to_end(&mut bytes).ok()?;
    let config: Config = serde_json::from_slice(&bytes).ok()?;
    let short = |name: String| match name.as_str() {
        "bfloat16" => "bf16".to_owned(),
        "float16" => "f16".to_owned(),
        "float32" => "f32".to_owned(),
        _ => name,
    };
    let quantized = config.quantization_config.as_ref().and_then(quantized);
    Some(Facts {
        format: "safetensors".to_owned(),
        quantization: quantized.or(config.dtype.map(short)).as_deref().map(bounded),
        architecture: config.architectures.into_iter().next().as_deref().map(bounded),
        context_tokens: config.max_position_embeddings,
    })
}

fn of_gguf(path: &Path, variant: &str) -> Option<Facts> {
    let gguf = Gguf::open(path).ok()?;
    let Some(Value::Text(architecture)) = gguf.metadata.get("general.architecture") else { return None };
    let context = gguf.integer(&format!("{architecture}.context_length"), 0, u64::MAX);
    Some(Facts {
        format: "gguf".to_owned(),
        quantization: Some(variant.to_owned()),
        architecture: Some(bounded(architecture)),
        context_tokens: context.ok().flatten(),
    })
}

fn bounded(text: &str) -> String {
    text.chars().take(FACT_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fact_is_short_whatever_the_header_says() {
        let folder = std::env::temp_dir().join(format!("penstock-facts-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let config = format!(r#"{{"architectures": [{:?}], "dtype": "bfloat16"}}"#, "ä".repeat(1000));
        std::fs::write(folder.join("config.json"), config).expect("written");
        let facts = read(&folder, "safetensors");
        std::fs::remove_dir_all(&folder).expect("removed");
        assert_eq!(facts.architecture, Some("ä".repeat(FACT_MAX)));
        assert_eq!(facts.quantization.as_deref(), Some("bf16"));
    }

    #[test]
    fn a_quantized_checkpoint_is_named_by_its_form() {
        let of = |form: &str| {
            let folder = std::env::temp_dir().join(format!("penstock-facts-form-{}", std::process::id()));
            std::fs::create_dir_all(&folder).expect("a folder");
            let config = format!(r#"{{"dtype": "float16", "quantization_config": {form}}}"#);
            std::fs::write(folder.join("config.json"), config).expect("written");
            let facts = read(&folder, "safetensors");
            std::fs::remove_dir_all(&folder).expect("removed");
            facts.quantization
        };
        let text = |name: &str| Some(name.to_owned());
        assert_eq!(of(r#"{"quant_method": "gptq", "bits": 4, "format": "gptq"}"#), text("gptq 4 bits"));
        assert_eq!(of(r#"{"quant_method": "fp8"}"#), text("fp8"));
        let packed = r#"{"quant_method": "compressed-tensors", "format": "pack-quantized"}"#;
        assert_eq!(of(packed), text("compressed-tensors pack-quantized"));
        assert_eq!((of("null"), of("{}")), (text("f16"), text("f16")));
    }
}
