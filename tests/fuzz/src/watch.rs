//! Any stream, cut anywhere: no panic, and the forwarded bytes equal the received ones, whole events in order.

use penstock_dialects::watch::{Watch, whole};
use penstock_types::Surface;

const SURFACES: [Surface; 5] =
    [Surface::Chat, Surface::Completions, Surface::Responses, Surface::Messages, Surface::Generate];

pub(crate) fn run(input: &[u8]) {
    let [kind, piece, stream @ ..] = input else { return };
    let surface = SURFACES[usize::from(*kind) % SURFACES.len()];
    let _ = whole(surface, stream);
    let mut watch = Watch::new(surface, false);
    let mut out = Vec::new();
    for part in stream.chunks(usize::from(*piece).max(1)) {
        watch.buffer().extend_from_slice(part);
        while let Ok(Some(bytes)) = watch.take() {
            out.extend_from_slice(&bytes);
        }
    }
    if let Ok(Some(bytes)) = watch.end() {
        out.extend_from_slice(&bytes);
    }
    assert!(stream.starts_with(&out));
}
