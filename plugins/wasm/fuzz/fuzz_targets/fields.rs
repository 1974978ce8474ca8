//! Any bytes as a list of header fields that a plugin wrote: what is read can be written and read again.
#![no_main]

use penstock_wasm::host::Fields;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(fields) = Fields::decode(bytes) {
        let written = fields.encode();
        assert!(written.len() <= fields.encoded_size());
        let again = Fields::decode(&written).expect("what we wrote");
        assert!(again.iter().eq(fields.iter()));
    }
});
