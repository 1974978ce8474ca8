//! `penstock pull`: a model of a hub comes into the store.
//!
//! ```text
//! name ─▶ listing (commit, sizes, checksums) ─▶ choice ─▶ lock ─▶ space ─▶ ranges in parallel ─▶ checksums ─▶ one rename
//! ```
//!
//! Whatever ends a pull, what was fetched stays in `.partial` and the next pull goes on from there. Checksums are those of the
//! endpoint that lists the files; a file is checked as a whole before it counts.

mod ask;
mod error;
mod fetch;
mod partial;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use penstock_base::{Secret, clock};
use penstock_http::client::Target;

use crate::choose::{Choice, Chosen, SAFETENSORS, choose};
use crate::manifest::{self, FileRecord, Manifest};
use crate::name::ModelName;
use crate::store::{Model, Store, bytes_below, make_dirs};
use crate::{Facts, facts};
use ask::Asker;
pub use error::PullError;
use partial::Partial;

/// Bytes that stay free on the disk.
const SPACE_SPARE: u64 = 64 << 20;
/// Time between two looks at a lock that another pull holds.
const LOCK_POLL: Duration = Duration::from_millis(500);
/// Times that files which fail their checksum are fetched.
const ROUNDS: usize = 2;

/// Hub and its mirrors, as the config names them.
#[derive(Clone, Debug)]
pub struct Hub {
    /// Endpoint of the hub, the only one that gets the token.
    pub endpoint: Target,
    /// Endpoints that are asked before it, without a token.
    pub mirrors: Vec<Target>,
    /// Token of the hub.
    pub token: Option<Secret>,
    /// File of certificates to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// Requests at once.
    pub connections: usize,
}

/// Model to pull, and where it goes.
#[derive(Clone, Debug)]
pub struct Request {
    /// Name on the hub.
    pub name: ModelName,
    /// Store that takes it.
    pub store: Store,
    /// Hub that has it.
    pub hub: Hub,
}

/// Stage of a pull, for a display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The hub is asked for the files.
    Asking,
    /// Another pull of the repository holds its lock.
    Waiting,
    /// Files come in.
    Fetching,
    /// Checksums are computed.
    Checking,
}

const STAGES: [Stage; 4] = [Stage::Asking, Stage::Waiting, Stage::Fetching, Stage::Checking];

/// Progress of a pull, read by a display while it runs.
#[derive(Debug, Default)]
pub struct Progress {
    stage: AtomicU8,
    done: AtomicU64,
    total: AtomicU64,
    notes: Mutex<Vec<String>>,
}

impl Progress {
    /// Stage of the pull.
    pub fn stage(&self) -> Stage {
        STAGES[usize::from(self.stage.load(Ordering::Relaxed)) % STAGES.len()]
    }

