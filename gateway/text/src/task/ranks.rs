//! Rules of a reranker: the question that a model is asked of a query and a document, and the score that is made of its answer.

use std::path::Path;

use super::{CONFIG, Config, TaskFiles};
use crate::error::TextError;
use crate::model::TextModel;

/// Instruction to a reranker whose operator names none, and text around query and document: those of Qwen3-Reranker.
const INSTRUCTION: &str = "Given a web search query, retrieve relevant passages that answer the query";
const OPENING: &str = "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct \
                       provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n";
const CLOSING: &str = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";

/// Rules of a reranker.
#[derive(Clone, Debug, PartialEq)]
pub enum RankRules {
    /// The model says whether a document answers a query.
    Answer(AnswerRules),
    /// A classification head gives a value of query and document.
    Head(HeadRules),
}

/// Rules of a classification head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadRules {
    /// Score that is made of the head's value.
    pub score: HeadScore,
    /// True if the model is told of the second text by the types of its tokens.
    pub has_types: bool,
}

/// Score that is made of a head's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadScore {
    /// Sigmoid of the value.
    Sigmoid,
    /// The value itself.
    Plain,
}

/// Rules of a reranker that answers "yes" or "no" about a query and a document (Qwen3-Reranker): the score is the share
/// of "yes" in the probability of the two.
#[derive(Clone, Debug, PartialEq)]
pub struct AnswerRules {
    /// Token of the answer "yes".
    pub yes: u32,
    /// Token of the answer "no".
    pub no: u32,
    /// Tokens before the instruction.
    opening: Vec<u32>,
    /// Tokens behind the document.
    closing: Vec<u32>,
}

/// Tokens of a query and a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Tokens of both, with what the model needs around them.
    pub tokens: Vec<u32>,
    /// Index of the first token of the second type; 0 if there is none.
    pub second_text: usize,
}

impl RankRules {
    /// Rules for the tokenizer of a model that answers in words.
    ///
    /// # Errors
    /// [`TextError`] if the vocabulary lacks one of the two answers.
    pub fn answer(model: &TextModel) -> Result<Self, TextError> {
        let id = |word: &str| {
            let missing =
                || TextError::malformed("tokenizer.json", format!("has no token {word:?}: this is no reranker"));
            model.token_id(word).ok_or_else(missing)
        };
        let (yes, no) = (id("yes")?, id("no")?);
        let (opening, closing) = (model.encode(OPENING, false)?, model.encode(CLOSING, false)?);
        Ok(Self::Answer(AnswerRules { yes, no, opening, closing }))
    }

    /// Rules of the checkpoint folder `dir` of an encoder with a head: a sigmoid, unless sentence-transformers' CrossEncoder has
    /// written another function.
    ///
    /// # Errors
    /// [`TextError`] of a config that cannot be read, or that names a function which is not served.
    pub fn head(dir: &Path) -> Result<Self, TextError> {
        let config = TaskFiles { dir, made: None }.parse::<Config>(CONFIG)?.unwrap_or_default();
        // ModernBERT's tokenizer gives the second text a type, and its model has none; nor has MPNet.
        let has_types = !["ModernBert", "MPNet"].iter().any(|family| config.architecture().starts_with(family));
        let named = config
            .sentence_transformers
            .and_then(|said| said.activation_fn)
            .or(config.sbert_ce_default_activation_function);
        match named.as_deref().map(|name| name.rsplit('.').next().unwrap_or_default()) {
            None | Some("Sigmoid") => Ok(Self::Head(HeadRules { score: HeadScore::Sigmoid, has_types })),
            Some("Identity") => Ok(Self::Head(HeadRules { score: HeadScore::Plain, has_types })),
            Some(other) => {
                let reason = format!("activation_fn: {other:?} is not served, only Sigmoid and Identity are");
                Err(TextError::malformed(CONFIG, reason))
            }
        }
    }

    /// Tokens of the question whether `document` answers `query`. Names of control tokens in either are plain text.
    ///
    /// # Errors
    /// [`TextError`] of a text that is too long or cannot be tokenized.
    pub fn question(&self, model: &TextModel, query: &str, document: &str) -> Result<Question, TextError> {
        let rules = match self {
            Self::Answer(rules) => rules,
            Self::Head(head) => {
                let (tokens, second_text) = model.encode_pair(query, document)?;
                return Ok(Question { tokens, second_text: if head.has_types { second_text } else { 0 } });
            }
        };
        let text = format!("<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>: {document}");
        let tokens = [rules.opening.as_slice(), &model.encode_plain(&text)?, &rules.closing].concat();
        Ok(Question { tokens, second_text: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::tests::Dir;
    use crate::{Encoder, VectorRules};

    #[test]
    fn a_model_without_types_is_not_told_of_a_second_text() {
        for family in ["ModernBert", "MPNet"] {
            let config = format!(r#"{{"architectures": ["{family}ForSequenceClassification"]}}"#);
            let dir = Dir::new(&format!("typeless-{family}"), &[(CONFIG, &config)]);
            let want = HeadRules { score: HeadScore::Sigmoid, has_types: false };
            assert_eq!(RankRules::head(&dir.0).map_err(|error| error.to_string()), Ok(RankRules::Head(want)));
        }
    }

    #[test]
    fn a_head_says_what_its_scores_are() {
        let of = |name: &str, more: &str| {
            let config = format!(r#"{{"architectures": ["XLMRobertaForSequenceClassification"]{more}}}"#);
            let dir = Dir::new(&format!("head-{name}"), &[(CONFIG, &config)]);
            assert_eq!(Encoder::of(&dir.0).expect("a config"), Some(Encoder::Head));
            assert_eq!(VectorRules::read(&dir.0).expect("a config"), None);
            RankRules::head(&dir.0).map_err(|error| error.to_string())
        };
        let identity = "torch.nn.modules.linear.Identity";
        let head = |score| Ok(RankRules::Head(HeadRules { score, has_types: true }));
        assert_eq!(of("none", ""), head(HeadScore::Sigmoid));
        let null = r#", "sentence_transformers": null"#;
        assert_eq!(of("null", null), head(HeadScore::Sigmoid), "as if it were not there");
        let new = format!(r#", "sentence_transformers": {{"activation_fn": "{identity}", "version": "4.0.1"}}"#);
        assert_eq!(of("new", &new), head(HeadScore::Plain));
        let old = format!(r#", "sbert_ce_default_activation_function": "{identity}""#);
        assert_eq!(of("old", &old), head(HeadScore::Plain));
        let error = of("other", r#", "sentence_transformers": {"activation_fn": "a.b.Tanh"}"#).expect_err("not served");
        assert!(error.contains("Tanh"), "{error}");
    }
}
