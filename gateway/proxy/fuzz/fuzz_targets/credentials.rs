//! Any URL and header: one credential or none, and only trusted proxies say where a request comes from.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: (&str, &[u8])| penstock_proxy::untrusted::credentials(input.0, input.1));
