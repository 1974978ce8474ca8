//! Tables of authentication: `[auth]`, `[[keys]]`, `[[teams]]`.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use penstock_govern::Scope;

use super::raw::{Document, Reader};
use super::snapshot::TlsFiles;
use penstock_auth::route::pattern_fault;
use penstock_auth::{Anonymous, AuthConfig, DIALECTS, Digest, Key, PepperSource, Proof, Team};
use penstock_base::Secret;

type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Largest weight of a key or team in fair sharing.
const WEIGHT_MAX: u64 = 1000;

/// Reads the tables `[auth]` and `[[jwt]]`, with the pepper's source and the trusted proxies.
pub(super) fn auth(document: &Document<'_>, env: Env<'_>, keys: Vec<Key>, teams: Vec<Team>) -> AuthConfig {
    let table = &document.table("auth");
    let anonymous = match table.text("anonymous").as_deref() {
        Some("auto") | None => Anonymous::Auto,
        Some("allow") => Anonymous::Allow,
        Some("deny") => Anonymous::Deny,
        Some(other) => {
            table.fault("anonymous", format!("{other:?} is none of auto, allow, deny"));
            Anonymous::Auto
        }
    };
    let stale = table.number("stale_minutes", 0..=525_600);
    AuthConfig {
        anonymous,
        pepper: pepper(table, env),
        stale: (stale > 0).then(|| Duration::from_secs(stale * 60)),
        issuers: document.tables("jwt").iter().filter_map(super::jwt::issuer).collect(),
        failures_per_minute: table.number("failures_per_minute", 0..=1_000_000) as u32,
        trusted_proxies: networks(table, "trusted_proxies"),
        keys,
        teams,
    }
}

fn pepper(table: &Reader<'_, '_>, env: Env<'_>) -> PepperSource {
    let (file, variable) = (table.text("pepper_file"), table.text("pepper_env"));
    if file.is_some() && variable.is_some() {
        table.fault("pepper_env", "stands instead of pepper_file");
    }
    let (name, source) = match (file, variable) {
        (Some(file), _) => ("pepper_file", PepperSource::File(file.into())),
        (None, Some(variable)) => match env(&variable) {
            Some(value) => ("pepper_env", PepperSource::Given(Secret::new(value))),
            None => {
                table.unset("pepper_env", &variable);
                return PepperSource::State;
            }
        },
        (None, None) => return PepperSource::State,
    };
    if let Err(error) = source.check() {
        table.fault(name, error);
    }
    source
}

/// Reads one `[[teams]]` table; `None` after a fault, which the document has recorded.
pub(super) fn team(table: &Reader<'_, '_>) -> Option<Team> {
    let (id, scope, limits) = (id(table), scope(table), table.texts("limits"));
    Some(Team { id: id?, scope: Arc::new(scope), limits, weight: table.number("weight", 1..=WEIGHT_MAX) as u32 })
}

/// Reads one `[[keys]]` table with its proof; `None` after a fault, which the document has recorded.
pub(super) fn key(table: &Reader<'_, '_>, env: Env<'_>) -> Option<Key> {
    let (id, proof, scope) = (id(table), proof(table, env), scope(table));
    let (team, user, limits) = (table.text("team"), table.text("user"), table.texts("limits"));
    let weight = table.number("weight", 0..=WEIGHT_MAX) as u32;
    Some(Key { id: id?, proof: proof?, scope: Arc::new(scope), team, user, limits, weight })
}

/// Checks references between the tables: keys to teams, certificates to `client_ca`, issuers to teams.
pub(super) fn check(document: &Document<'_>, auth: &AuthConfig, tls: Option<&TlsFiles>) {
    super::jwt::check(document, &auth.issuers, &auth.teams);
    for key in &auth.keys {
        if matches!(key.proof, Proof::Certificate(_)) && tls.is_none_or(|tls| tls.client_ca.is_none()) {
            document.fault_at("keys", "certificate", format!("key {:?} needs server.tls.client_ca", key.id));
        }
        if let Some(team) = key.team.as_ref().filter(|team| auth.teams.iter().all(|have| have.id != **team)) {
            document.fault_at("keys", "team", format!("{team:?} of key {:?} is not one of [[teams]]", key.id));
        }
    }
}

/// Reads an id that is safe in logs, labels and tenant names. A colon is reserved for the tenants of token users.
pub(super) fn id(table: &Reader<'_, '_>) -> Option<String> {
    let id = table.text("id");
    match &id {
        None => table.fault("id", "is missing"),
        Some(id) if id.len() > 128 || id.chars().any(|c| c.is_control() || c == ':') => {
            table.fault("id", "must have at most 128 bytes, without a colon");
        }
        Some(id) if id.starts_with("key_") => table.fault("id", "key_ is how issued keys begin"),
        Some(_) => {}
    }
    id
}

fn proof(table: &Reader<'_, '_>, env: Env<'_>) -> Option<Proof> {
    let Some(name) = table.text("certificate") else {
        return digest(table, env).map(|digest| Proof::Digest(Digest(digest)));
    };
    if ["digest", "key_env", "key_file"].iter().any(|other| table.has(other)) {
        table.fault("certificate", "stands instead of digest, key_env and key_file");
    }
    Some(Proof::Certificate(name))
}

