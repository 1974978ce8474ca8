//! Settings of a pool's workers, made from the pool's config.

use std::borrow::Cow;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use penstock_link::Tls;
use penstock_proto::handshake::PoolKey;
use penstock_router::Slo;
use penstock_router::replicas::ReplicaLimits;
use penstock_text::{Encoder, RankRules, Task, TaskFiles, TextFiles, TextModel, VectorRules};
use sha2::{Digest, Sha256};

use super::{Embedded, WorkerCommand};
use penstock_config::{AdapterConfig, Parser, PoolConfig, TaskChoice};
use penstock_pool::{AdapterSource, Copies, Follow, GpuLeavers, LocalWorkers, ReplicaConfig, SharedWeights};

/// Text side of a pool's model: tokenizer, template, defaults.
pub fn text(asked: &PoolConfig, demo: Embedded) -> Result<TextModel, String> {
    let loaded = match &asked.model {
        Some(folder) => TextModel::from_dir(folder),
        None => {
            let file = |name: &str| demo.iter().find(|(have, _)| *have == name).map(|(_, bytes)| Cow::Borrowed(*bytes));
            TextModel::load(&TextFiles {
                tokenizer_json: file("tokenizer.json").unwrap_or_default(),
                tokenizer_config_json: file("tokenizer_config.json"),
                chat_template_jinja: file("chat_template.jinja"),
                generation_config_json: file("generation_config.json"),
                special_tokens_map_json: file("special_tokens_map.json"),
                config_json: file("config.json"),
            })
        }
    };
    let text = loaded.map_err(|error| error.to_string())?;
    let task = task(asked, &text)?;
    let text = text.with_task(task).map_err(|error| error.to_string())?;
    let left_out = text.tokens_left_out();
    if !left_out.is_empty() {
        let (count, tokens) = (left_out.len(), left_out[..left_out.len().min(16)].join(" "));
        tracing::warn!(
            pool = asked.id,
            count,
            tokens,
            "tokens of tokenizer_config.json stay plain text: tokenizer.json lacks them, and their ids do not continue its ids or are beyond the model's"
        );
    }
    let text = match &asked.tool_format {
        Parser::Auto => text,
        Parser::Off => text.with_tool_format(None),
        Parser::Named(format) => text.with_tool_format(Some(*format)),
    };
    Ok(match &asked.reasoning {
        Parser::Auto => text,
        Parser::Off => text.with_reasoning_markers(None),
        Parser::Named(markers) => text.with_reasoning_markers(Some(markers.clone())),
    })
}

/// Task of a pool's model: the one that the config names, else the one that the checkpoint shows.
fn task(asked: &PoolConfig, text: &TextModel) -> Result<Task, String> {
    let path = asked.model.as_deref();
    let files = path.map(TaskFiles::open).transpose().map_err(|error| error.to_string())?;
    let rules = || {
        let read = files.as_ref().map(VectorRules::of).transpose().map_err(|error| error.to_string());
        read.map(Option::flatten)
    };
    let encoder = files.as_ref().map(Encoder::read).transpose().map_err(|error| error.to_string())?.flatten();
    match (asked.task, encoder.zip(path)) {
        (TaskChoice::Generate, Some(_)) => return Err("an encoder makes no text: its task is embed or rerank".into()),
        (TaskChoice::Embed, Some((Encoder::Head, _))) => {
            return Err("a classification head makes no vectors: its task is rerank".into());
        }
        (TaskChoice::Rerank, Some((Encoder::States, _))) => {
            return Err("an encoder without a classification head makes no scores: its task is embed".into());
        }
        (TaskChoice::Auto | TaskChoice::Rerank, Some((Encoder::Head, folder))) => {
            return RankRules::head(folder).map(Task::Rerank).map_err(|error| error.to_string());
        }
        (TaskChoice::Auto | TaskChoice::Embed, Some((Encoder::States, _))) | (_, None) => {}
    }
    match asked.task {
        TaskChoice::Generate => Ok(Task::Generate),
        TaskChoice::Rerank => RankRules::answer(text).map(Task::Rerank).map_err(|error| error.to_string()),
        TaskChoice::Embed => match rules()? {
            None if files.as_ref().is_some_and(TaskFiles::is_gguf) => Err("the GGUF file makes no vectors: it has no pooling_type, as files of embedding models do, and does not say \
                                           what ends a text"
                .into()),
            rules => Ok(Task::Embed(rules.unwrap_or_default())),
        },
        TaskChoice::Auto => Ok(rules()?.map_or(Task::Generate, Task::Embed)),
    }
}

