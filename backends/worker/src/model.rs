//! Loading of an engine from a checkpoint folder, or from the demo model embedded in the binary.

use crate::adapters::{self, OrderedSource};
use crate::config::{Build, ReadyInfo, WorkerError};
use crate::grammars;
use crate::options::{ModelOptions, engine_config, sizes};
use crate::place::{Place, device, device_memory, if_free, leaves_core_idle, place};
use crate::plan::Plan;
use crate::shelf::{self, Opened, Room, Shelf};
use crate::weights::{self, Shared};
use penstock_engine::adapter::Adapter;
use penstock_engine::checkpoint::{Checkpoint, read_file};
use penstock_engine::models::{KvBudget, Model, ModelLimits};
use penstock_engine::{Engine, Forward};
use penstock_gguf::Gguf;
use penstock_kernels::cuda;
use penstock_kernels::{DeviceInfo, Feature};
use penstock_machine::Machine;
use penstock_proto::frames::{Loading, OrderedAdapter};
use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use tracing::{info, warn};

/// Name of the model embedded in the binary.
pub const DEMO_MODEL: &str = "penstock-demo";

macro_rules! demo_file {
    ($name:literal) => {
        include_bytes!(concat!("../../../models/penstock-demo/", $name))
    };
}

/// Loader of the process's engine.
pub fn build(options: ModelOptions) -> Build {
    Box::new(move |progress| load(&options, progress))
}

