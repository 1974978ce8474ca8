//! The local store: a folder of models, each whole or not there. The layout is in the crate's header.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use crate::choose::{SAFETENSORS, says_file};
use crate::manifest::{self, Manifest};
use crate::name::{ModelName, is_word};

/// Folder of pulls that have not ended.
const PARTIAL: &str = ".partial";
/// Begin of the name of a folder there that is being deleted.
const REMOVED: &str = "removed-";
/// Folder of locks.
const LOCKS: &str = ".locks";
/// Digits of a commit that lists show and names take.
const COMMIT_SHOWN: usize = 12;

/// Folder that holds models.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Store {
    folder: PathBuf,
}

/// Model of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// Folder of the model in the store, with its manifest.
    pub folder: PathBuf,
    /// Record of what was fetched.
    pub manifest: Manifest,
}

/// Contents of a store.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// Models by name, the latest pull of each first.
    pub models: Vec<Model>,
    /// Pulls that have not ended.
    pub unfinished: Vec<Unfinished>,
    /// Entries that are no models, with the reason.
    pub faults: Vec<String>,
}

/// Pull that has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfinished {
    /// Name of its folder: `ORG--REPO--VARIANT@COMMIT`.
    pub key: String,
    /// Bytes that its files take.
    pub bytes: u64,
}

/// Result of a removal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Names of models and unfinished pulls that were removed.
    pub names: Vec<String>,
    /// Bytes that they took.
    pub bytes: u64,
}

/// Failure of the store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// No model of that name.
    #[error("{name} is not in the store ({folder}); fetch it: penstock pull {name}")]
    Missing {
        /// Name that was looked for.
        name: String,
        /// Folder of the store.
        folder: String,
    },
    /// Several models of that name.
    #[error("{name} is several models of the store: name one of {names}")]
    Several {
        /// Name that was looked for.
        name: String,
        /// Names of those that fit.
        names: String,
    },
    /// Somebody pulls or removes the model.
    #[error("{0} is being pulled or removed by another process: try again when that has ended")]
    Busy(String),
    /// Error of the file system.
    #[error("{what}")]
    Io {
        /// Path or action that failed.
        what: String,
        /// Error of the system.
        source: io::Error,
    },
}

pub(crate) fn io_error(what: impl Into<String>) -> impl FnOnce(io::Error) -> StoreError {
    let what = what.into();
    move |source| StoreError::Io { what, source }
}

impl Model {
    /// Name by which the model is asked for: `ORG/REPO`, with the quantization of a GGUF model.
    pub fn name(&self) -> String {
        let Manifest { org, repo, variant, .. } = &self.manifest;
        if variant == SAFETENSORS { format!("{org}/{repo}") } else { format!("{org}/{repo}:{variant}") }
    }

    /// Commit, shortened for lists; a name may say it behind `@`.
    pub fn commit(&self) -> &str {
        self.manifest.commit.get(..COMMIT_SHOWN).unwrap_or(&self.manifest.commit)
    }

    /// Path that `--model` takes: the checkpoint folder, or the first GGUF file.
    pub fn path(&self) -> PathBuf {
        let files = self.files();
        if self.manifest.variant == SAFETENSORS {
            return files;
        }
        let first = self.manifest.files.iter().map(|file| &file.name).min();
        first.map_or_else(|| files.clone(), |name| files.join(name))
    }

    /// Folder with the model's files.
    pub fn files(&self) -> PathBuf {
        self.folder.join(&self.manifest.repo)
    }

