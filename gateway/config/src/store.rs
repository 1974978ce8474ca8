//! `[store]` and `[counters]`: location of durable data, and of the counters that several gateways share.
//!
//! A URL with a password may not be typed into the config: the URL comes from the environment, or the password from a
//! file.

use std::path::PathBuf;

use super::raw::{Document, Reader};
use super::snapshot::{CountersConfig, PostgresConfig, StoreConfig};
use penstock_base::Secret;

type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Most bytes that are read of a password file.
const PASSWORD_BYTES_MAX: u64 = 4096;

/// Reads the tables `[store]` and `[counters]`.
pub(super) fn read(document: &Document<'_>, env: Env<'_>) -> (StoreConfig, CountersConfig) {
    let (store, is_postgres) = store(document, env);
    let counters = counters(document, env, is_postgres);
    (store, counters)
}

/// Reads `[store]`: SQLite or PostgreSQL, and the bounds of what is stored. True beside it: PostgreSQL, even if its URL is in a variable
/// that need not be set here.
fn store(document: &Document<'_>, env: Env<'_>) -> (StoreConfig, bool) {
    const TIB: u64 = 1 << 40;
    let table = &document.table("store");
    let bytes_max = table.number("bytes_max", 0..=1024 * TIB);
    if (1..1 << 20).contains(&bytes_max) {
        table.fault("bytes_max", "must be 0 or at least 1048576: an empty database needs some of it");
    }
    let (path, ca_file) = (table.text("path").map(PathBuf::from), table.text("ca_file").map(PathBuf::from));
    let connections = table.number("connections", 1..=200) as usize;
    let url = url(table, env, &["postgres://", "postgresql://"]);
    if url.is_some() && path.is_some() {
        table.fault("path", "is SQLite's, and url is PostgreSQL's: one of them");
    }
    if url.is_some() && cfg!(not(feature = "postgres")) {
        table.fault("url", "this build has no PostgreSQL: build with the feature postgres");
    }
    let is_postgres = url.is_some() || (table.has("url_env") && !table.needs_variables());
    let config = StoreConfig {
        postgres: url.map(|url| PostgresConfig { url, ca_file, connections }),
        path,
        bytes_max,
        file_bytes_max: table.number("file_bytes_max", 1024..=TIB),
        key_bytes_max: table.number("key_bytes_max", 1024..=1024 * TIB),
        key_response_bytes_max: table.number("key_response_bytes_max", 1024..=1024 * TIB),
        // In a bounded database, half of the space is left for everything else.
        response_bytes_max: table.number("response_bytes_max", 1024..=1024 * TIB).min(if bytes_max > 0 {
            bytes_max / 2
        } else {
            u64::MAX
        }),
        response_event_bytes_max: table.number("response_event_bytes_max", 65_536..=1 << 30) as usize,
        response_days: table.number("response_days", 1..=3650),
        ledger_days: table.number("ledger_days", 0..=36_500),
        audit_days: table.number("audit_days", 0..=36_500),
    };
    (config, is_postgres)
}

/// Reads `[counters]`; `postgres`: whether the store is PostgreSQL, which can then hold the counters.
fn counters(document: &Document<'_>, env: Env<'_>, postgres: bool) -> CountersConfig {
    let table = &document.table("counters");
    let prefix = table.text("prefix").unwrap_or_default();
    let ca_file = table.text("ca_file").map(PathBuf::from);
    if table.text("url").as_deref() == Some("store") {
        for name in ["url_env", "password_file", "ca_file"].into_iter().filter(|name| table.text(name).is_some()) {
            table.fault(name, "is for a Redis, and url is \"store\"");
        }
        if !postgres {
            table.fault("url", "\"store\" is the PostgreSQL of [store], and [store] has no url");
        }
        return CountersConfig::Store;
    }
    match url(table, env, &["redis://", "rediss://", "redis+unix://", "unix://"]) {
        Some(_) if cfg!(not(feature = "redis")) => {
            table.fault("url", "this build has no Redis: build with the feature redis");
            CountersConfig::Own
        }
        Some(url) => {
            if ca_file.is_some() && !url.expose().starts_with("rediss://") {
                table.fault("ca_file", "is for TLS: the URL must begin with rediss://");
            }
            CountersConfig::Redis { url, prefix, ca_file }
        }
        None => CountersConfig::Own,
    }
}

/// Reads the URL of a server and adds the password.
fn url(table: &Reader<'_, '_>, env: Env<'_>, schemes: &[&str]) -> Option<Secret> {
    let (typed, variable, file) = (table.text("url"), table.text("url_env"), table.text("password_file"));
    let (name, url) = match (typed, variable) {
        (Some(_), Some(_)) => {
            table.fault("url_env", "stands instead of url");
            return None;
        }
        (Some(url), None) => {
            if has_password(&url) {
                table.fault("url", "has a password in it: put it into password_file, or the whole URL into url_env");
            }
            ("url", url)
        }
        (None, Some(variable)) => match env(&variable) {
            Some(url) => ("url_env", url),
            None => {
                table.unset("url_env", &variable);
                return None;
            }
        },
        (None, None) => {
            if file.is_some() {
                table.fault("password_file", "is for a url, and there is none");
            }
            return None;
        }
    };
    if !schemes.iter().any(|scheme| url.starts_with(scheme)) {
        table.fault(name, format!("must begin with {}", schemes.join(" or ")));
        return None;
    }
    let Some(file) = file else { return Some(Secret::new(url)) };
    match password(&file) {
        Ok(password) => Some(Secret::new(with_password(&url, &password))),
        Err(error) => {
            table.fault("password_file", error);
            None
        }
    }
}

