//! A checkpoint folder, fully checked before any weight is loaded.
//!
//! Model files come from strangers. [`Checkpoint::open`] reads `config.json`, finds the architecture, lists the needed
//! tensors with their exact shapes, and looks each of them up in the headers of the mapped weight files; a value of
//! this type exists only for a checkpoint that has them all. Every error names file, tensor or field, reason, and a
//! remedy where one is known.

pub(crate) mod files;
mod gguf;
mod gguf_encoder;
mod modules;
mod quantized;
mod rows;
pub mod safetensors;
mod stacked;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use penstock_gguf::Gguf;
use penstock_kernels::cpu::CpuDevice;
use penstock_kernels::host::FileStamp;
use penstock_kernels::{DType, Held, HostTensor, RowOrder, RowReader};

use files::{Bytes, Folder, is_plain};
use quantized::Quantized;
use rows::Rows;
use safetensors::{Entry, read_header};
use stacked::{ExpertPart, Form, Stacked};

use crate::families::{self, Architecture};
use crate::model_config::error::Shown;
pub use crate::model_config::error::{CheckpointError, Place};
use crate::model_config::fields::{Fields, parse_object};
pub use crate::model_config::{
    ChainStep, DenseConfig, EmbeddingScale, EncoderConfig, EncoderNames, ExpertNames, ExpertsConfig, GenerationConfig,
    HeadConfig, LatentConfig, LayerNames, ModelConfig, Needed, NormPlaces, Part, QkNorm, Quantization, RopeParameters,
    RopeScaling, Rotation, RoutingConfig, Scales, Work,
};

/// Largest config file; real ones have a few kilobytes.
const CONFIG_BYTES_MAX: usize = 1 << 20;
/// Largest index file; an index has about 100 bytes per tensor.
const INDEX_BYTES_MAX: usize = 16 << 20;
/// Most weight files; the largest public checkpoints have a few hundred.
const SHARDS_MAX: usize = 4096;

/// List of an embedding model's modules, by which sentence-transformers knows one.
const MODULES: &str = "modules.json";

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Reads the file `name` of the checkpoint folder `dir` as a checkpoint's own files are read: a regular file within the folder (or the blobs of its hub cache)
/// of at most `limit` bytes. `None`: there is no such file.
///
/// # Errors
/// [`CheckpointError`]: the file is larger, no regular file, elsewhere, or cannot be read.
pub fn read_file(dir: &Path, name: &str, limit: usize) -> Result<Option<Vec<u8>>, CheckpointError> {
    Ok(Folder::open(dir)?.read(name, limit)?.map(Cow::into_owned))
}

/// A checked checkpoint: its config, and its tensors in mapped memory.
#[derive(Debug)]
pub struct Checkpoint {
    architecture: &'static Architecture,
    config: ModelConfig,
    generation: GenerationConfig,
    files: Vec<WeightFile>,
    tensors: BTreeMap<String, Found>,
    ignored: Vec<String>,
    hash: [u8; 32],
}

#[derive(Debug)]
struct WeightFile {
    shown: String,
    bytes: Bytes,
}

/// Place of a needed tensor's data: index of the weight file, and the byte range in it.
#[derive(Debug)]
struct Found {
    file: usize,
    dtype: DType,
    shape: Vec<usize>,
    range: std::ops::Range<usize>,
    order: RowOrder,
    /// Place in a stacked tensor whose part for one expert is `range`; `None` for a tensor that lies there as it is needed.
    stacked: Option<Stacked>,
    /// Scales and form of a matrix whose codes are `range`; `None` for plain numbers and blocks.
    quantized: Option<Box<Quantized>>,
}

impl Found {
    /// Rows and columns of a matrix; a vector is one column.
    fn rows_columns(&self) -> [usize; 2] {
        [self.shape[0], self.shape.get(1).copied().unwrap_or(1)]
    }

    /// Bytes of the tensor itself.
    fn size(&self) -> usize {
        if let Some(quantized) = &self.quantized {
            return quantized.size(self.range.len(), self.shape[0]);
        }
        let Some(stacked) = &self.stacked else { return self.range.len() };
        let scales = match &stacked.form {
            Form::Numbers => 0,
            Form::Mxfp4 { scales, .. } => scales.len(),
        };
        (self.range.len() + scales) / stacked.turn.step
    }

