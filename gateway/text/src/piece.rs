//! Output of the stages behind the detokenizer for the text of one choice.

/// One piece of a choice's output, before it becomes an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// Answer text, with its byte offset in the model's raw text.
    Text { at: usize, text: String },
    /// Next piece of the model's reasoning.
    Reasoning(String),
    /// Start of a tool call, as soon as the function's name is known.
    CallStart {
        name: String,
        /// Id that the model wrote for the call.
        id: Option<String>,
    },
    /// Next piece of the call's arguments.
    CallArguments(String),
    /// End of the call's arguments, which are complete JSON.
    CallEnd,
}

/// Pieces of one push; neighbours of a kind are joined.
#[derive(Debug, Default)]
pub(crate) struct Pieces(pub(crate) Vec<Piece>);

impl Pieces {
    pub(crate) fn text(&mut self, offset: usize, new: &str) {
        if new.is_empty() {
            return;
        }
        match self.0.last_mut() {
            Some(Piece::Text { at, text }) if *at + text.len() == offset => text.push_str(new),
            _ => self.0.push(Piece::Text { at: offset, text: new.into() }),
        }
    }

    pub(crate) fn reasoning(&mut self, new: &str) {
        match self.0.last_mut() {
            _ if new.is_empty() => {}
            Some(Piece::Reasoning(text)) => text.push_str(new),
            _ => self.0.push(Piece::Reasoning(new.into())),
        }
    }

    pub(crate) fn call_start(&mut self, name: &str, id: Option<String>) {
        self.0.push(Piece::CallStart { name: name.into(), id });
    }

    pub(crate) fn call_arguments(&mut self, new: &str) {
        match self.0.last_mut() {
            _ if new.is_empty() => {}
            Some(Piece::CallArguments(text)) => text.push_str(new),
            _ => self.0.push(Piece::CallArguments(new.into())),
        }
    }

    /// Arguments of all pieces, joined.
    pub(crate) fn arguments(&self) -> String {
        let json = |piece: &Piece| if let Piece::CallArguments(json) = piece { json.clone() } else { String::new() };
        self.0.iter().map(json).collect()
    }

    pub(crate) fn call_end(&mut self) {
        self.0.push(Piece::CallEnd);
    }
}
