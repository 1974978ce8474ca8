"""The network, written out plainly: the Qwen3 architecture.

RMSNorm, rotary positions, a norm over each query and key head, grouped-query attention, SwiGLU, tied embeddings. The saved
tensors carry Hugging Face's names, so that `Qwen3ForCausalLM.from_pretrained` loads them as they are.
"""

import json
import math
import os

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

CONFIG = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
}
# Longest row of the training data.
POSITIONS = 4096
END, PAD = 4089, 4087


class RMSNorm(nn.Module):
    """x / rms(x) · weight, computed in float32."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * h.to(x.dtype)


def rotate(x, cos, sin):
    """Rotary positions in the split-half convention."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Attention(nn.Module):
    """Grouped-query attention with head norms."""

    def __init__(self, config):
        super().__init__()
        hidden, dim = config["hidden_size"], config["head_dim"]
        self.heads, self.kv_heads, self.dim = config["num_attention_heads"], config["num_key_value_heads"], dim
        self.q_proj = nn.Linear(hidden, self.heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(self.heads * dim, hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(dim, config["rms_norm_eps"]), RMSNorm(dim, config["rms_norm_eps"])

    def forward(self, x, cos, sin, mask):
        b, t, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, t, self.heads, self.dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, t, self.kv_heads, self.dim)).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    """down(silu(gate x) · up x)."""

    def __init__(self, config):
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj, self.up_proj = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, config):
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.input_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])

    def forward(self, x, cos, sin, mask):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """Embedding, layers, final norm; the head is the embedding."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        dims = torch.arange(0, config["head_dim"], 2).float() / config["head_dim"]
        angles = torch.outer(torch.arange(POSITIONS).float(), 1.0 / config["rope_theta"] ** dims)
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=self.initial_std(name, parameter))

    def initial_std(self, name, parameter):
        """Spread of a matrix at the start; what adds to the residual stream begins smaller."""
        std = 0.02 if "embed" in name else parameter.shape[1] ** -0.5 * 0.7
        if "o_proj" in name or "down_proj" in name:
            std /= math.sqrt(2 * self.config["num_hidden_layers"])
        return std

    def forward(self, ids, positions, mask):
        x = self.embed_tokens(ids)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        if torch.is_autocast_enabled("cpu"):
            x, cos, sin = x.bfloat16(), cos.bfloat16(), sin.bfloat16()
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)

    def loss(self, ids, positions, mask, at, targets):
        """Cross-entropy at the flat positions `at` only: the vocabulary projection is a fifth of the work."""
        h = self(ids, positions, mask).reshape(-1, self.config["hidden_size"])[at]
        return F.cross_entropy((h @ self.embed_tokens.weight.T.to(h.dtype)).float(), targets)


def attention_mask(segments):
    """Causal, and only inside the same document: [rows, 1, tokens, tokens]."""
    tokens = segments.shape[1]
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    return ((segments[:, :, None] == segments[:, None, :]) & causal).unsqueeze(1)


def write_json(path, value):
    """Indented, as people read it."""
    with open(path, "w") as file:
        json.dump(value, file, indent=2)


def save(model, folder):
    """Writes weights in bfloat16 and the two config files of a Hugging Face folder."""
    os.makedirs(folder, exist_ok=True)
    tensors = {f"model.{k}": v.detach().to(torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **model.config,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.config["rope_theta"]},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": model.config["num_hidden_layers"],
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "torch_dtype": "bfloat16",
    }
    write_json(os.path.join(folder, "config.json"), config)
    generation = {"eos_token_id": [END, PAD], "pad_token_id": PAD, "do_sample": False, "max_new_tokens": 512}
    write_json(os.path.join(folder, "generation_config.json"), generation)
