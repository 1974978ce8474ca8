//! JSON of both sides of a codec: objects written field by field, and values read leniently (null is absent, a
//! value of another type is skipped), because a provider's oddity in an unused field must not cost the answer.

use std::borrow::Cow;

use bytes::{BufMut, BytesMut};

use penstock_types::json::{Fault, Kind, Reader};
use penstock_types::json_text::compacted;
use penstock_types::write;

/// Writer of one JSON object.
pub(crate) struct Object<'a> {
    out: &'a mut BytesMut,
    any: bool,
}

impl<'a> Object<'a> {
    /// Opens a JSON object at the end of `out`.
    pub(crate) fn open(out: &'a mut BytesMut) -> Self {
        out.put_u8(b'{');
        Self { out, any: false }
    }

    /// Closes the object; without it the JSON text is incomplete.
    pub(crate) fn close(self) {
        self.out.put_u8(b'}');
    }

    /// Writes the name of a field; its value must be written next.
    pub(crate) fn key(&mut self, name: &str) -> &mut BytesMut {
        if std::mem::replace(&mut self.any, true) {
            self.out.put_u8(b',');
        }
        write::string(self.out, name);
        self.out.put_u8(b':');
        self.out
    }

    /// Writes a field with a string, escaped.
    pub(crate) fn string(&mut self, name: &str, value: &str) {
        write::string(self.key(name), value);
    }

    /// Writes a string field, if there is a value.
    pub(crate) fn optional(&mut self, name: &str, value: Option<&str>) {
        if let Some(value) = value {
            self.string(name, value);
        }
    }

    /// Writes a field with `true` or `false`.
    pub(crate) fn boolean(&mut self, name: &str, value: bool) {
        self.raw(name, if value { "true" } else { "false" });
    }

    /// Writes a boolean field, if it is true.
    pub(crate) fn flag(&mut self, name: &str, value: bool) {
        if value {
            self.boolean(name, true);
        }
    }

    /// Writes a field with an integer.
    pub(crate) fn integer(&mut self, name: &str, value: impl Into<i128>) {
        self.raw(name, &value.into().to_string());
    }

    /// Writes an integer field, if there is a value.
    pub(crate) fn optional_integer(&mut self, name: &str, value: Option<impl Into<i128>>) {
        if let Some(value) = value {
            self.integer(name, value);
        }
    }

    /// Writes a finite number in its shortest form.
    pub(crate) fn number(&mut self, name: &str, value: f32) {
        self.raw(name, &value.to_string());
    }

    /// Writes a finite number, if there is a value.
    pub(crate) fn optional_number(&mut self, name: &str, value: Option<f32>) {
        if let Some(value) = value {
            self.number(name, value);
        }
    }

    /// Writes a field whose value is JSON text.
    pub(crate) fn raw(&mut self, name: &str, json: &str) {
        self.key(name).put_slice(json.as_bytes());
    }

    /// Writes a list of strings.
    pub(crate) fn strings(&mut self, name: &str, values: &[String]) {
        list(self.key(name), values, |out, value| write::string(out, value));
    }
}

/// Writes an array; `each` writes an element.
pub(crate) fn list<T>(out: &mut BytesMut, values: &[T], mut each: impl FnMut(&mut BytesMut, &T)) {
    out.put_u8(b'[');
    for (index, value) in values.iter().enumerate() {
        if index > 0 {
            out.put_u8(b',');
        }
        each(out, value);
    }
    out.put_u8(b']');
}

/// Writes `[…]` of numbers; a value that is not finite becomes 0, since JSON has no infinity.
pub(crate) fn floats(out: &mut BytesMut, values: &[f32]) {
    list(out, values, |out, value| {
        let value = if value.is_finite() { *value } else { 0.0 };
        out.put_slice(format!("{value:?}").as_bytes());
    });
}

/// Returns true if `text` is one JSON object.
pub(crate) fn is_object(text: &str) -> bool {
    let read = || {
        let mut reader = Reader::new(text.as_bytes())?;
        reader.expect(Kind::Object)?;
        reader.skip()?;
        reader.end()
    };
    read().is_ok()
}

/// Returns true if `text` can be the arguments of a call: one JSON object, or nothing, which counts as the empty object.
pub(crate) fn are_arguments(text: &str) -> bool {
    text.trim_ascii().is_empty() || is_object(text)
}

/// Reads an object's fields, null values left out; anything but an object is skipped.
pub(crate) fn fields<'a>(
    reader: &mut Reader<'a>,
    mut field: impl FnMut(&mut Reader<'a>, &str) -> Result<(), Fault>,
) -> Result<(), Fault> {
    if reader.kind()? != Kind::Object {
        return reader.skip();
    }
    reader.object(|reader, key| if reader.null()? { Ok(()) } else { field(reader, &key) })
}

/// Reads an array's elements; anything but an array is skipped.
pub(crate) fn items<'a>(
    reader: &mut Reader<'a>,
    item: impl FnMut(&mut Reader<'a>, usize) -> Result<(), Fault>,
) -> Result<(), Fault> {
    if reader.kind()? != Kind::Array { reader.skip() } else { reader.array(item) }
}

/// Reads a string; `None` for anything else.
pub(crate) fn string<'a>(reader: &mut Reader<'a>) -> Result<Option<Cow<'a, str>>, Fault> {
    if reader.kind()? == Kind::String { reader.string().map(Some) } else { reader.skip().map(|()| None) }
}

/// Reads a string, or the JSON text of any other value except null.
pub(crate) fn string_or_json(reader: &mut Reader<'_>) -> Result<Option<String>, Fault> {
    match reader.kind()? {
        Kind::Null => reader.skip().map(|()| None),
        Kind::String => reader.string().map(|text| Some(text.into_owned())),
        _ => Ok(Some(compacted(reader.raw()?.text))),
    }
}

/// Reads a number; `None` for anything else.
pub(crate) fn number(reader: &mut Reader<'_>) -> Result<Option<f64>, Fault> {
    if reader.kind()? == Kind::Number { Ok(reader.number()?.parse().ok()) } else { reader.skip().map(|()| None) }
}

/// Reads a number from 0 as a count; `None` for anything else.
pub(crate) fn count(reader: &mut Reader<'_>) -> Result<Option<u64>, Fault> {
    // Floats are cut towards zero and to the ends of the type: a count of 12.0 is 12.
    Ok(number(reader)?.filter(|value| *value >= 0.0).map(|value| value as u64))
}

/// Reads token ids; other elements are left out.
pub(crate) fn token_ids(reader: &mut Reader<'_>) -> Result<Vec<u32>, Fault> {
    let mut ids = Vec::new();
    items(reader, |reader, _| {
        ids.extend(count(reader)?.and_then(|id| u32::try_from(id).ok()));
        Ok(())
    })?;
    Ok(ids)
}
