//! The text side of a checkpoint: tokenizer, chat template, end tokens, default sampling.

use std::{
    borrow::Cow,
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use serde_json::Value;
use tokenizers::{Encoding, Tokenizer};

use crate::{
    added_tokens::Lacking,
    bos_eos::{self, Around, Asked},
    call_ids::CallIds,
    control::{ControlTokens, SpecialNames},
    detokenize::Detokenizer,
    error::{TextError, clip},
    reasoning::{GoesOn, ReasoningMarkers},
    task::{Task, VectorPooling},
    template::ChatTemplate,
    tokenizer,
    tools::{CallRule, CallableTool, Checkpoint, PHI_CALL_MARKS, Signs, ToolFormat, write_content},
    vocab::TokenBytes,
};

/// Largest tokenizer.json. The largest in public models is 33 MB (Gemma 3).
const TOKENIZER_BYTES_MAX: u64 = 128 << 20;
/// Largest config file. Configs carry the template and the added tokens; public ones stay below 2 MB.
pub(crate) const CONFIG_BYTES_MAX: u64 = 16 << 20;

/// Longest text to be tokenized, in bytes: the tokenizer takes some 200 bytes of memory for each byte of text.
const TEXT_BYTES_MAX: u64 = 4 << 20;
/// Largest ratio of a text's bytes to the tokens of the context; longer texts are refused untokenized. Prose has 4,
/// indented code up to 10.
const BYTES_PER_TOKEN_MAX: u64 = 32;
/// Mark of a tool's result in Phi-4-mini's vocabulary.
const RESULT_MARK: &str = "<|tool_response|>";
/// Length up to which texts are never refused, in bytes.
const TEXT_BYTES_MIN: u64 = 64 << 10;

/// Files of a checkpoint that concern text, as bytes.
#[derive(Clone, Debug, Default)]
pub struct TextFiles<'a> {
    /// Content of tokenizer.json: vocabulary, normalizer and decoder.
    pub tokenizer_json: Cow<'a, [u8]>,
    /// Content of tokenizer_config.json: special tokens and chat template.
    pub tokenizer_config_json: Option<Cow<'a, [u8]>>,
    /// chat_template.jinja; takes precedence over the template of tokenizer_config.json.
    pub chat_template_jinja: Option<Cow<'a, [u8]>>,
    /// Content of generation_config.json: end tokens and default sampling.
    pub generation_config_json: Option<Cow<'a, [u8]>>,
    /// special_tokens_map.json, of older checkpoints; tokenizer_config.json takes precedence.
    pub special_tokens_map_json: Option<Cow<'a, [u8]>>,
    /// config.json: end tokens of a checkpoint whose generation_config.json names none.
    pub config_json: Option<Cow<'a, [u8]>>,
}

/// Default sampling of generation_config.json, for fields that a request leaves open.
///
/// As in vLLM, the values count whatever `do_sample` says: a request that leaves temperature open gets the API's 1.0
/// (or the value here), not greedy decoding.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DefaultSampling {
    /// Default temperature, from 0 to 2.
    pub temperature: Option<f32>,
    /// Nucleus probability, above 0 and up to 1.
    pub top_p: Option<f32>,
    /// Number of most probable tokens; 0 keeps all.
    pub top_k: Option<u32>,
    /// Least probability relative to the most probable token (min-p), from 0 to 1.
    pub min_p: Option<f32>,
    /// Repetition penalty, above 0; 1 penalizes nothing.
    pub repetition_penalty: Option<f32>,
}

/// Text side of one model: tokenizer, chat template, formats. Immutable; shared by all requests.
pub struct TextModel {
    tokenizer: Tokenizer,
    vocabulary: TokenBytes,
    control: ControlTokens,
    special_names: SpecialNames,
    template: Option<ChatTemplate>,
    reasoning: Option<ReasoningMarkers>,
    tool_format: Option<ToolFormat>,
    call_ids: CallIds,
    eos: Vec<u32>,
    declared_ends: Vec<u32>,
    sampling: DefaultSampling,
    text_bytes_max: usize,
    hash: [u8; 32],
    task: Task,
    around: Around,
    /// Tokens that the checkpoint wants around texts, and the name of its end token.
    asked_around: (Asked, Option<String>),
    left_out: Vec<String>,
}

