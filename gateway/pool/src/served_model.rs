//! The model that a pool serves: known from the first worker that was ready, and the same at all workers.

use super::status::ModelInfo;
use penstock_proto::BLOCK_TOKENS;
use penstock_proto::frames::Ready;

/// Model of a pool and the tokenizer that it must have; see the module header.
pub(super) struct ServedModel {
    /// BLAKE3 of the gateway's tokenizer; `None`: the first worker's tokenizer is taken.
    tokenizer_hash: Option<Vec<u8>>,
    info: Option<ModelInfo>,
}

impl ServedModel {
    /// Model that is not known yet; with `tokenizer_hash` its tokenizer is.
    pub(super) fn new(tokenizer_hash: Option<Vec<u8>>) -> Self {
        Self { tokenizer_hash, info: None }
    }

    /// Name, hashes and context length; `None` until a worker was ready.
    pub(super) fn info(&self) -> Option<&ModelInfo> {
        self.info.as_ref()
    }

    /// Upper bound of token ids; 0 until a worker was ready.
    pub(super) fn vocab_size(&self) -> u32 {
        self.info.as_ref().map_or(0, |model| model.vocab_size)
    }

    /// Takes in the model of a worker that is ready. The pool's context is the least of its workers'.
    ///
    /// # Errors
    /// Reason that the worker cannot serve this pool: block size, tokenizer or model.
    pub(super) fn join(&mut self, ready: &Ready) -> Result<(), &'static str> {
        self.suits(ready)?;
        let context_tokens = ready.context_tokens;
        let model = self.info.get_or_insert_with(|| ModelInfo {
            model: ready.model.clone(),
            tokenizer_hash: ready.tokenizer_hash.clone(),
            model_hash: ready.model_hash.clone(),
            vocab_size: ready.vocab_size,
            context_tokens,
        });
        model.context_tokens = model.context_tokens.min(context_tokens);
        Ok(())
    }

    fn suits(&self, ready: &Ready) -> Result<(), &'static str> {
        if ready.block_tokens as usize != BLOCK_TOKENS {
            return Err("the worker has another KV block size than this gateway");
        }
        if self.tokenizer_hash.as_ref().is_some_and(|hash| *hash != ready.tokenizer_hash) {
            return Err("the worker has another tokenizer than this gateway");
        }
        let is_another = |model: &ModelInfo| {
            model.tokenizer_hash != ready.tokenizer_hash
                || model.model_hash != ready.model_hash
                || model.vocab_size != ready.vocab_size
        };
        if self.info.as_ref().is_some_and(is_another) {
            return Err("the worker serves another model than the rest of the pool");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(context_tokens: u32) -> Ready {
        Ready {
            block_tokens: BLOCK_TOKENS as u32,
            tokenizer_hash: vec![1],
            model_hash: vec![2],
            vocab_size: 100,
            context_tokens,
            ..Ready::default()
        }
    }

    #[test]
    fn the_context_is_the_least_of_the_workers() {
        let mut model = ServedModel::new(None);
        assert_eq!((model.vocab_size(), model.info()), (0, None));
        for context in [4096, 8192, 2048] {
            model.join(&ready(context)).expect("the same model");
        }
        assert_eq!((model.vocab_size(), model.info().map(|model| model.context_tokens)), (100, Some(2048)));
    }

    #[test]
    fn a_worker_of_another_model_is_refused_and_changes_nothing() {
        let mut model = ServedModel::new(Some(vec![1]));
        let mut refused = |ready: Ready, part: &str| {
            let why = model.join(&ready).expect_err(part);
            assert!(why.contains(part), "{why}");
        };
        refused(Ready { block_tokens: 16, ..ready(1) }, "block size");
        refused(Ready { tokenizer_hash: vec![9], ..ready(1) }, "tokenizer");
        model.join(&ready(4096)).expect("suits");
        let mut refused = |ready: Ready| assert!(model.join(&ready).expect_err("another").contains("another model"));
        refused(Ready { model_hash: vec![9], ..ready(1) });
        refused(Ready { vocab_size: 101, ..ready(1) });
        assert_eq!(model.info().map(|model| model.context_tokens), Some(4096));
    }
}
