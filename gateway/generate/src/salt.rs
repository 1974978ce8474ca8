//! Salt of the block hashes of a request, under which alone prompts share blocks.

use penstock_proto::AdapterId;

/// Salt of the block hashes: its fields joined so that no two sets of them give the same bytes.
/// Without an adapter they are those of versions that knew none.
pub(super) fn salt(tenant: &str, model: &str, cache_salt: Option<&str>, adapter: Option<AdapterId>) -> Vec<u8> {
    let id = adapter.map(AdapterId::to_bytes);
    let fields = [tenant, model, cache_salt.unwrap_or_default()].map(str::as_bytes);
    let mut out = Vec::new();
    for field in fields.into_iter().chain(id.as_ref().map(|id| &id[..])) {
        out.extend_from_slice(&(field.len() as u64).to_le_bytes());
        out.extend_from_slice(field);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn salts_cannot_be_forged_by_moving_text_between_fields() {
        let salt = |tenant, model, cache_salt| salt(tenant, model, cache_salt, None);
        assert_ne!(salt("a", "bc", None), salt("ab", "c", None));
        assert_ne!(salt("a", "b", Some("c")), salt("a", "bc", None));
        assert_eq!(salt("a", "b", None), salt("a", "b", Some("")));
    }

    #[test]
    fn an_adapter_never_shares_the_cache_of_its_model_or_of_another() {
        let salt = |adapter: Option<u128>| salt("a", "b", None, adapter.map(AdapterId));
        assert_ne!(salt(None), salt(Some(1)));
        assert_ne!(salt(Some(1)), salt(Some(2)));
        // Written out: other gateways, and tiers that outlive this one, know the blocks of a model alone by it.
        assert_eq!(salt(None), b"\x01\0\0\0\0\0\0\0a\x01\0\0\0\0\0\0\0b\0\0\0\0\0\0\0\0");
    }
}
