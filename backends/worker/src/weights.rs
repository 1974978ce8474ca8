//! Memory of packed weights that the workers of one machine share. The gateway offers it as the worker's standard input; who is first packs
//! into it and seals it, and the others map it. A gateway that keeps packed weights in files may be the first.
//!
//! ```text
//! offered memory ──┬─ sealed ───────────────────────────────→ mapped, if its key is this worker's
//!                  └─ not sealed ─┬─ locked by this worker ─→ filled, sealed under its key
//!                                 └─ locked by another ─────→ waited for
//! ```
//! Whatever goes wrong, the worker packs into memory of its own, and its log says why. How the memory is laid out and checked:
//! `penstock_kernels::host`.

use crate::config::WorkerError;
use crate::options::ModelOptions;
use object::Object;
use object::read::elf::ElfFile64;
use penstock_engine::checkpoint::Checkpoint;
use penstock_kernels::KernelError;
use penstock_kernels::host::{CopyError, CopyKey, CopyUse, FileStamp, MappedFile, WeightCopy, is_sealed};
use penstock_proto::frames::Loading;
use rustix::fs::{FlockOperation, MemfdFlags, Mode, OFlags, fcntl_get_seals, flock, fstat, memfd_create, open};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// File of the program that runs.
const PROGRAM: &str = "/proc/self/exe";

/// Time between two looks at memory that another worker fills.
const LOOK: Duration = Duration::from_millis(10);

/// Time without progress after which a worker that fills the memory is not waited for any longer.
const STALLED: Duration = Duration::from_secs(30);

/// Memory that the gateway offers at standard input; `None`: something else is there.
pub(crate) fn offered() -> Option<Arc<OwnedFd>> {
    let memory = std::io::stdin().as_fd().try_clone_to_owned().ok()?;
    // Only memory has seals.
    fcntl_get_seals(&memory).is_ok().then(|| Arc::new(memory))
}

/// Memory for [`ModelOptions::weights`] in which the bench puts packed weights as workers that share them do.
///
/// # Errors
/// [`WorkerError::Os`]: the system has no memory that can be sealed.
pub fn shared_memory() -> Result<Arc<OwnedFd>, WorkerError> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let made = memfd_create("penstock-weights", flags);
    made.map(Arc::new)
        .map_err(|error| WorkerError::Os { what: "making memory for weights".into(), source: error.into() })
}

/// Shared memory of a worker's weights, and the key of its checkpoint, form and program.
pub(crate) struct Shared {
    pub(crate) copy: WeightCopy,
    pub(crate) key: CopyKey,
}

/// Opens the memory that the options have, for the weights of `checkpoint`; waits for another worker that fills it. `None`: there is none, or
/// it cannot be used, which is logged.
pub(crate) fn shared(
    options: &ModelOptions,
    checkpoint: &Checkpoint,
    progress: &mut dyn FnMut(Loading),
) -> Option<Shared> {
    let memory = options.weights.as_ref()?;
    let key = match key(options, checkpoint) {
        Ok(key) => key,
        Err(error) => {
            let error = crate::chain(&error);
            warn!(error, "weights are not shared: their key cannot be made");
            return None;
        }
    };
    let total = checkpoint.held_bytes(options.held);
    match opened(memory, &key, &mut |bytes_done| {
        let stage = "waiting for the packed weights".into();
        progress(Loading { stage, bytes_done: bytes_done.min(total), bytes_total: total });
    }) {
        Ok(copy) => Some(Shared { copy, key }),
        Err(error) => {
            refused(&error);
            None
        }
    }
}

/// Name of the place of a worker's weights and of who packed them, for its log.
pub(crate) fn how(used: Option<CopyUse>) -> &'static str {
    match used {
        None => "packed into memory of this worker",
        Some(CopyUse::Packed { .. }) => "packed into memory that workers share",
        Some(CopyUse::Shared { .. }) => "shared: packed by another worker",
    }
}

/// Logs that the weights are packed into memory of this worker alone.
pub(crate) fn refused(error: &CopyError) {
    let error = crate::chain(error);
    warn!(error, "the shared memory of weights cannot be used: this worker packs its own");
}

