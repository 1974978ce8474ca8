"""Embedding models with a chain in our own pools: decoders that are pooled whole, EmbeddingGemma's among them, and dense layers behind the pooling;
vectors beside those of sentence-transformers, and what is refused."""

import json
import math
import subprocess

import encoder_files
import httpx
import openai
import pytest
from google import genai
from google.genai import types

import harness
from harness import user, wait_until

CASES = ("gemma-mean", "gemma-odd", "llama-mean", "qwen3-last", "bert-dense", "modern-max")


def case_of(name: str) -> dict:
    return encoder_files.golden(name, "chains")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """One gateway with a pool of each case."""
    home = tmp_path_factory.mktemp("chains")
    pools = ""
    for name in CASES:
        folder = encoder_files.folder(home / "models" / name, case_of(name))
        pools += f'[[pools]]\nid = "{name}"\nmodel = "{folder}"\nthreads = 1\n\n'
    with harness.serving(home / "gateway", config=pools, workers=0) as gateway:
        wait_until(lambda: gateway.metric("penstock_workers_ready") == len(CASES), "all workers are ready", 120)
        yield gateway


def vectors(gateway, model: str, inputs, **options) -> list[list[float]]:
    answer = gateway.client().embeddings.create(model=model, input=inputs, encoding_format="float", **options)
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return [item.embedding for item in answer.data]


def queries(gateway, model: str, texts: list[str]) -> list[list[float]]:
    """Vectors of texts behind the prompt of queries, which Gemini's task type asks for."""
    options = types.HttpOptions(base_url=gateway.url, timeout=60_000)
    client = genai.Client(api_key="none", vertexai=False, http_options=options)
    config = types.EmbedContentConfig(task_type="RETRIEVAL_QUERY")
    return [item.values for item in client.models.embed_content(model=model, contents=texts, config=config).embeddings]


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True)) / (math.hypot(*one) * math.hypot(*other))


@pytest.mark.parametrize("name", CASES)
def test_vectors_are_those_of_sentence_transformers(served, name):
    case = case_of(name)
    # Cases whose prompt is not pooled are of texts behind one.
    ask = queries if case["pooled_from"] else vectors
    got = ask(served, name, case["texts"])
    for text, vector, want in zip(case["texts"], got, case["vectors"], strict=True):
        # The rounding of a single row is evened out by no mean.
        assert cosine(vector, want) > (0.999 if case["pooling"] in ("cls", "lasttoken") else 0.9999), text
        scale = math.hypot(*want) if case["scaled"] else 1
        assert not case["scaled"] or abs(math.hypot(*vector) - 1) < 1e-5
        off = max(abs(a - b / scale) for a, b in zip(vector, want, strict=True))
        # Vectors that are not scaled have components that are larger than those of which `bf16` tells.
        assert off < 2 * case["bf16"]["max"] * max(1, math.hypot(*want) / scale), text
    alone = [ask(served, name, [text])[0] for text in case["texts"]]
    assert alone == got, "the same numbers, alone and in a batch"


def test_a_vector_is_cut_behind_the_last_layer(served):
    text = case_of("gemma-mean")["texts"][0]
    whole = vectors(served, "gemma-mean", text)[0]
    cut = vectors(served, "gemma-mean", text, dimensions=16)[0]
    length = math.hypot(*whole[:16])
    assert len(whole) == 64 and len(cut) == 16
    assert all(abs(a - b / length) < 1e-6 for a, b in zip(cut, whole[:16], strict=True))
    with pytest.raises(openai.BadRequestError, match="vectors of this model have 64"):
        vectors(served, "gemma-mean", text, dimensions=96)


def test_a_model_of_whole_texts_makes_no_text(served):
    client = served.client()
    with pytest.raises(openai.BadRequestError, match="this model makes vectors, not text"):
        client.chat.completions.create(model="gemma-mean", messages=user("Hello"))
    assert {name: client.models.retrieve(name).task for name in CASES} == dict.fromkeys(CASES, "embed")
    limit = client.models.retrieve("gemma-mean").max_model_len
    with pytest.raises(openai.BadRequestError) as refused:
        vectors(served, "gemma-mean", "word " * (limit - 1))
    assert (limit, refused.value.code) == (256, "context_length_exceeded")


def test_a_text_for_a_model_that_was_told_to_make_some_is_refused_by_its_worker(tmp_path):
    folder = encoder_files.folder(tmp_path / "gemma", case_of("gemma-mean"))
    config = f'[[pools]]\nid = "told"\nmodel = "{folder}"\ntask = "generate"\n'
    with harness.serving(tmp_path / "gateway", config=config, workers=0) as gateway:
        wait_until(lambda: gateway.metric("penstock_workers_ready") == 1, "the worker is ready", 60)
        body = {"model": "told", "prompt": "Hello", "max_tokens": 2}
        answer = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 400 and "vectors or scores of whole texts" in answer.text, answer.text


def check(folder) -> str:
    config = folder.parent / "check.toml"
    config.write_text(f'[[pools]]\nmodel = "{folder}"\n')
    ran = subprocess.run([harness.binary(), "check", "--config", config], capture_output=True, text=True, check=False)
    return ran.stdout + ran.stderr


def test_check_tells_what_of_a_chain_is_not_served(tmp_path):
    def changed(name: str, file: str, **values) -> str:
        case = case_of("gemma-mean")
        case["files"][file].update(values)
        return check(encoder_files.folder(tmp_path / name, case))

    said = changed("whole", "2_Dense/config.json")
    assert "Gemma3TextModel" in said and "task            embed" in said and "nothing is wrong" in said, said
    assert "ReLU" in changed("relu", "2_Dense/config.json", activation_function="torch.nn.modules.activation.ReLU")
    assert "use_residual" in changed("residual", "3_Dense/config.json", use_residual=True)
    assert "in_features" in changed("width", "3_Dense/config.json", in_features=96)
    folder = encoder_files.folder(tmp_path / "pickle", case_of("gemma-mean"))
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")
    said = check(folder)
    assert "2_Dense" in said and "pytorch_model.bin" in said, said
    modules = json.loads((folder / "modules.json").read_text())
    modules.insert(2, {"idx": 9, "name": "9", "path": "9_CNN", "type": "sentence_transformers.models.CNN"})
    (folder / "modules.json").write_text(json.dumps(modules))
    assert "module CNN" in check(folder)
