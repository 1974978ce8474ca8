//! Rules of an embedding model: which states of a text's tokens become its vector, and what is put before the text.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use super::{CONFIG, Config, Encoder, MASKED, TaskFiles};
use crate::error::TextError;
use crate::model::{CONFIG_BYTES_MAX, TextModel, read_named};

const MODULES: &str = "modules.json";
const POOLING: &str = "1_Pooling/config.json";
/// Name of the same file in the store of pulled models, which has no folders.
const POOLING_PULLED: &str = "1_Pooling.config.json";
const SENTENCES: &str = "config_sentence_transformers.json";
const LENGTHS: &str = "sentence_bert_config.json";

/// Most prompts of a checkpoint, and longest one in bytes.
const PROMPTS_MAX: usize = 256;
const PROMPT_BYTES_MAX: usize = 16 << 10;

/// Rule by which states of tokens become a vector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VectorPooling {
    /// State of the last token.
    #[default]
    Last,
    /// State of the first token.
    First,
    /// Mean of the states of all tokens.
    Mean,
    /// Sum of the states of all tokens over the root of their number.
    RootMean,
    /// Mean in which a token weighs as much as its place, counted from 1.
    WeightedMean,
    /// Largest value of each component.
    Max,
}

/// Rules of an embedding model: what is put before a text, and what becomes of its tokens' states.
#[derive(Clone, Debug, PartialEq)]
pub struct VectorRules {
    /// Rule by which states become a vector.
    pub pooling: VectorPooling,
    /// Dense layers that a vector goes through behind the pooling.
    pub dense_layers: u32,
    /// True if the tokens of a prompt are not pooled.
    pub skips_prompt: bool,
    /// True if vectors are scaled to length 1.
    pub normalize: bool,
    /// Components of a whole vector, where the checkpoint says so.
    pub width: Option<u32>,
    /// Longest text in tokens, if that is less than the context.
    pub tokens_max: Option<u32>,
    /// True if texts are made lower case before they are tokenized.
    pub lowercases: bool,
    /// Prompts that are put before texts, by the name of their purpose.
    prompts: BTreeMap<String, String>,
    /// Name of the prompt before texts without a purpose.
    default_prompt: Option<String>,
}

impl Default for VectorRules {
    /// Rules of a checkpoint that says nothing: the whole state, scaled to length 1.
    fn default() -> Self {
        let (prompts, default_prompt) = Default::default();
        let (pooling, lowercases) = Default::default();
        let (dense_layers, skips_prompt) = (0, false);
        let (width, tokens_max, normalize) = (None, None, true);
        Self { pooling, dense_layers, skips_prompt, normalize, width, tokens_max, lowercases, prompts, default_prompt }
    }
}

