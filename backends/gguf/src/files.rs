//! Finding a model's GGUF files: one file, the only one of a folder, or a model split over several.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use crate::{Gguf, GgufError, Part, header};

/// Most files of a split model.
const FILES_MAX: u64 = 1024;

/// File of the GGUF model at `path`: `path` itself if it is such a file by its name or its first bytes, or the only model of a folder that has no `config.json`. `None`: the
/// folder is a checkpoint in Hugging Face's layout, or has no GGUF file.
///
/// Errors: several models in the folder, or a folder that cannot be read.
pub fn locate(path: &Path) -> Result<Option<PathBuf>, GgufError> {
    if path.is_file() {
        return Ok((is_named_gguf(path) || begins_as_gguf(path)).then(|| path.to_owned()));
    }
    if !path.is_dir() || path.join("config.json").exists() {
        return Ok(None);
    }
    let shown = path.display().to_string();
    let entries = std::fs::read_dir(path).map_err(|e| GgufError::new(&shown, format!("cannot be opened: {e}")))?;
    let mut models: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|file| is_named_gguf(file))
        // Later files of a split model belong to its first; projectors of vision models are no language models.
        .filter(|file| split_name(file).is_none_or(|(_, number, _)| number == 1))
        .filter(|file| !file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("mmproj")))
        .collect();
    models.sort();
    match models.as_slice() {
        [] => Ok(None),
        [one] => Ok(Some(one.clone())),
        several => {
            let names: Vec<_> = several.iter().filter_map(|f| f.file_name()).map(|n| n.to_string_lossy()).collect();
            let shown_names = names.iter().take(8).map(|name| crate::error::shown(name)).collect::<Vec<_>>().join(", ");
            let reason = format!("has {} GGUF models: {shown_names}", names.len());
            Err(GgufError::new(shown, reason).help("give the path of one of them"))
        }
    }
}

fn is_named_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// A file's name without `.gguf`, in whatever case the ending is written; `None`: the name ends otherwise.
fn without_ending(name: &str) -> Option<&str> {
    let (stem, ending) = name.rsplit_once('.')?;
    (!stem.is_empty() && ending.eq_ignore_ascii_case("gguf")).then_some(stem)
}

/// True if the file has the format's first bytes, whatever its name (Ollama's store names files by their hash).
fn begins_as_gguf(path: &Path) -> bool {
    let mut magic = [0; 4];
    File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && &magic == b"GGUF"
}

/// Name of the model at `path`: of a folder its name, of a file the name without `.gguf` (in any case) and the number of a split file.
pub fn model_name(path: &Path) -> Option<String> {
    let whole = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if let Some((stem, ..)) = split_name(&whole) {
        return Some(stem);
    }
    let name = whole.file_name()?.to_string_lossy().into_owned();
    Some(without_ending(&name).unwrap_or(&name).to_owned())
}

/// Stem, number and count in the name of a split model's file, `stem-00001-of-00003.gguf`.
fn split_name(path: &Path) -> Option<(String, u64, u64)> {
    let name = without_ending(path.file_name()?.to_str()?)?;
    let (rest, count) = name.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let parse = |digits: &str| if digits.len() == 5 { digits.parse::<u64>().ok() } else { None };
    Some((stem.to_owned(), parse(number)?, parse(count)?))
}

fn read(path: &Path) -> Result<(header::Header, Part), GgufError> {
    let shown = path.display().to_string();
    let os = |error: std::io::Error| GgufError::new(&shown, format!("cannot be opened: {error}"));
    // Looked at before it is opened: opening a pipe would wait for its writer.
    if path.metadata().is_ok_and(|found| !found.is_file()) {
        return Err(GgufError::new(&shown, "is not a regular file"));
    }
    let file = File::open(path).map_err(os)?;
    let size = file.metadata().map_err(os)?.len();
    let header = header::read(&shown, &mut BufReader::with_capacity(1 << 20, file), size)?;
    Ok((header, Part { path: path.to_owned(), size }))
}

