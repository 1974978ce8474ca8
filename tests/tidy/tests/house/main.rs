//! House rules: edges between crates, homes of unsafe, clocks and async, licences, contents of the papers.
#![forbid(unsafe_code)]

mod edges;
mod licences;
mod papers;
mod rooms;
mod sources;
