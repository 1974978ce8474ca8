//! Source of a config: the operator's file, and a command line that wins over it.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use penstock_config::{Faults, Overrides, Snapshot};

/// Longest config text that is read or accepted, in bytes.
pub const CONFIG_BYTES_MAX: usize = 4 << 20;

/// Source of the config: the file's path, and the command line's overrides.
#[derive(Clone, Debug, Default)]
pub struct Source {
    path: Option<PathBuf>,
    overrides: Overrides,
}

impl Source {
    /// Source with the file at `path`, if there is one.
    pub fn new(path: Option<PathBuf>, overrides: Overrides) -> Self {
        let absolute = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
        Self { path: path.map(absolute), overrides }
    }

    /// Path of the config file; `None`: the process runs without one.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Text of the file; empty without a file.
    ///
    /// # Errors
    /// The reason why the file cannot be read, for people.
    pub fn read(&self) -> Result<String, String> {
        let Some(path) = &self.path else { return Ok(String::new()) };
        let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let file = File::open(path).map_err(|error| failed(&error))?;
        let mut text = String::new();
        let limit = CONFIG_BYTES_MAX as u64 + 1;
        file.take(limit).read_to_string(&mut text).map_err(|error| failed(&error))?;
        if text.len() > CONFIG_BYTES_MAX {
            return Err(failed(&format!("is longer than {CONFIG_BYTES_MAX} bytes")));
        }
        Ok(text)
    }

    /// Checks a text as if it were the file's; the command line wins over it, and secrets are read from the files and
    /// variables that it names.
    ///
    /// # Errors
    /// Every fault of the text.
    pub fn load(&self, text: &str) -> Result<Snapshot, Faults> {
        let name = self.path.as_ref().map_or_else(|| "config".to_owned(), |path| path.display().to_string());
        if text.len() > CONFIG_BYTES_MAX {
            let message = format!("is longer than {CONFIG_BYTES_MAX} bytes");
            return Err(Faults(vec![penstock_config::Fault { place: name, key: String::new(), message }]));
        }
        penstock_config::load(Some((&name, text)), &self.overrides, &|name| std::env::var(name).ok())
    }

    /// Checks the file for a command beside the gateway: only the tables of `needed` must have their variables of the environment set.
    ///
    /// # Errors
    /// The reason why the file cannot be read, or every fault of its text, for people.
    pub fn load_beside(&self, needed: &[&str]) -> Result<Snapshot, String> {
        let text = self.read()?;
        let name = self.path.as_ref().map_or_else(|| "config".to_owned(), |path| path.display().to_string());
        let env = |name: &str| std::env::var(name).ok();
        penstock_config::load_beside(Some((&name, &text)), &self.overrides, &env, needed)
            .map_err(|faults| format!("the config cannot be used:\n{faults}"))
    }

    /// Writes a text to the file so that a reader, or a crash, sees the old text or the new one. A link is written
    /// through.
    pub(super) fn write(&self, text: &str) -> Result<(), String> {
        let Some(path) = &self.path else { return Err("there is no config file to write".into()) };
        let failed = |error: std::io::Error| format!("{}: {error}", path.display());
        let place = path.canonicalize().map_err(failed)?;
        let new = place.with_extension("new");
        let mode = fs::metadata(&place).map_err(failed)?.permissions();
        let mut file = File::create(&new).map_err(failed)?;
        file.set_permissions(mode).map_err(failed)?;
        file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(failed)?;
        fs::rename(&new, &place).map_err(failed)?;
        let folder = place.parent().and_then(|folder| File::open(folder).ok());
        folder.map_or(Ok(()), |folder| folder.sync_all()).map_err(failed)
    }
}
