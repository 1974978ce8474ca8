//! Tensors of encoders by name and shape.

use super::whole;
use crate::model_config::{EncoderConfig, EncoderNames, ModelConfig, Needed, Part};

/// Names of transformers' BERT, which RoBERTa's share.
pub(crate) const BERT: EncoderNames = EncoderNames {
    words: "embeddings.word_embeddings.weight",
    positions: Some("embeddings.position_embeddings.weight"),
    types: Some("embeddings.token_type_embeddings.weight"),
    offsets: None,
    norm: "embeddings.LayerNorm",
    layers: "encoder.layer",
    attention_norm: "attention.output.LayerNorm",
    qkv: &["attention.self.query", "attention.self.key", "attention.self.value"],
    output: "attention.output.dense",
    mlp_norm: "output.LayerNorm",
    up: "intermediate.dense",
    gate: None,
    down: "output.dense",
    last_norm: None,
};

/// Names of MPNet: BERT's with others in attention, without token types, and with a bias by relative positions.
pub(crate) const MPNET: EncoderNames = EncoderNames {
    types: None,
    offsets: Some("encoder.relative_attention_bias.weight"),
    attention_norm: "attention.LayerNorm",
    qkv: &["attention.attn.q", "attention.attn.k", "attention.attn.v"],
    output: "attention.attn.o",
    ..BERT
};

/// Names of ModernBERT: queries, keys and values in one matrix, and both matrices of the MLP's gate in one.
pub(crate) const MODERN: EncoderNames = EncoderNames {
    words: "embeddings.tok_embeddings.weight",
    positions: None,
    types: None,
    offsets: None,
    norm: "embeddings.norm",
    layers: "layers",
    attention_norm: "attn_norm",
    qkv: &["attn.Wqkv"],
    output: "attn.Wo",
    mlp_norm: "mlp_norm",
    up: "mlp.Wi",
    gate: None,
    down: "mlp.Wo",
    last_norm: Some("final_norm"),
};

/// Names of NomicBERT: queries, keys and values in one matrix.
pub(crate) const NOMIC: EncoderNames = EncoderNames {
    words: "embeddings.word_embeddings.weight",
    positions: None,
    types: Some("embeddings.token_type_embeddings.weight"),
    offsets: None,
    norm: "emb_ln",
    layers: "encoder.layers",
    attention_norm: "norm1",
    qkv: &["attn.Wqkv"],
    output: "attn.out_proj",
    mlp_norm: "norm2",
    up: "mlp.fc11",
    gate: Some("mlp.fc12"),
    down: "mlp.fc2",
    last_norm: None,
};

/// Names of DistilBERT.
pub(crate) const DISTILBERT: EncoderNames = EncoderNames {
    types: None,
    layers: "transformer.layer",
    attention_norm: "sa_layer_norm",
    qkv: &["attention.q_lin", "attention.k_lin", "attention.v_lin"],
    output: "attention.out_lin",
    mlp_norm: "output_layer_norm",
    up: "ffn.lin1",
    down: "ffn.lin2",
    ..BERT
};

impl EncoderNames {
    /// Buckets of relative positions.
    pub(crate) const BUCKETS: usize = 32;

    /// Distance from which on all keys on a side are in one bucket.
    pub(crate) const REACH: usize = 128;

    /// Bucket of a key at `offset` from its query (Raffel et al. 2020, section 2.1): half of them for keys behind it; eight are those of the next
    /// distances, and eight are wider with each.
    pub(crate) fn bucket(offset: isize) -> usize {
        let (side, distance) = (if offset > 0 { Self::BUCKETS / 2 } else { 0 }, offset.unsigned_abs());
        // First distances of the wide buckets, the logarithms of transformers' formula rounded down.
        const WIDE: [usize; 7] = [12, 16, 23, 32, 46, 64, 91];
        side + if distance < 8 { distance } else { 8 + WIDE.partition_point(|first| *first <= distance) }
    }

    /// Name of a part of a layer.
    pub(crate) fn layer_part(&self, layer: usize, part: &str) -> String {
        format!("{}.{layer}.{part}", self.layers)
    }

    /// Names of the halves of a gated MLP's first matrix, before `.weight` and `.bias`: gate and up.
    pub(crate) fn halves(&self, layer: usize) -> [String; 2] {
        if let Some(gate) = self.gate {
            return [gate, self.up].map(|part| self.layer_part(layer, part));
        }
        ["gate", "up"].map(|half| self.layer_part(layer, &format!("{}.{half}", self.up)))
    }

