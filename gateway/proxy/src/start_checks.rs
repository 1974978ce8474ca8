//! Checks of a config against this machine before anything listens: files that can be read, places that can be written,
//! addresses that are this machine's.
//!
//! `penstock serve` refuses to start on these faults, and `penstock check` reports them: both call this module and get
//! all faults at once. The checks make, write and keep nothing. They do not look at things that another process may
//! hold (a port, the lock of the state folder) or at servers elsewhere: a config is checked while the gateway that it
//! is for runs.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

use crate::server;
use penstock_config::{AdminListen, CountersConfig, Snapshot};

/// SQLite's name for a database in memory.
const IN_MEMORY: &str = ":memory:";

/// Every fault that keeps a gateway with this config from starting on this machine, as text for people: the key, then
/// the reason.
pub fn faults(config: &Snapshot, state_dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut note = |key: &str, done: Result<(), String>| found.extend(done.err().map(|why| format!("{key}: {why}")));
    note("server.state_dir", folder(state_dir));
    note("server.listen", address(config.listen));
    if let Some(path) = &config.unix {
        note("server.unix", beside(path));
    }
    if let Some(files) = &config.tls {
        note("server.tls", server::check_tls(files));
    }
    if let Some(picker) = &config.endpoint_picker {
        note("endpoint_picker.listen", address(picker.listen));
        if let Some(files) = &picker.tls {
            note("endpoint_picker", server::check_tls(files));
        }
    }
    if let AdminListen::At(listen) = config.admin.listen {
        note("admin.listen", address(listen));
    }
    if let Some(path) = &config.admin.unix {
        note("admin.unix", beside(path));
    }
    if !matches!(config.access_log.as_str(), "off" | "-") {
        note("log.access", file(Path::new(&config.access_log)));
    }
    if let Some(path) = config.store.path.as_deref().filter(|path| path.as_os_str() != IN_MEMORY) {
        note("store.path", file(path));
    }
    for (key, path) in authorities(config) {
        note(key, read(&path));
    }
    for (at, asked) in config.providers.iter().enumerate() {
        note(&format!("providers[{at}]"), penstock_provider::check(asked).map_err(|error| error.to_string()));
    }
    found
}

/// Files of CA certificates for database servers, each with its config key.
fn authorities(config: &Snapshot) -> Vec<(&'static str, PathBuf)> {
    let mut out = Vec::new();
    if let Some(path) = config.store.postgres.as_ref().and_then(|server| server.ca_file.clone()) {
        out.push(("store.ca_file", path));
    }
    if let CountersConfig::Redis { ca_file: Some(path), .. } = &config.counters {
        out.push(("counters.ca_file", path.clone()));
    }
    out
}

fn said(path: &Path, error: impl std::fmt::Display) -> String {
    format!("{}: {error}", path.display())
}

fn read(path: &Path) -> Result<(), String> {
    fs::File::open(path).map(drop).map_err(|error| said(path, error))
}

/// Checks that a folder is there and can be written, or can be made.
fn folder(path: &Path) -> Result<(), String> {
    let mut nearest = path;
    while !nearest.as_os_str().is_empty() && fs::symlink_metadata(nearest).is_err() {
        let Some(parent) = nearest.parent() else { break };
        nearest = parent;
    }
    enter(if nearest.as_os_str().is_empty() { Path::new(".") } else { nearest }).map_err(|error| said(path, error))
}

/// Checks that files can be made in a folder.
fn enter(path: &Path) -> io::Result<()> {
    if !fs::metadata(path)?.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    Ok(access(path, Access::WRITE_OK | Access::EXEC_OK)?)
}

/// Checks that a file can be appended to, or made; its folder must be there.
fn file(path: &Path) -> Result<(), String> {
    match fs::metadata(path) {
        Ok(there) if there.is_dir() => Err(said(path, "is a folder")),
        Ok(_) => access(path, Access::WRITE_OK).map_err(|error| said(path, io::Error::from(error))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => beside(path),
        Err(error) => Err(said(path, error)),
    }
}

/// Checks the folder in which the file at `path` is made.
fn beside(path: &Path) -> Result<(), String> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    enter(parent).map_err(|error| said(path, error))
}

/// Checks that the address is one of this machine's; its port may be in use by another process.
fn address(listen: SocketAddr) -> Result<(), String> {
    match TcpListener::bind(SocketAddr::new(listen.ip(), 0)) {
        Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
            Err(format!("{listen}: no network interface of this machine has this address"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_config::{Overrides, load};

    #[test]
    fn everything_that_a_start_would_be_refused_for_is_found_at_once() {
        let base = std::env::temp_dir().join(format!("penstock-preflight-{}", std::process::id()));
        fs::create_dir_all(&base).expect("a folder");
        let blocked = base.join("file");
        fs::write(&blocked, "").expect("written");
        let config = |text: &str| {
            let text =
                format!("[[providers]]\nid = \"p\"\nbase_url = \"https://127.0.0.1:1\"\nmodels = [\"m\"]\n{text}");
            load(Some(("p.toml", &text)), &Overrides::default(), &|_| None).expect("valid in itself")
        };
        assert_eq!(faults(&config(""), &base.join("made/later")), Vec::<String>::new());
        let good = format!("[log]\naccess = {:?}\n[store]\npath = \":memory:\"\n", base.join("new.log"));
        assert_eq!(faults(&config(&good), &base), Vec::<String>::new());
        assert!(!base.join("new.log").exists() && !base.join("made").exists(), "nothing is made");

        let bad = format!(
            "ca_file = \"/nowhere/ca.pem\"\n[server]\nlisten = \"192.0.2.1:80\"\nunix = \"/nowhere/http.sock\"\n\
             [server.tls]\ncertificate = \"/nowhere/c.pem\"\nkey = \"/nowhere/k.pem\"\n[admin]\nunix = {:?}\n\
             [log]\naccess = \"/nowhere/log\"\n[store]\npath = {base:?}\n",
            blocked.join("admin.sock")
        );
        let said = faults(&config(&bad), &blocked.join("state"));
        let keys: Vec<_> = said.iter().map(|line| line.split(": ").next().unwrap_or_default()).collect();
        let wanted = [
            "server.state_dir",
            "server.listen",
            "server.unix",
            "server.tls",
            "admin.unix",
            "log.access",
            "store.path",
            "providers[0]",
        ];
        assert_eq!(keys, wanted, "{said:#?}");
        assert!(
            said.iter().all(|line| line.contains('/') || line.contains("192.0.2.1")),
            "each names its place: {said:#?}"
        );
        assert!(said[0].to_lowercase().contains("not a directory"), "each says the reason: {}", said[0]);
    }
}