pub(super) fn settings(
    asked: &PoolConfig,
    command: &WorkerCommand,
    text: &TextModel,
    state_dir: PathBuf,
    (cores, copies): (&[usize], &Copies),
) -> Result<penstock_pool::PoolConfig, String> {
    let mut settings = penstock_pool::PoolConfig::new(asked.id.clone());
    settings.tokenizer_hash = Some(text.tokenizer_hash().to_vec());
    settings.requests_max = asked.queue_max;
    (settings.unavailable_after, settings.resume_deadline) = (asked.waits.ready, asked.waits.resume);
    (settings.wait_max, settings.wait_loads) = (asked.waits.queue, f64::from(asked.waits.loads));
    settings.policy = asked.policy;
    settings.explain = asked.explain;
    settings.balance = asked.balance;
    settings.prefetch = asked.kv_prefetch;
    settings.record.clone_from(&asked.record);
    settings.limits.slo = asked.slo.map(|slo| Slo {
        ttft: slo.ttft,
        ttft_per_1k: slo.ttft_per_1k,
        tpot: slo.tpot,
        refuse_above: f64::from(slo.refuse_above_percent) / 100.0,
    });
    if let Some(slo) = &asked.slo {
        let [ttft, tpot] = [slo.ttft, slo.tpot].map(|time| time.as_secs_f64().max(1e-3));
        (settings.roles.limits.ttft, settings.roles.limits.tpot) = (ttft, tpot);
    }
    settings.roles.prefill_workers = asked.prefill_workers;
    settings.roles.follow = asked.roles;
    settings.replicas = replicas(asked, &settings);
    settings.on_demand = asked.on_demand;
    if let Some(path) = &asked.key_file {
        let bytes = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
        settings.key = Some(PoolKey::new(&bytes).map_err(|error| format!("{}: {error}", path.display()))?);
    }
    if let Some(files) = &asked.tls {
        settings.tls = Some(Tls::read(files).map_err(|error| error.to_string())?);
    }
    for address in &asked.connect {
        settings.connect.push(address.parse().map_err(|error| format!("{error}"))?);
    }
    settings.adapters = adapters(asked);
    if asked.connect.is_empty() {
        let seats = if asked.replicas.follow == Follow::On { asked.replicas.max } else { asked.workers };
        settings.local = Some(LocalWorkers {
            count: seats,
            varies: asked.replicas.follow == Follow::On,
            program: command.program.clone(),
            args: (command.args)(asked),
            cores: cores.to_vec(),
            state_dir,
            identity: identity_of(asked, command),
            exit_deadline: Duration::from_secs(5),
            weights: asked.shared_weights.then(|| shared_weights(asked, command, copies.clone())),
            gpu_leavers: GpuLeavers::default(),
        });
    }
    Ok(settings)
}

/// Scaling settings of a pool, with the same objectives (TTFT, TPOT) as the roles have.
fn replicas(asked: &PoolConfig, settings: &penstock_pool::PoolConfig) -> ReplicaConfig {
    let asked_for = &asked.replicas;
    let roles = &settings.roles.limits;
    let limits = ReplicaLimits {
        min: asked_for.min,
        max: asked_for.max,
        ttft: roles.ttft,
        tpot: roles.tpot,
        idle: asked_for.idle,
        in_order: asked_for.hook.as_ref().is_some_and(|hook| hook.is_in_order()),
        ..ReplicaLimits::default()
    };
    let at_start = asked.workers.max(limits.min).min(limits.max);
    ReplicaConfig { follow: asked_for.follow, at_start, limits, hook: asked_for.hook.clone() }
}

/// Adapters of a pool as its workers are told of them. Paths mean nothing to workers elsewhere.
pub(super) fn adapters(asked: &PoolConfig) -> Vec<AdapterSource> {
    let is_local = asked.connect.is_empty();
    let source = |adapter: &AdapterConfig| {
        let path = std::path::absolute(&adapter.path).unwrap_or_else(|_| adapter.path.clone());
        let key = if is_local { identity(Some(&path)) } else { String::new() };
        AdapterSource { name: adapter.name.clone(), path, key }
    };
    asked.adapters.iter().map(source).collect()
}

/// Digest that tells workers of a pool apart by their program and by the files of the model. Adapters come and go while workers run.
fn identity_of(asked: &PoolConfig, command: &WorkerCommand) -> String {
    let mut identity = [command.identity.clone(), identity(asked.model.as_deref())].join(" ");
    if !asked.shared_weights {
        identity.push_str(OWN_WEIGHTS);
    }
    identity
}

/// End of the identity of workers that share no weights, so that others are started where the config changes.
const OWN_WEIGHTS: &str = " own weights";