/// Loads the model, and starts its engine.
pub(crate) fn load(
    options: &ModelOptions,
    progress: &mut dyn FnMut(Loading),
) -> Result<(Engine, ReadyInfo), WorkerError> {
    progress(Loading { stage: "checking the checkpoint".into(), ..Default::default() });
    let (checkpoint, tokenizer) = open(options.model.as_deref())?;
    let tokenizer = tokenizer.read()?;
    let adapters = adapters::open(&options.adapters, &checkpoint)?;
    let ordered: Vec<(OrderedAdapter, Opened)> = options
        .ordered_adapters
        .iter()
        .map(|OrderedSource(wanted)| (wanted.clone(), shelf::open(wanted, checkpoint.config())))
        .collect();
    let ordered_bytes = ordered.iter().flat_map(|(_, opened)| opened).map(Adapter::bytes).fold(0, u64::saturating_add);
    // Read beside the weights; the index for masks is made when the worker is ready.
    let (ends, rows) = (checkpoint.eos_token_ids(), checkpoint.config().vocab_size);
    // A model of whole texts says nothing that a grammar could mask.
    let has_masks = !checkpoint.config().is_whole();
    let vocabulary = std::thread::spawn(move || {
        let json = tokenizer.into_json();
        let hash = json.as_deref().map(hash).unwrap_or_default();
        (hash, json.filter(|_| has_masks).and_then(|json| grammars::load(&json, &ends, rows)))
    });
    let mut config = engine_config(options, checkpoint.config());
    let sizes = sizes(&config);
    let adapter_bytes = adapters::bytes(&adapters).saturating_add(ordered_bytes);
    let place = match place(options, &checkpoint)? {
        Place::Gpu(gpu) if options.gives_way() => {
            let memory = cuda::memory_bytes(&gpu);
            if_free(gpu, memory, |memory| Plan::new(options, &checkpoint, &config, memory, (adapter_bytes, false)))
        }
        place => place,
    };
    let mut shared = match &place {
        Place::Cpu => weights::shared(options, &checkpoint, progress),
        Place::Gpu(_) | Place::Reference => None,
    };
    let memory = match &place {
        Place::Gpu(gpu) => device_memory(cuda::memory_bytes(gpu)?),
        Place::Cpu | Place::Reference => Machine::default().memory(),
    };
    let is_packed = shared.as_ref().is_some_and(|shared| shared.copy.is_read());
    let plan = Plan::new(options, &checkpoint, &config, memory, (adapter_bytes, is_packed));
    plan.tell(memory);
    plan.refuse_device(memory)?;
    let limits = ModelLimits {
        context_tokens: (options.context_tokens > 0).then_some(options.context_tokens),
        kv: KvBudget::Pages(plan.pages),
        rows_max: sizes.rows_max,
        sampled_max: sizes.sampled_max,
        held: options.held,
        kv_format: options.kv_format,
    };
    config.masks_beside = matches!(place, Place::Gpu(_)) || leaves_core_idle(options);
    let mut tell = |step: penstock_engine::models::Progress<'_>| {
        let (bytes_done, bytes_total) = (step.bytes_done, step.bytes_total);
        progress(Loading { stage: "loading weights".into(), bytes_done, bytes_total });
    };
    let began = Instant::now();
    let (model, used) = loop {
        let device = device(options, &place, sizes, shared.as_ref().map(|shared| &shared.copy))?;
        let loaded = Model::load(&checkpoint, device, limits, &mut tell);
        let why = match (loaded, &shared) {
            (Ok(model), None) => break (model, None),
            (Ok(model), Some(Shared { copy, key })) => match copy.finish(key) {
                Ok(used) => break (model, used),
                Err(why) => why,
            },
            (Err(error), shared) => match shared.as_ref().and_then(|shared| shared.copy.differs()) {
                Some(why) => why,
                None => return Err(WorkerError::Model(error.to_string())),
            },
        };
        weights::refused(&why);
        shared = None;
    };
    let geometry = model.geometry();
    let name = options.model.as_deref().map_or(DEMO_MODEL.into(), model_name);
    let DeviceInfo { name: device, weights: held, .. } = model.device().info();
    let rounded_bytes = checkpoint.rounded_bytes(held);
    if rounded_bytes > 0 {
        let (stored, held) = (checkpoint.weight_format(), held.name());
        warn!(
            model = name,
            stored, held, rounded_bytes, "weights are rounded: the device cannot hold their values exactly"
        );
    }
    info!(
        model = name,
        numerics = geometry.numerics,
        pages = geometry.pages,
        context_tokens = geometry.context_tokens,
        weights = weights::how(used),
        seconds = began.elapsed().as_secs_f64(),
        "checkpoint loaded"
    );
    let takes_orders = options.adapter_orders && model.device().has(Feature::Adapters);
    let mut info = ReadyInfo {
        adapters: Vec::new(),
        shelf: None,
        model: name,
        tokenizer_hash: Vec::new(),
        model_hash: checkpoint.model_hash().to_vec(),
        numerics_id: geometry.numerics,
        vocab_size: geometry.vocab_size as u32,
        device,
        gpu: match place {
            Place::Gpu(gpu) => Some(gpu),
            Place::Cpu | Place::Reference => None,
        },
        weights: used,
    };
    let mut engine = Engine::new(Box::new(model), &config);
    info.adapters = adapters::load(&adapters, &mut engine)?;
    if takes_orders {
        let left = plan.left_bytes() / options.machine_share.max(1);
        let room = Room::new(left.saturating_add(ordered_bytes), sizes.rows_max);
        info.shelf = Some(Shelf::start(Arc::new(checkpoint.config().clone()), room, ordered, &mut engine));
    }
    let (hash, found) = vocabulary.join().map_err(|_| WorkerError::Panicked("reading the vocabulary".into()))?;
    info.tokenizer_hash = hash;
    found.into_iter().for_each(|grammars| engine.set_grammars(grammars));
    if engine.probe()? { Ok((engine, info)) } else { Err(WorkerError::Broken) }
}

/// Largest tokenizer.json, as in the gateway. The largest in public models is 33 MB (Gemma 3).
const TOKENIZER_BYTES_MAX: usize = 128 << 20;

/// Content of a tokenizer.json: the demo model's lies in the binary.
type TokenizerJson = Cow<'static, [u8]>;

/// Tokenizer of a checkpoint.
pub(crate) enum Tokenizer {
    /// Content of a tokenizer.json.
    Json(TokenizerJson),
    /// Checkpoint folder whose tokenizer.json is yet to be read.
    Folder(PathBuf),
    /// No tokenizer.json: token ids alone can be served.
    None,
    /// Header of the GGUF file, of which a tokenizer.json is yet to be made: some tenths of a second for 150 thousand tokens.
    Gguf(Box<Gguf>),
}

