//! Bounds of one rendering: steps, bytes and depth.
//!
//! A template is code of a model file and may try to run for ever, to fill the memory or to exhaust the stack. Every
//! evaluated node takes a step, every new text or list takes its bytes, every nested evaluation takes a level.

use std::{cell::Cell, sync::Arc};

use super::{
    RenderError,
    value::{Seq, Value},
};

/// Result of a part of a rendering.
pub(crate) type Run<T> = Result<T, RenderError>;

/// Steps per rendering. A conversation of a thousand turns with tools takes some hundred thousand; an endless template
/// is stopped after a fraction of a second.
const STEPS: u64 = 5_000_000;
/// Bytes that a rendering may allocate in all, what it has released included.
const BYTES: u64 = 512 << 20;
/// Largest text that a template may make, the prompt included. Request bodies are bounded by 32 MiB; templates add
/// marks around messages.
pub(super) const TEXT_BYTES_MAX: usize = 64 << 20;
/// Levels of evaluation: nested expressions, blocks, calls of macros. All of them together fit into 700 KB of stack
/// where the crate is optimized at all (`opt-level` 1 or more).
const LEVELS_MAX: u32 = 320;
/// Nesting of lists and objects. Requests nest at most 128 levels.
const NESTING_MAX: u32 = 200;
/// Bytes of text that are searched or copied in one step.
const BYTES_PER_STEP: usize = 128;

/// What is left to a rendering.
pub(crate) struct Budget {
    steps: Cell<u64>,
    bytes: Cell<u64>,
    levels: Cell<u32>,
}

impl Budget {
    pub(crate) fn new() -> Self {
        Self { steps: Cell::new(STEPS), bytes: Cell::new(BYTES), levels: Cell::new(LEVELS_MAX) }
    }

    /// Takes `count` steps.
    pub(super) fn step(&self, count: usize) -> Run<()> {
        self.steps.set(self.steps.get().checked_sub(count as u64).ok_or(RenderError::TooMuch)?);
        Ok(())
    }

    /// Takes the steps of a search through `bytes` of text.
    pub(super) fn scan(&self, bytes: usize) -> Run<()> {
        self.step(1 + bytes / BYTES_PER_STEP)
    }

    /// Takes `count` new bytes, and the steps of writing them.
    pub(super) fn bytes(&self, count: usize) -> Run<()> {
        self.bytes.set(self.bytes.get().checked_sub(count as u64).ok_or(RenderError::TooMuch)?);
        self.scan(count)
    }

    /// Refuses a text of `bytes` before it is made.
    pub(super) fn room(&self, bytes: usize) -> Run<()> {
        if bytes > TEXT_BYTES_MAX { Err(RenderError::TooMuch) } else { Ok(()) }
    }

    /// Takes a level, which [`Budget::leave`] gives back. A fault ends the rendering, so it gives none back.
    pub(super) fn enter(&self) -> Run<()> {
        self.step(1)?;
        self.levels.set(self.levels.get().checked_sub(1).ok_or(RenderError::TooMuch)?);
        Ok(())
    }

    pub(super) fn leave(&self) {
        self.levels.set(self.levels.get() + 1);
    }

    /// A new text.
    pub(super) fn text(&self, text: impl AsRef<str> + Into<Arc<str>>) -> Run<Value> {
        let bytes = text.as_ref().len();
        self.room(bytes)?;
        self.bytes(bytes + 32)?;
        Ok(Value::Str(text.into()))
    }

    /// A new sequence.
    pub(super) fn seq(&self, items: Vec<Value>) -> Run<Seq> {
        self.bytes(size_of::<Value>() * items.len() + 32)?;
        let nesting = self.nesting(items.iter())?;
        Ok(Seq { items, nesting })
    }

    pub(crate) fn list(&self, items: Vec<Value>) -> Run<Value> {
        Ok(Value::List(self.seq(items)?.into()))
    }

    pub(super) fn tuple(&self, items: Vec<Value>) -> Run<Value> {
        Ok(Value::Tuple(self.seq(items)?.into()))
    }

    /// Nesting of a container with these items. Containers never change, so they hold no cycle, and bounded nesting
    /// bounds every recursion over them, their release included.
    pub(super) fn nesting<'a>(&self, items: impl Iterator<Item = &'a Value>) -> Run<u32> {
        let nesting = items.map(Value::nesting).max().unwrap_or(0) + 1;
        if nesting > NESTING_MAX { Err(RenderError::TooMuch) } else { Ok(nesting) }
    }
}

/// A fault of the template, in words.
pub(super) fn fault<T>(words: impl Into<String>) -> Run<T> {
    Err(RenderError::Failed(words.into()))
}
