//! Readers of one field into one checked value. A fault carries no field name here: the caller adds it.

use std::ops::RangeInclusive;

use crate::error::ApiErrorKind;
use crate::json::{Fault, Kind, Names, Reader, Within, mismatch, short};

/// Reads a string of at most `chars_max` characters.
pub fn string(reader: &mut Reader<'_>, chars_max: usize) -> Result<String, Fault> {
    let text = reader.string()?;
    // Characters are counted only when the bytes exceed the bound: a character has at least one byte.
    if text.len() > chars_max && text.chars().count() > chars_max {
        return Err(too_many("characters", chars_max));
    }
    Ok(text.into_owned())
}

/// Reads a string as [`string`] does, and demands at least one character.
pub fn name(reader: &mut Reader<'_>, chars_max: usize) -> Result<String, Fault> {
    let text = string(reader, chars_max)?;
    if text.is_empty() {
        return Err(Fault::invalid("must not be empty"));
    }
    if text.chars().any(char::is_control) {
        return Err(Fault::invalid("must not hold control characters"));
    }
    Ok(text)
}

/// Reads a string of any length.
pub fn text(reader: &mut Reader<'_>) -> Result<String, Fault> {
    reader.string().map(std::borrow::Cow::into_owned)
}

/// Reads a finite number that fits `f32` and lies in `range`; with `above_low`, the low end is excluded.
pub fn number(reader: &mut Reader<'_>, range: RangeInclusive<f32>, above_low: bool) -> Result<f32, Fault> {
    let lexeme = reader.number()?;
    // f32 after f64: 1e-60 must not slip past an excluded 0 by rounding to it.
    let value = lexeme.parse::<f64>().map_or(f32::NAN, |value| value as f32);
    if range.contains(&value) && !(above_low && value == *range.start()) {
        return Ok(value + 0.0); // -0 becomes 0
    }
    let (low, high) = (range.start(), range.end());
    let low_word = if above_low { "above" } else { "at least" };
    Err(Fault::invalid(format!("must be {low_word} {low} and at most {high}, got {}", short(lexeme))))
}

/// Reads an integer (also written as `2.0` or `2e3`) in `range`.
pub fn integer(reader: &mut Reader<'_>, range: RangeInclusive<i128>) -> Result<i128, Fault> {
    let lexeme = reader.number()?;
    let Some(value) = whole(lexeme) else {
        return Err(Fault::invalid(format!("expected an integer, got {}", short(lexeme))));
    };
    if range.contains(&value) {
        return Ok(value);
    }
    Err(Fault::invalid(format!("must be {} to {}, got {}", range.start(), range.end(), short(lexeme))))
}

/// Reads an integer as [`integer`] does, into a `u32`.
pub fn count(reader: &mut Reader<'_>, range: RangeInclusive<u32>) -> Result<u32, Fault> {
    integer(reader, i128::from(*range.start())..=i128::from(*range.end())).map(|value| value as u32)
}

/// Reads a list of at most `max` token ids.
pub fn token_ids(reader: &mut Reader<'_>, max: usize) -> Result<Vec<u32>, Fault> {
    let mut ids = Vec::new();
    reader.array(|reader, index| {
        bounded(index, max, "token ids")?;
        ids.push(count(reader, 0..=u32::MAX).at(index)?);
        Ok(())
    })?;
    Ok(ids)
}

/// Reads one of the given words and returns its value; a fault lists the words.
pub fn word<T: Copy>(reader: &mut Reader<'_>, words: &[(&str, T)]) -> Result<T, Fault> {
    let given = reader.string()?;
    match words.iter().find(|(word, _)| *word == given) {
        Some((_, value)) => Ok(*value),
        None => {
            let known: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
            Err(Fault::invalid(format!("must be one of {}; got \"{}\"", known.join(", "), short(&given))))
        }
    }
}

/// Reads a string, or a list of at most `max` strings, each of 1 to `chars_max` characters.
pub fn strings(reader: &mut Reader<'_>, max: usize, chars_max: usize) -> Result<Vec<String>, Fault> {
    let one = |reader: &mut Reader<'_>| {
        let text = string(reader, chars_max)?;
        if text.is_empty() { Err(Fault::invalid("must not be an empty string")) } else { Ok(text) }
    };
    match reader.kind()? {
        Kind::String => Ok(vec![one(reader)?]),
        Kind::Array => {
            let mut all = Vec::new();
            reader.array(|reader, index| {
                bounded(index, max, "strings")?;
                all.push(one(reader).at(index)?);
                Ok(())
            })?;
            Ok(all)
        }
        kind => Err(mismatch("a string or an array of strings", kind)),
    }
}

/// Reads `logit_bias`: token ids as names, -100 to 100 as values. Sorted by id.
pub fn logit_bias(reader: &mut Reader<'_>, max: usize) -> Result<Vec<(u32, f32)>, Fault> {
    let mut biases: Vec<(u32, f32)> = Vec::new();
    reader.object(|reader, token| {
        bounded(biases.len(), max, "entries")?;
        let id = if token.bytes().all(|byte| byte.is_ascii_digit()) { token.parse().ok() } else { None };
        let id = id.ok_or_else(|| Fault::invalid("a field name must be a token id")).within(&token)?;
        biases.push((id, number(reader, -100.0..=100.0, false).within(&token)?));
        Ok(())
    })?;
    biases.sort_by_key(|(id, _)| *id);
    match biases.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        Some(pair) => Err(Fault::invalid(format!("token {} is given twice", pair[0].0))),
        None => Ok(biases),
    }
}

/// Reads `metadata`: strings to strings. Checked, not kept.
pub fn metadata(reader: &mut Reader<'_>, max: usize) -> Result<(), Fault> {
    const KEY_CHARS_MAX: usize = 64; // the OpenAI reference
    const VALUE_CHARS_MAX: usize = 512; // the same
    let mut names = Names::new(max);
    reader.object(|reader, key| {
        names.add(&key)?;
        if key.chars().count() > KEY_CHARS_MAX {
            return Err(too_many("characters in a name", KEY_CHARS_MAX));
        }
        string(reader, VALUE_CHARS_MAX).within(&key).map(|_| ())
    })
}

/// Refuses element `index` of a list that may have `max` elements.
pub fn bounded(index: usize, max: usize, what: &str) -> Result<(), Fault> {
    if index < max { Ok(()) } else { Err(too_many(what, max)) }
}

/// Fault of a list that is too long: "more than 16 strings".
pub fn too_many(what: &str, max: usize) -> Fault {
    Fault::of(ApiErrorKind::TooLarge, format!("more than {max} {what}"))
}

/// Value of an integral JSON number.
pub fn whole(lexeme: &str) -> Option<i128> {
    if let Ok(value) = lexeme.parse() {
        return Some(value);
    }
    let value: f64 = lexeme.parse().ok()?;
    // Beyond 2^53 a float no longer identifies one integer.
    (value.trunc() == value && value.abs() <= 9_007_199_254_740_992.0).then_some(value as i128)
}
