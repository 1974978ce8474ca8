//! Sending of requests to a provider: headers, credentials, pacing, and the handling of refusals.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, header};
use penstock_proto::ErrorKind;
use penstock_types::{FaultClass, ProviderCodec as _, ProviderFault};

use super::keys::{AllRest, TooLate, Turn, Use};
use super::pace::{self, Paced, Pacer, Together};
use super::shared_pace::key_name;
use super::sigv4::{Credentials, Signed};
use super::{Outcome, Protocol, Provider, fields, sigv4};
use penstock_base::error::Failure;
use penstock_http::client::{Body, ClientError, Deadlines, Outgoing, Response, Sent};
use penstock_upstream::Asker;
use penstock_upstream::{Probe, Waited};

/// Most bytes of an error's body that are read.
const ERROR_BYTES_MAX: usize = 64 * 1024;
/// Most characters of a provider's words about the gateway's account that go to the log.
const SAID_CHARS_MAX: usize = 300;
/// Time limit for reading an error's body.
const ERROR_TIMEOUT: Duration = Duration::from_secs(5);
/// Value of `anthropic-version` for clients that send none.
const ANTHROPIC_VERSION: HeaderValue = HeaderValue::from_static("2023-06-01");

/// Request to a provider, without the fields that every request of the provider carries.
pub(super) struct Asked {
    /// Method of the HTTP request: GET or POST.
    pub(super) method: Method,
    /// Path of the request, behind the path of the provider's base URL.
    pub(super) path: String,
    /// Header fields of the client that are forwarded.
    pub(super) headers: Vec<(HeaderName, HeaderValue)>,
    /// Body of the HTTP request, in pieces that are sent one after the other.
    pub(super) body: Vec<Bytes>,
    /// True if the answer has the client's own dialect, so that an error body is passed on unchanged.
    pub(super) same_dialect: bool,
    /// Time limits of connection, head and silence for this request.
    pub(super) deadlines: Deadlines,
    /// Signal set when the request has been sent.
    pub(super) sent: Sent,
    /// Time that the request has waited for the pace of a key.
    pub(super) waited: Waited,
    /// Client key for which the request is sent, for fairness among client keys.
    pub(super) asker: Asker,
    /// Model and path for which the provider's key is used.
    pub(super) uses: Use,
    /// Estimated tokens of prompt and answer, for pacing.
    pub(super) tokens: u64,
    /// True for a retry or a hedge, which takes only what first attempts leave of the pace.
    pub(super) is_extra: bool,
    /// Instant until which the request may wait for its turn at the pace of a key.
    pub(super) wait_by: Instant,
}

impl Asked {
    /// Request as it asks for its turn at the pace of a key.
    fn at_pace(&self) -> pace::Request {
        pace::Request { asker: self.asker, tokens: self.tokens, is_extra: self.is_extra }
    }
}

#[async_trait]
impl Probe for Provider {
    fn interval(&self) -> Duration {
        self.config.health_interval
    }

    async fn is_good(&self) -> bool {
        let limit = self.config.health_interval;
        let Some(path) = self.config.health_path.clone() else { return true };
        // While all keys rest nothing can be probed, and requests are refused for that reason anyway.
        let Ok(turn) = self.keys.awake(Asker::default(), Use::new("", &path), Instant::now()) else { return true };
        let deadlines =
            Deadlines { connect: limit.min(self.config.connect_timeout), head: limit, silence: limit, whole: None };
        let request = self.outgoing(Method::GET, &path, &[], &[], turn.as_ref());
        let answered = tokio::time::timeout(limit, self.client.send(&request, &deadlines)).await;
        matches!(answered, Ok(Ok(response)) if response.status < 500)
    }
}

impl Provider {
    /// Returns true if the provider has a periodic health probe.
    pub fn is_checked(&self) -> bool {
        self.config.health_path.is_some()
    }