impl std::fmt::Debug for TextModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TextModel")
            .field("vocab_size", &self.vocab_size())
            .field("eos", &self.eos)
            .field("template", &self.template.is_some())
            .field("tool_format", &self.tool_format)
            .finish_non_exhaustive()
    }
}

impl TextModel {
    /// Builds the model and compiles the template. Takes a fraction of a second for a vocabulary of 150 thousand.
    ///
    /// # Errors
    /// [`TextError`] with the file and the reason.
    pub fn load(files: &TextFiles<'_>) -> Result<Self, TextError> {
        check_size("tokenizer.json", files.tokenizer_json.len() as u64, TOKENIZER_BYTES_MAX)?;
        let (mut tokenizer, mut vocabulary) = parse_tokenizer(&files.tokenizer_json)?;
        let config = parse_config("tokenizer_config.json", files.tokenizer_config_json.as_deref())?;
        let generation = parse_config("generation_config.json", files.generation_config_json.as_deref())?;
        let special = parse_config("special_tokens_map.json", files.special_tokens_map_json.as_deref())?;
        let model = parse_config("config.json", files.config_json.as_deref())?;
        let lacking = Lacking::of(&config, &tokenizer, model["vocab_size"].as_u64());
        if let Some(json) = lacking.merged(&files.tokenizer_json)? {
            (tokenizer, vocabulary) = parse_tokenizer(&json)?;
        }
        let named = named_tokens(&config, &special);
        let token_of = |name: &str| named.iter().find(|(have, _)| have == name).map(|(_, token)| token.clone());
        let asked = Asked::read(&config);
        let first = token_of("bos_token").filter(|_| asked.begins()).and_then(|token| tokenizer.token_to_id(&token));
        let end = token_of("eos_token");
        let template = ChatTemplate::load(files.chat_template_jinja.as_deref(), &config, named.clone())?;
        let source = template.as_ref().map(ChatTemplate::source).unwrap_or_default();
        let reasoning = ReasoningMarkers::detect(&tokenizer, source);
        let tool_format = ToolFormat::detect(&Signs { template: source });
        let model = Self {
            control: ControlTokens::new(&tokenizer, &markup(template.as_ref()))?,
            special_names: SpecialNames::new(&vocabulary)?,
            eos: end_tokens(&tokenizer, [&generation, &model], &named),
            declared_ends: [&generation, &model].into_iter().flat_map(declared_ends).collect(),
            sampling: default_sampling(&generation),
            text_bytes_max: text_bytes_max(&config),
            hash: *blake3::hash(&files.tokenizer_json).as_bytes(),
            task: Task::default(),
            around: Around::default(),
            asked_around: (asked, end),
            left_out: lacking.left_out,
            tokenizer,
            vocabulary,
            template,
            reasoning,
            tool_format,
            // A pool's other parser changes what is read, not what the template writes.
            call_ids: CallIds::of(tool_format),
        };
        let Some(first) = first else { return Ok(model) };
        let is_bare = model.around_texts()?[0].is_empty();
        Ok(Self { around: Around { first: is_bare.then_some(first), last: None }, ..model })
    }

    /// Builds the model from a checkpoint folder, of which only tokenizer.json must exist, or from a GGUF file (or a folder with one).
    ///
    /// # Errors
    /// [`TextError`] with the file and the reason.
    pub fn from_dir(dir: &Path) -> Result<Self, TextError> {
        if let Some(file) = penstock_gguf::locate(dir).map_err(TextError::gguf)? {
            return Self::from_gguf(&penstock_gguf::Gguf::open(&file).map_err(TextError::gguf)?);
        }
        let tokenizer_json =
            read(dir, "tokenizer.json", TOKENIZER_BYTES_MAX)?.ok_or_else(|| TextError::Unreadable {
                file: dir.join("tokenizer.json").display().to_string(),
                reason: "no such file; a checkpoint needs its tokenizer in this format: fetch it from the model's repository, or make it with \
                         transformers (AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER))"
                    .into(),
            })?;
        Self::load(&TextFiles {
            tokenizer_json: tokenizer_json.into(),
            tokenizer_config_json: read(dir, "tokenizer_config.json", CONFIG_BYTES_MAX)?.map(Cow::Owned),
            chat_template_jinja: read(dir, "chat_template.jinja", CONFIG_BYTES_MAX)?.map(Cow::Owned),
            generation_config_json: read(dir, "generation_config.json", CONFIG_BYTES_MAX)?.map(Cow::Owned),
            special_tokens_map_json: read(dir, "special_tokens_map.json", CONFIG_BYTES_MAX)?.map(Cow::Owned),
            config_json: read(dir, "config.json", CONFIG_BYTES_MAX)?.map(Cow::Owned),
        })
    }

