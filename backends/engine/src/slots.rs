//! Places of an engine's adapters: which one has which slot, and whether requests may name it.
//!
//! A slot is reserved while its adapter is loaded, open to requests once it is there, and closed when the adapter is to leave; it is free again
//! when the last sequence with it has ended.

use penstock_kernels::{ADAPTERS_MAX, AdapterSlot};
use penstock_proto::AdapterId;

const _: () = assert!(ADAPTERS_MAX == penstock_proto::ADAPTERS_MAX, "the contract and the devices have one limit");

/// State of an adapter that has a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The adapter is being loaded; no request may name it yet.
    Loading,
    /// New requests may name the adapter.
    Open,
    /// New requests may not name the adapter; running sequences with it go on to their end.
    Leaving,
}

/// Adapters by slot; see the module header.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slots(Vec<Option<(AdapterId, Stage)>>);

impl Slots {
    /// Slots with these adapters, open.
    #[cfg(test)]
    pub(crate) fn loaded(ids: impl IntoIterator<Item = AdapterId>) -> Self {
        Self(ids.into_iter().map(|id| Some((id, Stage::Open))).collect())
    }

    fn all(&self) -> impl Iterator<Item = (AdapterSlot, AdapterId, Stage)> {
        let slots = (0..).map(AdapterSlot).zip(&self.0);
        slots.filter_map(|(slot, held)| held.map(|(id, stage)| (slot, id, stage)))
    }

    /// Slot of an adapter that requests may name.
    pub(crate) fn of(&self, id: AdapterId) -> Option<AdapterSlot> {
        self.all().find(|(_, other, stage)| *other == id && *stage == Stage::Open).map(|(slot, ..)| slot)
    }

    /// Slot and stage of an adapter.
    pub(crate) fn find(&self, id: AdapterId) -> Option<(AdapterSlot, Stage)> {
        self.all().find(|(_, other, _)| *other == id).map(|(slot, _, stage)| (slot, stage))
    }

    /// Adapters that requests may name, by slot.
    pub(crate) fn open(&self) -> impl Iterator<Item = AdapterId> {
        self.all().filter(|(.., stage)| *stage == Stage::Open).map(|(_, id, _)| id)
    }

    /// Slots of adapters that leave.
    pub(crate) fn leaving(&self) -> impl Iterator<Item = AdapterSlot> {
        self.all().filter(|(.., stage)| *stage == Stage::Leaving).map(|(slot, ..)| slot)
    }

    /// Takes the first free slot for an adapter that is to be loaded; `None`: there is none.
    pub(crate) fn reserve(&mut self, id: AdapterId) -> Option<AdapterSlot> {
        let at = self.0.iter().position(Option::is_none).unwrap_or(self.0.len());
        if at == ADAPTERS_MAX {
            return None;
        }
        self.0.resize(self.0.len().max(at + 1), None);
        self.0[at] = Some((id, Stage::Loading));
        Some(AdapterSlot(at as u16))
    }

    /// Sets the stage of the adapter in a slot.
    pub(crate) fn set(&mut self, slot: AdapterSlot, stage: Stage) {
        self.0.get_mut(usize::from(slot.0)).into_iter().flatten().for_each(|held| held.1 = stage);
    }

    /// Frees a slot.
    pub(crate) fn free(&mut self, slot: AdapterSlot) {
        self.0.get_mut(usize::from(slot.0)).into_iter().for_each(|held| *held = None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_used_again_and_never_more_than_the_limit() {
        let mut slots = Slots::default();
        for id in 0..ADAPTERS_MAX as u128 {
            let slot = slots.reserve(AdapterId(id)).expect("room");
            assert_eq!((slots.of(AdapterId(id)), slots.find(AdapterId(id))), (None, Some((slot, Stage::Loading))));
            slots.set(slot, Stage::Open);
        }
        assert_eq!(slots.reserve(AdapterId(99)), None);
        slots.set(AdapterSlot(7), Stage::Leaving);
        assert_eq!((slots.of(AdapterId(7)), slots.reserve(AdapterId(99))), (None, None), "still held");
        assert_eq!(slots.leaving().collect::<Vec<_>>(), [AdapterSlot(7)]);
        slots.free(AdapterSlot(7));
        assert_eq!(slots.reserve(AdapterId(99)), Some(AdapterSlot(7)));
        assert_eq!(slots.open().count(), ADAPTERS_MAX - 1);
        slots.free(AdapterSlot(200));
    }
}
