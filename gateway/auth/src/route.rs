//! Method and path to [`Route`], parsed once; every route has its auth class here.

use std::collections::BTreeSet;

use http::{HeaderMap, Method};
use penstock_proto::ErrorKind;
use penstock_types::{Dialect, Surface};

use crate::stored_route::StoredRoute;
use penstock_base::error::{Failure, Methods};
use penstock_types::ask::{Ask, Variant};

/// Route of a request, found from method and path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// Operation that a model answers, such as chat or embeddings.
    Ask(Ask),
    /// Count of an operation's input tokens, without its answer.
    Count(Ask),
    /// `GET /v1/models`: list of the models that the key may use.
    Models,
    /// `GET /v1/models/{id}`: facts about one model.
    Model(String),
    /// `GET /api/ps`: models that are loaded (Ollama).
    Running,
    /// `POST /api/show`: facts about the model that the body names (Ollama).
    Show,
    /// `POST /tokenize`: tokens of a text or chat, by a pool's tokenizer.
    Tokenize,
    /// `POST /detokenize`: text of a list of tokens.
    Detokenize,
    /// Operation that is passed on to a provider: its URL.
    Forward(&'static str),
    /// `GET /v1/realtime`: a WebSocket to a provider.
    Realtime,
    /// `GET /health`: whether the process lives.
    Health,
    /// `GET /ready`: whether a worker takes requests.
    Ready,
    /// `GET` or `POST /ping`: whether the process lives, as SageMaker asks for it.
    Ping,
    /// `GET /version`: version of the gateway.
    Version,
    /// `GET /metrics`: metrics of the process as Prometheus text.
    Metrics,
    /// `/status`: the limits, and the asker's use of them.
    Status,
    /// Files, batches and stored responses, which the store answers.
    Stored(StoredRoute),
}

/// Kind of credential that a route needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthClass {
    /// No credential: the answer says nothing about tenants or load.
    Open,
    /// Any credential, unless the config needs none.
    Key,
    /// A credential whose scopes name the route: the answer says something about all tenants together.
    Operator,
}

impl Route {
    /// Finds the route. A path is compared as it was sent: no decoding, no dot segments, no case folding, so that it cannot mean
    /// two things.
    pub fn parse(method: &Method, target: &str) -> Result<Self, Failure> {
        let path = target.split('?').next().unwrap_or_default();
        if let Some(stored) = StoredRoute::parse(method, path) {
            return stored.map(Route::Stored);
        }
        let (route, allowed) = match path {
            "/v1/chat/completions" => (Route::Ask(Ask::new(Surface::Chat)), Method::POST),
            "/v1/completions" => (Route::Ask(Ask::new(Surface::Completions)), Method::POST),
            "/v1/responses" => (Route::Ask(Ask::new(Surface::Responses)), Method::POST),
            "/v1/responses/input_tokens" => (Route::Count(Ask::count(Surface::Responses)), Method::POST),
            "/v1/embeddings" => (Route::Ask(Ask::new(Surface::Embeddings)), Method::POST),
            "/v1/rerank" | "/v2/rerank" | "/rerank" => (Route::Ask(Ask::new(Surface::Rerank)), Method::POST),
            "/v1/score" | "/score" => (Route::Ask(Ask::new(Surface::Score)), Method::POST),
            "/v1/messages" => (Route::Ask(Ask::new(Surface::Messages)), Method::POST),
            "/v1/messages/count_tokens" => (Route::Count(Ask::new(Surface::CountTokens)), Method::POST),
            "/v1/models" => (Route::Models, Method::GET),
            "/api/chat" => (Route::Ask(Ask::new(Surface::OllamaChat)), Method::POST),
            "/api/generate" => (Route::Ask(Ask::new(Surface::OllamaGenerate)), Method::POST),
            "/api/embed" => {
                let ask = Ask { variant: Variant::Batch, ..Ask::new(Surface::OllamaEmbed) };
                (Route::Ask(ask), Method::POST)
            }
            "/api/embeddings" => (Route::Ask(Ask::new(Surface::OllamaEmbed)), Method::POST),
            "/api/tags" => (Route::Models, Method::GET),
            "/api/ps" => (Route::Running, Method::GET),
            "/api/show" => (Route::Show, Method::POST),
            "/api/version" => (Route::Version, Method::GET),
            "/tokenize" => (Route::Tokenize, Method::POST),
            "/detokenize" => (Route::Detokenize, Method::POST),
            "/v1/realtime" => (Route::Realtime, Method::GET),
            "/health" => (Route::Health, Method::GET),
            "/ready" => (Route::Ready, Method::GET),
            "/ping" if *method == Method::POST => (Route::Ping, Method::POST),
            "/ping" => (Route::Ping, Method::GET),
            "/version" => (Route::Version, Method::GET),
            "/metrics" => (Route::Metrics, Method::GET),
            "/status" => (Route::Status, Method::GET),
            _ if forwarded(path).is_some() => (Route::Forward(forwarded(path).unwrap_or_default()), Method::POST),
            "/v1beta/models" => (Route::Models, Method::GET),
            _ => match gemini_path(path, target).or_else(|| model_path(path)) {
                Some(found) => found,
                None => return Err(Failure::new(ErrorKind::NotFound, "There is no such URL here.")),
            },
        };
        if *method == allowed || (allowed == Method::GET && *method == Method::HEAD) {
            return Ok(route);
        }
        let methods = if allowed == Method::GET { Methods::Get } else { Methods::Post };
        Err(Failure::new(ErrorKind::MethodNotAllowed, format!("This URL takes {allowed} requests only."))
            .allow(methods))
    }