    /// Builds the model from the metadata of a GGUF file.
    ///
    /// # Errors
    /// [`TextError`] with the file, the key and the reason.
    pub fn from_gguf(gguf: &penstock_gguf::Gguf) -> Result<Self, TextError> {
        let files = penstock_gguf::text_files(gguf).map_err(TextError::gguf)?;
        Self::load(&TextFiles {
            tokenizer_json: files.tokenizer_json.into(),
            tokenizer_config_json: Some(files.tokenizer_config_json.into()),
            generation_config_json: Some(files.generation_config_json.into()),
            ..TextFiles::default()
        })
    }

    /// Model with another task than to generate text. Texts of which vectors are made may get a token at their end that prompts have not.
    ///
    /// # Errors
    /// [`TextError`] if the checkpoint wants such a token and has none.
    pub fn with_task(mut self, task: Task) -> Result<Self, TextError> {
        self.around.last = None;
        let (asked, name) = &self.asked_around;
        if let Task::Embed(rules) = &task
            && asked.ends(rules.pooling == VectorPooling::Last)
        {
            let id = name.as_ref().and_then(|name| self.token_id(name));
            let id = id.ok_or_else(|| bos_eos::no_end(name.as_deref()))?;
            self.around.last = self.around_texts()?[1].is_empty().then_some(id);
        }
        Ok(Self { task, ..self })
    }

    /// Names of tokens of tokenizer_config.json that tokenizer.json lacks, and that were left out because their ids do not follow its own: they are
    /// plain text.
    pub fn tokens_left_out(&self) -> &[String] {
        &self.left_out
    }

    /// Task of the model.
    pub fn task(&self) -> &Task {
        &self.task
    }

    /// BLAKE3 of the bytes of tokenizer.json; a worker announces the same value.
    pub fn tokenizer_hash(&self) -> [u8; 32] {
        self.hash
    }

    /// Largest token id + 1. A checkpoint's embedding may have more rows (padding), never fewer.
    pub fn vocab_size(&self) -> u32 {
        self.vocabulary.count()
    }

    /// Ids that end an answer, ascending: those of generation_config.json (else config.json) and the tokenizer's
    /// `eos_token`.
    pub fn eos_tokens(&self) -> &[u32] {
        &self.eos
    }

    /// End tokens that config.json and generation_config.json name: grammars of gateway and workers take them for
    /// control tokens.
    pub fn declared_end_tokens(&self) -> &[u32] {
        &self.declared_ends
    }

    /// Sampling values of the checkpoint for fields that a request leaves open.
    pub fn default_sampling(&self) -> DefaultSampling {
        self.sampling
    }

