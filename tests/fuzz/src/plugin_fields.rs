//! Any bytes as a list of header fields that a WebAssembly plugin wrote: what is read can be written and read again.

use penstock_wasm::host::Fields;

pub(crate) fn run(bytes: &[u8]) {
    if let Ok(fields) = Fields::decode(bytes) {
        let written = fields.encode();
        assert!(written.len() <= fields.encoded_size());
        let again = Fields::decode(&written).expect("what we wrote");
        assert!(again.iter().eq(fields.iter()));
    }
}
