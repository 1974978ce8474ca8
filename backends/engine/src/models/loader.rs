//! Loading of single weights from a checkpoint onto a device, and its report; decoder, encoder and chain are made of them.

use penstock_kernels::{Device, Held, HostTensor, KernelError, Weight, WeightSpec};

use crate::checkpoint::{Checkpoint, Tensor};
use crate::families::bias_of;

/// Moves weights from the checkpoint to the device, and reports each.
pub(super) struct Loader<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) device: &'a mut dyn Device,
    /// Form of the matrices that products read.
    pub(super) held: Held,
    /// Progress callback after each weight, with its name and its bytes in the checkpoint.
    pub(super) done: &'a mut dyn FnMut(&str, u64),
}

impl Loader<'_> {
    /// Refuses a model that needs more than the device has.
    pub(super) fn check_features(&self) -> Result<(), Refused> {
        let lacking = self.checkpoint.config().features().find(|feature| !self.device.has(*feature));
        let Some(lacking) = lacking else { return Ok(()) };
        let (what, why) = (lacking.name().to_owned(), self.device.info().name + " has no operation for it");
        Err(Refused { tensor: "model".to_owned(), source: KernelError::Unavailable { what, why } })
    }

    /// Loads one weight of the named tensors, whose spec `make` makes of them.
    pub(super) fn load(
        &mut self,
        names: &[String],
        held: Held,
        make: impl Fn(Vec<HostTensor<'_>>) -> Spec<'_>,
    ) -> Result<Weight, Refused> {
        self.load_with(names, |device, tensors| device.load(&make(tensors), held))
    }

    /// Loads one weight of the named tensors with `load`, and reports it under the first name.
    pub(super) fn load_with(
        &mut self,
        names: &[String],
        load: impl FnOnce(&mut dyn Device, Vec<HostTensor<'_>>) -> Result<Weight, KernelError>,
    ) -> Result<Weight, Refused> {
        let tensors: Vec<_> = names.iter().map(|name| self.checkpoint.tensor(name)).collect();
        let hosts: Vec<_> = tensors.iter().map(Tensor::host).collect();
        let bytes = tensors.iter().map(Tensor::stored_bytes).sum();
        let loaded = load(self.device, hosts);
        let weight = loaded.map_err(|source| Refused { tensor: names[0].clone(), source })?;
        names.iter().for_each(|name| self.checkpoint.forget(name));
        (self.done)(&names[0], bytes);
        Ok(weight)
    }

    /// Weights of a norm.
    pub(super) fn norm(&mut self, name: String) -> Result<Weight, Refused> {
        let offset = self.checkpoint.config().norm_offset;
        self.vector(name, offset)
    }

    /// Weights of a norm or another vector, to which `offset` is added.
    pub(super) fn vector(&mut self, name: String, offset: f32) -> Result<Weight, Refused> {
        self.load(&[name], Held::Stored, |mut t| WeightSpec::Vector { tensor: t.remove(0), offset })
    }

    /// Matrices as one, rows behind rows, with the bias of each if they have one.
    pub(super) fn linear(&mut self, matrices: &[String], held: Held, biased: bool) -> Result<Weight, Refused> {
        let count = matrices.len();
        let biases = matrices.iter().filter(|_| biased).map(|name| bias_of(name));
        let names: Vec<String> = matrices.iter().cloned().chain(biases).collect();
        self.load(&names, held, |mut parts| {
            let biases = parts.split_off(count);
            WeightSpec::Linear { parts, biases }
        })
    }
}

type Spec<'a> = WeightSpec<'a>;

/// Refusal of a tensor or an allocation by the device.
#[derive(Debug)]
pub(super) struct Refused {
    /// Name of the tensor, or purpose of the memory.
    pub(super) tensor: String,
    pub(super) source: KernelError,
}
