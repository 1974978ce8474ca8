//! Adapters: the name of their content, 128 bits, equal wherever the same low-rank matrices are loaded under the same scale; and what a worker says of one.

use prost::Message;

/// Name of one low-rank adapter: BLAKE3 of its scale, its targets and their tensors in the order of names, truncated to 128 bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AdapterId(pub u128);

impl AdapterId {
    /// Bytes on the wire: 16, little-endian.
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_le_bytes()
    }

    /// Name from the 16 bytes on the wire; `None` for another length.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        Some(Self(u128::from_le_bytes(bytes.try_into().ok()?)))
    }
}

impl std::fmt::Debug for AdapterId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Adapter that a worker has loaded, by name and content.
#[derive(Clone, PartialEq, Message)]
pub struct LoadedAdapter {
    /// Name under which the worker was told to load it: the name of a served model.
    #[prost(string, tag = "1")]
    pub name: String,
    /// [`AdapterId`] of its content, 16 bytes. Adapters are equal if their ids are, whatever their names.
    #[prost(bytes = "vec", tag = "2")]
    pub id: Vec<u8>,
    /// [`OrderedAdapter::key`] of the order that asked for it; empty where the worker was started with it by hand.
    #[prost(string, tag = "3")]
    pub key: String,
}

/// Longest name of an adapter in a report, in bytes.
const NAME_BYTES_MAX: usize = 1024;
/// Longest reason in a report, in bytes.
const WHY_BYTES_MAX: usize = 1024;

/// Cuts what a worker says of its adapters to what a worker can hold: [`crate::ADAPTERS_MAX`] of each kind, with names and reasons of bounded length.
pub fn bound(loaded: &mut Vec<LoadedAdapter>, pending: &mut Vec<PendingAdapter>) {
    loaded.retain(|one| one.name.len() <= NAME_BYTES_MAX && one.key.len() <= NAME_BYTES_MAX);
    loaded.truncate(crate::ADAPTERS_MAX);
    pending.retain(|one| one.name.len() <= NAME_BYTES_MAX && one.key.len() <= NAME_BYTES_MAX);
    pending.truncate(crate::ADAPTERS_MAX);
    for one in pending {
        one.why.truncate(one.why.floor_char_boundary(WHY_BYTES_MAX));
    }
}

/// Adapters that a worker is to hold: it loads those that it lacks, and lets go of all others once no request runs with them. Orders are whole
/// lists, so one that was lost or came twice does no harm; a load that failed is tried again.
#[derive(Clone, PartialEq, Message)]
pub struct AdapterOrder {
    /// The adapters, at most [`crate::ADAPTERS_MAX`].
    #[prost(message, repeated, tag = "1")]
    pub adapters: Vec<OrderedAdapter>,
}

/// Adapter of an order.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct OrderedAdapter {
    /// Name under which the worker announces it.
    #[prost(string, tag = "1")]
    pub name: String,
    /// PEFT folder on the worker's machine, absolute.
    #[prost(string, tag = "2")]
    pub path: String,
    /// Digest of the folder's path and files as the gateway saw them. The worker reads a folder again only when the key has changed.
    #[prost(string, tag = "3")]
    pub key: String,
}

/// Adapters of a worker, loaded and not.
#[derive(Clone, PartialEq, Message)]
pub struct AdapterReport {
    /// Adapters that requests may name now; takes the place of those of [`crate::frames::Ready`].
    #[prost(message, repeated, tag = "1")]
    pub loaded: Vec<LoadedAdapter>,
    /// Adapters of the last order that are not loaded.
    #[prost(message, repeated, tag = "2")]
    pub pending: Vec<PendingAdapter>,
}

/// Adapter that was ordered and is not loaded.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PendingAdapter {
    /// Name of the order.
    #[prost(string, tag = "1")]
    pub name: String,
    /// [`OrderedAdapter::key`] of the order.
    #[prost(string, tag = "2")]
    pub key: String,
    /// Reason why it cannot be loaded; empty while it is read or loaded.
    #[prost(string, tag = "3")]
    pub why: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_survives_the_wire() {
        let id = AdapterId(0x0123_4567_89ab_cdef_0011_2233_4455_6677);
        assert_eq!(AdapterId::from_bytes(&id.to_bytes()), Some(id));
        assert_eq!(format!("{id:?}"), "0123456789abcdef0011223344556677");
        for length in [0, 15, 17] {
            assert_eq!(AdapterId::from_bytes(&vec![0; length]), None);
        }
    }
}