    /// Returns true if a CPU holds the matrix as the integers that are stored, with one scale per row.
    fn is_integers(&self) -> bool {
        self.quantized.as_ref().is_some_and(|quantized| quantized.is_integers())
    }
}

/// A tensor of a checkpoint: in the mapped file, or made of parts of it.
pub struct Tensor<'a> {
    name: &'a str,
    found: &'a Found,
    /// Data of the tensor; empty if `rows` makes it.
    bytes: Cow<'a, [u8]>,
    rows: Option<Rows<'a>>,
}

impl Tensor<'_> {
    /// Tensor as the devices take it.
    pub fn host(&self) -> HostTensor<'_> {
        let Self { name, found, bytes, rows } = self;
        let reader = rows.as_ref().map(|rows| rows as &dyn RowReader);
        HostTensor { name, dtype: found.dtype, shape: &found.shape, bytes, order: found.order, reader }
    }

    /// Bytes of the tensor in the checkpoint.
    pub fn stored_bytes(&self) -> u64 {
        self.found.size() as u64
    }
}

impl Checkpoint {
    /// Opens and checks the folder `path` in Hugging Face's layout, a GGUF file, or a folder with a single GGUF model. Cost: reads the configs,
    /// the headers, and of quantized matrices the shapes and the groups of columns (`g_idx`); maps the rest.
    ///
    /// The weight files must not be changed in place while the checkpoint lives (replace them by renaming).
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        match penstock_gguf::locate(path)? {
            Some(file) => Self::open_gguf(&Gguf::open(&file)?),
            None => Self::read(&Folder::open(path)?),
        }
    }

    /// Opens and checks the model of `gguf`, as [`Checkpoint::open`] does.
    pub fn open_gguf(gguf: &Gguf) -> Result<Self, CheckpointError> {
        let files = gguf.parts.iter().map(|part| files::map(&part.path)).collect::<Result<_, _>>()?;
        Self::from_gguf(gguf, files)
    }

    /// Opens a GGUF file whose bytes are in memory.
    pub fn from_gguf_bytes(bytes: Cow<'static, [u8]>) -> Result<Self, CheckpointError> {
        let gguf = Gguf::read("model.gguf", &mut &bytes[..], bytes.len() as u64)?;
        Self::from_gguf(&gguf, vec![Bytes::Memory(bytes)])
    }

    /// Opens a checkpoint embedded in the program: `files` are (name, content).
    pub fn from_memory(files: &[(&str, &'static [u8])]) -> Result<Self, CheckpointError> {
        Self::from_buffers(files.iter().map(|&(name, bytes)| (name.to_owned(), Cow::Borrowed(bytes))).collect())
    }

    /// Opens a checkpoint as [`Checkpoint::from_memory`] does, from bytes that may be owned.
    pub fn from_buffers(files: Vec<(String, Cow<'static, [u8]>)>) -> Result<Self, CheckpointError> {
        Self::read(&Folder::Memory(files))
    }

    fn read(folder: &Folder) -> Result<Self, CheckpointError> {
        let (architecture, mut config, mut raw) = read_config(folder)?;
        let generation = read_generation(folder)?;
        let mut shards = Shards::read(folder)?;
        modules::read(folder, &mut config)?;
        // What stands behind the pooling is in files beside config.json: two activations make other vectors of the same tensors.
        if !config.chain.is_empty() {
            raw.extend_from_slice(format!("\n{:?}", config.chain).as_bytes());
        }
        config.lose_head_if_whole();
        // Only a checkpoint that says how to make vectors of texts (sentence-transformers' list of modules) may lack a head.
        config.headless |=
            !config.tie_word_embeddings && !shards.has(families::HEAD, architecture) && folder.has(MODULES);
        let mut tensors = BTreeMap::new();
        for needed in families::tensors(&config) {
            let found = shards.take(&needed, &config, architecture)?;
            tensors.insert(needed.name, found);
        }
        for dense in config.dense_layers() {
            tensors.extend(shards.take_dense(folder, dense)?);
        }
        shards.check_tied(&config, &tensors)?;
        shards.check_tied_words(&config)?;
        let ignored = shards.rest();
        let mut checkpoint =
            Self { architecture, config, generation, files: shards.files, tensors, ignored, hash: [0; 32] };
        checkpoint.hash = checkpoint.compute_hash(&raw);
        Ok(checkpoint)
    }

    /// Name of the architecture, `architectures[0]` of the config.
    pub fn architecture(&self) -> &'static str {
        self.architecture.name
    }

    /// Checked config of the model, read from `config.json`.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Sampling recommended by the model's makers.
    pub fn generation(&self) -> &GenerationConfig {
        &self.generation
    }

    /// End tokens of both configs, ascending, each once.
    pub fn eos_token_ids(&self) -> Vec<u32> {
        let mut ids = [self.config.eos_token_id.as_slice(), &self.generation.eos_token_id].concat();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Names of tensors that are present but not needed, such as `rotary_emb.inv_freq`; at most 100.
    pub fn ignored(&self) -> &[String] {
        &self.ignored
    }

    /// Bytes of all needed tensors, as stored.
    pub fn weights_bytes(&self) -> u64 {
        self.tensors.values().map(|found| found.size() as u64).sum()
    }

    /// Bytes of all needed tensors in a CPU's memory, with the matrices that products read held as `held`.
    pub fn held_bytes(&self, held: Held) -> u64 {
        let of = |(name, found): (&String, &Found)| match *found.shape.as_slice() {
            [rows, columns] if self.config.encoder.as_ref().is_some_and(|encoder| encoder.names.is_table(name)) => {
                CpuDevice::table_bytes(rows, columns)
            }
            [rows, columns] => {
                let held = self.held(name, held);
                let quantized = found.quantized.as_ref().filter(|_| !families::is_of_heads(&self.config, name));
                let codes = quantized.and_then(|quantized| quantized.codes_bytes(held, rows, columns));
                let stays = quantized.is_some_and(|quantized| quantized.is_integers()) && held.keeps(8);
                let held = if stays { Held::Int8 } else { held };
                codes.unwrap_or_else(|| CpuDevice::held_bytes(found.dtype, held, rows, columns))
            }
            _ => 4 * found.shape.iter().product::<usize>() as u64,
        };
        self.tensors.iter().map(of).sum()
    }

    /// Form in which a device holds the matrix `name`, where products are to read matrices held as `held`.
    pub(crate) fn held(&self, name: &str, held: Held) -> Held {
        match name {
            families::EMBEDDING if self.config.tie_word_embeddings => held.of_head(),
            families::EMBEDDING => Held::Stored,
            families::HEAD => held.of_head(),
            name if families::is_kept(&self.config, name) => Held::Stored,
            _ => held,
        }
    }

    /// Bytes in which each of a CPU's threads expands matrices that are held as codes; 0 if there are none.
    pub fn expanded_bytes(&self, held: Held) -> u64 {
        let expanded = |(name, found): (&String, &Found)| {
            let quantized = found.quantized.as_ref()?;
            let [rows, columns] = found.rows_columns();
            quantized.codes_bytes(self.held(name, held), rows, columns).map(|_| CpuDevice::expanded_bytes(columns))
        };
        self.tensors.iter().filter_map(expanded).max().unwrap_or(0)
    }

    /// Returns true if some matrices are stored, and held, as integers with scales.
    pub fn has_integers(&self) -> bool {
        self.matrices().any(|found| found.dtype.is_blocks() || found.is_integers())
    }

    /// Stored types of the matrices, such as `bf16`, or `bf16+gptq4`.
    pub fn weight_format(&self) -> String {
        let has = |dtype: &DType| self.matrices().any(|found| found.quantized.is_none() && found.dtype == *dtype);
        let types = DType::ALL.into_iter().filter(has).map(DType::name);
        let quantized = self.matrices().find_map(|found| found.quantized.as_ref()).map(|found| found.form.name());
        types.chain(quantized).collect::<Vec<_>>().join("+")
    }

    /// Stored bytes of the matrices that lose precision on a device which holds them as `held`.
    pub fn rounded_bytes(&self, held: DType) -> u64 {
        let loses = |found: &&Found| found.dtype.is_rounded_to(held) && !found.is_integers();
        self.matrices().filter(loses).map(|found| found.size() as u64).sum()
    }

    fn matrices(&self) -> impl Iterator<Item = &Found> {
        self.tensors.values().filter(|found| found.shape.len() > 1)
    }

    /// Hash of the model: BLAKE3 over `config.json` and, for each needed tensor in order of names, its name, type,
    /// shape and samples of its bytes (1 KiB at its start, middle and end), and of a quantized matrix those of its
    /// scales, zero points and groups. Of a GGUF file, its metadata under the names of `config.json` are hashed, and all of what else it says of rotations
    /// (factors of frequencies, whether there are any); of an embedding model, the modules behind its pooling, too. The cut into files does not matter. Two fine-tunes of one model differ; a
    /// deliberate change between the samples goes unnoticed.
    pub fn model_hash(&self) -> [u8; 32] {
        self.hash
    }

    /// Stamps of the mapped files, in their order; none of a checkpoint in memory.
    pub fn stamps(&self) -> impl Iterator<Item = FileStamp> {
        self.files.iter().filter_map(|file| file.bytes.stamp())
    }

    /// Tensor `name`, one of those that the architecture lists.
    ///
    /// # Panics
    /// If the architecture does not list the tensor, which then was never checked (a bug of the model file).
    pub fn tensor<'a>(&'a self, name: &'a str) -> Tensor<'a> {
        let found = self.found(name);
        let stored = self.stored(found);
        if let Some(quantized) = &found.quantized {
            let rows = Some(quantized.reader(stored, found.shape[1], &self.files));
            return Tensor { name, found, bytes: Cow::Borrowed(&[]), rows };
        }
        let bytes = match &found.stacked {
            None => Cow::Borrowed(stored),
            Some(Stacked { turn, form }) => Cow::Owned(match form {
                Form::Numbers => stacked::from_numbers(stored, found.rows_columns(), found.dtype.block().1, *turn),
                Form::Mxfp4 { file, scales } => {
                    let scales = &self.files[*file].bytes.as_slice()[scales.clone()];
                    stacked::from_mxfp4(stored, scales, found.rows_columns(), *turn)
                }
            }),
        };
        Tensor { name, found, bytes, rows: None }
    }

    /// Stored type of tensor `name`.
    ///
    /// # Panics
    /// As [`Checkpoint::tensor`].
    pub fn dtype(&self, name: &str) -> DType {
        self.found(name).dtype
    }

    fn found(&self, name: &str) -> &Found {
        self.tensors.get(name).unwrap_or_else(|| panic!("{name} is not in the list of needed tensors"))
    }

    /// Bytes of a tensor in its file; of a stacked one, those of its expert.
    fn stored(&self, found: &Found) -> &[u8] {
        &self.files[found.file].bytes.as_slice()[found.range.clone()]
    }

    /// Name of the file that holds tensor `name`, for messages.
    pub fn file_of(&self, name: &str) -> &str {
        self.tensors.get(name).map_or("", |found| &self.files[found.file].shown)
    }

    /// Releases the memory of tensor `name`, whose bytes are not needed soon.
    pub fn forget(&self, name: &str) {
        if let Some(found) = self.tensors.get(name) {
            self.files[found.file].bytes.forget(found.range.clone());
            for place in found.quantized.iter().flat_map(|quantized| quantized.places()) {
                self.files[place.file].bytes.forget(place.range.clone());
            }
        }
    }

    fn compute_hash(&self, config: &[u8]) -> [u8; 32] {
        const SAMPLE: usize = 1024;
        let mut hasher = blake3::Hasher::new();
        let mut add = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        add(config);
        for (name, found) in &self.tensors {
            add(name.as_bytes());
            add(format!("{:?} {:?}", found.dtype, found.shape).as_bytes());
            let beside = found.quantized.iter().flat_map(|quantized| quantized.places());
            let beside = beside.map(|place| &self.files[place.file].bytes.as_slice()[place.range.clone()]);
            for bytes in std::iter::once(self.stored(found)).chain(beside) {
                let sample = SAMPLE.min(bytes.len());
                for at in [0, (bytes.len() - sample) / 2, bytes.len() - sample] {
                    add(&bytes[at..at + sample]);
                }
            }
        }
        *hasher.finalize().as_bytes()
    }
}

type Config = (&'static Architecture, ModelConfig, Vec<u8>);

fn read_config(folder: &Folder) -> Result<Config, CheckpointError> {
    const NAME: &str = "config.json";
    let file = folder.shown(NAME);
    let Some(bytes) = folder.read(NAME, CONFIG_BYTES_MAX)? else {
        let help = "a checkpoint folder has one; of a GGUF model, give the .gguf file";
        return Err(CheckpointError::file(file, "is missing").help(help));
    };
    let map = parse_object(&file, &bytes)?;
    let fields = Fields::new(&file, &map);
    let listed = fields.list("architectures")?;
    let Some(name) = listed.first().and_then(serde_json::Value::as_str) else {
        return Err(fields.refuse("architectures", "names no architecture"));
    };
    let Some(architecture) = families::architecture(name) else {
        let reason = format!("{} is not supported; supported: {}", Shown(name), families::names().join(", "));
        return Err(fields.refuse("architectures", reason));
    };
    if architecture.is_masked_lm() && !folder.has(MODULES) {
        let reason = format!("{name} has a head for masked tokens, which makes neither vectors nor scores");
        let help = "an embedding model with this head has modules.json and 1_Pooling/config.json of sentence-transformers beside it; without \
                    them, name the bare encoder (such as BertModel) to serve the mean of its tokens";
        return Err(fields.refuse("architectures", reason).help(help));
    }
    let mut config = (architecture.read)(&fields)?;
    config.read_sides(&fields)?;
    Ok((architecture, config, bytes.into_owned()))
}

fn read_generation(folder: &Folder) -> Result<GenerationConfig, CheckpointError> {
    const NAME: &str = "generation_config.json";
    let Some(bytes) = folder.read(NAME, CONFIG_BYTES_MAX)? else { return Ok(GenerationConfig::default()) };
    let file = folder.shown(NAME);
    GenerationConfig::read(&Fields::new(&file, &parse_object(&file, &bytes)?))
}

/// Weight files and the contents of their headers.
struct Shards {
    files: Vec<WeightFile>,
    /// Tensors of each file, `[files]`.
    entries: Vec<HashMap<String, Entry>>,
    /// Names of the tensors that were needed.
    taken: HashSet<String>,
    /// File of each tensor, from the index; `None` with a single file.
    map: Option<HashMap<String, usize>>,
    /// Name of the file that lists the tensors, for messages.
    listing: String,
}

impl Shards {
    fn read(folder: &Folder) -> Result<Self, CheckpointError> {
        let mut shards = Self {
            files: Vec::new(),
            entries: Vec::new(),
            taken: HashSet::new(),
            map: None,
            listing: folder.shown(SINGLE),
        };
        if let Some(bytes) = folder.map(SINGLE)? {
            shards.add(folder.shown(SINGLE), bytes)?;
            return Ok(shards);
        }
        let Some(index) = folder.read(INDEX, INDEX_BYTES_MAX)? else { return Err(no_weights(folder)) };
        shards.listing = folder.shown(INDEX);
        let weight_map = read_index(&shards.listing, &index)?;
        let mut names: Vec<&String> = weight_map.values().collect();
        names.sort_unstable();
        names.dedup();
        if names.len() > SHARDS_MAX {
            let reason = format!("names {} files; at most {SHARDS_MAX} are allowed", names.len());
            return Err(CheckpointError::field(&shards.listing, "weight_map", reason));
        }
        for name in &names {
            let Some(bytes) = folder.map(name)? else {
                let reason = format!("is missing, though {INDEX} names it");
                return Err(CheckpointError::file(folder.shown(name), reason).help("fetch the file"));
            };
            shards.add(folder.shown(name), bytes)?;
        }
        let number: HashMap<&String, usize> = names.iter().enumerate().map(|(i, &name)| (name, i)).collect();
        shards.map = Some(weight_map.iter().map(|(tensor, name)| (tensor.clone(), number[name])).collect());
        Ok(shards)
    }

    fn add(&mut self, shown: String, bytes: Bytes) -> Result<(), CheckpointError> {
        let entries = read_header(&shown, bytes.as_slice())?;
        self.entries.push(entries.into_iter().map(|entry| (entry.name.clone(), entry)).collect());
        self.files.push(WeightFile { shown, bytes });
        Ok(())
    }

    fn file_of(&self, name: &str) -> Option<usize> {
        self.map.as_ref().map_or(Some(0), |map| map.get(name).copied())
    }

    /// Returns true if a tensor is there, under one of its names.
    fn has(&self, name: &str, architecture: &Architecture) -> bool {
        self.find(name, architecture).is_some()
    }

    /// Finds a needed tensor, with its exact shape and a supported type.
    fn take(
        &mut self,
        needed: &Needed,
        config: &ModelConfig,
        architecture: &Architecture,
    ) -> Result<Found, CheckpointError> {
        if let Some(part) = ExpertPart::of(&needed.name, config) {
            return self.take_stacked(needed, &part, config, architecture);
        }
        if let Some(found) = self.take_quantized(needed, config, architecture)? {
            return Ok(found);
        }
        let plain = needed.part.as_ref().map_or(&needed.name, |part| &part.tensor);
        let Some((file, entry)) = self.find(plain, architecture) else {
            let file = self.file_of(plain).map_or(&self.listing, |file| &self.files[file].shown);
            return Err(self.missing(file, needed, config, architecture));
        };
        let (dtype, mut whole) = (self.number_type(file, &entry)?, needed.shape.clone());
        if let Some(part) = &needed.part {
            whole[0] = part.rows;
        }
        self.check_shape(file, &entry, &whole)?;
        let (name, mut range) = (entry.name, entry.range);
        if let Some(part) = &needed.part {
            let row = range.len() / part.rows;
            range = range.start + part.first * row..range.start + (part.first + needed.shape[0]) * row;
        }
        self.taken.insert(name);
        Ok(Found {
            file,
            dtype,
            shape: needed.shape.clone(),
            range,
            order: RowOrder::Plain,
            stacked: None,
            quantized: None,
        })
    }

    /// Finds one expert's part of a stacked tensor: numbers, or blocks of MXFP4 with their scales.
    fn take_stacked(
        &mut self,
        needed: &Needed,
        part: &ExpertPart,
        config: &ModelConfig,
        architecture: &Architecture,
    ) -> Result<Found, CheckpointError> {
        let experts = config.experts.as_ref().map_or(0, |experts| experts.num_experts);
        let of_expert = |range: &std::ops::Range<usize>| {
            let size = range.len() / experts;
            range.start + part.expert * size..range.start + (part.expert + 1) * size
        };
        let (turn, shape, order) = (part.turn, needed.shape.clone(), RowOrder::Plain);
        if let Some((file, entry)) = self.find(&part.tensor, architecture) {
            let dtype = self.number_type(file, &entry)?;
            self.check_shape(file, &entry, &part.numbers_shape(&shape, experts))?;
            let (range, stacked) = (of_expert(&entry.range), Some(Stacked { turn, form: Form::Numbers }));
            self.taken.insert(entry.name);
            return Ok(Found { file, dtype, shape, range, order, stacked, quantized: None });
        }
        let both = [part.blocks(), part.scales()].map(|name| self.find(&name, architecture));
        let ([Some((file, blocks)), Some((of_scales, scales))], false) = (both, part.is_bias) else {
            let file = self.file_of(&part.tensor).map_or(&self.listing, |file| &self.files[file].shown);
            let reason = format!("is missing (shape {:?})", part.numbers_shape(&shape, experts));
            let error = CheckpointError::tensor(file, &part.tensor, reason);
            let help = "in MXFP4, two tensors of this name with _blocks and _scales have its place";
            return Err(if part.is_bias { error } else { error.help(help) });
        };
        for (file, entry) in [(file, &blocks), (of_scales, &scales)] {
            if !matches!(&entry.dtype, Err(other) if other == "U8") {
                let shown = entry.dtype.as_ref().map_or_else(Clone::clone, |dtype| dtype.name().to_owned());
                let reason = format!("type {shown}, MXFP4 is stored as U8");
                return Err(CheckpointError::tensor(&self.files[file].shown, &entry.name, reason));
            }
        }
        let Some([of_blocks, wanted_scales]) = part.mxfp4_shapes(&shape, experts) else {
            let reason = format!("rows of {} are not whole blocks of 32", shape[1]);
            return Err(CheckpointError::tensor(&self.files[file].shown, &blocks.name, reason));
        };
        self.check_shape(file, &blocks, &of_blocks)?;
        self.check_shape(of_scales, &scales, &wanted_scales)?;
        let form = Form::Mxfp4 { file: of_scales, scales: of_expert(&scales.range) };
        let range = of_expert(&blocks.range);
        self.taken.extend([blocks.name, scales.name]);
        Ok(Found {
            file,
            dtype: DType::Mxfp4,
            shape,
            range,
            order,
            stacked: Some(Stacked { turn, form }),
            quantized: None,
        })
    }

    /// Finds a tensor under one of its names, with its file.
    fn find(&self, name: &str, architecture: &Architecture) -> Option<(usize, Entry)> {
        let mut names = architecture.stored_names(name);
        names.find_map(|name| {
            let file = self.file_of(&name)?;
            self.entries[file].get(&name).map(|entry| (file, entry.clone()))
        })
    }

    /// Type of a tensor of numbers.
    fn number_type(&self, file: usize, entry: &Entry) -> Result<DType, CheckpointError> {
        entry.dtype.clone().map_err(|other| {
            CheckpointError::tensor(&self.files[file].shown, &entry.name, format!("type {other} is not supported"))
                .help("supported: BF16, F16, F32")
        })
    }

    fn check_shape(&self, file: usize, entry: &Entry, wanted: &[usize]) -> Result<(), CheckpointError> {
        if entry.shape == wanted {
            return Ok(());
        }
        let reason = format!("shape {:?}, config.json needs {wanted:?}", entry.shape);
        Err(CheckpointError::tensor(&self.files[file].shown, &entry.name, reason))
    }

    fn missing(
        &self,
        file: &str,
        needed: &Needed,
        config: &ModelConfig,
        architecture: &Architecture,
    ) -> CheckpointError {
        let (name, rows) = needed.part.as_ref().map_or((&needed.name, None), |part| (&part.tensor, Some(part.rows)));
        let mut shape = needed.shape.clone();
        shape[0] = rows.unwrap_or(shape[0]);
        let error = CheckpointError::tensor(file, name, format!("is missing (shape {shape:?})"));
        if self.has_words(name, architecture) {
            return error
                .help("it is there in integers of 4 or 8 bits, of which config.json must say quantization_config");
        }
        if needed.name == families::HEAD && !config.tie_word_embeddings {
            return error.help("if the head is the embedding, config.json must say tie_word_embeddings: true");
        }
        error
    }

    /// Checks a head that is stored although the config ties it to the embedding: it must have the same bytes.
    fn check_tied(&self, config: &ModelConfig, found: &BTreeMap<String, Found>) -> Result<(), CheckpointError> {
        let Some(file) = self.file_of(families::HEAD) else { return Ok(()) };
        let (true, Some(head)) = (config.tie_word_embeddings, self.entries[file].get(families::HEAD)) else {
            return Ok(());
        };
        let table = &found[families::EMBEDDING];
        let same = head.dtype == Ok(table.dtype)
            && self.files[file].bytes.as_slice()[head.range.clone()]
                == self.files[table.file].bytes.as_slice()[table.range.clone()];
        if same {
            return Ok(());
        }
        let reason = format!("differs from {}, though config.json says tie_word_embeddings: true", families::EMBEDDING);
        let help = "set tie_word_embeddings to what the model was trained with";
        Err(CheckpointError::tensor(&self.files[file].shown, families::HEAD, reason).help(help))
    }

    /// Names of the remaining tensors, sorted; at most 100.
    fn rest(&mut self) -> Vec<String> {
        let names: HashSet<String> = self.entries.drain(..).flat_map(HashMap::into_keys).collect();
        let mut names: Vec<String> = names.into_iter().filter(|name| !self.taken.contains(name)).collect();
        names.sort_unstable();
        names.truncate(100);
        names
    }
}

#[derive(serde::Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

fn read_index(file: &str, bytes: &[u8]) -> Result<HashMap<String, String>, CheckpointError> {
    let parsed: Result<Index, _> = serde_json::from_slice(bytes);
    let index = parsed.map_err(|e| CheckpointError::file(file, format!("is not a valid index: {e}")))?;
    for (tensor, name) in &index.weight_map {
        if !is_plain(name) || !name.ends_with(".safetensors") {
            let reason =
                format!("is said to be in \"{}\", which is not a .safetensors file of this folder", Shown(name));
            return Err(CheckpointError::tensor(file, tensor, reason));
        }
    }
    if index.weight_map.is_empty() {
        return Err(CheckpointError::field(file, "weight_map", "is empty"));
    }
    Ok(index.weight_map)
}

fn no_weights(folder: &Folder) -> CheckpointError {
    let error = CheckpointError::file(folder.shown(SINGLE), format!("is missing, and so is {INDEX}"));
    for other in ["pytorch_model.bin", "pytorch_model.bin.index.json"] {
        if folder.has(other) {
            return error.help("only safetensors are read: convert with transformers' save_pretrained");
        }
    }
    if folder.has("consolidated.safetensors") {
        return error.help("consolidated.safetensors uses other names: fetch the model-*.safetensors files");
    }
    error
}
