//! Any bytes as a list of header fields from a WebAssembly plugin: decoded fields can be encoded and decoded again.

use penstock_wasm::host::Fields;

pub(crate) fn run(bytes: &[u8]) {
    if let Ok(fields) = Fields::decode(bytes) {
        let written = fields.encode();
        assert!(written.len() <= fields.encoded_size());
        let again = Fields::decode(&written).expect("what we wrote");
        assert!(again.iter().eq(fields.iter()));
    }
}
