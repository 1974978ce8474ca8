//! Cookies of a session, and of a sign-in that is under way.
//!
//! Cookies are shared by all ports of a host, so the name holds the port: two gateways on one machine keep apart.

use http::{HeaderMap, HeaderValue, header};

/// Begin of the session cookie's name.
const NAME: &str = "penstock_session";
/// Begin of the name of a sign-in's cookie.
const LOGIN: &str = "penstock_login";
/// Path of a sign-in's cookie: the operations that begin and finish a sign-in with an identity provider.
pub const LOGIN_PATH: &str = "/admin/v1/sign-on";
/// Path of the cookie: the admin API, and not the files of the console.
const PATH: &str = "/admin/v1";

/// Name of the cookie for a page at `host`, as the request names it.
#[must_use]
pub fn cookie_name(host: &str) -> String {
    named(NAME, host)
}

/// Name of the cookie that binds a sign-in with an identity provider to the browser at `host`.
#[must_use]
pub fn login_cookie_name(host: &str) -> String {
    named(LOGIN, host)
}

fn named(begin: &str, host: &str) -> String {
    let port = host.rsplit_once(':').map_or("", |(_, port)| port);
    let is_port = !port.is_empty() && port.len() <= 5 && port.bytes().all(|byte| byte.is_ascii_digit());
    if is_port { format!("{begin}_{port}") } else { begin.to_owned() }
}

/// Value of the cookie `name`; `None`: it is not there, or there twice with different values.
#[must_use]
pub fn read<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let fields = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let pairs = fields.flat_map(|field| field.split(';')).filter_map(|pair| pair.trim().split_once('='));
    let mut values = pairs.filter(|(key, _)| *key == name).map(|(_, value)| value);
    let first = values.next().filter(|value| !value.is_empty())?;
    values.all(|value| value == first).then_some(first)
}

/// Field that sets the cookie. `is_secure`: the page came over TLS. The cookie ends with the browser, or with the session.
#[must_use]
pub fn set(name: &str, id: &str, is_secure: bool) -> Option<HeaderValue> {
    field(name, id, PATH, "", is_secure)
}

/// Field that sets the cookie of a sign-in for `seconds`; 0 removes it.
#[must_use]
pub fn set_login(name: &str, secret: &str, seconds: u64, is_secure: bool) -> Option<HeaderValue> {
    field(name, secret, LOGIN_PATH, &format!("; Max-Age={seconds}"), is_secure)
}

/// Field that removes the cookie.
#[must_use]
pub fn clear(name: &str, is_secure: bool) -> Option<HeaderValue> {
    field(name, "", PATH, "; Max-Age=0", is_secure)
}

fn field(name: &str, value: &str, path: &str, age: &str, is_secure: bool) -> Option<HeaderValue> {
    let secure = if is_secure { "; Secure" } else { "" };
    HeaderValue::try_from(format!("{name}={value}; Path={path}; HttpOnly; SameSite=Strict{secure}{age}")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_port_has_a_name_of_its_own() {
        assert_eq!(cookie_name("127.0.0.1:8081"), "penstock_session_8081");
        assert_eq!(cookie_name("[::1]:9"), "penstock_session_9");
        for host in ["gw.example", "localhost", "[::1]", "h:", "h:123456", "h:8a", "h:; Domain=x"] {
            assert_eq!(cookie_name(host), "penstock_session", "{host}");
        }
    }

    #[test]
    fn a_cookie_is_read_once() {
        let of = |fields: &[&'static str]| {
            let mut headers = HeaderMap::new();
            fields.iter().for_each(|field| _ = headers.append(header::COOKIE, HeaderValue::from_static(field)));
            read(&headers, "penstock_session").map(str::to_owned)
        };
        assert_eq!(of(&["a=1; penstock_session=x; b=2"]).as_deref(), Some("x"));
        assert_eq!(of(&["a=1", "penstock_session=x"]).as_deref(), Some("x"));
        for none in [&[][..], &["penstock_session"], &["penstock_session="], &["xpenstock_session=x"]] {
            assert_eq!(of(none), None, "{none:?}");
        }
        assert_eq!(of(&["penstock_session=x; penstock_session=y"]), None, "which of them is not to be guessed");
    }

    #[test]
    fn scripts_and_other_sites_do_not_get_it() {
        let text = |value: Option<HeaderValue>| value.expect("a field").to_str().expect("text").to_owned();
        let plain = text(set("penstock_session_1", "abc", false));
        assert_eq!(plain, "penstock_session_1=abc; Path=/admin/v1; HttpOnly; SameSite=Strict");
        assert_eq!(text(set("n", "abc", true)), "n=abc; Path=/admin/v1; HttpOnly; SameSite=Strict; Secure");
        assert!(text(clear("n", false)).ends_with("; Max-Age=0"));
        let login = text(set_login(&login_cookie_name("localhost:81"), "x", 600, false));
        assert_eq!(login, "penstock_login_81=x; Path=/admin/v1/sign-on; HttpOnly; SameSite=Strict; Max-Age=600");
    }
}
