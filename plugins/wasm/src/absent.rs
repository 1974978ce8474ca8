//! Stand-in for the host in a build without it.

use std::sync::Arc;

use penstock_plugins::{Kind, Plugin, Settings};

use crate::WasmError;

/// Kind that refuses every use.
#[derive(Debug)]
pub(crate) struct AbsentKind;

impl Kind for AbsentKind {
    fn name(&self) -> &'static str {
        crate::NAME
    }

    fn build(&self, settings: &Settings<'_>) -> Option<Arc<dyn Plugin>> {
        settings.fault("", WasmError::Absent.to_string());
        None
    }
}

#[cfg(test)]
mod tests {
    use penstock_plugins::testing;
    use serde_json::json;

    #[test]
    fn a_build_without_the_host_says_how_to_get_it() {
        let faults = testing::build(crate::KINDS[0], &json!({ "file": "a.wasm" })).err().unwrap();
        assert_eq!(faults.len(), 1, "the settings that nobody read are no faults: {faults:?}");
        assert!(faults[0].message.contains("--features wasm"), "{faults:?}");
    }
}
