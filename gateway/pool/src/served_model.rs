//! The model that a pool serves: known from the first worker that was ready, and the same at all workers. Where none is left, the next one may bring another,
//! since files of a model are replaced by others; its tokenizer must be the gateway's all the same.

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

    /// Takes in the model of a worker that is ready, and returns true if it is another than the pool had. The pool's context is the least of its workers'.
    /// `is_alone`: no other worker serves, and no request goes on that another one began.
    ///
    /// # Errors
    /// Reason that the worker cannot serve this pool: block size, tokenizer or model.
    pub(super) fn join(&mut self, ready: &Ready, is_alone: bool) -> Result<bool, &'static str> {
        self.suits(ready)?;
        let is_another = self.info.as_ref().is_some_and(|model| Self::is_another(model, ready));
        if is_another && !is_alone {
            return Err(
                "the worker serves another model than the rest of the pool; where the model's files were replaced, a reload of the config \
                        starts new workers with them",
            );
        }
        if is_another {
            self.info = None;
        }
        let context_tokens = ready.context_tokens;
        let model = self.info.get_or_insert_with(|| ModelInfo {
            model: ready.model.clone(),
            tokenizer_hash: ready.tokenizer_hash.clone(),
            model_hash: ready.model_hash.clone(),
            vocab_size: ready.vocab_size,
            context_tokens,
        });
        model.context_tokens = model.context_tokens.min(context_tokens);
        Ok(is_another)
    }

    fn is_another(model: &ModelInfo, ready: &Ready) -> bool {
        model.tokenizer_hash != ready.tokenizer_hash
            || model.model_hash != ready.model_hash
            || model.vocab_size != ready.vocab_size
    }

    fn suits(&self, ready: &Ready) -> Result<(), &'static str> {
        if ready.block_tokens as usize != BLOCK_TOKENS {
            return Err("the worker has another KV block size than this gateway");
        }
        if self.tokenizer_hash.as_ref().is_some_and(|hash| *hash != ready.tokenizer_hash) {
            return Err(
                "the worker has another tokenizer than this gateway; where the model's files were replaced, a reload of the config reads them \
                        again",
            );
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
            assert!(!model.join(&ready(context), false).expect("the same model"));
        }
        assert_eq!((model.vocab_size(), model.info().map(|model| model.context_tokens)), (100, Some(2048)));
    }

    #[test]
    fn a_worker_of_another_model_is_refused_and_changes_nothing() {
        let mut model = ServedModel::new(Some(vec![1]));
        let mut refused = |ready: Ready, part: &str| {
            let why = model.join(&ready, true).expect_err(part);
            assert!(why.contains(part), "{why}");
        };
        refused(Ready { block_tokens: 16, ..ready(1) }, "block size");
        refused(Ready { tokenizer_hash: vec![9], ..ready(1) }, "tokenizer");
        model.join(&ready(4096), true).expect("suits");
        let mut refused =
            |ready: Ready| assert!(model.join(&ready, false).expect_err("another").contains("another model"));
        refused(Ready { model_hash: vec![9], ..ready(1) });
        refused(Ready { vocab_size: 101, ..ready(1) });
        assert_eq!(model.info().map(|model| model.context_tokens), Some(4096));
    }

    #[test]
    fn a_worker_that_is_alone_may_bring_another_model_under_the_same_tokenizer() {
        let mut model = ServedModel::new(Some(vec![1]));
        assert_eq!(model.join(&ready(2048), true), Ok(false));
        let other = Ready { model_hash: vec![9], ..ready(8192) };
        assert_eq!(model.join(&other, true), Ok(true));
        let info = model.info().expect("a model");
        assert_eq!((info.model_hash.as_slice(), info.context_tokens), (&[9][..], 8192), "nothing of the old one");
        assert_eq!((model.join(&other, false), model.join(&ready(1), false).is_err()), (Ok(false), true));
        let tokenizer = Ready { tokenizer_hash: vec![9], ..other };
        let why = model.join(&tokenizer, true).expect_err("texts would become other tokens");
        assert!(why.contains("another tokenizer") && why.contains("a reload of the config"), "{why}");
    }
}
