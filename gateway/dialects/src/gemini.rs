//! The Gemini API.

pub mod errors;

pub use errors::error_body;
