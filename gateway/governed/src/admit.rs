//! Admission of a request: its limits are found, its use is estimated, and all of it is reserved at once, here and in the counters
//! that gateways share. A limit that leaves too little refuses the request.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, HeaderValue};
use penstock_auth::Principal;
use penstock_base::clock;
use penstock_base::error::{Failure, LimitRefusal};
use penstock_govern::{Claim, Denied, Limit, Measure, Now, OnStoreFailure, Reserve, Standing, Unit, Unmetered};
use penstock_http::exchange::new_request_id;
use penstock_proto::ErrorKind;
use penstock_relay::models::Entry;
use penstock_store::{Held, OpenEntry};
use penstock_telemetry::Metric;
use penstock_types::peek::BoundLimits;
use penstock_types::{Dialect, ServiceTier};
use penstock_upstream::Open;
use penstock_upstream::call::Call;

use crate::estimate::{self, Guess};
use crate::journal::Journal;
use crate::rules::{self, Rules, Who};
use crate::shared::{self, Refused};
use crate::subjects::Seen;
use crate::{CLOCK_BASE, Governor, Reservation, limit_headers, surge};

/// Reserves the estimated use of a call; `None`: no limit counts it and the ledger does not note it. Puts the limits'
/// bounds of output into the call. `free`: the gateway answers the call itself. The second value starts the call over the
/// prompt that was tokenized for the estimate.
///
/// # Errors
/// 429: the limits leave too little; 403: a limit counts a unit that cannot be known of this model.
pub async fn admit(
    governor: &Arc<Governor>,
    rules: &Rules,
    principal: &Principal,
    call: &mut Call,
    entry: &Entry,
    free: bool,
) -> Result<(Option<Reservation>, Option<Box<dyn Open>>), Failure> {
    let limits = rules.of(principal, &entry.name)?;
    let noted = is_noted(governor, principal, &limits);
    if limits.is_empty() && !noted {
        return Ok((None, None));
    }
    check_store(governor, &limits)?;
    // A request of a plugin is made within another one, which has the place in flight.
    let placeless = call.asked_by_plugin.then(|| limited_to(&limits, |unit| unit != Unit::InFlight));
    let limits = placeless.as_ref().map_or(limits, |placeless| placeless.iter().collect());
    let who = Who { principal, model: &entry.name, providers: &entry.billing.providers, from: call.client };
    let (guess, opener) = guessed(governor, &limits, &who, call, entry, free).await?;
    let reservation = Reservation::new(governor.clone(), call, entry, guess);
    let mut held = reserve(governor, &limits, &who, reservation).await?;
    limits.iter().for_each(|limit| governor.count_allowed(limit));
    if noted {
        held.note(opened(governor, &limits, &who, ledger_id(call), call.ask.label(), &call.tags));
    }
    Ok((Some(held), opener))
}

/// Refuses a request that cannot fit whatever it needs: each measure of the limits must have room for the `least` of its unit. A
/// client over its limit costs only this look-up.
fn check_room(
    governor: &Governor,
    limits: &[&Arc<Limit>],
    who: &Who<'_>,
    dialect: Dialect,
    least: fn(Unit) -> u64,
) -> Result<(), Failure> {
    let subjects = rules::subjects(limits, who);
    let mut claims = Vec::with_capacity(subjects.len() * 2);
    for (limit, subject) in &subjects {
        for measure in &limit.measures {
            claims.push(Claim { limit: &limit.id, subject, measure: *measure, amount: least(measure.unit), tag: 0 });
        }
    }
    let (mut state, now) = governor.state();
    let Err(denied) = state.book.check(&claims, now) else { return Ok(()) };
    let fields = limit_headers::fields(dialect, &limit_headers::standings(&mut state.book, &claims, now), now);
    drop(state);
    Err(refusal(governor, limits, &claims[denied.claim], &denied, fields))
}

