//! Bytes of each token; the table itself is shared with the workers.

use crate::error::TextError;
use penstock_vocabulary::VocabularyError;

pub(crate) use penstock_vocabulary::TokenBytes;

const FILE: &str = "tokenizer.json";

impl From<VocabularyError> for TextError {
    fn from(error: VocabularyError) -> Self {
        match error {
            VocabularyError::Malformed { reason } => TextError::malformed(FILE, reason),
            VocabularyError::Unsupported { what } => TextError::Unsupported { file: FILE, what },
        }
    }
}
