//! `[admin.oidc]`: sign-in at the web console with an identity provider.

use std::path::PathBuf;
use std::time::Duration;

use penstock_auth::IssuerConfig;
use penstock_auth::jwt::{ClientAuth, Provider, RESERVED, algorithm};
use penstock_base::Secret;

use super::admin::Role;
use super::raw::Reader;

/// Seconds that a look at the groups may take: a session does not end while the provider is being asked for the first time.
const LOOK_SECONDS: u64 = 30;

/// Begin of the names of people who have signed in with the identity provider, in audit and ledger.
pub const OIDC: &str = "oidc:";

/// Sign-in with an identity provider, and the roles of its groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OidcConfig {
    /// Provider, and the gateway's registration there.
    pub provider: Provider,
    /// Name of the provider on the sign-in page.
    pub name: String,
    /// Roles by group.
    pub roles: Vec<(String, Role)>,
    /// Role of people who are in none of the groups; `None`: they are refused.
    pub default_role: Option<Role>,
    /// URL of the console that the provider sends people back to; `None`: the one that the person has opened.
    pub redirect_url: Option<String>,
    /// Longest time of a session.
    pub session: Duration,
    /// Longest time between two looks at the groups of a session; `None`: the groups of the sign-in are believed.
    pub refresh: Option<Duration>,
    /// Time since the provider last named the groups after which a session ends, while the provider gives no answer.
    pub stale: Duration,
    /// True if who signs out here is led to the provider to sign out there.
    pub sign_out: bool,
    /// Ids of the limits on what these people ask models at the console.
    pub limits: Vec<String>,
}

impl OidcConfig {
    /// Highest role of the groups and of everybody; `None`: there is none.
    #[must_use]
    pub fn role(&self, groups: &[String]) -> Option<Role> {
        let named = self.roles.iter().filter(|(group, _)| groups.contains(group)).map(|(_, role)| *role);
        named.chain(self.default_role).max()
    }
}

/// Reads the table; `None` without an issuer, or after a fault, which the document has recorded.
pub(super) fn read(table: &Reader<'_, '_>, env: &dyn Fn(&str) -> Option<String>) -> Option<OidcConfig> {
    let issuer = table.text("issuer");
    let (client_id, client_secret) = (table.text("client_id"), secret(table, env));
    let scopes = table.texts("scopes");
    let groups_claim = table.text("groups_claim").unwrap_or_default();
    let (roles, default_role) = (roles(table), default_role(table));
    let (client_auth, parameters, required) = (client_auth(table), parameters(table), table.map("required"));
    let redirect_url = table.text("redirect_url");
    let algorithms = table.texts("algorithms");
    let (ca_file, limits) = (table.text("ca_file").map(PathBuf::from), table.texts("limits"));
    let session = Duration::from_secs(table.number("session_minutes", 5..=720) * 60);
    let refresh_seconds = table.number("refresh_seconds", 0..=7200);
    let stale_seconds = table.number("refresh_stale_seconds", 5..=43_200);
    let sign_out = table.flag("sign_out_there");
    let name = table.text("name");
    let Some(issuer) = issuer else {
        if client_id.is_some() || !roles.is_empty() {
            table.fault("issuer", "is missing: without it nobody signs in with an identity provider");
        }
        return None;
    };
    let known: Vec<_> = algorithms.iter().filter_map(|name| algorithm(name)).collect();
    if known.is_empty() || known.len() != algorithms.len() {
        table.fault("algorithms", "must be some of those of [[jwt]] (never none, never HMAC)");
    }
    if client_id.is_none() {
        table.fault("client_id", "is missing: the id under which the gateway is registered at the provider");
    }
    if roles.is_empty() && default_role.is_none() {
        table.fault("roles", "is missing: without it nobody has a role, as { \"penstock-admins\" = \"owner\" }");
    }
    if (1..5).contains(&refresh_seconds) {
        table.fault("refresh_seconds", "must be 0 (never) or at least 5");
    }
    if refresh_seconds > 0 && stale_seconds < refresh_seconds + LOOK_SECONDS {
        table.fault("refresh_stale_seconds", format!("must not be less than refresh_seconds and {LOOK_SECONDS} more"));
    }
    if !scopes.iter().any(|scope| scope == "openid") {
        table.fault("scopes", "openid must be among them: without it there is no ID token");
    }
    if let Some(url) = &redirect_url {
        match IssuerConfig::place(url) {
            Ok((_, path)) if path == "/console/" => {}
            Ok(_) => table.fault("redirect_url", format!("{url:?} must end with /console/ behind its host")),
            Err(why) => table.fault("redirect_url", why),
        }
    }
    let client_id = client_id.unwrap_or_default();
    let algorithms = known;
    let provider = Provider {
        issuer,
        client_id,
        client_secret,
        client_auth,
        scopes,
        parameters,
        groups_claim,
        required,
        algorithms,
        ca_file,
    };
    if let Err(why) = IssuerConfig::place(&provider.discovery()) {
        table.fault("issuer", why);
    }
    let host = provider.issuer.split('/').nth(2).unwrap_or_default();
    let name = name.unwrap_or_else(|| host.to_owned());
    let refresh = (refresh_seconds > 0).then(|| Duration::from_secs(refresh_seconds));
    let stale = Duration::from_secs(stale_seconds);
    Some(OidcConfig { provider, name, roles, default_role, redirect_url, session, refresh, stale, sign_out, limits })
}

