//! Integration tests of the crate in one binary, because each binary would be linked separately. One module per
//! subject.
#![forbid(unsafe_code)]

mod around;
mod calls;
mod choice;
mod common;
mod demo;
mod encoders;
mod families;
mod gguf;
mod gguf_encoders;
mod grammars;
mod hostile;
mod second_turns;
mod styles;
mod templates;
mod tokenizers;
mod turns;
