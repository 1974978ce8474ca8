//! The JSON files of a checkpoint beside good weights: the first byte says which file the rest of the input is.

use std::borrow::Cow;

use penstock_engine::checkpoint::Checkpoint;

static CONFIG: &[u8] = include_bytes!("../../../models/penstock-demo/config.json");
static WEIGHTS: &[u8] = include_bytes!("../../../models/penstock-demo/model.safetensors");

pub(crate) fn run(data: &[u8]) {
    let Some((which, data)) = data.split_first() else { return };
    let owned = |name: &str| (name.to_owned(), Cow::Owned(data.to_vec()));
    let fixed = |name: &str, bytes| (name.to_owned(), Cow::Borrowed(bytes));
    let files = match which % 3 {
        0 => vec![owned("config.json"), fixed("model.safetensors", WEIGHTS)],
        1 => vec![fixed("config.json", CONFIG), owned("generation_config.json"), fixed("model.safetensors", WEIGHTS)],
        _ => vec![fixed("config.json", CONFIG), owned("model.safetensors.index.json"), fixed("a.safetensors", WEIGHTS)],
    };
    if let Ok(checkpoint) = Checkpoint::from_buffers(files) {
        assert!(checkpoint.weights_bytes() > 0);
        let _ = penstock_engine::models::Model::context_tokens(checkpoint.config(), None);
    }
}
