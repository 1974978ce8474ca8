//! Looks at the groups of people who are signed in: the provider is asked, and the session keeps, changes or ends.
//!
//! Each look is a task of its own with deadlines, so a slow one holds one place of [`Renewals`](crate::renewals::Renewals) and nothing
//! else.

use std::sync::Arc;
use std::time::Instant;

use http::{Method, StatusCode};
use penstock_auth::jwt::{Grant, RenewalFault};
use penstock_base::clock;
use penstock_config::{OIDC, OidcConfig};
use penstock_console::{Holder, Person, Place};
use penstock_telemetry::Metric;
use serde_json::json;

use crate::audit::{Act, Did, note};
use crate::renewals::{AGAIN, Look, again, pause, random_byte};
use crate::sign_on::caller;
use crate::state::Admin;

/// Runs a turn on the serving thread: looks, revocations, ends of sessions.
pub(crate) fn tick(admin: &Admin) {
    let serving = admin.gateway.serving();
    let config = &serving.config.admin;
    let Some(oidc) = config.oidc.as_ref().filter(|_| config.console) else {
        // There is no provider any more that could be told.
        return admin.renewals.clear();
    };
    let now = Instant::now();
    let holder = |place| match admin.sessions.holder(place, now)? {
        Holder::Person(person) => Some(person),
        Holder::Key(_) => None,
    };
    let turn = admin.renewals.turn(oidc, &oidc.provider.registration(), holder, now, clock::unix_seconds());
    turn.orphans.into_iter().for_each(|grant| revoke(admin, grant));
    for (place, person, grant) in turn.stale {
        admin.sessions.close(place);
        grant.into_iter().for_each(|grant| revoke(admin, grant));
        tokio::spawn(ended(
            admin.clone(),
            person,
            "the identity provider has not named the groups for too long".into(),
        ));
    }
    for look in turn.looks {
        tokio::spawn(looked(admin.clone(), oidc.clone(), look));
    }
}

/// Reads the groups of a session again; the session is kept, changed or ended.
async fn looked(admin: Admin, oidc: OidcConfig, look: Look) {
    let Look { place, person, mut grant, permit: _permit } = look;
    let renewed = match admin.directions.of(&oidc.provider).await {
        Ok(endpoints) => {
            let (keys, now) = (&admin.provider_keys, clock::unix_seconds());
            oidc.provider.renew(&endpoints, keys, &mut grant, &person.subject, now).await
        }
        Err(_) => Err(RenewalFault::Away("discovery has failed".into())),
    };
    match renewed {
        Ok(Some(groups)) => named(&admin, place, &person, groups, grant).await,
        Ok(None) => named(&admin, place, &person, person.groups.clone(), grant).await,
        Err(RenewalFault::Over(why)) => {
            admin.sessions.close(place);
            admin.renewals.forget(place);
            ended(admin.clone(), person, why).await;
        }
        Err(RenewalFault::Away(why)) => {
            counted(&admin, "failed");
            let wait = again(oidc.refresh.unwrap_or(AGAIN), random_byte());
            match admin.renewals.give_back(place, grant, true, wait, Instant::now()) {
                Err(grant) => revoke(&admin, grant),
                Ok(true) => {}
                Ok(false) => {
                    let stale_s = oidc.stale.as_secs();
                    tracing::warn!(
                        subject = person.subject,
                        why,
                        stale_s,
                        "groups of a session could not be read again: the last ones read stay in use"
                    );
                }
            }
        }
    }
}

/// Gives a session the groups that the provider has named.
async fn named(admin: &Admin, place: Place, before: &Arc<Person>, groups: Vec<String>, grant: Grant) {
    let now = Instant::now();
    let Some(person) = admin.sessions.regroup(place, groups, now) else {
        admin.renewals.forget(place);
        return revoke(admin, grant);
    };
    let serving = admin.gateway.serving();
    let Some(oidc) = &serving.config.admin.oidc else { return };
    let role = |person| caller(oidc, person).map(|caller| caller.role);
    let Some(now_role) = role(&person) else {
        admin.sessions.close(place);
        admin.renewals.forget(place);
        revoke(admin, grant);
        return ended(admin.clone(), person, "none of the groups has a role here any more".into()).await;
    };
    let wait = pause(oidc.refresh.unwrap_or(AGAIN), random_byte());
    match admin.renewals.give_back(place, grant, false, wait, now) {
        Err(grant) => return revoke(admin, grant),
        Ok(true) => tracing::info!(subject = person.subject, "groups of a session are read again"),
        Ok(false) => {}
    }
    let was = role(before);
    if was == Some(now_role) {
        return counted(admin, "kept");
    }
    counted(admin, "changed");
    let detail = json!({ "person": person.name, "before": was.map(|role| role.name()), "after": now_role.name() });
    told(admin, &person, StatusCode::OK, detail).await;
}

/// Counts and notes the end of a session at a look.
async fn ended(admin: Admin, person: Arc<Person>, why: String) {
    counted(&admin, "ended");
    tracing::info!(subject = person.subject, why, "a session at the console has ended");
    told(&admin, &person, StatusCode::FORBIDDEN, json!({ "person": person.name, "why": why })).await;
}

/// Writes the outcome of a look into the audit log as `sign_on.renew`.
async fn told(admin: &Admin, person: &Person, status: StatusCode, detail: serde_json::Value) {
    let subject = format!("{OIDC}{}", person.subject);
    let operation = Some("renew_sign_on".to_owned());
    let act = Act { operation, method: Method::POST, peer: None, target: subject.clone() };
    note(admin, &act, &subject, status, Did { target: None, detail }).await;
}

fn counted(admin: &Admin, outcome: &str) {
    admin.gateway.metrics.count(Metric::ConsoleRenewals, &[("outcome", outcome)]);
}

/// Tells the provider that tokens are no longer needed, if it takes that.
pub(crate) fn revoke(admin: &Admin, grant: Grant) {
    if !grant.is_revocable() {
        return;
    }
    let Ok(place) = admin.renewals.revocations.clone().try_acquire_owned() else { return };
    let admin = admin.clone();
    tokio::spawn(async move {
        let _place = place;
        let serving = admin.gateway.serving();
        let Some(oidc) = &serving.config.admin.oidc else { return };
        let Ok(endpoints) = admin.directions.of(&oidc.provider).await else { return };
        if let Err(fault) = oidc.provider.revoke(&endpoints, &grant).await {
            tracing::warn!(issuer = oidc.provider.issuer, %fault, "a refresh token could not be revoked");
        }
    });
}