/// Copies of the weights for a pool. Their key has the state of program and model files at each start of a worker: where a file has changed
/// in place, the next worker packs anew.
fn shared_weights(asked: &PoolConfig, command: &WorkerCommand, copies: Copies) -> SharedWeights {
    let (program, model) = (command.program.clone(), asked.model.clone());
    let form = [asked.quantize.as_str(), asked.device.name(), asked.path.as_str()].join(" ");
    let key = move || {
        let mut hasher = Sha256::new();
        hasher.update(&form);
        for path in std::iter::once(program.clone()).chain(files_of(model.as_deref())) {
            let Ok(meta) = std::fs::metadata(&path) else { continue };
            let (at, changed) = ((meta.dev(), meta.ino(), meta.len()), (meta.mtime(), meta.mtime_nsec()));
            hasher.update(format!("\n{} {at:?} {changed:?}", path.display()));
        }
        hex(&hasher.finalize()[..16])
    };
    let (of_pool, asked, program) = (command.weights_key, asked.clone(), command.program.clone());
    let sealed_key = Arc::new(move || of_pool(&asked, &program));
    SharedWeights { copies, key: Arc::new(key), sealed_key }
}

/// Digest of the program file's path, size and modification time.
pub(super) fn program_identity(program: &Path) -> String {
    digest([program.to_owned()])
}

/// Digest of the path, size and modification time of the model's files.
fn identity(model: Option<&Path>) -> String {
    digest(files_of(model))
}

/// Digest of the files that make a model: as [`identity`], without what else lies in its folder (a README, caches of tools), and with the configs of its
/// modules in folders of their own.
pub(super) fn model_files(model: Option<&Path>) -> String {
    let is_read = |path: &PathBuf| {
        let ending = path.extension().map(|ending| ending.to_ascii_lowercase());
        ending.is_some_and(|ending| ["gguf", "jinja", "json", "safetensors"].iter().any(|known| ending == *known))
            || model.is_some_and(|model| model.is_file())
    };
    let is_hidden = |path: &Path| path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
    let mut paths = files_of(model);
    let folders: Vec<_> = paths.iter().filter(|path| !is_hidden(path) && path.is_dir()).cloned().collect();
    paths.retain(|path| !path.is_dir());
    let of_module = |folder: &PathBuf| ["config.json", "model.safetensors"].map(|name| folder.join(name));
    paths.extend(folders.iter().flat_map(of_module));
    digest(paths.into_iter().filter(|path| !is_hidden(path) && is_read(path)))
}

/// Files of a model, in the order of their names.
fn files_of(model: Option<&Path>) -> Vec<PathBuf> {
    // The parent of a relative path such as `model.gguf` would be empty, and could not be listed.
    let model = model.and_then(|model| std::path::absolute(model).ok());
    let file = model.as_deref().filter(|model| model.is_file());
    let folder = file.and_then(Path::parent).or(model.as_deref());
    let files = folder.into_iter().flat_map(std::fs::read_dir).flatten().flatten();
    let mut paths: Vec<_> = files.map(|entry| entry.path()).collect();
    if let Some(file) = file {
        // All files of a split GGUF model have the name of the model; other files of their folder belong to other models.
        let name = penstock_gguf::model_name(file);
        paths.retain(|path| penstock_gguf::model_name(path) == name);
    }
    paths.sort();
    paths
}

fn digest(paths: impl IntoIterator<Item = PathBuf>) -> String {
    let mut hasher = Sha256::new();
    for path in paths {
        let Ok(meta) = std::fs::metadata(&path) else { continue };
        let modified = meta.modified().ok().and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok());
        hasher.update(format!("{} {} {modified:?}\n", path.display(), meta.len()));
    }
    hex(&hasher.finalize()[..8])
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Numbers of the CPU cores that this process may use (its affinity).
pub(super) fn cores() -> Vec<usize> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return Vec::new() };
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect()
}

/// Memory that is available without swapping others out, in bytes, within the limits of this process's cgroups; `None`:
/// the system does not say.
pub(super) fn bytes_free() -> Option<u64> {
    let memory = penstock_machine::Machine::default().memory();
    (memory.bound != penstock_machine::Bound::Unknown).then_some(memory.available)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relative_path_identifies_the_file_that_it_names() {
        // Tests run in the crate's folder.
        let (file, nothing) = (Path::new("Cargo.toml"), digest([]));
        assert_ne!(identity(Some(file)), nothing);
        assert_eq!(identity(Some(file)), identity(Some(&std::path::absolute(file).expect("a path"))));
        assert_ne!(identity(Some(Path::new("src"))), nothing);
        assert_eq!(identity(None), nothing);
        assert_eq!(identity(Some(Path::new("no-such-file.gguf"))), nothing);
    }
}