/// Estimated use of a call under these limits, whose bounds of output are put into the call.
async fn guessed(
    governor: &Governor,
    limits: &[&Arc<Limit>],
    who: &Who<'_>,
    call: &mut Call,
    entry: &Entry,
    free: bool,
) -> Result<(Guess, Option<Box<dyn Open>>), Failure> {
    let (bounds, is_metered) = (bounds(limits), limits.iter().any(|limit| limit.needs_tokens()));
    if !free && (is_metered || bounds != BoundLimits::default()) {
        call.count_on_amounts(entry.billing.own)?;
    }
    call.bound_output(bounds);
    let mut opener = None;
    let mut guess = match !free && is_metered {
        true => {
            check_metered(limits, entry, estimate::tier_of(call, entry))?;
            let measured = match entry.billing.own {
                true => {
                    // Before the prompt is tokenized. An answer may be without output and without cost.
                    let least = |unit| u64::from(!matches!(unit, Unit::OutputTokens | Unit::NanoUsd));
                    check_room(governor, limits, who, call.dialect(), least)?;
                    let prepared = entry.upstream.clone().measure(call).await?;
                    opener = prepared.opener;
                    prepared.measured
                }
                false => None,
            };
            Guess::of(call, entry, &governor.learned(&entry.name), measured)
        }
        false => Guess::unguessed(call, entry),
    };
    if limits.iter().any(|limit| limit.reserve == Reserve::Most) {
        guess.reserve = Reserve::Most;
    }
    Ok((guess, opener))
}

/// Checks that the limits leave enough for a call to be made later. Nothing stays reserved, and places in flight are not
/// checked: the call waits for one.
///
/// # Errors
/// As for [`admit`].
pub async fn would_admit(
    governor: &Arc<Governor>,
    rules: &Rules,
    principal: &Principal,
    call: &mut Call,
    entry: &Entry,
) -> Result<(), Failure> {
    let limits = rules.of(principal, &entry.name)?;
    let asked = limited_to(&limits, |unit| unit != Unit::InFlight);
    let limits: Vec<&Arc<Limit>> = asked.iter().filter(|limit| !limit.measures.is_empty()).collect();
    if limits.is_empty() {
        return Ok(());
    }
    check_store(governor, &limits)?;
    let who = Who { principal, model: &entry.name, providers: &entry.billing.providers, from: call.client };
    let (guess, _) = guessed(governor, &limits, &who, call, entry, false).await?;
    let reservation = Reservation::new(governor.clone(), call, entry, guess);
    reserve(governor, &limits, &who, reservation).await?.withdraw();
    Ok(())
}

/// The limits with those of their measures whose unit is counted.
fn limited_to(limits: &[&Arc<Limit>], is_counted: fn(Unit) -> bool) -> Vec<Arc<Limit>> {
    let part = |limit: &&Arc<Limit>| {
        let mut limit = Limit::clone(limit);
        limit.measures.retain(|measure| is_counted(measure.unit));
        Arc::new(limit)
    };
    limits.iter().map(part).collect()
}

/// Use of a model by an operation that the gateway does not parse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Uses {
    /// Unknown use, such as audio or images: tokens and cost cannot be counted.
    Unknown,
    /// No use: tokens are counted, none are generated.
    Nothing,
    /// Unknown use by an operation that a plugin of the operator asks for, such as a moderation: only requests are counted. The
    /// request for which it is asked may hold the last tokens, dollars and the place in flight of the same limits.
    ByPlugin,
}

/// Facts about a request that is counted as one request and no other unit.
pub struct Plain<'a> {
    /// Use of the model by the operation.
    pub uses: Uses,
    /// Dialect of the request, in which it is refused.
    pub dialect: Dialect,
    /// Address of the client; `None`: a Unix socket.
    pub from: Option<IpAddr>,
    /// Bounded name of the request's route, for the ledger.
    pub route: &'a str,
}

/// Reserves one request and one place in flight, and no other unit; for a plugin the request alone.
///
/// # Errors
/// As for [`admit`].
pub async fn admit_plain(
    governor: &Arc<Governor>,
    rules: &Rules,
    principal: &Principal,
    entry: &Entry,
    plain: &Plain<'_>,
) -> Result<Option<Reservation>, Failure> {
    let limits = rules.of(principal, &entry.name)?;
    let noted = is_noted(governor, principal, &limits);
    if limits.is_empty() && !noted {
        return Ok(None);
    }
    check_store(governor, &limits)?;
    let who = Who { principal, model: &entry.name, providers: &entry.billing.providers, from: plain.from };
    let strict = limits.iter().find(|limit| limit.needs_tokens() && limit.unmetered == Unmetered::Refuse);
    match (plain.uses, strict) {
        (Uses::Unknown, Some(limit)) => {
            return Err(unmetered(limit, "its tokens and cost cannot be counted"));
        }
        (Uses::Unknown, None) | (Uses::Nothing | Uses::ByPlugin, _) => {}
    }
    let requests = (plain.uses == Uses::ByPlugin).then(|| limited_to(&limits, |unit| unit == Unit::Requests));
    let limits = requests.as_ref().map_or(limits, |requests| requests.iter().collect());
    let mut held = Reservation::opaque(governor.clone(), entry);
    held.dialect = plain.dialect;
    let mut held = reserve(governor, &limits, &who, held).await?;
    limits.iter().for_each(|limit| governor.count_allowed(limit));
    if noted {
        held.note(opened(governor, &limits, &who, new_request_id(), plain.route, &[]));
    }
    Ok(Some(held))
}

