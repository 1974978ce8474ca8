//! AWS Signature Version 4 (AWS General Reference, "Create a signed AWS API request"), for requests whose body is in
//! memory.

use std::fmt::Write;
use std::time::Duration;

use hmac::{Hmac, Mac};
use penstock_base::percent_encoded;
use sha2::{Digest, Sha256};
use time::OffsetDateTime;

/// AWS access key that requests are signed with.
#[derive(Clone, Copy)]
pub(super) struct Credentials<'a> {
    pub(super) id: &'a str,
    pub(super) secret: &'a str,
    /// Session token, for temporary credentials only.
    pub(super) token: Option<&'a str>,
}

impl<'a> Credentials<'a> {
    /// Parses a key written as `ID:SECRET` or `ID:SECRET:TOKEN`.
    pub(super) fn parse(text: &'a str) -> Option<Self> {
        let (id, rest) = text.split_once(':')?;
        let (secret, token) = rest.split_once(':').map_or((rest, None), |(secret, token)| (secret, Some(token)));
        Some(Self { id, secret, token })
    }
}

/// Parts of a request that are signed.
pub(super) struct Signed<'a> {
    pub(super) method: &'a str,
    /// Path of the request as sent, percent-encoded once.
    pub(super) path: &'a str,
    /// Query as sent, with parameters in the order of their names.
    pub(super) query: &'a str,
    /// Signed header fields: lower-case names, sorted.
    pub(super) headers: &'a [(&'a str, &'a str)],
    pub(super) payload: &'a [&'a [u8]],
    pub(super) region: &'a str,
    pub(super) service: &'a str,
    /// Time of the signature, written as `20150830T123600Z`.
    pub(super) time: &'a str,
}

/// Value of `Authorization` for a signed request.
pub(super) fn authorization(who: Credentials<'_>, what: &Signed<'_>) -> String {
    let names: Vec<_> = what.headers.iter().map(|(name, _)| *name).collect();
    let names = names.join(";");
    let canonical = canonical(what, &names);
    let date = &what.time[..8];
    let scope = format!("{date}/{}/{}/aws4_request", what.region, what.service);
    let text = format!("AWS4-HMAC-SHA256\n{}\n{scope}\n{}", what.time, hex(&Sha256::digest(canonical)));
    let mut key = mac(format!("AWS4{}", who.secret).as_bytes(), date.as_bytes());
    for part in [what.region, what.service, "aws4_request"] {
        key = mac(&key, part.as_bytes());
    }
    let signature = hex(&mac(&key, text.as_bytes()));
    format!("AWS4-HMAC-SHA256 Credential={}/{scope}, SignedHeaders={names}, Signature={signature}", who.id)
}

fn canonical(what: &Signed<'_>, names: &str) -> String {
    let mut out = format!("{}\n{}\n{}\n", what.method, encoded(what.path), what.query);
    for (name, value) in what.headers {
        let words: Vec<_> = value.split_ascii_whitespace().collect();
        let _ = writeln!(out, "{name}:{}", words.join(" "));
    }
    let mut payload = Sha256::new();
    what.payload.iter().for_each(|piece| payload.update(piece));
    let _ = write!(out, "\n{names}\n{}", hex(&payload.finalize()));
    out
}

/// Path percent-encoded a second time, as every service but S3 requires.
fn encoded(path: &str) -> String {
    percent_encoded(path, b"/")
}

fn mac(key: &[u8], text: &[u8]) -> [u8; 32] {
    // HMAC takes keys of any length.
    let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(key) else { return [0; 32] };
    mac.update(text);
    mac.finalize().into_bytes().into()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut out, byte| {
        let _ = write!(out, "{byte:02x}");
        out
    })
}

/// Time as `20150830T123600Z`; a time after the year 9999 as the epoch.
pub(super) fn timestamp(since_epoch: Duration) -> String {
    let at =
        i64::try_from(since_epoch.as_secs()).ok().and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok());
    let at = at.unwrap_or(OffsetDateTime::UNIX_EPOCH);
    let (year, month, day) = at.to_calendar_date();
    let (hour, minute, second) = at.to_hms();
    format!("{year:04}{:02}{day:02}T{hour:02}{minute:02}{second:02}Z", u8::from(month))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks against the vectors of AWS's `aws-sig-v4-test-suite`.
    #[track_caller]
    fn check(method: &str, query: &str, headers: &[(&str, &str)], payload: &str, signature: &str) {
        let who = Credentials { id: "AKIDEXAMPLE", secret: "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", token: None };
        let what = Signed {
            method,
            path: "/",
            query,
            headers,
            payload: &[payload.as_bytes()],
            region: "us-east-1",
            service: "service",
            time: "20150830T123600Z",
        };
        let value = authorization(who, &what);
        assert!(value.starts_with("AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, "));
        assert!(value.ends_with(&format!("Signature={signature}")), "{value}");
    }

    #[test]
    fn the_published_vectors_are_met() {
        const PLAIN: &[(&str, &str)] = &[("host", "example.amazonaws.com"), ("x-amz-date", "20150830T123600Z")];
        check("GET", "", PLAIN, "", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31");
        check("POST", "", PLAIN, "", "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b");
        let query = "Param1=value1&Param2=value2";
        check("GET", query, PLAIN, "", "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500");
        let form = [("content-type", "application/x-www-form-urlencoded"), PLAIN[0], PLAIN[1]];
        check("POST", "", &form, "Param1=value1", "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a");
    }

    #[test]
    fn times_are_written_as_dates() {
        for (seconds, text) in [
            (0, "19700101T000000Z"),
            (951_827_696, "20000229T123456Z"),
            (1_440_938_160, "20150830T123600Z"),
            (4_107_542_399, "21000228T235959Z"),
        ] {
            assert_eq!(timestamp(Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn credentials_are_read() {
        let parts = |text: &'static str| Credentials::parse(text).map(|who| (who.id, who.secret, who.token));
        assert_eq!(parts("a:b/c+d"), Some(("a", "b/c+d", None)));
        assert_eq!(parts("a:b:c:d"), Some(("a", "b", Some("c:d"))));
        assert_eq!(parts("bearer"), None);
        assert_eq!(encoded("/model/a%3Ab/converse"), "/model/a%253Ab/converse");
    }
}
