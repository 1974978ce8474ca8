//! Limits as clients see them: the standings, under the names of the API in use, and the reason of a refusal.
//!
//! OpenAI's names: `x-ratelimit-{limit,remaining,reset}-{requests,tokens}`, the time as `1m30s`. Anthropic's:
//! `anthropic-ratelimit-{requests,tokens,input-tokens,output-tokens}-{limit,remaining,reset}`, the time by RFC 3339. Of
//! several limits the one with the smallest fraction left is shown.

use std::fmt::Write;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, header};
use penstock_govern::{Book, Claim, Denied, Measure, Now, Span, Standing, Unit};
use penstock_proto::ErrorKind;
use penstock_types::Dialect;
use penstock_types::error_shape::{self, ErrorShape};

use penstock_base::error::{Failure, LimitRefusal};

/// Longest Retry-After that the official SDKs obey; with a longer one they retry at once or after a backoff of their own.
const WAIT_OBEYED: Duration = Duration::from_secs(60);
/// Retry-After of a refusal that other requests must end first.
const OTHERS_END: Duration = Duration::from_secs(1);

/// Standings of the claims, the tightest per unit; without places in flight and money.
pub(super) fn standings(book: &mut Book, claims: &[Claim<'_>], now: Now) -> Vec<(Measure, Standing)> {
    let mut out: Vec<(Measure, Standing)> = Vec::new();
    for claim in claims.iter().filter(|claim| !matches!(claim.measure.unit, Unit::InFlight | Unit::NanoUsd)) {
        let standing = book.standing(claim.limit, claim.subject, claim.measure, now);
        let have = out.iter_mut().find(|(measure, _)| measure.unit == claim.measure.unit);
        match have {
            Some(have) if part_left(&claim.measure, &standing) < part_left(&have.0, &have.1) => {
                *have = (claim.measure, standing);
            }
            Some(_) => {}
            None => out.push((claim.measure, standing)),
        }
    }
    out
}

/// Takes in the use by all gateways together, where that leaves less.
pub(super) fn raise(standings: &mut [(Measure, Standing)], measure: Measure, used: u64, reset_ms: Option<u64>) {
    let Some(have) = standings.iter_mut().find(|(have, _)| have.unit == measure.unit) else { return };
    let told = Standing { used, reserved: 0, reset_ms: reset_ms.unwrap_or(0) };
    if have.0 == measure {
        have.1.used = have.1.used.max(used);
        have.1.reset_ms = have.1.reset_ms.max(told.reset_ms);
    } else if part_left(&measure, &told) < part_left(&have.0, &have.1) {
        *have = (measure, told);
    }
}

fn part_left(measure: &Measure, standing: &Standing) -> f64 {
    measure.max.saturating_sub(standing.used) as f64 / measure.max.max(1) as f64
}

/// The standings as header fields. All values are slices of one text.
pub(super) fn fields(dialect: Dialect, standings: &[(Measure, Standing)], now: Now) -> Vec<(HeaderName, HeaderValue)> {
    let mut text = String::with_capacity(64 * standings.len());
    let mut ends: Vec<(&'static HeaderName, usize)> = Vec::with_capacity(3 * standings.len());
    let mut digits = itoa::Buffer::new();
    let has_tokens = standings.iter().any(|(measure, _)| measure.unit == Unit::Tokens);
    for (measure, standing) in standings {
        let [limit, remaining, reset] = match (dialect, measure.unit) {
            (Dialect::Anthropic, Unit::Requests) => &ANTHROPIC_REQUESTS,
            (Dialect::Anthropic, Unit::InputTokens) => &ANTHROPIC_INPUT,
            (Dialect::Anthropic, Unit::OutputTokens) => &ANTHROPIC_OUTPUT,
            (Dialect::Anthropic, _) => &ANTHROPIC_TOKENS,
            (_, Unit::Requests) => &OPENAI_REQUESTS,
            (_, Unit::Tokens) => &OPENAI_TOKENS,
            // OpenAI counts input and output together.
            (_, Unit::InputTokens) if !has_tokens => &OPENAI_TOKENS,
            _ => continue,
        };
        text += digits.format(measure.max);
        ends.push((limit, text.len()));
        text += digits.format(measure.max.saturating_sub(standing.used));
        ends.push((remaining, text.len()));
        match dialect {
            Dialect::Anthropic => text += &rfc3339((now.wall_ms + standing.reset_ms).div_ceil(1000)),
            Dialect::OpenAi | Dialect::Gemini | Dialect::Ollama => {
                say_pause(&mut text, Duration::from_millis(standing.reset_ms))
            }
        }
        ends.push((reset, text.len()));
    }
    let (text, mut begin) = (Bytes::from(text), 0);
    let field = |(name, end): (&HeaderName, usize)| {
        let value = HeaderValue::from_maybe_shared(text.slice(std::mem::replace(&mut begin, end)..end)).ok()?;
        Some((name.clone(), value))
    };
    ends.into_iter().filter_map(field).collect()
}

type Names = [HeaderName; 3];
static OPENAI_REQUESTS: Names = [
    HeaderName::from_static("x-ratelimit-limit-requests"),
    HeaderName::from_static("x-ratelimit-remaining-requests"),
    HeaderName::from_static("x-ratelimit-reset-requests"),
];
static OPENAI_TOKENS: Names = [
    HeaderName::from_static("x-ratelimit-limit-tokens"),
    HeaderName::from_static("x-ratelimit-remaining-tokens"),
    HeaderName::from_static("x-ratelimit-reset-tokens"),
];
static ANTHROPIC_REQUESTS: Names = [
    HeaderName::from_static("anthropic-ratelimit-requests-limit"),
    HeaderName::from_static("anthropic-ratelimit-requests-remaining"),
    HeaderName::from_static("anthropic-ratelimit-requests-reset"),
];
static ANTHROPIC_TOKENS: Names = [
    HeaderName::from_static("anthropic-ratelimit-tokens-limit"),
    HeaderName::from_static("anthropic-ratelimit-tokens-remaining"),
    HeaderName::from_static("anthropic-ratelimit-tokens-reset"),
];
static ANTHROPIC_INPUT: Names = [
    HeaderName::from_static("anthropic-ratelimit-input-tokens-limit"),
    HeaderName::from_static("anthropic-ratelimit-input-tokens-remaining"),
    HeaderName::from_static("anthropic-ratelimit-input-tokens-reset"),
];
static ANTHROPIC_OUTPUT: Names = [
    HeaderName::from_static("anthropic-ratelimit-output-tokens-limit"),
    HeaderName::from_static("anthropic-ratelimit-output-tokens-remaining"),
    HeaderName::from_static("anthropic-ratelimit-output-tokens-reset"),
];

/// Header fields of the upstream and ours; ours replace those of the same name.
pub(super) fn merged(
    theirs: &[(HeaderName, HeaderValue)],
    ours: &[(HeaderName, HeaderValue)],
) -> Vec<(HeaderName, HeaderValue)> {
    let kept = theirs.iter().filter(|(name, _)| !ours.iter().any(|(own, _)| own == name));
    kept.chain(ours).cloned().collect()
}

/// Error for a request that a limit refuses: the message, the delay before a retry, and the limit's header fields.
pub(super) fn denied(
    claim: &Claim<'_>,
    denied: &Denied,
    by: &str,
    mut fields: Vec<(HeaderName, HeaderValue)>,
) -> Failure {
    let Claim { limit, measure, amount, .. } = claim;
    let (rule, unit) = (measure.name(), measure.unit);
    let never = *amount > measure.max;
    let wait = match denied.wait_ms {
        _ if never => None,
        Some(ms) => Some(Duration::from_millis(ms.max(1))),
        None => Some(OTHERS_END),
    };
    let soon = wait.is_some_and(|wait| wait <= WAIT_OBEYED);
    let what = match unit {
        Unit::Requests => String::new(),
        Unit::InFlight => String::new(),
        // The prompt has not been counted: the limit has nothing left at all.
        _ if *amount <= 1 => String::new(),
        _ => format!(" This request needs up to {}.", unit.shown(*amount)),
    };
    let then = match wait {
        None => " It can never fit: ask for fewer tokens, or send less.".to_owned(),
        Some(_) if unit == Unit::InFlight => " Try again when another request has ended.".to_owned(),
        Some(wait) => format!(" Try again in {}.", pause(wait)),
    };
    let message = format!(
        "The limit {limit:?} is reached: {rule} allows {}, of which {} are used or reserved (by {by}).{what}{then}",
        unit.shown(measure.max),
        unit.shown(denied.used),
    );
    if let Some(wait) = wait {
        fields.push((HeaderName::from_static("retry-after-ms"), (wait.as_millis() as u64).into()));
        if !soon {
            // Longer than a `Failure`'s own Retry-After, which is bounded to what SDKs obey.
            fields.push((header::RETRY_AFTER, (wait.as_millis().div_ceil(1000) as u64).into()));
        }
    }
    let refusal = LimitRefusal { rule: format!("{limit}: {rule}"), retry: soon, fields };
    let failure = Failure::new(ErrorKind::RateLimited, message).log(format!("limit {limit}: {rule}"));
    let failure = Failure { shape: Some(Box::new(shape(measure, never))), refusal: Some(Box::new(refusal)), ..failure };
    match wait.filter(|_| soon) {
        Some(wait) => failure.retry_after(wait),
        None => failure,
    }
}

/// Shape of the error. A used-up budget is not a rate limit: clients that pause and retry would only knock again.
fn shape(measure: &Measure, never: bool) -> ErrorShape {
    let budget =
        measure.unit == Unit::NanoUsd || (measure.unit.is_metered() && matches!(measure.span, Span::Day | Span::Month));
    match measure.unit {
        _ if budget && !never => error_shape::QUOTA,
        Unit::Requests | Unit::InFlight => error_shape::RATE_LIMIT_REQUESTS,
        _ => error_shape::RATE_LIMIT_TOKENS,
    }
}

/// A time in OpenAI's format: `120ms`, `1.5s`, `6m0s`, `2h0m5s`.
fn pause(time: Duration) -> String {
    let mut out = String::new();
    say_pause(&mut out, time);
    out
}

fn say_pause(out: &mut String, time: Duration) {
    let (seconds, ms) = (time.as_secs(), time.subsec_millis());
    let (hours, minutes, rest) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let mut digits = itoa::Buffer::new();
    let mut say = |number: u64, unit: &str| {
        *out += digits.format(number);
        *out += unit;
    };
    match (hours, minutes) {
        (0, 0) if seconds == 0 => say(ms.into(), "ms"),
        (0, 0) if ms == 0 => say(rest, "s"),
        (0, 0) => {
            // Writing to a string does not fail.
            let _ = write!(out, "{rest}.{ms:03}");
            out.truncate(out.trim_end_matches('0').len());
            out.push('s');
        }
        (0, _) => {
            say(minutes, "m");
            say(rest, "s");
        }
        _ => {
            say(hours, "h");
            say(minutes, "m");
            say(rest, "s");
        }
    }
}

/// Text of a time in Unix seconds by RFC 3339, in UTC.
fn rfc3339(seconds: u64) -> String {
    let (year, month, day) = penstock_govern::civil(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn times_are_said_as_each_api_says_them() {
        let said = |ms: u64| pause(Duration::from_millis(ms));
        assert_eq!([said(0), said(120), said(1500), said(2000), said(90_000)], ["0ms", "120ms", "1.5s", "2s", "1m30s"]);
        assert_eq!([said(360_000), said(7_205_000)], ["6m0s", "2h0m5s"]);
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(1_709_210_096), "2024-02-29T12:34:56Z");
    }

    #[track_caller]
    fn check(unit: Unit, span: Span, asked: u64, wait_ms: Option<u64>, code: &str, retry: bool, words: &str) {
        let limit: Arc<str> = "standard".into();
        let measure = Measure { unit, span, max: 100 };
        let claim = Claim { limit: &limit, subject: "a", measure, amount: asked, tag: 0 };
        let failure = denied(&claim, &Denied { claim: 0, used: 99, wait_ms }, "key", Vec::new());
        assert_eq!((failure.status(), failure.shape().code, failure.should_retry()), (429, Some(code), retry));
        assert!(failure.message.contains("\"standard\"") && failure.message.contains(words), "{}", failure.message);
        assert_eq!(failure.source(), "gateway");
        assert_eq!(failure.retry_after.is_some(), retry, "longer waits are told, not advised");
    }

    #[test]
    fn a_refusal_names_the_rule_and_when() {
        check(Unit::Requests, Span::Minute, 1, Some(12_000), "rate_limit_exceeded", true, "Try again in 12s");
        check(Unit::Requests, Span::Hour, 1, Some(600_000), "rate_limit_exceeded", false, "Try again in 10m0s");
        check(Unit::Tokens, Span::Minute, 5, Some(1), "rate_limit_exceeded", true, "needs up to 5 tokens");
        check(Unit::Tokens, Span::Minute, 500, None, "rate_limit_exceeded", false, "never fit");
        check(Unit::NanoUsd, Span::Month, 5, Some(86_400_000), "insufficient_quota", false, "usd_per_month");
        check(Unit::InFlight, Span::Now, 1, None, "rate_limit_exceeded", true, "another request has ended");
    }

    /// A refusal never reports a rest, whichever gateway has used it.
    #[test]
    fn what_all_gateways_have_used_is_told() {
        let minute = Measure { unit: Unit::Requests, span: Span::Minute, max: 10 };
        let day = Measure { span: Span::Day, max: 1000, ..minute };
        let mut standings = vec![(minute, Standing { used: 6, reserved: 1, reset_ms: 500 })];
        raise(&mut standings, day, 100, Some(3_600_000));
        assert_eq!(standings[0].0, minute, "of which less is left");
        raise(&mut standings, minute, 10, Some(30_000));
        let now = Now { mono_ms: 1_000_000, wall_ms: 0 };
        let told = fields(Dialect::OpenAi, &standings, now);
        let text: Vec<_> = told.iter().map(|(_, value)| value.to_str().expect("text")).collect();
        assert_eq!(text, ["10", "0", "30s"]);
        raise(&mut standings, minute, 3, None);
        assert_eq!(standings[0].1.used, 10, "what is known here counts too");
    }

    #[test]
    fn the_tightest_measure_is_told() {
        let limits: [Arc<str>; 2] = ["wide".into(), "narrow".into()];
        let mut book = Book::new();
        let now = Now { mono_ms: 1_000_000, wall_ms: 0 };
        let claim = |at: usize, max: u64| Claim {
            limit: &limits[at],
            subject: "a",
            measure: Measure { unit: Unit::Requests, span: Span::Minute, max },
            amount: 1,
            tag: 0,
        };
        let claims = [claim(0, 1000), claim(1, 4)];
        let hold = book.reserve(&claims, now).expect("room");
        let told = fields(Dialect::OpenAi, &standings(&mut book, &claims, now), now);
        let text: Vec<_> =
            told.iter().map(|(name, value)| format!("{name}: {}", value.to_str().expect("text"))).collect();
        assert_eq!(
            text,
            ["x-ratelimit-limit-requests: 4", "x-ratelimit-remaining-requests: 3", "x-ratelimit-reset-requests: 1m1s"]
        );
        book.settle(hold, now, |_, _| Some(1));
        let told = fields(Dialect::Anthropic, &standings(&mut book, &claims, now), now);
        assert_eq!(told[2].0, "anthropic-ratelimit-requests-reset");
        assert_eq!(told[2].1, "1970-01-01T00:01:01Z");
    }
}
