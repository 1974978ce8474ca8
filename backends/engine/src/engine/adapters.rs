//! Adapters of a running engine: each is loaded between steps, a layer at a time, and taken away when its last sequence has ended.
//!
//! No step that runs is touched: rows of other sequences have the bits that they would have without the load, and a load that fails leaves the
//! engine as it was.

use super::Engine;
use crate::adapter::Adapter;
use crate::slots::Stage;
use penstock_kernels::{ADAPTERS_MAX, AdapterSlot, KernelError};
use penstock_proto::AdapterId;

/// Load of an adapter in progress, with a slot of its own. [`Engine::load_layer`] continues the load, [`Engine::abandon`] cancels it.
#[derive(Debug)]
pub struct AdapterLoad {
    /// Place of the adapter; `None`: the engine has the same content already.
    slot: Option<AdapterSlot>,
    /// Layers that are loaded.
    layers: usize,
}

impl Engine {
    /// Loads `adapter` for the requests that name it. If the engine has the same content already, nothing is loaded.
    ///
    /// # Errors
    /// There are [`ADAPTERS_MAX`] already; the device has no adapters ([`KernelError::Unavailable`]) or no memory for this one. The engine is
    /// then as it was.
    pub fn add_adapter(&mut self, adapter: &Adapter) -> Result<(), KernelError> {
        let mut load = self.begin_adapter(adapter.id())?;
        while !self.load_layer(&mut load, adapter)? {}
        Ok(())
    }

    /// Takes a slot for an adapter that is to be loaded. If the engine has the same content, no slot is taken, and a removal of that content that is not complete is cancelled.
    ///
    /// # Errors
    /// [`ADAPTERS_MAX`] are held, those that running sequences still use included; or the same content is being loaded.
    pub fn begin_adapter(&mut self, id: AdapterId) -> Result<AdapterLoad, KernelError> {
        let refused = |why: String| Err(KernelError::Unavailable { what: "another adapter".to_owned(), why });
        let slot = match self.limits.adapters.find(id) {
            Some((_, Stage::Loading)) => {
                return refused("an adapter of the same content is being loaded already".to_owned());
            }
            Some((slot, Stage::Open | Stage::Leaving)) => {
                self.limits.adapters.set(slot, Stage::Open);
                None
            }
            None => match self.limits.adapters.reserve(id) {
                None => return refused(format!("all {ADAPTERS_MAX} adapter slots are in use")),
                slot => slot,
            },
        };
        Ok(AdapterLoad { slot, layers: 0 })
    }

    /// Loads the next layer of the adapter that the load was begun for. Returns true once all layers are loaded and requests may name the adapter.
    ///
    /// # Errors
    /// The device has no adapters or no memory for this one; the engine is then as it was before the load.
    pub fn load_layer(&mut self, load: &mut AdapterLoad, adapter: &Adapter) -> Result<bool, KernelError> {
        let Some(slot) = load.slot else { return Ok(true) };
        let layers = self.forward.geometry().layers;
        if load.layers < layers {
            if let Err(error) = self.forward.adapt_layer(load.layers, slot, adapter) {
                self.abandon(load);
                return Err(error);
            }
            load.layers += 1;
        }
        let is_there = load.layers >= layers;
        if is_there {
            self.limits.adapters.set(slot, Stage::Open);
            load.slot = None;
        }
        Ok(is_there)
    }

    /// Gives up a load that is not complete: its layers are taken away, its slot is free.
    pub fn abandon(&mut self, load: &mut AdapterLoad) {
        if let Some(slot) = load.slot.take() {
            self.forward.drop_adapter(slot);
            self.limits.adapters.free(slot);
        }
    }

    /// Refuses new requests with an adapter; [`Engine::free_adapters`] takes it away once no sequence uses it.
    pub fn remove_adapter(&mut self, id: AdapterId) {
        if let Some((slot, Stage::Open)) = self.limits.adapters.find(id) {
            self.limits.adapters.set(slot, Stage::Leaving);
        }
    }

    /// Frees the adapters that were to leave and that no sequence uses any more; between two steps. Returns their number.
    pub fn free_adapters(&mut self) -> usize {
        let used = |slot| self.scheduler.sequences.values().any(|sequence| sequence.request.adapter == Some(slot));
        let free: Vec<AdapterSlot> = self.limits.adapters.leaving().filter(|slot| !used(*slot)).collect();
        for slot in &free {
            self.forward.drop_adapter(*slot);
            self.limits.adapters.free(*slot);
        }
        free.len()
    }

    /// Adapters that requests may name, by slot.
    pub fn adapters(&self) -> Vec<AdapterId> {
        self.limits.adapters.open().collect()
    }

    /// Returns true if the adapter has a slot: it is being loaded, is there, or leaves.
    pub fn holds_adapter(&self, id: AdapterId) -> bool {
        self.limits.adapters.find(id).is_some()
    }
}
