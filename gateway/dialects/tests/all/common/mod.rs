//! Golden files: a test compares, and writes the file if `UPDATE_GOLDEN=1`.

use std::path::Path;

use penstock_types::{ChatEvent, ProviderCodec, ProviderFault, Request};

/// Compares `got` with `tests/golden/<name>`.
#[track_caller]
#[allow(dead_code, reason = "not every test has golden files")]
pub(crate) fn check_golden(name: &str, got: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, got).expect("golden file is writable");
        return;
    }
    let expected =
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{name}: {error}; UPDATE_GOLDEN=1 writes it"));
    assert_eq!(got, expected, "{name} differs; UPDATE_GOLDEN=1 writes it, then read the diff");
}

/// Events of an answer: whole, cut at every byte into two, and byte by byte. All must agree.
#[track_caller]
#[allow(dead_code, reason = "not every test reads answers")]
pub(crate) fn read_cut(
    codec: &dyn ProviderCodec,
    request: &Request,
    answer: &[u8],
) -> Result<Vec<ChatEvent>, ProviderFault> {
    let read = |pieces: &mut dyn Iterator<Item = &[u8]>| {
        let (mut decoder, mut events) = (codec.decoder(request), Vec::new());
        for piece in pieces {
            decoder.push(piece, &mut events)?;
        }
        decoder.end(&mut events)?;
        assert!(decoder.is_complete());
        Ok(events)
    };
    let whole = read(&mut std::iter::once(answer));
    for cut in 0..answer.len() {
        let (one, other) = answer.split_at(cut);
        assert_eq!(read(&mut [one, other].into_iter()), whole, "cut at {cut}");
    }
    assert_eq!(read(&mut answer.chunks(1)), whole, "byte by byte");
    whole
}

/// Events as text, one per line.
#[allow(dead_code, reason = "not every test reads answers")]
pub(crate) fn shown(events: &[ChatEvent]) -> String {
    events.iter().map(|event| format!("{event:?}\n")).collect()
}
