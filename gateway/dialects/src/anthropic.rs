//! The Anthropic API.

pub mod errors;

pub use errors::error_body;
