//! Any text as a config file: read, or refused with reasons. It may name files, which are then opened: run it where that does no harm.
#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| penstock_proxy::untrusted::config(text));
