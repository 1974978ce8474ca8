//! Requests to a hub: redirects followed, the token kept to the hub's own origin, refusals told apart.

use std::collections::HashMap;
use std::future::poll_fn;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use penstock_base::{Secret, percent_encoded};
use penstock_http::client::{Client, Deadlines, Outgoing, Place, Response, Sent, Target};

use super::partial::Tag;
use super::{Progress, PullError};
use crate::listing::Listing;
use crate::name::ModelName;

/// Time to a connection, and from there to the head of an answer.
const CONNECT: Duration = Duration::from_secs(15);
const HEAD: Duration = Duration::from_secs(30);
/// Longest silence in a body.
pub(super) const SILENCE: Duration = Duration::from_secs(30);
/// Largest description of a repository: 50 thousand files with their checksums.
const LISTING_BYTES_MAX: usize = 16 << 20;
/// Time for a whole description.
const LISTING_TIME: Duration = Duration::from_secs(120);
/// Redirects that are followed for one request.
const REDIRECTS_MAX: usize = 5;
/// Attempts without a byte of progress.
const ATTEMPTS_MAX: u32 = 6;
/// First and longest wait between attempts.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(16));
/// Longest wait that a hub may ask for (`Retry-After`).
const RETRY_AFTER_MAX: Duration = Duration::from_secs(300);
/// Longest message of a hub that is shown, in characters.
const SAID_MAX: usize = 300;

/// Asker of one endpoint, with connections that are used again.
pub(super) struct Asker {
    target: Target,
    token: Option<Secret>,
    ca: Option<PathBuf>,
    /// Clients by origin.
    clients: Mutex<HashMap<String, Arc<Client>>>,
}

/// Answer of a status that the caller understands: 200, 206 or 416.
pub(super) struct Answer {
    pub(super) response: Response,
    /// Origin that sent it.
    pub(super) origin: String,
    /// Address without its query, which may hold a signature.
    pub(super) url: String,
}

/// Failed attempt.
pub(super) enum Failure {
    /// Another attempt may succeed; it is not made before the time that the hub asks for.
    Again { error: PullError, after: Option<Duration> },
    /// Another attempt would fail too.
    Final(PullError),
}

impl From<PullError> for Failure {
    fn from(error: PullError) -> Self {
        Self::Final(error)
    }
}

impl Failure {
    /// Failure of a connection or a body.
    pub(super) fn broken(url: &str, reason: &(impl ToString + ?Sized)) -> Self {
        Self::Again { error: PullError::Answer { url: url.to_owned(), reason: reason.to_string() }, after: None }
    }
}

/// Attempts of one task.
#[derive(Default)]
pub(super) struct Patience {
    attempts: u32,
}

impl Patience {
    /// Forgets the attempts: there was progress.
    pub(super) fn reset(&mut self) {
        self.attempts = 0;
    }

    /// Waits for the next attempt.
    ///
    /// # Errors
    /// There is none.
    pub(super) async fn wait(&mut self, failure: Failure, progress: &Progress) -> Result<(), PullError> {
        let (error, after) = match failure {
            Failure::Final(error) => return Err(error),
            Failure::Again { error, after } => (error, after),
        };
        self.attempts += 1;
        let (first, longest) = BACKOFF;
        let backoff = longest.min(first * 2u32.saturating_pow(self.attempts - 1));
        let wait = after.unwrap_or_default().max(jittered(backoff));
        if self.attempts >= ATTEMPTS_MAX || wait > RETRY_AFTER_MAX {
            return Err(match error {
                PullError::Answer { url, reason } => PullError::Unreachable { url, reason, attempts: self.attempts },
                other => other,
            });
        }
        progress.note(format!("{error}; next attempt in {:.1} s", wait.as_secs_f64()));
        tokio::time::sleep(wait).await;
        Ok(())
    }
}

/// Between half of a time and all of it, so that many clients do not come back at once.
fn jittered(time: Duration) -> Duration {
    let mut byte = [0; 1];
    // Without randomness every client waits the same: no harm.
    let _ = getrandom::fill(&mut byte);
    time / 2 + time * u32::from(byte[0]) / 512
}

