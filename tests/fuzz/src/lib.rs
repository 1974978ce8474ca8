//! Fuzz targets: one function per parser of bytes from outside. Each takes any bytes and panics when the parser breaks a promise.
//!
//! Three runners share them. `cargo test` replays the kept corpus (`corpus/<target>`) and mutates it a fixed number of times with a
//! fixed seed, so that a run of CI is repeatable (`tests/corpus.rs`). `make fuzz MINUTES=` searches with libFuzzer, guided by coverage
//! (`libfuzzer/`), and keeps new inputs in `target/fuzz-corpus`; an input worth keeping is copied to `corpus/<target>` by hand.

#![forbid(unsafe_code)]

mod anthropic_answer;
mod anthropic_messages;
mod bedrock;
mod checkpoint;
mod console;
mod decode_chat;
mod decode_completion;
mod decode_responses;
mod ext_proc;
mod frames;
mod gemini;
mod gguf;
mod grammar;
mod hub_listing;
mod kv_events;
mod openai_answers;
mod peek;
#[cfg(feature = "wasm")]
mod plugin_fields;
#[cfg(feature = "wasm")]
mod plugin_module;
mod safetensors_header;
mod tool_calls;
mod transfer;
mod vocabulary;
mod watch;
mod zmtp;

/// Calls `$each!(name, function)` for every target.
#[macro_export]
macro_rules! for_each_target {
    ($each:ident) => {
        $each!(anthropic_answer);
        $each!(anthropic_messages);
        $each!(answer_head);
        $each!(batch_line);
        $each!(bedrock);
        $each!(checkpoint);
        $each!(chunked_body);
        $each!(config);
        $each!(console);
        $each!(credentials);
        $each!(decode_chat);
        $each!(decode_completion);
        $each!(decode_responses);
        $each!(ext_proc);
        $each!(form);
        $each!(frames);
        $each!(gemini);
        $each!(gguf);
        $each!(grammar);
        $each!(hub_listing);
        $each!(kv_events);
        $each!(openai_answers);
        $each!(peek);
        $each!(request_head);
        $each!(safetensors_header);
        $each!(tokens);
        $each!(tool_calls);
        $each!(transfer);
        $each!(vocabulary);
        $each!(watch);
        $each!(weights_entry);
        $each!(zmtp);
        #[cfg(feature = "wasm")]
        $each!(plugin_fields);
        #[cfg(feature = "wasm")]
        $each!(plugin_module);
    };
}

/// Function of the target called `name`; `None` if there is no such target.
pub fn target(name: &str) -> Option<fn(&[u8])> {
    use penstock_proxy::untrusted;
    Some(match name {
        "anthropic_answer" => anthropic_answer::run,
        "anthropic_messages" => anthropic_messages::run,
        "answer_head" => untrusted::answer_head,
        "batch_line" => untrusted::batch_line,
        "bedrock" => bedrock::run,
        "checkpoint" => checkpoint::run,
        "chunked_body" => untrusted::chunked_body,
        "console" => console::run,
        "config" => |bytes| std::str::from_utf8(bytes).into_iter().for_each(untrusted::config),
        "credentials" => |bytes| {
            let (url, header) = split_line(bytes);
            std::str::from_utf8(url).into_iter().for_each(|url| untrusted::credentials(url, header));
        },
        "decode_chat" => decode_chat::run,
        "decode_completion" => decode_completion::run,
        "decode_responses" => decode_responses::run,
        "ext_proc" => ext_proc::run,
        "form" => untrusted::form,
        "frames" => frames::run,
        "gemini" => gemini::run,
        "gguf" => gguf::run,
        "grammar" => grammar::run,
        "hub_listing" => hub_listing::run,
        "kv_events" => kv_events::run,
        "openai_answers" => openai_answers::run,
        "peek" => peek::run,
        "request_head" => untrusted::request_head,
        "safetensors_header" => safetensors_header::run,
        "tokens" => untrusted::tokens,
        "tool_calls" => tool_calls::run,
        "transfer" => transfer::run,
        "vocabulary" => vocabulary::run,
        "watch" => watch::run,
        "weights_entry" => penstock_pool::weights_cache::check_entry,
        "zmtp" => zmtp::run,
        #[cfg(feature = "wasm")]
        "plugin_fields" => plugin_fields::run,
        #[cfg(feature = "wasm")]
        "plugin_module" => plugin_module::run,
        _ => return None,
    })
}

/// Splits an input into its first line and the rest.
fn split_line(bytes: &[u8]) -> (&[u8], &[u8]) {
    let at = bytes.iter().position(|byte| *byte == b'\n').unwrap_or(bytes.len());
    (&bytes[..at], bytes.get(at + 1..).unwrap_or_default())
}

/// Splits one input into several payloads: a length of one byte stands in front of each.
fn prefixed(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (length, rest) = bytes.split_first()?;
        let (payload, rest) = rest.split_at(usize::from(*length).min(rest.len()));
        bytes = rest;
        Some(payload)
    })
}
