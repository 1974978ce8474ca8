//! Needs of a Responses request that only a store can serve.

use crate::openai::chat::read_body;
use penstock_types::Bounds;
use penstock_types::error::ApiError;
use penstock_types::fields;
use penstock_types::json::{Fault, Kind, Names, Reader, Within};

/// Parts of a request that need a store of responses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreNeeds {
    /// Id of the response that the request continues.
    pub previous_response_id: Option<String>,
    /// Id of the conversation whose items come first.
    pub conversation: Option<String>,
    /// True if the answer is to be generated in the background.
    pub background: bool,
}

impl StoreNeeds {
    /// Reads the needs of a body whose other fields may be anything.
    ///
    /// # Errors
    /// The body is no JSON object, or one of the needs breaks its rule.
    pub fn read(body: &[u8], bounds: &Bounds) -> Result<Self, ApiError> {
        let mut needs = Self::default();
        let read = read_body(body, bounds, |reader, key| {
            match key {
                "previous_response_id" => {
                    needs.previous_response_id = Some(fields::name(reader, bounds.name_chars_max)?);
                }
                "conversation" => needs.conversation = Some(conversation(reader, bounds)?),
                "background" => needs.background = reader.boolean()?,
                _ => reader.skip()?,
            }
            Ok(())
        });
        read.map(|()| needs).map_err(Fault::into_error)
    }
}

/// Reads `conversation`, an id or an object that holds one.
pub(super) fn conversation(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<String, Fault> {
    if reader.kind()? != Kind::Object {
        return fields::name(reader, bounds.name_chars_max);
    }
    let (mut names, mut id) = (Names::new(bounds.inner_fields_max), None);
    reader.object(|reader, key| {
        names.add(&key)?;
        match &*key {
            "id" => id = Some(fields::name(reader, bounds.name_chars_max).within("id")?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    id.ok_or_else(|| Fault::invalid("required, but missing")).within("id")
}
