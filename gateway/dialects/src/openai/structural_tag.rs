//! vLLM's structural tag: free text in which the parts between tags follow a schema.
//!
//! Older form: `{"structures":[{"begin","schema","end"}…],"triggers":["…"]}`; newer form: `{"format":{"type":…}}`.
//! The parts that name tags and schemas are checked for their types; what a schema or a format says is not.

use bytes::{BufMut, BytesMut};

use penstock_types::Bounds;
use penstock_types::fields::{bounded, too_many};
use penstock_types::json::{Fault, Kind, Names, Reader, Within};
use penstock_types::json_text::compacted;
use penstock_types::request::ResponseFormat;
use penstock_types::write;

/// Reads the object; its `type`, if there is one, must be `structural_tag` and is left out of the text.
pub(super) fn read(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<ResponseFormat, Fault> {
    reader.expect(Kind::Object)?;
    let text = compacted(reader.raw()?.text);
    if text.len() > bounds.constraint_bytes_max {
        return Err(too_many("bytes", bounds.constraint_bytes_max));
    }
    let (mut structures, mut triggers, mut format) = (false, false, false);
    let mut out = BytesMut::with_capacity(text.len());
    let mut names = Names::new(bounds.inner_fields_max);
    Reader::new(text.as_bytes())?.object(|reader, key| {
        names.add(&key)?;
        if reader.null()? {
            return Ok(());
        }
        if key == "type" {
            return match &*reader.string().within(&key)? {
                "structural_tag" => Ok(()),
                _ => Err(Fault::invalid("must be structural_tag")).within(&key),
            };
        }
        let value = reader.raw()?.text;
        let mut inner = Reader::new(value.as_bytes())?;
        match &*key {
            "structures" => structures = each(&mut inner, bounds, structure).within(&key)?,
            "triggers" => triggers = each(&mut inner, bounds, trigger).within(&key)?,
            "format" => {
                needs(&mut inner, &[("type", Kind::String)], bounds).within(&key)?;
                format = true;
            }
            _ => {}
        }
        out.put_u8(if out.is_empty() { b'{' } else { b',' });
        write::string(&mut out, &key);
        out.put_u8(b':');
        out.put_slice(value.as_bytes());
        Ok(())
    })?;
    if !(format || structures && triggers) || format && (structures || triggers) {
        return Err(Fault::invalid("a structural tag has either format, or structures and triggers"));
    }
    out.put_u8(b'}');
    // Only text was written.
    Ok(ResponseFormat::StructuralTag(String::from_utf8_lossy(&out).into_owned()))
}

/// Checks each element of a list that must not be empty.
fn each(
    reader: &mut Reader<'_>,
    bounds: &Bounds,
    check: fn(&mut Reader<'_>, &Bounds) -> Result<(), Fault>,
) -> Result<bool, Fault> {
    let mut any = false;
    reader.array(|reader, index| {
        bounded(index, bounds.constraint_choices_max, "elements")?;
        any = true;
        check(reader, bounds).at(index)
    })?;
    if any { Ok(true) } else { Err(Fault::invalid("must not be empty")) }
}

fn structure(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<(), Fault> {
    needs(reader, &[("begin", Kind::String), ("schema", Kind::Object), ("end", Kind::String)], bounds)
}

fn trigger(reader: &mut Reader<'_>, _: &Bounds) -> Result<(), Fault> {
    match reader.string()?.is_empty() {
        true => Err(Fault::invalid("must not be an empty string")),
        false => Ok(()),
    }
}

/// Checks that an object has these fields, each of its kind.
fn needs(reader: &mut Reader<'_>, wanted: &[(&str, Kind)], bounds: &Bounds) -> Result<(), Fault> {
    let (mut names, mut found) = (Names::new(bounds.inner_fields_max), vec![false; wanted.len()]);
    reader.object(|reader, key| {
        names.add(&key)?;
        if let Some(at) = wanted.iter().position(|(name, _)| *name == key) {
            reader.expect(wanted[at].1).within(&key)?;
            found[at] = true;
        }
        reader.skip()
    })?;
    match found.iter().position(|found| !found) {
        None => Ok(()),
        Some(at) => Err(Fault::invalid("required, but missing")).within(wanted[at].0),
    }
}