fn password(file: &str) -> Result<String, String> {
    use std::io::Read;
    let mut text = String::new();
    let opened = std::fs::File::open(file).map_err(|error| format!("{file}: {error}"))?;
    opened.take(PASSWORD_BYTES_MAX).read_to_string(&mut text).map_err(|error| format!("{file}: {error}"))?;
    let text = text.trim_end_matches(['\r', '\n']);
    if text.is_empty() { Err(format!("{file} is empty")) } else { Ok(text.to_owned()) }
}

/// User and host part of a URL, and its offset.
fn authority(url: &str) -> (usize, &str) {
    let start = url.find("://").map_or(0, |at| at + 3);
    let rest = &url[start..];
    (start, &rest[..rest.find(['/', '?', '#']).unwrap_or(rest.len())])
}

pub(super) fn has_password(url: &str) -> bool {
    let (_, authority) = authority(url);
    let user = authority.rsplit_once('@').map(|(user, _)| user);
    let query = url.split_once('?').map_or("", |(_, query)| query);
    user.is_some_and(|user| user.contains(':'))
        || query.split('&').any(|pair| pair.starts_with("pass=") || pair.starts_with("password="))
}

fn with_password(url: &str, password: &str) -> String {
    let password: String = password.bytes().map(|byte| format!("%{byte:02X}")).collect();
    if url.contains("unix://") {
        return format!("{url}{}pass={password}", if url.contains('?') { '&' } else { '?' });
    }
    let (start, authority) = authority(url);
    let (scheme, rest) = (&url[..start], &url[start + authority.len()..]);
    let (user, host) = authority.rsplit_once('@').unwrap_or(("", authority));
    format!("{scheme}{user}:{password}@{host}{rest}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Overrides, Snapshot, load};

    fn read(text: &str) -> Result<Snapshot, String> {
        let env = |name: &str| match name {
            "PG" => Some("postgres://a:s3cret@db/x".to_owned()),
            "RD" => Some("redis://:s3cret@cache:6379".to_owned()),
            _ => None,
        };
        load(Some(("s.toml", text)), &Overrides::default(), &env).map_err(|faults| faults.to_string())
    }

    #[test]
    fn without_any_it_is_sqlite_and_own_counters() {
        let config = read("").expect("valid");
        assert_eq!((&config.store.postgres, &config.counters), (&None, &CountersConfig::Own));
    }

    #[test]
    #[cfg(all(feature = "postgres", feature = "redis"))]
    fn servers_are_urls_whose_passwords_show_nowhere() {
        let config = read("[store]\nurl_env = \"PG\"\n[counters]\nurl_env = \"RD\"\n").expect("valid");
        let postgres = config.store.postgres.as_ref().expect("PostgreSQL");
        assert_eq!((postgres.url.expose(), postgres.connections), ("postgres://a:s3cret@db/x", 8));
        assert!(matches!(&config.counters, CountersConfig::Redis { url, prefix, ca_file: None }
            if url.expose() == "redis://:s3cret@cache:6379" && prefix == "penstock:"));
        assert!(!format!("{config:?}").contains("s3cret"));
        let config = read("[store]\nurl = \"postgres://a@db/x\"\n[counters]\nurl = \"store\"\n").expect("valid");
        assert_eq!(config.counters, CountersConfig::Store);
    }

    #[test]
    fn passwords_of_files_come_into_urls() {
        for (url, expected) in [
            ("postgres://a@db:5432/x?sslmode=require", "postgres://a:%70%40@db:5432/x?sslmode=require"),
            ("postgres://a@%2frun%2fpg/x", "postgres://a:%70%40@%2frun%2fpg/x"),
            ("redis://cache:6379/1", "redis://:%70%40@cache:6379/1"),
            ("redis+unix:///run/redis?db=1", "redis+unix:///run/redis?db=1&pass=%70%40"),
            ("redis+unix:///run/redis", "redis+unix:///run/redis?pass=%70%40"),
        ] {
            assert_eq!(with_password(url, "p@"), expected);
        }
    }

    #[test]
    fn faults_are_named_and_say_no_password() {
        for (text, part) in [
            ("[store]\nurl = \"postgres://a:s3cret@db/x\"\n", "has a password in it"),
            ("[store]\nurl = \"postgres://a@db/x?password=s3cret\"\n", "has a password in it"),
            ("[store]\nurl_env = \"RD\"\n", "must begin with postgres://"),
            ("[store]\nurl_env = \"UNSET\"\n", "UNSET is not set"),
            ("[store]\nurl = \"postgres://a@db/x\"\nurl_env = \"PG\"\n", "stands instead of url"),
            ("[store]\nurl = \"postgres://a@db/x\"\npath = \"x.db\"\n", "one of them"),
            ("[store]\nurl = \"postgres://a@db/x\"\npassword_file = \"/nowhere\"\n", "/nowhere"),
            ("[store]\npassword_file = \"/nowhere\"\n", "there is none"),
            ("[counters]\nurl = \"store\"\n", "[store] has no url"),
            ("[counters]\nurl = \"redis://:s3cret@cache\"\n", "has a password in it"),
            ("[counters]\nurl = \"redis://cache\"\nca_file = \"x.pem\"\n", "is for TLS"),
            ("[counters]\nurl = \"memcache://cache\"\n", "must begin with redis://"),
        ] {
            let faults = read(text).expect_err(text);
            assert!(faults.contains(part) && !faults.contains("s3cret"), "{part:?} in {faults}");
        }
    }
}
