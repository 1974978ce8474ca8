//! Compiler of the CUDA kernels in `kernels/cuda`, and the checks of what is committed.
//!
//! ```text
//! kernels/cuda/{*.cuh, *.cu} ─ NVRTC ─→ kernels/cuda/prebuilt/ARCH/NAME.cubin.gz   embedded in penstock
//!                                         kernels/cuda/prebuilt/manifest.toml        hashes, registers, memory, spills
//! ```
//! The build of penstock runs none of this: cubins are committed, and the same source, flags and compiler make the same bytes. [`check`]
//! compares sources, manifest and cubins without a compiler; [`rebuild`] with one. The compiler is NVRTC of one version, from a wheel whose
//! hash is pinned (`.ci/nvrtc.txt`).

mod nvrtc;

use anyhow::{Context, bail, ensure};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// Sources, one cubin each per architecture.
pub const SOURCES: [&str; 7] = ["rows", "gemm", "wgmma", "wgmma_fed", "attention", "wgmma_attention", "sampling"];
/// Headers that sources may include.
const HEADERS: [&str; 3] = ["ptx.cuh", "gemm.cuh", "attention.cuh"];
/// Architectures, in the compiler's names. Code for `sm_80` runs on all cards of compute capability 8, that for `sm_120a` on 12.0 alone.
pub const ARCHITECTURES: [&str; 4] = ["sm_80", "sm_90a", "sm_100a", "sm_120a"];
/// Sources whose instructions one architecture alone has.
const SINGLE: [(&str, &str); 3] = [("wgmma", "sm_90a"), ("wgmma_fed", "sm_90a"), ("wgmma_attention", "sm_90a")];
/// Version of NVRTC that makes what is committed.
pub const COMPILER: &str = "nvrtc 12.9";
/// Flags besides the architecture. Spilled registers are errors.
const FLAGS: [&str; 4] =
    ["--std=c++17", "--ptxas-options=-v", "--ptxas-options=--warn-on-spills", "--ptxas-options=-Werror"];
/// Sources without fused products and sums, whose results have to be the CPU's bits.
const EXACT: [&str; 1] = ["sampling"];

/// Registers of a thread, as many as an instruction can name.
const REGISTERS_MAX: u32 = 255;
/// Shared memory that a kernel gets without asking for more.
const SHARED_BYTES_MAX: u32 = 48 << 10;
/// Largest cubin that is read.
const CUBIN_BYTES_MAX: u64 = 4 << 20;

/// Content of `manifest.toml`.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
pub struct Manifest {
    /// Version of the compiler.
    pub compiler: String,
    /// One entry per source and architecture.
    pub cubin: Vec<Cubin>,
}

/// One committed cubin.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Cubin {
    /// Name of the source.
    pub source: String,
    /// Architecture, in the compiler's name.
    pub architecture: String,
    /// SHA-256 of compiler, flags, architecture, headers and the source.
    pub source_sha256: String,
    /// SHA-256 of the cubin, uncompressed.
    pub cubin_sha256: String,
    /// Kernels of the cubin.
    pub kernel: Vec<Kernel>,
}

/// One kernel of a cubin.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Kernel {
    /// Name of the entry point.
    pub name: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Static shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Stack of a thread, in bytes.
    pub stack_bytes: u32,
    /// Bytes of spilled registers.
    pub spill_bytes: u32,
    /// `model-only`: never run on a GPU of this architecture; or `measured DATE`.
    pub status: String,
}

/// Source and architecture of every cubin, in the manifest's order.
fn cubins() -> impl Iterator<Item = (&'static str, &'static str)> {
    let all = SOURCES.iter().flat_map(|source| ARCHITECTURES.map(|architecture| (*source, architecture)));
    all.filter(|(source, architecture)| SINGLE.iter().all(|(name, only)| name != source || only == architecture))
}

/// Folder with the sources, in this repository.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../cuda")
}

