//! Benefit of the split into history and active: hit rates of the pool on two seeded workloads, beside plain LRU.
//!
//! `cargo test -p penstock-kv --test all hit_rate -- --nocapture` prints the table.

use penstock_kv::tier::Link;
use penstock_kv::{BlockPool, Evicted, Placed, TierPool};
use penstock_proto::BlockHash;
use penstock_proto::frames::Tier;

const PAGES: usize = 1000;

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % n
    }
}

/// Runs requests of (chain, blocks) one after another; returns blocks hit over blocks wanted.
fn hit_rate(active_share: f64, requests: impl Iterator<Item = (u128, usize)>) -> f64 {
    let mut pool = BlockPool::with_active_share(PAGES, active_share);
    let mut wanted = 0;
    for (chain, blocks) in requests {
        let hash = |block: usize| BlockHash(chain * 100_000 + block as u128 + 1);
        let mut pages = pool.lookup((0..blocks).map(hash)).pages;
        pool.share(&pages);
        for block in pages.len()..blocks {
            let page = pool.allocate().expect("one request fits");
            pages.push(pool.seal(page, block.checked_sub(1).map(hash), hash(block)));
        }
        pages.iter().rev().for_each(|&page| pool.release(page));
        wanted += blocks;
    }
    pool.counters().hits as f64 / wanted as f64
}

/// Conversations that come back with longer prefixes, popular ones more often, and every tenth request a long document read
/// once (with `scans`).
fn chats(seed: u64, scans: bool) -> impl Iterator<Item = (u128, usize)> {
    let mut random = Random(seed);
    let mut turns = [0_usize; 64];
    (0..4_000_u128).map(move |n| {
        if scans && random.below(10) == 0 {
            return (1000 + n, 300 + random.below(300) as usize);
        }
        // Two draws, the smaller wins: low numbers are popular.
        let chat = random.below(64).min(random.below(64)) as usize;
        turns[chat] = (turns[chat] + 1) % 40;
        (chat as u128, 10 + turns[chat])
    })
}

#[test]
fn the_split_beats_lru_under_scans_and_costs_little_without() {
    println!("workload   lru    0.25   0.50   0.75   0.90");
    let mut rates = Vec::new();
    for scans in [false, true] {
        let row: Vec<f64> = [0.0, 0.25, 0.5, 0.75, 0.9].map(|share| hit_rate(share, chats(7, scans))).to_vec();
        let line: Vec<String> = row.iter().map(|rate| format!("{rate:.3}")).collect();
        println!("{}  {}", if scans { "scans   " } else { "no scans" }, line.join("  "));
        rates.push(row);
    }
    assert!(rates[1][3] > rates[1][0] + 0.05, "the split must earn its lines under scans");
    assert!(rates[0][3] > rates[0][0] - 0.03, "and not cost much without");
}

/// Hit rate of a small device over a tier: the share of blocks that are found on the device or in the tier.
fn tiered_hit_rate(tier_share: f64, slots: usize, requests: impl Iterator<Item = (u128, usize)>) -> f64 {
    let mut device = BlockPool::new(PAGES);
    let mut tier = TierPool::with_active_share(Tier::Disk, slots, tier_share);
    let (mut wanted, mut found) = (0, 0);
    for (chain, blocks) in requests {
        let hash = |block: usize| BlockHash(chain * 100_000 + block as u128 + 1);
        let mut pages = device.lookup((0..blocks).map(hash)).pages;
        device.share(&pages);
        let mut is_whole = true;
        found += pages.len();
        for block in pages.len()..blocks {
            // Blocks are loaded as long as the tier has the next one, then computed.
            is_whole = is_whole && tier.load(hash(block)).map(|slot| tier.loaded(slot)).is_some();
            found += usize::from(is_whole);
            device.keep_evicted();
            let page = device.allocate().expect("one request fits");
            for Evicted { parent, hash, .. } in device.take_evicted() {
                if let Placed::Slot { slot, .. } = tier.store(Link { parent, hash }) {
                    tier.stored(slot);
                }
            }
            pages.push(device.seal(page, block.checked_sub(1).map(hash), hash(block)));
        }
        pages.iter().rev().for_each(|&page| device.release(page));
        wanted += blocks;
    }
    found as f64 / wanted as f64
}

#[test]
fn a_tier_finds_what_the_device_forgot_and_its_split_beats_lru() {
    println!("tier of 2000  none   lru    split");
    for scans in [false, true] {
        let none = hit_rate(0.75, chats(7, scans));
        let [lru, split] = [0.0, 0.25].map(|share| tiered_hit_rate(share, 2000, chats(7, scans)));
        println!("{}     {none:.3}  {lru:.3}  {split:.3}", if scans { "scans   " } else { "no scans" });
        assert!(lru > none + 0.05 && split > none + 0.05, "a tier must earn its keep: {none} {lru} {split}");
        assert!(split > lru - 0.02, "the split costs little where it does not help: {lru} {split}");
    }
}
