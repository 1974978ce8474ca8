//! The operator's hook that starts and stops remote workers: a command, an HTTP service, or a Kubernetes scale.
//!
//! Each call names one worker, by its address and its index among the pool's addresses. A command gets the wish in its
//! arguments (`{action}`, `{index}`, …), in its environment and, as JSON, on its standard input; no shell is involved.
//! An HTTP service gets the same JSON by POST. Kubernetes gets the number of workers, by a PATCH of a scale. Every call
//! has a deadline, and answers are read up to 64 KiB.

use http::{HeaderName, HeaderValue, Method, header};
use penstock_http::client::{Client, Deadlines, Outgoing, Sent, Target};
use serde::{Deserialize, Serialize};
use std::future::poll_fn;
use std::io::Read;
use std::path::PathBuf;
use std::pin::pin;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{ChildStderr, Command};
use tokio::time::{Instant, timeout};

/// Most bytes read of an answer, of a command's standard error, or of a token file.
const SAID_BYTES_MAX: usize = 64 << 10;

/// Time to read the rest of a command's standard error after its end.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// Most characters of a command's output that an error shows.
const SHOWN_CHARS_MAX: usize = 300;

/// Action that the hook is asked to carry out on one worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Start the worker at the address.
    Start,
    /// Stop the worker at the address; it has no requests left.
    Stop,
}

impl Action {
    /// Name of the action: the value of `{action}` and of the JSON field.
    pub fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Stop => "stop",
        }
    }
}

/// Call to the hook: one worker to start or stop. Serialized as the JSON body.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Wish {
    /// Id of the pool that the worker belongs to.
    pub pool: String,
    /// Whether to start the worker or to stop it.
    pub action: Action,
    /// Configured address of the worker to start or stop.
    pub worker: String,
    /// Index of the worker among the pool's addresses, from 0.
    pub index: usize,
    /// Number of workers that there should be after the action.
    pub replicas: usize,
    /// Reason of the action in words, for the operator's logs.
    pub reason: String,
}

/// HTTP endpoint of a hook, with its token and certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// URL that the hook's requests go to.
    pub url: Target,
    /// Path of a file with a bearer token; read at every call, because Kubernetes rotates it.
    pub token_file: Option<PathBuf>,
    /// Path of a file with the CA certificates to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
}

/// Way in which the hook is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked {
    /// A program and its arguments, run once per call.
    Command(Vec<String>),
    /// An HTTP service that takes the [`Wish`] as a JSON body.
    Service(Service),
    /// The scale subresource of a Kubernetes workload, whose `replicas` is read and written.
    Kubernetes(Service),
}

/// Configured way to start and stop remote workers; see the module header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hook {
    /// Way in which the hook is called, with its program or endpoint.
    pub asked: Asked,
    /// Time limit of one call; a call that takes longer counts as failed.
    pub deadline: Duration,
}

/// The fields of a Kubernetes scale that are read and written.
#[derive(Default, Deserialize, Serialize)]
struct Scale {
    #[serde(default)]
    spec: ScaleSpec,
}

#[derive(Default, Deserialize, Serialize)]
struct ScaleSpec {
    /// Number of replicas; left out by Kubernetes when it is 0.
    #[serde(default)]
    replicas: usize,
}

impl Hook {
    /// Returns true if only the last worker can be stopped, because the hook takes a number and no name.
    pub fn is_in_order(&self) -> bool {
        matches!(self.asked, Asked::Kubernetes(_))
    }

    /// Asks for the wish. Returns once the command or the service reports success.
    ///
    /// # Errors
    /// The obstacle, for a person.
    pub async fn call(&self, wish: &Wish) -> Result<(), String> {
        match &self.asked {
            Asked::Command(words) => self.run(words, wish).await,
            Asked::Service(service) => {
                let body = serde_json::to_vec(wish).map_err(|error| error.to_string())?;
                self.exchange(service, Method::POST, "application/json", body).await.map(drop)
            }
            Asked::Kubernetes(service) => {
                let scale = Scale { spec: ScaleSpec { replicas: wish.replicas } };
                let body = serde_json::to_vec(&scale).map_err(|error| error.to_string())?;
                self.exchange(service, Method::PATCH, "application/merge-patch+json", body).await.map(drop)
            }
        }
    }

