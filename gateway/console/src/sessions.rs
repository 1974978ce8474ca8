//! Sessions of people who have signed in with an admin key, or at an identity provider.
//!
//! A session is two random values of 256 bits, and both are needed for every call: the id travels in a cookie that scripts cannot read,
//! the token in a header that other pages cannot set. Browsers send cookies to every port of a host, so another server on the same
//! machine may see the id; without the token it is worth nothing. Only SHA-256 digests are kept.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq;

/// Most sessions at once; where there are as many, the one that has been idle longest ends for a new one.
pub const SESSIONS_MAX: usize = 256;
/// Most sessions of one admin key or person; the one that has been idle longest ends for a new one.
pub const KEY_SESSIONS_MAX: usize = 32;
/// Most event streams of one session.
pub const STREAMS_MAX: usize = 4;
/// Time without a call after which a session ends. Event streams do not count as calls.
pub const IDLE: Duration = Duration::from_secs(60 * 60);
/// Time after which a session ends in any case.
pub const ABSOLUTE: Duration = Duration::from_secs(12 * 60 * 60);

/// Most sign-outs at the provider that are remembered for sign-ins under way; beyond it the oldest is forgotten.
const SIGN_OUTS_MAX: usize = 256;
/// Time for which a sign-out is remembered: an ID token that is older than this opens no session.
const SIGN_OUT_KEPT: Duration = Duration::from_secs(12 * 60);

/// SHA-256 of a secret.
pub type Digest = [u8; 32];

/// SHA-256 of `secret`.
#[must_use]
pub fn digest(secret: &[u8]) -> Digest {
    Sha256::digest(secret).into()
}

/// Place of a session among all: the digest of its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place(Digest);

/// Session that was opened: the only time that its secrets are told.
#[derive(Clone, PartialEq, Eq)]
pub struct Opened {
    /// Place of the session.
    pub place: Place,
    /// Id, for the cookie.
    pub id: String,
    /// Token, for the header of every call.
    pub token: String,
}

/// Person whom an identity provider has named; the session is worth what the config gives to the groups now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Person {
    /// Issuer and client id of the sign-in; under another one, the session is over.
    pub provider: [String; 2],
    /// Id of the person at the provider.
    pub subject: String,
    /// Name to show.
    pub name: String,
    /// Groups of the person as the provider named them last.
    pub groups: Vec<String>,
    /// Id of the person's session at the provider, where it named one.
    pub session: Option<String>,
    /// Unix second of the sign-in by the provider's clock.
    pub issued: u64,
    /// Moment at which the person left for the provider to sign in.
    pub began: Instant,
}

/// Sign-out at an identity provider.
#[derive(Clone, Copy, Debug)]
pub struct SignOut<'a> {
    /// Issuer and client id that it is for.
    pub provider: &'a [String; 2],
    /// Id of the person; `None`: whoever has the session.
    pub subject: Option<&'a str>,
    /// Id of the session at the provider; `None`: all of the person's.
    pub session: Option<&'a str>,
    /// Unix second of the sign-out by the provider's clock.
    pub at: u64,
}

impl SignOut<'_> {
    fn kept(&self, now: Instant) -> SignedOut {
        SignedOut {
            provider: self.provider.clone(),
            subject: self.subject.map(str::to_owned),
            session: self.session.map(str::to_owned),
            at: self.at,
            heard: now,
        }
    }
}

/// Sign-out of late, which a sign-in that was under way must not survive.
struct SignedOut {
    provider: [String; 2],
    subject: Option<String>,
    session: Option<String>,
    at: u64,
    heard: Instant,
}

impl SignedOut {
    fn is_fresh(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.heard) < SIGN_OUT_KEPT
    }

    /// Returns true if the sign-out ends the sign-in of `person`: the sign-in is no later, and its person and session are those
    /// that the sign-out names. The provider's clock counts whole seconds: within the same second, a sign-in counts as later if
    /// it began after the sign-out arrived here.
    fn ends(&self, person: &Person) -> bool {
        self.provider == person.provider
            && person.issued <= self.at
            && person.began <= self.heard
            && (self.subject.is_some() || self.session.is_some())
            && self.subject.as_ref().is_none_or(|subject| *subject == person.subject)
            && self.session.as_ref().is_none_or(|session| Some(session) == person.session.as_ref())
    }
}

/// Holder of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holder {
    /// Whoever has the admin key of that digest; the session is worth what the key is worth now.
    Key(Digest),
    /// Person of an identity provider.
    Person(Arc<Person>),
}

