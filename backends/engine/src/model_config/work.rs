//! Work that a step cannot do without: the operations of its products, and the bytes that it must read.

use penstock_kernels::KvFormat;

use super::ModelConfig;

/// Least work of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Multiplications and additions of products and attention.
    pub operations: f64,
    /// Bytes of weights, each read once, and of the KV of every sequence.
    pub bytes: f64,
}

impl ModelConfig {
    /// Work of the prefill of one prompt of `tokens` tokens, with logits of its last one. `weights_bytes`: all weights, as the device holds them.
    pub fn prefill_work(&self, tokens: usize, weights_bytes: u64) -> Work {
        let count = tokens as f64;
        let seen: f64 = self.windows.iter().map(|window| seen_together(tokens, window.unwrap_or(tokens))).sum();
        Work {
            operations: 2.0 * (count * self.layer_weights(1.0) + self.head_weights()) + self.attention(seen),
            bytes: self.weights_read(count, weights_bytes),
        }
    }

    /// Work of a step in which each of `sequences` sequences, with `context` tokens before it, computes one token. `bytes`: all weights, as the device
    /// holds them, and the form of keys and values.
    pub fn decode_work(&self, sequences: usize, context: usize, bytes: (u64, KvFormat)) -> Work {
        let (weights_bytes, kv_format) = bytes;
        let count = sequences as f64;
        let see = |window: &Option<usize>| (context + 1).min(window.unwrap_or(usize::MAX)) as f64;
        let seen: f64 = count * self.windows.iter().map(see).sum::<f64>();
        let kv = seen * self.kv_bytes(kv_format) as f64;
        Work {
            operations: 2.0 * count * (self.layer_weights(1.0) + self.head_weights()) + self.attention(seen),
            bytes: self.weights_read(count, weights_bytes) + kv,
        }
    }

    /// Operations of attention in which tokens see `seen` others, over all layers.
    fn attention(&self, seen: f64) -> f64 {
        let values = self.latent.map_or(self.head_dim, |latent| latent.kv_lora_rank);
        2.0 * seen * (self.num_attention_heads * (self.head_dim + values)) as f64
    }

    /// Weights of a layer's attention.
    fn attention_weights(&self) -> f64 {
        let (heads, hidden) = (self.num_attention_heads, self.hidden_size);
        let Some(latent) = &self.latent else {
            return ((2 * heads + 2 * self.num_key_value_heads) * self.head_dim) as f64 * hidden as f64;
        };
        let queries = heads * latent.query_dim();
        let queries = latent.q_lora_rank.map_or(queries * hidden, |rank| rank * (hidden + queries));
        let of_heads = heads * (latent.qk_nope_head_dim + latent.v_head_dim) * latent.kv_lora_rank;
        (queries + latent.key_dim() * hidden + of_heads + heads * latent.v_head_dim * hidden) as f64
    }

    /// Bytes of weights that a step of `tokens` tokens reads: of an embedding of its own only those rows, of experts those that are
    /// chosen when all are equally likely.
    fn weights_read(&self, tokens: f64, weights_bytes: u64) -> f64 {
        let experts = self.experts.as_ref();
        let share = experts.map_or(1.0, |experts| {
            let idle = 1.0 - experts.num_experts_per_tok as f64 / experts.num_experts as f64;
            1.0 - idle.powf(tokens)
        });
        let chosen = experts.map_or(1.0, |experts| experts.num_experts_per_tok as f64 / experts.num_experts as f64);
        let embedding = if self.tie_word_embeddings { 0.0 } else { self.head_weights() };
        let all = self.layer_weights(1.0 / chosen) + self.head_weights() + embedding;
        weights_bytes as f64 * (self.layer_weights(share / chosen) + self.head_weights()) / all
    }

    /// Weights of all layers; those of experts are the chosen ones times `experts_factor`.
    fn layer_weights(&self, experts_factor: f64) -> f64 {
        let hidden = self.hidden_size as f64;
        let attention = self.num_hidden_layers as f64 * self.attention_weights();
        let mlp = 3.0 * self.intermediate_size as f64 * hidden;
        let Some(experts) = &self.experts else { return attention + self.num_hidden_layers as f64 * mlp };
        let chosen = 3.0 * (experts.num_experts_per_tok * experts.moe_intermediate_size) as f64 * hidden;
        let beside = experts.num_experts + 3 * experts.shared_size + usize::from(experts.shared_gated);
        let beside = beside as f64 * hidden;
        let sparse = experts.layers.iter().filter(|has| **has).count() as f64;
        let dense = self.num_hidden_layers as f64 - sparse;
        attention + dense * mlp + sparse * (chosen * experts_factor + beside)
    }

    fn head_weights(&self) -> f64 {
        (self.vocab_size * self.hidden_size) as f64
    }
}