fn opened(memory: &OwnedFd, key: &CopyKey, waits: &mut dyn FnMut(u64)) -> Result<WeightCopy, CopyError> {
    let os = |what: &'static str| move |error: rustix::io::Errno| CopyError::Os { what, source: error.into() };
    // A description of this process's own: a lock on that of the gateway would be everybody's.
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    let own = open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(os("opening memory for weights"))?;
    let (mut seen, mut since, mut told) = (0, Instant::now(), false);
    loop {
        if is_sealed(&own) {
            return WeightCopy::open(&own, key);
        }
        match flock(&own, FlockOperation::NonBlockingLockExclusive) {
            // Sealed between the two looks: the next one finds it so.
            Ok(()) if is_sealed(&own) => _ = flock(&own, FlockOperation::Unlock),
            Ok(()) => return WeightCopy::fill(own),
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let filled = fstat(&own).map_or(0, |file| file.st_blocks.unsigned_abs().saturating_mul(512));
                if filled != seen {
                    (seen, since) = (filled, Instant::now());
                } else if since.elapsed() > STALLED {
                    let source = std::io::ErrorKind::TimedOut.into();
                    return Err(CopyError::Os { what: "waiting for the packed weights", source });
                }
                if !told {
                    info!("another worker packs the weights, or the gateway reads them: this worker waits");
                    told = true;
                }
                waits(filled);
                std::thread::sleep(LOOK);
            }
            Err(error) => return Err(os("locking memory for weights")(error)),
        }
    }
}

