//! `[[jwt]]`: issuers of tokens, and the rights of their users.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::identity;
use super::raw::Reader;
use penstock_auth::jwt::algorithm;
use penstock_auth::{IssuerConfig, KeySource, Team};

/// Reads one `[[jwt]]` table; `None` after a fault, which the document has recorded.
pub(super) fn issuer(table: &Reader<'_, '_>) -> Option<IssuerConfig> {
    let (id, issuer, audiences) = (identity::id(table), table.text("issuer"), table.texts("audience"));
    if issuer.is_none() {
        table.fault("issuer", "is missing: what the claim iss of its tokens is");
    }
    if audiences.is_empty() {
        table.fault("audience", "is missing: without it, tokens for every other service would be good here");
    }
    let source = source(table, issuer.as_deref());
    let algorithms = table.texts("algorithms");
    let known: Vec<_> = algorithms.iter().filter_map(|name| algorithm(name)).collect();
    if known.is_empty() || known.len() != algorithms.len() {
        let message =
            "must be some of RS256, RS384, RS512, PS256, PS384, PS512, ES256, ES384, EdDSA (never none, never HMAC)";
        table.fault("algorithms", message);
    }
    let out = IssuerConfig {
        id: id.unwrap_or_default(),
        issuer: issuer.unwrap_or_default(),
        audiences,
        source: source?,
        ca_file: table.text("ca_file").map(PathBuf::from),
        algorithms: known,
        stale: Duration::from_secs(table.number("stale_hours", 1..=720) * 3600),
        user_claim: table.text("user_claim").unwrap_or_default(),
        team_claim: table.text("team_claim"),
        teams: table.map("teams"),
        team: table.text("team"),
        team_required: table.flag("team_required"),
        models_claim: table.text("models_claim"),
        limits_claim: table.text("limits_claim"),
        required: table.map("required"),
        scope: Arc::new(identity::scope(table)),
        limits: table.texts("limits"),
    };
    Some(out)
}

/// Source of the issuer's keys: `jwks_url`, `jwks_file`, or discovery from `issuer`.
fn source(table: &Reader<'_, '_>, issuer: Option<&str>) -> Option<KeySource> {
    let (url, file) = (table.text("jwks_url"), table.text("jwks_file"));
    let (name, url) = match (url, file) {
        (Some(_), Some(_)) => {
            table.fault("jwks_file", "stands instead of jwks_url");
            return None;
        }
        (None, Some(file)) => {
            let read = penstock_auth::jwt::file(file.as_ref()).map(drop);
            return read
                .map_err(|error| table.fault("jwks_file", format!("{file}: {error}")))
                .ok()
                .map(|()| KeySource::File(file.into()));
        }
        (Some(url), None) => ("jwks_url", url),
        (None, None) => ("issuer", format!("{}/.well-known/openid-configuration", issuer?.trim_end_matches('/'))),
    };
    match IssuerConfig::place(&url) {
        Ok(_) if name == "issuer" => Some(KeySource::Discovery(url)),
        Ok(_) => Some(KeySource::Url(url)),
        Err(message) => {
            let help = if name == "issuer" { " (or give jwks_url or jwks_file)" } else { "" };
            table.fault(name, format!("{message}{help}"));
            None
        }
    }
}

/// Checks that issuers are unique and that the teams they name exist in `[[teams]]`.
pub(super) fn check(document: &super::raw::Document<'_>, issuers: &[IssuerConfig], teams: &[Team]) {
    for (at, issuer) in issuers.iter().enumerate() {
        if issuers[..at].iter().any(|other| other.issuer == issuer.issuer) {
            document.fault_at("jwt", "issuer", format!("{:?} is used twice", issuer.issuer));
        }
        if teams.is_empty() {
            // Without [[teams]], all teams may be in the store.
            continue;
        }
        let named = issuer.teams.iter().map(|(_, team)| team).chain(&issuer.team);
        for team in named.filter(|team| teams.iter().all(|have| have.id != **team)) {
            document.fault_at("jwt", "teams", format!("{team:?} of {:?} is not one of [[teams]]", issuer.id));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{Overrides, Snapshot, load};
    use penstock_auth::KeySource;

    fn read(text: &str) -> Result<Snapshot, String> {
        load(Some(("p.toml", text)), &Overrides::default(), &|_| None).map_err(|faults| faults.to_string())
    }

    #[test]
    fn three_lines_are_enough() {
        let snapshot =
            read("[[jwt]]\nid = \"corp\"\nissuer = \"https://idp.example/realms/a/\"\naudience = [\"penstock\"]\n");
        let snapshot = snapshot.expect("valid");
        let [issuer] = snapshot.auth.issuers.as_slice() else { panic!("one") };
        let url = "https://idp.example/realms/a/.well-known/openid-configuration";
        assert_eq!(issuer.source, KeySource::Discovery(url.into()));
        assert_eq!((issuer.algorithms.len(), issuer.user_claim.as_str()), (3, "sub"));
    }

    #[test]
    fn faults_are_named() {
        let good = "id = \"a\"\nissuer = \"https://i.example\"\naudience = [\"p\"]\n";
        for (text, part) in [
            ("id = \"a\"\naudience = [\"p\"]".to_owned(), "issuer: is missing"),
            ("id = \"a\"\nissuer = \"https://i.example\"".to_owned(), "audience: is missing"),
            ("id = \"a\"\nissuer = \"http://i.example\"\naudience = [\"p\"]".to_owned(), "must be https"),
            (format!("{good}algorithms = [\"none\"]"), "never none"),
            (format!("{good}algorithms = [\"RS256\", \"HS256\"]"), "never HMAC"),
            (format!("{good}jwks_url = \"http://i.example/keys\""), "must be https"),
            (format!("{good}jwks_url = \"ftp://i.example/keys\""), "must begin with"),
            (format!("{good}jwks_file = \"/nonexistent/keys\""), "No such file"),
            (format!("{good}jwks_file = \"/x\"\njwks_url = \"https://x/\""), "instead of"),
            (format!("{good}[[jwt]]\n{}", good.replace("\"a\"", "\"b\"")), "is used twice"),
            (format!("{good}team = \"x\"\n[[teams]]\nid = \"y\""), "is not one of [[teams]]"),
        ] {
            let faults = read(&format!("[[jwt]]\n{text}\n")).expect_err(&text);
            assert!(faults.contains(part), "{part:?} in {faults}");
        }
        assert!(
            read(&format!("[[jwt]]\n{good}jwks_url = \"http://127.0.0.1:1/keys?a=b\"\n")).is_ok(),
            "loopback may be plain"
        );
    }
}
