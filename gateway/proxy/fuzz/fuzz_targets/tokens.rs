//! Any bytes as a token, and as a set of keys: what nobody signed is not believed.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| penstock_proxy::untrusted::tokens(bytes));