    /// Number of workers that there should be by now; `None`: the hook does not know.
    ///
    /// # Errors
    /// The obstacle, for a person.
    pub async fn count(&self) -> Result<Option<usize>, String> {
        let Asked::Kubernetes(service) = &self.asked else { return Ok(None) };
        let said = self.exchange(service, Method::GET, "", Vec::new()).await?;
        let scale: Scale = serde_json::from_slice(&said).map_err(|error| format!("no scale: {error}"))?;
        Ok(Some(scale.spec.replicas))
    }

    async fn run(&self, words: &[String], wish: &Wish) -> Result<(), String> {
        let (index, replicas) = (wish.index.to_string(), wish.replicas.to_string());
        let named = [
            ("pool", wish.pool.as_str()),
            ("action", wish.action.name()),
            ("worker", &wish.worker),
            ("index", &index),
            ("replicas", &replicas),
            ("reason", &wish.reason),
        ];
        let mut words = words.iter().map(|word| filled(word, &named));
        let program = words.next().ok_or("there is no command")?;
        let mut command = Command::new(&program);
        command.args(words).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        for (name, value) in named {
            command.env(format!("PENSTOCK_{}", name.to_uppercase()), value);
        }
        let mut child = command.spawn().map_err(|error| format!("{program}: {error}"))?;
        let (stdin, stderr) = (child.stdin.take(), child.stderr.take());
        let wish = serde_json::to_vec(wish).map_err(|error| error.to_string())?;
        let all = async {
            if let Some(mut stdin) = stdin {
                // A command may ignore its standard input.
                let _ = stdin.write_all(&wish).await;
            }
            let mut said = Vec::new();
            let status = {
                let mut listening = pin!(listen(stderr, &mut said));
                tokio::select! {
                    status = child.wait() => {
                        // A process that the command leaves running, such as a worker, may hold the pipe open: its end is not waited for.
                        let _ = timeout(LAST_WORDS, listening).await;
                        status
                    }
                    () = &mut listening => child.wait().await,
                }
            };
            (status, said)
        };
        // At the deadline the future is dropped, which kills the process.
        let Ok((status, said)) = timeout(self.deadline, all).await else {
            return Err(format!("{program}: not done after {:?}", self.deadline));
        };
        match status {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(format!("{program}: {status}{}", last_line(&said))),
            Err(error) => Err(format!("{program}: {error}")),
        }
    }

    async fn exchange(&self, service: &Service, method: Method, kind: &str, body: Vec<u8>) -> Result<Vec<u8>, String> {
        // A new client for each call: calls are rare, and connections belong to the runtime they were made in.
        let client = Client::new(service.url.clone(), service.ca_file.as_deref())?;
        let mut headers: Vec<(HeaderName, HeaderValue)> = Vec::new();
        headers.push((header::ACCEPT, HeaderValue::from_static("application/json")));
        if !kind.is_empty() {
            headers.push((header::CONTENT_TYPE, HeaderValue::from_str(kind).map_err(|error| error.to_string())?));
        }
        if let Some(path) = &service.token_file {
            headers.push((header::AUTHORIZATION, bearer(path)?));
        }
        // The target's base is the whole path.
        let path = if service.url.base.is_empty() { "/".into() } else { String::new() };
        let body = if body.is_empty() { Vec::new() } else { vec![body.into()] };
        let whole = Instant::now() + self.deadline;
        let deadlines =
            Deadlines { connect: self.deadline, head: self.deadline, silence: self.deadline, whole: Some(whole) };
        let request = Outgoing { method, path, headers, body, sent: Sent::default() };
        let mut response = client.send(&request, &deadlines).await.map_err(|error| error.to_string())?;
        let mut said = Vec::new();
        while poll_fn(|context| response.body.poll_chunk(context, &mut said))
            .await
            .map_err(|error| error.to_string())?
        {
            if said.len() > SAID_BYTES_MAX {
                return Err(format!("the answer is larger than {SAID_BYTES_MAX} bytes"));
            }
        }
        match response.status {
            200..=299 => Ok(said),
            status => Err(format!("status {status}{}", last_line(&said))),
        }
    }
}

/// Fills in a word's `{names}` in one pass, so inserted text is not expanded again.
fn filled(word: &str, named: &[(&str, &str)]) -> String {
    let (mut out, mut rest) = (String::with_capacity(word.len()), word);
    while let Some(at) = rest.find('{') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let found = named.iter().find_map(|(name, value)| {
            let behind = rest.strip_prefix('{')?.strip_prefix(name)?.strip_prefix('}')?;
            Some((value, behind))
        });
        match found {
            Some((value, behind)) => {
                out.push_str(value);
                rest = behind;
            }
            None => {
                out.push('{');
                rest = &rest[1..];
            }
        }
    }
    out + rest
}

