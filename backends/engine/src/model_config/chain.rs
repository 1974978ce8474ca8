//! Steps behind the pooling of an embedding model.

/// Step of the chain that makes the vector of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChainStep {
    /// Scaling to length 1, before a dense layer; the gateway does the last one.
    Normalize,
    /// Dense layer.
    Dense(DenseConfig),
}

/// Dense layer behind the pooling: `activation(x·Wᵀ (+ bias))`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DenseConfig {
    /// Folder of the layer in the checkpoint, by which its tensors are named: `2_Dense`.
    pub folder: String,
    /// Values of its input.
    pub in_features: usize,
    /// Values of its output.
    pub out_features: usize,
    /// True if the layer has a bias.
    pub bias: bool,
    /// True if the activation is a hyperbolic tangent, false if there is none.
    pub tanh: bool,
}

impl DenseConfig {
    /// Name of the layer's matrix, under which a checkpoint lists it.
    pub fn matrix(&self) -> String {
        format!("{}.linear.weight", self.folder)
    }
}
