//! Choice of the files that an engine needs: a checkpoint in Hugging Face's layout, or the GGUF files of one quantization.
//!
//! Pickles (`.bin`, `.pt`, `.pth`, `.ckpt`) are never chosen: loading one runs code.

use std::collections::BTreeMap;

use crate::listing::{Listing, RemoteFile};
use crate::name::is_word;
use crate::sum::Sum;

/// Name of the variant that is a checkpoint folder.
pub(crate) const SAFETENSORS: &str = "safetensors";
/// Quantization that is taken where the name says none, as other tools do.
const USUAL: &str = "Q4_K_M";
/// Most files of one model.
const CHOSEN_MAX: usize = 2048;
/// Names listed in an error.
const SHOWN_MAX: usize = 20;

/// Files beside the weights of a checkpoint that engines and tokenizers read.
const BESIDE: [&str; 16] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    POOLING.0,
];

/// Path of an embedding model's pooling, and its name in the store, which has no folders.
const POOLING: (&str, &str) = ("1_Pooling/config.json", "1_Pooling.config.json");

/// Name in the store of a file of an embedding model's dense layer: `2_Dense/config.json` is `2_Dense.config.json` there.
fn of_dense(path: &str) -> Option<String> {
    let (folder, file) = path.split_once('/')?;
    let number = folder.strip_suffix("_Dense")?;
    let is_number = (1..=2).contains(&number.len()) && number.bytes().all(|byte| byte.is_ascii_digit());
    (is_number && ["config.json", "model.safetensors"].contains(&file)).then(|| format!("{folder}.{file}"))
}

/// Files to fetch, and the variant that they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// `safetensors`, or the quantization as in the file's name; the name without `.gguf` where several files have the quantization.
    pub variant: String,
    /// Files by ascending size.
    pub files: Vec<Chosen>,
}

/// File to fetch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// Path in the repository.
    pub path: String,
    /// Name in the store: the last component of the path, but for the modules of an embedding model.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// Checksum of the content.
    pub sum: Sum,
}

impl Choice {
    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.size).sum()
    }
}

/// Reason why nothing of a repository can be served, with what can be done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChooseError {
    /// Weights as pickles only.
    #[error(
        "has its weights as pickles only ({0}), which are never fetched because loading one runs code: look for a repository with \
             safetensors or GGUF files of the model, or convert it with transformers' save_pretrained"
    )]
    Pickles(String),
    /// Adapter without its base model.
    #[error("is an adapter (adapter_config.json), not a whole model: pull its base model")]
    Adapter,
    /// Neither safetensors nor GGUF.
    #[error("has no weights that can be served: neither config.json with *.safetensors nor *.gguf")]
    NoWeights,
    /// No file of the quantization.
    #[error("has no GGUF file of {wanted}; it has {there}")]
    NoQuant {
        /// Quantization that was asked for.
        wanted: String,
        /// Quantizations that are there.
        there: String,
    },
    /// Several models fit.
    #[error("has several GGUF models: name one of them, as ORG/REPO:QUANT: {0}")]
    Several(String),
    /// File of a split model is missing.
    #[error("has {0} of {1} files of {2} only: the hub's copy is incomplete")]
    Split(usize, u64, String),
    /// Name that cannot be stored.
    #[error("has a file named {0:?}, which cannot be stored under its name")]
    Name(String),
    /// Size or checksum missing in the hub's answer.
    #[error(
        "is listed without size and checksum of {0}: without them nothing can be checked, so it is not fetched; ask another endpoint"
    )]
    Unchecked(String),
    /// Too many files.
    #[error("has {0} files to fetch, and {CHOSEN_MAX} are the most")]
    Files(usize),
}

