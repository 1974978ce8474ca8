//! Machines made of folders: cgroup versions 1 and 2, nested, hybrid, in containers, and without any.

use penstock_machine::{Bound, Machine, Memory};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

const MIB: u64 = 1 << 20;

/// "No limit" in version 1, where it is the largest number of whole pages.
const NO_LIMIT: &str = "9223372036854771712";

/// A file system, removed at the end.
struct Root(PathBuf);

impl Root {
    /// A machine with 64 GiB free; `paths`: `/proc/self/cgroup`, `mounts`: its mountinfo.
    fn new(paths: &str, mounts: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("pen-machine-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let root = Self(std::env::temp_dir().join(name));
        root.file("proc/meminfo", "MemTotal:       99 kB\nMemFree:        9 kB\nMemAvailable:   67108864 kB\n");
        root.file("proc/self/cgroup", paths)
            .file("proc/self/mountinfo", mounts)
            .file("proc/7/cgroup", paths)
            .file("proc/7/mountinfo", mounts);
        root
    }

    fn file(&self, path: &str, text: &str) -> &Self {
        let path = self.0.join(path);
        std::fs::create_dir_all(path.parent().expect("it has one")).expect("a folder");
        std::fs::write(path, text).expect("a file");
        self
    }

    /// A cgroup of version 2.
    fn two(&self, group: &str, max: &str, current: u64, inactive: u64) -> &Self {
        let file = |name: &str| format!("sys/fs/cgroup/{group}{name}");
        self.file(&file("memory.max"), &format!("{max}\n"))
            .file(&file("memory.current"), &format!("{current}\n"))
            .file(&file("memory.stat"), &format!("anon 5\ninactive_anon 77\ninactive_file {inactive}\n"))
    }

    /// A cgroup of version 1.
    fn one(&self, group: &str, limit: &str, usage: u64, inactive: u64) -> &Self {
        let file = |name: &str| format!("sys/fs/cgroup/memory/{group}{name}");
        let stat = format!("inactive_file 1\ntotal_inactive_file {inactive}\n");
        self.file(&file("memory.limit_in_bytes"), &format!("{limit}\n"))
            .file(&file("memory.usage_in_bytes"), &format!("{usage}\n"))
            .file(&file("memory.stat"), &stat)
    }

    fn machine(&self) -> Machine {
        Machine::at(&self.0)
    }

    #[track_caller]
    fn check(&self, available: u64, bound: Bound) {
        assert_eq!(self.machine().memory(), Memory { available, bound });
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

const TWO: &str = "24 1 0:22 / /sys rw - sysfs sysfs rw\n31 24 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
const ONE: &str = "33 24 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
                   34 24 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";

#[test]
fn a_machine_without_cgroups_has_what_is_free() {
    Root::new("", "").check(64 << 30, Bound::Machine);
    let silent = Machine::at("/nonexistent");
    assert_eq!(silent.memory().bound, Bound::Unknown);
    assert_eq!(silent.cores_max(), None);
}

#[test]
fn a_limit_of_version_two_holds_less_what_is_used() {
    let root = Root::new("0::/app.slice/worker.service\n", TWO);
    let group = "app.slice/worker.service/";
    root.two("", "max", 0, 0).two("app.slice/", "max", 900 * MIB, 0);
    root.two(group, &(1450 * MIB).to_string(), 450 * MIB, 0).check(1000 * MIB, Bound::Cgroup(1450 * MIB));
    // File pages that were not used lately are reclaimed.
    root.two(group, &(1450 * MIB).to_string(), 450 * MIB, 300 * MIB).check(1300 * MIB, Bound::Cgroup(1450 * MIB));
    // For a moment more is used than allowed, after the limit was lowered.
    root.two(group, &(100 * MIB).to_string(), 450 * MIB, 0).check(0, Bound::Cgroup(100 * MIB));
    root.two(group, "max", 450 * MIB, 0).check(64 << 30, Bound::Machine);
    root.file(&format!("sys/fs/cgroup/{group}memory.high"), &(650 * MIB).to_string());
    root.check(200 * MIB, Bound::Cgroup(650 * MIB));
}

#[test]
fn the_tightest_of_all_ancestors_holds() {
    let root = Root::new("0::/a/b/c\n", TWO);
    let max = |mib: u64| (mib * MIB).to_string();
    root.two("", "max", 0, 0).two("a/", &max(4000), 3500 * MIB, 0);
    root.two("a/b/", &max(2000), 100 * MIB, 0).two("a/b/c/", &max(3000), 100 * MIB, 0);
    // The grandparent's limit is higher than the parent's, but others have used most of it.
    root.check(500 * MIB, Bound::Cgroup(4000 * MIB));
    root.two("a/", &max(4000), 1000 * MIB, 0).check(1900 * MIB, Bound::Cgroup(2000 * MIB));
    // The machine's free memory is less than any limit.
    root.file("proc/meminfo", "MemAvailable:   1024 kB\n").check(MIB, Bound::Machine);
}

#[test]
fn a_limit_of_version_one_holds_less_what_is_used() {
    let root = Root::new("9:name=systemd:/x\n4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/\n", ONE);
    root.one("", NO_LIMIT, 0, 0).one("docker/", NO_LIMIT, 0, 0);
    root.one("docker/abc/", &(1450 * MIB).to_string(), 500 * MIB, 50 * MIB);
    root.check(1000 * MIB, Bound::Cgroup(1450 * MIB));
    root.one("docker/", &(700 * MIB).to_string(), 600 * MIB, 0).check(100 * MIB, Bound::Cgroup(700 * MIB));
    // A parent to which nothing is charged limits its own processes alone.
    root.file("sys/fs/cgroup/memory/docker/memory.use_hierarchy", "0\n").check(1000 * MIB, Bound::Cgroup(1450 * MIB));
    root.one("docker/abc/", NO_LIMIT, 500 * MIB, 0).check(64 << 30, Bound::Machine);
}

#[test]
fn a_container_sees_its_own_part_of_the_hierarchy() {
    // Version 1 without a namespace of its own: the path is the host's, and only the part below it is mounted.
    let mounts = "34 24 0:30 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
    let root = Root::new("4:memory:/docker/abc\n", mounts);
    root.one("", &(800 * MIB).to_string(), 300 * MIB, 0).check(500 * MIB, Bound::Cgroup(800 * MIB));
    // An unmounted ancestor shows in the hierarchical limit.
    let stat = format!("hierarchical_memory_limit {}\ntotal_inactive_file 0\n", 400 * MIB);
    root.one("", NO_LIMIT, 300 * MIB, 0).file("sys/fs/cgroup/memory/memory.stat", &stat);
    root.check(100 * MIB, Bound::Cgroup(400 * MIB));
    // A process that was moved out of the namespace's root, and one whose folder is gone.
    for path in ["/../elsewhere", "/gone/for/good"] {
        let root = Root::new(&format!("0::{path}\n"), TWO);
        root.two("", &(800 * MIB).to_string(), 300 * MIB, 0).check(500 * MIB, Bound::Cgroup(800 * MIB));
    }
}

#[test]
fn both_versions_side_by_side_are_read_where_the_controller_is() {
    let mounts = format!("{ONE}41 24 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
    let root = Root::new("4:memory:/a\n0::/system.slice\n", &mounts);
    root.one("", NO_LIMIT, 0, 0).one("a/", &(300 * MIB).to_string(), 100 * MIB, 0);
    root.file("sys/fs/cgroup/unified/system.slice/cgroup.procs", "7\n");
    root.check(200 * MIB, Bound::Cgroup(300 * MIB));
}

#[test]
fn a_mount_point_may_have_spaces() {
    let mounts = "31 24 0:28 / /mnt/my\\040groups rw - cgroup2 cgroup2 rw\n";
    let root = Root::new("0::/\n", mounts);
    root.file("mnt/my groups/memory.max", &(5 * MIB).to_string()).check(5 * MIB, Bound::Cgroup(5 * MIB));
}

#[test]
fn files_that_make_no_sense_are_no_limit() {
    let root = Root::new("0::/a\nnonsense\n::\n", &format!("{TWO}nonsense\n1 2 - \n"));
    root.file("sys/fs/cgroup/a/memory.max", "lots\n").file("sys/fs/cgroup/a/cpu.max", "max\n");
    root.check(64 << 30, Bound::Machine);
    assert_eq!(root.machine().cores_max(), None);
}

#[test]
fn the_quota_of_cores_is_the_tightest() {
    let root = Root::new("0::/a/b\n", TWO);
    root.file("sys/fs/cgroup/a/cpu.max", "250000 100000\n").file("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
    assert_eq!(root.machine().cores_max(), Some(2));
    root.file("sys/fs/cgroup/a/b/cpu.max", "50000 100000\n");
    assert_eq!(root.machine().cores_max(), Some(1), "half a core is one thread");
    let root = Root::new("1:cpu,cpuacct:/a\n", ONE);
    let file = |name: &str| format!("sys/fs/cgroup/cpu,cpuacct/a/{name}");
    root.file(&file("cpu.cfs_quota_us"), "-1\n").file(&file("cpu.cfs_period_us"), "100000\n");
    assert_eq!(root.machine().cores_max(), None);
    root.file(&file("cpu.cfs_quota_us"), "400000\n");
    assert_eq!(root.machine().cores_max(), Some(4));
}

#[test]
fn what_the_kernel_killed_is_counted() {
    let root = Root::new("0::/a\n", TWO);
    let killed = |count: u64| format!("low 0\nhigh 0\nmax 9\noom 3\noom_kill {count}\noom_group_kill 0\n");
    root.file("sys/fs/cgroup/memory.events", &killed(2)).file("sys/fs/cgroup/a/memory.events", &killed(2));
    let kills = root.machine().oom_kills(7);
    assert_eq!((kills.is_counted(), kills.since()), (true, 0));
    // Other processes of the parent were killed too.
    root.file("sys/fs/cgroup/memory.events", &killed(90)).file("sys/fs/cgroup/a/memory.events", &killed(3));
    assert_eq!(kills.since(), 1);
    assert!(!root.machine().oom_kills(8).is_counted(), "there is no such process");
    let root = Root::new("4:memory:/a\n", ONE);
    let file = "sys/fs/cgroup/memory/a/memory.oom_control";
    root.file(file, "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n");
    let kills = root.machine().oom_kills(7);
    root.file(file, "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n");
    assert_eq!(kills.since(), 1);
}
