//! A tokenizer.json, read for the bytes of its tokens: what a worker masks grammars over.

use penstock_vocabulary::TokenBytes;

pub(crate) fn run(data: &[u8]) {
    let Ok(table) = TokenBytes::from_json(data) else { return };
    let ids = 0..table.count();
    let whole: usize = ids.clone().map(|id| table.token(id).len()).sum();
    assert!(!ids.is_empty() && whole <= 256 << 20, "{whole} bytes of {} tokens", table.count());
    for id in ids {
        assert!(table.token(id).ends_with(table.first_token(id)), "the beginning of a text drops blanks alone");
    }
    assert!(table.token(table.count()).is_empty() && !table.is_special(table.count()));
    let again = TokenBytes::from_json(data).expect("the same again");
    assert!((0..table.count()).all(|id| again.token(id) == table.token(id)));
}
