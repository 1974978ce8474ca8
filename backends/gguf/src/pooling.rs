//! Pooling of an embedding model, as sentence-transformers' files say it (modules.json and 1_Pooling/config.json), and architectures of encoders.
//!
//! A GGUF file has one number for it (`pooling_type`), and whether a token ends a text (`add_eos_token`). Vectors have length 1, as llama.cpp's server
//! gives them: no key says whether the original scales them.

use serde_json::{Value as Json, json};

use crate::{Gguf, GgufError};

/// Key of whether the end token is put behind a text.
pub(crate) const ADD_END: &str = "tokenizer.ggml.add_eos_token";

/// Encoders by `general.architecture`, and their names in `config.json`.
const ENCODERS: [(&str, &str); 2] = [("bert", "BertModel"), ("nomic-bert", "NomicBertModel")];

/// Name that `config.json` has for the encoder of the file; `None` if the model is a decoder.
pub(crate) fn encoder(gguf: &Gguf) -> Result<Option<&'static str>, GgufError> {
    let name = gguf.text("general.architecture")?;
    Ok(ENCODERS.iter().find(|(theirs, _)| name == Some(*theirs)).map(|(_, ours)| *ours))
}

/// Files of sentence-transformers for the model of `gguf`, and of an encoder the config.json that names it; names and contents. A decoder that is no
/// embedding model has none.
///
/// # Errors
/// [`GgufError`] with the key: a pooling that is not known or not supported, or one by the last token in a file that does not say whether that is an
/// end token.
pub fn sentence_files(gguf: &Gguf) -> Result<Vec<(&'static str, Vec<u8>)>, GgufError> {
    let named = |name: &str| ("config.json", json!({ "architectures": [name] }).to_string().into_bytes());
    let mut files = Vec::from_iter(encoder(gguf)?.map(named));
    let Some(mode) = pooling(gguf)? else { return Ok(files) };
    let architecture = gguf.text("general.architecture")?.unwrap_or_default();
    let width = gguf.integer(&format!("{architecture}.embedding_length"), 1, u64::from(u32::MAX))?;
    let kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")];
    let module = |(at, (path, kind)): (usize, (&str, &str))| {
        let kind = format!("sentence_transformers.models.{kind}");
        json!({ "idx": at, "name": at.to_string(), "path": path, "type": kind })
    };
    let modules: Json = kinds.into_iter().enumerate().map(module).collect();
    let config = json!({ "word_embedding_dimension": width, "pooling_mode": mode });
    files.push(("modules.json", modules.to_string().into_bytes()));
    files.push(("1_Pooling/config.json", config.to_string().into_bytes()));
    Ok(files)
}

/// Pooling under sentence-transformers' name; `None` if the file has none: a decoder then makes text, a bare encoder the mean of its tokens.
pub(crate) fn pooling(gguf: &Gguf) -> Result<Option<&'static str>, GgufError> {
    const FOLDER: &str = "serve the original checkpoint, a folder with config.json";
    let Some(architecture) = gguf.text("general.architecture")? else { return Ok(None) };
    let key = format!("{architecture}.pooling_type");
    let mode = match gguf.integer(&key, 0, u64::from(u32::MAX))? {
        None | Some(0) => return Ok(None),
        Some(1) => "mean",
        Some(2) => "cls",
        Some(3) => "lasttoken",
        Some(4) => {
            let reason = "is 4: a reranker's classification head is not supported in GGUF files";
            return Err(gguf.refuse(&key, reason).help(FOLDER));
        }
        Some(other) => {
            let reason = format!("is {other}, supported: 0 (none), 1 (mean), 2 (first token) and 3 (last token)");
            return Err(gguf.refuse(&key, reason).help(FOLDER));
        }
    };
    // Files from before the key would be served with the state of another token. Texts of encoders always have an end token.
    if mode == "lasttoken" && encoder(gguf)?.is_none() && gguf.flag(ADD_END)?.is_none() {
        let reason = "is missing: the vector is the state of a text's last token, and the file does not say whether that is an end token";
        return Err(gguf.refuse(ADD_END, reason).help("convert the model again with a newer llama.cpp"));
    }
    Ok(Some(mode))
}