impl Asker {
    pub(super) fn new(target: &Target, token: Option<Secret>, ca: Option<&Path>) -> Result<Self, PullError> {
        let asker = Self { target: target.clone(), token, ca: ca.map(Path::to_owned), clients: Mutex::default() };
        asker.client(&Target { base: String::new(), ..target.clone() })?;
        Ok(asker)
    }

    /// Address of the endpoint.
    pub(super) fn endpoint(&self) -> String {
        self.target.to_string()
    }

    /// Files of the revision that a name says.
    pub(super) async fn listing(&self, name: &ModelName, progress: &Progress) -> Result<Listing, PullError> {
        let mut patience = Patience::default();
        loop {
            match self.listing_once(name).await {
                Ok(listing) => return Ok(listing),
                Err(failure) => patience.wait(failure, progress).await?,
            }
        }
    }

    async fn listing_once(&self, name: &ModelName) -> Result<Listing, Failure> {
        let revision = encoded(name.revision(), false);
        let path = format!("/api/models/{}/{}/revision/{revision}?blobs=true", name.org, name.repo);
        let mut answer = self.get(&path, None, None, name).await?;
        let too_long = || PullError::Answer {
            url: answer.url.clone(),
            reason: "the description of the repository is too long".into(),
        };
        let mut bytes = Vec::new();
        answer.response.body.limit(Some(tokio::time::Instant::now() + LISTING_TIME));
        loop {
            let more = poll_fn(|context| answer.response.body.poll_chunk(context, &mut bytes)).await;
            if bytes.len() > LISTING_BYTES_MAX {
                return Err(too_long().into());
            }
            match more {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => return Err(Failure::broken(&answer.url, &error)),
            }
        }
        let listing = Listing::parse(&bytes).map_err(|error| PullError::Listing { url: answer.url.clone(), error })?;
        if !listing.is_of(name.revision()) {
            let reason = format!("it describes commit {} and not the one that was asked for", listing.commit);
            return Err(PullError::Answer { url: answer.url, reason }.into());
        }
        Ok(listing)
    }

    /// Asks for a file of a commit. `range`: first and last byte; `tag`: validator that the bytes must have.
    pub(super) async fn file(
        &self,
        (name, commit, path): (&ModelName, &str, &str),
        range: Option<(u64, u64)>,
        tag: Option<&Tag>,
    ) -> Result<Answer, Failure> {
        let path = format!("/{}/{}/resolve/{commit}/{}", name.org, name.repo, encoded(path, true));
        self.get(&path, range, tag, name).await
    }

    /// Sends one request and follows redirects.
    async fn get(
        &self,
        path: &str,
        range: Option<(u64, u64)>,
        tag: Option<&Tag>,
        name: &ModelName,
    ) -> Result<Answer, Failure> {
        let mut target = Target { base: String::new(), ..self.target.clone() };
        let mut path = format!("{}{path}", self.target.base);
        for _ in 0..=REDIRECTS_MAX {
            let (client, there) = (self.client(&target)?, origin(&target.place));
            let url = format!("{target}{}", path.split('?').next().unwrap_or_default());
            let is_home = there == origin(&self.target.place);
            let mut headers =
                vec![(header::USER_AGENT, HeaderValue::from_static(concat!("penstock/", env!("CARGO_PKG_VERSION"))))];
            if let Some(token) = self.token.as_ref().filter(|_| is_home) {
                headers.push((header::AUTHORIZATION, authorization(token)?));
            }
            if let Some((first, last)) = range {
                headers.push((header::RANGE, value(&format!("bytes={first}-{last}"))));
                // A tag is its sender's own.
                if let Some(tag) = tag.filter(|tag| tag.origin == there) {
                    headers.push((header::IF_RANGE, value(&tag.value)));
                }
            }
            let request =
                Outgoing { method: Method::GET, path: path.clone(), headers, body: Vec::new(), sent: Sent::default() };
            let deadlines = Deadlines { connect: CONNECT, head: HEAD, silence: SILENCE, whole: None };
            let response = client.send(&request, &deadlines).await.map_err(|error| Failure::broken(&url, &error))?;
            match response.status {
                200 | 206 | 416 => return Ok(Answer { response, origin: there, url }),
                301 | 302 | 303 | 307 | 308 => (target, path) = follow(&target, &response.headers, &url)?,
                status => return Err(refused(status, &response.headers, url, is_home, name, &self.target)),
            }
        }
        Err(PullError::Answer { url: format!("{target}"), reason: format!("more than {REDIRECTS_MAX} redirects") }
            .into())
    }

