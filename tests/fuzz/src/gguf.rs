//! A GGUF file of a small model: header, tensors and vocabulary.

use std::borrow::Cow;

use penstock_engine::checkpoint::Checkpoint;
use penstock_gguf::Gguf;

pub(crate) fn run(data: &[u8]) {
    let Ok(gguf) = Gguf::read("model.gguf", &mut &data[..], data.len() as u64) else {
        // What has no header is no checkpoint either.
        assert!(Checkpoint::from_gguf_bytes(Cow::Owned(data.to_vec())).is_err());
        return;
    };
    for tensor in gguf.tensors.values() {
        assert!(tensor.start <= data.len() as u64 && tensor.shape.len() <= 4);
    }
    let _ = penstock_gguf::sentence_files(&gguf);
    if let Ok(files) = penstock_gguf::text_files(&gguf) {
        let ends = penstock_gguf::end_tokens(&gguf).expect("a vocabulary that could be read");
        assert!(ends.is_sorted());
        // Both sides of a pool read the file: equal bytes are an equal hash.
        let again = penstock_gguf::text_files(&gguf).expect("the same again");
        assert_eq!(files.tokenizer_json, again.tokenizer_json);
        let _ = penstock_text::TextModel::from_gguf(&gguf);
    }
    if let Ok(checkpoint) = Checkpoint::from_gguf_bytes(Cow::Owned(data.to_vec())) {
        assert!(checkpoint.weights_bytes() > 0);
        let _ = penstock_engine::models::Model::context_tokens(checkpoint.config(), None);
    }
}