    /// Bytes of a token; a character may be split over tokens. Empty for an unknown id.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.vocabulary.token(id).to_vec()
    }

    /// Id of a token by its exact name in the vocabulary.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// Name of a token in the vocabulary (`Ġword`); empty for an unknown id.
    pub fn token_name(&self, id: u32) -> String {
        self.tokenizer.id_to_token(id).unwrap_or_default()
    }

    /// `tokens` surrounded by the special tokens that the tokenizer adds to a text (`<s>`).
    ///
    /// # Errors
    /// [`TextError::Encode`].
    pub fn with_special_tokens(&self, tokens: Vec<u32>) -> Result<Vec<u32>, TextError> {
        let [before, behind] = self.around_texts()?;
        Ok([before, tokens, behind].concat())
    }

    /// Tokens before and behind each text.
    fn around_texts(&self) -> Result<[Vec<u32>; 2], TextError> {
        const PROBE: &str = "a";
        let (plain, whole) = (self.encode(PROBE, false)?, self.encode(PROBE, true)?);
        let at = whole.windows(plain.len().max(1)).position(|window| window == plain);
        Ok(at.map_or_else(Default::default, |at| [whole[..at].to_vec(), whole[at + plain.len()..].to_vec()]))
    }

    /// Returns true if the token is a control token: left out of texts unless asked for.
    pub fn is_special(&self, id: u32) -> bool {
        self.vocabulary.is_special(id)
    }

    /// Longest text that is tokenized, in bytes: 32 per token of `model_max_length` in tokenizer_config.json, between
    /// 64 KiB and 4 MiB.
    pub fn text_bytes_max(&self) -> usize {
        self.text_bytes_max
    }

    /// Beginning of `text` that is short enough to be tokenized: for texts of which the first tokens are kept.
    ///
    /// The first tokens of this beginning are those of the whole text, unless they take more than 32 bytes each: the cut lies far behind them. Tokens
    /// differ only at the cut, which may part a word, or a letter from its accent.
    pub fn head_of<'t>(&self, text: &'t str) -> &'t str {
        &text[..text.floor_char_boundary(self.text_bytes_max)]
    }

    /// End of `text` that is short enough to be tokenized, as [`TextModel::head_of`] is its beginning.
    pub fn tail_of<'t>(&self, text: &'t str) -> &'t str {
        &text[text.ceil_char_boundary(text.len().saturating_sub(self.text_bytes_max))..]
    }

    /// Tokens of a whole prompt, as Hugging Face's tokenizer makes them: the names of special tokens in `text` become
    /// those tokens (the author of a raw prompt owns its structure). `add_special` adds the tokenizer's special tokens
    /// around the text (`<s>`).
    ///
    /// # Errors
    /// [`TextError::TextTooLong`] beyond [`TextModel::text_bytes_max`], [`TextError::Encode`].
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        self.check_length(text.len())?;
        let tokens = guarded(|| {
            let encoding = self.tokenizer.encode_fast(text, add_special).map_err(encode_error)?;
            Ok(encoding.get_ids().to_vec())
        })?;
        Ok(if add_special { self.around.put(tokens) } else { tokens })
    }

    /// Tokens of a text in which no control token is recognized.
    ///
    /// # Errors
    /// [`TextError::Encode`].
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let marker = ControlTokens::marker(|c| text.contains(c));
        let marked = self.control.mark(text, marker);
        self.encode_marked(&marked, marker)
    }

    /// Tokens of a text in which `marker` breaks up the names that must not become control tokens.
    ///
    /// The stages are those of `Tokenizer::encode`; the marker is removed between the stage that finds added tokens
    /// and the one that splits words, so all other text is tokenized as if the marker had never been there.
    pub(crate) fn encode_marked(&self, text: &str, marker: char) -> Result<Vec<u32>, TextError> {
        if !text.contains(marker) {
            return self.encode(text, false);
        }
        self.check_length(text.len() - text.matches(marker).count() * marker.len_utf8())?;
        guarded(|| self.encode_without(text, marker))
    }

    /// Tokens of two texts as the tokenizer joins them, and the index of the first token of the second type; 0 if the tokenizer does not tell
    /// the two apart. Names of control tokens in either are plain text.
    ///
    /// # Errors
    /// [`TextError`] if a text is too long or cannot be tokenized, or if the tokenizer's types are not 0 for the first text and 1 for the second.
    pub fn encode_pair(&self, first: &str, second: &str) -> Result<(Vec<u32>, usize), TextError> {
        self.check_length(first.len().saturating_add(second.len()))?;
        let marker = ControlTokens::marker(|c| first.contains(c) || second.contains(c));
        let joined = guarded(|| {
            let plain = |text: &str| {
                let marked = self.control.mark(text, marker);
                self.encoding_without(&marked, marker)
            };
            self.tokenizer.post_process(plain(first)?, Some(plain(second)?), true).map_err(encode_error)
        })?;
        let (ids, types) = (joined.get_ids().to_vec(), joined.get_type_ids());
        let begin = types.iter().position(|kind| *kind != 0);
        if types[begin.unwrap_or(types.len())..].iter().any(|kind| *kind != 1) {
            let reason = "the types of the tokens of two texts are not 0 for the first and 1 for the second".to_owned();
            return Err(TextError::Encode { reason });
        }
        Ok((ids, begin.unwrap_or(0)))
    }

    fn encode_without(&self, text: &str, marker: char) -> Result<Vec<u32>, TextError> {
        Ok(self.encoding_without(text, marker)?.get_ids().to_vec())
    }

    fn encoding_without(&self, text: &str, marker: char) -> Result<Encoding, TextError> {
        use tokenizers::{Model, OffsetType, PreTokenizer};
        let tokenizer = &self.tokenizer;
        let mut pieces = tokenizer.get_added_vocabulary().extract_and_normalize(tokenizer.get_normalizer(), text);
        pieces
            .split(|_, mut piece| {
                piece.filter(|c| c != marker);
                Ok(std::iter::once(piece))
            })
            .map_err(encode_error)?;
        if let Some(words) = tokenizer.get_pre_tokenizer() {
            words.pre_tokenize(&mut pieces).map_err(encode_error)?;
        }
        let model = tokenizer.get_model();
        pieces.tokenize(|piece| model.tokenize(piece.get())).map_err(encode_error)?;
        pieces.into_encoding(None, 0, OffsetType::None).map_err(encode_error)
    }

    fn check_length(&self, bytes: usize) -> Result<(), TextError> {
        let limit = self.text_bytes_max;
        if bytes > limit { Err(TextError::TextTooLong { bytes, limit }) } else { Ok(()) }
    }

    /// Text of `ids`, without control tokens unless `keep_special`. Invalid UTF-8 becomes U+FFFD; unknown ids add
    /// nothing.
    pub fn decode(&self, ids: &[u32], keep_special: bool) -> String {
        let mut detokenizer = Detokenizer::new(keep_special, true);
        let mut text = String::new();
        for &id in ids {
            detokenizer.push(self, id, &mut text);
        }
        detokenizer.finish(&mut text);
        text
    }

    /// Returns true if the chat template reads this name: a variable that it does not read changes nothing.
    pub fn template_reads(&self, name: &str) -> bool {
        self.template.as_ref().is_some_and(|template| template.source().contains(name))
    }

    /// Returns true if the checkpoint has a chat template.
    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// Format in which the model writes tool calls, if its template shows a known one.
    pub fn tool_format(&self) -> Option<ToolFormat> {
        self.tool_format
    }

    /// Marks around the model's reasoning; `None`: no known marks.
    pub fn reasoning_markers(&self) -> Option<&ReasoningMarkers> {
        self.reasoning.as_ref()
    }

    /// Token ids of the mark that closes the model's reasoning: constraints on the answer begin behind their first
    /// occurrence. Empty where the model marks no reasoning.
    pub fn reasoning_close_tokens(&self) -> Vec<u32> {
        self.reasoning.as_ref().map(|markers| self.mark_tokens(&markers.close)).unwrap_or_default()
    }

    /// Token ids that end the model's reasoning in its place, when its budget is spent: the closing mark, and the text
    /// around it. Empty where the model marks no reasoning.
    pub fn reasoning_forced_close_tokens(&self, goes_on: GoesOn) -> Vec<u32> {
        self.reasoning.as_ref().map(|markers| self.mark_tokens(&markers.forced_close(goes_on))).unwrap_or_default()
    }

    fn mark_tokens(&self, text: &str) -> Vec<u32> {
        match self.token_id(text) {
            Some(id) => vec![id],
            None => self.encode(text, false).unwrap_or_default(),
        }
    }

    /// Control tokens, which no text contains, by name.
    pub fn special_names(&self) -> &SpecialNames {
        &self.special_names
    }

    /// Grammar that holds an answer to `rule`, as text in `llguidance`'s Lark dialect, in the format of this model.
    ///
    /// `None`: no known format, no tool that may be called, or a strict tool whose schema the format's rules cannot
    /// follow. The text may still be refused where it is compiled: schemas are taken as they are.
    pub fn answer_grammar(&self, tools: &[CallableTool], rule: &CallRule) -> Option<String> {
        let token = |name: &str| self.token_id(name).map(|id| (id, self.is_special(id)));
        let checkpoint = Checkpoint { token: &token, reasoning: self.reasoning.as_ref() };
        match self.tool_format {
            Some(format) => format.call_grammar(checkpoint, tools, rule),
            None if tools.is_empty() => write_content(checkpoint, rule),
            None => None,
        }
    }

    /// The model with another format of tool calls than the one that its template shows; `None`: none.
    pub fn with_tool_format(self, format: Option<ToolFormat>) -> Self {
        Self { tool_format: format, ..self }
    }

    /// The model with other marks of reasoning than those found; `None`: none.
    pub fn with_reasoning_markers(self, markers: Option<ReasoningMarkers>) -> Self {
        Self { reasoning: markers, ..self }
    }

    pub(crate) fn vocabulary(&self) -> &TokenBytes {
        &self.vocabulary
    }

    pub(crate) fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// Form of the ids of calls that the chat template demands.
    pub(crate) fn call_ids(&self) -> CallIds {
        self.call_ids
    }

    /// Role of a tool's result in a template that writes roles as marks and knows no tools: `tool_response` if the vocabulary has that mark, else
    /// `tool`.
    pub(crate) fn result_role(&self) -> &'static str {
        let template = self.template.as_ref().is_some_and(ChatTemplate::reads_tools_of_message);
        if template && self.token_id(RESULT_MARK).is_some() { "tool_response" } else { "tool" }
    }

    pub(crate) fn control(&self) -> &ControlTokens {
        &self.control
    }
}

