//! Headers of proxy-wasm: an ordered list of names and values, pseudo headers (`:path`) included, and its encoding at
//! the border to a plugin.
//!
//! ```text
//! count:u32  (name_size:u32 value_size:u32)*count  (name \0 value \0)*count          little-endian
//! ```

use bytes::Bytes;

use super::abi::Status;

/// Most headers that a plugin may hold at once: the bound of common servers.
pub(super) const FIELDS_MAX: usize = 256;
/// Most bytes of names and values together.
pub(super) const FIELD_BYTES_MAX: usize = 256 << 10;

/// Names and values in order. Names are lower-case.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fields {
    items: Vec<(Box<str>, Bytes)>,
    bytes: usize,
}

impl Fields {
    /// Adds a field that the gateway itself made or has checked.
    pub fn push(&mut self, name: &str, value: impl Into<Bytes>) {
        let value = value.into();
        self.bytes += name.len() + value.len();
        self.items.push((name.to_ascii_lowercase().into(), value));
    }

    /// Names and values in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Bytes)> {
        self.items.iter().map(|(name, value)| (&**name, value))
    }

    /// Number of fields.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Returns true if there are no fields.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Value of a field, or several values joined by a comma (RFC 9110, section 5.3).
    pub fn get(&self, name: &str) -> Option<Bytes> {
        let mut values = self.items.iter().filter(|(own, _)| own.eq_ignore_ascii_case(name)).map(|(_, value)| value);
        let first = values.next()?;
        let mut rest = values.peekable();
        if rest.peek().is_none() {
            return Some(first.clone());
        }
        let mut all = first.to_vec();
        for value in rest {
            all.push(b',');
            all.extend_from_slice(value);
        }
        Some(all.into())
    }

    /// Adds a field that a plugin gave.
    ///
    /// # Errors
    /// Name or value could not stand in a header, or there are too many fields.
    pub fn add(&mut self, name: &[u8], value: Bytes) -> Result<(), Status> {
        let name = checked_name(name)?;
        checked_value(&value)?;
        if self.items.len() >= FIELDS_MAX || self.bytes + name.len() + value.len() > FIELD_BYTES_MAX {
            return Err(Status::InternalFailure);
        }
        self.bytes += name.len() + value.len();
        self.items.push((name, value));
        Ok(())
    }

    /// Sets a field in the place of the first of that name; further fields of that name are removed.
    ///
    /// # Errors
    /// The errors of [`Fields::add`].
    pub fn replace(&mut self, name: &[u8], value: Bytes) -> Result<(), Status> {
        let name = checked_name(name)?;
        checked_value(&value)?;
        let Some(place) = self.items.iter().position(|(own, _)| *own == name) else {
            return self.add(name.as_bytes(), value);
        };
        let mut index = 0;
        self.items.retain(|(own, _)| {
            index += 1;
            index - 1 == place || *own != name
        });
        self.items[place].1 = value;
        self.recount();
        if self.bytes > FIELD_BYTES_MAX { Err(Status::InternalFailure) } else { Ok(()) }
    }

    /// Removes every field of that name.
    pub fn remove(&mut self, name: &str) {
        self.items.retain(|(own, _)| !own.eq_ignore_ascii_case(name));
        self.recount();
    }

    fn recount(&mut self) {
        self.bytes = self.items.iter().map(|(name, value)| name.len() + value.len()).sum();
    }

    /// Encoding for the plugin; empty for an empty list.
    pub fn encode(&self) -> Vec<u8> {
        if self.items.is_empty() {
            return Vec::new();
        }
        let mut out = Vec::with_capacity(4 + 10 * self.items.len() + self.bytes);
        out.extend_from_slice(&count(self.items.len()));
        for (name, value) in &self.items {
            out.extend_from_slice(&count(name.len()));
            out.extend_from_slice(&count(value.len()));
        }
        for (name, value) in &self.items {
            out.extend_from_slice(name.as_bytes());
            out.push(0);
            out.extend_from_slice(value);
            out.push(0);
        }
        out
    }

    /// Size of the result of [`Fields::encode`].
    pub fn encoded_size(&self) -> usize {
        if self.items.is_empty() { 0 } else { 4 + 10 * self.items.len() + self.bytes }
    }

    /// Decodes a list that a plugin wrote.
    ///
    /// # Errors
    /// The bytes are no such list, or a name or a value could not stand in a header.
    pub fn decode(bytes: &[u8]) -> Result<Self, Status> {
        let mut fields = Fields::default();
        if bytes.is_empty() || bytes == [0] {
            return Ok(fields);
        }
        let number = word(bytes, 0)? as usize;
        if number > FIELDS_MAX || bytes.len() > FIELD_BYTES_MAX {
            return Err(Status::ParseFailure);
        }
        let mut at = 4 + 8 * number;
        for index in 0..number {
            let name = piece(bytes, &mut at, word(bytes, 4 + 8 * index)?)?;
            let value = piece(bytes, &mut at, word(bytes, 8 + 8 * index)?)?;
            fields.add(name, Bytes::copy_from_slice(value))?;
        }
        Ok(fields)
    }
}