    /// Client of an origin.
    fn client(&self, target: &Target) -> Result<Arc<Client>, PullError> {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        let key = origin(&target.place);
        if let Some(client) = clients.get(&key) {
            return Ok(client.clone());
        }
        let fault = |reason| PullError::Endpoint { endpoint: target.to_string(), reason };
        let client = Client::new(target.clone(), self.ca.as_deref()).map_err(fault)?;
        let client = Arc::new(client.with_redirects());
        clients.insert(key, client.clone());
        Ok(client)
    }
}

fn authorization(token: &Secret) -> Result<HeaderValue, PullError> {
    let mut value = HeaderValue::from_str(&format!("Bearer {}", token.expose())).map_err(|_| PullError::Endpoint {
        endpoint: "the token".into(),
        reason: "it has characters that no header can carry".into(),
    })?;
    value.set_sensitive(true);
    Ok(value)
}

fn value(text: &str) -> HeaderValue {
    // A tag came as a header value and a range is digits.
    HeaderValue::from_str(text).unwrap_or_else(|_| HeaderValue::from_static(""))
}

/// Scheme, host and port of a place, in lower case.
fn origin(place: &Place) -> String {
    match place {
        Place::Tcp { host, port, tls } => {
            format!("{}://{}:{port}", if *tls { "https" } else { "http" }, host.to_ascii_lowercase())
        }
        Place::Unix(path) => format!("unix://{}", path.display()),
    }
}