    /// Sends a request and returns the response once its status is 2xx (or 101). After a refusal that concerns the key
    /// (401, 403, 402, 429), the next key that does not rest is tried, each key at most once.
    pub(super) async fn ask(&self, asked: &Asked) -> Result<(Response, Option<Paced>), Failure> {
        self.keys.refresh(Instant::now());
        let taken = self.keys.take(asked.asker, asked.uses, Instant::now()).map_err(|rest| self.all_rest(rest))?;
        let (mut turn, mut paced) = self.paced(asked, taken).await?;
        for tried in 1.. {
            let mut request =
                self.outgoing(asked.method.clone(), &asked.path, &asked.headers, &asked.body, turn.as_ref());
            request.sent = asked.sent.clone();
            let response =
                self.client.send(&request, &asked.deadlines).await.map_err(|error| self.unanswered(&error))?;
            if (200..300).contains(&response.status) || response.status == 101 {
                if let Some(turn) = turn {
                    let (subject, now) = (turn.subject(), Instant::now());
                    self.keys.log(&self.config.id, subject, turn.worked(now), now);
                }
                return Ok((response, paced));
            }
            let failure = self.refused(response, turn, asked.same_dialect).await;
            let other =
                tried < self.keys.len() && failure.upstream.as_ref().is_some_and(|told| is_the_keys(told.class));
            // A refused request used no tokens: settle its reservation with 0.
            paced.iter_mut().for_each(|paced| paced.used(0));
            if !other {
                return Err(failure);
            }
            let Ok(awake) = self.keys.awake(asked.asker, asked.uses, Instant::now()) else { return Err(failure) };
            (turn, paced) = self.paced(asked, awake).await?;
        }
        Err(Failure::internal("a provider with keys without number"))
    }