#[derive(Deserialize)]
struct Module {
    #[serde(default)]
    path: String,
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Pooling {
    pooling_mode_lasttoken: bool,
    pooling_mode_cls_token: bool,
    pooling_mode_mean_tokens: bool,
    pooling_mode_max_tokens: bool,
    pooling_mode_mean_sqrt_len_tokens: bool,
    pooling_mode_weightedmean_tokens: bool,
    pooling_mode: Option<String>,
    include_prompt: Option<bool>,
    word_embedding_dimension: Option<u32>,
    embedding_dimension: Option<u32>,
}

impl Pooling {
    /// Names of the modes that are on; vectors of several are joined.
    fn modes(&self) -> Vec<&str> {
        let flags = [
            ("lasttoken", self.pooling_mode_lasttoken),
            ("cls", self.pooling_mode_cls_token),
            ("mean", self.pooling_mode_mean_tokens),
            ("max", self.pooling_mode_max_tokens),
            ("mean_sqrt_len_tokens", self.pooling_mode_mean_sqrt_len_tokens),
            ("weightedmean", self.pooling_mode_weightedmean_tokens),
        ];
        let on = flags.into_iter().filter(|(_, on)| *on).map(|(name, _)| name);
        on.chain(self.pooling_mode.as_deref()).collect()
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Sentences {
    prompts: BTreeMap<String, String>,
    default_prompt_name: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Lengths {
    max_seq_length: Option<u32>,
    do_lower_case: Option<bool>,
}

impl VectorRules {
    /// Reads the rules of the checkpoint folder or GGUF file `dir`; `None` if it is no embedding model. A bare encoder without
    /// sentence-transformers' files is one: the mean of all tokens, scaled to length 1. One with a head for masked tokens needs them.
    ///
    /// # Errors
    /// [`TextError`] with the file and what in it is not served.
    pub fn read(dir: &Path) -> Result<Option<Self>, TextError> {
        Self::of(&TaskFiles::open(dir)?)
    }

    /// Reads the rules as [`VectorRules::read`] does, from files that are open.
    ///
    /// # Errors
    /// [`TextError`] with the file and what in it is not served.
    pub fn of(files: &TaskFiles<'_>) -> Result<Option<Self>, TextError> {
        let config = files.parse::<Config>(CONFIG)?.unwrap_or_default();
        let encoder = Encoder::named(config.architecture());
        let Some(modules) = files.parse::<Vec<Module>>(MODULES)? else {
            if encoder.is_some() && config.architecture().ends_with(MASKED) {
                let reason = format!(
                    "{} has a head for masked tokens; without {MODULES} it does not say how vectors are made of it",
                    config.architecture()
                );
                return Err(TextError::malformed(CONFIG, reason));
            }
            let mean = Self { pooling: VectorPooling::Mean, ..Self::default() };
            return Ok(encoder.filter(|encoder| *encoder == Encoder::States).map(|_| mean));
        };
        let mut rules = Self { normalize: false, ..Self::default() };
        let mut is_pooled = false;
        for module in &modules {
            match module.kind.rsplit('.').next().unwrap_or_default() {
                "Transformer" if module.path.is_empty() => {}
                "Pooling" if module.path == "1_Pooling" && !is_pooled => {
                    rules.read_pooling(files)?;
                    is_pooled = true;
                }
                "Dense" if is_pooled && is_folder(&module.path) && rules.dense_layers < DENSE_MAX => {
                    rules.width = Some(dense_width(files.dir, &module.path)?);
                    // Workers scale what a dense layer takes; here the last one is scaled.
                    (rules.dense_layers, rules.normalize) = (rules.dense_layers + 1, false);
                }
                "Normalize" if is_pooled => rules.normalize = true,
                other => {
                    let reason = format!(
                        "the module {other} in {:?} is not served there: one Transformer, one Pooling in 1_Pooling, and behind it Dense and \
                         Normalize are",
                        module.path
                    );
                    return Err(TextError::malformed(MODULES, reason));
                }
            }
        }
        rules.read_prompts(files)?;
        let lengths = files.parse::<Lengths>(LENGTHS)?.unwrap_or_default();
        (rules.tokens_max, rules.lowercases) = (lengths.max_seq_length, lengths.do_lower_case.unwrap_or_default());
        if rules.tokens_max == Some(0) {
            return Err(TextError::malformed(LENGTHS, "max_seq_length is 0"));
        }
        Ok(Some(rules))
    }

    fn read_prompts(&mut self, files: &TaskFiles<'_>) -> Result<(), TextError> {
        let Sentences { prompts, default_prompt_name } = files.parse(SENTENCES)?.unwrap_or_default();
        if prompts.len() > PROMPTS_MAX || prompts.values().any(|prompt| prompt.len() > PROMPT_BYTES_MAX) {
            let reason = format!("more than {PROMPTS_MAX} prompts, or one of more than {PROMPT_BYTES_MAX} bytes");
            return Err(TextError::malformed(SENTENCES, reason));
        }
        if let Some(name) = default_prompt_name.as_ref().filter(|name| !prompts.contains_key(*name)) {
            return Err(TextError::malformed(
                SENTENCES,
                format!("default_prompt_name {name:?} is none of the prompts"),
            ));
        }
        (self.prompts, self.default_prompt) = (prompts, default_prompt_name);
        Ok(())
    }

    /// Number of a text's first tokens that are not pooled: those of `prompt` and of what the tokenizer puts before it.
    ///
    /// # Errors
    /// [`TextError`] of a prompt that cannot be tokenized.
    pub fn unpooled(&self, model: &TextModel, prompt: &str) -> Result<usize, TextError> {
        if !self.skips_prompt || prompt.is_empty() {
            return Ok(0);
        }
        let prompt = if self.lowercases { prompt.to_lowercase() } else { prompt.to_owned() };
        let tokens = model.encode(&prompt, true)?;
        // As sentence-transformers counts: a token that ends a text is not the prompt's.
        let is_ended = tokens.last().is_some_and(|token| model.is_special(*token));
        Ok(tokens.len() - usize::from(is_ended))
    }

    /// Text that is put before a text with this purpose; `None` if the model has no prompt for it. Purposes are those
    /// of Gemini's `taskType`.
    pub fn prompt(&self, purpose: Option<&str>) -> Option<&str> {
        let names: &[&str] = match purpose {
            None | Some("TASK_TYPE_UNSPECIFIED") => {
                return Some(self.default_prompt.as_ref().map_or("", |name| self.prompts[name].as_str()));
            }
            Some("RETRIEVAL_QUERY" | "QUESTION_ANSWERING" | "FACT_VERIFICATION") => &["query"],
            Some("RETRIEVAL_DOCUMENT") => &["document", "passage"],
            Some("SEMANTIC_SIMILARITY") => &["sts", "STS"],
            Some("CLASSIFICATION") => &["classification", "Classification"],
            Some("CLUSTERING") => &["clustering", "Clustering"],
            Some(_) => &[],
        };
        names.iter().find_map(|name| self.prompts.get(*name)).map(String::as_str)
    }
}

/// Most dense layers of a model; published ones have two.
const DENSE_MAX: u32 = 16;

/// Returns true if a module's path is the name of a folder.
fn is_folder(path: &str) -> bool {
    let mut parts = Path::new(path).components();
    matches!((parts.next(), parts.next()), (Some(std::path::Component::Normal(part)), None) if part == path)
}

#[derive(Deserialize)]
struct Dense {
    out_features: u32,
}

/// Components of a vector behind the dense layer in the folder `module`. Workers check the rest of it.
fn dense_width(dir: &Path, module: &str) -> Result<u32, TextError> {
    let names = ["/", "."].map(|between| format!("{module}{between}{CONFIG}"));
    let there = names.iter().find(|name| dir.join(name).is_file());
    let refused = |reason: String| TextError::malformed(MODULES, format!("{}: {reason}", names[0]));
    let Some(name) = there else { return Err(refused("is missing, though the list names its module".into())) };
    let bytes = read_named(dir, name, CONFIG_BYTES_MAX)?.unwrap_or_default();
    if bytes.len() as u64 > CONFIG_BYTES_MAX {
        return Err(refused(format!("has more than {CONFIG_BYTES_MAX} bytes")));
    }
    let dense: Dense = serde_json::from_slice(&bytes).map_err(|error| refused(error.to_string()))?;
    Ok(dense.out_features)
}

impl VectorRules {
    /// Reads the pooling, and the width of the vectors behind it.
    fn read_pooling(&mut self, files: &TaskFiles<'_>) -> Result<(), TextError> {
        let pooling = files.parse::<Pooling>(POOLING)?;
        let Some(pooling) = pooling.map_or_else(|| files.parse(POOLING_PULLED), |found| Ok(Some(found)))? else {
            return Err(TextError::malformed(POOLING, format!("is missing, though {MODULES} names it")));
        };
        let modes = pooling.modes();
        self.pooling = match modes.as_slice() {
            ["lasttoken"] => VectorPooling::Last,
            ["cls"] => VectorPooling::First,
            ["mean"] => VectorPooling::Mean,
            ["mean_sqrt_len_tokens"] => VectorPooling::RootMean,
            ["weightedmean"] => VectorPooling::WeightedMean,
            ["max"] => VectorPooling::Max,
            others => {
                let served = "by one of lasttoken, cls, mean, mean_sqrt_len_tokens, weightedmean, max";
                return Err(TextError::malformed(
                    POOLING,
                    format!("pooling by {others:?} is not served, only {served}"),
                ));
            }
        };
        self.skips_prompt = pooling.include_prompt == Some(false) && self.pooling != VectorPooling::Last;
        self.width = pooling.word_embedding_dimension.or(pooling.embedding_dimension);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::tests::Dir;

    const TRANSFORMER: &str = r#"{"idx":0,"name":"0","path":"","type":"sentence_transformers.models.Transformer"}"#;
    const POOL: &str = r#"{"idx":1,"name":"1","path":"1_Pooling","type":"sentence_transformers.models.Pooling"}"#;
    const NORM: &str = r#"{"idx":2,"name":"2","path":"2_Normalize","type":"sentence_transformers.models.Normalize"}"#;
    const LAST: &str =
        r#"{"word_embedding_dimension": 96, "pooling_mode_mean_tokens": false, "pooling_mode_lasttoken": true}"#;

    fn modules(all: &[&str]) -> String {
        format!("[{}]", all.join(","))
    }

    #[test]
    fn an_embedding_model_says_how_its_vectors_are_made() {
        let list = modules(&[TRANSFORMER, POOL, NORM]);
        let sentences = r#"{"prompts":{"query":"Instruct: find\nQuery:","document":""},"default_prompt_name":null}"#;
        let lengths = r#"{"max_seq_length": 512, "do_lower_case": false}"#;
        let files = [(MODULES, list.as_str()), (POOLING, LAST), (SENTENCES, sentences), (LENGTHS, lengths)];
        let dir = Dir::new("whole", &files);
        let rules = VectorRules::read(&dir.0).expect("rules").expect("an embedding model");
        assert_eq!((rules.normalize, rules.width, rules.tokens_max), (true, Some(96), Some(512)));
        let prompts = [None, Some("RETRIEVAL_QUERY"), Some("RETRIEVAL_DOCUMENT"), Some("CLUSTERING"), Some("x")];
        let want = [Some(""), Some("Instruct: find\nQuery:"), Some(""), None, None];
        assert_eq!(prompts.map(|purpose| rules.prompt(purpose)), want);

        let list = modules(&[TRANSFORMER, POOL]);
        let sentences = r#"{"prompts":{"query":"Q:"},"default_prompt_name":"query"}"#;
        let dir = Dir::new("pulled", &[(MODULES, &list), (POOLING_PULLED, LAST), (SENTENCES, sentences)]);
        let rules = VectorRules::read(&dir.0).expect("rules").expect("an embedding model");
        assert_eq!((rules.normalize, rules.tokens_max, rules.prompt(None)), (false, None, Some("Q:")));
    }

    #[test]
    fn a_checkpoint_without_modules_makes_text() {
        let dir = Dir::new("none", &[(POOLING, LAST)]);
        assert_eq!(VectorRules::read(&dir.0).expect("nothing is wrong"), None);
    }

    const BERT: &str = r#"{"architectures": ["BertModel"]}"#;

    #[test]
    fn an_encoder_pools_by_its_first_token_or_the_mean() {
        let list = modules(&[TRANSFORMER, POOL, NORM]);
        for (name, pooling, rule) in [
            ("cls", r#"{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}"#, VectorPooling::First),
            (
                "new",
                r#"{"embedding_dimension": 96, "pooling_mode": "mean", "include_prompt": true}"#,
                VectorPooling::Mean,
            ),
            ("last", LAST, VectorPooling::Last),
            ("max", r#"{"pooling_mode_max_tokens": true}"#, VectorPooling::Max),
            ("root", r#"{"pooling_mode_mean_sqrt_len_tokens": true}"#, VectorPooling::RootMean),
            ("weighted", r#"{"pooling_mode_weightedmean_tokens": true}"#, VectorPooling::WeightedMean),
        ] {
            let lengths = r#"{"max_seq_length": 256, "do_lower_case": true}"#;
            let files = [(CONFIG, BERT), (MODULES, &list), (POOLING, pooling), (LENGTHS, lengths)];
            let dir = Dir::new(&format!("encoder-{name}"), &files);
            let rules = VectorRules::read(&dir.0).expect("rules").expect("an embedding model");
            assert_eq!((rules.pooling, rules.tokens_max, rules.lowercases), (rule, Some(256), true), "{name}");
        }
        let dir = Dir::new("encoder-bare", &[(CONFIG, BERT)]);
        let rules = VectorRules::read(&dir.0).expect("rules").expect("an embedding model");
        assert_eq!((rules.pooling, rules.normalize, rules.lowercases), (VectorPooling::Mean, true, false));
        for (name, pooling, what) in [
            ("both", r#"{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}"#, "mean"),
            ("new-mode", r#"{"pooling_mode": "attention"}"#, "attention"),
        ] {
            let dir = Dir::new(&format!("encoder-{name}"), &[(CONFIG, BERT), (MODULES, &list), (POOLING, pooling)]);
            let error = VectorRules::read(&dir.0).expect_err(name).to_string();
            assert!(error.contains(what), "{name}: {error}");
        }
    }

    #[test]
    fn dense_layers_say_how_wide_a_vector_is() {
        let dense = |at: usize| {
            format!(r#"{{"idx":{at},"name":"{at}","path":"{at}_Dense","type":"sentence_transformers.models.Dense"}}"#)
        };
        let mean = r#"{"word_embedding_dimension": 96, "pooling_mode_mean_tokens": true, "include_prompt": false}"#;
        for (name, between, last) in [("scaled", POOL, Some(NORM)), ("plain", POOL, None)] {
            let (two, three) = (dense(2), dense(3));
            let list: Vec<&str> = [TRANSFORMER, between, &two, NORM, &three].into_iter().chain(last).collect();
            let list = modules(&list);
            let layers = [
                ("2_Dense.config.json", r#"{"out_features": 256}"#),
                ("3_Dense.config.json", r#"{"out_features": 64}"#),
            ];
            let dir =
                Dir::new(&format!("dense-{name}"), &[[(MODULES, list.as_str()), (POOLING, mean)], layers].concat());
            let rules = VectorRules::read(&dir.0).expect("rules").expect("an embedding model");
            assert_eq!((rules.pooling, rules.skips_prompt), (VectorPooling::Mean, true), "of a decoder, too");
            assert_eq!((rules.dense_layers, rules.width, rules.normalize), (2, Some(64), last.is_some()), "{name}");
        }
    }

    #[test]
    fn an_encoder_with_another_head_needs_the_files_that_say_what_its_vectors_are() {
        let pooling = r#"{"pooling_mode": "cls"}"#;
        let masked = ["BertForMaskedLM", "XLMRobertaForMaskedLM", "ModernBertForMaskedLM"];
        for name in masked.into_iter().chain(["CamembertForMaskedLM", "DistilBertForMaskedLM"]) {
            let config = format!(r#"{{"architectures": ["{name}"]}}"#);
            let dir = Dir::new(&format!("bare-{name}"), &[(CONFIG, &config)]);
            assert_eq!(Encoder::of(&dir.0).expect("a config"), Some(Encoder::States));
            let error = VectorRules::read(&dir.0).expect_err("no modules").to_string();
            assert!(error.contains(name) && error.contains(MODULES), "{error}");
            let list = modules(&[TRANSFORMER, POOL]);
            let dir = Dir::new(&format!("with-{name}"), &[(CONFIG, &config), (MODULES, &list), (POOLING, pooling)]);
            let rules = VectorRules::read(&dir.0).expect("rules").expect("an embedding model");
            assert_eq!((rules.pooling, rules.normalize), (VectorPooling::First, false));
        }
        for other in ["BertForTokenClassification", "DistilBertForQuestionAnswering", "BertForCausalLM", "Bert", ""] {
            assert_eq!(Encoder::named(other), None, "{other}");
        }
    }

    #[test]
    fn vectors_of_another_kind_are_refused_by_name() {
        let dense = r#"{"idx":2,"name":"2","path":"2_Dense","type":"sentence_transformers.models.Dense"}"#;
        let out = r#"{"idx":2,"name":"2","path":"../2","type":"sentence_transformers.models.Dense"}"#;
        let other = r#"{"idx":2,"name":"2","path":"2_CNN","type":"sentence_transformers.models.CNN"}"#;
        let two = r#"{"pooling_mode_mean_tokens": true, "pooling_mode_lasttoken": true}"#;
        let whole = modules(&[TRANSFORMER, POOL]);
        let zero = r#"{"max_seq_length": 0}"#;
        for (name, files, what) in [
            (
                "dense",
                vec![(MODULES, modules(&[TRANSFORMER, POOL, dense])), (POOLING, LAST.into())],
                "2_Dense/config.json",
            ),
            ("before", vec![(MODULES, modules(&[TRANSFORMER, dense, POOL])), (POOLING, LAST.into())], "module Dense"),
            ("out", vec![(MODULES, modules(&[TRANSFORMER, POOL, out])), (POOLING, LAST.into())], "module Dense"),
            ("other", vec![(MODULES, modules(&[TRANSFORMER, POOL, other])), (POOLING, LAST.into())], "module CNN"),
            ("unpooled", vec![(MODULES, modules(&[TRANSFORMER, NORM]))], "module Normalize"),
            ("two", vec![(MODULES, whole.clone()), (POOLING, two.into())], "lasttoken"),
            ("missing", vec![(MODULES, whole.clone())], "is missing"),
            ("json", vec![(MODULES, "{".into())], "modules.json"),
            ("zero", vec![(MODULES, whole), (POOLING, LAST.into()), (LENGTHS, zero.into())], "max_seq_length"),
        ] {
            let files: Vec<(&str, &str)> = files.iter().map(|(file, text)| (*file, text.as_str())).collect();
            let dir = Dir::new(name, &files);
            let error = VectorRules::read(&dir.0).expect_err(name).to_string();
            assert!(error.contains(what), "{name}: {error}");
        }
    }
}