    /// Checks sizes and checksums of all files, and returns the faults. `told` hears of the bytes as they are read. Cost: reads the model.
    pub fn verify(&self, told: &dyn Fn(u64)) -> Vec<String> {
        let files = self.files();
        let fault = |record: &crate::manifest::FileRecord| {
            let path = files.join(&record.name);
            let size = match path.metadata() {
                Ok(metadata) => metadata.len(),
                Err(error) => return Some(format!("{}: {error}", path.display())),
            };
            if size != record.size {
                return Some(format!("{}: {size} bytes, not {}", path.display(), record.size));
            }
            match record.sum.again(&path, told) {
                Ok(sum) if sum == record.sum => None,
                Ok(sum) => Some(format!("{}: {sum}, not {}", path.display(), record.sum)),
                Err(error) => Some(format!("{}: {error}", path.display())),
            }
        };
        self.manifest.files.iter().filter_map(fault).collect()
    }

    /// Time at which the model became what the name says: of the last pull that asked for its revision, or of the last one where it says the begin of the
    /// commit or nothing. `None`: the name says another repository, quantization or revision.
    fn named_at(&self, name: &ModelName) -> Option<u64> {
        let Manifest { org, repo, variant, commit, pulled_at, files, .. } = &self.manifest;
        let same = |a: &str, b: &str| a.eq_ignore_ascii_case(b);
        let quant = name
            .quant
            .as_ref()
            .is_none_or(|quant| same(quant, variant) || files.iter().any(|file| says_file(quant, &file.name)));
        let is_commit = |asked: &str| asked.len() >= 7 && commit.starts_with(asked);
        let at = match name.revision.as_deref() {
            None => Some(*pulled_at),
            Some(asked) => self.manifest.asked_at(asked).or_else(|| is_commit(asked).then_some(*pulled_at)),
        };
        at.filter(|_| same(org, &name.org) && same(repo, &name.repo) && quant)
    }
}

impl Store {
    /// Store in `folder`, which need not exist.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// Folder of the store.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Model of a name: `ORG/REPO`, `:QUANT`, `@REVISION` or `@COMMIT`; or `REPO` alone where one organisation has it. Where several commits
    /// are there, the one that was pulled last. Cost: reads the manifests.
    ///
    /// # Errors
    /// No model has the name, or several have it that differ in more than their commit.
    pub fn find(&self, name: &str) -> Result<Model, StoreError> {
        let mut fitting = self.fitting(name)?;
        // A checkpoint goes before quantizations of it, as `penstock pull` chooses.
        if fitting.iter().any(|model| model.manifest.variant == SAFETENSORS) && !name.contains(':') {
            fitting.retain(|model| model.manifest.variant == SAFETENSORS);
        }
        let mut names: Vec<_> = fitting.iter().map(Model::name).collect();
        names.dedup();
        match names.as_slice() {
            [] => Err(StoreError::Missing { name: name.to_owned(), folder: self.folder.display().to_string() }),
            // Models of one name are sorted by the time of the pull that gave them the name.
            [_] => Ok(fitting.swap_remove(0)),
            several => Err(StoreError::Several { name: name.to_owned(), names: several.join(", ") }),
        }
    }

    /// Models that a name says, by their whole names, those first that a pull gave the name last.
    fn fitting(&self, name: &str) -> Result<Vec<Model>, StoreError> {
        let found = self.list()?;
        let (name, has_org) = match ModelName::parse(name) {
            Ok(name) => (name, true),
            // `REPO`, `REPO:QUANT`: parsed with an organisation in front, which is then not compared.
            Err(_) => match ModelName::parse(&format!("any/{name}")) {
                Ok(name) => (name, false),
                Err(_) => return Ok(Vec::new()),
            },
        };
        let named_at = |model: &Model| match has_org {
            true => model.named_at(&name),
            false => model.named_at(&ModelName { org: model.manifest.org.clone(), ..name.clone() }),
        };
        let mut fitting: Vec<(u64, Model)> =
            found.models.into_iter().filter_map(|model| Some((named_at(&model)?, model))).collect();
        fitting.sort_by_key(|(at, model)| (model.name(), u64::MAX - at));
        Ok(fitting.into_iter().map(|(_, model)| model).collect())
    }

