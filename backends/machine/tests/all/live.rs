//! Test in a real cgroup of version 1 or 2, where this machine allows one to be made.

use penstock_machine::{Bound, Machine};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const LIMIT: u64 = 96 << 20;

/// Environment variable under which this test binary prints the limits of its process.
const ASKED: &str = "PENSTOCK_MACHINE_SAYS";

/// Environment variable under which this test binary takes memory until it is killed.
const TAKES: &str = "PENSTOCK_MACHINE_TAKES";

/// Signal of the kernel's OOM killer.
const SIGKILL: i32 = 9;

/// A cgroup below the one of this process, removed at the end.
struct Made(PathBuf);

impl Drop for Made {
    fn drop(&mut self) {
        drop(fs::remove_dir(&self.0));
    }
}

/// The folder of this process's own memory cgroup.
fn own() -> Result<(PathBuf, &'static str), String> {
    let paths = fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
    for line in paths.lines() {
        let (controllers, path) = line.split_once(':').and_then(|(_, rest)| rest.split_once(':')).unwrap_or_default();
        let (point, limit) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            "memory" => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            _ => continue,
        };
        let folder = Path::new(point).join(path.trim_start_matches('/'));
        if folder.join("cgroup.procs").exists() {
            return Ok((folder, limit));
        }
    }
    Err("there is no memory cgroup where they are usually mounted".into())
}

fn make(name: &str) -> Result<Made, String> {
    let (own, limit) = own()?;
    let made = Made(own.join(format!("penstock-{name}-{}", std::process::id())));
    fs::create_dir(&made.0).map_err(|error| format!("making {}: {error}", made.0.display()))?;
    // Without the memory controller (version 2, not delegated) there is no such file.
    fs::write(made.0.join(limit), LIMIT.to_string()).map_err(|error| format!("setting {limit}: {error}"))?;
    Ok(made)
}

/// Command that runs one test of this binary in the cgroup.
fn inside(made: &Made, test: &str) -> Command {
    let program = std::env::current_exe().expect("this test");
    let joins = format!("echo $$ > {}/cgroup.procs && exec \"$0\" --exact --nocapture \"$1\"", made.0.display());
    let mut command = Command::new("sh");
    command.args(["-c", &joins]).arg(program).arg(test);
    command
}

#[test]
fn a_process_in_a_real_cgroup_knows_its_limit() {
    let memory = Machine::default().memory();
    if std::env::var_os(ASKED).is_some() {
        println!("{ASKED} {} {:?}", memory.available, memory.bound);
        return;
    }
    let made = match make("limit") {
        Ok(made) => made,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    let said =
        inside(&made, "live::a_process_in_a_real_cgroup_knows_its_limit").env(ASKED, "1").output().expect("sh runs");
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    if text.is_empty() && !said.status.success() {
        return eprintln!("skipped: no process may join: {}", String::from_utf8_lossy(&said.stderr));
    }
    let line = text.lines().find_map(|line| line.split_once(ASKED)).expect("it was said").1;
    let (available, bound) = line.trim().split_once(' ').expect("two words");
    let available: u64 = available.parse().expect("a number");
    assert!(
        available > 0 && available < LIMIT,
        "{available} of {LIMIT}: what the process itself uses is not available"
    );
    assert_eq!(bound, format!("{:?}", Bound::Cgroup(LIMIT)));
}

/// Takes memory without end, once a line was read.
fn take() -> ! {
    println!("{TAKES}");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("a line");
    let mut taken = Vec::new();
    while taken.len() < 4 * LIMIT as usize {
        // Written, so that the pages exist.
        taken.extend_from_slice(&[1; 1 << 20]);
    }
    std::process::exit(0);
}

#[test]
fn a_kill_for_memory_in_a_real_cgroup_is_counted() {
    if std::env::var_os(TAKES).is_some() {
        take();
    }
    let made = match make("kill") {
        Ok(made) => made,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    // The limit is one of memory and swap together, where the kernel has swap at all.
    for (file, limit) in [("memory.memsw.limit_in_bytes", LIMIT), ("memory.swap.max", 0)] {
        drop(fs::write(made.0.join(file), limit.to_string()));
    }
    let mut child = inside(&made, "live::a_kill_for_memory_in_a_real_cgroup_is_counted")
        .env(TAKES, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("sh runs");
    let said = BufReader::new(child.stdout.take().expect("piped"));
    if !said.lines().map_while(Result::ok).any(|line| line.contains(TAKES)) {
        child.wait().expect("it ends");
        return eprintln!("skipped: no process may join");
    }
    let kills = Machine::default().oom_kills(child.id());
    assert_eq!(kills.since(), 0);
    child.stdin.take().expect("piped").write_all(b"go on\n").expect("it reads");
    let ended = child.wait().expect("it ends");
    if !kills.is_counted() {
        return eprintln!("skipped: this kernel counts no kills");
    }
    assert_eq!((ended.signal(), kills.since()), (Some(SIGKILL), 1), "{ended}");
}
