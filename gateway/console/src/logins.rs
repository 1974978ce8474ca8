//! Sign-ins with an identity provider that are under way: a person has left for the provider and is expected back.
//!
//! A sign-in is found by its `state` and belongs to the browser that has its cookie; it is taken out when it is finished, whatever the
//! outcome, so that no answer counts twice. Bounded in number, per address and in time.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use subtle::ConstantTimeEq;

use crate::sessions::{Digest, digest};

/// Most sign-ins under way; a further one is refused until one is finished or over.
pub const LOGINS_MAX: usize = 512;
/// Most sign-ins under way from one network: an IPv4 address, or a /64 of IPv6; the oldest of them makes room.
pub const PEER_LOGINS_MAX: usize = 16;
/// Time that a person has at the provider.
pub const LOGIN_LIFE: Duration = Duration::from_secs(600);

/// Sign-in under way, with the secrets that bind it.
#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    /// Value that the provider's answer must repeat.
    pub state: String,
    /// Secret of the browser, for its cookie.
    pub cookie: String,
    /// Value that the ID token must repeat.
    pub nonce: String,
    /// Secret of RFC 7636.
    pub verifier: String,
    /// URL that the provider sends the browser back to.
    pub redirect_url: String,
    /// Issuer and client id that the sign-in was begun with.
    pub provider: [String; 2],
    /// Moment at which the person left for the provider.
    pub began: Instant,
}

struct Pending {
    login: Login,
    network: u128,
}

/// All sign-ins under way, in memory alone.
#[derive(Default)]
pub struct Logins(Mutex<HashMap<Digest, Pending>>);

impl Logins {
    /// Begins a sign-in; `None`: too many are under way. `random`: state, cookie, nonce and verifier, never used before.
    /// `network`: that of the browser's address, in which one client may own every address.
    pub fn begin(
        &self,
        provider: [String; 2],
        redirect_url: String,
        random: [[u8; 32]; 4],
        network: u128,
        now: Instant,
    ) -> Option<Login> {
        let [state, cookie, nonce, verifier] = random.map(|bytes| URL_SAFE_NO_PAD.encode(bytes));
        let login = Login { state, cookie, nonce, verifier, redirect_url, provider, began: now };
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, pending| now.saturating_duration_since(pending.login.began) < LOGIN_LIFE);
        let own = all.iter().filter(|(_, pending)| pending.network == network);
        if own.clone().count() >= PEER_LOGINS_MAX {
            let oldest = own.min_by_key(|(_, pending)| pending.login.began).map(|(state, _)| *state);
            oldest.into_iter().for_each(|state| _ = all.remove(&state));
        }
        if all.len() >= LOGINS_MAX {
            return None;
        }
        all.insert(digest(login.state.as_bytes()), Pending { login: login.clone(), network });
        Some(login)
    }

    /// Takes the sign-in of an answer out; `None`: its state was never given, is used, or is over, or the cookie is another browser's.
    pub fn take(&self, state: &str, cookie: &str, now: Instant) -> Option<Login> {
        let place = digest(state.as_bytes());
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let pending = all.get(&place)?;
        // Another browser that shows the state does not end the sign-in of the one that began it.
        if !bool::from(digest(pending.login.cookie.as_bytes()).ct_eq(&digest(cookie.as_bytes()))) {
            return None;
        }
        let pending = all.remove(&place)?;
        (now.saturating_duration_since(pending.login.began) < LOGIN_LIFE).then_some(pending.login)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(logins: &Logins, seed: u16, peer: u8, now: Instant) -> Option<Login> {
        let [high, low] = seed.to_be_bytes();
        let random = [1, 2, 3, 4].map(|part| {
            let mut bytes = [part; 32];
            (bytes[0], bytes[1]) = (high, low);
            bytes
        });
        let provider = ["https://idp.example".to_owned(), "console".to_owned()];
        logins.begin(provider, "http://127.0.0.1/console/".into(), random, peer.into(), now)
    }

    #[test]
    fn an_answer_counts_once_and_in_one_browser() {
        let (logins, now) = (Logins::default(), Instant::now());
        let (one, other) = (begin(&logins, 1, 1, now).expect("room"), begin(&logins, 2, 1, now).expect("room"));
        assert_eq!([&one.state, &one.cookie, &one.nonce, &one.verifier].map(String::len), [43; 4], "256 bits each");
        for (state, cookie) in [(&one.state, &other.cookie), (&one.cookie, &one.cookie), (&one.state, &String::new())] {
            assert!(logins.take(state, cookie, now).is_none());
        }
        assert!(logins.take(&one.state, &one.cookie, now).is_some_and(|login| login.nonce == one.nonce));
        assert!(logins.take(&one.state, &one.cookie, now).is_none(), "replayed");
        assert!(logins.take(&other.state, &other.cookie, now + LOGIN_LIFE).is_none(), "too late");
    }

    #[test]
    fn sign_ins_under_way_are_bounded() {
        let (logins, start) = (Logins::default(), Instant::now());
        let mine: Vec<_> = (0..=PEER_LOGINS_MAX as u16)
            .map(|seed| begin(&logins, seed, 1, start + Duration::from_millis(u64::from(seed))).expect("room"))
            .collect();
        let now = start + Duration::from_secs(1);
        assert!(logins.take(&mine[0].state, &mine[0].cookie, now).is_none(), "the oldest made room");
        assert!(logins.take(&mine[1].state, &mine[1].cookie, now).is_some());
        let begun = (100..1000).filter(|seed| begin(&logins, *seed, (seed / 10) as u8, now).is_some()).count();
        assert_eq!(begun, LOGINS_MAX - (PEER_LOGINS_MAX - 1));
        assert!(begin(&logins, 2000, 250, now + LOGIN_LIFE).is_some(), "those that are over leave");
    }
}