/// Checks without a compiler that sources, manifest and cubins agree, that no architecture is missing, and that kernels keep their budgets.
///
/// # Errors
/// The first disagreement, and what to run.
pub fn check(folder: &Path) -> anyhow::Result<()> {
    let manifest = manifest(folder)?;
    ensure!(manifest.compiler == COMPILER, "manifest.toml is of {}, and the compiler is {COMPILER}", manifest.compiler);
    let is_listed = |(wanted, cubin): ((&str, &str), &Cubin)| wanted == (&*cubin.source, &*cubin.architecture);
    ensure!(
        cubins().count() == manifest.cubin.len() && cubins().zip(&manifest.cubin).all(is_listed),
        "manifest.toml does not list {SOURCES:?} for {ARCHITECTURES:?} in order: run `make kernels`"
    );
    for cubin in &manifest.cubin {
        let name = format!("{} for {}", cubin.source, cubin.architecture);
        let source = source(folder, &cubin.source)?;
        let hash = source_hash(folder, &cubin.source, &source, &cubin.architecture)?;
        ensure!(
            hash == cubin.source_sha256,
            "{name}: the source has changed since it was compiled: run `make kernels`"
        );
        let image = read_cubin(&cubin_path(folder, cubin))?;
        ensure!(sha256(&[&image]) == cubin.cubin_sha256, "{name}: the cubin is not the manifest's: run `make kernels`");
        let mut named: Vec<&str> = cubin.kernel.iter().map(|kernel| kernel.name.as_str()).collect();
        named.sort_unstable();
        ensure!(named == entry_points(&source), "{name}: kernels of source and manifest differ: {named:?}");
        cubin.kernel.iter().try_for_each(|kernel| within_budget(&name, kernel))?;
    }
    Ok(())
}

fn within_budget(cubin: &str, kernel: &Kernel) -> anyhow::Result<()> {
    let Kernel { name, registers, shared_bytes, stack_bytes, spill_bytes, status } = kernel;
    ensure!(*registers <= REGISTERS_MAX, "{cubin}: {name} has {registers} registers, {REGISTERS_MAX} at most");
    ensure!(*shared_bytes <= SHARED_BYTES_MAX, "{cubin}: {name} has {shared_bytes} bytes of shared memory");
    ensure!(
        (*stack_bytes, *spill_bytes) == (0, 0),
        "{cubin}: {name} has {stack_bytes} bytes of stack, {spill_bytes} spilled"
    );
    ensure!(status == "model-only" || status.starts_with("measured 20"), "{cubin}: {name}: no status {status:?}");
    Ok(())
}

/// Compiles everything. With `write`, replaces cubins and manifest; otherwise compares them byte by byte.
///
/// # Errors
/// A compiler of another version, an error or a spill in a source, or (without `write`) a cubin that differs.
pub fn rebuild(folder: &Path, write: bool) -> anyhow::Result<()> {
    let version = nvrtc::version()?;
    ensure!(version == COMPILER, "this is {version}, and cubins are made by {COMPILER}");
    let old = manifest(folder).ok();
    let mut made = Manifest { compiler: version, cubin: Vec::new() };
    for (name, architecture) in cubins() {
        let (cubin, image) = compile(folder, name, architecture, old.as_ref())?;
        let path = cubin_path(folder, &cubin);
        if write {
            std::fs::create_dir_all(path.parent().expect("it lies in its architecture's folder"))?;
            // A cubin that is the same keeps its file: another version of the packer would write other bytes.
            if read_cubin(&path).ok().as_ref() != Some(&image) {
                std::fs::write(&path, packed(&image)?).with_context(|| path.display().to_string())?;
            }
        } else if read_cubin(&path)? != image {
            bail!("{}: what is committed is not what the compiler makes: run `make kernels`", path.display());
        }
        made.cubin.push(cubin);
    }
    if write {
        let note = "# Made by `make kernels`. Statuses are written by hand, after a run on a GPU.\n";
        std::fs::write(manifest_path(folder), format!("{note}{}", toml::to_string(&made)?))?;
    } else {
        ensure!(old.as_ref() == Some(&made), "manifest.toml is not what the compiler makes: run `make kernels`");
    }
    Ok(())
}