    /// Returns true if `name` is that of a table that is added to embeddings.
    pub(crate) fn is_table(&self, name: &str) -> bool {
        [self.positions, self.types].contains(&Some(name))
    }

    /// Returns true if `name` is that of a matrix in a layer, which products of every row read.
    pub(crate) fn is_in_layer(&self, name: &str) -> bool {
        name.strip_prefix(self.layers).is_some_and(|rest| rest.starts_with('.'))
    }
}

/// List of needed tensors.
struct List(Vec<Needed>);

impl List {
    /// Weights of a matrix or a norm, and its bias if it has one.
    fn need(&mut self, name: &str, shape: &[usize], biased: bool) {
        self.0.push(whole(format!("{name}.weight"), shape));
        if biased {
            self.0.push(whole(format!("{name}.bias"), &shape[..1]));
        }
    }

    /// Halves of a stored matrix, and of its bias if it has one, under names of their own.
    fn need_halves(&mut self, stored: &str, halves: &[String; 2], [rows, columns]: [usize; 2], biased: bool) {
        let kinds: &[(&str, &[usize])] = &[("weight", &[rows, columns]), ("bias", &[rows])];
        for (kind, shape) in &kinds[..1 + usize::from(biased)] {
            for (half, name) in halves.iter().enumerate() {
                let part = Part { tensor: format!("{stored}.{kind}"), first: half * rows, rows: 2 * rows };
                self.0.push(Needed { name: format!("{name}.{kind}"), shape: shape.to_vec(), part: Some(part) });
            }
        }
    }
}

/// Every tensor of the encoder, with its shape.
pub(super) fn tensors(c: &ModelConfig, e: &EncoderConfig) -> Vec<Needed> {
    let (hidden, mlp, names) = (c.hidden_size, c.intermediate_size, e.names);
    let mut list = List(vec![whole(names.words.into(), &[c.vocab_size, hidden])]);
    for (table, rows) in
        [(names.positions, c.max_position_embeddings + e.first_position), (names.types, e.type_vocab_size)]
    {
        list.0.extend(table.map(|table| whole(table.into(), &[rows, hidden])));
    }
    list.0.extend(names.offsets.map(|name| whole(name.into(), &[EncoderNames::BUCKETS, c.num_attention_heads])));
    list.need(names.norm, &[hidden], e.norm_bias);
    let of_queries = 3 * hidden / names.qkv.len();
    for layer in 0..c.num_hidden_layers {
        let name = |part| names.layer_part(layer, part);
        if e.has_attention_norm(layer) {
            list.need(&name(names.attention_norm), &[hidden], e.norm_bias);
        }
        names.qkv.iter().for_each(|part| list.need(&name(part), &[of_queries, hidden], c.qkv_bias));
        list.need(&name(names.output), &[hidden, hidden], c.output_bias);
        list.need(&name(names.mlp_norm), &[hidden], e.norm_bias);
        if e.gated && names.gate.is_some() {
            names.halves(layer).iter().for_each(|half| list.need(half, &[mlp, hidden], c.mlp_bias));
        } else if e.gated {
            list.need_halves(&name(names.up), &names.halves(layer), [mlp, hidden], c.mlp_bias);
        } else {
            list.need(&name(names.up), &[mlp, hidden], c.mlp_bias);
        }
        list.need(&name(names.down), &[hidden, mlp], c.mlp_bias);
    }
    if let Some(norm) = names.last_norm {
        list.need(norm, &[hidden], e.norm_bias);
    }
    if let Some(head) = e.head {
        list.need(head.dense, &[hidden, hidden], head.dense_bias);
        if let Some(norm) = head.norm {
            list.need(norm, &[hidden], e.norm_bias);
        }
        list.need(head.out, &[1, hidden], true);
    }
    list.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_positions_are_sorted_as_transformers_does_it() {
        // max(7 + …) of `relative_position_bucket` in f64.
        let formula = |distance: usize| match distance {
            0..8 => distance,
            _ => (8 + ((distance as f64 / 8.0).ln() / 16f64.ln() * 8.0 + 1e-9) as usize).min(15),
        };
        for offset in -300..=300isize {
            let side = if offset > 0 { 16 } else { 0 };
            assert_eq!(EncoderNames::bucket(offset), side + formula(offset.unsigned_abs()), "{offset}");
        }
        let ends = [-300, -(EncoderNames::REACH as isize), EncoderNames::REACH as isize, 300].map(EncoderNames::bucket);
        assert_eq!(ends, [15, 15, 31, 31], "one bucket from there on");
    }
}