    /// Kind of credential that the route needs, checked before the request is served.
    pub fn auth_class(&self) -> AuthClass {
        match self {
            Route::Health | Route::Ready | Route::Ping => AuthClass::Open,
            Route::Ask(_)
            | Route::Count(_)
            | Route::Models
            | Route::Model(_)
            | Route::Running
            | Route::Show
            | Route::Forward(_)
            | Route::Realtime
            | Route::Tokenize
            | Route::Detokenize
            | Route::Version
            | Route::Status
            | Route::Stored(_) => AuthClass::Key,
            Route::Metrics => AuthClass::Operator,
        }
    }

    /// Bounded name of the route for logs, metrics and scopes: ids in paths are left out.
    pub fn label(&self) -> &'static str {
        match self {
            Route::Ask(ask) | Route::Count(ask) => ask.label(),
            Route::Models => "/v1/models",
            Route::Model(_) => "/v1/models/{id}",
            Route::Running => "/api/ps",
            Route::Show => "/api/show",
            Route::Forward(path) => path,
            Route::Realtime => "/v1/realtime",
            Route::Tokenize => "/tokenize",
            Route::Detokenize => "/detokenize",
            Route::Health => "/health",
            Route::Ready => "/ready",
            Route::Ping => "/ping",
            Route::Version => "/version",
            Route::Metrics => "/metrics",
            Route::Status => "/status",
            Route::Stored(stored) => stored.label(),
        }
    }
}

/// One method and URL of each route, under every name that it has, for tests of access.
pub fn examples() -> Vec<(Method, String)> {
    const POSTED: [&str; 20] = [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/embeddings",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/score",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
        "/api/show",
        "/tokenize",
        "/detokenize",
        "/ping",
    ];
    const GOT: [&str; 14] = [
        "/v1/models",
        "/v1beta/models",
        "/v1/models/m",
        "/v1beta/models/m",
        "/v1/realtime",
        "/api/tags",
        "/api/ps",
        "/api/version",
        "/health",
        "/ready",
        "/ping",
        "/version",
        "/metrics",
        "/status",
    ];
    let actions = ACTIONS.iter().flat_map(|(word, _)| {
        ["/v1beta/models/m", "/v1/models/m"].map(|model| (Method::POST, format!("{model}:{word}")))
    });
    let posted = POSTED.iter().chain(&FORWARDED).map(|url| (Method::POST, (*url).to_owned()));
    let got = GOT.iter().map(|url| (Method::GET, (*url).to_owned()));
    let stored = crate::stored_route::EXAMPLES.iter().map(|(method, url)| (method.clone(), (*url).to_owned()));
    posted.chain(got).chain(actions).chain(stored).collect()
}