    /// Acquires permission to send at the pace of a key: the key in turn, else another key that may be used at once, else,
    /// after a wait, the key that is free soonest. A request whose wait is over takes any key that has become free.
    async fn paced<'k>(
        &'k self,
        asked: &Asked,
        first: Option<Turn<'k>>,
    ) -> Result<(Option<Turn<'k>>, Option<Paced>), Failure> {
        if self.pacers.is_empty() {
            return Ok((first, None));
        }
        let (_, turn) = match self.free_key(asked, first).await {
            Ok((turn, paced)) => return Ok((turn, Some(paced))),
            Err(soonest) => soonest,
        };
        let pacer = self.pacer(turn.as_ref()).clone();
        let key = self.shared_name(turn.as_ref());
        let began = Instant::now();
        asked.waited.begin();
        let patience = asked.wait_by.saturating_duration_since(began);
        let mut waited = match pacer.wait(asked.at_pace(), patience, self.together(&key)).await {
            Ok(paced) => Ok((turn, paced)),
            Err(wait) => self.free_key(asked, turn).await.map_err(|(other, _)| wait.min(other)),
        };
        asked.waited.add(began.elapsed());
        // The key may have been paused while the request was in its line.
        if let Ok((turn, paced)) = &mut waited
            && turn.as_ref().is_some_and(|turn| turn.is_paused(Instant::now()))
        {
            paced.used(0);
            let other = self.keys.awake(asked.asker, asked.uses, Instant::now()).map_err(|rest| self.all_rest(rest))?;
            waited = self.free_key(asked, other).await.map_err(|(wait, _)| wait);
        }
        self.counts.paced(waited.is_ok());
        waited.map(|(turn, paced)| (turn, Some(paced))).map_err(|wait| {
            self.counts.add(Outcome::Failed(FaultClass::RateLimited));
            TooLate(wait).failure().log(format!("{}: pace", self.config.id))
        })
    }

    /// Finds a key that may be used at once: `first`, else the next in order that does not rest.
    ///
    /// # Errors
    /// The key that is free soonest, and the time until then.
    async fn free_key<'k>(
        &'k self,
        asked: &Asked,
        first: Option<Turn<'k>>,
    ) -> Result<(Option<Turn<'k>>, Paced), (Duration, Option<Turn<'k>>)> {
        let at = first.as_ref().map_or(0, Turn::index);
        let mut soonest = match self.at_once(asked, first.as_ref()).await {
            Ok(paced) => return Ok((first, paced)),
            Err(wait) => (wait, first),
        };
        // Whatever other requests do to the rotation meanwhile, each key is looked at once.
        for step in 1..self.pacers.len() {
            let other = self.keys.awake_at(at + step, asked.asker, asked.uses, Instant::now());
            let Some(other) = other else { continue };
            match self.at_once(asked, Some(&other)).await {
                Ok(paced) => return Ok((Some(other), paced)),
                Err(wait) if wait < soonest.0 => soonest = (wait, Some(other)),
                Err(_) => {}
            }
        }
        Err(soonest)
    }

    async fn at_once(&self, asked: &Asked, turn: Option<&Turn<'_>>) -> Result<Paced, Duration> {
        let key = self.shared_name(turn);
        self.pacer(turn).at_once(asked.at_pace(), self.together(&key)).await
    }

    /// Name of the key in the counters that gateways share; `None`: there are none.
    fn shared_name(&self, turn: Option<&Turn<'_>>) -> Option<String> {
        self.shared_pace.get()?;
        let secret = turn.map(Turn::secret);
        let secret = secret.as_ref().map_or("", |secret| secret.expose());
        Some(key_name(&self.config.target.to_string(), secret))
    }

    fn together<'a>(&'a self, key: &'a Option<String>) -> Option<Together<'a>> {
        Some(Together { counters: self.shared_pace.get()?.as_ref(), key: key.as_deref()? })
    }

    fn pacer(&self, turn: Option<&Turn<'_>>) -> &Arc<Pacer> {
        &self.pacers[turn.map_or(0, Turn::index).min(self.pacers.len() - 1)]
    }

    /// Builds the HTTP request with the fields that every request of this provider carries.
    pub(super) fn outgoing(
        &self,
        method: Method,
        path: &str,
        more: &[(HeaderName, HeaderValue)],
        body: &[Bytes],
        turn: Option<&Turn<'_>>,
    ) -> Outgoing {
        let mut headers = Vec::with_capacity(more.len() + self.config.headers.len() + 6);
        if method == Method::POST && !more.iter().any(|(name, _)| *name == header::CONTENT_TYPE) {
            headers.push((header::CONTENT_TYPE, HeaderValue::from_static("application/json")));
        }
        headers.push((header::USER_AGENT, HeaderValue::from_static(concat!("penstock/", env!("CARGO_PKG_VERSION")))));
        headers.extend(more.iter().cloned());
        if self.config.protocol == Protocol::Anthropic && !headers.iter().any(|(name, _)| name == "anthropic-version") {
            headers.push((HeaderName::from_static("anthropic-version"), ANTHROPIC_VERSION));
        }
        let mut request =
            Outgoing { method, path: path.to_owned(), headers, body: body.to_vec(), sent: Sent::default() };
        if let Some(turn) = turn {
            self.credential(turn.secret().expose(), &mut request);
        }
        for (name, value) in &self.config.headers {
            request.headers.retain(|(have, _)| have != name);
            request.headers.extend(secret(value.expose()).map(|value| (name.clone(), value)));
        }
        request
    }

    /// Adds the key in the header field that the protocol requires.
    fn credential(&self, key: &str, request: &mut Outgoing) {
        let bearer = || secret(&format!("Bearer {key}"));
        let (name, value) = match self.config.protocol {
            Protocol::Azure => ("api-key", secret(key)),
            Protocol::Anthropic => ("x-api-key", secret(key)),
            Protocol::Gemini => ("x-goog-api-key", secret(key)),
            Protocol::Bedrock => match Credentials::parse(key) {
                Some(who) => return self.sign(who, request),
                None => ("authorization", bearer()),
            },
            _ => ("authorization", bearer()),
        };
        request.headers.extend(value.map(|value| (HeaderName::from_static(name), value)));
    }

    /// Adds AWS Signature Version 4 to the request's header fields.
    fn sign(&self, who: Credentials<'_>, request: &mut Outgoing) {
        let target = self.client.target();
        let time = sigv4::timestamp(penstock_base::clock::since_epoch());
        let full = format!("{}{}", target.base, request.path);
        let (path, query) = full.split_once('?').unwrap_or((&full, ""));
        let mut headers =
            vec![("content-type", "application/json"), ("host", &target.authority), ("x-amz-date", &time)];
        headers.extend(who.token.map(|token| ("x-amz-security-token", token)));
        let payload: Vec<&[u8]> = request.body.iter().map(|piece| &piece[..]).collect();
        let signed = Signed {
            method: request.method.as_str(),
            path,
            query,
            headers: &headers,
            payload: &payload,
            region: self.config.region.as_deref().unwrap_or("us-east-1"),
            service: "bedrock",
            time: &time,
        };
        let authorization = sigv4::authorization(who, &signed);
        let fields = [
            ("x-amz-date", Some(time.as_str())),
            ("x-amz-security-token", who.token),
            ("authorization", Some(authorization.as_str())),
        ];
        for (name, value) in fields {
            request.headers.extend(value.and_then(secret).map(|value| (HeaderName::from_static(name), value)));
        }
    }

    /// Failure of a request without a valid HTTP response; counts it.
    pub(super) fn unanswered(&self, error: &ClientError) -> Failure {
        let class = error.fault.class();
        self.counts.add(Outcome::Failed(class));
        let message = match class {
            FaultClass::Timeout => "The upstream took too long.",
            FaultClass::Truncated => "The upstream's answer ended before it was complete.",
            FaultClass::Garbled => "The upstream's answer is not valid.",
            _ => "The upstream cannot be reached.",
        };
        Failure::provider(ProviderFault::new(class, message)).log(format!("{}: {error}", self.config.id))
    }

    /// Failure of a request that was not sent because every key rests; counts it.
    fn all_rest(&self, rest: AllRest) -> Failure {
        let failure = rest.failure();
        let class = failure.upstream.as_ref().map_or(FaultClass::Overloaded, |upstream| upstream.class);
        self.counts.add(Outcome::Failed(class));
        failure.log(format!("{}: all keys are paused: {}", self.config.id, rest.why.name()))
    }

    pub(super) fn crowded(&self) -> Failure {
        let failure =
            Failure::new(ErrorKind::Overloaded, "Too many requests to this upstream are open. Try again shortly.");
        failure.retry_after(Duration::from_secs(1)).log(format!("{}: in_flight_max", self.config.id))
    }

    /// Failure for a provider's fault. A fault of the gateway's key or account is told to the client in the gateway's own words,
    /// and in the provider's words to the log alone. No message holds a key.
    pub(super) fn told(&self, fault: ProviderFault) -> Failure {
        let (class, message) = (fault.class, self.keys.filtered(fault.message));
        let Some(words) = words_about_us(class) else {
            return Failure::provider(ProviderFault { message, ..fault });
        };
        let mut failure = Failure::provider(ProviderFault { message: words.to_owned(), ..fault });
        let log = failure.log.take().unwrap_or_default();
        let said: String = message.chars().take(SAID_CHARS_MAX).collect();
        failure.log(format!("{log}: {said:?}"))
    }

    /// Failure of a response with another status than 2xx: the error for the client, and the consequence for the key.
    async fn refused(&self, mut response: Response, turn: Option<Turn<'_>>, same_dialect: bool) -> Failure {
        let (status, retry_after) = (response.status, fields::retry_after(&response.headers));
        let body = read_error(&mut response.body).await;
        let fault = match &self.codec {
            Some(codec) => codec.fault(status, &body),
            None => penstock_dialects::openai::ChatCodec::default().fault(status, &body),
        };
        let class = fault.class;
        self.counts.add(Outcome::Failed(class));
        if let Some(turn) = turn {
            let (subject, now) = (turn.subject(), Instant::now());
            self.keys.log(&self.config.id, subject, turn.answered(class, retry_after, now), now);
        }
        let mut failure = self.told(fault);
        failure.retry_after = retry_after.map(|wait| wait.min(Duration::from_secs(120)));
        let log = failure.log.take().unwrap_or_default();
        let mut failure = failure.log(format!("{}: status {status}: {log}", self.config.id));
        let shape = failure.shape();
        if let Some(upstream) = &mut failure.upstream {
            upstream.status = status;
            upstream.headers = fields::back(&response.headers);
            // A body that is not the dialect's JSON, that contains our key or speaks of our account, is not passed on.
            if same_dialect
                && words_about_us(class).is_none()
                && body.first() == Some(&b'{')
                && !self.keys.are_in(&body)
            {
                upstream.body = Some(body.into());
                failure.shape = Some(Box::new(penstock_types::ErrorShape { status, ..shape }));
            }
        }
        failure
    }
}