impl Holder {
    /// Returns true if two sessions count as those of one holder.
    fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Person(one), Self::Person(two)) => (&one.provider, &one.subject) == (&two.provider, &two.subject),
            _ => self == other,
        }
    }
}

/// Session whose id and token were right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signed {
    /// Place of the session.
    pub place: Place,
    /// Holder of the session.
    pub holder: Holder,
    /// Longest time that the session still lasts.
    pub left: Duration,
}

/// Reason why a call is not taken for a session's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// No session has the id: it was never given, has ended, or its time is over.
    Unknown,
    /// The session is there, and the token is missing or wrong.
    Token,
}

struct Session {
    holder: Holder,
    /// Longest time that the session lasts.
    life: Duration,
    token: Digest,
    began: Instant,
    used: Instant,
    streams: usize,
}

impl Session {
    fn is_over(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.used) >= IDLE || now.saturating_duration_since(self.began) >= self.life
    }
}

/// All sessions of a gateway, in memory alone: they end with the process.
#[derive(Default)]
pub struct Sessions(Mutex<All>);

#[derive(Default)]
struct All {
    open: HashMap<Place, Session>,
    /// Sign-outs of late, the oldest first.
    signed_out: VecDeque<SignedOut>,
}

impl Sessions {
    fn all(&self) -> MutexGuard<'_, All> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a session that lasts for `life`, and never longer than [`ABSOLUTE`]; `None`: the person has signed out at the provider while
    /// the sign-in was under way. `random`: the id and the token, never used before.
    pub fn open(&self, holder: Holder, life: Duration, random: [[u8; 32]; 2], now: Instant) -> Option<Opened> {
        let [id, token] = random.map(|bytes| URL_SAFE_NO_PAD.encode(bytes));
        let All { open: all, signed_out } = &mut *self.all();
        if let Holder::Person(person) = &holder
            && signed_out.iter().any(|sign_out| sign_out.is_fresh(now) && sign_out.ends(person))
        {
            return None;
        }
        all.retain(|_, session| !session.is_over(now));
        let is_own = |session: &Session| session.holder.is_same(&holder);
        let is_crowd = all.values().filter(|session| is_own(session)).count() >= KEY_SESSIONS_MAX;
        if is_crowd || all.len() >= SESSIONS_MAX {
            let those = all.iter().filter(|(_, session)| !is_crowd || is_own(session));
            let idle = those.min_by_key(|(_, session)| session.used).map(|(place, _)| *place);
            idle.into_iter().for_each(|place| _ = all.remove(&place));
        }
        let (life, token_digest) = (life.min(ABSOLUTE), digest(token.as_bytes()));
        let session = Session { holder, life, token: token_digest, began: now, used: now, streams: 0 };
        let place = Place(digest(id.as_bytes()));
        all.insert(place, session);
        Some(Opened { place, id, token })
    }

    /// Session of a call with that id and token. The call counts as a use.
    ///
    /// # Errors
    /// [`Fault`]; a wrong token changes nothing.
    pub fn find(&self, id: &str, token: Option<&[u8]>, now: Instant) -> Result<Signed, Fault> {
        let place = Place(digest(id.as_bytes()));
        let all = &mut self.all().open;
        let session = all.get_mut(&place).ok_or(Fault::Unknown)?;
        if session.is_over(now) {
            all.remove(&place);
            return Err(Fault::Unknown);
        }
        let token = digest(token.unwrap_or_default());
        if !bool::from(session.token.ct_eq(&token)) {
            return Err(Fault::Token);
        }
        session.used = now;
        let left = session.life.saturating_sub(now.saturating_duration_since(session.began));
        Ok(Signed { place, holder: session.holder.clone(), left })
    }

    /// Holder of a session, without using it; `None`: the session has ended.
    #[must_use]
    pub fn holder(&self, place: Place, now: Instant) -> Option<Holder> {
        self.all().open.get(&place).filter(|session| !session.is_over(now)).map(|session| session.holder.clone())
    }

    /// Replaces the groups of a person's session, without using it; returns who the person is now. `None`: the session has ended, or is
    /// not a person's.
    pub fn regroup(&self, place: Place, groups: Vec<String>, now: Instant) -> Option<Arc<Person>> {
        let all = &mut self.all().open;
        let session = all.get_mut(&place).filter(|session| !session.is_over(now))?;
        let Holder::Person(person) = &mut session.holder else { return None };
        if person.groups != groups {
            *person = Arc::new(Person { groups, ..(**person).clone() });
        }
        Some(person.clone())
    }

