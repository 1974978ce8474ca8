//! Integration tests of the crate in one binary, because each binary would be linked separately. One module per
//! subject.
#![forbid(unsafe_code)]

mod fixtures;
mod live;