    /// Bytes of the stage that are done, and all.
    pub fn bytes(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed))
    }

    /// Events since the last call, for a person: retries, another endpoint, a damaged file.
    pub fn notes(&self) -> Vec<String> {
        std::mem::take(&mut self.notes.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn enter(&self, stage: Stage, done: u64, total: u64) {
        self.done.store(done, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
        self.stage.store(stage as u8, Ordering::Relaxed);
    }

    fn add(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    fn take_back(&self, bytes: u64) {
        self.done.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn note(&self, text: String) {
        const KEPT: usize = 100;
        let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        if notes.len() < KEPT {
            notes.push(text);
        }
    }
}

/// Model that a pull has brought, or found.
#[derive(Clone, Debug)]
pub struct Pulled {
    /// Model in the store.
    pub model: Model,
    /// True if it was there already.
    pub was_there: bool,
}

/// Fetches a model into the store. Dropping the future leaves what was fetched for the next pull.
///
/// # Errors
/// What was refused, by whom, and what helps; see [`PullError`].
pub async fn pull(request: &Request, progress: &Arc<Progress>) -> Result<Pulled, PullError> {
    let hub = &request.hub;
    if hub.token.is_some() && !hub.endpoint.is_private() {
        return Err(PullError::OpenToken(hub.endpoint.to_string()));
    }
    for mirror in &hub.mirrors {
        let asker = Asker::new(mirror, None, hub.ca_file.as_deref())?;
        match from(request, asker, progress).await {
            Err(error) if error.may_be_elsewhere() => {
                progress.note(format!("{mirror}: {error}; asking the next endpoint"))
            }
            done => return done,
        }
    }
    let asker = Asker::new(&hub.endpoint, hub.token.clone(), hub.ca_file.as_deref())?;
    from(request, asker, progress).await
}

/// Fetches a model from one endpoint.
async fn from(request: &Request, asker: Asker, progress: &Arc<Progress>) -> Result<Pulled, PullError> {
    let Request { name, store, .. } = request;
    progress.enter(Stage::Asking, 0, 0);
    let listing = asker.listing(name, progress).await?;
    let choice = choose(&listing, name.quant.as_deref())
        .map_err(|error| PullError::Choice { name: name.repository(), error })?;
    let place = store.place(name, &choice.variant, &listing.commit);
    let _lock = lock(request, progress).await?;
    if let Some(model) = store.at_place(&place) {
        if !is_same(&model.manifest.files, &choice) {
            return Err(PullError::Other { name: model.name(), commit: listing.commit, endpoint: asker.endpoint() });
        }
        // It is the model of its name and revision from now on, as if it had just been fetched.
        let model = store.pulled_again(model, name.revision(), clock::unix_seconds())?;
        return Ok(Pulled { model, was_there: true });
    }
    let partial = store.partial(name, &choice.variant, &listing.commit);
    let files = partial.join(&name.repo);
    make_dirs(&files)?;
    let asker = Arc::new(asker);
    fill(request, &choice, (&asker, &listing.commit), &files, progress).await?;
    let manifest = Manifest {
        version: manifest::VERSION,
        org: name.org.clone(),
        repo: name.repo.clone(),
        commit: listing.commit,
        revision: name.revision().to_owned(),
        revisions: BTreeMap::new(),
        hub: asker.endpoint(),
        pulled_at: clock::unix_seconds(),
        facts: facts_of(&files, &choice),
        files: choice.files.iter().map(|f| FileRecord { name: f.name.clone(), size: f.size, sum: f.sum }).collect(),
        variant: choice.variant,
    };
    let model = store.publish(&partial, &place, manifest)?;
    Ok(Pulled { model, was_there: false })
}

/// Returns true if the files of a stored model are those of the choice.
fn is_same(stored: &[FileRecord], choice: &Choice) -> bool {
    let has = |file: &Chosen| stored.iter().any(|f| (&f.name, f.size, f.sum) == (&file.name, file.size, file.sum));
    stored.len() == choice.files.len() && choice.files.iter().all(has)
}

/// Lock of the repository: two pulls of one model go one after the other.
async fn lock(request: &Request, progress: &Progress) -> Result<std::fs::File, PullError> {
    let ModelName { org, repo, .. } = &request.name;
    let mut told = false;
    loop {
        if let Some(lock) = request.store.lock(org, repo)? {
            return Ok(lock);
        }
        if !std::mem::replace(&mut told, true) {
            progress.enter(Stage::Waiting, 0, 0);
            progress.note(format!("another process pulls {org}/{repo}: waiting for it"));
        }
        tokio::time::sleep(LOCK_POLL).await;
    }
}

/// Fetches and checks the files that are not in the folder yet.
async fn fill(
    request: &Request,
    choice: &Choice,
    (asker, commit): (&Arc<Asker>, &str),
    files: &std::path::Path,
    progress: &Arc<Progress>,
) -> Result<(), PullError> {
    let (folder, chosen) = (files.to_owned(), choice.files.clone());
    let checking = move || chosen.iter().try_for_each(|file| Partial::check_again(&folder, file));
    tokio::task::spawn_blocking(checking).await.map_err(|_| PullError::Interrupted)??;
    for round in 1..=ROUNDS {
        space(files, choice.bytes().saturating_sub(bytes_below(files)))?;
        let mut missing = Vec::new();
        for file in &choice.files {
            if !Partial::is_named(files, file) {
                missing.push(Arc::new(Partial::open(files, file)?));
            }
        }
        let left: u64 = missing.iter().map(|file| file.left()).sum();
        progress.enter(Stage::Fetching, choice.bytes() - left, choice.bytes());
        let source = fetch::Source { asker: asker.clone(), name: request.name.clone(), commit: commit.to_owned() };
        fetch::all(&source, &missing, request.hub.connections, progress).await?;
        progress.enter(Stage::Checking, 0, missing.iter().map(|file| file.size()).sum());
        let mut damaged = Vec::new();
        for file in missing {
            let (checked, telling) = (file.clone(), progress.clone());
            let done = tokio::task::spawn_blocking(move || checked.finish(&|bytes| telling.add(bytes))).await;
            if !done.map_err(|_| PullError::Interrupted)?? {
                progress
                    .note(format!("{} does not have the checksum that the hub gives: fetching it again", file.name()));
                damaged.push(file.name().to_owned());
            }
        }
        match damaged.as_slice() {
            [] => return Ok(()),
            names if round == ROUNDS => {
                return Err(PullError::Damaged { names: names.join(", "), endpoint: asker.endpoint() });
            }
            _ => {}
        }
    }
    Ok(())
}

/// Refuses a pull for which the disk has no space.
fn space(folder: &std::path::Path, needed: u64) -> Result<(), PullError> {
    let stat = rustix::fs::statvfs(folder).map_err(|error| PullError::file(folder, error.into()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if needed > 0 && free < needed.saturating_add(SPACE_SPARE) {
        return Err(PullError::Space { folder: folder.display().to_string(), needed, free });
    }
    Ok(())
}

fn facts_of(files: &std::path::Path, choice: &Choice) -> Facts {
    if choice.variant == SAFETENSORS {
        return facts::read(files, SAFETENSORS);
    }
    let first = choice.files.iter().map(|file| &file.name).min();
    first.map(|name| facts::read(&files.join(name), &choice.variant)).unwrap_or_default()
}