/// Ends a request that no model has answered: frees its holds, or settles them by the failure.
pub fn close(held: Option<Reservation>, failure: Option<&Failure>) {
    let Some(held) = held else { return };
    match failure {
        None => held.free(),
        Some(failure) => held.refused(failure),
    }
}

/// Returns true if the ledger notes a request: it must have an owner or a limit.
fn is_noted(governor: &Governor, principal: &Principal, limits: &[&Arc<Limit>]) -> bool {
    let owned = principal.key.is_some() || principal.user.is_some();
    governor.journal().is_some() && (owned || !limits.is_empty())
}

/// Refuses under a closed limit while the ledger cannot be written, or what the limit counts is not read from it yet.
fn check_store(governor: &Governor, limits: &[&Arc<Limit>]) -> Result<(), Failure> {
    let is_failing = governor.journal().is_some_and(Journal::is_failing);
    let is_closed = |limit: &&&Arc<Limit>| limit.on_store_failure == OnStoreFailure::Closed;
    let strict = limits.iter().filter(is_closed).find(|limit| is_failing || governor.is_unread(&limit.id));
    strict.map_or(Ok(()), |limit| Err(uncounted(&limit.id)))
}

/// Error for a request under a closed limit that the store does not count. The limit refuses it, so that work in the
/// background waits as for its own limit.
fn uncounted(limit: &str) -> Failure {
    let message = format!("The limit {limit:?} cannot be counted at the moment. Try again shortly.");
    let failure = Failure::new(ErrorKind::Unavailable, message).retry_after(Duration::from_secs(5));
    let refusal = LimitRefusal { rule: format!("{limit}: not counted"), retry: true, fields: Vec::new() };
    Failure { refusal: Some(Box::new(refusal)), ..failure.log("the store is failing, or its ledger is not read yet") }
}

/// Id of the request's ledger entry. An id chosen by the client is made unique by ours in front of it: a ledger counts
/// every id once, and ids stay in the order of time whatever clients send.
fn ledger_id(call: &Call) -> String {
    match call.id_is_clients {
        true => format!("{}.{}", new_request_id(), call.request_id),
        false => call.request_id.clone(),
    }
}

fn opened(
    governor: &Governor,
    limits: &[&Arc<Limit>],
    who: &Who<'_>,
    request: String,
    route: &str,
    tags: &[(String, String)],
) -> OpenEntry {
    let (at, gateway) = (clock::unix_seconds(), governor.journal().map(|journal| journal.gateway.clone()));
    let subject = governor.subjects.of(&Seen { who, route, limits, tags });
    OpenEntry { at, request, gateway: gateway.unwrap_or_default(), subject, held: Held::default() }
}

async fn reserve(
    governor: &Governor,
    limits: &[&Arc<Limit>],
    who: &Who<'_>,
    mut reservation: Reservation,
) -> Result<Reservation, Failure> {
    if limits.is_empty() {
        return Ok(reservation);
    }
    let subjects = rules::subjects(limits, who);
    let mut claims = Vec::with_capacity(subjects.len() * 2);
    for (limit, subject) in &subjects {
        for measure in &limit.measures {
            let amount = reservation.guess.of_unit(measure.unit, limit.reserve);
            claims.push(Claim {
                limit: &limit.id,
                subject,
                measure: *measure,
                amount,
                tag: reservation.tag(limit, subject),
            });
        }
    }
    // All gateways count these together; a surge bounds the requests of this one alone, and may lower claims of its own book.
    let common = governor.shared.get().map(|_| claims.clone()).unwrap_or_default();
    for (limit, subject) in &subjects {
        let tag = reservation.tag(limit, subject);
        surge::add(governor, limit, subject, &mut claims, tag);
    }
    let (held, mut standings, now) = governor.hold(&claims);
    match held {
        Ok(hold) => {
            reservation.hold(hold);
            reservation = together(governor, limits, &common, reservation, &mut standings, now).await?;
            reservation.tell(limit_headers::fields(reservation.dialect, &standings, now));
            Ok(reservation)
        }
        Err(denied) => {
            let fields = limit_headers::fields(reservation.dialect, &standings, now);
            Err(refusal(governor, limits, &claims[denied.claim], &denied, fields))
        }
    }
}

