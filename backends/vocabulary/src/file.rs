//! Parts of a tokenizer.json that concern single tokens: names, added tokens, the decoder. One pass over the text, in which the names go into one
//! allocation; the merges, half of such a file or more, are only passed over.
//!
//! The rules are those of the library `tokenizers`, which reads the same file to tokenize: ids of added tokens follow from the names, not from the file's
//! numbers, and of a name that comes twice the last counts. Tests compare the two.

use std::collections::HashMap;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, de};
use serde_json::Value;

use crate::{IDS_MAX, VocabularyError};

/// Content of a tokenizer.json.
pub(crate) struct File {
    model: Model,
    added: Vec<AddedToken>,
    /// Decoder as it stands in the file; null: none.
    pub(crate) decoder: Value,
}

/// Token beside those of the model.
#[derive(Deserialize)]
struct AddedToken {
    content: String,
    special: bool,
}

/// Name of a token, and true for a control token; `None` for an id without a token.
type Named<'f> = Option<(&'f str, bool)>;

impl File {
    /// Reads the text.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, VocabularyError> {
        let mut text = serde_json::Deserializer::from_slice(bytes);
        let file = (&mut text).deserialize_map(WholeFile).map_err(VocabularyError::malformed)?;
        text.end().map_err(VocabularyError::malformed)?;
        Ok(file)
    }

    /// Names of all tokens by id.
    ///
    /// # Errors
    /// [`VocabularyError::Malformed`] if there is no token, or an id is out of range.
    pub(crate) fn names(&self) -> Result<Vec<Named<'_>>, VocabularyError> {
        let model = &self.model;
        let mut ids: HashMap<&str, u32> = HashMap::with_capacity(model.tokens.len());
        // Tokens whose name comes again: they lose it.
        let mut lost = Vec::new();
        for (name, id) in model.names() {
            lost.extend(ids.insert(name, id).filter(|old| *old != id).map(|old| (name, old)));
        }
        let mut added: HashMap<&str, u32> = HashMap::with_capacity(self.added.len());
        let mut next = if model.is_list { model.tokens.len() } else { ids.len() } as u32;
        let mut marks = Vec::with_capacity(self.added.len());
        for token in self.added.iter().filter(|token| !token.content.is_empty()) {
            let name = token.content.as_str();
            let id = added.get(name).or_else(|| ids.get(name)).copied().unwrap_or_else(|| {
                next = next.saturating_add(1);
                next - 1
            });
            added.insert(name, id);
            marks.push((id, (name, token.special)));
        }
        let top = ids.values().copied().chain(marks.iter().map(|(id, _)| *id)).max();
        let count = top.map_or(0, |id| id.saturating_add(1));
        if count == 0 || count > IDS_MAX {
            let reason = format!("largest token id {top:?}, ids below {IDS_MAX} are served");
            return Err(VocabularyError::malformed(reason));
        }
        let mut names: Vec<Named<'_>> = vec![None; count as usize];
        for (name, id) in model.names() {
            if let Some(place) = names.get_mut(id as usize) {
                *place = Some((name, false));
            }
        }
        for (name, old) in lost {
            if let Some(place) = names
                .get_mut(old as usize)
                .filter(|place| **place == Some((name, false)) && ids.get(name) != Some(&old))
            {
                *place = None;
            }
        }
        marks.into_iter().for_each(|(id, named)| names[id as usize] = Some(named));
        Ok(names)
    }
}

struct WholeFile;

impl<'de> Visitor<'de> for WholeFile {
    type Value = File;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the object of a tokenizer.json")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<File, A::Error> {
        let (mut model, mut added, mut decoder) = (None, Vec::new(), Value::Null);
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "version" => match map.next_value::<String>()? {
                    version if version == "1.0" => {}
                    version => return Err(A::Error::custom(format!("version {version:?} is not known"))),
                },
                "model" => model = Some(map.next_value::<Model>()?),
                "added_tokens" => added = map.next_value()?,
                "decoder" => decoder = map.next_value()?,
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(File { model: model.ok_or_else(|| A::Error::missing_field("model"))?, added, decoder })
    }
}

/// Vocabulary of the model: BPE, WordPiece and WordLevel have an object of ids, Unigram a list of names with scores, whose order is that of the ids.
#[derive(Default)]
struct Model {
    /// Names in the order of the file, one behind the other.
    text: String,
    /// End of each name in `text`, and the token's id.
    tokens: Vec<(usize, u32)>,
    is_list: bool,
}

impl Model {
    fn names(&self) -> impl Iterator<Item = (&str, u32)> {
        let begins = std::iter::once(0).chain(self.tokens.iter().map(|(end, _)| *end));
        begins.zip(&self.tokens).map(|(begin, (end, id))| (&self.text[begin..*end], *id))
    }
}

impl<'de> Deserialize<'de> for Model {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(WholeModel)
    }
}

struct WholeModel;

impl<'de> Visitor<'de> for WholeModel {
    type Value = Model;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a tokenizer's model")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Model, A::Error> {
        let (mut kind, mut vocab, mut has_merges) = (None::<String>, None, false);
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "type" => kind = Some(map.next_value()?),
                "vocab" => {
                    let mut model = Model::default();
                    map.next_value_seed(Vocab(&mut model))?;
                    vocab = Some(model);
                }
                key => {
                    has_merges |= key == "merges";
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        let model = vocab.ok_or_else(|| A::Error::missing_field("vocab"))?;
        let fits = match kind.as_deref() {
            Some("BPE") => !model.is_list && has_merges,
            Some("WordPiece" | "WordLevel") => !model.is_list,
            Some("Unigram") => model.is_list,
            None => true,
            Some(_) => false,
        };
        if fits { Ok(model) } else { Err(A::Error::custom(format!("no vocabulary of a model of type {kind:?}"))) }
    }
}

/// Reader of a vocabulary.
struct Vocab<'m>(&'m mut Model);

impl<'de> DeserializeSeed<'de> for Vocab<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Vocab<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of token ids, or a list of tokens with scores")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(end) = map.next_key_seed(Name(&mut self.0.text))? {
            self.0.tokens.push((end, map.next_value()?));
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        self.0.is_list = true;
        while let Some(end) = list.next_element_seed(Scored(&mut self.0.text))? {
            let id = u32::try_from(self.0.tokens.len()).map_err(|_| A::Error::custom("too many tokens"))?;
            self.0.tokens.push((end, id));
        }
        Ok(())
    }
}

/// Reader of a name, which is added to the text. The value is the length of the text behind it.
struct Name<'m>(&'m mut String);

impl<'de> DeserializeSeed<'de> for Name<'_> {
    type Value = usize;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<usize, D::Error> {
        from.deserialize_str(self)
    }
}

impl Visitor<'_> for Name<'_> {
    type Value = usize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a token")
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<usize, E> {
        self.0.push_str(name);
        Ok(self.0.len())
    }
}

/// Reader of a name with its score, which is passed over.
struct Scored<'m>(&'m mut String);

impl<'de> DeserializeSeed<'de> for Scored<'_> {
    type Value = usize;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<usize, D::Error> {
        from.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Scored<'_> {
    type Value = usize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a token and its score")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut pair: A) -> Result<usize, A::Error> {
        let end = pair
            .next_element_seed(Name(self.0))?
            .ok_or_else(|| A::Error::invalid_length(0, &"a token and its score"))?;
        pair.next_element::<f64>()?.ok_or_else(|| A::Error::invalid_length(1, &"a token and its score"))?;
        Ok(end)
    }
}
