//! Integration tests of the crate in one binary, because each binary would be linked separately. One module per
//! subject.
#![forbid(unsafe_code)]

mod adapters;
mod adapters_live;
mod budget;
mod chains;
mod common;
mod damaged;
mod demo;
mod encoders;
mod families;
mod gguf;
mod gguf_encoders;
mod goldens;
mod guided;
mod invariance;
mod load;
mod lookup;
mod parse_anything;
mod picks;
mod quantized;
mod serving;
mod vectors;
