//! Lists of models in the form that providers give them.

use penstock_types::json::{Fault, Kind, Reader};

/// Most models read from one provider.
const MODELS_MAX: usize = 4096;
/// Longest model name, in bytes; longer names are left out.
const NAME_BYTES_MAX: usize = 256;

/// Model names in a list of OpenAI's or Anthropic's form (`data[].id`) or Gemini's (`models[].name`); `None` for any
/// other body.
pub fn model_ids(body: &[u8]) -> Option<Vec<String>> {
    let read = || -> Result<Option<Vec<String>>, Fault> {
        let mut reader = Reader::new(body)?;
        let mut out = None;
        reader.object(|reader, key| {
            let name = match (key.as_ref(), reader.kind()?) {
                ("data", Kind::Array) => "id",
                ("models", Kind::Array) => "name",
                _ => return reader.skip(),
            };
            let names = out.get_or_insert_with(Vec::new);
            reader.array(|reader, _| {
                if reader.kind()? != Kind::Object {
                    return reader.skip();
                }
                reader.object(|reader, key| {
                    if key != name || reader.kind()? != Kind::String {
                        return reader.skip();
                    }
                    let text = reader.string()?;
                    let text = text.strip_prefix("models/").unwrap_or(&text);
                    let fits = (1..=NAME_BYTES_MAX).contains(&text.len()) && !text.chars().any(char::is_control);
                    if fits && names.len() < MODELS_MAX {
                        names.push(text.to_owned());
                    }
                    Ok(())
                })
            })
        })?;
        reader.end()?;
        Ok(out)
    };
    read().ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_three_forms_are_read() {
        let ids = |body: &str| model_ids(body.as_bytes()).map(|names| names.join(" "));
        assert_eq!(ids(r#"{"object":"list","data":[{"id":"a","x":1},{"id":"b/c"},7]}"#).as_deref(), Some("a b/c"));
        assert_eq!(ids(r#"{"models":[{"name":"models/g","baseModelId":"x"}]}"#).as_deref(), Some("g"));
        assert_eq!(ids(r#"{"data":[]}"#).as_deref(), Some(""));
        assert_eq!(ids(r#"{"data":[{"id":"a\nb"},{"id":""}]}"#).as_deref(), Some(""));
        assert_eq!((ids("[]"), ids("<html>"), ids(r#"{"error":{}}"#)), (None, None, None));
    }
}
