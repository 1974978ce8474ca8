//! The header parser: any bytes are entries inside of the file, or an error. Every fourth input is framed with a true length.

use penstock_engine::checkpoint::safetensors::read_header;

pub(crate) fn run(data: &[u8]) {
    let framed;
    let file = match data.split_first() {
        Some((frame, rest)) if frame % 4 == 0 => {
            let header = rest.len().min(usize::from(*frame) * 4 + 2);
            framed = [&(header as u64).to_le_bytes()[..], rest].concat();
            &framed
        }
        _ => data,
    };
    if let Ok(entries) = read_header("file", file) {
        let mut at = entries.first().map_or(file.len(), |first| first.range.start);
        for entry in entries {
            assert_eq!(entry.range.start, at);
            at = entry.range.end;
        }
        assert_eq!(at, file.len());
    }
}