/// Digest of a key that is given as a digest, an environment variable or a file; exactly one of the three.
pub(super) fn digest(table: &Reader<'_, '_>, env: Env<'_>) -> Option<[u8; 32]> {
    let (digest, variable, file) = (table.text("digest"), table.text("key_env"), table.text("key_file"));
    let (digest, name, fault) = match (digest, variable, file) {
        (Some(digest), None, None) => {
            (hex32(&digest), "digest", "must be 64 hex digits: printf %s \"$KEY\" | sha256sum".to_owned())
        }
        (None, Some(variable), None) => {
            // A key that nobody compares still has to be there: other tables name its id.
            let stand_in = || (!table.needs_variables()).then(|| Digest::of(variable.as_bytes()));
            let digest = secret(env(&variable)).or_else(stand_in);
            (digest, "key_env", format!("the environment variable {variable} is not set or empty"))
        }
        (None, None, Some(file)) => {
            (secret(std::fs::read_to_string(&file).ok()), "key_file", format!("{file} cannot be read or is empty"))
        }
        _ => (None, "digest", "exactly one of digest, key_env and key_file is needed".to_owned()),
    };
    if digest.is_none() {
        table.fault(name, fault);
    }
    digest.map(|digest| digest.0)
}

/// Reads the five fields of a scope.
pub(super) fn scope(table: &Reader<'_, '_>) -> Scope {
    let dialects = table.texts("dialects");
    if let Some(other) = dialects.iter().find(|name| !DIALECTS.contains(&name.as_str())) {
        table.fault("dialects", format!("{other:?} is none of {}", DIALECTS.join(", ")));
    }
    let routes = table.texts("routes");
    if let Some(other) = routes.iter().find(|route| !route.starts_with('/') && *route != "*") {
        table.fault(
            "routes",
            format!("{other:?} is no route: they begin with a slash, as /v1/chat/completions or /v1/files*"),
        );
    } else {
        patterns(table, &routes);
    }
    Scope {
        models: table.texts("models"),
        routes,
        dialects,
        addresses: networks(table, "addresses"),
        expires: table.moment("expires"),
    }
}

/// Checks that every pattern of the key `routes` matches a route: another one would let nothing through, or keep nothing out.
pub(super) fn patterns(table: &Reader<'_, '_>, routes: &[String]) {
    routes.iter().filter_map(|route| pattern_fault(route)).for_each(|fault| table.fault("routes", fault));
}

/// Reads a list of networks or single addresses.
fn networks(table: &Reader<'_, '_>, name: &'static str) -> Vec<IpNet> {
    let parsed = |text: &String| {
        let net = text.parse().ok().or_else(|| text.parse().ok().map(|address: IpAddr| address.into()));
        if net.is_none() {
            table.fault(name, format!("{text:?} is neither an address nor a network as 10.0.0.0/8"));
        }
        net
    };
    table.texts(name).iter().filter_map(parsed).collect()
}

fn secret(text: Option<String>) -> Option<Digest> {
    let text = text?;
    let key = text.trim();
    (!key.is_empty()).then(|| Digest::of(key.as_bytes()))
}

fn hex32(text: &str) -> Option<Digest> {
    let mut out = [0; 32];
    if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    for (at, byte) in out.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(Digest(out))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Overrides, Snapshot, load};

    fn read(text: &str) -> Result<Snapshot, String> {
        let env = |name: &str| (name == "SET").then(|| "secret".to_owned());
        load(Some(("p.toml", text)), &Overrides::default(), &env).map_err(|faults| faults.to_string())
    }

    #[test]
    fn secrets_come_from_outside() {
        let snapshot = read("[[keys]]\nid = \"a\"\nkey_env = \"SET\"\n").expect("valid");
        assert_eq!(snapshot.auth.keys[0].proof, Proof::Digest(Digest::of(b"secret")));
        assert!(!format!("{snapshot:?}").contains("2bb80d537b1da3e3"), "digests are not shown");
    }

    #[test]
    fn a_scope_has_all_its_parts() {
        let text = "[[teams]]\nid = \"t\"\nmodels = [\"chat-*\"]\n[[keys]]\nid = \"a\"\nkey_env = \"SET\"\nteam = \"t\"\nroutes = [\"/v1/*\"]\n\
                    dialects = [\"openai\"]\naddresses = [\"10.0.0.0/8\", \"::1\"]\nexpires = 2027-01-01\nlimits = [\"x\"]\nuser = \"u\"\n[[limits]]\nid = \"x\"\nin_flight = 1\n";
        let snapshot = read(text).expect("valid");
        let key = &snapshot.auth.keys[0];
        assert_eq!(key.scope.expires, Some(1_798_761_600));
        assert_eq!(key.scope.addresses.len(), 2);
        assert_eq!((key.team.as_deref(), key.user.as_deref(), key.limits.len()), (Some("t"), Some("u"), 1));
        assert_eq!((key.weight, snapshot.auth.teams[0].weight), (0, 1));
    }

    #[test]
    fn faults_are_named() {
        for (text, part) in [
            ("dialects = [\"soap\"]", "none of openai"),
            ("routes = [\"chat\"]", "begin with a slash"),
            ("routes = [\"/v1/fils*\"]", "is no route"),
            ("routes = [\"/v1/models\", \"/api/tags\"]", "counts as \"/v1/models\""),
            ("addresses = [\"10.0.0.0/33\"]", "neither an address"),
            ("expires = \"soon\"", "no moment"),
            ("expires = 12:00:00", "no moment"),
            ("team = \"none\"", "is not one of [[teams]]"),
            ("certificate = \"x\"", "stands instead of"),
        ] {
            let faults = read(&format!("[[keys]]\nid = \"a\"\nkey_env = \"SET\"\n{text}\n")).expect_err(text);
            assert!(faults.contains(part), "{part:?} in {faults}");
        }
        assert!(read("[[keys]]\nid = \"a:b\"\nkey_env = \"SET\"\n").expect_err("a colon").contains("colon"));
        assert!(read("[auth]\nanonymous = \"maybe\"\n").expect_err("no").contains("none of auto"));
        assert!(read("[auth]\ntrusted_proxies = [\"x\"]\n").expect_err("no").contains("neither"));
    }
}
