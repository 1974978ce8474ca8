//! Fair choice of the next background response: places are shared among keys.
//!
//! A key gets a place only while more are free than it has. So a key that is alone gets half of them, two get a third
//! each, and there is always a place for the next key, however long the answers of the others take. Among keys that
//! wait, the key with the fewest places is next; among several with as few, the key whose last turn is longest ago.

use std::collections::{HashMap, VecDeque};

use penstock_store::Tenant;

/// Last turn of each key that has work.
#[derive(Debug, Default)]
pub(super) struct Turns {
    last: HashMap<Tenant, u64>,
    now: u64,
}

impl Turns {
    /// Chooses the waiting responses (each with its key, the oldest of a key first) that get one of `places`; `taken`
    /// are the places of each key.
    pub(super) fn next<'a, T>(
        &mut self,
        waiting: &'a [(Tenant, T)],
        mut taken: HashMap<Tenant, usize>,
        places: usize,
    ) -> Vec<&'a (Tenant, T)> {
        let mut queues: HashMap<&Tenant, VecDeque<&'a (Tenant, T)>> = HashMap::new();
        waiting.iter().for_each(|one| queues.entry(&one.0).or_default().push_back(one));
        // Keys with nothing to do are forgotten.
        self.last.retain(|key, _| queues.contains_key(key) || taken.contains_key(key));
        let mut free = places.saturating_sub(taken.values().sum());
        let mut next = Vec::new();
        while free > 0 {
            let held = |key: &Tenant| taken.get(key).copied().unwrap_or(0);
            let may = queues.iter().filter(|(key, queue)| !queue.is_empty() && held(key) < free);
            let first =
                may.min_by_key(|(key, _)| (held(key), self.last.get(**key).copied().unwrap_or(0), key.as_str()));
            let Some(key) = first.map(|(key, _)| *key) else { break };
            let Some(one) = queues.get_mut(key).and_then(VecDeque::pop_front) else { break };
            self.now += 1;
            self.last.insert(key.clone(), self.now);
            *taken.entry(key.clone()).or_default() += 1;
            free -= 1;
            next.push(one);
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: usize) -> Tenant {
        Tenant::new(&format!("key-{name}"))
    }

    fn waiting(of_key: &[usize]) -> Vec<(Tenant, usize)> {
        of_key.iter().enumerate().flat_map(|(name, count)| (0..*count).map(move |nth| (key(name), nth))).collect()
    }

    #[test]
    fn one_key_leaves_half_and_others_come_in_at_once() {
        let mut turns = Turns::default();
        assert_eq!(turns.next(&waiting(&[1000]), HashMap::new(), 64).len(), 32);
        let taken = HashMap::from([(key(0), 32)]);
        let queue = waiting(&[1000, 1, 1]);
        let next = turns.next(&queue, taken, 64);
        assert_eq!(next, [&(key(1), 0), &(key(2), 0)]);
    }

    /// Pseudo-random numbers (SplitMix64) from a seed.
    struct Random(u64);

    impl Random {
        fn below(&mut self, end: u64) -> u64 {
            self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            (z ^ (z >> 31)) % end
        }
    }

    /// Response that holds a place until step `until`.
    struct Running {
        key: usize,
        until: u64,
    }

    /// Steps that each response of the victim waited for its place; the attacker (key 0) queues as many responses as it
    /// likes, which take `attack` steps, up to for ever.
    fn victim_waits(seed: u64, attack: u64) -> Vec<u64> {
        const PLACES: usize = 16;
        let mut random = Random(seed);
        let (mut turns, mut running, mut waits) = (Turns::default(), Vec::<Running>::new(), Vec::new());
        // When each response of the victim (key 1) came; the attacker's are always there.
        let mut queue: Vec<u64> = Vec::new();
        for now in 0..600 {
            if random.below(8) == 0 {
                queue.push(now);
            }
            running.retain(|one| one.until > now);
            let mut taken = HashMap::new();
            running.iter().for_each(|one| *taken.entry(key(one.key)).or_default() += 1);
            let queued = waiting(&[20, queue.len()]);
            let mut begun = 0;
            for (who, nth) in turns.next(&queued, taken, PLACES) {
                let is_victim = *who == key(1);
                let takes = if is_victim { 1 + random.below(8) } else { attack + random.below(8) };
                running.push(Running { key: usize::from(is_victim), until: now.saturating_add(takes) });
                if is_victim {
                    waits.push(now - queue[*nth]);
                    begun += 1;
                }
            }
            queue.drain(..begun);
            assert!(running.len() <= PLACES, "seed {seed}");
        }
        waits
    }

    #[test]
    fn an_attacker_takes_no_place_from_a_victim() {
        for seed in 0..8 {
            for attack in [1, 50, u64::MAX / 2] {
                let waits = victim_waits(seed, attack);
                let late = waits.iter().filter(|waited| **waited > 1).count();
                assert!(waits.len() > 40, "seed {seed}: only {} were answered", waits.len());
                assert!(late * 20 <= waits.len(), "seed {seed}: {late} of {} waited", waits.len());
            }
        }
    }

    #[test]
    fn keys_that_all_wait_take_turns() {
        for seed in 0..4 {
            let mut random = Random(seed);
            let (mut turns, mut running, mut begun) = (Turns::default(), Vec::<Running>::new(), [0_u64; 24]);
            for now in 0..600 {
                running.retain(|one| one.until > now);
                let mut taken = HashMap::new();
                running.iter().for_each(|one| *taken.entry(key(one.key)).or_default() += 1);
                let queued = waiting(&[3; 24]);
                for (who, _) in turns.next(&queued, taken, 8) {
                    let name = (0..24).find(|name| key(*name) == *who).expect("one of them");
                    begun[name] += 1;
                    running.push(Running { key: name, until: now + 1 + random.below(5) });
                }
            }
            let (least, most) = (begun.iter().min().expect("24"), begun.iter().max().expect("24"));
            assert!(*least * 10 >= *most * 9, "seed {seed}: {begun:?}");
        }
    }
}