fn compile(folder: &Path, name: &str, architecture: &str, old: Option<&Manifest>) -> anyhow::Result<(Cubin, Vec<u8>)> {
    let source = source(folder, name)?;
    let flags: Vec<String> = flags(name, architecture).collect();
    let headers = headers(folder)?;
    let (image, log) =
        nvrtc::compile(&source, name, &headers, &flags).with_context(|| format!("{name}.cu for {architecture}"))?;
    let cubin_sha256 = sha256(&[&image]);
    // A status holds for the bytes that were measured.
    let before = old.and_then(|old| old.cubin.iter().find(|cubin| cubin.cubin_sha256 == cubin_sha256));
    let status = |kernel: &str| {
        let known = before.and_then(|cubin| cubin.kernel.iter().find(|known| known.name == kernel));
        known.map_or("model-only", |known| known.status.as_str()).to_owned()
    };
    let kernel = resources(&log, &status)?;
    let (source_sha256, source) = (source_hash(folder, name, &source, architecture)?, name.to_owned());
    Ok((Cubin { source, architecture: architecture.to_owned(), source_sha256, cubin_sha256, kernel }, image))
}

/// Kernels in the report of `ptxas -v`, by name.
fn resources(log: &str, status: &dyn Fn(&str) -> String) -> anyhow::Result<Vec<Kernel>> {
    let (mut kernels, mut name, mut memory): (Vec<Kernel>, _, _) = (Vec::new(), None, (0, 0));
    for line in log.lines() {
        let number = |unit: &str| number_before(line, unit);
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            name = rest.split('\'').next();
        } else if line.contains("bytes stack frame") {
            let spilled = number("bytes spill stores") + number("bytes spill loads");
            memory = (number("bytes stack frame"), spilled);
        } else if line.contains(" registers") {
            let name = name.take().context("registers of no kernel in the compiler's report")?;
            let (registers, shared_bytes) = (number("registers"), number("bytes smem"));
            let ((stack_bytes, spill_bytes), status) = (memory, status(name));
            kernels.push(Kernel { name: name.to_owned(), registers, shared_bytes, stack_bytes, spill_bytes, status });
        }
    }
    ensure!(!kernels.is_empty(), "the compiler reports no kernel: {log}");
    kernels.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(kernels)
}