/// Labels of all routes, as scopes and plugins name them.
pub fn labels() -> BTreeSet<&'static str> {
    examples().iter().filter_map(|(method, url)| Route::parse(method, url).ok()).map(|route| route.label()).collect()
}

/// Error text for a pattern that matches no route, since a scope or plugin with such a pattern would have no effect. `None`: the pattern is a
/// label, or the beginning of one with `*` behind it.
pub fn pattern_fault(pattern: &str) -> Option<String> {
    let matches = |label: &&str| pattern.strip_suffix('*').map_or(pattern == *label, |start| label.starts_with(start));
    if labels().iter().any(matches) {
        return None;
    }
    let parsed = [Method::GET, Method::POST].iter().find_map(|method| Route::parse(method, pattern).ok());
    Some(match parsed {
        Some(route) => format!("{pattern:?} is no name of a route: that URL counts as {:?}", route.label()),
        None => format!(
            "{pattern:?} is no route: docs/reference/authentication.md lists all routes; examples are /v1/chat/completions and /v1/files*"
        ),
    })
}

/// URLs of operations that are passed on to a provider.
const FORWARDED: [&str; 7] = [
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/images/variations",
    "/v1/moderations",
];

fn forwarded(path: &str) -> Option<&'static str> {
    FORWARDED.into_iter().find(|have| *have == path)
}

/// Dialect of a URL, known or not, in which errors are written. Three APIs have `/v1/models`: Anthropic's clients send
/// their version there; Google's SDKs name themselves or send the key in their own way.
pub fn dialect(target: &str, headers: &HeaderMap) -> Dialect {
    let models = target.starts_with("/v1/models");
    let named = |names: &[&str]| models && names.iter().any(|name| headers.contains_key(*name));
    if target.starts_with("/v1/messages") || named(&["anthropic-version"]) {
        Dialect::Anthropic
    } else if is_gemini(target) || named(&["x-goog-api-client", "x-goog-api-key"]) {
        Dialect::Gemini
    } else if target.starts_with("/api/") {
        Dialect::Ollama
    } else {
        Dialect::OpenAi
    }
}

/// Returns true if a URL belongs to the Gemini API alone. The `v1` of that API shares `/v1/models` with OpenAI's, but not the
/// actions on models.
fn is_gemini(target: &str) -> bool {
    let path = target.split('?').next().unwrap_or_default();
    path.starts_with("/v1beta/") || path.strip_prefix("/v1/models/").and_then(action).is_some()
}

/// Route of `/v1/models/{id}`, which Gemini's API has too, also as `/v1beta/models/{id}`.
fn model_path(path: &str) -> Option<(Route, Method)> {
    let raw = path.strip_prefix("/v1/models/").or_else(|| path.strip_prefix("/v1beta/models/"))?;
    if action(raw).is_some() {
        return None;
    }
    model_id(raw).map(|id| (Route::Model(id), Method::GET))
}

/// Action of Gemini's API on a model, written behind the colon of the path.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Action {
    Generate,
    Stream,
    Count,
    Embed,
    EmbedBatch,
}

const ACTIONS: [(&str, Action); 5] = [
    ("generateContent", Action::Generate),
    ("streamGenerateContent", Action::Stream),
    ("countTokens", Action::Count),
    ("embedContent", Action::Embed),
    ("batchEmbedContents", Action::EmbedBatch),
];