/// Target and path that a redirect leads to.
fn follow(from: &Target, headers: &HeaderMap, url: &str) -> Result<(Target, String), PullError> {
    let location = headers.get(header::LOCATION).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let shown = location.split('?').next().unwrap_or_default().chars().take(SAID_MAX).collect::<String>();
    let refuse = |reason| PullError::Redirect { url: url.to_owned(), to: shown.clone(), reason };
    let location = location.split('#').next().unwrap_or_default();
    if location.starts_with('/') && !location.starts_with("//") {
        return Ok((from.clone(), location.to_owned()));
    }
    let tls = matches!(from.place, Place::Tcp { tls: true, .. });
    let whole = match location.strip_prefix("//") {
        Some(rest) => format!("{}://{rest}", if tls { "https" } else { "http" }),
        None => location.to_owned(),
    };
    let Some((scheme, rest)) = whole.split_once("://") else { return Err(refuse("it is no address")) };
    if !matches!(scheme, "http" | "https") {
        return Err(refuse("it is neither http nor https"));
    }
    if tls && scheme == "http" {
        return Err(refuse("it leads from https to http"));
    }
    let (authority, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
    let target = Target::parse(&format!("{scheme}://{authority}")).map_err(|_| refuse("it is no address"))?;
    let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
    Ok((target, path))
}

/// Failure that a status stands for.
fn refused(status: u16, headers: &HeaderMap, url: String, is_home: bool, name: &ModelName, hub: &Target) -> Failure {
    let text = |name: &'static str| headers.get(HeaderName::from_static(name)).and_then(|value| value.to_str().ok());
    let code = text("x-error-code").unwrap_or_default();
    let said = text("x-error-message")
        .map(|said| format!(" ({})", said.chars().take(SAID_MAX).collect::<String>()))
        .unwrap_or_default();
    let after = headers
        .get(header::RETRY_AFTER)
        .and_then(|value| value.to_str().ok()?.trim().parse().ok())
        .map(Duration::from_secs);
    let page = format!("{hub}/{}", name.repository());
    match status {
        // A signed address has run out: the next attempt gets a new one.
        401 | 403 | 404 | 410 if !is_home => Failure::Again { error: PullError::Status { url, status, said }, after },
        401 => Failure::Final(PullError::Unauthorized { url, said }),
        403 => {
            let advice = if code == "GatedRepo" || said.contains("gated") {
                format!(
                    "who may have it is decided by its owner: ask for access at {page}, then set a token of that account (HF_TOKEN)"
                )
            } else {
                format!("this token may not read {page}: set one that may (HF_TOKEN, hub.token_env)")
            };
            Failure::Final(PullError::Forbidden { url, said, advice })
        }
        404 => {
            let advice = match code {
                "RevisionNotFound" => format!(
                    "{} has no revision {:?}: {page}/tree/main shows its branches and tags",
                    name.repository(),
                    name.revision()
                ),
                "EntryNotFound" => "the repository has no such file any more: try again".to_owned(),
                _ => format!("{hub} has no repository {}: check the spelling", name.repository()),
            };
            Failure::Final(PullError::NotFound { url, said, advice })
        }
        429 => Failure::Again { error: PullError::Limited { url, said }, after },
        408 | 425 | 500..=599 => Failure::Again { error: PullError::Status { url, status, said }, after },
        _ => Failure::Final(PullError::Status { url, status, said }),
    }
}

/// Percent-encoded text of a path; `/` stays if it divides components.
fn encoded(text: &str, is_path: bool) -> String {
    percent_encoded(text, if is_path { b"/" } else { b"" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn follows(location: &'static str, expected: Result<(&str, &str), &str>) {
        let from = Target::parse("https://hub.example").expect("a target");
        let headers = HeaderMap::from_iter([(header::LOCATION, HeaderValue::from_static(location))]);
        let got = follow(&from, &headers, "https://hub.example/x").map(|(target, path)| (target.to_string(), path));
        match (&got, expected) {
            (Ok((target, path)), Ok(expected)) => assert_eq!((target.as_str(), path.as_str()), expected),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            _ => panic!("{got:?} for {location}"),
        }
    }

    #[test]
    fn redirects_lead_to_http_and_never_to_less() {
        follows("/api/resolve-cache/x?y=1", Ok(("https://hub.example", "/api/resolve-cache/x?y=1")));
        follows("https://cdn.example:444/a/b?sig=z#f", Ok(("https://cdn.example:444", "/a/b?sig=z")));
        follows("//cdn.example/a", Ok(("https://cdn.example", "/a")));
        follows("https://cdn.example?x", Ok(("https://cdn.example", "/?x")));
        follows("http://cdn.example/a", Err("from https to http"));
        follows("file:///etc/passwd", Err("neither http nor https"));
        follows("https://user@cdn.example/", Err("no address"));
        follows("", Err("no address"));
        follows("x", Err("no address"));
    }

    #[test]
    fn origins_are_compared_whole() {
        let of = |url: &str| origin(&Target::parse(url).expect(url).place);
        assert_eq!(of("https://Hub.example"), of("https://hub.example:443/base"));
        assert_ne!(of("https://hub.example"), of("http://hub.example:443"));
        assert_ne!(of("https://hub.example"), of("https://hub.example:444"));
    }

    #[test]
    fn statuses_say_what_helps() {
        let name = ModelName::parse("a/b@v9").expect("a name");
        let hub = Target::parse("https://hub.example").expect("a target");
        let of = |status, code: &'static str, home| {
            let headers =
                HeaderMap::from_iter([(HeaderName::from_static("x-error-code"), HeaderValue::from_static(code))]);
            match refused(status, &headers, "u".into(), home, &name, &hub) {
                Failure::Final(error) => format!("final {error}"),
                Failure::Again { error, .. } => format!("again {error}"),
            }
        };
        for (status, code, home, part) in [
            (401, "", true, "final u: status 401: the hub knows no such repository"),
            (403, "GatedRepo", true, "ask for access at https://hub.example/a/b"),
            (403, "", true, "this token may not read"),
            (404, "RevisionNotFound", true, "a/b has no revision \"v9\""),
            (404, "RepoNotFound", true, "has no repository a/b"),
            (403, "", false, "again u: status 403"),
            (429, "", true, "again u: status 429: the hub limits requests"),
            (503, "", true, "again u: status 503"),
            (418, "", true, "final u: status 418"),
        ] {
            let said = of(status, code, home);
            assert!(said.contains(part), "{said}");
        }
    }

    #[test]
    fn paths_are_encoded() {
        assert_eq!(encoded("refs/pr/1", false), "refs%2Fpr%2F1");
        assert_eq!(encoded("a b/ü?.json", true), "a%20b/%C3%BC%3F.json");
    }
}
