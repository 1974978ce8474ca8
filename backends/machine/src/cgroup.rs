//! The cgroups of a process, in both versions, and the limits of each.

use crate::{field, number};
use std::fs;
use std::path::{Path, PathBuf};

/// Controller of a cgroup, by the resource that it limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Controller {
    Memory,
    Cpu,
}

impl Controller {
    fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpu => "cpu",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// One cgroup that limits the process, as a folder of its hierarchy.
#[derive(Debug)]
pub(crate) struct Group {
    version: Version,
    pub(crate) folder: PathBuf,
    /// True if the process is in this cgroup itself, not only below it.
    pub(crate) is_own: bool,
}

/// Memory use of a cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) limit: u64,
    /// Bytes in use, without file pages that were not used lately: the kernel reclaims those before it kills a
    /// process.
    pub(crate) used: u64,
}

impl Group {
    /// Memory limit and use; `None` if there is no limit.
    pub(crate) fn usage(&self) -> Option<Usage> {
        let file = |name: &str| self.folder.join(name);
        let least = |a: Option<u64>, b: Option<u64>| a.into_iter().chain(b).min();
        let (limit, used, inactive) = match self.version {
            // Above `high` the kernel slows a process down until it has given memory back: as bad as a limit.
            Version::Two => (
                least(number(&file("memory.max")), number(&file("memory.high"))),
                number(&file("memory.current")),
                field(&file("memory.stat"), "inactive_file"),
            ),
            // The hierarchical limit is that of the tightest ancestor, also of one that a container does not see.
            Version::One => (
                least(number(&file("memory.limit_in_bytes")), field(&file("memory.stat"), "hierarchical_memory_limit")),
                number(&file("memory.usage_in_bytes")),
                field(&file("memory.stat"), "total_inactive_file"),
            ),
        };
        let used = used.unwrap_or(0).saturating_sub(inactive.unwrap_or(0));
        limit.map(|limit| Usage { limit, used })
    }

    /// CPU quota in cores' worth of time; `None` if there is no quota.
    pub(crate) fn cores(&self) -> Option<f64> {
        let file = |name: &str| self.folder.join(name);
        let (quota, period) = match self.version {
            Version::Two => {
                let text = fs::read_to_string(file("cpu.max")).ok()?;
                let (quota, period) = text.trim().split_once(' ')?;
                (quota.parse::<u64>().ok()?, period.parse::<u64>().ok()?)
            }
            // -1, the mark for "no quota", does not parse as our number type.
            Version::One => (number(&file("cpu.cfs_quota_us"))?, number(&file("cpu.cfs_period_us"))?),
        };
        (period > 0).then(|| quota as f64 / period as f64)
    }

    /// File with the number of processes in this cgroup that the kernel killed for lack of memory.
    pub(crate) fn oom_file(&self) -> PathBuf {
        self.folder.join(match self.version {
            Version::One => "memory.oom_control",
            Version::Two => "memory.events",
        })
    }

    /// Returns true if the memory of its children is charged to it, which can be switched off in version 1.
    fn is_charged(&self) -> bool {
        self.version == Version::Two || number(&self.folder.join("memory.use_hierarchy")) != Some(0)
    }
}

/// A mounted cgroup hierarchy, from one line of `mountinfo`.
struct Mount {
    version: Version,
    /// Folder of the hierarchy that is mounted: not `/` in a container that shares the host's namespace.
    from: String,
    point: PathBuf,
}

/// Cgroups that limit a process, its own first. `paths`: its `/proc/PID/cgroup`; `mounts`: its `/proc/PID/mountinfo`.
///
/// In a hybrid layout a controller is in one hierarchy only; the files of the other say nothing about it.
pub(crate) fn groups(root: &Path, paths: &str, mounts: &str, controller: Controller) -> Vec<Group> {
    let mounts: Vec<Mount> = mounts.lines().filter_map(|line| mount(line, controller)).collect();
    paths
        .lines()
        .filter_map(|line| path(line, controller))
        .flat_map(|(version, path)| {
            let mount = mounts.iter().find(|mount| mount.version == version);
            mount.map(|mount| chain(root, mount, path, controller)).unwrap_or_default()
        })
        .collect()
}

/// Parses a line of `/proc/PID/cgroup`: `ID:CONTROLLERS:PATH`, without controllers in version 2.
fn path(line: &str, controller: Controller) -> Option<(Version, &str)> {
    let (_, rest) = line.split_once(':')?;
    let (controllers, path) = rest.split_once(':')?;
    match controllers {
        "" => Some((Version::Two, path)),
        of => of.split(',').any(|of| of == controller.name()).then_some((Version::One, path)),
    }
}

/// Parses a line of `/proc/PID/mountinfo`: `ID PARENT MAJOR:MINOR ROOT MOUNT_POINT OPTIONS [TAGS] - TYPE SOURCE
/// OPTIONS`. `None`: the line is malformed, or the mount is neither cgroup v2 nor the cgroup v1 hierarchy of
/// `controller`.
fn mount(line: &str, controller: Controller) -> Option<Mount> {
    let (ours, theirs) = line.split_once(" - ")?;
    let mut ours = ours.split(' ').skip(3);
    let (from, point) = (ours.next()?, ours.next()?);
    let mut theirs = theirs.split(' ');
    let version = match theirs.next()? {
        "cgroup2" => Version::Two,
        "cgroup" => {
            let options = theirs.nth(1)?;
            options.split(',').find(|option| *option == controller.name())?;
            Version::One
        }
        _ => return None,
    };
    Some(Mount { version, from: plain(from), point: plain(point).into() })
}

/// Decodes a path: the kernel writes spaces, tabs, line ends and backslashes as octal numbers.
fn plain(path: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(path.to_owned(), |path, (code, plain)| path.replace(code, plain))
}

fn chain(root: &Path, mount: &Mount, path: &str, controller: Controller) -> Vec<Group> {
    let top = root.join(mount.point.strip_prefix("/").unwrap_or(&mount.point));
    // A path outside of the mounted part (`/../…`, or the host's path in a container that sees only its own part)
    // stands for that part.
    let below = Path::new(path).strip_prefix(&mount.from).unwrap_or(Path::new(""));
    let is_plain = below.components().all(|part| matches!(part, std::path::Component::Normal(_)));
    let mut folder = if is_plain { top.join(below) } else { top.clone() };
    if !folder.is_dir() {
        folder.clone_from(&top);
    }
    let mut groups = Vec::new();
    loop {
        let group = Group { version: mount.version, folder: folder.clone(), is_own: groups.is_empty() };
        if group.is_own || controller == Controller::Cpu || group.is_charged() {
            groups.push(group);
        }
        if folder == top || !folder.pop() {
            return groups;
        }
    }
}
