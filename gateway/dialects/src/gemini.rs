//! The Gemini API.

pub mod errors;
pub mod watch;

pub use errors::error_body;
