//! `[admin]` and `[[admin_keys]]`: listeners of the admin API, and the roles of its keys.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use super::Overrides;
use super::identity::digest;
use super::oidc::{OIDC, OidcConfig};
use super::raw::{Document, Reader};
use super::web::{hosts, origin_fault};

/// Default TCP address of the admin API.
pub const ADMIN_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8081);

/// Role of an admin key; each role includes the rights of those before it in [`Role::ALL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Reads all state but the audit log; changes nothing.
    Viewer,
    /// Steers and stops running work and revokes rights; grants none.
    Operator,
    /// Full rights: keys, teams, limits, config, the audit log.
    Owner,
}

impl Role {
    /// All roles, in ascending order of rights.
    pub const ALL: [Role; 3] = [Role::Viewer, Role::Operator, Role::Owner];

    /// Name of the role in the config and the admin API.
    pub fn name(self) -> &'static str {
        match self {
            Role::Viewer => "viewer",
            Role::Operator => "operator",
            Role::Owner => "owner",
        }
    }

    /// Role with the name `text`; `None`: no role has it.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.name() == text)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

/// One `[[admin_keys]]` entry: a key of the admin API with its role.
#[derive(Clone, PartialEq, Eq)]
pub struct AdminKey {
    /// Name under which the audit log lists the key's actions.
    pub id: String,
    /// SHA-256 of the secret, which is all that the gateway keeps of it.
    pub digest: [u8; 32],
    /// Rights that the key gives.
    pub role: Role,
    /// Ids of the limits on what its holder asks models at the console.
    pub limits: Vec<String>,
}

impl fmt::Debug for AdminKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("AdminKey").field("id", &self.id).field("role", &self.role).finish_non_exhaustive()
    }
}

/// Choice of the TCP listener of the admin API (`admin.listen`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminListen {
    /// No TCP listener (`admin.listen = "off"`).
    Off,
    /// [`ADMIN_LISTEN`], or any free loopback port if that one is taken.
    Usual,
    /// Given address; startup fails if it is taken.
    At(SocketAddr),
}

/// Listeners, accepted origins and keys of the admin API, from `[admin]` and `[[admin_keys]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminConfig {
    /// TCP listener of the API: none, the usual address, or a given one.
    pub listen: AdminListen,
    /// Path of the Unix socket that also serves the API; `None`: none.
    pub unix: Option<PathBuf>,
    /// Names in `Host` besides addresses and `localhost`.
    pub hosts: Vec<String>,
    /// Web origins whose pages may use the API, besides its own.
    pub origins: Vec<String>,
    /// Whether the web console is served on the TCP listener.
    pub console: bool,
    /// True if people who are signed in at the console may ask models there.
    pub playground: bool,
    /// Sign-in with an identity provider; `None`: only with keys.
    pub oidc: Option<OidcConfig>,
    /// Configured keys; without any, one is generated at the first start.
    pub keys: Vec<AdminKey>,
}

/// Reads both tables. An address beyond loopback without keys is a fault.
pub(super) fn read(
    document: &Document<'_>,
    overrides: &Overrides,
    env: &dyn Fn(&str) -> Option<String>,
) -> AdminConfig {
    let table = document.table("admin");
    let keys: Vec<_> = document.tables("admin_keys").iter().filter_map(|table| key(table, env)).collect();
    let listen = listen(document, &table, overrides);
    if let AdminListen::At(address) = listen
        && !address.ip().is_loopback()
        && keys.is_empty()
    {
        let message = "the admin API is only served beyond loopback with keys of its own: add [[admin_keys]]";
        match overrides.admin {
            Some(_) => document.fault_at("--admin", "", message),
            None => table.fault("listen", message),
        }
    }
    let origins: Vec<_> = table.texts("origins").into_iter().map(|origin| origin.to_ascii_lowercase()).collect();
    for origin in &origins {
        origin_fault(origin).into_iter().for_each(|fault| table.fault("origins", fault));
    }
    let (console, playground) = (table.flag("console"), table.flag("playground"));
    let unix = table.text("unix").map(PathBuf::from);
    let oidc = super::oidc::read(&document.table("admin.oidc"), env);
    AdminConfig { listen, unix, hosts: hosts(&table), origins, console, playground, oidc, keys }
}