    /// Ends a session and all that belongs to it.
    pub fn close(&self, place: Place) {
        self.all().open.remove(&place);
    }

    /// Ends the sessions of a person who has signed out at the provider, with their event streams; returns their number. A sign-in that
    /// began before the sign-out opens no session afterwards.
    pub fn sign_out(&self, sign_out: SignOut<'_>, now: Instant) -> usize {
        let All { open: all, signed_out } = &mut *self.all();
        let sign_out = sign_out.kept(now);
        let before = all.len();
        all.retain(|_, session| !matches!(&session.holder, Holder::Person(person) if sign_out.ends(person)));
        signed_out.retain(|kept| kept.is_fresh(now));
        if signed_out.len() >= SIGN_OUTS_MAX {
            signed_out.pop_front();
        }
        signed_out.push_back(sign_out);
        before - all.len()
    }

    /// Number of sessions that have not ended.
    #[must_use]
    pub fn count(&self, now: Instant) -> usize {
        self.all().open.values().filter(|session| !session.is_over(now)).count()
    }

    /// Place for an event stream of a session; `None`: it has [`STREAMS_MAX`], or has ended.
    #[must_use]
    pub fn stream(self: &Arc<Self>, place: Place) -> Option<Stream> {
        let all = &mut self.all().open;
        let session = all.get_mut(&place).filter(|session| session.streams < STREAMS_MAX)?;
        session.streams += 1;
        Some(Stream { sessions: self.clone(), place })
    }
}

