//! Common order of the requests of several gateways.
//!
//! A gateway counts its tenants' service from its own start, so the turns ([`Generate::turn`]) of two gateways cannot
//! be compared: those of a gateway that has run for a week would come after all of one that has just started. Here
//! each gateway has a counter of its own, and a *virtual time* that all share (start-time fair queueing, Goyal et al.
//! 1996): a gateway that has no request here begins at that time, or where its turns left off if that is later, and
//! from there on its turns count as they come. The time is the least place of the requests here, and never falls.
//!
//! A gateway whose tenants are served by other workers too would fall back here without end; [`BEHIND_MAX`] bounds
//! that.
//!
//! [`Generate::turn`]: penstock_proto::frames::Generate::turn

use penstock_proto::{GatewayId, WorkId};
use std::collections::HashMap;

/// Turn that goes before all others of its priority, of a request that began elsewhere.
const FIRST: i64 = i64::MIN;
/// Most that the first request of a gateway may be behind the time, in microseconds of engine time by weight.
const BEHIND_MAX: i64 = 2_000_000;
/// Most gateways without a request here that are remembered.
const IDLE_MAX: usize = 64;

/// A request that is open in this worker, with its gateway's turn and its place in the common order.
struct Open {
    gateway: GatewayId,
    turn: i64,
    place: i64,
    /// True if the request is a prompt for another worker, whose end is not reported.
    lent: bool,
}

/// Fair-share counters of all gateways, and the virtual time that they have in common.
#[derive(Default)]
pub(crate) struct Turns {
    open: HashMap<WorkId, Open>,
    /// Offset subtracted from the turns of each gateway.
    origins: HashMap<GatewayId, i64>,
    time: i64,
}

impl Turns {
    /// Place of a request, which is here under number `id` from now on until [`Self::end`]. Lower goes first.
    pub(crate) fn place(&mut self, gateway: GatewayId, id: WorkId, turn: i64) -> i64 {
        self.enter(gateway, id, turn, false)
    }

    /// Place of a prompt that is computed for another worker. `goes_on`: tells whether an earlier prompt of that
    /// number still runs.
    pub(crate) fn lend(&mut self, gateway: GatewayId, id: WorkId, turn: i64, goes_on: impl Fn(WorkId) -> bool) -> i64 {
        self.open.retain(|id, open| !open.lent || goes_on(*id));
        self.enter(gateway, id, turn, true)
    }

    fn enter(&mut self, gateway: GatewayId, id: WorkId, turn: i64, lent: bool) -> i64 {
        if turn == FIRST {
            return FIRST;
        }
        let least = |open: &mut dyn Iterator<Item = &Open>| open.map(|open| open.place).min();
        self.time = self.time.max(least(&mut self.open.values()).unwrap_or(i64::MIN));
        let time = self.time;
        let own = least(&mut self.open.values().filter(|open| open.gateway == gateway));
        let known = self.origins.get(&gateway).map(|origin| (*origin, turn.saturating_sub(*origin)));
        let origin = match known.filter(|(_, place)| own.is_some() || *place >= time) {
            Some((origin, place)) => {
                let behind = own.map_or(place, |own| own.min(place)).saturating_sub(time);
                origin.saturating_add((behind.saturating_sub(BEHIND_MAX)).max(0))
            }
            None => turn.saturating_sub(time),
        };
        self.origins.insert(gateway, origin);
        if self.origins.len() > IDLE_MAX {
            let open = &self.open;
            self.origins.retain(|known, _| *known == gateway || open.values().any(|open| open.gateway == *known));
        }
        let place = turn.saturating_sub(origin).max(FIRST + 1);
        self.open.insert(id, Open { gateway, turn, place, lent });
        place
    }

    /// Gateway and own turn of a request; for an unknown number those of a request that began elsewhere.
    pub(crate) fn of(&self, id: WorkId) -> (GatewayId, i64) {
        self.open.get(&id).map_or((GatewayId::default(), FIRST), |open| (open.gateway, open.turn))
    }

