"""PyTorch as a peer of `penstock bench`: `peers.py SHAPE [BATCH,...] [CONTEXT] [PROMPT,...]`.

Decode: one step of the whole model (greedy token included) behind CONTEXT (1024) tokens with static KV, as a CUDA graph, once as PyTorch runs it
and once with its layers compiled. Prefill: one prompt in one pass. Weights are random, medians of 20 steps and of 3 prompts.
"""

import gc
import statistics
import sys
import time
import traceback

import torch
import torch.nn.functional as F
from checkpoint import LLAMA, QWEN, SHAPES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPE = torch.bfloat16


def weight(*dims):
    return torch.randn(*dims, device=DEVICE, dtype=TYPE) * 0.02


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class Model:
    def __init__(self, kind):
        self.shape, self.is_qwen = SHAPES[kind], "llama" not in kind
        shape, config = self.shape, QWEN if self.is_qwen else LLAMA
        self.eps, hidden, dim = config["rms_norm_eps"], shape["hidden"], shape["head_dim"]
        self.heads, self.kv_heads, self.dim = shape["heads"], shape["kv_heads"], dim
        self.table = weight(shape["vocab"], hidden)
        self.head = self.table if self.is_qwen else weight(shape["vocab"], hidden)
        self.norm = 1 + weight(hidden)
        rows = (self.heads + 2 * self.kv_heads) * dim
        self.layers = [
            (
                1 + weight(hidden),
                weight(rows, hidden),
                1 + weight(dim),
                1 + weight(dim),
                weight(hidden, self.heads * dim),
                1 + weight(hidden),
                weight(2 * shape["mlp"], hidden),
                weight(hidden, shape["mlp"]),
            )
            for _ in range(shape["layers"])
        ]
        frequencies = config["rope_theta"] ** (-torch.arange(0, dim, 2, device=DEVICE, dtype=torch.float32) / dim)
        angles = torch.arange(16384, device=DEVICE, dtype=torch.float32)[:, None] * frequencies
        self.cos, self.sin = angles.cos().to(TYPE), angles.sin().to(TYPE)

    def layer(self, x, weights, cos, sin, keys, values):
        """x: [batch, tokens, hidden]. With keys and values, [batch, kv_heads, slots, dim], one token per sequence goes to the last slot."""
        norm, qkv, query_norm, key_norm, out, mlp_norm, gate_up, down = weights
        batch, tokens, hidden = x.shape
        y = F.linear(F.rms_norm(x, (hidden,), norm, self.eps), qkv)
        y = y.view(batch, tokens, self.heads + 2 * self.kv_heads, self.dim).transpose(1, 2)
        q, k, v = y.split((self.heads, self.kv_heads, self.kv_heads), 1)
        if self.is_qwen:
            q, k = F.rms_norm(q, (self.dim,), query_norm, self.eps), F.rms_norm(k, (self.dim,), key_norm, self.eps)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if keys is None:
            y = F.scaled_dot_product_attention(q, k, v.contiguous(), is_causal=True, enable_gqa=True)
        else:
            keys[:, :, -1:] = k
            values[:, :, -1:] = v
            # The query heads of a KV head are the rows of one product: every one of them sees all keys.
            q = q.reshape(batch, self.kv_heads, self.heads // self.kv_heads, self.dim)
            y = F.scaled_dot_product_attention(q, keys, values).reshape(batch, self.heads, 1, self.dim)
        x = x + F.linear(y.transpose(1, 2).reshape(batch, tokens, self.heads * self.dim), out)
        gate, up = F.linear(F.rms_norm(x, (hidden,), mlp_norm, self.eps), gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, down)

    def step(self, tokens, first, caches, layer):
        """tokens: [batch, tokens], the first one at position `first`. Returns the next token of each sequence."""
        x = F.embedding(tokens, self.table)
        at = slice(first, first + tokens.shape[1])
        for weights, (keys, values) in zip(self.layers, caches, strict=True):
            x = layer(x, weights, self.cos[at], self.sin[at], keys, values)
        x = F.rms_norm(x[:, -1], (x.shape[-1],), self.norm, self.eps)
        return F.linear(x, self.head).argmax(-1, keepdim=True)


def wait():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def median(run, count):
    seconds = []
    for _ in range(count):
        wait()
        began = time.perf_counter()
        run()
        wait()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def decode(model, batch, context, name, layer):
    dims = (batch, model.kv_heads, context, model.dim)
    caches = [(torch.randn(dims, device=DEVICE, dtype=TYPE), torch.randn(dims, device=DEVICE, dtype=TYPE))]
    caches += [tuple(torch.empty_like(each).copy_(each) for each in caches[0]) for _ in model.layers[1:]]
    tokens = torch.randint(0, model.shape["vocab"], (batch, 1), device=DEVICE)

    def step():
        tokens.copy_(model.step(tokens, context - 1, caches, layer))

    if DEVICE == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    else:
        run = step
    for _ in range(3):
        run()
    seconds = median(run, 20)
    print(f"{name} decode x{batch} at {context}: {batch / seconds:.0f} tokens/s, {1e3 * seconds:.3f} ms", flush=True)


def prefill(model, tokens):
    prompt = torch.randint(0, model.shape["vocab"], (1, tokens), device=DEVICE)
    nothing = [(None, None)] * len(model.layers)

    def run():
        model.step(prompt, 0, nothing, model.layer)

    run()
    seconds = median(run, 3)
    print(f"PyTorch prefill {tokens}: {tokens / seconds:.0f} tokens/s, {1e3 * seconds:.1f} ms", flush=True)


def attempt(part, *arguments):
    """Runs a part; a failure is printed, and the others go on."""
    try:
        part(*arguments)
    except Exception:
        traceback.print_exc()
        return False
    finally:
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    return True


@torch.inference_mode()
def main():
    kind, rest = sys.argv[1], dict(enumerate(sys.argv[2:]))
    batches = [int(batch) for batch in rest.get(0, "1,32,256").split(",")]
    context = int(rest.get(1, 1024))
    prompts = [int(tokens) for tokens in rest.get(2, "2048,8192").split(",")]
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(f"{kind} by PyTorch {torch.__version__} on {name}", flush=True)
    model, good = Model(kind), True
    for batch in batches:
        good &= attempt(decode, model, batch, context, "PyTorch", model.layer)
    for tokens in prompts:
        good &= attempt(prefill, model, tokens)
    compiled = torch.compile(model.layer, dynamic=False)
    for batch in batches:
        good &= attempt(decode, model, batch, context, "PyTorch compiled", compiled)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