/// Number of pairs of a token of the prompt with one that it sees, itself included, in a window of `window`.
fn seen_together(tokens: usize, window: usize) -> f64 {
    let window = window.min(tokens) as f64;
    window * (window + 1.0) / 2.0 + (tokens as f64 - window) * window
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model_config::fields::{Fields, parse_object};
    use crate::model_config::{ExpertNames, ExpertsConfig, LatentConfig, RoutingConfig};

    /// Shape of Qwen3-0.6B.
    fn qwen() -> ModelConfig {
        let json = br#"{"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
            "tie_word_embeddings": true}"#;
        let map = parse_object("config.json", json).expect("JSON");
        ModelConfig::read(&Fields::new("config.json", &map)).expect("a config")
    }

    #[test]
    fn work_of_a_dense_model_is_its_weights_once_and_its_kv() {
        let bytes = 1_192_000_000;
        let one = qwen().decode_work(1, 127, (bytes, KvFormat::Own));
        // 112 KiB of KV per token.
        assert_eq!(one.bytes, bytes as f64 + 128.0 * 114_688.0);
        let weights = 28.0 * (6144.0 * 1024.0 + 3.0 * 3072.0 * 1024.0) + 151_936.0 * 1024.0;
        assert_eq!(one.operations, 2.0 * weights + 28.0 * 4.0 * 128.0 * 2048.0);
        let eight = qwen().decode_work(8, 127, (bytes, KvFormat::Own));
        assert_eq!(eight.operations, 8.0 * one.operations);
        assert_eq!(eight.bytes, bytes as f64 + 8.0 * 128.0 * 114_688.0);
        // An embedding of its own is not read as a whole.
        let untied = ModelConfig { tie_word_embeddings: false, ..qwen() };
        assert!(untied.prefill_work(512, bytes).bytes < 0.85 * bytes as f64);
        assert_eq!(qwen().prefill_work(512, bytes).bytes, bytes as f64);
    }

    #[test]
    fn a_window_bounds_what_attention_sees() {
        assert_eq!(seen_together(4, 4), 10.0);
        assert_eq!(seen_together(4, 2), 7.0);
        assert_eq!(seen_together(4, 100), 10.0);
        let narrow = ModelConfig { windows: vec![Some(16); 28], ..qwen() };
        let less = qwen().decode_work(1, 1000, (1, KvFormat::Own)).bytes
            - narrow.decode_work(1, 1000, (1, KvFormat::Own)).bytes;
        assert_eq!(less, (1001.0 - 16.0) * 114_688.0);
    }

    #[test]
    fn latents_are_read_as_they_are_held() {
        let latent = LatentConfig {
            q_lora_rank: Some(100),
            kv_lora_rank: 512,
            qk_nope_head_dim: 128,
            qk_rope_head_dim: 64,
            v_head_dim: 32,
            interleaved: true,
        };
        let with = ModelConfig { latent: Some(latent), num_key_value_heads: 1, head_dim: 576, ..qwen() };
        let less = |context| with.decode_work(1, context, (1, KvFormat::Own));
        assert_eq!(less(1000).bytes - less(0).bytes, 28.0 * 1000.0 * 2.0 * (576.0 + 512.0));
        assert_eq!(less(1000).operations - less(0).operations, 28.0 * 1000.0 * 2.0 * 16.0 * (576.0 + 512.0));
        let attention = 100.0 * (1024.0 + 3072.0) + 576.0 * 1024.0 + 16.0 * 160.0 * 512.0 + 16.0 * 32.0 * 1024.0;
        assert_eq!(with.attention_weights(), attention);
    }

    #[test]
    fn few_tokens_read_few_experts() {
        let parts = ["gate_proj", "up_proj", "down_proj"];
        let names = ExpertNames { block: "mlp", router: "gate", parts, stacked: false };
        let experts = ExpertsConfig {
            num_experts: 64,
            num_experts_per_tok: 8,
            moe_intermediate_size: 384,
            norm_topk_prob: true,
            shared_size: 0,
            shared_gated: false,
            routing: RoutingConfig::SOFTMAX,
            bias: false,
            layers: vec![true; 28],
            names,
        };
        let mixture = ModelConfig { experts: Some(experts), ..qwen() };
        let read = |tokens| mixture.prefill_work(tokens, 1000).bytes;
        assert!(read(1) < 0.5 * read(1000), "{} of {}", read(1), read(1000));
        assert!((read(100_000) - 1000.0).abs() < 1e-6, "all of them");
        let chosen = mixture.decode_work(1, 0, (1, KvFormat::Own)).operations;
        let dense =
            ModelConfig { intermediate_size: 8 * 384, ..qwen() }.decode_work(1, 0, (1, KvFormat::Own)).operations;
        assert_eq!(chosen - dense, 2.0 * 28.0 * 64.0 * 1024.0, "the router comes on top");
    }
}
