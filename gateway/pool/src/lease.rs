//! Leases of local workers: files in the state directory that tell a starting gateway which workers run, and which may be adopted.
//!
//! `NAME-SPEC.json` beside `NAME-SPEC.sock` holds the process id, its start time, and its share of the machine. The
//! spec is a hash of the worker's name, the program's path, its arguments and cores, the identity of build and model
//! files, and the protocol version. The share is not part of it, so a change of the number of workers changes no spec.
//! A gateway of another version finds no lease under its spec and starts its own worker beside the old one, which exits
//! when its gateway has left; in a handover the new gateway takes on the identity of the old one and adopts instead.
//!
//! No parent is needed: a process is held by a pidfd, which survives re-parenting and cannot be confused by pid reuse.

use super::config::{LocalWorkers, PoolConfigError};
use penstock_proto::{Address, PROTOCOL_VERSION};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Content of a lease file: the identity of a running worker process, and its share of the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Lease {
    pub(super) pid: i32,
    /// Clock ticks after boot at which the process began; identifies the process together with the pid.
    pub(super) start_time: u64,
    /// Share of the machine that the process was started with.
    #[serde(default)]
    pub(super) place: String,
    /// Key of the packed weights whose memory is the process's standard input; empty: it shares none.
    #[serde(default)]
    pub(super) weights: String,
}

