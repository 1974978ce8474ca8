//! Integration tests of the crate in one binary, because each binary would be linked separately. One module per
//! subject.
#![forbid(unsafe_code)]

mod amounts;
mod answers_chat;
mod anthropic_answers;
mod anthropic_messages;
mod anthropic_properties;
mod anthropic_provider;
mod bedrock_provider;
mod common;
mod completions;
mod decode_chat;
mod functions;
mod gemini_answer;
mod gemini_provider;
mod gemini_request;
mod ollama;
mod properties;
mod provider_chat;
mod provider_fields;
mod provider_responses;
mod provider_rules;
mod reference;
mod refusals_chat;
mod responses;
mod round_trips;
mod small_surfaces;
mod structured;
mod vectors;
