//! `response_format`: the form that an answer must have.

use penstock_types::Bounds;
use penstock_types::error::ApiErrorKind;
use penstock_types::fields::{self, too_many};
use penstock_types::json::{Fault, Kind, Names, Reader, Within, mismatch, short};
use penstock_types::json_text::compacted;
use penstock_types::request::ResponseFormat;

/// Reads the `response_format` object of a chat request.
pub(super) fn response_format(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<ResponseFormat, Fault> {
    if reader.kind()? != Kind::Object {
        return Err(mismatch("an object", reader.kind()?));
    }
    let (mut kind, mut schema) = (None, None);
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        if reader.null()? {
            return Ok(());
        }
        match &*key {
            "type" => kind = Some(fields::string(reader, 64).within("type")?),
            "json_schema" => schema = Some(json_schema(reader, bounds).within("json_schema")?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    match kind.as_deref() {
        Some("text") => Ok(ResponseFormat::Text),
        Some("json_object") => Ok(ResponseFormat::JsonObject),
        Some("json_schema") => schema.ok_or_else(|| Fault::invalid("required, but missing")).within("json_schema"),
        Some(known @ ("grammar" | "python" | "structural_tag")) => {
            Err(Fault::of(ApiErrorKind::UnsupportedValue, format!("\"{known}\" is not built"))).within("type")
        }
        Some(other) => Err(Fault::invalid(format!("unknown format \"{}\"", short(other)))).within("type"),
        None => Err(Fault::invalid("required, but missing")).within("type"),
    }
}

/// Reads `{name, description?, schema, strict?}`; also the `format` of the Responses API.
pub(super) fn json_schema(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<ResponseFormat, Fault> {
    let (mut name, mut description, mut schema, mut strict) = (None, None, None, false);
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        if reader.null()? {
            return Ok(());
        }
        match &*key {
            "name" => name = Some(fields::name(reader, bounds.name_chars_max).within("name")?),
            "description" => description = Some(fields::text(reader).within("description")?),
            "schema" => schema = Some(schema_text(reader, bounds).within("schema")?),
            "strict" => strict = reader.boolean().within("strict")?,
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let name = name.ok_or_else(|| Fault::invalid("required, but missing")).within("name")?;
    let schema = schema.ok_or_else(|| Fault::invalid("required, but missing")).within("schema")?;
    Ok(ResponseFormat::JsonSchema { name, description, schema, strict })
}

/// Reads a JSON schema, with the bounds of a tool's schema.
pub(crate) fn schema_text(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<String, Fault> {
    reader.expect(Kind::Object)?;
    let raw = reader.raw()?;
    if raw.depth > bounds.tool_depth_max {
        return Err(too_many("levels of nesting", bounds.tool_depth_max));
    }
    let text = compacted(raw.text);
    if text.len() > bounds.tool_bytes_max {
        return Err(too_many("bytes", bounds.tool_bytes_max));
    }
    Ok(text)
}