fn count(number: usize) -> [u8; 4] {
    u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes()
}

fn word(bytes: &[u8], at: usize) -> Result<u32, Status> {
    let four = bytes.get(at..at + 4).and_then(|four| four.try_into().ok()).ok_or(Status::ParseFailure)?;
    Ok(u32::from_le_bytes(four))
}

/// Next `size` bytes, with a check of the zero behind them.
fn piece<'a>(bytes: &'a [u8], at: &mut usize, size: u32) -> Result<&'a [u8], Status> {
    let end = at.checked_add(size as usize).ok_or(Status::ParseFailure)?;
    let piece = bytes.get(*at..end).ok_or(Status::ParseFailure)?;
    if bytes.get(end) != Some(&0) {
        return Err(Status::ParseFailure);
    }
    *at = end + 1;
    Ok(piece)
}

/// Name of a header or a pseudo header, in lower case.
fn checked_name(name: &[u8]) -> Result<Box<str>, Status> {
    let plain = name.strip_prefix(b":").unwrap_or(name);
    let known = http::HeaderName::from_bytes(plain).map_err(|_| Status::BadArgument)?;
    let colon = if plain.len() < name.len() { ":" } else { "" };
    Ok(format!("{colon}{known}").into())
}

fn checked_value(value: &[u8]) -> Result<(), Status> {
    http::HeaderValue::from_bytes(value).map(drop).map_err(|_| Status::BadArgument)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn fields(items: &[(&str, &str)]) -> Fields {
        let mut fields = Fields::default();
        for (name, value) in items {
            fields.add(name.as_bytes(), Bytes::copy_from_slice(value.as_bytes())).unwrap();
        }
        fields
    }

    #[test]
    fn a_map_is_written_as_the_specification_says() {
        let bytes = fields(&[("a", "1"), ("b", "22")]).encode();
        let expected = b"\x02\0\0\0\x01\0\0\0\x01\0\0\0\x01\0\0\0\x02\0\0\0a\x001\0b\x0022\0";
        assert_eq!(bytes, expected);
        assert_eq!(Fields::decode(expected).unwrap(), fields(&[("a", "1"), ("b", "22")]));
    }

    #[test]
    fn an_empty_map_has_three_forms() {
        for form in [&b""[..], b"\0", b"\0\0\0\0"] {
            assert!(Fields::decode(form).unwrap().is_empty());
        }
        assert_eq!(Fields::default().encode(), b"");
    }

    #[test]
    fn several_values_are_read_as_one_and_replaced_together() {
        let mut map = fields(&[("x", "1"), ("y", "2"), ("X", "3")]);
        assert_eq!(map.get("X").unwrap(), "1,3");
        map.replace(b"X", "4".into()).unwrap();
        assert_eq!(map, fields(&[("x", "4"), ("y", "2")]));
        map.remove("x");
        assert_eq!(map, fields(&[("y", "2")]));
    }

    #[test]
    fn what_would_split_a_header_is_refused() {
        for (name, value) in [("a b", "1"), ("", "1"), (":", "1"), ("a", "1\r\nb: 2"), ("a\n", "1")] {
            let status = Fields::default().add(name.as_bytes(), Bytes::copy_from_slice(value.as_bytes()));
            assert_eq!(status, Err(Status::BadArgument), "{name:?}: {value:?}");
        }
    }

    #[test]
    fn too_many_or_too_long_are_refused() {
        let mut map = Fields::default();
        for _ in 0..FIELDS_MAX {
            map.add(b"a", Bytes::from_static(b"b")).unwrap();
        }
        assert_eq!(map.add(b"a", Bytes::new()), Err(Status::InternalFailure));
        let long = Bytes::from(vec![b'x'; FIELD_BYTES_MAX]);
        assert_eq!(Fields::default().add(b"a", long), Err(Status::InternalFailure));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(items in prop::collection::vec(("[a-z][a-z0-9-]{0,12}", "[ -~]{0,20}"), 0..20)) {
            let mut map = Fields::default();
            for (name, value) in &items {
                map.add(name.as_bytes(), Bytes::copy_from_slice(value.as_bytes())).unwrap();
            }
            let bytes = map.encode();
            prop_assert_eq!(bytes.len(), map.encoded_size());
            prop_assert_eq!(Fields::decode(&bytes).unwrap(), map);
        }

        #[test]
        fn bytes_of_a_hostile_plugin_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Fields::decode(&bytes);
        }

        #[test]
        fn lengths_that_lie_never_panic(number in any::<u32>(), sizes in prop::collection::vec(any::<u32>(), 0..8), tail in prop::collection::vec(any::<u8>(), 0..40)) {
            let mut bytes = number.to_le_bytes().to_vec();
            for size in sizes {
                bytes.extend_from_slice(&size.to_le_bytes());
            }
            bytes.extend_from_slice(&tail);
            let _ = Fields::decode(&bytes);
        }
    }
}