/// Reads a command's standard error up to [`SAID_BYTES_MAX`].
async fn listen(stderr: Option<ChildStderr>, said: &mut Vec<u8>) {
    if let Some(stderr) = stderr {
        // At the bound the pipe is closed: a command that goes on writing gets SIGPIPE.
        let _ = stderr.take(SAID_BYTES_MAX as u64).read_to_end(said).await;
    }
}

/// Last line of an output that is not blank, prefixed with `: `, for an error.
fn last_line(said: &[u8]) -> String {
    let text = String::from_utf8_lossy(said);
    let line = text.lines().rev().find(|line| !line.trim().is_empty());
    line.map_or_else(String::new, |line| format!(": {}", line.trim().chars().take(SHOWN_CHARS_MAX).collect::<String>()))
}

fn bearer(path: &std::path::Path) -> Result<HeaderValue, String> {
    let mut token = String::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(SAID_BYTES_MAX as u64).read_to_string(&mut token));
    read.map_err(|error| format!("{}: {error}", path.display()))?;
    let mut value = HeaderValue::from_str(&format!("Bearer {}", token.trim()))
        .map_err(|_| format!("{}: is no token", path.display()))?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(action: Action) -> Wish {
        Wish {
            pool: "chat".into(),
            action,
            worker: "tcp://10.0.0.7:7000".into(),
            index: 3,
            replicas: 4,
            reason: "$(touch /tmp/x) {pool}".into(),
        }
    }

    fn command(words: &[&str], deadline: Duration) -> Hook {
        Hook { asked: Asked::Command(words.iter().map(ToString::to_string).collect()), deadline }
    }

    const SECONDS: Duration = Duration::from_secs(20);

    #[test]
    fn words_are_filled_once() {
        let named = [("index", "3"), ("reason", "{index}")];
        assert_eq!(filled("worker@{index}.service {reason} {other} {", &named), "worker@3.service {index} {other} {");
    }

    #[tokio::test]
    async fn a_command_is_told_by_arguments_environment_and_input() {
        let file = std::env::temp_dir().join(format!("penstock-hook-{}", std::process::id()));
        let script = "cat > \"$1\"; printf ' %s %s %s' \"$2\" \"$PENSTOCK_REPLICAS\" \"$PENSTOCK_REASON\" >> \"$1\"";
        let words = ["sh", "-c", script, "hook", &file.display().to_string(), "{action}-{index}"];
        command(&words, SECONDS).call(&wish(Action::Start)).await.expect("it works");
        let said = std::fs::read_to_string(&file).expect("it wrote");
        let (told, rest) = said.split_at(said.find('}').expect("an object") + 1);
        // The reason has a brace of its own, so `rest` starts inside it.
        assert!(
            told.starts_with("{\"pool\":\"chat\",\"action\":\"start\",\"worker\":\"tcp://10.0.0.7:7000\",\"index\":3")
        );
        assert!(rest.ends_with(" start-3 4 $(touch /tmp/x) {pool}"), "{rest}");
        std::fs::remove_file(file).expect("it is there");
    }

    #[tokio::test]
    async fn what_a_command_leaves_running_is_not_waited_for() {
        let script = "sleep 6 & echo gone >&2; exit $1";
        let hook = |status| command(&["sh", "-c", script, "hook", status], Duration::from_secs(4));
        assert_eq!(hook("0").call(&wish(Action::Start)).await, Ok(()));
        let said = hook("3").call(&wish(Action::Start)).await.expect_err("it says so");
        assert!(said.contains('3') && said.ends_with("gone"), "{said}");
    }

    /// Answers one request per line of `answers`; returns the requests, head and body.
    async fn server(answers: &'static [&'static str]) -> (String, tokio::task::JoinHandle<Vec<String>>) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let serve = async move {
            let mut asked = Vec::new();
            for answer in answers {
                let (mut stream, _) = listener.accept().await.expect("a client");
                let mut bytes = Vec::new();
                let whole = |bytes: &[u8]| {
                    let text = String::from_utf8_lossy(bytes).to_lowercase();
                    let length = text.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
                    text.find("\r\n\r\n").is_some_and(|at| text.len() >= at + 4 + length.unwrap_or(0))
                };
                while !whole(&bytes) {
                    assert!(stream.read_buf(&mut bytes).await.expect("more") > 0);
                }
                asked.push(String::from_utf8(bytes).expect("text"));
                stream.write_all(answer.as_bytes()).await.expect("written");
            }
            asked
        };
        (address, tokio::spawn(serve))
    }

    #[tokio::test]
    async fn kubernetes_is_asked_for_a_number_with_the_token_of_the_moment() {
        let token = std::env::temp_dir().join(format!("penstock-hook-token-{}", std::process::id()));
        let (address, asked) = server(&[
            "HTTP/1.1 200 OK\r\ncontent-length: 44\r\nconnection: close\r\n\r\n{\"kind\":\"Scale\",\"spec\":{\"replicas\":2},\"x\":1}",
            "HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}",
            "HTTP/1.1 403 Forbidden\r\ncontent-length: 9\r\nconnection: close\r\n\r\nforbidden",
        ])
        .await;
        let scale = "/apis/apps/v1/namespaces/ai/statefulsets/worker/scale";
        let url = Target::parse(&format!("http://{address}{scale}")).expect("a URL");
        let service = Service { url, token_file: Some(token.clone()), ca_file: None };
        let hook = Hook { asked: Asked::Kubernetes(service), deadline: SECONDS };
        assert!(hook.is_in_order() && hook.count().await.is_err(), "there is no token");
        std::fs::write(&token, "one\n").expect("written");
        assert_eq!(hook.count().await, Ok(Some(2)));
        std::fs::write(&token, "two").expect("written");
        assert_eq!(hook.call(&wish(Action::Start)).await, Ok(()));
        assert_eq!(hook.call(&wish(Action::Stop)).await, Err("status 403: forbidden".into()));
        let asked = asked.await.expect("it served");
        let has = |at: usize, part: &str| asked[at].to_lowercase().contains(&part.to_lowercase());
        assert!(has(0, &format!("GET {scale} HTTP/1.1")) && has(0, "authorization: Bearer one\r\n"), "{asked:?}");
        assert!(has(1, &format!("PATCH {scale} HTTP/1.1")) && has(1, "authorization: Bearer two\r\n"), "{asked:?}");
        assert!(has(1, "content-type: application/merge-patch+json\r\n"), "{asked:?}");
        assert!(asked[1].ends_with("\r\n\r\n{\"spec\":{\"replicas\":4}}"), "{asked:?}");
        std::fs::remove_file(token).expect("it is there");
    }

    #[tokio::test]
    async fn a_service_is_sent_the_wish_and_has_a_deadline() {
        let (address, asked) = server(&["HTTP/1.1 204 No Content\r\n\r\n"]).await;
        let hook = |address: &str, deadline| {
            let url = Target::parse(&format!("http://{address}")).expect("a URL");
            Hook { asked: Asked::Service(Service { url, token_file: None, ca_file: None }), deadline }
        };
        assert_eq!(hook(&address, SECONDS).call(&wish(Action::Stop)).await, Ok(()));
        let asked = asked.await.expect("it served");
        let sent = serde_json::to_string(&wish(Action::Stop)).expect("JSON");
        assert!(asked[0].starts_with("POST / HTTP/1.1\r\n") && asked[0].ends_with(&sent), "{asked:?}");
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = silent.local_addr().expect("an address").to_string();
        let began = Instant::now();
        assert!(hook(&address, Duration::from_millis(50)).call(&wish(Action::Start)).await.is_err());
        assert!(began.elapsed() < SECONDS);
    }

    #[tokio::test]
    async fn a_command_that_fails_hangs_or_is_not_there_says_so() {
        let failed = command(&["sh", "-c", "echo no such unit >&2; exit 5"], SECONDS).call(&wish(Action::Stop)).await;
        assert_eq!(failed, Err("sh: exit status: 5: no such unit".into()));
        let began = Instant::now();
        let hangs = command(&["sleep", "60"], Duration::from_millis(50)).call(&wish(Action::Stop)).await;
        assert!(hangs.is_err_and(|why| why.contains("not done")) && began.elapsed() < SECONDS);
        let missing = command(&["/nonexistent/scale"], SECONDS).call(&wish(Action::Stop)).await;
        assert!(missing.is_err_and(|why| why.contains("/nonexistent/scale")));
        let chatty = command(&["sh", "-c", "yes >&2"], SECONDS).call(&wish(Action::Stop)).await;
        assert!(chatty.is_err_and(|why| why.chars().count() < 2 * SHOWN_CHARS_MAX), "read to a bound");
    }
}