/// Tokenizer of the content of a tokenizer.json, and the bytes of its tokens.
fn parse_tokenizer(json: &[u8]) -> Result<(Tokenizer, TokenBytes), TextError> {
    std::thread::scope(|scope| {
        let beside = std::thread::Builder::new().spawn_scoped(scope, || TokenBytes::from_json(json));
        let tokenizer = tokenizer::parse(json)?;
        let vocabulary = match beside {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(_) => TokenBytes::from_json(json),
        };
        Ok((tokenizer, vocabulary?))
    })
}

/// Source of a template, and the marks of calls and results that the gateway writes for a template without them.
fn markup(template: Option<&ChatTemplate>) -> String {
    let source = template.map(ChatTemplate::source).unwrap_or_default();
    let [open, close] =
        if template.is_some_and(ChatTemplate::reads_tools_of_message) { PHI_CALL_MARKS } else { [""; 2] };
    let result = if open.is_empty() { "" } else { RESULT_MARK };
    [source, open, close, result].join("\n")
}

#[expect(clippy::needless_pass_by_value, reason = "used as a function for map_err")]
fn encode_error(error: tokenizers::Error) -> TextError {
    TextError::Encode { reason: clip(&error.to_string()) }
}

fn check_size(file: &'static str, bytes: u64, limit: u64) -> Result<(), TextError> {
    if bytes > limit { Err(TextError::TooLarge { file, bytes, limit }) } else { Ok(()) }
}