/// Reserves the claims in the shared counters too. Their standings replace the local ones in the header fields where they are tighter.
async fn together(
    governor: &Governor,
    limits: &[&Arc<Limit>],
    claims: &[Claim<'_>],
    mut reservation: Reservation,
    standings: &mut [(Measure, Standing)],
    now: Now,
) -> Result<Reservation, Failure> {
    let Some(shared) = governor.shared.get().filter(|_| !claims.is_empty()) else { return Ok(reservation) };
    let limit_of = |claim: &Claim<'_>| limits.iter().find(|limit| limit.id == *claim.limit);
    let policy = |at: usize| limit_of(&claims[at]).map_or(OnStoreFailure::Open, |limit| limit.on_store_failure);
    let refused = match shared.take(claims, policy).await {
        Ok(portions) => {
            reservation.share(shared.clone(), portions);
            let used = shared.used(claims);
            claims
                .iter()
                .zip(used)
                .for_each(|(claim, used)| limit_headers::raise(standings, claim.measure, used, None));
            return Ok(reservation);
        }
        Err(refused) => refused,
    };
    let dialect = reservation.dialect;
    reservation.undo();
    match refused {
        Refused::Away { claim } => Err(uncounted(claims[claim].limit)),
        Refused::Full { claim, used } => {
            let claim = &claims[claim];
            let wait_ms = shared::wait_ms(claim.measure.span);
            limit_headers::raise(standings, claim.measure, used, wait_ms);
            let fields = limit_headers::fields(dialect, standings, now);
            Err(refusal(governor, limits, claim, &Denied { claim: 0, used, wait_ms }, fields))
        }
    }
}

/// Error for a request that a limit refuses, counted in metrics and log.
fn refusal(
    governor: &Governor,
    limits: &[&Arc<Limit>],
    claim: &Claim<'_>,
    denied: &Denied,
    fields: Vec<(HeaderName, HeaderValue)>,
) -> Failure {
    governor.metrics.count(Metric::LimitDecisions, &[("limit", claim.limit), ("decision", "denied")]);
    governor.refusals.add(claim.limit, claim.subject, (CLOCK_BASE + governor.began.elapsed()).as_millis() as u64);
    let by = limits.iter().find(|limit| limit.id == *claim.limit).map_or("key", |limit| limit.by.name());
    limit_headers::denied(claim, denied, by, fields)
}

/// Tightest bounds of output tokens: the default for requests without one, and the maximum.
fn bounds(limits: &[&Arc<Limit>]) -> BoundLimits {
    let of = |bound: fn(&Limit) -> Option<u32>| limits.iter().filter_map(|limit| bound(limit)).min();
    BoundLimits { default: of(|limit| limit.max_tokens_default), max: of(|limit| limit.max_tokens_max) }
}

/// Refuses a metered call under a strict limit on money where no price is known.
fn check_metered(limits: &[&Arc<Limit>], entry: &Entry, tier: ServiceTier) -> Result<(), Failure> {
    let billing = &entry.billing;
    let why = match billing.dearest.is_none_or(|price| price.knows(tier)) {
        _ if billing.unpriced => "the model has no price here",
        false => "its service tier has no price here",
        true => return Ok(()),
    };
    let is_strict = |limit: &&&Arc<Limit>| limit.measures(Unit::NanoUsd) && limit.unmetered == Unmetered::Refuse;
    limits.iter().find(is_strict).map_or(Ok(()), |limit| Err(unmetered(limit, why)))
}

fn unmetered(limit: &Limit, why: &str) -> Failure {
    let message = format!("The limit {:?} does not allow this request: {why}.", limit.id);
    Failure::new(ErrorKind::Forbidden, message).log("set a price, or unmetered = \"allow\" on the limit")
}