/// Place of an event stream, given back on drop.
pub struct Stream {
    sessions: Arc<Sessions>,
    /// Session that the stream belongs to.
    pub place: Place,
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Some(session) = self.sessions.all().open.get_mut(&self.place) {
            session.streams -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Digest = [7; 32];

    fn random(seed: u16) -> [[u8; 32]; 2] {
        let [high, low] = seed.to_be_bytes();
        [[high; 32], [low; 32]].map(|mut bytes| {
            bytes[0] = low;
            bytes[1] = high;
            bytes
        })
    }

    fn open(sessions: &Sessions, seed: u16, now: Instant) -> Opened {
        let [id, token] = random(seed);
        sessions.open(Holder::Key(KEY), ABSOLUTE, [id, token.map(|byte| byte ^ 0x55)], now).expect("nobody signed out")
    }

    #[test]
    fn id_and_token_are_both_needed() {
        let (sessions, now) = (Sessions::default(), Instant::now());
        let (one, other) = (open(&sessions, 1, now), open(&sessions, 2, now));
        let find = |id: &str, token: &str| sessions.find(id, Some(token.as_bytes()), now).map(|signed| signed.holder);
        assert_eq!(find(&one.id, &one.token), Ok(Holder::Key(KEY)));
        assert_eq!(sessions.find(&one.id, None, now), Err(Fault::Token));
        for wrong in ["", &other.token, &one.id, &one.token[1..], &one.token.to_lowercase()] {
            assert_eq!(find(&one.id, wrong), Err(Fault::Token), "{wrong}");
        }
        for wrong in ["", &one.token, &format!("{} ", one.id), "0"] {
            assert_eq!(find(wrong, &one.token), Err(Fault::Unknown), "{wrong}");
        }
        assert_eq!(one.id.len(), 43, "256 bits");
        let kept = sessions.all();
        assert!(kept.open.values().all(|session| session.token != one.token.as_bytes()[..32]), "kept as digests");
    }

    #[test]
    fn a_session_ends_by_rest_by_age_and_by_will() {
        let (sessions, start) = (Arc::new(Sessions::default()), Instant::now());
        let of = |opened: &Opened, now| sessions.find(&opened.id, Some(opened.token.as_bytes()), now);
        let idle = open(&sessions, 1, start);
        assert!(of(&idle, start + IDLE - Duration::from_secs(1)).is_ok());
        assert!(of(&idle, start + IDLE).is_ok(), "it was used");
        assert_eq!(of(&idle, start + 2 * IDLE), Err(Fault::Unknown));
        assert_eq!(of(&idle, start), Err(Fault::Unknown), "and it is gone for good");
        let old = open(&sessions, 2, start);
        let mut now = start;
        while now + IDLE / 2 < start + ABSOLUTE {
            now += IDLE / 2;
            assert_eq!(of(&old, now).map(|signed| signed.left), Ok(ABSOLUTE - (now - start)));
        }
        assert_eq!(of(&old, start + ABSOLUTE), Err(Fault::Unknown), "whatever it does");
        let left = open(&sessions, 3, start);
        let place = of(&left, start).expect("there").place;
        let stream = sessions.stream(place).expect("a place");
        sessions.close(place);
        assert_eq!((of(&left, start), sessions.holder(place, start)), (Err(Fault::Unknown), None));
        drop(stream);
        assert_eq!(sessions.count(start), 0);
    }

    #[test]
    fn a_session_ends_at_its_own_bound_or_the_general_one() {
        let (sessions, start) = (Sessions::default(), Instant::now());
        let open =
            |seed: u16, life: Duration| sessions.open(Holder::Key(KEY), life, random(seed), start).expect("open");
        let (short, long) = (open(1, Duration::from_secs(60)), open(2, ABSOLUTE * 2));
        let left = |opened: &Opened, now| {
            sessions.find(&opened.id, Some(opened.token.as_bytes()), now).map(|signed| signed.left)
        };
        assert_eq!(left(&short, start + Duration::from_secs(59)), Ok(Duration::from_secs(1)), "each use, too");
        assert_eq!(left(&short, start + Duration::from_secs(60)), Err(Fault::Unknown));
        assert_eq!(left(&long, start), Ok(ABSOLUTE));
    }

    #[test]
    fn sessions_of_a_person_are_counted_whatever_the_groups() {
        let (sessions, now) = (Sessions::default(), Instant::now());
        let of = |subject: &str, group: u16| {
            let provider = ["https://idp.example".to_owned(), "console".to_owned()];
            let (subject, groups) = (subject.to_owned(), vec![group.to_string()]);
            let (session, issued) = (None, 0);
            Holder::Person(Arc::new(Person {
                provider,
                name: subject.clone(),
                subject,
                groups,
                session,
                issued,
                began: now,
            }))
        };
        for number in 0..100 {
            assert!(sessions.open(of("ada", number), ABSOLUTE, random(number), now).is_some());
        }
        assert!(sessions.open(of("eve", 1), ABSOLUTE, random(500), now).is_some());
        assert_eq!(sessions.count(now), KEY_SESSIONS_MAX + 1);
    }

    #[test]
    fn the_groups_of_a_session_can_change() {
        let (sessions, start) = (Sessions::default(), Instant::now());
        let opened = sessions.open(person("ada", None, 100, start), ABSOLUTE, random(1), start).expect("open");
        let groups = || match sessions.holder(opened.place, start) {
            Some(Holder::Person(person)) => Some(person.groups.clone()),
            _ => None,
        };
        let ops = || vec!["ops".to_owned()];
        assert_eq!(groups(), Some(Vec::new()));
        assert!(sessions.regroup(opened.place, ops(), start).is_some_and(|person| person.subject == "ada"));
        assert_eq!(groups(), Some(ops()));
        assert!(sessions.regroup(opened.place, ops(), start + IDLE).is_none(), "a look is no use of a session");
        let key = open(&sessions, 2, start);
        assert!(sessions.regroup(key.place, ops(), start).is_none(), "keys have no groups");
        sessions.close(opened.place);
        assert!(sessions.regroup(opened.place, ops(), start).is_none());
    }

    fn person(subject: &str, session: Option<&str>, issued: u64, began: Instant) -> Holder {
        Holder::Person(Arc::new(Person {
            provider: ["https://idp.example".into(), "console".into()],
            subject: subject.into(),
            name: subject.into(),
            groups: Vec::new(),
            session: session.map(str::to_owned),
            issued,
            began,
        }))
    }

    #[test]
    fn a_sign_out_ends_what_it_names_and_no_later_sign_in() {
        let provider = ["https://idp.example".to_owned(), "console".to_owned()];
        let other = ["https://idp.example".to_owned(), "other".to_owned()];
        let signed_in =
            [("ada", Some("s1"), 100), ("ada", Some("s2"), 200), ("ada", None, 100), ("eve", Some("s3"), 100)];
        let ended = |subject, session, at, provider: &[String; 2]| {
            let (sessions, now) = (Sessions::default(), Instant::now());
            let open_all = |seed: u16| {
                let people = (seed..).zip(signed_in);
                let opened = people.map(|(seed, (subject, session, issued))| {
                    sessions.open(person(subject, session, issued, now), ABSOLUTE, random(seed), now)
                });
                opened.flatten().count()
            };
            assert_eq!(open_all(1), 4);
            assert!(sessions.open(Holder::Key(KEY), ABSOLUTE, random(9), now).is_some());
            let ended = sessions.sign_out(SignOut { provider, subject, session, at }, now);
            assert_eq!(sessions.count(now), 5 - ended);
            assert_eq!(open_all(10), 4 - ended, "sign-ins that were under way");
            ended
        };
        assert_eq!(ended(Some("ada"), None, 200, &provider), 3);
        assert_eq!(ended(Some("ada"), None, 199, &provider), 2, "not the sign-in after it");
        assert_eq!(ended(Some("ada"), Some("s2"), 200, &provider), 1);
        assert_eq!(ended(None, Some("s3"), 200, &provider), 1);
        assert_eq!(ended(Some("ada"), Some("s3"), 200, &provider), 0, "another person's");
        assert_eq!(ended(None, None, 200, &provider), 0);
        assert_eq!(ended(Some("ada"), None, 200, &other), 0, "another registration");
    }

    #[test]
    fn whoever_signs_in_again_within_the_second_of_the_sign_out_is_let_in() {
        let provider = ["https://idp.example".to_owned(), "console".to_owned()];
        let (sessions, start) = (Sessions::default(), Instant::now());
        let [heard, later] = [1, 2].map(|millis| start + Duration::from_millis(millis));
        let opens = |began| sessions.open(person("ada", None, 100, began), ABSOLUTE, random(1), later).is_some();
        let out = SignOut { provider: &provider, subject: Some("ada"), session: None, at: 100 };
        sessions.sign_out(out, heard);
        assert!(!opens(start) && !opens(heard), "under way when the sign-out came");
        assert!(opens(later), "begun after it");
        assert_eq!(sessions.sign_out(out, later + Duration::from_millis(1)), 1, "and ended by the next sign-out");
    }

    #[test]
    fn sign_outs_are_remembered_within_bounds() {
        let provider = ["https://idp.example".to_owned(), "console".to_owned()];
        let (sessions, now) = (Sessions::default(), Instant::now());
        let out = |subject: &str, now| {
            sessions.sign_out(SignOut { provider: &provider, subject: Some(subject), session: None, at: 100 }, now)
        };
        let opens = |subject, at| sessions.open(person(subject, None, 100, now), ABSOLUTE, random(1), at).is_some();
        out("ada", now);
        assert!(!opens("ada", now + SIGN_OUT_KEPT - Duration::from_secs(1)));
        assert!(opens("ada", now + SIGN_OUT_KEPT));
        for number in 0..SIGN_OUTS_MAX + 1 {
            out(&number.to_string(), now);
        }
        assert_eq!(sessions.all().signed_out.len(), SIGN_OUTS_MAX);
        assert!(opens("0", now) && !opens("1", now) && !opens("256", now), "the oldest is forgotten");
    }

    #[test]
    fn sessions_and_streams_are_bounded() {
        let (sessions, start) = (Arc::new(Sessions::default()), Instant::now());
        let at = |number: u16| start + Duration::from_millis(u64::from(number));
        let mine: Vec<_> = (0..KEY_SESSIONS_MAX as u16).map(|number| open(&sessions, number, at(number))).collect();
        // The oldest is used again, so the second has been idle longest.
        assert!(sessions.find(&mine[0].id, Some(mine[0].token.as_bytes()), at(900)).is_ok());
        open(&sessions, 900, at(901));
        let is_there = |one: &Opened| sessions.find(&one.id, Some(one.token.as_bytes()), at(902)).is_ok();
        assert_eq!((is_there(&mine[0]), is_there(&mine[1]), is_there(&mine[2])), (true, false, true));
        for number in 1000..2000_u16 {
            let [id, token] = random(number);
            let key = digest(&number.to_be_bytes());
            assert!(sessions.open(Holder::Key(key), ABSOLUTE, [id, token], at(number)).is_some());
        }
        assert_eq!(sessions.count(at(2000)), SESSIONS_MAX);
        let one = open(&sessions, 3000, at(3000));
        let place = sessions.find(&one.id, Some(one.token.as_bytes()), at(3000)).expect("there").place;
        let mut streams: Vec<_> = (0..STREAMS_MAX).map(|_| sessions.stream(place).expect("a place")).collect();
        assert!(sessions.stream(place).is_none());
        streams.pop();
        assert!(sessions.stream(place).is_some());
    }
}