    /// Records the end of a request.
    pub(crate) fn end(&mut self, id: WorkId) {
        self.open.remove(&id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Serves the first request each round, at `cost` each, and replaces it by the tenant's next one; returns the
    /// number served per gateway.
    fn serve(turns: &mut Turns, tenants: &mut [(u64, i64)], rounds: usize) -> Vec<usize> {
        let mut next = 0;
        let mut waiting: Vec<(i64, u64, usize)> = Vec::new();
        let mut served = vec![0; tenants.len()];
        for round in 0..rounds {
            for (tenant, &(gateway, turn)) in tenants.iter().enumerate() {
                if waiting.iter().all(|(_, _, other)| *other != tenant) {
                    next += 1;
                    waiting.push((turns.place(GatewayId(gateway), WorkId(next), turn), next, tenant));
                }
            }
            let first = *waiting.iter().min().unwrap_or_else(|| panic!("round {round}: somebody waits"));
            waiting.retain(|other| *other != first);
            turns.end(WorkId(first.1));
            tenants[first.2].1 += 100_000;
            served[first.2] += 1;
        }
        served
    }

    #[test]
    fn the_age_of_a_gateway_does_not_matter() {
        let mut turns = Turns::default();
        let mut tenants = [(1, 7_000_000_000), (2, 0)];
        let served = serve(&mut turns, &mut tenants, 200);
        assert_eq!(served, [100, 100], "turns in microseconds, one gateway two hours older");
    }

    #[test]
    fn a_gateway_that_comes_back_waits_for_nobody_and_overtakes_nobody() {
        let mut turns = Turns::default();
        let mut alone = [(1, 5_000_000)];
        serve(&mut turns, &mut alone, 50);
        let mut both = [alone[0], (2, 900_000_000)];
        assert_eq!(serve(&mut turns, &mut both, 20), [10, 10]);
    }

    #[test]
    fn tenants_of_one_gateway_stand_as_it_says() {
        let mut turns = Turns::default();
        let heavy = turns.place(GatewayId(1), WorkId(1), 9_000_000);
        let light = turns.place(GatewayId(1), WorkId(2), 1_000_000);
        assert_eq!((heavy - light, turns.of(WorkId(2))), (8_000_000, (GatewayId(1), 1_000_000)));
        assert_eq!(turns.place(GatewayId(1), WorkId(3), FIRST), FIRST);
    }

    #[test]
    fn who_is_served_elsewhere_too_falls_back_so_far_only() {
        let mut turns = Turns::default();
        turns.place(GatewayId(2), WorkId(1), 0);
        for n in 0..100 {
            // Each time the tenant was served a second elsewhere.
            turns.place(GatewayId(1), WorkId(10 + n), n as i64 * 1_000_000);
            (n > 0).then(|| turns.end(WorkId(9 + n)));
        }
        assert!(turns.open[&WorkId(109)].place <= 2 * BEHIND_MAX, "{}", turns.open[&WorkId(109)].place);
    }

    #[test]
    fn any_number_is_taken() {
        let mut turns = Turns::default();
        for (id, turn) in [i64::MAX, i64::MIN + 1, 0, -1, i64::MAX].into_iter().enumerate() {
            turns.place(GatewayId(id as u64 % 2), WorkId(id as u64), turn);
        }
        (0..9).for_each(|id| turns.end(WorkId(id)));
        assert!(turns.open.is_empty());
        for n in 0..1000 {
            turns.place(GatewayId(n), WorkId(n), 5);
            turns.end(WorkId(n));
        }
        assert!(turns.origins.len() <= IDLE_MAX + 1, "those that left are forgotten");
    }

    #[test]
    fn prompts_for_others_are_in_the_order_of_their_gateway() {
        let mut turns = Turns::default();
        let heavy = turns.lend(GatewayId(1), WorkId(1), 9_000_000, |_| true);
        assert!(turns.lend(GatewayId(1), WorkId(2), 1_000_000, |_| true) < heavy);
        turns.lend(GatewayId(1), WorkId(3), 9_000_000, |id| id == WorkId(2));
        assert_eq!(turns.of(WorkId(1)), (GatewayId(0), FIRST), "it has ended");
    }
}
