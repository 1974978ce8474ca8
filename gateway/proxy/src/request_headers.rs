//! Facts that a client tells in header fields beside the body: its timeout, its conversation, whether it wants the
//! route explained.
//!
//! | header | |
//! |---|---|
//! | `x-request-timeout-ms` | how long the client waits for the whole answer |
//! | `x-envoy-expected-rq-timeout-ms` | the same, as Envoy says it for its clients |
//! | `x-litellm-timeout` | the same in seconds, as clients of LiteLLM say it |
//! | `x-session-id` | the conversation, for pools whose policy keeps them together |
//! | `x-penstock-route` | `explain` |

use std::time::{Duration, Instant};

use http::HeaderMap;
use penstock_proto::ErrorKind;

use penstock_base::error::Failure;
use penstock_generate::events;
use penstock_upstream::Origin;

/// Headers with a timeout, and the milliseconds of one unit of each.
const TIMEOUTS: [(&str, f64); 3] =
    [("x-request-timeout-ms", 1.0), ("x-envoy-expected-rq-timeout-ms", 1.0), ("x-litellm-timeout", 1000.0)];

/// Longest timeout that a client can ask for, one day; a longer one is cut to it.
const TIMEOUT_MS_MAX: f64 = 86_400_000.0;

/// Longest conversation name in the client's header, in bytes.
const SESSION_BYTES_MAX: usize = 1024;

/// Adds the facts that the header fields tell about a request that came at `started`.
///
/// # Errors
/// A timeout that is no number above 0, or a name of a conversation that is no short text.
pub(crate) fn read(origin: Origin, headers: &HeaderMap, started: Instant) -> Result<Origin, Failure> {
    let deadline = deadline(origin.deadline, headers, started)?;
    Ok(Origin { deadline, session: session(headers)?, explain: events::asks_route(headers), ..origin })
}

/// Deadline of a request that came at `started`: that of its client's header fields, or `own` where that is sooner.
///
/// # Errors
/// A timeout that is no number above 0.
pub(crate) fn deadline(
    own: Option<Instant>,
    headers: &HeaderMap,
    started: Instant,
) -> Result<Option<Instant>, Failure> {
    let patience = patience(headers)?.map(|patience| started + patience);
    Ok(own.into_iter().chain(patience).min())
}

/// Timeout of the client: the shortest of the header fields.
fn patience(headers: &HeaderMap) -> Result<Option<Duration>, Failure> {
    let mut least: Option<Duration> = None;
    for (name, unit) in TIMEOUTS {
        for value in headers.get_all(name) {
            let text = value.to_str().unwrap_or_default().trim();
            let number = text.parse::<f64>().ok().filter(|number| *number > 0.0 && number.is_finite());
            let Some(milliseconds) = number.map(|number| number * unit) else {
                let message = format!("{name} must be a time above 0, as a number.");
                return Err(Failure::new(ErrorKind::InvalidRequest, message).param(name));
            };
            let patience = Duration::from_secs_f64(milliseconds.min(TIMEOUT_MS_MAX) / 1000.0);
            least = Some(least.map_or(patience, |least| least.min(patience)));
        }
    }
    Ok(least)
}

fn session(headers: &HeaderMap) -> Result<Option<Box<str>>, Failure> {
    const NAME: &str = "x-session-id";
    let Some(value) = headers.get(NAME).filter(|value| !value.is_empty()) else { return Ok(None) };
    let text = value.to_str().ok().filter(|text| text.len() <= SESSION_BYTES_MAX);
    let message = || format!("{NAME} must be text of at most {SESSION_BYTES_MAX} bytes.");
    let text = text.ok_or_else(|| Failure::new(ErrorKind::InvalidRequest, message()).param(NAME))?;
    Ok(Some(text.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(fields: &[(&'static str, &str)], own: Option<u64>) -> Result<(Option<Duration>, Option<Box<str>>), u16> {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(*name, value.parse().expect("a value"));
        }
        let started = Instant::now();
        let deadline = own.map(|own| started + Duration::from_secs(own));
        let origin = read(Origin { deadline, ..Origin::default() }, &headers, started);
        origin.map(|origin| (origin.deadline.map(|at| at - started), origin.session)).map_err(|f| f.status())
    }

    #[test]
    fn the_shortest_time_counts() {
        let of = |fields: &[(&'static str, &str)], own| told(fields, own).map(|(time, _)| time.map(|t| t.as_millis()));
        assert_eq!(of(&[], None), Ok(None));
        assert_eq!(of(&[], Some(9)), Ok(Some(9000)));
        assert_eq!(of(&[("x-request-timeout-ms", "1500")], Some(9)), Ok(Some(1500)));
        assert_eq!(of(&[("x-request-timeout-ms", "15000")], Some(9)), Ok(Some(9000)));
        let both = [("x-envoy-expected-rq-timeout-ms", "700"), ("x-litellm-timeout", "0.5")];
        assert_eq!(of(&both, None), Ok(Some(500)));
        assert_eq!(of(&[("x-litellm-timeout", "1e300")], None), Ok(Some(86_400_000)));
    }

    #[test]
    fn what_is_no_time_is_refused() {
        for text in ["", "soon", "-1", "0", "NaN", "inf"] {
            assert_eq!(told(&[("x-request-timeout-ms", text)], None), Err(400), "{text:?}");
        }
    }

    #[test]
    fn a_session_is_a_short_text() {
        let of = |text: &str| told(&[("x-session-id", text)], None).map(|(_, session)| session);
        assert_eq!(of("abc"), Ok(Some("abc".into())));
        assert_eq!(of(""), Ok(None));
        assert_eq!(of(&"x".repeat(2000)), Err(400));
    }
}
