//! Tokenizers of foreign servers, each loaded once for all servers that share it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

use penstock_text::TextModel;

static LOADED: LazyLock<Mutex<HashMap<PathBuf, Weak<TextModel>>>> = LazyLock::new(Mutex::default);

/// Loads the tokenizer and chat template of a model folder, or returns the loaded ones. Blocks for the time of reading:
/// not for threads that serve requests.
pub(super) fn text_of(folder: &Path) -> Result<Arc<TextModel>, String> {
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(text) = loaded.get(folder).and_then(Weak::upgrade) {
        return Ok(text);
    }
    let text = Arc::new(TextModel::from_dir(folder).map_err(|error| error.to_string())?);
    loaded.retain(|_, text| text.strong_count() > 0);
    loaded.insert(folder.to_owned(), Arc::downgrade(&text));
    Ok(text)
}
