//! One target under libFuzzer: `FUZZ_TARGET` names it, the arguments are libFuzzer's own.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;

static TARGET: LazyLock<fn(&[u8])> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").expect("FUZZ_TARGET names the target");
    penstock_fuzz::target(&name).expect("FUZZ_TARGET is one of penstock-fuzz's targets")
});

fuzz_target!(|bytes: &[u8]| TARGET(bytes));