/// Model and action of `{model}:{action}`. A model's name may itself hold a colon: the last colon counts, and only in
/// front of an action.
fn action(rest: &str) -> Option<(&str, Action)> {
    let (model, word) = rest.rsplit_once(':')?;
    ACTIONS.iter().find(|(have, _)| *have == word).map(|(_, action)| (model, *action))
}

/// Route of `/v1beta/models/{model}:{action}` and `/v1/models/{model}:{action}`.
fn gemini_path(path: &str, target: &str) -> Option<(Route, Method)> {
    let rest = path.strip_prefix("/v1beta/models/").or_else(|| path.strip_prefix("/v1/models/"))?;
    let (model, action) = action(rest)?;
    let framing = if query(target, "alt") == Some("sse") { Variant::Usual } else { Variant::Array };
    let (surface, stream, variant) = match action {
        Action::Generate => (Surface::Generate, false, Variant::Usual),
        Action::Stream => (Surface::Generate, true, framing),
        Action::Count => (Surface::Generate, false, Variant::Count),
        Action::Embed => (Surface::Embed, false, Variant::Usual),
        Action::EmbedBatch => (Surface::Embed, false, Variant::Batch),
    };
    let ask = Ask { surface, model: Some(model_id(model)?), stream, variant };
    let route = if action == Action::Count { Route::Count(ask) } else { Route::Ask(ask) };
    Some((route, Method::POST))
}

/// Value of a query parameter, not decoded.
pub fn query<'a>(target: &'a str, name: &str) -> Option<&'a str> {
    let pairs = target.split_once('?')?.1.split('&');
    pairs.filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name).map(|(_, value)| value)
}

/// Credentials in the query: every `key` of a Gemini URL, decoded. Other URLs take none.
pub fn query_keys(target: &str) -> impl Iterator<Item = Vec<u8>> {
    let query = target.split_once('?').filter(|_| is_gemini(target)).map_or("", |(_, query)| query);
    let keys = query.split('&').filter_map(|pair| pair.split_once('=')).filter(|(name, _)| *name == "key");
    keys.map(|(_, value)| decoded(value).unwrap_or_default())
}

/// Model id of a URL, decoded. Ids may contain slashes (`org/name`), which some SDKs send percent-encoded.
pub fn model_id(raw: &str) -> Option<String> {
    let id = String::from_utf8(decoded(raw)?).ok()?;
    (!id.is_empty() && id.len() <= 256 && !id.chars().any(char::is_control)).then_some(id)
}