/// Reads a file of the folder `dir`: a regular file of at most `limit` bytes that lies in the folder, or in the blobs of the hub cache that the folder is a
/// snapshot of. `None`: there is no such file.
pub(crate) fn read(dir: &Path, file: &'static str, limit: u64) -> Result<Option<Vec<u8>>, TextError> {
    let bytes = read_named(dir, file, limit)?;
    bytes.as_ref().map_or(Ok(()), |bytes| check_size(file, bytes.len() as u64, limit))?;
    Ok(bytes)
}

/// Reads a file as [`read`] does, and one byte above `limit` of a larger one.
pub(crate) fn read_named(dir: &Path, file: &str, limit: u64) -> Result<Option<Vec<u8>>, TextError> {
    let path = dir.join(file);
    let refused = |reason: String| TextError::Unreadable { file: path.display().to_string(), reason };
    let unreadable = |error: std::io::Error| refused(error.to_string());
    // A link to what is not there is no file, as in a hub's cache that was cleared in part.
    let real = match path.canonicalize() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        found => found.map_err(unreadable)?,
    };
    let folder = dir.canonicalize().map_err(unreadable)?;
    if !real.starts_with(&folder) && !hub_blobs(&folder).is_some_and(|blobs| real.starts_with(blobs)) {
        return Err(refused(format!("is a link to {}, outside of the folder; copy the file into it", real.display())));
    }
    // Looked at before it is opened: opening a pipe would wait for its writer.
    if !real.is_file() {
        return Err(refused("is not a regular file".to_owned()));
    }
    let mut bytes = Vec::new();
    let read = File::open(&real).and_then(|file| file.take(limit.saturating_add(1)).read_to_end(&mut bytes));
    read.map_err(unreadable)?;
    Ok(Some(bytes))
}

