//! Text side of the embedded demo model; the worker's crate carries its weights.

/// Files of the demo model: (name, content).
pub(crate) const FILES: &[(&str, &[u8])] = &[
    ("generation_config.json", include_bytes!("../../../models/penstock-demo/generation_config.json")),
    ("tokenizer.json", include_bytes!("../../../models/penstock-demo/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../../models/penstock-demo/tokenizer_config.json")),
];