fn default_role(table: &Reader<'_, '_>) -> Option<Role> {
    let name = table.text("default_role")?;
    let role = Role::parse(&name);
    if role.is_none() {
        table.fault("default_role", format!("{name:?} is not a role: viewer, operator, owner"));
    }
    role
}

fn client_auth(table: &Reader<'_, '_>) -> Option<ClientAuth> {
    let name = table.text("client_auth")?;
    let auth = ClientAuth::parse(&name);
    if auth.is_none() {
        table.fault("client_auth", format!("{name:?} is neither client_secret_basic nor client_secret_post"));
    }
    auth
}

fn parameters(table: &Reader<'_, '_>) -> Vec<(String, String)> {
    let parameters = table.map("parameters");
    for (name, _) in &parameters {
        if RESERVED.contains(&name.as_str()) {
            table.fault("parameters", format!("{name} is set by the gateway"));
        }
    }
    parameters
}

fn roles(table: &Reader<'_, '_>) -> Vec<(String, Role)> {
    let role = |(group, name): (String, String)| match Role::parse(&name) {
        Some(role) => Some((group, role)),
        None => {
            table.fault("roles", format!("{name:?} is not a role: viewer, operator, owner"));
            None
        }
    };
    table.map("roles").into_iter().filter_map(role).collect()
}

fn secret(table: &Reader<'_, '_>, env: &dyn Fn(&str) -> Option<String>) -> Option<Secret> {
    let (name, text, place) = match (table.text("client_secret_env"), table.text("client_secret_file")) {
        (None, None) => return None,
        (Some(_), Some(_)) => {
            table.fault("client_secret_file", "stands instead of client_secret_env");
            return None;
        }
        (Some(variable), None) if env(&variable).is_none() && !table.needs_variables() => return None,
        (Some(variable), None) => ("client_secret_env", env(&variable), variable),
        (None, Some(file)) => ("client_secret_file", std::fs::read_to_string(&file).ok(), file),
    };
    let text = text.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
    if text.is_none() {
        table.fault(name, format!("{place} is not there or empty"));
    }
    text.map(Secret::new)
}

#[cfg(test)]
mod tests {
    use super::super::{Overrides, load};
    use super::*;

    const GOOD: &str = "issuer = \"https://sso.example/realms/a\"\nclient_id = \"console\"\nroles = { a = \"viewer\", b = \"owner\" }\n";

    fn read(text: &str) -> Result<Option<OidcConfig>, String> {
        let env = |name: &str| (name == "SET").then(|| "s3cret\n".to_owned());
        let read = load(Some(("p.toml", text)), &Overrides::default(), &env);
        read.map(|snapshot| snapshot.admin.oidc).map_err(|faults| faults.to_string())
    }

    #[test]
    fn three_lines_are_enough() {
        assert_eq!(read(""), Ok(None));
        let oidc = read(&format!("[admin.oidc]\n{GOOD}")).expect("valid").expect("a provider");
        assert_eq!((oidc.name.as_str(), oidc.session), ("sso.example", Duration::from_secs(8 * 3600)));
        assert_eq!(oidc.provider.scopes, ["openid", "profile", "email"]);
        assert_eq!((oidc.provider.client_secret, oidc.redirect_url), (None, None));
        assert_eq!((oidc.refresh, oidc.stale), (Some(Duration::from_secs(300)), Duration::from_secs(1800)));
        let never = read(&format!("[admin.oidc]\n{GOOD}refresh_seconds = 0\n")).expect("valid").expect("a provider");
        assert_eq!(never.refresh, None);
    }

