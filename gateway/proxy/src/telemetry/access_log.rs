//! One JSON line per request. No prompt, no completion, no key.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use serde::Serialize;

/// What a line says. Absent values are left out.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Record<'a> {
    /// Unix milliseconds of the end.
    pub time_ms: u64,
    /// Also in the response's x-request-id.
    pub request_id: &'a str,
    /// Peer address, without port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// `h1` or `h2`.
    pub protocol: &'a str,
    /// Bounded name of the route, or `-`.
    pub route: &'a str,
    /// Id of the API key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Model asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Streamed or whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stream: Option<bool>,
    /// HTTP status; 0 when the client left before there was one.
    pub status: u16,
    /// Kind of the failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// What only the log says about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Finish reasons of the choices.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub finish: Vec<&'static str>,
    /// Milliseconds to the first token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttft_ms: Option<f64>,
    /// Milliseconds per output token after the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tpot_ms: Option<f64>,
    /// Prompt tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<u64>,
    /// Of these, from the prefix cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u64>,
    /// Output tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens: Option<u64>,
    /// Continuations after a lost worker.
    #[serde(skip_serializing_if = "is_zero")]
    pub resumes: u32,
    /// A continuation was not bit-exact.
    #[serde(skip_serializing_if = "is_false")]
    pub inexact: bool,
    /// The client left before the end.
    #[serde(skip_serializing_if = "is_false")]
    pub client_gone: bool,
    /// Names of request fields that were ignored.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ignored: Vec<String>,
    /// Head complete to end.
    pub duration_ms: f64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(value: &u32) -> bool {
    *value == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_false(value: &bool) -> bool {
    !value
}

/// Where the lines go.
#[derive(Debug)]
pub enum AccessLog {
    /// Nowhere.
    Off,
    /// Standard output.
    Stdout,
    /// A file, appended to.
    File(Mutex<File>),
}

impl AccessLog {
    /// `off`, `-` for standard output, or a path.
    pub fn open(target: &str) -> io::Result<Self> {
        match target {
            "off" => Ok(Self::Off),
            "-" => Ok(Self::Stdout),
            path => OpenOptions::new()
                .create(true)
                .append(true)
                .open(Path::new(path))
                .map(|file| Self::File(Mutex::new(file))),
        }
    }

    /// Writes one line, in one call. A log that cannot be written never fails a request.
    pub fn write(&self, record: &Record<'_>) {
        if matches!(self, Self::Off) {
            return;
        }
        let Ok(mut line) = serde_json::to_vec(record) else { return };
        line.push(b'\n');
        let _ = match self {
            Self::Off => Ok(()),
            Self::Stdout => io::stdout().lock().write_all(&line),
            Self::File(file) => file.lock().unwrap_or_else(PoisonError::into_inner).write_all(&line),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_one_json_object_without_absent_values() {
        let path = std::env::temp_dir().join(format!("penstock-access-{}.log", std::process::id()));
        let log = AccessLog::open(path.to_str().expect("utf-8")).expect("open");
        log.write(&Record { request_id: "req_1", route: "/health", protocol: "h1", status: 200, ..Record::default() });
        let text = std::fs::read_to_string(&path).expect("read");
        std::fs::remove_file(&path).expect("remove");
        let value: serde_json::Value = serde_json::from_str(&text).expect("json");
        assert_eq!((value["status"].as_u64(), value.get("model"), text.lines().count()), (Some(200), None, 1));
    }
}
