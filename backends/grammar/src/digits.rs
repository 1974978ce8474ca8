//! Digits of numbers in JSON: a grammar lets an unbounded number go on for ever, and at a high temperature it does.
//!
//! A part of a number that has the most digits a program would write ([`MOST`]) takes no further digit while the
//! grammar lets anything else follow. The count is a function of the text so far.

/// Most digits in front of the point, behind it, and of an exponent: those of 64-bit integers and floating-point numbers.
const MOST: [u32; 3] = [20, 17, 3];

/// Place in a text of JSON.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Digits {
    in_string: bool,
    is_escaped: bool,
    /// Part of a number: integer, fraction or exponent, as an index of [`MOST`].
    part: usize,
    run: u32,
}

impl Digits {
    /// Place behind `bytes`, and whether a part of a number has become too long on the way.
    pub(crate) fn after(mut self, bytes: &[u8]) -> (Self, bool) {
        let mut is_long = false;
        for byte in bytes {
            if self.in_string {
                match byte {
                    _ if self.is_escaped => self.is_escaped = false,
                    b'\\' => self.is_escaped = true,
                    b'"' => self.in_string = false,
                    _ => {}
                }
                continue;
            }
            match byte {
                b'0'..=b'9' => {
                    self.run += 1;
                    is_long |= self.run > MOST[self.part];
                }
                b'.' => (self.part, self.run) = (1, 0),
                b'e' | b'E' => (self.part, self.run) = (2, 0),
                b'+' | b'-' => self.run = 0,
                b'"' => self = Self { in_string: true, ..Self::default() },
                _ => self = Self::default(),
            }
        }
        (self, is_long)
    }

    /// Returns true if some token of digits might be one too many here.
    pub(crate) fn is_near(&self, token_digits_max: usize) -> bool {
        !self.in_string && self.run > 0 && self.run as usize + token_digits_max > MOST[self.part] as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, too_long: bool) {
        assert_eq!(Digits::default().after(text.as_bytes()).1, too_long, "{text}");
        // Cut anywhere, the place is the same.
        for cut in 0..text.len() {
            let (before, one) = Digits::default().after(&text.as_bytes()[..cut]);
            assert_eq!(one | before.after(&text.as_bytes()[cut..]).1, too_long, "{text} cut at {cut}");
        }
    }

    #[test]
    fn each_part_of_a_number_is_counted_by_itself() {
        let digits = "1".repeat(20);
        check(&digits, false);
        check(&format!("{digits}1"), true);
        check(&format!("[{digits},{digits}]"), false);
        check(&format!("-{digits}.11111111111111111e-111"), false);
        check("0.111111111111111111", true);
        check("1e1111", true);
        check("1E+111,1", false);
        check(&format!("{{\"a\":true,\"b\":false,\"c\":{digits}}}"), false);
    }

    #[test]
    fn digits_of_strings_do_not_count() {
        let digits = "1".repeat(40);
        check(&format!("\"{digits}\""), false);
        check(&format!("[\"a\\\"{digits}\",1]"), false);
        check(&format!("[\"a\\\\\",{digits}]"), true);
    }
}
