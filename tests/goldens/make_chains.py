#!/usr/bin/env python3
"""Vectors of small random embedding models whose chain is more than an encoder and its mean, from sentence-transformers.

    python make_chains.py [--only NAME] [--out tests/goldens/chains]

Decoders that are pooled by other states than the last, the decoder of EmbeddingGemma, whose tokens see both sides, and dense layers
behind the pooling. One file per case, with the weights of `make_goldens.py` (those of a dense layer under the name of its folder).
Vectors are those of the modules in float32, before a last scaling too; beside them how far the same modules in bfloat16 are.
"""

import argparse
import json
import os
import tempfile

import numpy as np
import sentence_transformers
import torch
import transformers
from make_encoders import TEXTS, distance, files_of, modern, numbers, wordpiece
from make_encoders import bert as bert_config
from make_goldens import DTYPE, base, llama, mistral, qwen2, qwen3, weights
from sentence_transformers import SentenceTransformer, models
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

LONG = [*TEXTS, "the dog and the cat sat on a mat in march " * 9, "sun stock word " * 45]
PROMPT = "where do cats sleep and "


def gemma(**kw):
    own = dict(
        hidden_size=96,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=40,
        num_hidden_layers=4,
        max_position_embeddings=256,
        query_pre_attn_scalar=40,
        sliding_window=24,
        layer_types=[f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full")],
        hidden_activation="gelu_pytorch_tanh",
        hidden_act=...,
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
        tie_word_embeddings=...,
        use_bidirectional_attention=True,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
    )
    return base("Gemma3TextModel", "gemma3_text", **{**own, **kw})


def small(config, name):
    return {**config, "architectures": [name], "max_position_embeddings": 256}


def dense(inner, outer, bias=False, tanh=False):
    return (inner, outer, bias, torch.nn.Tanh() if tanh else torch.nn.Identity())


NORMALIZE = "normalize"
# name: (config, stored type, tokenizer, pooling, whether a prompt is pooled, modules behind it)
CASES = {
    "gemma-mean": (gemma(), "f32", wordpiece, "mean", True, [dense(96, 141), dense(141, 64), NORMALIZE]),
    # An odd window, and the older way to say which layers have one.
    "gemma-odd": (
        gemma(layer_types=..., num_hidden_layers=7, sliding_window=7, num_attention_heads=4, num_key_value_heads=2),
        "f32",
        wordpiece,
        "cls",
        True,
        [NORMALIZE],
    ),
    "llama-mean": (small(llama(), "LlamaModel"), "f32", wordpiece, "mean", False, [NORMALIZE]),
    "llama-weighted": (small(llama(), "LlamaModel"), "bf16", wordpiece, "weightedmean", False, []),
    "qwen3-last": (
        small(qwen3(), "Qwen3Model"),
        "f32",
        wordpiece,
        "lasttoken",
        True,
        [dense(96, 48, bias=True, tanh=True), NORMALIZE],
    ),
    "qwen3-root": (small(qwen3(), "Qwen3Model"), "f16", wordpiece, "mean_sqrt_len_tokens", True, []),
    # Decoders whose tokens see both sides.
    "qwen2-both": (
        {**small(qwen2(), "Qwen2Model"), "is_causal": False},
        "f32",
        wordpiece,
        "lasttoken",
        True,
        [NORMALIZE],
    ),
    "mistral-both": (
        {**small(mistral(sliding_window=9, head_dim=24), "MistralModel"), "is_causal": False},
        "bf16",
        wordpiece,
        "mean",
        True,
        [NORMALIZE],
    ),
    "bert-dense": (
        bert_config(num_hidden_layers=2, max_position_embeddings=256),
        "f32",
        wordpiece,
        "cls",
        True,
        [dense(96, 80, bias=True, tanh=True), NORMALIZE],
    ),
    # Scaled before the dense layer, and not behind it.
    "modern-max": (
        modern(num_hidden_layers=3, max_position_embeddings=256),
        "f32",
        wordpiece,
        "max",
        True,
        [NORMALIZE, dense(96, 33, bias=True)],
    ),
}
# The names of the architectures whose checkpoints have a head around the decoder are those of the product's table.
WHOLE = {"LlamaModel": "LlamaForCausalLM", "Qwen3Model": "Qwen3ForCausalLM"}


def fill(module, dtype, stored, seed, prefix=""):
    """Gives a module its weights, rounded to `stored` first; returns names and shapes."""
    tensors = []
    with torch.no_grad():
        for name, value in module.named_parameters():
            shape = tuple(value.shape)
            value.copy_(torch.from_numpy(weights(seed, prefix + name, shape)).to(DTYPE[stored]).to(dtype))
            tensors.append([name, list(shape)])
    return tensors


def chain(config, stored, made, special, pooling, includes_prompt, behind, dtype, seed):
    """The modules of a case in `dtype`, with the names of their tensors: those of the model, and of each dense layer."""
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(config, file)
        loaded = AutoConfig.from_pretrained(folder)
        AutoModel.from_config(loaded).save_pretrained(folder)
        # transformers writes the window of Gemma halved, and would halve it again.
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(config, file)
        PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
        options = dict(attn_implementation="eager", dtype=dtype)
        transformer = models.Transformer(folder, model_kwargs=options)
    tensors = fill(transformer.auto_model, dtype, stored, seed)
    pool = models.Pooling(config["hidden_size"], pooling_mode=pooling, include_prompt=includes_prompt)
    modules, layers = [transformer, pool], {}
    for at, module in enumerate(behind, 2):
        if module == NORMALIZE:
            modules.append(models.Normalize())
            continue
        inner, outer, bias, activation = module
        layer = models.Dense(inner, outer, bias=bias, activation_function=activation).to(dtype)
        layers[f"{at}_Dense"] = fill(layer, dtype, stored, seed, f"{at}_Dense.")
        modules.append(layer)
    prompts = dict(query=PROMPT, document="")
    return SentenceTransformer(modules=modules, device="cpu", prompts=prompts).eval(), tensors, layers


@torch.no_grad()
def vectors(st, prompt, scaled):
    """Vectors of the texts, one by one, before a last scaling."""
    found = [st.encode(text, prompt=prompt, convert_to_tensor=True, normalize_embeddings=False) for text in LONG]
    return [torch.nn.functional.normalize(vector.float(), dim=0) if scaled else vector.float() for vector in found]


def make(name, config, stored, tokenizer, pooling, includes_prompt, behind):
    made, special = tokenizer()
    config = dict(config, vocab_size=made.get_vocab_size() + 7)
    architecture = WHOLE.get(config["architectures"][0], config["architectures"][0])
    seed = 1
    parts = (config, stored, made, special, pooling, includes_prompt, behind)
    full, tensors, layers = chain(*parts, torch.float32, seed)
    half, _, _ = chain(*parts, torch.bfloat16, seed)
    prompt = None if includes_prompt else PROMPT
    errors = [
        (one - other).abs() for one, other in zip(vectors(full, prompt, True), vectors(half, prompt, True), strict=True)
    ]
    with tempfile.TemporaryDirectory() as saved:
        full.save(saved)
        files = files_of(saved)
    files["config.json"] = dict(config, architectures=[architecture])
    ids = [made.encode((prompt or "") + text).ids for text in LONG]
    # The token that ends a text is not the prompt's.
    first = len(made.encode(prompt).ids) - 1 if prompt else 0
    result = dict(
        case=name,
        transformers=transformers.__version__,
        torch=torch.__version__,
        sentence_transformers=sentence_transformers.__version__,
        config=files["config.json"],
        seed=seed,
        dtype=stored,
        tensors=tensors,
        layers=layers,
        pooling=pooling,
        pooled_from=first,
        scaled=behind[-1:] == [NORMALIZE],
        texts=LONG,
        ids=ids,
        bf16=distance(errors),
        vectors=[numbers(torch.from_numpy(np.array(vector))) for vector in vectors(full, prompt, False)],
        files=files,
    )
    print(f"{name:16s} {result['bf16']}")
    return result


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "chains"))
    ap.add_argument("--only", default="", help="one case")
    a = ap.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    os.makedirs(a.out, exist_ok=True)
    for name, case in CASES.items():
        if a.only in ("", name):
            with open(os.path.join(a.out, f"{name}.json"), "w") as file:
                json.dump(make(name, *case), file, separators=(",", ":"), ensure_ascii=False)
                file.write("\n")


if __name__ == "__main__":
    main()
