//! `server.hosts` and `[cors]`: accepted host names, and the web origins whose pages may use the gateway.

use super::raw::{Document, Reader};
use crate::Snapshot;

/// Default ports, which browsers leave out of origins.
const USUAL_PORTS: [(&str, &str); 2] = [("http", ":80"), ("https", ":443")];

/// CORS settings: web origins whose pages may read answers of the gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CorsConfig {
    /// Allowed origins as browsers write them: scheme, host and port.
    pub origins: Vec<String>,
    /// True if pages of every origin are allowed (`*`).
    pub any: bool,
    /// Time in seconds for which a browser may cache the answer to a preflight.
    pub max_age_seconds: u64,
}

impl CorsConfig {
    /// Returns true if pages of any other origin are allowed.
    pub fn is_on(&self) -> bool {
        self.any || !self.origins.is_empty()
    }

    /// Returns true if the list has the origin; `*` is not part of the list.
    pub fn lists(&self, origin: &[u8]) -> bool {
        self.origins.iter().any(|listed| listed.as_bytes() == origin)
    }
}

/// Names accepted in `Host`, in lower case. `*.example` stands for every name below `example`.
pub(super) fn hosts(table: &Reader<'_, '_>) -> Vec<String> {
    let mut hosts = table.texts("hosts");
    for host in &mut hosts {
        host.make_ascii_lowercase();
        let name = host.strip_prefix("*.").unwrap_or(host);
        if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte)) {
            table.fault(
                "hosts",
                format!("{host:?} is no host name: write gateway.example or *.example, without a port"),
            );
        }
    }
    hosts
}

/// Reads the table `[cors]` with its allowed origins.
pub(super) fn cors(document: &Document<'_>) -> CorsConfig {
    let table = &document.table("cors");
    let (mut origins, max_age_seconds) = (table.texts("origins"), table.number("max_age_seconds", 0..=86_400));
    let any = origins.iter().any(|origin| origin == "*");
    if any && origins.len() > 1 {
        table.fault("origins", "\"*\" stands for every origin: leave out the others");
    }
    origins.retain(|origin| origin != "*");
    for origin in &origins {
        origin_fault(origin).into_iter().for_each(|fault| table.fault("origins", fault));
    }
    CorsConfig { origins, any, max_age_seconds }
}

/// Reason why a browser never sends the text as an origin; `None`: it can.
pub(super) fn origin_fault(origin: &str) -> Option<String> {
    let usual = || format!("{origin:?} is no origin, as https://app.example or http://localhost:3000");
    let Some((scheme, host)) = origin.split_once("://") else { return Some(usual()) };
    let is_scheme = scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
    let is_host = host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._:[]".contains(&byte));
    if scheme.is_empty() || host.is_empty() || !is_scheme || !is_host {
        return Some(usual());
    }
    if origin.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return Some(format!("{origin:?} never comes: browsers write origins in lower case"));
    }
    let (_, port) = USUAL_PORTS.into_iter().find(|(name, port)| *name == scheme && host.ends_with(port))?;
    Some(format!("{origin:?} never comes: browsers leave out {port}"))
}

/// Rejects `*` for a gateway that needs no credentials: there the list of origins is all that keeps a web page out.
pub(super) fn check(document: &Document<'_>, snapshot: &Snapshot) {
    if snapshot.cors.any && snapshot.auth_settings().is_open() {
        let message = "\"*\" lets every web page use a gateway that asks nobody for a credential: list the origins, or set \
                       auth.anonymous = \"deny\"";
        document.fault_at("cors", "origins", message);
    }
}

#[cfg(test)]
mod tests {
    use crate::{Overrides, Snapshot, load};

    fn read(text: &str) -> Result<Snapshot, String> {
        let env = |name: &str| (name == "SET").then(|| "secret".to_owned());
        load(Some(("p.toml", text)), &Overrides::default(), &env).map_err(|faults| faults.to_string())
    }

    #[test]
    fn origins_are_what_browsers_send() {
        let cors = |origin: &str| read(&format!("[cors]\norigins = [{origin:?}]\n")).map(|read| read.cors);
        for origin in ["https://app.example", "http://localhost:3000", "tauri://localhost"] {
            assert!(cors(origin).expect(origin).lists(origin.as_bytes()), "{origin}");
        }
        for (origin, part) in [
            ("null", "is no origin"),
            ("app.example", "is no origin"),
            ("https://app.example/", "is no origin"),
            ("https://*.example", "is no origin"),
            ("https://", "is no origin"),
            ("https://App.example", "lower case"),
            ("https://app.example:443", "leave out :443"),
            ("http://app.example:80", "leave out :80"),
        ] {
            let fault = cors(origin).expect_err(origin);
            assert!(fault.starts_with("p.toml:2: cors.origins: ") && fault.contains(part), "{fault}");
        }
    }

    #[test]
    fn every_origin_is_for_gateways_that_ask_for_a_credential() {
        let any = "[cors]\norigins = [\"*\"]\n";
        assert!(read(any).expect_err("anonymous").contains("lets every web page use a gateway"));
        assert!(read(&format!("{any}[auth]\nanonymous = \"allow\"\n")).is_err());
        let key = "[[keys]]\nid = \"a\"\nkey_env = \"SET\"\n";
        assert!(read(&format!("{any}[auth]\nanonymous = \"allow\"\n{key}")).is_err());
        assert!(read(&format!("{any}{key}")).expect("valid").cors.any);
        assert!(read(&format!("{any}[auth]\nanonymous = \"deny\"\n")).expect("valid").cors.any);
        let both = "[auth]\nanonymous = \"deny\"\n[cors]\norigins = [\"*\", \"https://app.example\"]\n";
        assert!(read(both).expect_err("both").contains("leave out the others"));
    }

    #[test]
    fn hosts_are_names() {
        let hosts = |host: &str| read(&format!("[server]\nhosts = [{host:?}]\n")).map(|read| read.hosts);
        assert_eq!(hosts("GW.example"), Ok(vec!["gw.example".to_owned()]));
        assert_eq!(hosts("*.example"), Ok(vec!["*.example".to_owned()]));
        for host in ["gw.example:8080", "*", "http://gw.example", "gw.*", ""] {
            assert!(hosts(host).expect_err(host).contains("server.hosts"), "{host}");
        }
    }
}
