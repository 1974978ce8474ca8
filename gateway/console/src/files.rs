//! Files of the console, embedded in the binary: packed once, served with a strict policy.
//!
//! The page itself is asked for again each time (`no-cache`, `ETag`); all that it loads lies below a folder whose name is a digest of
//! all files, so browsers keep those for ever and never mix two versions.

use std::io::Write;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header};
use sha2::{Digest, Sha256};

/// Path of the console's page.
pub const HOME: &str = "/console/";

/// Content security policy of everything that the console serves: its own origin, and nothing else.
pub const CSP: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
     frame-ancestors 'none'; base-uri 'none'; form-action 'self'";

/// Placeholder in the page for the folder of the other files.
const FOLDER: &str = "{{folder}}";

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

macro_rules! sources {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_bytes!(concat!("../assets/", $name)))),*]
    };
}

/// Page that loads the others.
const PAGE: &[u8] = include_bytes!("../assets/index.html");

/// Every other file.
const SOURCES: &[(&str, &[u8])] = sources![
    "app.css",
    "app.js",
    "api.js",
    "charts.js",
    "dom.js",
    "icon.svg",
    "views/audit.js",
    "views/batches.js",
    "views/config.js",
    "views/decisions.js",
    "views/keys.js",
    "views/live.js",
    "views/models.js",
    "views/playground.js",
    "views/plugins.js",
    "views/requests.js",
    "views/snippets.js",
    "views/usage.js",
];

struct File {
    kind: &'static str,
    plain: Bytes,
    packed: Bytes,
    tag: HeaderValue,
    is_page: bool,
}

impl File {
    fn new(kind: &'static str, plain: Bytes, is_page: bool) -> Self {
        let tag = HeaderValue::try_from(format!("\"{}\"", hex(&plain))).unwrap_or(HeaderValue::from_static("\"\""));
        Self { kind, packed: packed(&plain), plain, tag, is_page }
    }
}

/// Files of the console, packed and ready to be served.
pub struct Files {
    page: File,
    folder: String,
    others: Vec<(&'static str, File)>,
}

impl Default for Files {
    fn default() -> Self {
        let mut all = Sha256::new();
        for (name, content) in SOURCES.iter().chain([&("index.html", PAGE)]) {
            all.update(Sha256::digest(name));
            all.update(Sha256::digest(content));
        }
        let folder: String = all.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let page = String::from_utf8_lossy(PAGE).replace(FOLDER, &folder);
        let others = SOURCES.iter().map(|(name, content)| {
            let kind = match name.rsplit_once('.') {
                Some((_, "js")) => SCRIPT,
                Some((_, "css")) => "text/css; charset=utf-8",
                _ => "image/svg+xml",
            };
            (*name, File::new(kind, Bytes::from_static(content), false))
        });
        Self { page: File::new(HTML, page.into(), true), folder, others: others.collect() }
    }
}

impl Files {
    /// Answer to a request for `path` below [`HOME`]; the empty path is the page.
    #[must_use]
    pub fn answer(&self, method: &Method, path: &str, headers: &HeaderMap) -> Response<Bytes> {
        if !matches!(*method, Method::GET | Method::HEAD) {
            let mut response = guarded(Response::new(Bytes::new()));
            *response.status_mut() = StatusCode::METHOD_NOT_ALLOWED;
            response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
            return response;
        }
        let Some(file) = self.find(path) else {
            let mut response = guarded(Response::new(Bytes::from_static(b"There is no such file in the console.\n")));
            *response.status_mut() = StatusCode::NOT_FOUND;
            let kind = HeaderValue::from_static("text/plain; charset=utf-8");
            response.headers_mut().insert(header::CONTENT_TYPE, kind);
            return response;
        };
        let is_known = all(headers, header::IF_NONE_MATCH).any(|tag| tag == file.tag || tag == "*");
        let takes_gzip = all(headers, header::ACCEPT_ENCODING).any(|one| {
            let (name, weight) = one.split_once(';').unwrap_or((one, ""));
            let is_refused = weight.trim().strip_prefix("q=").is_some_and(|weight| weight.parse() == Ok(0.0_f32));
            matches!(name.trim(), "gzip" | "*") && !is_refused
        });
        let body = if takes_gzip { &file.packed } else { &file.plain };
        let mut response = guarded(Response::new(if is_known { Bytes::new() } else { body.clone() }));
        let fields = response.headers_mut();
        fields.insert(header::CONTENT_TYPE, HeaderValue::from_static(file.kind));
        fields.insert(header::ETAG, file.tag.clone());
        fields.insert(header::VARY, HeaderValue::from_static("accept-encoding"));
        let keep = if file.is_page { "no-cache" } else { "public, max-age=31536000, immutable" };
        fields.insert(header::CACHE_CONTROL, HeaderValue::from_static(keep));
        if is_known {
            *response.status_mut() = StatusCode::NOT_MODIFIED;
        } else if takes_gzip {
            fields.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        }
        response
    }