fn listen(document: &Document<'_>, table: &Reader<'_, '_>, overrides: &Overrides) -> AdminListen {
    let typed = table.text("listen");
    let Some(text) = overrides.admin.clone().or(typed) else { return AdminListen::Usual };
    if text == "off" {
        return AdminListen::Off;
    }
    let full = if text.bytes().all(|byte| byte.is_ascii_digit()) { format!("127.0.0.1:{text}") } else { text };
    if let Some(address) = full.to_socket_addrs().ok().and_then(|mut all| all.next()) {
        return AdminListen::At(address);
    }
    let message = format!("{full:?} is neither ADDRESS:PORT, as 127.0.0.1:8081, nor \"off\"");
    match overrides.admin {
        Some(_) => document.fault_at("--admin", "", message),
        None => table.fault("listen", message),
    }
    AdminListen::Off
}

fn key(table: &Reader<'_, '_>, env: &dyn Fn(&str) -> Option<String>) -> Option<AdminKey> {
    let digest = digest(table, env);
    let id = table.text("id");
    match &id {
        None => table.fault("id", "is missing"),
        Some(id) if id.starts_with(OIDC) => table.fault("id", format!("{OIDC} is how people of admin.oidc begin")),
        Some(_) => {}
    }
    let role = table.text("role").unwrap_or_default();
    let parsed = Role::parse(&role);
    if parsed.is_none() {
        table.fault("role", format!("{role:?} is not a role: viewer, operator, owner"));
    }
    Some(AdminKey { id: id?, digest: digest?, role: parsed?, limits: table.texts("limits") })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load;

    fn read(text: &str) -> Result<AdminConfig, String> {
        let env = |name: &str| (name == "SET").then(|| "secret".to_owned());
        let read = load(Some(("p.toml", text)), &Overrides::default(), &env);
        read.map(|snapshot| snapshot.admin).map_err(|faults| faults.to_string())
    }

    #[test]
    fn it_listens_on_loopback_unless_told_otherwise() {
        let listen = |text: &str| read(text).map(|admin| admin.listen);
        assert_eq!(listen(""), Ok(AdminListen::Usual));
        assert_eq!(listen("[admin]\nlisten = \"off\"\n"), Ok(AdminListen::Off));
        assert_eq!(listen("[admin]\nlisten = \"9000\"\n"), Ok(AdminListen::At(([127, 0, 0, 1], 9000).into())));
        let fault = listen("[admin]\nlisten = \"nowhere\"\n").expect_err("a fault");
        assert!(fault.starts_with("p.toml:2: admin.listen: \"nowhere\" is neither"), "{fault}");
    }

    #[test]
    fn beyond_loopback_it_needs_keys() {
        let open = "[admin]\nlisten = \"0.0.0.0:8081\"\n";
        assert!(read(open).expect_err("a fault").contains("add [[admin_keys]]"));
        let key = "[[admin_keys]]\nid = \"ops\"\nkey_env = \"SET\"\nrole = \"operator\"\n";
        let admin = read(&format!("{open}{key}")).expect("valid");
        assert_eq!(
            admin.keys.iter().map(|key| (key.id.as_str(), key.role)).collect::<Vec<_>>(),
            [("ops", Role::Operator)]
        );
        assert!(!format!("{admin:?}").contains("digest"));
    }

    #[test]
    fn a_key_needs_a_role_that_exists() {
        let fault = read("[[admin_keys]]\nid = \"a\"\nkey_env = \"SET\"\nrole = \"root\"\n").expect_err("a fault");
        assert!(fault.contains("admin_keys[0].role: \"root\" is not a role"), "{fault}");
        let limited = "[[admin_keys]]\nid = \"a\"\nkey_env = \"SET\"\nrole = \"owner\"\nlimits = [\"x\"]\n";
        let fault = read(limited).expect_err("a fault");
        assert!(fault.contains("\"a\" is under \"x\", which is none of [[limits]]"), "{fault}");
        let admin = read(&format!("{limited}[[limits]]\nid = \"x\"\nin_flight = 1\n")).expect("valid");
        assert_eq!(admin.keys[0].limits, ["x"]);
    }
}