pub(crate) fn open(path: &Path) -> Result<Gguf, GgufError> {
    let (header, part) = read(path)?;
    let shown = path.display().to_string();
    let mut gguf = Gguf { shown, metadata: header.metadata, tensors: header.tensors, parts: vec![part] };
    let count = gguf.integer("split.count", 0, FILES_MAX)?.unwrap_or(1);
    if count <= 1 {
        return Ok(gguf);
    }
    let Some((stem, _, named)) = split_name(path).filter(|(_, _, named)| *named == count) else {
        let reason = format!("is one of {count} files, but its name does not end in -NNNNN-of-{count:05}.gguf");
        return Err(GgufError::new(gguf.shown, reason).help("keep the names that the files were published with"));
    };
    // The files of one model are spelled alike: a system may tell `.GGUF` from `.gguf`.
    let ending = path.extension().unwrap_or_default().to_string_lossy().into_owned();
    let name = |number: u64| path.with_file_name(format!("{stem}-{number:05}-of-{named:05}.{ending}"));
    // The first file has the metadata.
    let mut whole: Option<Gguf> = None;
    for number in 1..=count {
        let file = name(number);
        if !file.is_file() {
            let reason = format!("is missing, though the model has {count} files");
            return Err(GgufError::new(file.display().to_string(), reason).help("fetch the file"));
        }
        let (header, part) = read(&file)?;
        let whole = whole.get_or_insert_with(|| Gguf {
            shown: file.display().to_string(),
            metadata: header.metadata,
            tensors: Default::default(),
            parts: Vec::new(),
        });
        for (name, mut tensor) in header.tensors {
            tensor.file = whole.parts.len();
            if whole.tensors.insert(name.clone(), tensor).is_some() {
                let reason = format!("tensor {} is in two files", crate::error::shown(&name));
                return Err(GgufError::new(file.display().to_string(), reason));
            }
        }
        whole.parts.push(part);
    }
    gguf = whole.expect("at least two files");
    if let Some(wanted) = gguf.integer("split.tensors.count", 0, u64::MAX)?
        && wanted != gguf.tensors.len() as u64
    {
        return Err(gguf.refuse("split.tensors.count", format!("is {wanted}, the files have {}", gguf.tensors.len())));
    }
    Ok(gguf)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Value, Writer};

    #[test]
    fn the_ending_of_a_name_is_known_in_any_case() {
        for (path, name) in [
            ("/m/Qwen3-Q4_K_M.gguf", "Qwen3-Q4_K_M"),
            ("/m/Qwen3-Q4_K_M.GGUF", "Qwen3-Q4_K_M"),
            ("/m/big-00002-of-00003.gguf", "big"),
            ("/m/big-00002-of-00003.GGUF", "big"),
            ("/m/qwen3.gguf.d", "qwen3.gguf.d"),
            ("/m/sha256-abcd", "sha256-abcd"),
        ] {
            assert_eq!(model_name(Path::new(path)).as_deref(), Some(name), "{path}");
        }
    }

    #[test]
    fn a_split_model_in_capitals_is_read_from_all_of_its_files() {
        let folder = std::env::temp_dir().join(format!("penstock-gguf-split-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        for number in 1..=2 {
            let mut writer = Writer::default();
            writer.key("split.count", &Value::Integer(2)).tensor(&format!("t{number}"), &[1], 0, &[0; 4]);
            let file = folder.join(format!("m-{number:05}-of-00002.GGUF"));
            std::fs::write(file, writer.finish()).expect("written");
        }
        let located = locate(&folder).expect("one model").expect("a GGUF model");
        let gguf = open(&located);
        std::fs::remove_dir_all(&folder).expect("removed");
        assert_eq!(gguf.expect("both files").tensors.len(), 2);
    }
}