impl Tokenizer {
    /// Reads the tokenizer.json of a folder.
    ///
    /// # Errors
    /// [`WorkerError::Model`]: the file is there, and is too large, no file of the folder, or cannot be read.
    fn read(self) -> Result<Self, WorkerError> {
        let Self::Folder(folder) = self else { return Ok(self) };
        let read = read_file(&folder, "tokenizer.json", TOKENIZER_BYTES_MAX);
        let bytes = read.map_err(|error| WorkerError::Model(error.to_string()))?;
        Ok(bytes.map_or(Self::None, |bytes| Self::Json(Cow::Owned(bytes))))
    }

    /// Content of the tokenizer.json, which has been read. The gateway, which needs the vocabulary for texts, refuses one that cannot be read: token ids can be served without it.
    fn into_json(self) -> Option<TokenizerJson> {
        match self {
            Self::Json(json) => Some(json),
            Self::Folder(_) | Self::None => None,
            Self::Gguf(gguf) => vocabulary_of(&gguf),
        }
    }
}

/// Opens the checkpoint at `path` (a folder or a GGUF file; `None`: the demo model), and finds its tokenizer, which is not read: a gateway that only checks a
/// model needs none of it. A checkpoint without one can be served too, by token ids alone.
pub(crate) fn open(path: Option<&Path>) -> Result<(Checkpoint, Tokenizer), WorkerError> {
    let refused = |error: penstock_engine::checkpoint::CheckpointError| WorkerError::Model(error.to_string());
    let Some(path) = path else {
        let files: [(&str, &'static [u8]); 3] = [
            ("config.json", demo_file!("config.json")),
            ("generation_config.json", demo_file!("generation_config.json")),
            ("model.safetensors", demo_file!("model.safetensors")),
        ];
        let checkpoint = Checkpoint::from_memory(&files).map_err(refused)?;
        return Ok((checkpoint, Tokenizer::Json(Cow::Borrowed(demo_file!("tokenizer.json")))));
    };
    if let Some(file) = penstock_gguf::locate(path).map_err(|error| WorkerError::Model(error.to_string()))? {
        let gguf = Gguf::open(&file).map_err(|error| WorkerError::Model(error.to_string()))?;
        let checkpoint = Checkpoint::open_gguf(&gguf).map_err(refused)?;
        return Ok((checkpoint, Tokenizer::Gguf(Box::new(gguf))));
    }
    let checkpoint = Checkpoint::open(path).map_err(refused)?;
    Ok((checkpoint, Tokenizer::Folder(path.to_owned())))
}

/// Vocabulary of a GGUF file as a tokenizer.json; `None`, with a warning: the vocabulary cannot be read.
fn vocabulary_of(gguf: &Gguf) -> Option<TokenizerJson> {
    match penstock_gguf::text_files(gguf) {
        Ok(files) => Some(Cow::Owned(files.tokenizer_json)),
        Err(error) => {
            let reason = error.to_string();
            let lost = "this worker follows no grammars and enforces no reasoning budgets";
            warn!(reason, "the vocabulary of the GGUF file cannot be read: {lost}");
            None
        }
    }
}

fn hash(bytes: &[u8]) -> Vec<u8> {
    blake3::hash(bytes).as_bytes().to_vec()
}

/// Name of the folder or file, as in `/models/qwen3-0.6b`.
pub(crate) fn model_name(path: &Path) -> String {
    penstock_gguf::model_name(path).unwrap_or_else(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_kernels::{KvFormat, PAGE_TOKENS};
    use penstock_proto::frames::{ChoiceStart, Generate, Sampling};
    use std::sync::Mutex;
    use std::time::Duration;

    fn demo(change: impl FnOnce(&mut ModelOptions)) -> (Engine, ReadyInfo, Vec<Loading>) {
        let mut options = ModelOptions { threads: 1, ..Default::default() };
        change(&mut options);
        let mut told = Vec::new();
        let (engine, info) = load(&options, &mut |loading| told.push(loading)).expect("the demo model loads");
        (engine, info, told)
    }

    /// Log of a test, as its lines.
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("no panic").extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_tokenizer_is_read_by_who_needs_it_and_from_the_folder_alone() {
        let folder = std::env::temp_dir().join(format!("penstock-tokenizer-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).expect("a folder");
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/penstock-demo");
        for name in ["config.json", "model.safetensors"] {
            std::fs::copy(demo.join(name), folder.join(name)).expect("copied");
        }
        let tokenizer = || open(Some(&folder)).expect("the checkpoint is whole").1;
        assert!(matches!(tokenizer().read(), Ok(Tokenizer::None)));
        // Without an end, a text of gigabytes would be in memory before anything is known of it.
        std::os::unix::fs::symlink("/dev/zero", folder.join("tokenizer.json")).expect("a link");
        let why = tokenizer().read().err().expect("refused").to_string();
        assert!(why.contains("tokenizer.json: is a link to /dev/zero"), "{why}");
        std::fs::remove_file(folder.join("tokenizer.json")).expect("removed");
        std::fs::File::create(folder.join("tokenizer.json")).expect("a file").set_len(1 << 40).expect("a hole");
        let why = tokenizer().read().err().expect("refused").to_string();
        assert!(why.contains("has at most 134217728"), "{why}");
        std::fs::remove_dir_all(&folder).expect("removed");
    }

    #[test]
    fn a_vocabulary_that_cannot_be_read_is_named_in_the_log() {
        let bytes = penstock_gguf::Writer::default()
            .key("tokenizer.ggml.model", &penstock_gguf::Value::Text("rwkv".into()))
            .key("tokenizer.ggml.tokens", &penstock_gguf::Value::Texts(vec!["a".into()]))
            .finish();
        let gguf = Gguf::read("m.gguf", &mut &bytes[..], bytes.len() as u64).expect("a header");
        let lines = Lines::default();
        let to = lines.clone();
        let log = tracing_subscriber::fmt().with_ansi(false).with_writer(move || to.clone()).finish();
        let read = tracing::subscriber::with_default(log, || vocabulary_of(&gguf));
        let log = String::from_utf8(lines.0.lock().expect("no panic").clone()).expect("text");
        assert!(read.is_none());
        for part in ["WARN", "m.gguf: tokenizer.ggml.model: ", "rwkv", "follows no grammars"] {
            assert!(log.contains(part), "{part} is not in: {log}");
        }
    }

    #[test]
    fn the_demo_model_loads_and_speaks() {
        let (mut engine, info, told) = demo(|_| {});
        assert_eq!((info.model.as_str(), info.vocab_size, info.tokenizer_hash.len()), ("penstock-demo", 4096, 32));
        let last = told.last().expect("progress was told");
        assert_eq!((last.stage.as_str(), last.bytes_done), ("loading weights", last.bytes_total));
        assert!(last.bytes_total > 9_000_000);
        let sampling = Sampling {
            top_p: 1.0,
            repetition_penalty: 1.0,
            max_tokens: 5,
            logprobs: -1,
            prompt_logprobs: -1,
            ..Default::default()
        };
        engine.submit(Generate {
            request: 1,
            prompt: vec![4088, 5, 6],
            choices: vec![ChoiceStart { index: 0, emitted: Vec::new() }],
            sampling: Some(sampling),
            ..Default::default()
        });
        let mut tokens = 0;
        while engine.has_work() {
            let step = engine.step(&|| Duration::ZERO);
            tokens += step.outputs.iter().map(|output| output.tokens.len()).sum::<usize>();
        }
        assert_eq!(tokens, 5);
    }

    #[test]
    fn memory_for_kv_follows_the_options() {
        let (engine, ..) = demo(|options| options.kv_bytes_max = 1 << 20);
        let config = open(None).expect("opens").0;
        let page = Model::page_bytes(config.config(), KvFormat::Own);
        assert_eq!(u64::from(engine.state().blocks_total), (1 << 20) / page);
        let (engine, ..) = demo(|options| options.sequences_max = 2);
        let context = Model::context_tokens(config.config(), None);
        assert_eq!(engine.state().blocks_total as usize, 2 * 2 * context / PAGE_TOKENS, "no more than is of use");
    }

    #[test]
    fn a_folder_that_is_no_model_is_refused_with_its_file() {
        let options = ModelOptions { model: Some("/nonexistent/model".into()), ..Default::default() };
        let error = load(&options, &mut |_| {}).err().expect("refused");
        assert!(error.to_string().contains("/nonexistent/model"), "{error}");
    }
}