/// Number before `unit` in a line of the report; 0 if the unit is not there.
fn number_before(line: &str, unit: &str) -> u32 {
    let before = line.split_once(unit).map_or("", |(before, _)| before);
    before.trim_end().rsplit(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

/// Names of the kernels that a source defines, sorted.
fn entry_points(source: &str) -> Vec<&str> {
    let lines = source.lines().filter(|line| line.starts_with("KERNEL("));
    let names = lines.filter_map(|line| line.split_once(") ").and_then(|(_, rest)| rest.split('(').next()));
    let mut names: Vec<&str> = names.collect();
    names.sort_unstable();
    names
}

fn flags(name: &str, architecture: &str) -> impl Iterator<Item = String> {
    let own = EXACT.contains(&name).then(|| "--fmad=false".to_owned());
    let architecture = format!("--gpu-architecture={architecture}");
    std::iter::once(architecture).chain(FLAGS.map(str::to_owned)).chain(own)
}

fn source(folder: &Path, name: &str) -> anyhow::Result<String> {
    let path = folder.join(format!("{name}.cu"));
    std::fs::read_to_string(&path).with_context(|| path.display().to_string())
}

/// Names and texts of the headers.
fn headers(folder: &Path) -> anyhow::Result<Vec<(&'static str, String)>> {
    let read = |name: &'static str| Ok((name, std::fs::read_to_string(folder.join(name)).context(name)?));
    HEADERS.into_iter().map(read).collect()
}

fn source_hash(folder: &Path, name: &str, source: &str, architecture: &str) -> anyhow::Result<String> {
    let (headers, flags): (_, Vec<String>) = (headers(folder)?, flags(name, architecture).collect());
    let flags = flags.join(" ");
    let mut parts = vec![COMPILER.as_bytes(), flags.as_bytes()];
    parts.extend(headers.iter().map(|(_, text)| text.as_bytes()));
    parts.push(source.as_bytes());
    Ok(sha256(&parts))
}

fn sha256(parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn manifest_path(folder: &Path) -> PathBuf {
    folder.join("prebuilt/manifest.toml")
}

fn manifest(folder: &Path) -> anyhow::Result<Manifest> {
    let path = manifest_path(folder);
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    toml::from_str(&text).with_context(|| path.display().to_string())
}

fn cubin_path(folder: &Path, cubin: &Cubin) -> PathBuf {
    folder.join("prebuilt").join(&cubin.architecture).join(format!("{}.cubin.gz", cubin.source))
}

fn read_cubin(path: &Path) -> anyhow::Result<Vec<u8>> {
    let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
    let mut image = Vec::new();
    GzDecoder::new(file).take(CUBIN_BYTES_MAX).read_to_end(&mut image).with_context(|| path.display().to_string())?;
    Ok(image)
}

fn packed(image: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut packer = GzEncoder::new(Vec::new(), Compression::best());
    packer.write_all(image)?;
    Ok(packer.finish()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A copy of the committed folder, in which a test may change files.
    fn copy(name: &str) -> PathBuf {
        let to = std::env::temp_dir().join(format!("kernelc-{name}-{}", std::process::id()));
        let from = folder();
        let files = SOURCES.map(|source| format!("{source}.cu"));
        let cubins = cubins().map(|(name, arch)| format!("prebuilt/{arch}/{name}.cubin.gz"));
        let others = HEADERS.into_iter().chain(["prebuilt/manifest.toml"]).map(str::to_owned);
        for file in files.into_iter().chain(cubins).chain(others) {
            let path = to.join(&file);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            std::fs::copy(from.join(&file), path).expect("copied");
        }
        to
    }

    #[track_caller]
    fn refused(name: &str, says: &str, change: impl FnOnce(&Path)) {
        let folder = copy(name);
        change(&folder);
        let outcome = check(&folder);
        std::fs::remove_dir_all(&folder).expect("removed");
        let error = outcome.expect_err("the change is noticed").to_string();
        assert!(error.contains(says), "{error}");
    }

    fn edit(folder: &Path, file: &str, from: &str, to: &str) {
        let text = std::fs::read_to_string(folder.join(file)).expect("a text");
        assert!(text.contains(from), "{file} has no {from:?}");
        std::fs::write(folder.join(file), text.replacen(from, to, 1)).expect("written");
    }

    #[test]
    fn what_is_committed_agrees() {
        check(&folder()).expect("sources, manifest and cubins agree");
    }

    #[test]
    fn what_does_not_agree_is_named() {
        refused("source", "rows for sm_80: the source has changed", |at| edit(at, "rows.cu", "+ p.eps", "- p.eps"));
        refused("header", "the source has changed", |at| edit(at, "ptx.cuh", "ex2.approx.ftz", "ex2.approx"));
        refused("budget", "has 999 registers", |at| {
            edit(at, "prebuilt/manifest.toml", "registers = ", "registers = 999 # ")
        });
        refused("spill", "spilled", |at| edit(at, "prebuilt/manifest.toml", "spill_bytes = 0", "spill_bytes = 4"));
        refused("status", "no status", |at| edit(at, "prebuilt/manifest.toml", "model-only", "fast"));
        refused("list", "does not list", |at| edit(at, "prebuilt/manifest.toml", "sm_100a", "sm_103a"));
        refused("cubin", "gemm for sm_90a: the cubin is not the manifest's", |at| {
            let path = |source: &str| at.join(format!("prebuilt/sm_90a/{source}.cubin.gz"));
            std::fs::copy(path("rows"), path("gemm")).expect("copied");
        });
    }

    #[test]
    fn reports_of_the_compiler_are_read() {
        let log = "ptxas info    : Compiling entry function 'b' for 'sm_80'\nptxas info    : Function properties for b\n    \
                   8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\nptxas info    : Used 40 registers, used 1 barriers, \
                   13824 bytes smem, 396 bytes cmem[0]\nptxas info    : Compiling entry function 'a' for 'sm_80'\n    \
                   0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info    : Used 9 registers\n";
        let read = resources(log, &|_| "model-only".into()).expect("two kernels");
        let numbers = |k: &Kernel| (k.name.clone(), k.registers, k.shared_bytes, k.stack_bytes, k.spill_bytes);
        let read: Vec<_> = read.iter().map(numbers).collect();
        assert_eq!(read, [("a".into(), 9, 0, 0, 0), ("b".into(), 40, 13824, 8, 16)]);
        assert!(resources("", &|_| String::new()).is_err());
    }
}