    fn find(&self, path: &str) -> Option<&File> {
        if path.is_empty() {
            return Some(&self.page);
        }
        let name = path.strip_prefix(&self.folder)?.strip_prefix('/')?;
        self.others.iter().find(|(other, _)| *other == name).map(|(_, file)| file)
    }
}

/// Values of a field that is a list.
fn all(headers: &HeaderMap, name: header::HeaderName) -> impl Iterator<Item = &str> {
    let fields = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    fields.flat_map(|field| field.split(',')).map(str::trim)
}

/// Response with the fields that keep others' scripts, frames and guesses away.
fn guarded(mut response: Response<Bytes>) -> Response<Bytes> {
    let fields = [
        ("content-security-policy", CSP),
        ("x-content-type-options", "nosniff"),
        ("x-frame-options", "DENY"),
        ("referrer-policy", "no-referrer"),
        ("cross-origin-opener-policy", "same-origin"),
        ("cross-origin-resource-policy", "same-origin"),
        ("permissions-policy", "camera=(), microphone=(), geolocation=(), payment=(), usb=()"),
    ];
    for (name, value) in fields {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

fn hex(content: &[u8]) -> String {
    Sha256::digest(content).iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

fn packed(plain: &[u8]) -> Bytes {
    let mut out = GzEncoder::new(Vec::new(), Compression::best());
    // A vector takes everything.
    let packed = out.write_all(plain).and_then(|()| out.finish());
    packed.unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// Most bytes of all files together, packed.
    const PACKED_MAX: usize = 250_000;

    fn get(files: &Files, path: &str, fields: &[(&'static str, &str)]) -> Response<Bytes> {
        let fields = fields.iter().map(|(name, value)| {
            (header::HeaderName::from_static(name), HeaderValue::from_str(value).expect("a value"))
        });
        files.answer(&Method::GET, path, &fields.collect())
    }

    #[test]
    fn the_page_is_strict_and_asked_for_each_time() {
        let files = Files::default();
        let page = get(&files, "", &[]);
        let field = |name: &str| page.headers()[name].to_str().expect("text").to_owned();
        assert_eq!((page.status(), field("content-type").as_str()), (StatusCode::OK, HTML));
        assert_eq!(field("cache-control"), "no-cache");
        assert_eq!(field("content-security-policy"), CSP);
        for part in ["default-src 'none'", "script-src 'self';", "frame-ancestors 'none'", "form-action 'self'"] {
            assert!(CSP.contains(part), "{part}");
        }
        assert!(!CSP.contains("unsafe") && !CSP.contains("http"), "{CSP}");
        assert_eq!(
            ["x-content-type-options", "referrer-policy", "x-frame-options"].map(field),
            ["nosniff", "no-referrer", "DENY"]
        );
        let tag = page.headers()["etag"].to_str().expect("text");
        let again = get(&files, "", &[("if-none-match", &format!("\"x\", {tag}"))]);
        assert_eq!((again.status(), again.body().len()), (StatusCode::NOT_MODIFIED, 0));
        assert!(again.headers().contains_key("content-security-policy"));
    }

    #[test]
    fn everything_that_the_page_names_is_there_and_kept() {
        let files = Files::default();
        let page = String::from_utf8(get(&files, "", &[]).body().to_vec()).expect("text");
        assert!(!page.contains(FOLDER));
        let mut named = 0;
        for path in page.split('"').filter_map(|part| part.strip_prefix(HOME)).filter(|path| !path.is_empty()) {
            let answer = get(&files, path, &[("accept-encoding", "br, gzip;q=0.8")]);
            assert_eq!(answer.status(), StatusCode::OK, "{path}");
            assert_eq!(answer.headers()["cache-control"], "public, max-age=31536000, immutable");
            assert_eq!(answer.headers()["content-encoding"], "gzip");
            let mut plain = Vec::new();
            flate2::read::GzDecoder::new(&answer.body()[..]).read_to_end(&mut plain).expect("gzip");
            assert_eq!(plain, get(&files, path, &[("accept-encoding", "gzip;q=0, br")]).body().to_vec());
            named += 1;
        }
        assert_eq!(named, SOURCES.len(), "each file is loaded by the page itself, at once");
    }

    #[test]
    fn nothing_else_is_there() {
        let files = Files::default();
        let folder = files.folder.clone();
        let odd = ["app.js", "../app.js", "%2e%2e/app.js", "/", "index.html", "0000000000000000/app.js"];
        for path in odd.map(str::to_owned).into_iter().chain(
            ["", "/", "/../app.js", "/views/../app.js", "/app.js/", "/APP.JS", "/app.js%00", "//app.js"]
                .map(|end| format!("{folder}{end}")),
        ) {
            assert_eq!(get(&files, &path, &[]).status(), StatusCode::NOT_FOUND, "{path}");
        }
        let post = files.answer(&Method::POST, "", &HeaderMap::new());
        assert_eq!(
            (post.status(), &post.headers()["allow"]),
            (StatusCode::METHOD_NOT_ALLOWED, &HeaderValue::from_static("GET, HEAD"))
        );
    }

    #[test]
    fn the_files_are_small() {
        let files = Files::default();
        let all = files.others.iter().map(|(_, file)| file).chain([&files.page]);
        let bytes: usize = all.map(|file| file.packed.len()).sum();
        assert!(bytes <= PACKED_MAX, "{bytes} bytes packed, {PACKED_MAX} at most");
        println!("{bytes} bytes packed");
    }

    /// Text from outside reaches the page as text alone: nothing in the sources can turn it into markup or code.
    #[test]
    fn nothing_writes_markup_or_runs_text() {
        let banned = [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "setTimeout(\"",
            "setTimeout('",
            "createContextualFragment",
            "DOMParser",
            "srcdoc",
            "javascript:",
            "setHTML",
            "http://",
            "https://",
            "style=\"",
        ];
        // The name of the SVG namespace, which nobody fetches.
        let allowed = "http://www.w3.org/2000/svg";
        let mut faults = Vec::new();
        for (name, content) in SOURCES.iter().chain([&("index.html", PAGE)]) {
            let text = std::str::from_utf8(content).expect("text");
            for (at, line) in text.lines().enumerate() {
                let line = line.replace(allowed, "");
                let found = banned.iter().filter(|word| line.contains(**word));
                faults.extend(found.map(|word| format!("{name}:{}: {word}", at + 1)));
                if line.chars().count() > 160 {
                    faults.push(format!("{name}:{}: longer than 160", at + 1));
                }
            }
        }
        assert_eq!(faults, Vec::<String>::new());
        let page = std::str::from_utf8(PAGE).expect("text");
        assert!(page.match_indices("<script").all(|(at, _)| page[at..].starts_with("<script type=\"module\" src=")));
        assert!(!page.contains(" on") || !page.contains("=\"return"), "no handlers in the markup");
    }
}