/// Chooses the files of a repository. `quant`: quantization or file of a GGUF model.
///
/// # Errors
/// Nothing there can be served, or several models fit.
pub fn choose(listing: &Listing, quant: Option<&str>) -> Result<Choice, ChooseError> {
    let has = |name: &str| listing.files.iter().any(|file| file.path == name);
    let weights: Vec<_> = listing.files.iter().filter(|file| is_shard(&file.path)).collect();
    if quant.is_none() && has("config.json") && !weights.is_empty() {
        return checkpoint(listing, weights);
    }
    let models = gguf_models(listing);
    if models.is_empty() {
        return Err(nothing(listing, quant));
    }
    let model = pick(&models, quant)?;
    if model.count.is_some_and(|count| count != model.files.len() as u64) {
        return Err(ChooseError::Split(model.files.len(), model.count.unwrap_or(1), model.stem.clone()));
    }
    finish(variant(model, &models), model.files.clone())
}

/// Root file with weights in the layout of transformers. (`consolidated.safetensors` has the same weights under other names.)
fn is_shard(path: &str) -> bool {
    path.ends_with(".safetensors")
        && !path.contains('/')
        && !path.starts_with("consolidated")
        && !path.starts_with("adapter_")
}

fn checkpoint<'a>(listing: &'a Listing, mut weights: Vec<&'a RemoteFile>) -> Result<Choice, ChooseError> {
    // Engines read model.safetensors where it is, else the shards of the index.
    if weights.iter().any(|file| file.path == "model.safetensors") {
        weights.retain(|file| file.path == "model.safetensors");
    } else if weights.iter().any(|file| file.path.starts_with("model-")) {
        weights.retain(|file| file.path.starts_with("model-"));
    }
    let single = weights.iter().any(|file| file.path == "model.safetensors");
    let beside =
        listing.files.iter().filter(|file| BESIDE.contains(&file.path.as_str()) || of_dense(&file.path).is_some());
    let beside = beside.filter(|file| !(single && file.path.ends_with(".index.json")));
    let files = beside.chain(weights).collect();
    finish(SAFETENSORS.to_owned(), files)
}

/// GGUF model of a repository, of one file or several.
struct GgufModel<'a> {
    /// Name of the file without `.gguf` and the number of a split file.
    stem: String,
    /// Quantization by the stem; the whole stem if it names none.
    label: String,
    /// Files that the name of a split file promises.
    count: Option<u64>,
    files: Vec<&'a RemoteFile>,
}

fn gguf_models(listing: &Listing) -> Vec<GgufModel<'_>> {
    let mut models: BTreeMap<(String, String), GgufModel<'_>> = BTreeMap::new();
    for file in &listing.files {
        let (folder, name) = file.path.rsplit_once('/').unwrap_or(("", &file.path));
        let Some(stem) = gguf_stem(name) else { continue };
        // Projectors of vision models and data of quantizers are no models.
        if stem.starts_with("mmproj") || stem.contains("imatrix") {
            continue;
        }
        let (stem, count) = split_name(stem);
        let model = models.entry((folder.to_owned(), stem.to_owned())).or_insert_with(|| GgufModel {
            stem: stem.to_owned(),
            label: label(stem),
            count,
            files: Vec::new(),
        });
        model.files.push(file);
    }
    models.into_values().collect()
}

/// Name of the model in the store: its label, or its stem where another model of the repository has the same label.
fn variant(model: &GgufModel<'_>, models: &[GgufModel<'_>]) -> String {
    let of_label = models.iter().filter(|other| other.label.eq_ignore_ascii_case(&model.label)).count();
    if of_label > 1 { model.stem.clone() } else { model.label.clone() }
}

/// Name of a GGUF file without its ending.
fn gguf_stem(name: &str) -> Option<&str> {
    name.strip_suffix(".gguf").or_else(|| name.strip_suffix(".GGUF"))
}

/// Returns true if a quantization of a name says the GGUF file: its whole name, or the stem of its model.
pub(crate) fn says_file(quant: &str, file: &str) -> bool {
    quant == file || gguf_stem(file).is_some_and(|stem| quant == stem || quant == split_name(stem).0)
}

