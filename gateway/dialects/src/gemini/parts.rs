//! One part of a content: text, an image, a call, the answer to a call.

use super::fields::{self as own, object, required, unbuilt};
use super::signature::{Signed, from_client};
use crate::openai::image_source;
use penstock_types::Bounds;
use penstock_types::error::ApiErrorKind;
use penstock_types::fields;
use penstock_types::json::{Fault, Kind, Reader, short};
use penstock_types::json_text::compacted;
use penstock_types::request::ImageSource;

/// Content of one part of a turn, by its kind.
pub(super) enum Piece {
    /// Text of the turn; `thought` marks reasoning.
    Text { text: String, thought: bool },
    /// An image, inline or by its URL.
    Image(ImageSource),
    /// A call of a function that the model made in an earlier turn.
    Call { id: Option<String>, name: String, arguments: String },
    /// Result of a function that the model called.
    Response(Response),
}

/// Result of a function that the model called, as the client sends it.
pub(super) struct Response {
    pub(super) id: Option<String>,
    pub(super) name: String,
    /// Result as text for the model.
    pub(super) content: String,
    pub(super) failed: bool,
    pub(super) images: Vec<ImageSource>,
}

/// A part and the signature that came with it.
pub(super) struct Part {
    pub(super) piece: Piece,
    pub(super) signature: Option<String>,
}

#[derive(Default)]
struct Draft {
    text: Option<String>,
    thought: bool,
    /// Signature of the part, as the client sent it.
    signature: Option<String>,
    data: Option<Piece>,
}

/// Reads one part object, with its signature if it has one.
pub(super) fn part(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Part, Fault> {
    let mut draft = Draft::default();
    object(reader, bounds.inner_fields_max, |reader, key| draft.field(reader, key, bounds))?;
    draft.finish()
}

impl Draft {
    fn field(&mut self, reader: &mut Reader<'_>, key: &str, bounds: &Bounds) -> Result<(), Fault> {
        let piece = match key {
            "text" => {
                self.text = Some(fields::text(reader)?);
                return Ok(());
            }
            "thought" => {
                self.thought = reader.boolean()?;
                return Ok(());
            }
            "thoughtSignature" => {
                self.signature = Some(own::base64(reader.string()?)?);
                return Ok(());
            }
            "inlineData" => Piece::Image(inline_data(reader, bounds)?),
            "fileData" => Piece::Image(file_data(reader, bounds)?),
            "functionCall" => call(reader, bounds)?,
            "functionResponse" => Piece::Response(response(reader, bounds)?),
            "executableCode" | "codeExecutionResult" | "toolCall" | "toolResponse" => {
                return Err(unbuilt("parts of Google's own tools are not built"));
            }
            // Hints for media, and clients' own notes.
            _ => return reader.skip(),
        };
        match self.data.replace(piece) {
            None => Ok(()),
            Some(_) => Err(Fault::invalid("a part holds one kind of data")),
        }
    }

    fn finish(self) -> Result<Part, Fault> {
        let Draft { text, thought, signature, data } = self;
        let piece = match (text, data) {
            (Some(_), Some(_)) => return Err(Fault::invalid("a part holds one kind of data")),
            (Some(text), None) => Piece::Text { text, thought },
            (None, Some(piece)) => piece,
            // A signature may stand alone, without text or call.
            (None, None) if signature.is_some() => Piece::Text { text: String::new(), thought },
            (None, None) => {
                return Err(Fault::invalid(
                    "a part must hold text, inlineData, fileData, functionCall or functionResponse",
                ));
            }
        };
        let signed = if matches!(piece, Piece::Call { .. }) { Signed::Call } else { Signed::Reasoning };
        let signature = signature.map(|given| from_client(given.into(), signed)).transpose()?;
        Ok(Part { piece, signature })
    }
}

fn image_type(reader: &mut Reader<'_>) -> Result<String, Fault> {
    let kind = fields::name(reader, 64)?;
    if kind.starts_with("image/") {
        return Ok(kind);
    }
    let why = format!("images are built, \"{}\" is not", short(&kind));
    Err(Fault::of(ApiErrorKind::UnsupportedValue, why))
}

fn inline_data(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<ImageSource, Fault> {
    let (mut media_type, mut data) = (None, None);
    object(reader, bounds.inner_fields_max, |reader, key| {
        match key {
            "mimeType" => media_type = Some(image_type(reader)?),
            "data" => data = Some(own::base64(reader.string()?)?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    Ok(ImageSource::Data { media_type: required(media_type, "mimeType")?, base64: required(data, "data")? })
}

fn file_data(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<ImageSource, Fault> {
    let mut url = None;
    object(reader, bounds.inner_fields_max, |reader, key| {
        match key {
            "mimeType" => _ = image_type(reader)?,
            "fileUri" => url = Some(image_source(fields::text(reader)?)?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    required(url, "fileUri")
}

fn call(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Piece, Fault> {
    let (mut id, mut name, mut arguments) = (None, None, None);
    object(reader, bounds.inner_fields_max, |reader, key| {
        match key {
            "id" => id = Some(fields::name(reader, bounds.name_chars_max)?),
            "name" => name = Some(fields::name(reader, bounds.name_chars_max)?),
            "args" => {
                reader.expect(Kind::Object)?;
                arguments = Some(compacted(reader.raw()?.text));
            }
            "partialArgs" | "willContinue" => return Err(unbuilt("calls in pieces are not built")),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let arguments = arguments.unwrap_or_else(|| "{}".to_owned());
    Ok(Piece::Call { id, name: required(name, "name")?, arguments })
}

fn response(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Response, Fault> {
    let (mut id, mut name, mut content, mut images) = (None, None, None, Vec::new());
    object(reader, bounds.inner_fields_max, |reader, key| {
        match key {
            "id" => id = Some(fields::name(reader, bounds.name_chars_max)?),
            "name" => name = Some(fields::name(reader, bounds.name_chars_max)?),
            "response" => content = Some(returned(reader)?),
            "parts" => own::list(reader, bounds.parts_max, "parts", |reader| match part(reader, bounds)?.piece {
                Piece::Image(source) => {
                    images.push(source);
                    Ok(())
                }
                _ => Err(Fault::invalid("the parts of a function's response are inlineData or fileData")),
            })?,
            "willContinue" => {
                if reader.boolean()? {
                    return Err(unbuilt("responses in pieces are not built"));
                }
            }
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let (content, failed) = content.unwrap_or_default();
    Ok(Response { id, name: required(name, "name")?, content, failed, images })
}

/// Reads a function's result: the text for the model, and whether it is an error. By Google's convention
/// `{"output":…}`, `{"result":…}` and `{"error":…}` name the two cases; any other object is the output itself, kept as
/// the client wrote it, since the model also reads spaces.
fn returned(reader: &mut Reader<'_>) -> Result<(String, bool), Fault> {
    reader.expect(Kind::Object)?;
    let json = reader.raw()?.text.to_owned();
    let (mut count, mut only) = (0, None);
    Reader::new(json.as_bytes())?.object(|reader, key| {
        count += 1;
        let failed = match &*key {
            // `result` is the key that Google's SDKs put around a function's return value.
            "output" | "result" => Some(false),
            "error" => Some(true),
            _ => None,
        };
        let text = match reader.kind()? {
            Kind::String => fields::text(reader)?,
            _ => reader.raw()?.text.to_owned(),
        };
        only = failed.map(|failed| (text, failed));
        Ok(())
    })?;
    Ok(only.filter(|_| count == 1).unwrap_or((json, false)))
}
