//! Text of an issued key: `sk-ps-`, 43 random characters (256 bits), and a check code of 6 characters made with the
//! pepper.
//!
//! The check code tells a key that was issued here from one that is mistyped, truncated, or issued under another
//! pepper, without the directory; only a holder of the pepper can make it.

use super::pepper::Pepper;
use penstock_base::Secret;

/// Prefix of every key issued by this gateway, which tells such keys from configured secrets.
pub const PREFIX: &str = "sk-ps-";
const RANDOM_CHARS: usize = 43;
const CHECK_CHARS: usize = 6;
const DIGITS: &[u8; 62] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";

/// Generates a new key.
///
/// # Panics
/// If the system's random generator fails.
pub(super) fn make(pepper: &Pepper) -> Secret {
    let mut text = String::from(PREFIX);
    let mut bytes = [0; 64];
    while text.len() < PREFIX.len() + RANDOM_CHARS {
        getrandom::fill(&mut bytes).expect("the system has random numbers");
        // 248 = 4 * 62: rejecting larger bytes makes every character equally likely.
        let digits = bytes.iter().filter(|byte| **byte < 248).map(|byte| char::from(DIGITS[usize::from(byte % 62)]));
        text.extend(digits.take(PREFIX.len() + RANDOM_CHARS - text.len()));
    }
    let check = check(pepper, text.as_bytes());
    text.push_str(&check);
    Secret::new(text)
}

/// Returns true if the check code of a key matches this pepper.
pub(super) fn is_ours(pepper: &Pepper, secret: &[u8]) -> bool {
    let Some((body, given)) = secret.split_at_checked(PREFIX.len() + RANDOM_CHARS) else { return false };
    given.len() == CHECK_CHARS && check(pepper, body).as_bytes() == given
}

fn check(pepper: &Pepper, body: &[u8]) -> String {
    let digest = pepper.digest(&[b"check:", body].concat()).0;
    let mut number = u64::from_be_bytes([0, 0, 0, digest[0], digest[1], digest[2], digest[3], digest[4]]);
    let mut digit = || {
        let digit = DIGITS[(number % 62) as usize];
        number /= 62;
        char::from(digit)
    };
    (0..CHECK_CHARS).map(|_| digit()).collect()
}

/// Last four characters of a key, by which its owner recognizes it.
pub(super) fn hint(secret: &Secret) -> String {
    let text = secret.expose();
    text[text.len() - 4..].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_long_unlike_and_known_from_their_own_text() {
        let pepper = Pepper::new(&[7; 32]).expect("long");
        let (one, two) = (make(&pepper), make(&pepper));
        assert_ne!(one, two);
        let text = one.expose().as_bytes();
        assert_eq!(text.len(), PREFIX.len() + RANDOM_CHARS + CHECK_CHARS);
        assert!(text.starts_with(PREFIX.as_bytes()) && is_ours(&pepper, text));
        for at in 0..text.len() {
            let mut typo = text.to_vec();
            typo[at] = if typo[at] == b'x' { b'y' } else { b'x' };
            assert!(!is_ours(&pepper, &typo) && !is_ours(&pepper, &text[..at]), "{at}");
        }
        assert!(!is_ours(&Pepper::new(&[8; 32]).expect("long"), text));
        assert!(!format!("{one:?}").contains(&hint(&one)));
    }
}