/// Digest of all that packed weights depend on: the program, the form, the instruction path, the checkpoint's config and tensors, and the
/// state of its files. The gateway makes it too, to find weights that it keeps in files.
///
/// # Errors
/// The file of this program cannot be looked at, or this machine lacks the instruction path.
pub(crate) fn key(options: &ModelOptions, checkpoint: &Checkpoint) -> Result<CopyKey, KernelError> {
    let mut hash = blake3::Hasher::new();
    let mut add = |bytes: &[u8]| {
        hash.update(&(bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    add(env!("CARGO_PKG_VERSION").as_bytes());
    add(&program()?);
    add(format!("{:?}", options.held).as_bytes());
    add(options.path.resolve()?.name().as_bytes());
    add(&checkpoint.model_hash());
    checkpoint.stamps().for_each(|stamp| add(&bytes_of(stamp)));
    Ok(*hash.finalize().as_bytes())
}

/// Identity of the program that runs, also where another has been put in its file's place: the build id that the linker has made of the
/// program's content, which outlives a restart of the machine and is equal in each container of one image; without one, the file's stamp.
///
/// # Errors
/// The file cannot be looked at.
fn program() -> Result<Vec<u8>, KernelError> {
    let file = MappedFile::open(Path::new(PROGRAM))?;
    let elf = ElfFile64::<object::Endianness>::parse(file.bytes());
    let id = elf.ok().and_then(|elf| elf.build_id().ok().flatten().map(<[u8]>::to_vec));
    Ok(id.unwrap_or_else(|| bytes_of(file.stamp())))
}

/// Returns true if the file at `path` is the program that runs, so that both give their weights the same keys.
pub(crate) fn is_this_program(path: &Path) -> bool {
    let stamp = |path: &Path| std::fs::metadata(path).ok().map(|file| FileStamp::of(&file));
    stamp(Path::new(PROGRAM)).is_some_and(|own| stamp(path) == Some(own))
}

fn bytes_of(FileStamp { place: [device, inode], size, changed: [seconds, nanoseconds] }: FileStamp) -> Vec<u8> {
    let numbers = [device, inode, size, seconds.cast_unsigned(), nanoseconds.cast_unsigned()];
    numbers.into_iter().flat_map(u64::to_le_bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::load;
    use penstock_engine::Engine;
    use penstock_kernels::Held;
    use penstock_proto::frames::{ChoiceStart, Generate, Sampling};

    fn options(memory: &Arc<OwnedFd>) -> ModelOptions {
        ModelOptions { threads: 1, kv_bytes_max: 1 << 20, weights: Some(Arc::clone(memory)), ..Default::default() }
    }

    /// The demo model in this memory, and how its weights came there.
    fn loaded(options: &ModelOptions) -> (Engine, Option<CopyUse>) {
        let (engine, info) = load(options, &mut |_| {}).expect("the demo model loads");
        (engine, info.weights)
    }

    fn tokens(engine: &mut Engine) -> Vec<u32> {
        let sampling = Sampling {
            top_p: 1.0,
            repetition_penalty: 1.0,
            max_tokens: 12,
            min_tokens: 12,
            logprobs: -1,
            prompt_logprobs: -1,
            ..Default::default()
        };
        engine.submit(Generate {
            request: 1,
            prompt: (300..340).collect(),
            choices: vec![ChoiceStart { index: 0, emitted: Vec::new() }],
            sampling: Some(sampling),
            ..Default::default()
        });
        let mut tokens = Vec::new();
        while engine.has_work() {
            let step = engine.step(&|| Duration::ZERO);
            tokens.extend(step.outputs.iter().flat_map(|output| &output.tokens).map(|token| token.id));
        }
        tokens
    }

    #[test]
    fn the_second_worker_finds_what_the_first_packed() {
        let memory = shared_memory().expect("memory");
        let (mut first, packed) = loaded(&options(&memory));
        let (mut second, found) = loaded(&options(&memory));
        let Some(CopyUse::Packed { bytes }) = packed else { panic!("{packed:?}") };
        assert_eq!(found, Some(CopyUse::Shared { bytes }));
        let said = tokens(&mut first);
        assert_eq!((said.len(), &said), (12, &tokens(&mut second)));
        drop(first);
        assert_eq!(tokens(&mut second), said, "the copy is not its maker's");
        let (mut alone, own) = loaded(&ModelOptions { weights: None, ..options(&memory) });
        assert_eq!((own, tokens(&mut alone)), (None, said));
    }

    #[test]
    fn a_copy_of_another_form_is_left_alone() {
        let memory = shared_memory().expect("memory");
        assert!(matches!(loaded(&options(&memory)).1, Some(CopyUse::Packed { .. })));
        let (mut other, own) = loaded(&ModelOptions { held: Held::Int8, ..options(&memory) });
        assert_eq!((own, tokens(&mut other).len()), (None, 12));
        assert!(matches!(loaded(&options(&memory)).1, Some(CopyUse::Shared { .. })));
    }

    #[test]
    fn a_worker_waits_for_the_one_that_packs_and_packs_where_that_one_dies() {
        let memory = shared_memory().expect("memory");
        // Another worker's description, whose lock ends with it.
        let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
        let other = open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).expect("opens");
        flock(&other, FlockOperation::LockExclusive).expect("the first");
        let (mut other, mut waited) = (Some(other), 0);
        let (_, info) = load(&options(&memory), &mut |loading| {
            if loading.stage.starts_with("waiting") {
                waited += 1;
                other = if waited < 3 { other.take() } else { None };
            }
        })
        .expect("the demo model loads");
        assert!(waited == 3 && matches!(info.weights, Some(CopyUse::Packed { .. })), "{waited}");
    }

    #[test]
    fn the_gateway_makes_the_key_that_a_worker_seals_under() {
        let memory = shared_memory().expect("memory");
        let options = options(&memory);
        let key = |options: &ModelOptions| {
            crate::inspect::weights_key(options, Path::new(PROGRAM)).expect("the demo model has a key")
        };
        assert!(matches!(loaded(&options).1, Some(CopyUse::Packed { .. })));
        let sealed = penstock_kernels::host::key_of(&memory).expect("sealed");
        assert_eq!(key(&ModelOptions { weights: None, threads: 2, ..options.clone() }), Some(sealed));
        let best = options.path.resolve().expect("a path");
        assert_eq!(
            key(&ModelOptions { path: best, ..options.clone() }),
            Some(sealed),
            "auto is the path that it chose"
        );
        assert_ne!(key(&ModelOptions { held: Held::Int8, ..options.clone() }), Some(sealed));
        assert_ne!(key(&ModelOptions { path: penstock_kernels::cpu::Path::Portable, ..options.clone() }), Some(sealed));
        assert_eq!(key(&ModelOptions { device: crate::DeviceChoice::Reference, ..options.clone() }), None);
        assert_eq!(
            crate::inspect::weights_key(&options, Path::new("/bin/sh")).expect("no key"),
            None,
            "another program"
        );
    }

    #[test]
    fn a_build_id_is_of_the_content_alone() {
        let id = program().expect("this program");
        assert_ne!(id, bytes_of(MappedFile::open(Path::new(PROGRAM)).expect("mapped").stamp()), "the linker makes ids");
        assert!(id.len() >= 8 && is_this_program(&std::env::current_exe().expect("a path")));
    }

    #[test]
    fn what_is_no_memory_is_not_taken() {
        let file = Arc::new(std::fs::File::open("/dev/null").expect("it is there").into());
        let (_engine, own) = loaded(&options(&file));
        assert_eq!(own, None);
    }
}
