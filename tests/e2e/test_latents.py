"""Attention over latents (DeepSeek-V3's) served: the same answer whatever happens to its workers, and through a transfer of its KV."""

import json
import random
import struct

import gguf_files
import pytest
from test_faults import Busy, disturbed, undisturbed
from test_gguf import penstock
from test_pool import CONFIG, apart

import harness
from harness import holding, serving, user, wait_until

LAYERS, HEADS, RANK, PLAIN, ROTATED, VALUE = 3, 4, 96, 32, 16, 40
EXPERTS, WIDTH = 8, 64


def shapes(config: dict) -> dict[str, list[int]]:
    """Shape of each tensor, by its name in a checkpoint."""
    hidden, dense = config["hidden_size"], config["intermediate_size"]
    mlp = lambda block, width: {  # noqa: E731
        f"{block}.gate_proj.weight": [width, hidden],
        f"{block}.up_proj.weight": [width, hidden],
        f"{block}.down_proj.weight": [hidden, width],
    }
    all_of_them = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        attention = {
            "q_a_proj": [48, hidden],
            "q_a_layernorm": [48],
            "q_b_proj": [HEADS * (PLAIN + ROTATED), 48],
            "kv_a_proj_with_mqa": [RANK + ROTATED, hidden],
            "kv_a_layernorm": [RANK],
            "kv_b_proj": [HEADS * (PLAIN + VALUE), RANK],
            "o_proj": [hidden, HEADS * VALUE],
        }
        all_of_them |= {f"{block}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        all_of_them |= {f"{block}.{name}.weight": [hidden] for name in ("input_layernorm", "post_attention_layernorm")}
        if layer == 0:
            all_of_them |= mlp(f"{block}.mlp", dense)
            continue
        all_of_them |= {
            f"{block}.mlp.gate.weight": [EXPERTS, hidden],
            f"{block}.mlp.gate.e_score_correction_bias": [EXPERTS],
        }
        all_of_them |= mlp(f"{block}.mlp.shared_experts", WIDTH)
        for expert in range(EXPERTS):
            all_of_them |= mlp(f"{block}.mlp.experts.{expert}", WIDTH)
    return all_of_them


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint of random weights with the demo model's tokenizer."""
    folder = tmp_path_factory.mktemp("latents") / "small-deepseek"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((gguf_files.DEMO / name).read_bytes())
    config = json.loads((gguf_files.DEMO / "config.json").read_text())
    for name in ("num_key_value_heads", "head_dim", "max_window_layers", "sliding_window", "use_sliding_window"):
        del config[name]
    config |= dict(architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", num_hidden_layers=LAYERS)
    config |= dict(num_attention_heads=HEADS, q_lora_rank=48, kv_lora_rank=RANK, qk_nope_head_dim=PLAIN)
    config |= dict(qk_rope_head_dim=ROTATED, v_head_dim=VALUE, n_routed_experts=EXPERTS, num_experts_per_tok=2)
    config |= dict(moe_intermediate_size=WIDTH, n_shared_experts=1, first_k_dense_replace=1, n_group=4, topk_group=2)
    config |= dict(routed_scaling_factor=2.5, norm_topk_prob=True, scoring_func="sigmoid", topk_method="noaux_tc")
    (folder / "config.json").write_text(json.dumps(config))
    demo, noise = gguf_files.weights(), random.Random(7)
    # High bytes of bf16 from 0.008 to 0.12, of both signs.
    signs = bytes((0x3C, 0x3D, 0xBC, 0xBD)[byte % 4] for byte in range(256))
    header, blob = {}, bytearray()
    for name, shape in shapes(config).items():
        if name in ("model.embed_tokens.weight", "model.norm.weight"):
            data = demo[name][1]
        elif "norm" in name:
            data = struct.pack("<H", 0x3F80) * shape[0]
        else:
            low = noise.randbytes(struct.calcsize("H") * shape[0] * (shape[1] if len(shape) > 1 else 1))
            data = bytearray(low)
            data[1::2] = low[1::2].translate(signs)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(blob), len(blob) + len(data)]}
        blob += data
    head = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + blob)
    return folder


def test_a_killed_worker_is_not_noticed(model, tmp_path):
    config = f"[server]\n{holding(tmp_path)}"
    with harness.serving(tmp_path, "--model", str(model), workers=2, config=config) as gateway:
        wait_until(lambda: gateway.metric("penstock_workers_ready") == 2, "both workers are ready", 90)
        for options in ({"temperature": 0}, {"temperature": 1.1, "seed": 42}):
            want = undisturbed(gateway, gateway.model(), **options)
            resumes = gateway.metric("penstock_resumes_total")
            assert disturbed(gateway, gateway.model(), Busy(gateway).kill, **options) == want
            wait_until(lambda: gateway.metric("penstock_resumes_total") > resumes, "the stream went on elsewhere")  # noqa: B023
            assert gateway.metric("penstock_resumes_inexact_total") == 0
            wait_until(lambda: gateway.metric("penstock_workers_ready") == 2, "the dead worker is replaced", 90)


def test_a_prompt_computed_elsewhere_gives_the_same_answer(model, tmp_path):
    long = " ".join(f"{number} apples and {number} pears." for number in range(200))

    def ask(gateway):
        asked = {"messages": user(long), "max_tokens": 12, "temperature": 0, "logprobs": True}
        choice = gateway.client().chat.completions.create(model=gateway.model(), **asked).choices[0]
        return [(entry.token, entry.logprob) for entry in choice.logprobs.content]

    with serving(tmp_path / "one", "--model", str(model)) as gateway:
        want = ask(gateway)
    with serving(tmp_path / "two", workers=0, config=f'{CONFIG}model = "{model}"\n') as gateway:
        apart(gateway)
        assert ask(gateway) == want
        wait_until(lambda: gateway.metric("penstock_prefilled_apart_total") == 1, "the transfer is told")


def test_check_knows_latents(model):
    done = penstock("check", "--model", str(model))
    assert done.returncode == 0 and "DeepseekV3ForCausalLM" in done.stdout and "fits" in done.stdout, done
    refused = penstock("check", "--model", str(model), "--device", "cuda")
    assert refused.returncode != 0, refused
    assert "mixtures of experts have no GPU kernels" in refused.stdout + refused.stderr, refused
    taken = penstock("check", "--model", str(model), "--device", "auto")
    assert taken.returncode == 0 and ", cpu " in taken.stdout, taken
