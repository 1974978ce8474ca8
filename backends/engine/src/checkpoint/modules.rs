//! Modules of an embedding model, as sentence-transformers lists them: whether more than the last state is pooled, and the dense layers behind the
//! pooling, whose weights lie in folders of their own.
//!
//! A pulled checkpoint has no folders: `2_Dense/config.json` is `2_Dense.config.json` there. Modules that change nothing here are the gateway's to
//! refuse.

use serde_json::Value;

use super::files::{Folder, is_plain};
use super::safetensors::Entry;
use super::{CONFIG_BYTES_MAX, Found, MODULES, Shards};
use crate::model_config::error::{CheckpointError, Shown};
use crate::model_config::fields::{Fields, parse_object};
use crate::model_config::{ChainStep, DenseConfig, ModelConfig};
use penstock_kernels::RowOrder;

/// Most modules of a model; published ones have five.
const MODULES_MAX: usize = 32;
/// Most values of a dense layer's input or output.
const FEATURES_MAX: usize = 1 << 16;

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";

/// File of a module, by its name in a checkpoint's folder and its name in the store of pulled models.
fn of_module(folder: &Folder, module: &str, name: &str) -> String {
    let inner = format!("{module}/{name}");
    if folder.has(&inner) { inner } else { format!("{module}.{name}") }
}

/// Reads the list of modules, if the folder has one, into `config`.
pub(super) fn read(folder: &Folder, config: &mut ModelConfig) -> Result<(), CheckpointError> {
    let has_head = config.encoder.is_some_and(|encoder| encoder.head.is_some());
    let Some(bytes) = folder.read(MODULES, CONFIG_BYTES_MAX)?.filter(|_| !has_head) else { return Ok(()) };
    let shown = folder.shown(MODULES);
    let list: Vec<Value> = serde_json::from_slice(&bytes)
        .map_err(|error| CheckpointError::file(&shown, format!("is not a list of modules: {error}")))?;
    if list.len() > MODULES_MAX {
        let reason = format!("lists {} modules; {MODULES_MAX} are the most", list.len());
        return Err(CheckpointError::file(&shown, reason));
    }
    let is_pooling = |module: &Value| kind(module) == "Pooling";
    let pooling = list.iter().position(is_pooling).unwrap_or(0);
    let mut chain = Vec::new();
    for (at, module) in list.iter().enumerate() {
        let path = module.get("path").and_then(Value::as_str).unwrap_or_default();
        match kind(module) {
            "Pooling" if is_plain(path) => config.pools_all = pools_all(folder, path)?,
            kind @ ("Normalize" | "Dense") if at < pooling => {
                let reason = format!(
                    "the module {kind} stands before Pooling; a {kind} module is supported only behind Pooling"
                );
                return Err(CheckpointError::file(&shown, reason));
            }
            "Normalize" => chain.push(ChainStep::Normalize),
            "Dense" if is_plain(path) => {
                let width = width(&chain).unwrap_or(config.hidden_size);
                chain.push(ChainStep::Dense(dense(folder, path, width)?));
            }
            "Dense" => {
                let reason = format!("the module Dense is in \"{}\", which is no folder's name", Shown(path));
                return Err(CheckpointError::file(&shown, reason));
            }
            _ => {}
        }
    }
    while chain.last() == Some(&ChainStep::Normalize) {
        chain.pop();
    }
    config.chain = chain;
    Ok(())
}

/// Last part of a module's type: `Dense` of `sentence_transformers.models.Dense`.
fn kind(module: &Value) -> &str {
    module.get("type").and_then(Value::as_str).unwrap_or_default().rsplit('.').next().unwrap_or_default()
}

/// Values behind the last dense layer.
fn width(chain: &[ChainStep]) -> Option<usize> {
    let of = |step: &ChainStep| match step {
        ChainStep::Normalize => None,
        ChainStep::Dense(dense) => Some(dense.out_features),
    };
    chain.iter().rev().find_map(of)
}