/// Stem and number of files of `STEM-00001-of-00003`.
fn split_name(stem: &str) -> (&str, Option<u64>) {
    let five = |digits: &str| if digits.len() == 5 { digits.parse::<u64>().ok() } else { None };
    let split = stem.rsplit_once("-of-").and_then(|(rest, count)| {
        let (stem, number) = rest.rsplit_once('-')?;
        five(number).and(Some((stem, Some(five(count)?))))
    });
    split.unwrap_or((stem, None))
}

/// Quantization that ends a stem, such as `Q4_K_M` or `UD-Q4_K_XL`; the whole stem if none does.
fn label(stem: &str) -> String {
    let last = stem.rsplit(['-', '.']).next().unwrap_or(stem);
    let upper = last.to_ascii_uppercase();
    let numbered =
        |prefix: &str| upper.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    let is_quant = ["F16", "BF16", "F32", "FP16", "FP32"].contains(&upper.as_str())
        || ["Q", "IQ", "TQ", "MXFP"].iter().any(|prefix| numbered(prefix));
    match (is_quant, stem.len() - last.len()) {
        (false, _) | (true, 0) => stem.to_owned(),
        (true, before) if stem[..before - 1].ends_with("-UD") => format!("UD-{last}"),
        (true, _) => last.to_owned(),
    }
}

fn pick<'m, 'a>(models: &'m [GgufModel<'a>], quant: Option<&str>) -> Result<&'m GgufModel<'a>, ChooseError> {
    let wanted = match (quant, models) {
        (None, [one]) => return Ok(one),
        (Some(wanted), _) => wanted,
        (None, _) => USUAL,
    };
    let bare = wanted.strip_suffix(".gguf").unwrap_or(wanted);
    let (bare, _) = split_name(bare);
    let by = |fits: &dyn Fn(&GgufModel<'_>) -> bool| models.iter().filter(|model| fits(model)).collect::<Vec<_>>();
    let mut found = by(&|model| model.stem == bare);
    if found.is_empty() {
        found = by(&|model| model.label.eq_ignore_ascii_case(bare));
    }
    if found.is_empty() {
        found = by(&|model| ends_with(&model.stem, bare));
    }
    match (found.as_slice(), quant) {
        ([one], _) => Ok(one),
        ([], Some(_)) => {
            Err(ChooseError::NoQuant { wanted: wanted.to_owned(), there: names(models.iter(), |m| &m.label) })
        }
        ([], None) => Err(ChooseError::Several(names(models.iter(), |model| &model.label))),
        (several, _) => Err(ChooseError::Several(names(several.iter().copied(), |model| &model.stem))),
    }
}

/// Returns true if `stem` ends with `end`, in whatever case, and the end stands apart from what is before it.
fn ends_with(stem: &str, end: &str) -> bool {
    let (Some(at), true) = (stem.len().checked_sub(end.len()), stem.is_ascii()) else { return false };
    stem[at..].eq_ignore_ascii_case(end) && stem[..at].ends_with(['-', '_', '.'])
}

/// List of models with their sizes, for an error.
fn names<'m, 'a: 'm>(
    models: impl Iterator<Item = &'m GgufModel<'a>>,
    name: impl Fn(&'m GgufModel<'a>) -> &'m str,
) -> String {
    let all: Vec<String> = models
        .map(|model| {
            let bytes: u64 = model.files.iter().filter_map(|file| file.size).sum();
            format!("{} ({:.1} GB)", name(model), bytes as f64 / 1e9)
        })
        .collect();
    let more = all.len().saturating_sub(SHOWN_MAX);
    let shown = all.into_iter().take(SHOWN_MAX).collect::<Vec<_>>().join(", ");
    if more > 0 { format!("{shown} and {more} more") } else { shown }
}

