//! Log of the router's decisions: one JSON line per request, written by a thread of its own. A full queue or disk loses
//! lines, nothing else. Two files of half the size bound each are kept; the older one is `PATH.1`.

use penstock_router::Record;
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// Capacity of the queue to the writing thread, in lines; a line that finds it full is dropped.
const LINES_MAX: usize = 4096;
/// Bound of the sizes of the present and the previous file together, in bytes.
pub(super) const BYTES_MAX: u64 = 256 << 20;
/// Most tenants with a number of their own; later ones get 0.
const TENANTS_MAX: usize = 65_536;

/// Queue to the recording thread; see the module header. After a drop the thread writes the queued lines and ends.
pub(super) struct Recorder {
    lines: SyncSender<String>,
    tenants: HashMap<Arc<str>, u32>,
}

impl Recorder {
    /// Opens the file and starts the thread.
    ///
    /// # Errors
    /// The file cannot be opened, or there is no thread.
    pub(super) fn start(path: &Path, bytes_max: u64) -> std::io::Result<Self> {
        let writer = Writer::open(path, bytes_max)?;
        let (lines, inbox) = sync_channel(LINES_MAX);
        std::thread::Builder::new().name("penstock-record".into()).spawn(move || writer.run(&inbox))?;
        Ok(Self { lines, tenants: HashMap::new() })
    }

    /// Writes a record; the tenant becomes a number of the file's.
    pub(super) fn write(&mut self, mut record: Record, tenant: &Arc<str>) {
        let next = self.tenants.len() as u32 + 1;
        record.tenant = match self.tenants.get(tenant) {
            Some(number) => *number,
            None if self.tenants.len() >= TENANTS_MAX => 0,
            None => *self.tenants.entry(Arc::clone(tenant)).or_insert(next),
        };
        // Err: the thread is behind, or its disk is full. Lost.
        let _ = self.lines.try_send(record.line());
    }
}

struct Writer {
    path: PathBuf,
    file: File,
    bytes: u64,
    half: u64,
}

fn open(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

impl Writer {
    fn open(path: &Path, bytes_max: u64) -> std::io::Result<Self> {
        let file = open(path)?;
        let bytes = file.metadata()?.len();
        Ok(Self { path: path.to_owned(), file, bytes, half: bytes_max / 2 })
    }

    fn run(mut self, inbox: &Receiver<String>) {
        let mut told = false;
        while let Ok(line) = inbox.recv() {
            if let Err(error) = self.line(&line)
                && !std::mem::replace(&mut told, true)
            {
                tracing::warn!(path = %self.path.display(), %error, "router decisions cannot be written to the record file");
            }
        }
    }

    fn line(&mut self, line: &str) -> std::io::Result<()> {
        let bytes = line.len() as u64 + 1;
        if self.bytes + bytes > self.half && self.bytes > 0 {
            let mut older = self.path.clone().into_os_string();
            older.push(".1");
            std::fs::rename(&self.path, older)?;
            (self.file, self.bytes) = (open(&self.path)?, 0);
        }
        self.file.write_all(format!("{line}\n").as_bytes())?;
        self.bytes += bytes;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("penstock-{name}-{}.jsonl", std::process::id()));
        let _ = (std::fs::remove_file(&path), std::fs::remove_file(path.with_extension("jsonl.1")));
        path
    }

    #[test]
    fn two_files_of_half_the_size_are_kept() {
        let path = file("halves");
        let mut writer = Writer::open(&path, 100).expect("opened");
        for at in 0..20 {
            writer.line(&format!("{{\"at\": {at:10}}}")).expect("written");
        }
        let text = |path: PathBuf| std::fs::read_to_string(path).expect("there");
        let (now, older) = (text(path.clone()), text(path.with_extension("jsonl.1")));
        assert!(now.len() <= 50 && older.len() <= 50 && now.ends_with("19}\n"), "{older}{now}");
        let again = Writer::open(&path, 100).expect("opened again");
        assert_eq!(again.bytes as usize, now.len(), "it goes on where it was");
    }

    #[test]
    fn tenants_are_numbers() {
        let path = file("tenants");
        let mut writer = Writer::open(&path, 1 << 20).expect("opened");
        let (lines, inbox) = sync_channel(8);
        let mut recorder = Recorder { lines, tenants: HashMap::new() };
        for tenant in ["secret-a", "secret-b", "secret-a"] {
            recorder.write(Record::default(), &tenant.into());
        }
        drop(recorder);
        inbox.iter().for_each(|line| writer.line(&line).expect("written"));
        let text = std::fs::read_to_string(path).expect("there");
        let tenants: Vec<u32> =
            text.lines().map(|line| serde_json::from_str::<Record>(line).expect("a record").tenant).collect();
        assert_eq!(tenants, [1, 2, 1]);
        assert!(!text.contains("secret"));
    }
}