/// Returns true if a pooling looks at other states than that of the last token.
fn pools_all(folder: &Folder, module: &str) -> Result<bool, CheckpointError> {
    let name = of_module(folder, module, CONFIG);
    let Some(bytes) = folder.read(&name, CONFIG_BYTES_MAX)? else { return Ok(false) };
    let map = parse_object(&folder.shown(&name), &bytes)?;
    let is_on = |(key, value): (&String, &Value)| match (key.as_str(), value) {
        ("pooling_mode_lasttoken", _) => false,
        ("pooling_mode", Value::String(mode)) => mode != "lasttoken",
        ("pooling_mode", Value::Array(modes)) => modes.iter().any(|mode| mode != "lasttoken"),
        (other, value) => other.starts_with("pooling_mode_") && value == &Value::Bool(true),
    };
    Ok(map.iter().any(is_on))
}

/// Reads the config of a dense layer over `width` values.
fn dense(folder: &Folder, module: &str, width: usize) -> Result<DenseConfig, CheckpointError> {
    let name = of_module(folder, module, CONFIG);
    let shown = folder.shown(&name);
    let Some(bytes) = folder.read(&name, CONFIG_BYTES_MAX)? else {
        return Err(CheckpointError::file(shown, format!("is missing, though {MODULES} names the module")));
    };
    let map = parse_object(&shown, &bytes)?;
    let f = Fields::new(&shown, &map);
    let in_features = f.required("in_features", 1, FEATURES_MAX)?;
    if in_features != width {
        return Err(f.refuse("in_features", format!("is {in_features}, and the module before it gives {width} values")));
    }
    if f.flag("use_residual", false)? {
        return Err(f.refuse("use_residual", "is true: a residual beside a dense layer is not supported"));
    }
    for name in ["module_input_name", "module_output_name"] {
        if let Some(other) = f.text(name)?.filter(|name| *name != "sentence_embedding") {
            let reason = format!("is \"{}\", only \"sentence_embedding\" is supported", Shown(other));
            return Err(f.refuse(name, reason));
        }
    }
    const ACTIVATION: &str = "activation_function";
    let activation = f.text(ACTIVATION)?.unwrap_or("Tanh");
    let tanh = match activation.rsplit('.').next().unwrap_or_default() {
        "Identity" => false,
        "Tanh" => true,
        _ => {
            let reason = format!("\"{}\" is not supported, only Identity and Tanh are", Shown(activation));
            return Err(f.refuse(ACTIVATION, reason));
        }
    };
    Ok(DenseConfig {
        folder: module.to_owned(),
        in_features,
        out_features: f.required("out_features", 1, FEATURES_MAX)?,
        bias: f.flag("bias", true)?,
        tanh,
    })
}

impl Shards {
    /// Finds the tensors of a dense layer in its own file, by the names under which the checkpoint lists them.
    pub(super) fn take_dense(
        &mut self,
        folder: &Folder,
        dense: &DenseConfig,
    ) -> Result<Vec<(String, Found)>, CheckpointError> {
        let name = of_module(folder, &dense.folder, WEIGHTS);
        let Some(bytes) = folder.map(&name)? else {
            let help = "only safetensors are read: a pytorch_model.bin is saved anew by sentence-transformers' save_pretrained";
            return Err(CheckpointError::file(folder.shown(&name), "is missing").help(help));
        };
        let file = self.files.len();
        self.add(folder.shown(&name), bytes)?;
        let matrix = dense.matrix();
        let mut needed = vec![(matrix.clone(), "linear.weight", vec![dense.out_features, dense.in_features])];
        if dense.bias {
            needed.push((crate::families::bias_of(&matrix), "linear.bias", vec![dense.out_features]));
        }
        let find = |(listed, stored, shape): (String, &str, Vec<usize>)| {
            let shown = &self.files[file].shown;
            let missing = || CheckpointError::tensor(shown, stored, format!("is missing (shape {shape:?})"));
            let entry: &Entry = self.entries[file].get(stored).ok_or_else(missing)?;
            let dtype = self.number_type(file, entry)?;
            if entry.shape != shape {
                let reason = format!("shape {:?}, {CONFIG} beside it needs {shape:?}", entry.shape);
                return Err(CheckpointError::tensor(shown, stored, reason));
            }
            let range = entry.range.clone();
            let order = RowOrder::Plain;
            Ok((listed, Found { file, dtype, shape, range, order, stacked: None, quantized: None }))
        };
        let found = needed.into_iter().map(find).collect::<Result<_, _>>()?;
        // The other tensors of the file are none of the model's.
        self.entries[file].clear();
        Ok(found)
    }
}
