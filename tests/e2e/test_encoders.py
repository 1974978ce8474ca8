"""Encoders in our own pools: vectors and scores beside those of sentence-transformers, in every API, at the limit and behind it, and a worker that
dies in the middle of a batch."""

import math
import subprocess

import encoder_files
import gguf_files
import httpx
import ollama
import openai
import pytest
from google import genai
from google.genai import types
from test_vectors import survives_a_kill

import harness
from harness import user, wait_until

EMBEDDERS = (
    "bert-cls",
    "bert-mean",
    "bert-masked",
    "modern-cls",
    "modern-mean",
    "mpnet-mean",
    "roberta-mean",
    "xlmr-cls",
)
FILES = ("bert-cls", "distilbert-mean", "nomic-mean", "roberta-mean", "xlmr-cls")
RERANKERS = ("bert-rank", "bert-rank-plain", "modern-rank", "modern-rank-mean", "mpnet-rank", "xlmr-rank")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """One gateway with a pool of each case."""
    home = tmp_path_factory.mktemp("encoders")
    pools = ""
    for name in EMBEDDERS + RERANKERS:
        folder = encoder_files.folder(home / "models" / name, encoder_files.golden(name))
        pools += f'[[pools]]\nid = "{name}"\nmodel = "{folder}"\nthreads = 1\n\n'
    with harness.serving(home / "gateway", config=pools, workers=0) as gateway:
        count = len(EMBEDDERS) + len(RERANKERS)
        wait_until(lambda: gateway.metric("penstock_workers_ready") == count, "all workers are ready", 120)
        yield gateway


def vectors(gateway, model: str, inputs, **options) -> list[list[float]]:
    answer = gateway.client().embeddings.create(model=model, input=inputs, encoding_format="float", **options)
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return [item.embedding for item in answer.data]


def ids_of(gateway, model: str, text: str) -> list[int]:
    body = {"model": model, "prompt": text, "add_special_tokens": True}
    return httpx.post(f"{gateway.url}/tokenize", json=body).raise_for_status().json()["tokens"]


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True)) / (math.hypot(*one) * math.hypot(*other))


@pytest.mark.parametrize("name", EMBEDDERS)
def test_vectors_are_those_of_sentence_transformers(served, name):
    case = encoder_files.golden(name)
    assert [ids_of(served, name, text) for text in case["texts"]] == case["ids"]
    got = vectors(served, name, case["texts"])
    for text, vector, want in zip(case["texts"], got, case["vectors"], strict=True):
        assert cosine(vector, want) > 0.9999, text
        # bf16: a component is off by what `bf16` of the golden is at most, and by the weights' rounding.
        assert max(abs(a - b) for a, b in zip(vector, want, strict=True)) < 2 * case["bf16"]["max"], text
        assert abs(math.hypot(*vector) - 1) < 1e-5
    alone = [vectors(served, name, text)[0] for text in case["texts"]]
    assert alone == got, "the same numbers, alone and in a batch"
    assert vectors(served, name, case["ids"]) == got, "token ids are taken as they are"


def test_a_gguf_file_of_an_encoder_gives_the_vectors_of_the_folder(tmp_path):
    """Tokens, pooling and vectors are those of the folder; a file of 8 bits is near."""
    cases, pools = {name: encoder_files.golden(name) for name in FILES}, ""
    for name, case in cases.items():
        models = {
            name: encoder_files.folder(tmp_path / name, case),
            f"{name}-f": encoder_files.file(tmp_path / f"{name}-file.gguf", case),
            f"{name}-q8": encoder_files.file(tmp_path / f"{name}-q8.gguf", case, gguf_files.Q8_0),
        }
        for model, path in models.items():
            pools += f'[[pools]]\nid = "{model}"\nmodel = "{path}"\nthreads = 1\n\n'
    with harness.serving(tmp_path / "g", config=pools, workers=0) as gateway:
        count = 3 * len(FILES)
        wait_until(lambda: gateway.metric("penstock_workers_ready") == count, "all workers are ready", 120)
        listed = {model["id"]: model["task"] for model in httpx.get(f"{gateway.url}/v1/models").json()["data"]}
        assert set(listed.values()) == {"embed"} and len(listed) == count
        for name, case in cases.items():
            # The golden's Unigram tokenizer has a token for a blank at the end of a text, where published ones have none.
            texts = [text.strip() for text in case["texts"]]
            for text in texts:
                assert ids_of(gateway, f"{name}-f", text) == ids_of(gateway, name, text), (name, text)
            folder = vectors(gateway, name, texts)
            assert vectors(gateway, f"{name}-f", texts) == folder, name
            near = vectors(gateway, f"{name}-q8", texts)
            assert all(cosine(a, b) > 0.999 for a, b in zip(near, folder, strict=True)), name
            assert near != folder, name


