//! Hash table from block hash to place, at about 14 bytes per block: it holds places only, the hashes are in the runs.
//!
//! Many small shards instead of one table, so that growth moves some thousands of entries at a time and not millions.

use hashbrown::HashTable;
use penstock_proto::BlockHash;
use std::collections::HashMap;
use std::hash::BuildHasher;

/// Number of shards; with ten million blocks in all, one grows from 7,168 to 14,336 entries in less than a millisecond.
const SHARDS: usize = 1024;

/// Place of a block: its run, and its depth, which stays the same while the run is trimmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) run: u32,
    pub(super) depth: u32,
}

/// Sharded hash table from block hashes to places; see the module header.
pub(super) struct Table {
    shards: Vec<HashTable<Place>>,
    /// Random keys of a standard map: a worker that invents hashes cannot force collisions. Nothing observable depends on them.
    keys: [u64; 2],
    len: usize,
}

impl Default for Table {
    fn default() -> Self {
        let map: HashMap<(), ()> = HashMap::new();
        let keys = [0_u8, 1].map(|key| map.hasher().hash_one(key));
        Self { shards: vec![HashTable::new(); SHARDS], keys, len: 0 }
    }
}

impl Table {
    /// Place of `hash`. `at`: gives the hash at a place of the table.
    pub(super) fn find(&self, hash: BlockHash, at: impl Fn(Place) -> BlockHash) -> Option<Place> {
        let key = self.key(hash);
        self.shards[shard(key)].find(key, |place| at(*place) == hash).copied()
    }

    /// Adds a hash that is not in the table.
    pub(super) fn insert(&mut self, hash: BlockHash, place: Place, at: impl Fn(Place) -> BlockHash) {
        let (key, keys) = (self.key(hash), self.keys);
        self.shards[shard(key)].insert_unique(key, place, |place| fold(at(*place), keys));
        self.len += 1;
    }

    /// Moves the hash at `from` to another place.
    pub(super) fn moved(&mut self, hash: BlockHash, from: Place, to: Place) {
        let key = self.key(hash);
        if let Some(place) = self.shards[shard(key)].find_mut(key, |place| *place == from) {
            *place = to;
        }
    }

    /// Removes the entry of a hash whose block is at `place`.
    pub(super) fn remove(&mut self, hash: BlockHash, place: Place) {
        let key = self.key(hash);
        if let Ok(entry) = self.shards[shard(key)].find_entry(key, |other| *other == place) {
            entry.remove();
            self.len -= 1;
        }
    }

    /// Number of blocks that have a place in the table.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    fn key(&self, hash: BlockHash) -> u64 {
        fold(hash, self.keys)
    }
}

/// Shard of a key, from its middle bits: the table itself uses the lowest and the highest.
fn shard(key: u64) -> usize {
    (key >> 32) as usize % SHARDS
}

fn fold(hash: BlockHash, keys: [u64; 2]) -> u64 {
    let product = u128::from(hash.0 as u64 ^ keys[0]) * u128::from((hash.0 >> 64) as u64 ^ keys[1]);
    product as u64 ^ (product >> 64) as u64
}
