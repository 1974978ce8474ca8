//! The house rules: who may link whom, where unsafe, clocks and async may be, which licences, what the papers must say.
#![forbid(unsafe_code)]

mod edges;
mod licences;
mod papers;
mod sources;