    #[test]
    fn the_highest_role_of_the_groups_counts() {
        let oidc = read(&format!("[admin.oidc]\n{GOOD}")).expect("valid").expect("a provider");
        let role = |groups: &[&str]| oidc.role(&groups.iter().map(|group| (*group).to_owned()).collect::<Vec<_>>());
        assert_eq!(role(&["x", "a"]), Some(Role::Viewer));
        assert_eq!(role(&["b", "a"]), Some(Role::Owner));
        for none in [&[][..], &["x"], &["A"], &["a "], &["a,b"]] {
            assert_eq!(role(none), None, "{none:?}");
        }
        let text = GOOD.replace("a = \"viewer\"", "a = \"operator\"") + "default_role = \"viewer\"\n";
        let oidc = read(&format!("[admin.oidc]\n{text}")).expect("valid").expect("a provider");
        assert_eq!(oidc.role(&[]), Some(Role::Viewer), "everybody");
        assert_eq!(oidc.role(&["a".into()]), Some(Role::Operator), "and more by group");
        let text = GOOD.replace("roles", "# roles") + "default_role = \"viewer\"\n";
        assert!(read(&format!("[admin.oidc]\n{text}")).is_ok(), "nobody needs a group");
    }

    #[test]
    fn a_secret_is_named_and_never_shown() {
        let oidc = read(&format!("[admin.oidc]\n{GOOD}client_secret_env = \"SET\"\n")).expect("valid").expect("one");
        assert_eq!(oidc.provider.client_secret.as_ref().map(Secret::expose), Some("s3cret"));
        assert!(!format!("{oidc:?}").contains("s3cret"));
    }

    #[test]
    fn faults_are_named() {
        for (text, part) in [
            ("client_id = \"c\"".to_owned(), "issuer: is missing"),
            (GOOD.replace("https", "http"), "must be https"),
            (GOOD.replace("client_id = \"console\"", ""), "client_id: is missing"),
            (GOOD.replace("roles", "# roles"), "roles: is missing"),
            (GOOD.replace("owner", "root"), "\"root\" is not a role"),
            (format!("{GOOD}scopes = [\"email\"]"), "openid must be among them"),
            (format!("{GOOD}algorithms = [\"HS256\"]"), "never HMAC"),
            (format!("{GOOD}algorithms = [\"RS256\", \"none\"]"), "never none"),
            (format!("{GOOD}redirect_url = \"https://gw.example/\""), "must end with /console/"),
            (format!("{GOOD}redirect_url = \"http://gw.example/console/\""), "must be https"),
            (format!("{GOOD}client_secret_env = \"UNSET\""), "UNSET is not there or empty"),
            (format!("{GOOD}client_secret_file = \"/nonexistent\""), "/nonexistent is not there"),
            (format!("{GOOD}client_secret_env = \"SET\"\nclient_secret_file = \"/x\""), "instead of"),
            (format!("{GOOD}session_minutes = 721"), "session_minutes"),
            (format!("{GOOD}refresh_seconds = 4"), "0 (never) or at least 5"),
            (format!("{GOOD}refresh_seconds = 600\nrefresh_stale_seconds = 599"), "must not be less than"),
            (format!("{GOOD}default_role = \"root\""), "default_role: \"root\" is not a role"),
            (format!("{GOOD}client_auth = \"private_key_jwt\""), "neither client_secret_basic nor"),
            (format!("{GOOD}parameters = {{ state = \"x\" }}"), "state is set by the gateway"),
            (format!("{GOOD}required = {{ hd = 7 }}"), "required"),
            (format!("{GOOD}limits = [\"x\"]"), "is under \"x\", which is none of [[limits]]"),
            (format!("{GOOD}[[admin_keys]]\nid = \"oidc:a\"\nkey_env = \"SET\"\nrole = \"owner\""), "oidc: is how"),
        ] {
            let faults = read(&format!("[admin.oidc]\n{text}\n")).expect_err(&text);
            assert!(faults.contains(part), "{part:?} in {faults}");
        }
    }
}
