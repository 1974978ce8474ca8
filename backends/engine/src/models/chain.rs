//! The chain behind the pooling of an embedding model: dense layers, and vectors scaled to length 1 between them.
//!
//! Follows sentence-transformers `models/Dense.py` and `models/Normalize.py`.

use penstock_kernels::{
    Activation, Buffer, BufferSpec, DType, Device, Held, HostTensor, KernelError, RowOrder, Rows, Weight, WeightSpec,
};

use super::loader::{Loader, Refused};
use crate::model_config::{ChainStep, DenseConfig};

/// Added to the mean square of a vector before its root; keeps a vector of zeros as it is. (sentence-transformers bounds the length by 1e-12.)
const EPS: f32 = 1e-30;

/// A chain on a device, as handles of its weights and of the buffers between its steps.
#[derive(Debug)]
pub(super) struct Chain(Vec<Step>);

#[derive(Debug)]
enum Step {
    /// RMS norm whose weights make a length of 1.
    Normalize {
        weights: Weight,
        out: Buffer,
    },
    Dense {
        weight: Weight,
        tanh: bool,
        out: Buffer,
    },
}

impl Chain {
    /// Loads the steps of the checkpoint's config, whose input has `width` values.
    pub(super) fn load(loader: &mut Loader<'_>, width: usize) -> Result<Self, Refused> {
        let (checkpoint, mut width) = (loader.checkpoint, width);
        let steps = checkpoint.config().chain.iter().map(|step| {
            let refused = |source| Refused { tensor: "vectors".to_owned(), source };
            let mut out = |columns| loader.device.buffer(BufferSpec { rows: Rows::Sampled, columns }).map_err(refused);
            match step {
                ChainStep::Normalize => {
                    let out = out(width)?;
                    Ok(Step::Normalize { weights: ones_over_root(loader.device, width).map_err(refused)?, out })
                }
                ChainStep::Dense(dense) => {
                    let DenseConfig { out_features, bias, tanh, .. } = *dense;
                    width = out_features;
                    let out = out(width)?;
                    Ok(Step::Dense { weight: loader.linear(&[dense.matrix()], Held::Stored, bias)?, tanh, out })
                }
            }
        });
        steps.collect::<Result<_, _>>().map(Self)
    }

    /// Runs all steps over `pooled`, `[sampled, hidden]`; returns the buffer with the vectors.
    pub(super) fn run(&self, device: &mut dyn Device, pooled: Buffer) -> Buffer {
        self.0.iter().fold(pooled, |input, step| match *step {
            Step::Normalize { weights, out } => {
                device.rmsnorm(out, input, weights, EPS);
                out
            }
            Step::Dense { weight, tanh, out } => {
                match tanh {
                    true => device.activated(out, input, weight, Activation::Tanh),
                    false => device.linear(out, input, weight),
                }
                out
            }
        })
    }
}

/// Weights that make an RMS norm a scaling to length 1: the root of the mean square is the length over the root of the width.
fn ones_over_root(device: &mut dyn Device, width: usize) -> Result<Weight, KernelError> {
    let bytes = ((width as f32).sqrt().recip()).to_le_bytes().repeat(width);
    let shape = [width];
    let tensor = HostTensor {
        name: "normalize",
        dtype: DType::F32,
        shape: &shape,
        bytes: &bytes,
        order: RowOrder::Plain,
        reader: None,
    };
    device.load(&WeightSpec::Vector { tensor, offset: 0.0 }, Held::Stored)
}