def test_gguf_files_of_other_encoders_are_refused(tmp_path):
    case = encoder_files.golden("bert-cls")

    def said(task="auto", **keys):
        path = tmp_path / "model.gguf"
        gguf_files.store(path, [], {**encoder_files.gguf_keys(case), **keys})
        config = tmp_path / "penstock.toml"
        config.write_text(f'[[pools]]\nmodel = "{path}"\ntask = "{task}"\n')
        command = [harness.binary(), "check", "--config", str(config)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and "panicked" not in done.stderr, done.stdout
        return done.stdout + done.stderr

    assert "bert.pooling_type: is 4: a reranker" in said(**{"bert.pooling_type": 4})
    assert "an encoder makes no text" in said(task="generate")
    assert "token_embd.weight: is missing" in said()
    assert '"nomic-bert-moe" is not supported' in said(**{"general.architecture": "nomic-bert-moe"})


@pytest.mark.parametrize("name", RERANKERS)
def test_scores_are_those_of_cross_encoders(served, name):
    case = encoder_files.golden(name)
    for (query, document), want in zip(case["pairs"], case["scores"], strict=True):
        body = {"model": name, "query": query, "documents": [document]}
        answer = httpx.post(f"{served.url}/v1/rerank", json=body, timeout=60).raise_for_status().json()
        assert abs(answer["results"][0]["relevance_score"] - want) < 0.02, (query, document)
    query, documents = case["pairs"][0][0], [pair[1] for pair in case["pairs"][:3]]
    body = {"model": name, "query": query, "documents": documents}
    results = httpx.post(f"{served.url}/v1/rerank", json=body, timeout=60).raise_for_status().json()
    found = {result["index"]: result["relevance_score"] for result in results["results"]}
    assert results["usage"]["total_tokens"] == sum(len(ids) for ids in case["ids"][:3])
    best = [result["relevance_score"] for result in results["results"]]
    assert best == sorted(best, reverse=True)
    for at, want in enumerate(case["scores"][:3]):
        assert abs(found[at] - want) < 0.02
    body = {"model": name, "text_1": query, "text_2": documents}
    answer = httpx.post(f"{served.url}/v1/score", json=body, timeout=60).raise_for_status().json()
    assert {item["index"]: item["score"] for item in answer["data"]} == found


def test_names_of_control_tokens_in_a_document_are_text(served):
    def score(document):
        body = {"model": "bert-rank", "query": "where do cats sleep?", "documents": [document]}
        answer = httpx.post(f"{served.url}/v1/rerank", json=body, timeout=60).raise_for_status().json()
        return answer["usage"]["total_tokens"]

    assert score("[SEP]") == score("x") + 4, "[ s e p ] as characters and not as one token"


def test_every_api_of_vectors_has_the_same_ones(served):
    case = encoder_files.golden("bert-mean")
    want = vectors(served, "bert-mean", case["texts"])
    client = ollama.Client(host=served.url, timeout=60)
    assert [list(vector) for vector in client.embed("bert-mean", case["texts"]).embeddings] == want
    options = types.HttpOptions(base_url=served.url, timeout=60_000)
    gemini = genai.Client(api_key="none", vertexai=False, http_options=options)
    answer = gemini.models.embed_content(model="bert-mean", contents=case["texts"])
    assert [item.values for item in answer.embeddings] == want
    cut = vectors(served, "bert-mean", case["texts"][0], dimensions=16)[0]
    assert len(cut) == 16 and abs(math.hypot(*cut) - 1) < 1e-5


def test_a_text_at_the_limit_one_beyond_and_an_empty_one(served):
    case = encoder_files.golden("bert-cls")
    limit = served.client().models.retrieve("bert-cls").max_model_len
    assert limit == 160
    # One token per word, between two special ones.
    whole = vectors(served, "bert-cls", "word " * (limit - 2))[0]
    assert len(ids_of(served, "bert-cls", "word " * (limit - 2))) == limit and len(whole) == 96
    with pytest.raises(openai.BadRequestError) as refused:
        vectors(served, "bert-cls", [case["texts"][0], "word " * (limit - 1)])
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input[1]")
    cut = ollama.Client(host=served.url, timeout=60).embed("bert-cls", "word " * 900)
    assert cut.prompt_eval_count == limit and list(cut.embeddings[0]) == whole, (
        "cut to what fits, and ended as every text"
    )
    # Two special tokens are a text; no token is none.
    assert len(vectors(served, "bert-cls", [case["ids"][0][:1]])[0]) == 96
    with pytest.raises(openai.BadRequestError):
        vectors(served, "bert-cls", [[]])
    body = {"model": "bert-rank", "query": "q", "documents": ["ok", "word " * 200]}
    answer = httpx.post(f"{served.url}/v1/rerank", json=body, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "documents[1]"


def test_what_an_encoder_does_not_make_is_refused(served):
    client = served.client()
    with pytest.raises(openai.BadRequestError, match="this model makes vectors, not text"):
        client.chat.completions.create(model="bert-cls", messages=user("Hello"))
    with pytest.raises(openai.BadRequestError, match="this model makes scores, not text"):
        client.completions.create(model="xlmr-rank", prompt="Hello")
    with pytest.raises(openai.BadRequestError, match="makes scores, not vectors"):
        client.embeddings.create(model="bert-rank", input="Hello")
    body = {"model": "xlmr-cls", "query": "q", "documents": ["d"]}
    answer = httpx.post(f"{served.url}/v1/rerank", json=body, timeout=60)
    assert answer.status_code == 400 and "makes vectors, not scores" in answer.text
    tasks = {name: client.models.retrieve(name).task for name in ("bert-cls", "bert-rank")}
    assert tasks == {"bert-cls": "embed", "bert-rank": "rerank"}


def check(folder, **options) -> str:
    lines = "".join(f'{key} = "{value}"\n' for key, value in options.items())
    config = folder.parent / "check.toml"
    config.write_text(f'[[pools]]\nmodel = "{folder}"\n{lines}')
    ran = subprocess.run([harness.binary(), "check", "--config", config], capture_output=True, text=True, check=False)
    return ran.stdout + ran.stderr


def test_check_tells_what_an_encoder_is_and_needs(tmp_path):
    case = encoder_files.golden("xlmr-cls")
    folder = encoder_files.folder(tmp_path / "xlm", case)
    said = check(folder)
    assert "XLMRobertaModel" in said and "task            embed" in said and "nothing is wrong" in said, said
    assert "context         160 tokens" in said, "of 162 rows of positions, two are no token's"
    assert "an encoder makes no text" in check(folder, task="generate")
    assert "makes no scores" in check(folder, task="rerank")
    ranker = encoder_files.folder(tmp_path / "rank", encoder_files.golden("bert-rank"))
    assert "task            rerank" in check(ranker)
    assert "makes no vectors" in check(ranker, task="embed")
    masked = encoder_files.golden("bert-masked")
    assert "nothing is wrong" in check(encoder_files.folder(tmp_path / "masked", masked))
    said = check(encoder_files.folder(tmp_path / "unsaid", masked, without=("modules.json",)))
    assert "BertForMaskedLM" in said and "modules.json" in said, said
    case["files"]["1_Pooling/config.json"]["pooling_mode"] = "learned"
    assert "pooling by" in check(encoder_files.folder(tmp_path / "max", case))


def test_an_encoder_without_files_of_sentence_transformers_pools_the_mean(tmp_path):
    case = encoder_files.golden("bert-mean")
    dropped = tuple(name for name in case["files"] if "Pooling" in name or "sentence" in name or name == "modules.json")
    folder = encoder_files.folder(tmp_path / "bare", case, without=dropped)
    with harness.serving(tmp_path / "gateway", "--model", str(folder)) as gateway:
        for vector, want in zip(vectors(gateway, "bare", case["texts"]), case["vectors"], strict=True):
            assert cosine(vector, want) > 0.9999


def test_a_killed_worker_is_not_noticed_in_a_batch(tmp_path):
    case = encoder_files.golden("bert-cls")
    folder = encoder_files.folder(tmp_path / "bert", case)
    texts = [f"{number} " + "word cat dog " * 45 for number in range(600)]
    with harness.serving(tmp_path / "gateway", "--model", str(folder), workers=2) as gateway:
        survives_a_kill(gateway, "bert", texts, 100_000_000)
