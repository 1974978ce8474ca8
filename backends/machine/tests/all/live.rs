//! Test in a real cgroup of version 1 or 2, where this machine allows one to be made.

use penstock_machine::{Bound, Machine};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const LIMIT: u64 = 96 << 20;

/// Environment variable under which this test binary prints the limits of its process.
const ASKED: &str = "PENSTOCK_MACHINE_SAYS";

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

fn make() -> Result<Made, String> {
    let (own, limit) = own()?;
    let made = Made(own.join(format!("penstock-test-{}", std::process::id())));
    fs::create_dir(&made.0).map_err(|error| format!("making {}: {error}", made.0.display()))?;
    // Without the memory controller (version 2, not delegated) there is no such file.
    fs::write(made.0.join(limit), LIMIT.to_string()).map_err(|error| format!("setting {limit}: {error}"))?;
    Ok(made)
}

#[test]
fn a_process_in_a_real_cgroup_knows_its_limit() {
    let memory = Machine::default().memory();
    if std::env::var_os(ASKED).is_some() {
        println!("{ASKED} {} {:?}", memory.available, memory.bound);
        return;
    }
    let made = match make() {
        Ok(made) => made,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    let program = std::env::current_exe().expect("this test");
    let joins = format!("echo $$ > {}/cgroup.procs && exec \"$0\" --exact --nocapture \"$1\"", made.0.display());
    let said = Command::new("sh")
        .args(["-c", &joins])
        .arg(program)
        .arg("live::a_process_in_a_real_cgroup_knows_its_limit")
        .env(ASKED, "1")
        .output()
        .expect("sh runs");
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