    /// Everything in the store, by name.
    ///
    /// # Errors
    /// The folder cannot be read; one that does not exist is empty.
    pub fn list(&self) -> Result<Found, StoreError> {
        let mut found = Found::default();
        for org in entries(&self.folder)?.iter().filter(|org| is_visible(org)) {
            for repo in entries(org)?.iter().filter(|repo| is_visible(repo)) {
                for folder in entries(repo)?.into_iter().filter(|folder| is_visible(folder)) {
                    match read_manifest(&folder) {
                        Ok(manifest) => found.models.push(Model { folder, manifest }),
                        Err(reason) => found.faults.push(format!("{}: {reason}", folder.display())),
                    }
                }
            }
        }
        let order = |model: &Model| (model.name(), u64::MAX - model.manifest.pulled_at, model.manifest.commit.clone());
        found.models.sort_by_key(order);
        for partial in entries(&self.folder.join(PARTIAL))? {
            let key = partial.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            found.unfinished.push(Unfinished { key, bytes: bytes_below(&partial) });
        }
        found.unfinished.sort_by(|a, b| a.key.cmp(&b.key));
        Ok(found)
    }

    /// Removes the models of a name, all commits unless it says one, and unfinished pulls of it. A worker that serves one keeps
    /// its files until it ends.
    ///
    /// # Errors
    /// Nothing has the name, several models have it, or one is being pulled.
    pub fn remove(&self, name: &str) -> Result<Removed, StoreError> {
        self.sweep();
        let models = self.fitting(name)?;
        let mut names: Vec<_> = models.iter().map(Model::name).collect();
        names.dedup();
        if names.len() > 1 {
            return Err(StoreError::Several { name: name.to_owned(), names: names.join(", ") });
        }
        let mut removed = Removed::default();
        for model in models {
            let _lock = self.lock_now(&model.manifest.org, &model.manifest.repo)?;
            self.discard(&model.folder)?;
            for above in model.folder.ancestors().skip(1).take(2) {
                // A folder that still has models stays.
                let _ = fs::remove_dir(above);
            }
            removed.names.push(format!("{}@{}", model.name(), model.commit()));
            removed.bytes += model.manifest.bytes();
        }
        if let Ok(name) = ModelName::parse(name) {
            self.remove_unfinished(&name, &mut removed)?;
        }
        if removed.names.is_empty() {
            return Err(StoreError::Missing { name: name.to_owned(), folder: self.folder.display().to_string() });
        }
        Ok(removed)
    }

    fn remove_unfinished(&self, name: &ModelName, removed: &mut Removed) -> Result<(), StoreError> {
        let begin = format!("{}--{}--{}", name.org, name.repo, name.quant.as_deref().unwrap_or_default());
        for Unfinished { key, bytes } in self.list()?.unfinished {
            if key.starts_with(&begin) {
                let _lock = self.lock_now(&name.org, &name.repo)?;
                self.discard(&self.folder.join(PARTIAL).join(&key))?;
                removed.names.push(format!("{key} (unfinished)"));
                removed.bytes += bytes;
            }
        }
        Ok(())
    }

    /// Takes a folder out of the store at once, then deletes it. Its lock is held meanwhile, so that nobody else deletes it, too.
    fn discard(&self, folder: &Path) -> Result<(), StoreError> {
        let failed = |path: &Path| io_error(path.display().to_string());
        let partial = self.folder.join(PARTIAL);
        make_dirs(&partial)?;
        // Processes of two containers can have one number.
        for count in 0_u64.. {
            let name = format!("{REMOVED}{}-{count}", std::process::id());
            let trash = partial.join(&name);
            let Some(_lock) = self.lock_named(&name)? else { continue };
            if trash.symlink_metadata().is_ok() {
                continue;
            }
            fs::rename(folder, &trash).map_err(failed(folder))?;
            let done = fs::remove_dir_all(&trash).map_err(failed(&trash));
            let _ = fs::remove_file(self.folder.join(LOCKS).join(&name));
            return done;
        }
        unreachable!("one of all numbers is free")
    }