/// Blobs folder of a hub cache, which keeps `models--x/snapshots/<revision>/<file>` as links to `models--x/blobs/<hash>`.
fn hub_blobs(dir: &Path) -> Option<PathBuf> {
    let snapshots = dir.parent()?;
    (snapshots.file_name()? == "snapshots").then(|| snapshots.with_file_name("blobs"))
}

/// Runs the library behind a panic guard. The library relies on parts that a damaged file may lack: a panic refuses
/// the text and ends nothing else.
fn guarded<T>(work: impl FnOnce() -> Result<T, TextError>) -> Result<T, TextError> {
    let panicked = |_| TextError::Encode { reason: "the tokenizer library panicked on it".to_owned() };
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).map_err(panicked)?
}

fn parse_config(file: &'static str, bytes: Option<&[u8]>) -> Result<Value, TextError> {
    let Some(bytes) = bytes else { return Ok(Value::Null) };
    check_size(file, bytes.len() as u64, CONFIG_BYTES_MAX)?;
    let value: Value = serde_json::from_slice(bytes).map_err(|error| TextError::malformed(file, error))?;
    if value.is_object() { Ok(value) } else { Err(TextError::malformed(file, "not a JSON object")) }
}

/// Named tokens that templates refer to (`bos_token`, `eos_token`, …). The value is a string or an object with
/// `content`.
fn named_tokens(config: &Value, special: &Value) -> Vec<(String, String)> {
    const NAMES: [&str; 7] =
        ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
    let text = |value: &Value| value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned);
    NAMES
        .iter()
        .filter_map(|&name| Some((name.to_owned(), text(&config[name]).or_else(|| text(&special[name]))?)))
        .collect()
}

/// End tokens that a config names.
fn declared_ends(config: &Value) -> Vec<u32> {
    let ids = &config["eos_token_id"];
    let listed = ids.as_array().map_or(std::slice::from_ref(ids), Vec::as_slice).iter();
    listed.filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect()
}

/// End tokens from the first of `configs` that names any, and from `named`.
fn end_tokens(tokenizer: &Tokenizer, configs: [&Value; 2], named: &[(String, String)]) -> Vec<u32> {
    let first = configs.into_iter().find(|config| !config["eos_token_id"].is_null());
    let mut eos: Vec<u32> = first.map(declared_ends).unwrap_or_default();
    let name = named.iter().find(|(name, _)| name == "eos_token");
    eos.extend(name.and_then(|(_, token)| tokenizer.token_to_id(token)));
    eos.sort_unstable();
    eos.dedup();
    eos
}

fn text_bytes_max(config: &Value) -> usize {
    // tokenizer_config.json writes an unknown length as 1e30.
    let context = config["model_max_length"].as_u64().unwrap_or(u64::MAX);
    context.saturating_mul(BYTES_PER_TOKEN_MAX).clamp(TEXT_BYTES_MIN, TEXT_BYTES_MAX) as usize
}

fn default_sampling(generation: &Value) -> DefaultSampling {
    let within = |key: &str, low: f64, high: f64| {
        generation[key].as_f64().filter(|&value| (low..=high).contains(&value)).map(|value| value as f32)
    };
    DefaultSampling {
        temperature: within("temperature", 0.0, 2.0),
        top_p: within("top_p", f64::MIN_POSITIVE, 1.0),
        top_k: generation["top_k"].as_u64().and_then(|k| u32::try_from(k).ok()),
        min_p: within("min_p", 0.0, 1.0),
        repetition_penalty: within("repetition_penalty", f64::MIN_POSITIVE, 1e6),
    }
}