fn nothing(listing: &Listing, quant: Option<&str>) -> ChooseError {
    let has = |name: &str| listing.files.iter().any(|file| file.path == name);
    if let Some(wanted) = quant
        && has("config.json")
        && listing.files.iter().any(|file| is_shard(&file.path))
    {
        let there = "no GGUF files but a checkpoint of safetensors: pull it without :QUANT".to_owned();
        return ChooseError::NoQuant { wanted: wanted.to_owned(), there };
    }
    if has("adapter_config.json") {
        return ChooseError::Adapter;
    }
    let is_pickle = |path: &str| [".bin", ".pt", ".pth", ".ckpt", ".pkl"].iter().any(|end| path.ends_with(end));
    let pickles: Vec<&str> =
        listing.files.iter().map(|file| file.path.as_str()).filter(|path| is_pickle(path)).take(3).collect();
    if pickles.is_empty() { ChooseError::NoWeights } else { ChooseError::Pickles(pickles.join(", ")) }
}

fn finish(variant: String, files: Vec<&RemoteFile>) -> Result<Choice, ChooseError> {
    if files.len() > CHOSEN_MAX {
        return Err(ChooseError::Files(files.len()));
    }
    if !is_word(&variant) {
        return Err(ChooseError::Name(variant));
    }
    let mut chosen = files
        .into_iter()
        .map(|file| {
            let last = file.path.rsplit('/').next().unwrap_or(&file.path);
            let name = match of_dense(&file.path) {
                Some(name) => name,
                None if file.path == POOLING.0 => POOLING.1.to_owned(),
                None => last.to_owned(),
            };
            if !is_word(&name) {
                return Err(ChooseError::Name(name));
            }
            let (Some(size), Some(sum)) = (file.size, file.sum) else {
                return Err(ChooseError::Unchecked(file.path.clone()));
            };
            Ok(Chosen { path: file.path.clone(), name, size, sum })
        })
        .collect::<Result<Vec<_>, _>>()?;
    chosen.sort_by(|a, b| (a.size, &a.name).cmp(&(b.size, &b.name)));
    let mut names: Vec<_> = chosen.iter().map(|file| file.name.as_str()).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(ChooseError::Name(twice[0].to_owned()));
    }
    Ok(Choice { variant, files: chosen })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(names: &[&str]) -> Listing {
        let file = |path: &&str| RemoteFile { path: (*path).into(), size: Some(1), sum: Some(Sum::GitSha1([0; 20])) };
        Listing { commit: "0".repeat(40), files: names.iter().map(file).collect() }
    }

    #[track_caller]
    fn check(names: &[&str], quant: Option<&str>, variant: &str, expected: &[&str]) {
        let choice = choose(&listing(names), quant).expect("something");
        let mut chosen: Vec<_> = choice.files.iter().map(|file| file.name.as_str()).collect();
        chosen.sort_unstable();
        assert_eq!((choice.variant.as_str(), chosen.as_slice()), (variant, expected));
    }

    #[track_caller]
    fn refuses(names: &[&str], quant: Option<&str>, part: &str) {
        let error = choose(&listing(names), quant).expect_err("nothing fits").to_string();
        assert!(error.contains(part), "{error}");
    }

    #[test]
    fn a_checkpoint_is_what_an_engine_reads() {
        let shards = [
            ".gitattributes",
            "README.md",
            "config.json",
            "tokenizer.json",
            "chat_template.jinja",
            "consolidated.safetensors",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "original/model.safetensors",
            "pytorch_model.bin",
            "onnx/model.onnx",
        ];
        let chosen = [
            "chat_template.jinja",
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
        ];
        check(&shards, None, "safetensors", &chosen);
        check(
            &["config.json", "model.safetensors", "model.safetensors.index.json"],
            None,
            "safetensors",
            &["config.json", "model.safetensors"],
        );
    }

    #[test]
    fn an_embedding_model_says_how_it_pools() {
        let names = [
            "1_Pooling/config.json",
            "2_Dense/config.json",
            "2_Dense/model.safetensors",
            "2_Dense/pytorch_model.bin",
            "3_Dense/model.safetensors",
            "4_Normalize/config.json",
            "x_Dense/config.json",
            "onnx/2_Dense/config.json",
            "config.json",
            "config_sentence_transformers.json",
            "model.safetensors",
            "modules.json",
        ];
        let chosen = [
            "1_Pooling.config.json",
            "2_Dense.config.json",
            "2_Dense.model.safetensors",
            "3_Dense.model.safetensors",
            "config.json",
            "config_sentence_transformers.json",
            "model.safetensors",
            "modules.json",
        ];
        check(&names, None, "safetensors", &chosen);
    }

    #[test]
    fn a_quantization_is_found_by_the_files_name() {
        let names = [
            "config.json",
            "m-Q4_K_M.gguf",
            "m.Q8_0.gguf",
            "m-bf16.gguf",
            "m-F16.gguf",
            "mmproj-F16.gguf",
            "m-UD-Q4_K_XL.gguf",
        ];
        check(&names, Some("Q4_K_M"), "Q4_K_M", &["m-Q4_K_M.gguf"]);
        check(&names, Some("q8_0"), "Q8_0", &["m.Q8_0.gguf"]);
        check(&names, Some("F16"), "F16", &["m-F16.gguf"]);
        check(&names, Some("BF16"), "bf16", &["m-bf16.gguf"]);
        check(&names, Some("Q4_K_XL"), "UD-Q4_K_XL", &["m-UD-Q4_K_XL.gguf"]);
        check(&names, Some("m.Q8_0.gguf"), "Q8_0", &["m.Q8_0.gguf"]);
        check(&names, None, "Q4_K_M", &["m-Q4_K_M.gguf"]);
        check(&["model_q4_0.gguf", "other.gguf"], Some("q4_0"), "model_q4_0", &["model_q4_0.gguf"]);
        check(&["m.gguf"], None, "m", &["m.gguf"]);
        let two = ["a-Q8_0.gguf", "b-Q8_0.gguf", "b-Q4_0.gguf"];
        check(&two, Some("b-Q8_0"), "b-Q8_0", &["b-Q8_0.gguf"]);
        check(&two, Some("a-Q8_0.gguf"), "a-Q8_0", &["a-Q8_0.gguf"]);
        check(&two, Some("Q4_0"), "Q4_0", &["b-Q4_0.gguf"]);
        let split = ["Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00002-of-00002.gguf", "m-Q4_0.gguf"];
        check(&split, Some("Q8_0"), "Q8_0", &["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]);
    }

    #[test]
    fn what_cannot_be_served_is_refused_with_what_helps() {
        refuses(&["config.json", "pytorch_model.bin"], None, "pickles only (pytorch_model.bin)");
        refuses(&["adapter_config.json", "adapter_model.safetensors"], None, "base model");
        refuses(&["README.md"], None, "no weights");
        refuses(&["m-Q8_0.gguf", "m-Q4_0.gguf"], None, "Q4_0 (0.0 GB), Q8_0 (0.0 GB)");
        refuses(&["m-Q8_0.gguf"], Some("Q4_K_M"), "no GGUF file of Q4_K_M; it has Q8_0");
        refuses(&["config.json", "model.safetensors"], Some("Q4_K_M"), "without :QUANT");
        refuses(&["a-Q8_0.gguf", "b-Q8_0.gguf"], Some("Q8_0"), "a-Q8_0 (0.0 GB), b-Q8_0");
        refuses(&["m-Q8_0-00001-of-00003.gguf", "m-Q8_0-00002-of-00003.gguf"], None, "2 of 3 files");
        refuses(&["a b-Q8_0.gguf"], None, "cannot be stored");
        let mut unchecked = listing(&["config.json", "model.safetensors"]);
        unchecked.files[1].sum = None;
        let error = choose(&unchecked, None).expect_err("no checksum").to_string();
        assert!(error.contains("checksum of model.safetensors"), "{error}");
    }
}
