//! Integration tests of the crate in one binary, because each binary would be linked separately. One module per
//! subject.
#![forbid(unsafe_code)]

mod common;
mod damaged;
mod demo;
mod goldens;
mod guided;
mod invariance;
mod load;
mod parse_anything;
mod serving;