/// Returns true if another key of the same provider may be accepted.
fn is_the_keys(class: FaultClass) -> bool {
    matches!(class, FaultClass::Unauthorized | FaultClass::Forbidden | FaultClass::Quota | FaultClass::RateLimited)
}

/// Message for a fault of the gateway's key or account, of which the provider's own words are not for clients; `None`: the
/// fault is of another kind.
fn words_about_us(class: FaultClass) -> Option<&'static str> {
    match class {
        FaultClass::Unauthorized | FaultClass::Forbidden => Some("The upstream refused the gateway's key."),
        FaultClass::Quota => Some("The upstream has no credit left for the gateway."),
        _ => None,
    }
}

/// Reads an error's body, within the bounds of size and time.
async fn read_error(body: &mut Body) -> Vec<u8> {
    let mut out = Vec::new();
    let read = async {
        while out.len() < ERROR_BYTES_MAX && poll_fn(|context| body.poll_chunk(context, &mut out)).await == Ok(true) {}
    };
    let _ = tokio::time::timeout(ERROR_TIMEOUT, read).await;
    out
}

/// Header value marked as sensitive, so that it is not logged.
fn secret(text: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(text).ok()?;
    value.set_sensitive(true);
    Some(value)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use penstock_base::Secret;
    use penstock_http::client::Target;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;
    use crate::{PacingConfig, ProviderConfig, SharedAnswer, SharedAsk, SharedHold, SharedPace};

    const PATIENCE: Duration = Duration::from_millis(200);

    /// Shared counters whose minute is full for every key except `free`, and for `free` until it was asked `full_for` times.
    struct Counters {
        free: String,
        full_for: usize,
        asked: AtomicUsize,
    }

    struct Counted;

    impl SharedHold for Counted {
        fn settle(self: Box<Self>, _: bool, _: Option<u64>) {}
    }

    #[async_trait]
    impl SharedPace for Counters {
        fn is_up(&self) -> bool {
            true
        }

        async fn take(&self, asked: &SharedAsk<'_>) -> SharedAnswer {
            let is_free = asked.key == self.free && self.asked.fetch_add(1, Ordering::SeqCst) >= self.full_for;
            if is_free { SharedAnswer::Counted(Box::new(Counted)) } else { SharedAnswer::Full }
        }
    }

    /// Provider with two keys, of which the second is free from its `full_for + 1`th question on.
    fn provider(full_for: usize) -> Arc<Provider> {
        let target = Target::parse("http://127.0.0.1:9/v1").expect("a target");
        let config = ProviderConfig {
            keys: vec![Secret::new("aa"), Secret::new("bb")],
            pacing: PacingConfig { requests_per_minute: 6000, tokens_per_minute: 0, gateways: 1, wait: PATIENCE },
            ..ProviderConfig::at(target.clone())
        };
        let provider = Provider::new(&config).expect("a provider");
        let free = key_name(&target.to_string(), "bb");
        let counters: Arc<dyn SharedPace> = Arc::new(Counters { free, full_for, asked: AtomicUsize::new(0) });
        assert!(provider.shared_pace.set(counters).is_ok());
        provider
    }

    fn asked() -> Asked {
        let wait = Duration::from_secs(1);
        Asked {
            method: Method::POST,
            path: "/v1/chat/completions".into(),
            headers: Vec::new(),
            body: Vec::new(),
            same_dialect: true,
            deadlines: Deadlines { connect: wait, head: wait, silence: wait, whole: None },
            sent: Sent::default(),
            waited: Waited::default(),
            asker: Asker::default(),
            uses: Use::new("m", "/v1/chat/completions"),
            tokens: 0,
            is_extra: false,
            wait_by: Instant::now() + PATIENCE,
        }
    }

    /// Index of the key that the request gets; `Err`: the failure for the client.
    async fn key(provider: &Provider) -> Result<usize, Failure> {
        let asked = asked();
        let first = provider.keys.take(asked.asker, asked.uses, Instant::now()).expect("no key rests");
        let (turn, _) = provider.paced(&asked, first).await?;
        Ok(turn.expect("there are keys").index())
    }

    /// Failure of a request to a provider with the key `aa` that refuses it with this status and message.
    async fn refused(status: u16, message: &str) -> Failure {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}/v1", listener.local_addr().expect("an address"));
        let body = format!(r#"{{"error":{{"message":{message:?}}}}}"#);
        let answer = format!("HTTP/1.1 {status} No\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        let served = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let mut request = [0; 4096];
            assert!(stream.read(&mut request).await.expect("a request") > 0);
            stream.write_all(answer.as_bytes()).await.expect("written");
            stream
        });
        let target = Target::parse(&url).expect("a target");
        let config = ProviderConfig { keys: vec![Secret::new("aa")], ..ProviderConfig::at(target) };
        let failure = Provider::new(&config).expect("a provider").ask(&asked()).await.err().expect("refused");
        served.await.expect("served");
        failure
    }

    #[tokio::test]
    async fn words_about_the_account_are_for_the_log_alone() {
        let long = format!("Your key aa is out of credit until \"Monday\".\n{}", "x".repeat(10_000));
        for status in [401, 402, 403] {
            let failure = refused(status, &long).await;
            let log = failure.log.expect("a log");
            assert!(log.contains(r#"Your key [key] is out of credit until \"Monday\".\nxxx"#), "{log}");
            assert!(log.len() < 500 && !log.contains('\n'), "{} bytes", log.len());
            assert!(!failure.message.contains("credit until"), "{}", failure.message);
            assert!(failure.upstream.is_some_and(|upstream| upstream.body.is_none()), "{status}");
        }
        // Words about the request are for the client.
        let failure = refused(400, "No such field.").await;
        assert!(failure.log.is_some_and(|log| !log.contains("No such field")));
        assert_eq!(&*failure.message, "No such field.");
    }

    #[tokio::test]
    async fn a_request_that_has_waited_for_its_key_takes_one_that_is_free_meanwhile() {
        assert_eq!(key(&provider(0)).await.ok(), Some(1), "the second key is free at once");
        assert_eq!(key(&provider(1)).await.ok(), Some(1), "the second key is free after the wait for the first");
        let failure = key(&provider(usize::MAX)).await.expect_err("no key is free");
        assert_eq!((failure.status(), failure.retry_after.is_some_and(|wait| !wait.is_zero())), (429, true));
        assert!(failure.upstream.is_some_and(|upstream| !upstream.sent), "nothing was sent");
    }
}