    /// Deletes what removals have left that were killed. What cannot be deleted stays, and keeps nobody from removing other models.
    fn sweep(&self) {
        for trash in entries(&self.folder.join(PARTIAL)).unwrap_or_default() {
            let Some(name) = trash.file_name().and_then(|name| name.to_str()).filter(|name| name.starts_with(REMOVED))
            else {
                continue;
            };
            // Whoever has the lock is about to delete it.
            if let Ok(Some(_lock)) = self.lock_named(name) {
                let _ = fs::remove_dir_all(&trash);
                let _ = fs::remove_file(self.folder.join(LOCKS).join(name));
            }
        }
    }

    /// Folder in which a model is put together.
    pub(crate) fn partial(&self, name: &ModelName, variant: &str, commit: &str) -> PathBuf {
        self.folder.join(PARTIAL).join(format!("{}--{}--{variant}@{commit}", name.org, name.repo))
    }

    /// Place of a whole model.
    pub(crate) fn place(&self, name: &ModelName, variant: &str, commit: &str) -> PathBuf {
        self.folder.join(&name.org).join(&name.repo).join(format!("{variant}@{commit}"))
    }

    /// Model at a place; `None`: it is not there.
    pub(crate) fn at_place(&self, folder: &Path) -> Option<Model> {
        let manifest = read_manifest(folder).ok()?;
        Some(Model { folder: folder.to_owned(), manifest })
    }

    /// Writes the manifest of the whole model in `partial` and renames it into its place.
    pub(crate) fn publish(&self, partial: &Path, place: &Path, manifest: Manifest) -> Result<Model, StoreError> {
        let failed = |path: &Path| io_error(path.display().to_string());
        write_manifest(&partial.join(manifest::FILE), &manifest)?;
        let above = place.parent().unwrap_or(&self.folder);
        make_dirs(above)?;
        // The names must be on disk before the place is.
        for folder in [&partial.join(&manifest.repo), partial] {
            File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed(folder))?;
        }
        fs::rename(partial, place).map_err(failed(place))?;
        File::open(above).and_then(|folder| folder.sync_all()).map_err(failed(above))?;
        Ok(Model { folder: place.to_owned(), manifest })
    }

    /// Notes that a model which is there was asked for once more, under the lock of its repository: it is now the last one that was pulled.
    pub(crate) fn pulled_again(&self, mut model: Model, revision: &str, now: u64) -> Result<Model, StoreError> {
        let failed = |path: &Path| io_error(path.display().to_string());
        let name = model.name();
        let others =
            self.list()?.models.into_iter().filter(|other| other.folder != model.folder && other.name() == name);
        // Pulls within a second, or before a clock was set back, have their order all the same.
        let last = others.map(|other| other.manifest.pulled_at).max();
        model.manifest.ask(revision, last.map_or(now, |last| now.max(last.saturating_add(1))));
        let [place, next] = ["", ".next"].map(|end| model.folder.join(format!("{}{end}", manifest::FILE)));
        write_manifest(&next, &model.manifest)?;
        fs::rename(&next, &place).map_err(failed(&place))?;
        File::open(&model.folder).and_then(|folder| folder.sync_all()).map_err(failed(&model.folder))?;
        Ok(model)
    }

    /// Lock of a repository without waiting; released when dropped.
    fn lock_now(&self, org: &str, repo: &str) -> Result<File, StoreError> {
        self.lock(org, repo)?.ok_or_else(|| StoreError::Busy(format!("{org}/{repo}")))
    }

    /// Tries to take the lock of a repository; `None`: somebody has it.
    pub(crate) fn lock(&self, org: &str, repo: &str) -> Result<Option<File>, StoreError> {
        self.lock_named(&format!("{org}--{repo}"))
    }

    fn lock_named(&self, name: &str) -> Result<Option<File>, StoreError> {
        let folder = self.folder.join(LOCKS);
        make_dirs(&folder)?;
        let path = folder.join(name);
        let failed = |error: io::Error| StoreError::Io { what: path.display().to_string(), source: error };
        let file =
            OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path).map_err(failed)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(file)),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(failed(error.into())),
        }
    }
}