/// Bytes of percent-encoded text; `None`: the encoding is broken.
fn decoded(raw: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(raw.len());
    let mut rest = raw.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = match (first, tail) {
            (b'%', [high, low, tail @ ..]) => {
                let digit = |hex: &u8| (*hex as char).to_digit(16);
                bytes.push((digit(high)? * 16 + digit(low)?) as u8);
                tail
            }
            (byte, tail) => {
                bytes.push(*byte);
                tail
            }
        };
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    #[expect(clippy::needless_pass_by_value, reason = "reads as data")]
    fn check(method: &str, target: &str, expected: Result<Route, u16>) {
        let method = Method::from_bytes(method.as_bytes()).expect("a token");
        assert_eq!(Route::parse(&method, target).map_err(|failure| failure.status()), expected, "{method} {target}");
    }

    fn gemini(surface: Surface, stream: bool, variant: Variant) -> Ask {
        Ask { surface, model: Some("m:8b".into()), stream, variant }
    }

    #[test]
    fn gemini_says_model_and_action_in_the_path() {
        let ask = |surface, stream, variant| Ok(Route::Ask(gemini(surface, stream, variant)));
        let path = |rest: &str| format!("/v1beta/models/m:8b{rest}");
        check("POST", "/v1/models/m:8b:generateContent", ask(Surface::Generate, false, Variant::Usual));
        check("POST", "/v1/models/m:8b:streamGenerateContent?alt=sse", ask(Surface::Generate, true, Variant::Usual));
        check("GET", "/v1/models/m:8b", Ok(Route::Model("m:8b".into())));
        check("POST", "/v1/models/m:8b", Err(405));
        check("POST", &path(":generateContent"), ask(Surface::Generate, false, Variant::Usual));
        check("POST", &path(":generateContent?key=k"), ask(Surface::Generate, false, Variant::Usual));
        check("POST", &path(":streamGenerateContent?alt=sse"), ask(Surface::Generate, true, Variant::Usual));
        check("POST", &path(":streamGenerateContent?key=k&alt=sse"), ask(Surface::Generate, true, Variant::Usual));
        check("POST", &path(":streamGenerateContent?alt=json"), ask(Surface::Generate, true, Variant::Array));
        check("POST", &path(":streamGenerateContent"), ask(Surface::Generate, true, Variant::Array));
        check("POST", &path(":embedContent"), ask(Surface::Embed, false, Variant::Usual));
        check("POST", &path(":batchEmbedContents"), ask(Surface::Embed, false, Variant::Batch));
        check("POST", &path(":countTokens"), Ok(Route::Count(gemini(Surface::Generate, false, Variant::Count))));
        check("GET", &path(""), Ok(Route::Model("m:8b".into())));
        check("GET", "/v1beta/models?pageSize=50", Ok(Route::Models));
        check("GET", &path(":generateContent"), Err(405));
        check("POST", "/v1beta/models/:generateContent", Err(404));
        check("POST", "/v1beta/models", Err(405));
        check("GET", "/v1beta/", Err(404));
    }

    #[test]
    fn errors_are_said_in_the_dialect_of_the_url() {
        let said = |target: &str, header: Option<&'static str>| {
            let name = header.map(|name| (http::HeaderName::from_static(name), http::HeaderValue::from_static("x")));
            dialect(target, &name.into_iter().collect())
        };
        assert_eq!(said("/v1/models", None), Dialect::OpenAi);
        assert_eq!(said("/v1/models", Some("x-goog-api-key")), Dialect::Gemini);
        assert_eq!(said("/v1/models/m", Some("x-goog-api-client")), Dialect::Gemini);
        assert_eq!(said("/v1/models/m", Some("anthropic-version")), Dialect::Anthropic);
        assert_eq!(said("/v1/models/m:generateContent", None), Dialect::Gemini);
        assert_eq!(said("/v1/chat/completions", Some("x-goog-api-key")), Dialect::OpenAi);
        assert_eq!(said("/v1beta/nothing", None), Dialect::Gemini);
    }

    #[test]
    fn keys_in_the_query_are_those_of_gemini_urls() {
        let keys = |target: &str| query_keys(target).collect::<Vec<_>>();
        assert_eq!(keys("/v1beta/models?key=a%2Bb&x=1"), [b"a+b".to_vec()]);
        assert_eq!(keys("/v1beta/models?key=a&key=b").len(), 2);
        assert!(keys("/v1beta/models?keys=a").is_empty());
        assert_eq!(keys("/v1/models/m:countTokens?key=a").len(), 1);
        assert!(keys("/v1/models?key=a").is_empty());
        assert!(keys("/v1/chat/completions?key=a").is_empty());
        assert!(keys("/v1/models/m?x=/v1/models/m:countTokens&key=a").is_empty());
    }

    /// Every variant of [`Route`] has an example; a new variant fails to compile here until it has an index.
    #[test]
    fn every_route_has_an_example() {
        let mut seen = [0; 17];
        for (method, url) in examples() {
            let route = Route::parse(&method, &url).unwrap_or_else(|_| panic!("{method} {url}"));
            seen[match route {
                Route::Ask(_) => 0,
                Route::Count(_) => 1,
                Route::Models => 2,
                Route::Model(_) => 3,
                Route::Tokenize => 4,
                Route::Detokenize => 5,
                Route::Forward(_) => 6,
                Route::Realtime => 7,
                Route::Health => 8,
                Route::Ready => 9,
                Route::Metrics => 10,
                Route::Stored(_) => 11,
                Route::Status => 12,
                Route::Ping => 13,
                Route::Version => 14,
                Route::Running => 15,
                Route::Show => 16,
            }] += 1;
        }
        assert!(seen.iter().all(|count| *count > 0), "{seen:?}");
    }

    #[test]
    fn a_pattern_matches_some_route() {
        for good in
            ["/v1/chat/completions", "/v1/files/{id}", "/v1/files*", "/v1/chat/*", "/*", "*", "/api/chat", "/metrics"]
        {
            assert_eq!(pattern_fault(good), None, "{good}");
        }
        for (alias, label) in [
            ("/api/tags", "/v1/models"),
            ("/api/version", "/version"),
            ("/v2/rerank", "/v1/rerank"),
            ("/v1/models/m", "/v1/models/{id}"),
            ("/v1/models/m:generateContent", "/v1beta/models/{model}:generateContent"),
        ] {
            let said = pattern_fault(alias).expect(alias);
            assert!(said.contains(&format!("counts as \"{label}\"")), "{said}");
        }
        for bad in ["/nothing", "/v1/chat/completion", "/v1/fils*", "/V1/models"] {
            assert!(pattern_fault(bad).is_some_and(|said| said.contains("is no route")), "{bad}");
        }
    }

    /// The reference of authentication lists every label that a scope can name, and every URL that counts under another label.
    #[test]
    fn the_reference_lists_every_label() {
        let place = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/authentication.md");
        let page = std::fs::read_to_string(place).expect(place);
        let fixed = examples().into_iter().map(|(_, url)| url).filter(|url| Route::parse(&Method::GET, url).is_ok());
        let aliases = fixed.filter(|url| ["/api/", "/v1beta/models"].iter().any(|start| url.starts_with(start)));
        let names = labels().into_iter().map(str::to_owned).chain(aliases.filter(|url| !url.ends_with("/m")));
        let missing: Vec<_> = names.filter(|name| !page.contains(&format!("`{name}`"))).collect();
        assert!(missing.is_empty(), "{missing:?} are not in {place}");
    }

    #[test]
    fn routes_are_exact() {
        check("POST", "/v1/chat/completions", Ok(Route::Ask(Ask::new(Surface::Chat))));
        check("POST", "/v1/chat/completions?api-version=1", Ok(Route::Ask(Ask::new(Surface::Chat))));
        check("POST", "/v1/messages?beta=true", Ok(Route::Ask(Ask::new(Surface::Messages))));
        check("POST", "/v1/messages/count_tokens", Ok(Route::Count(Ask::new(Surface::CountTokens))));
        check("POST", "/v1/responses", Ok(Route::Ask(Ask::new(Surface::Responses))));
        check("POST", "/v1/responses/input_tokens", Ok(Route::Count(Ask::count(Surface::Responses))));
        check("GET", "/v1/responses/input_tokens", Err(405));
        check("POST", "/v1/embeddings", Ok(Route::Ask(Ask::new(Surface::Embeddings))));
        for path in ["/v1/rerank", "/v2/rerank", "/rerank"] {
            check("POST", path, Ok(Route::Ask(Ask::new(Surface::Rerank))));
        }
        for path in ["/v1/score", "/score"] {
            check("POST", path, Ok(Route::Ask(Ask::new(Surface::Score))));
        }
        check("HEAD", "/health", Ok(Route::Health));
        check("GET", "/v1/models/org%2Fname", Ok(Route::Model("org/name".into())));
        check("GET", "/v1/models/org/name", Ok(Route::Model("org/name".into())));
        check("PUT", "/v1/chat/completions", Err(405));
        check("POST", "/metrics", Err(405));
        check("PROPFIND", "/metrics", Err(405));
        for path in [
            "/",
            "/v1",
            "/V1/models",
            "/v1/models/",
            "//v1/models",
            "/v1/./models",
            "/v1/models/%00",
            "/%76%31/models",
            "*",
        ] {
            check("GET", path, Err(404));
        }
    }
}
