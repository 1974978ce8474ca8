//! Checks of a config against this machine before anything listens: files that can be read, places that can be written,
//! addresses that are this machine's.
//!
//! `penstock serve` refuses to start on these faults, and `penstock check` reports them: both call this module and get
//! all faults at once. The checks make, write and keep nothing. What another process may hold (a port, the lock of the
//! state folder) is no fault, and servers elsewhere are not asked: a config is checked while the gateway that it is for
//! runs.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};

use crate::server;
use penstock_config::{AdminListen, CountersConfig, Snapshot};

/// Name of the plugin that writes to a file, `path` of its settings.
const CAPTURE: &str = "capture";
/// SQLite's name for a database in memory.
const IN_MEMORY: &str = ":memory:";

/// Process that looks for faults: its rights decide what it can tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckedBy {
    /// The gateway, before it starts.
    Gateway,
    /// A person, perhaps as root and for a gateway that another user runs.
    Person,
}

/// Every fault that keeps a gateway with this config from starting on this machine, as text for people: the key, then
/// the reason.
pub fn faults(config: &Snapshot, state_dir: &Path, by: CheckedBy) -> Vec<String> {
    let mut found = Vec::new();
    let mut note = |key: &str, done: Result<(), String>| found.extend(done.err().map(|why| format!("{key}: {why}")));
    note("server.state_dir", folder(state_dir).and_then(|()| own(config, state_dir, by)));
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
    for (at, entry) in config.plugins.iter().enumerate().filter(|(_, entry)| entry.name == CAPTURE) {
        if let Some(path) = entry.settings.as_ref().and_then(|settings| settings["path"].as_str()) {
            note(&format!("plugins[{at}].settings.path"), file(Path::new(path)));
        }
    }
    for (at, pool) in config.pools.iter().enumerate() {
        if let Some(path) = &pool.record {
            note(&format!("pools[{at}].record"), file(path));
        }
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

/// Checks that the state folder, if it exists, belongs to the gateway's user and that no other user may write to it: workers that are started here
/// need that.
fn own(config: &Snapshot, state_dir: &Path, by: CheckedBy) -> Result<(), String> {
    if config.pools.iter().all(|pool| !pool.connect.is_empty()) || fs::symlink_metadata(state_dir).is_err() {
        return Ok(());
    }
    let checked = match by {
        CheckedBy::Gateway => penstock_pool::check_state_dir(state_dir),
        CheckedBy::Person => penstock_pool::check_state_dir_of_service(state_dir),
    };
    checked.map_err(|error| said(state_dir, error))
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

/// Checks that this process may listen at the address; its port may be in use by another process.
fn address(listen: SocketAddr) -> Result<(), String> {
    refusal(bind(listen), || is_listened(listen.port())).map_err(|why| format!("{listen}: {why}"))
}

/// Binds the address for a moment, without listening: nobody is connected, and another process may listen there meanwhile.
fn bind(listen: SocketAddr) -> io::Result<()> {
    let family = if listen.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // As listeners have it: closed connections of a gateway before this one are no obstacle.
    net::sockopt::set_socket_reuseaddr(&socket, true)?;
    Ok(net::bind(&socket, &listen)?)
}

/// Reason why a gateway could not listen where it `tried` to. `is_listened`: somebody listens at the port now.
fn refusal(tried: io::Result<()>, is_listened: impl FnOnce() -> bool) -> Result<(), String> {
    let Err(error) = tried else { return Ok(()) };
    match error.kind() {
        io::ErrorKind::AddrInUse => Ok(()),
        io::ErrorKind::AddrNotAvailable => Err("no network interface of this machine has this address".to_owned()),
        // A service may have a right that the user who checks its config lacks: where somebody listens, it is believed to be the service.
        io::ErrorKind::PermissionDenied if is_listened() => Ok(()),
        io::ErrorKind::PermissionDenied => {
            Err("not permitted; ports below 1024 need CAP_NET_BIND_SERVICE (docs/guide/install.md)".to_owned())
        }
        _ => Err(error.to_string()),
    }
}

/// Returns true if a process of this network namespace listens at the port, at any address.
fn is_listened(port: u16) -> bool {
    // Fields of a line: number, local address and port in hexadecimal, remote ones, state (0A: listening).
    const LISTENING: &str = "0A";
    let end = format!(":{port:04X}");
    let listens = |line: &str| {
        let mut fields = line.split_ascii_whitespace();
        fields.nth(1).is_some_and(|local| local.ends_with(&end)) && fields.nth(1) == Some(LISTENING)
    };
    let tables =
        ["/proc/self/net/tcp", "/proc/self/net/tcp6"].into_iter().filter_map(|path| fs::read_to_string(path).ok());
    tables.into_iter().any(|table| table.lines().any(listens))
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_config::{Overrides, load};
    use std::net::TcpListener;
    use std::os::unix::fs::PermissionsExt;

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
        assert_eq!(faults(&config(""), &base.join("made/later"), CheckedBy::Gateway), Vec::<String>::new());
        let good = format!(
            "[log]\naccess = {:?}\n[store]\npath = \":memory:\"\n\
             [[plugins]]\nname = \"capture\"\nsettings = {{ path = {:?} }}\n",
            base.join("new.log"),
            base.join("captured")
        );
        assert_eq!(faults(&config(&good), &base, CheckedBy::Gateway), Vec::<String>::new());
        let made = ["new.log", "captured", "made"].map(|name| base.join(name).exists());
        assert_eq!(made, [false; 3], "nothing is made");

        let bad = format!(
            "ca_file = \"/nowhere/ca.pem\"\n[server]\nlisten = \"192.0.2.1:80\"\nunix = \"/nowhere/http.sock\"\n\
             [server.tls]\ncertificate = \"/nowhere/c.pem\"\nkey = \"/nowhere/k.pem\"\n[admin]\nunix = {:?}\n\
             [log]\naccess = \"/nowhere/log\"\n[store]\npath = {base:?}\n\
             [[plugins]]\nname = \"headers\"\n[[plugins]]\nname = \"capture\"\n\
             settings = {{ path = \"/nowhere/captured\" }}\n",
            blocked.join("admin.sock")
        );
        let said = faults(&config(&bad), &blocked.join("state"), CheckedBy::Gateway);
        let keys: Vec<_> = said.iter().map(|line| line.split(": ").next().unwrap_or_default()).collect();
        let wanted = [
            "server.state_dir",
            "server.listen",
            "server.unix",
            "server.tls",
            "admin.unix",
            "log.access",
            "store.path",
            "plugins[1].settings.path",
            "providers[0]",
        ];
        assert_eq!(keys, wanted, "{said:#?}");
        assert!(
            said.iter().all(|line| line.contains('/') || line.contains("192.0.2.1")),
            "each names its place: {said:#?}"
        );
        assert!(said[0].to_lowercase().contains("not a directory"), "each says the reason: {}", said[0]);
    }

    #[test]
    fn a_state_folder_that_others_may_write_to_is_for_pools_whose_workers_are_elsewhere() {
        let base = std::env::temp_dir().join(format!("penstock-preflight-state-{}", std::process::id()));
        fs::create_dir_all(&base).expect("a folder");
        let found = |text: &str, state: &Path, bits| {
            fs::set_permissions(&base, fs::Permissions::from_mode(bits)).expect("it is ours");
            faults(
                &load(Some(("p.toml", text)), &Overrides::default(), &|_| None).expect("valid in itself"),
                state,
                CheckedBy::Gateway,
            )
        };
        let local = "[[pools]]\nid = \"a\"\n[[pools]]\nid = \"b\"\nconnect = [\"unix:/b\"]\n";
        let elsewhere = "[[pools]]\nid = \"a\"\nconnect = [\"unix:/a\"]\n";
        assert_eq!(found(local, &base, 0o700), Vec::<String>::new());
        for bits in [0o2777, 0o2775] {
            let said = found(local, &base, bits);
            assert!(said.len() == 1 && said[0].starts_with("server.state_dir: /"), "{bits:o}: {said:?}");
            assert!(said[0].ends_with("users other than the owner may write to the folder"), "{said:?}");
            assert_eq!(found("", &base, bits), said, "the demo model has a worker here");
            assert_eq!(found(elsewhere, &base, bits), Vec::<String>::new());
            assert_eq!(found(local, &base.join("state"), bits), Vec::<String>::new(), "one that will be made");
        }
        fs::remove_dir_all(&base).expect("removed");
    }

    #[test]
    fn decisions_are_recorded_where_a_file_can_be_made() {
        let base = std::env::temp_dir().join(format!("penstock-preflight-record-{}", std::process::id()));
        fs::create_dir_all(&base).expect("a folder");
        let found = |record: &Path| {
            let text = format!(
                "[[pools]]\nid = \"a\"\nconnect = [\"unix:/a\"]\n[[pools]]\nid = \"b\"\nconnect = [\"unix:/b\"]\nrecord = {record:?}\n"
            );
            faults(
                &load(Some(("p.toml", &text)), &Overrides::default(), &|_| None).expect("valid in itself"),
                &base,
                CheckedBy::Gateway,
            )
        };
        assert_eq!(found(&base.join("decisions.jsonl")), Vec::<String>::new());
        assert!(!base.join("decisions.jsonl").exists(), "nothing is made");
        for bad in [base.join("missing/decisions.jsonl"), base.clone()] {
            let said = found(&bad);
            assert!(said.len() == 1 && said[0].starts_with("pools[1].record: /"), "{said:?}");
        }
        fs::remove_dir_all(&base).expect("removed");
    }

    #[test]
    fn an_address_is_good_where_this_process_may_listen_or_another_one_does() {
        let held = TcpListener::bind("127.0.0.1:0").expect("a port");
        let at = held.local_addr().expect("bound");
        assert_eq!(bind(at).expect_err("in use").kind(), io::ErrorKind::AddrInUse);
        assert_eq!(address(at), Ok(()));
        // Every listener's remote end is port 0.
        assert!(is_listened(at.port()) && !is_listened(0));
        assert_eq!(address(SocketAddr::new(at.ip(), 0)), Ok(()));

        let tried = |kind: io::ErrorKind, is_listened| refusal(Err(kind.into()), || is_listened);
        assert_eq!(tried(io::ErrorKind::AddrInUse, true), Ok(()));
        assert!(tried(io::ErrorKind::PermissionDenied, false).is_err_and(|why| why.contains("CAP_NET_BIND_SERVICE")));
        assert_eq!(tried(io::ErrorKind::PermissionDenied, true), Ok(()), "a service has the right, who checks has not");
        assert!(tried(io::ErrorKind::AddrNotAvailable, true).is_err_and(|why| why.contains("interface")));
        assert!(tried(io::ErrorKind::Unsupported, true).is_err(), "as IPv6 where there is none");
    }
}