impl LocalWorkers {
    /// Creates the state directory, private to this user.
    pub(super) fn prepare_state_dir(&self) -> Result<(), PoolConfigError> {
        let fail = |source| PoolConfigError::StateDir { path: self.state_dir.clone(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(&self.state_dir).map_err(fail)?;
        check_state_dir(&self.state_dir).map_err(fail)
    }

    /// Address of the socket on which the worker of that name listens.
    pub(super) fn socket(&self, name: &str) -> Result<Address, PoolConfigError> {
        Ok(Address::unix(self.file(name, "sock"))?)
    }

    /// Path of a worker's file: `STATE_DIR/NAME-SPEC.EXTENSION`. Characters of the name other than ASCII letters,
    /// digits and `-` become `_`, and the name is cut at 24 characters; the spec still tells names apart.
    pub(super) fn file(&self, name: &str, extension: &str) -> PathBuf {
        let plain = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
        let shown: String = name.chars().take(24).map(plain).collect();
        self.state_dir.join(format!("{shown}-{}.{extension}", self.spec(name)))
    }

    /// Hash of all that makes two workers interchangeable: 8 hexadecimal digits.
    fn spec(&self, name: &str) -> String {
        let mut hash = Sha256::new();
        let mut add = |part: &[u8]| {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        };
        add(name.as_bytes());
        add(&PROTOCOL_VERSION.to_le_bytes());
        add(self.program.as_os_str().as_encoded_bytes());
        self.args.iter().for_each(|arg| add(arg.as_encoded_bytes()));
        self.cores.iter().for_each(|core| add(&core.to_le_bytes()));
        add(self.identity.as_bytes());
        hash.finalize()[..4].iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Checks that a state directory that exists may hold the sockets and leases of local workers: it is this user's, and nobody else may write to it.
///
/// # Errors
/// The directory cannot be looked at, or is not safe.
pub fn check_state_dir(path: &Path) -> io::Result<()> {
    owned(&fs::metadata(path)?, rustix::process::geteuid().as_raw())
}

/// Checks a state directory as [`check_state_dir`] does, but accepts any owner where root asks: the gateway may run as a service's user.
///
/// # Errors
/// The directory cannot be looked at, or is not safe.
pub fn check_state_dir_of_service(path: &Path) -> io::Result<()> {
    let directory = fs::metadata(path)?;
    owned(&directory, user_of_service(rustix::process::geteuid().as_raw(), directory.uid()))
}

/// User that is to own a directory of `owner`, where `user` asks.
fn user_of_service(user: u32, owner: u32) -> u32 {
    if user == 0 { owner } else { user }
}

/// Checks that a directory is the user's, and that nobody else may write to it.
fn owned(directory: &fs::Metadata, user: u32) -> io::Result<()> {
    let denied = |why| Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    if directory.mode() & 0o022 != 0 {
        return denied("users other than the owner may write to the folder");
    }
    if directory.uid() != user {
        return denied("the folder belongs to another user");
    }
    Ok(())
}

/// Clock ticks after boot at which a process began (`/proc/PID/stat`, field 22); `None` for a missing process or a zombie.
pub(super) fn start_time(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may hold spaces and brackets; fields are counted behind its closing bracket.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// Opens a pidfd, so that the process's end can be awaited and signals reach no other process.
pub(super) fn hold(pid: i32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(pidfd_open(pid, PidfdFlags::NONBLOCK)?)
}

/// Process of the lease at `path`, if it still runs and its start time matches.
pub(super) fn find(path: &Path) -> Option<(Lease, OwnedFd)> {
    let lease: Lease = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    let held = hold(lease.pid).ok()?;
    // Looked up after the pidfd is open: from here on the pid cannot be reused unnoticed.
    (start_time(lease.pid) == Some(lease.start_time)).then_some((lease, held))
}

/// Writes a lease atomically: a reader sees all of it or the old one.
pub(super) fn write(path: &Path, lease: &Lease) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    serde_json::to_writer(&mut file, lease)?;
    fs::rename(new, path)
}

/// Takes the lock under which a worker is looked for and started; `None` when another gateway holds it.
pub(super) fn lock(path: &Path) -> io::Result<Option<File>> {
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::GpuLeavers;
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    fn local(dir: &Path) -> LocalWorkers {
        LocalWorkers {
            count: 2,
            varies: false,
            program: "/bin/sh".into(),
            args: vec!["worker".into()],
            cores: vec![0, 1],
            state_dir: dir.into(),
            identity: "model-a".into(),
            exit_deadline: Duration::from_secs(1),
            weights: None,
            gpu_leavers: GpuLeavers::default(),
        }
    }

    fn dir(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("penstock-lease-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("temporary directory");
        dir
    }

    #[test]
    fn whatever_makes_a_worker_another_changes_its_spec() {
        let base = local(Path::new("/tmp"));
        let differs = |change: fn(&mut LocalWorkers)| {
            let mut other = base.clone();
            change(&mut other);
            other.spec("a-0") != base.spec("a-0")
        };
        assert!(!differs(|local| local.state_dir = "/elsewhere".into()));
        assert!(!differs(|local| local.count = 3), "those that run stay when there are to be more");
        assert!(differs(|local| local.identity = "model-b".into()));
        assert!(differs(|local| local.args.push("--threads=2".into())));
        assert!(differs(|local| local.program = "/bin/cat".into()));
        assert!(differs(|local| local.cores.reverse()));
        assert_ne!(base.file("a-0", "sock"), base.file("a-1", "sock"));
        let odd = base.file("../../Models/Qwen3 0.6B (instruct, long context)-0", "sock");
        assert_eq!(odd.parent(), Some(Path::new("/tmp")));
        assert!(odd.as_os_str().len() < 50);
    }

    #[test]
    fn a_state_directory_that_others_may_write_to_is_refused() {
        let path = dir("mode");
        for (bits, is_good) in [(0o700, true), (0o755, true), (0o775, false), (0o702, false), (0o1777, false)] {
            fs::set_permissions(&path, fs::Permissions::from_mode(bits)).expect("it is ours");
            assert_eq!(local(&path).prepare_state_dir().is_ok(), is_good, "{bits:o}");
            assert_eq!(check_state_dir(&path).is_ok(), is_good, "{bits:o}");
            assert_eq!(check_state_dir_of_service(&path).is_ok(), is_good, "{bits:o}");
            let (directory, other) = (fs::metadata(&path).expect("it is there"), u32::MAX - 2);
            assert_eq!(owned(&directory, directory.uid()).is_ok(), is_good, "{bits:o}");
            assert!(owned(&directory, other).is_err(), "{bits:o}: of another user");
        }
        assert_eq!((user_of_service(0, 990), user_of_service(1000, 990)), (990, 1000), "root checks for the service");
        // One that the gateway makes in such a folder, as in a volume of a cluster, is its own.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o2777)).expect("it is ours");
        assert!(local(&path).prepare_state_dir().is_err());
        let _ = fs::remove_dir_all(path.join("state"));
        local(&path.join("state")).prepare_state_dir().expect("made with a mode of its own");
    }

    #[test]
    fn a_lease_finds_its_own_process_only() {
        let path = dir("find").join("a.json");
        let pid = std::process::id() as i32;
        let lease = Lease {
            pid,
            start_time: start_time(pid).expect("this process runs"),
            place: "1".into(),
            weights: "key".into(),
        };
        write(&path, &lease).expect("writes");
        assert_eq!(find(&path).map(|(found, _)| found), Some(lease.clone()));
        fs::write(&path, format!(r#"{{"pid":{pid},"start_time":{}}}"#, lease.start_time)).expect("writes");
        let older = find(&path).map(|(found, _)| (found.place, found.weights));
        assert_eq!(older, Some(Default::default()), "of an older gateway");
        write(&path, &Lease { start_time: lease.start_time + 1, ..lease }).expect("writes");
        assert!(find(&path).is_none(), "the pid was reused");
        fs::write(&path, b"{ nonsense").expect("writes");
        assert!(find(&path).is_none());
        assert!(find(&path.with_extension("none")).is_none());
    }

    #[test]
    fn the_lock_has_one_holder() {
        let path = dir("lock").join("a.lock");
        let held = lock(&path).expect("opens");
        assert!(held.is_some());
        assert!(lock(&path).expect("opens").is_none());
        drop(held);
        assert!(lock(&path).expect("opens").is_some());
    }
}