pub(crate) fn make_dirs(path: &Path) -> Result<(), StoreError> {
    // As other programs' data: whoever may read the folders above may read models.
    DirBuilder::new().recursive(true).mode(0o755).create(path).map_err(io_error(path.display().to_string()))
}

/// Entries of a folder, sorted; none if it does not exist.
fn entries(folder: &Path) -> Result<Vec<PathBuf>, StoreError> {
    let listed = match fs::read_dir(folder) {
        Ok(listed) => listed,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        Err(error) => return Err(io_error(folder.display().to_string())(error)),
    };
    let mut paths: Vec<PathBuf> = listed.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    Ok(paths)
}

fn is_visible(path: &Path) -> bool {
    path.is_dir() && !path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'))
}

fn write_manifest(path: &Path, manifest: &Manifest) -> Result<(), StoreError> {
    let text = serde_json::to_vec_pretty(manifest).expect("a manifest of texts and numbers is JSON");
    let written = File::create(path).and_then(|mut file| file.write_all(&text).and_then(|()| file.sync_all()));
    written.map_err(io_error(path.display().to_string()))
}

fn read_manifest(folder: &Path) -> Result<Manifest, String> {
    let path = folder.join(manifest::FILE);
    let file = File::open(&path).map_err(|error| format!("{}: {error}", manifest::FILE))?;
    let mut bytes = Vec::new();
    file.take(manifest::BYTES_MAX).read_to_end(&mut bytes).map_err(|error| format!("{}: {error}", manifest::FILE))?;
    let read: Manifest = serde_json::from_slice(&bytes).map_err(|error| format!("{}: {error}", manifest::FILE))?;
    if read.version != manifest::VERSION {
        return Err(format!("{}: version {}; this program reads {}", manifest::FILE, read.version, manifest::VERSION));
    }
    let names = [&read.org, &read.repo, &read.variant].into_iter().chain(read.files.iter().map(|file| &file.name));
    if let Some(name) = names.into_iter().find(|name| !is_word(name)) {
        return Err(format!("{}: {name:?} is no name", manifest::FILE));
    }
    Ok(read)
}

