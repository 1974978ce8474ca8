//! Grammars over the demo model's vocabulary: what they allow, force and refuse.

mod common;
mod forced;
mod hostile;
mod hostile_corpus;
mod languages;
mod measure;
mod states;
mod suite;
mod tags;