/// Bytes that the files below a folder take on disk.
pub(crate) fn bytes_below(folder: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let of = |path: &PathBuf| match path.symlink_metadata() {
        Ok(metadata) if metadata.is_dir() => bytes_below(path),
        Ok(metadata) => metadata.blocks() * 512,
        Err(_) => 0,
    };
    entries(folder).unwrap_or_default().iter().map(of).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::Facts;
    use crate::manifest::FileRecord;
    use crate::sum::Sum;

    /// Store in a folder of its own, deleted at the end.
    struct Scratch(Store);

    impl Scratch {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("penstock-store-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&folder);
            Self(Store::at(folder))
        }

        fn add(&self, name: &str, variant: &str, commit: char, pulled_at: u64) -> Model {
            let (store, name) = (&self.0, ModelName::parse(name).expect("a name"));
            let commit = commit.to_string().repeat(40);
            let partial = store.partial(&name, variant, &commit);
            make_dirs(&partial.join(&name.repo)).expect("folders");
            let file = if variant == SAFETENSORS { "config.json".to_owned() } else { format!("m-{variant}.gguf") };
            fs::write(partial.join(&name.repo).join(&file), "hello\n").expect("written");
            let sum = Sum::git_sha1("ce013625030ba8dba906f756967f9e9ca394464a").expect("a sum");
            let manifest = Manifest {
                version: manifest::VERSION,
                org: name.org.clone(),
                repo: name.repo.clone(),
                variant: variant.to_owned(),
                commit: commit.clone(),
                revision: "main".to_owned(),
                revisions: std::collections::BTreeMap::new(),
                hub: "http://hub".to_owned(),
                pulled_at,
                facts: Facts::default(),
                files: vec![FileRecord { name: file, size: 6, sum }],
            };
            store.publish(&partial, &store.place(&name, variant, &commit), manifest).expect("published")
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(self.0.folder());
        }
    }

    #[test]
    fn models_are_found_by_their_names() {
        let scratch = Scratch::new("find");
        scratch.add("a/m", SAFETENSORS, '1', 1);
        scratch.add("a/m", SAFETENSORS, '2', 2);
        scratch.add("a/m", "Q4_0", '2', 3);
        scratch.add("a/g", "Q4_0", '3', 1);
        scratch.add("a/g", "Q8_0", '3', 2);
        scratch.add("b/m", "Q8_0", '4', 2);
        let find = |name: &str| match scratch.0.find(name) {
            Ok(model) => format!("{}@{}", model.name(), &model.commit()[..1]),
            Err(error) => error.to_string(),
        };
        assert_eq!(find("a/m"), "a/m@2");
        assert_eq!(find("A/M@main"), "a/m@2");
        assert_eq!(find("a/m@1111111"), "a/m@1");
        assert_eq!(find("a/m:q4_0"), "a/m:Q4_0@2");
        assert_eq!(find("g:Q8_0"), "a/g:Q8_0@3");
        assert_eq!(find("a/g:m-Q8_0"), "a/g:Q8_0@3");
        assert_eq!(find("a/g:m-Q8_0.gguf"), "a/g:Q8_0@3");
        assert_eq!(find("b/m"), "b/m:Q8_0@4");
        assert!(find("a/g").contains("name one of a/g:Q4_0, a/g:Q8_0"), "{}", find("a/g"));
        assert!(find("a/none").contains("penstock pull a/none"), "{}", find("a/none"));
        assert!(find("a/m@main2").contains("penstock pull"));
        let paths = ["a/m", "a/g:Q4_0"].map(|name| scratch.0.find(name).expect(name).path());
        assert!(paths[0].ends_with("m") && paths[0].is_dir() && paths[1].ends_with("g/m-Q4_0.gguf"), "{paths:?}");
    }

    #[test]
    fn the_commit_that_was_asked_for_last_is_the_one_of_the_name() {
        let scratch = Scratch::new("again");
        let (old, new) = (scratch.add("a/m", SAFETENSORS, '1', 10), scratch.add("a/m", SAFETENSORS, '2', 20));
        let find = |name: &str| scratch.0.find(name).map(|model| model.commit()[..1].to_owned()).ok();
        assert_eq!((find("a/m"), find("a/m@v1")), (Some("2".into()), None));
        // Within the same second as the other pull.
        let again = scratch.0.pulled_again(old, "v1", 20).expect("written");
        assert_eq!((find("a/m"), find("m"), find("a/m@v1")), (Some("1".into()), Some("1".into()), Some("1".into())));
        assert_eq!(find("a/m@main"), Some("2".into()), "main was the other one when it was asked for last");
        assert_eq!(scratch.0.list().expect("listed").models[0], again, "what is shown is what is on disk");
        scratch.0.pulled_again(new, "main", 30).expect("written");
        assert_eq!((find("a/m"), find("a/m@v1")), (Some("2".into()), Some("1".into())));
        let mut many = again;
        for number in 0..100 {
            many = scratch.0.pulled_again(many, &format!("branch-{number}"), 40 + number).expect("written");
        }
        assert_eq!((many.manifest.revisions.len(), find("a/m@branch-99")), (64, Some("1".into())));
        assert_eq!(find("a/m@branch-0"), None, "the oldest go");
    }

    #[test]
    fn a_removal_that_was_killed_keeps_nobody_from_removing() {
        let scratch = Scratch::new("killed");
        scratch.add("a/m", "Q8_0", '1', 1);
        scratch.add("a/m", "Q4_0", '1', 1);
        let trash = |name: String| {
            let folder = scratch.0.folder().join(PARTIAL).join(name);
            make_dirs(&folder.join("m")).expect("a folder");
            fs::write(folder.join("m/model.gguf"), "hello").expect("written");
            folder
        };
        // Left by a process of this one's number, in the form of this and of earlier versions.
        let left = [format!("removed-{}", std::process::id()), format!("removed-{}-0", std::process::id())].map(trash);
        let (other, busy) = (format!("removed-{}-1", std::process::id()), "removed-1-0".to_owned());
        let locks = [&other, &busy].map(|name| scratch.0.lock_named(name).expect("no error").expect("free"));
        let (other, busy) = (trash(other), trash(busy));
        scratch.0.remove("a/m:Q4_0").expect("removed");
        assert!(left.iter().all(|folder| !folder.exists()), "they are deleted");
        assert!(other.exists() && busy.exists(), "others are at it");
        drop(locks);
        scratch.0.remove("a/m:Q8_0").expect("removed");
        let left = |folder: &str| fs::read_dir(scratch.0.folder().join(folder)).expect("a folder").count();
        assert_eq!((left(PARTIAL), left(LOCKS)), (0, 1), "nothing but the repository's lock stays");
    }

    #[test]
    fn a_changed_byte_is_found() {
        let scratch = Scratch::new("verify");
        let model = scratch.add("a/m", SAFETENSORS, '1', 1);
        assert_eq!(model.verify(&|_| {}), Vec::<String>::new());
        let file = model.files().join("config.json");
        fs::write(&file, "hellO\n").expect("written");
        assert!(model.verify(&|_| {})[0].contains("not git-sha1:ce0136"));
        fs::write(&file, "hello").expect("written");
        assert!(model.verify(&|_| {})[0].contains("5 bytes, not 6"));
        fs::remove_file(&file).expect("removed");
        assert!(model.verify(&|_| {})[0].contains("config.json"));
    }

    #[test]
    fn removal_takes_the_name_and_what_is_unfinished() {
        let scratch = Scratch::new("remove");
        let (kept, _) = (scratch.add("a/m", "Q8_0", '1', 1), scratch.add("a/m", "Q4_0", '1', 1));
        let unfinished = scratch.0.partial(&ModelName::parse("a/m").expect("a name"), "Q4_0", "x");
        make_dirs(&unfinished).expect("a folder");
        assert!(scratch.0.remove("a/m").is_err_and(|error| error.to_string().contains("several")));
        let lock = scratch.0.lock("a", "m").expect("no error").expect("free");
        assert!(matches!(scratch.0.remove("a/m:Q4_0"), Err(StoreError::Busy(_))));
        drop(lock);
        let removed = scratch.0.remove("a/m:Q4_0").expect("removed");
        assert_eq!(removed.names, ["a/m:Q4_0@111111111111", "a--m--Q4_0@x (unfinished)"]);
        let found = scratch.0.list().expect("listed");
        assert_eq!((found.models, found.unfinished), (vec![kept], Vec::new()));
        assert!(matches!(scratch.0.remove("a/m:Q4_0"), Err(StoreError::Missing { .. })));
    }

    #[test]
    fn what_is_no_model_is_said() {
        let scratch = Scratch::new("faults");
        let folder = scratch.0.folder().join("a/m/x@1");
        make_dirs(&folder).expect("a folder");
        fs::write(folder.join(manifest::FILE), "{}").expect("written");
        let found = scratch.0.list().expect("listed");
        assert!(
            found.models.is_empty() && found.faults[0].contains("manifest.json: missing field"),
            "{:?}",
            found.faults
        );
    }
}
