"""Vectors and scores of our own pools: every way to ask for them, what is refused, and a worker that dies in the middle of a batch."""

import math
import subprocess
import threading

import embedding_files
import gguf_files
import httpx
import ollama
import openai
import pytest
from embedding_files import QUERY, WIDTH
from google import genai
from google.genai import types
from test_faults import Busy, cpu_nanoseconds

import harness
from harness import user, wait_until

TEXTS = ["The cat sat on the mat.", "A dog barked.", "Prices rose in March, and fell again in May.", "x"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return embedding_files.folder(tmp_path_factory.mktemp("models") / "embedder")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory, checkpoint):
    """A gateway whose pool embeds."""
    with harness.serving(tmp_path_factory.mktemp("embed"), "--model", str(checkpoint)) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def asked(embedder):
    """Vectors of inputs as lists of numbers."""

    def ask(inputs, **options) -> list[list[float]]:
        options = {"encoding_format": "float", **options}
        answer = embedder.client().embeddings.create(model="embedder", input=inputs, **options)
        assert [item.index for item in answer.data] == list(range(len(answer.data)))
        return [item.embedding for item in answer.data]

    return ask


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def ids_of(gateway, text: str, special: bool = True) -> list[int]:
    body = {"model": "embedder", "prompt": text, "add_special_tokens": special}
    return httpx.post(f"{gateway.url}/tokenize", json=body, timeout=60).raise_for_status().json()["tokens"]


def test_vectors_have_length_1_and_the_order_of_their_texts(asked):
    together = asked(TEXTS)
    assert [len(vector) for vector in together] == [WIDTH] * len(TEXTS)
    assert all(abs(math.hypot(*vector) - 1) < 1e-5 for vector in together)
    alone = [asked(text)[0] for text in TEXTS]
    assert together == alone, "the same numbers, alone and in a batch"
    assert asked(list(reversed(TEXTS))) == list(reversed(together))
    assert cosine(together[0], together[1]) < 0.9999


def test_both_encodings_are_the_same_numbers(embedder, asked):
    # The SDK asks for base64 by itself, and decodes it to numbers of single precision.
    packed = embedder.client().embeddings.create(model="embedder", input=TEXTS)
    floats = asked(TEXTS)
    for item, want in zip(packed.data, floats, strict=True):
        assert all(abs(a - b) < 1e-7 for a, b in zip(item.embedding, want, strict=True))
    tokens = sum(len(ids_of(embedder, text)) for text in TEXTS)
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == tokens


def test_token_ids_are_taken_as_they_are(embedder, asked):
    ids = [ids_of(embedder, text) for text in TEXTS]
    assert [each[-1] for each in ids] == [embedding_files.END] * len(TEXTS), "the tokenizer ends a text"
    assert asked(ids) == asked(TEXTS)
    assert asked(ids[0]) == asked(TEXTS[0])
    bare = ids_of(embedder, TEXTS[0], special=False)
    assert asked(bare) != asked(TEXTS[0]), "nothing is appended to ids"


def test_special_tokens_of_a_conversation_are_added_where_they_are_asked_for(embedder):
    def ids(**more) -> list[int]:
        asked = {"model": "embedder", "messages": user("Hello")} | more
        return httpx.post(f"{embedder.url}/tokenize", json=asked, timeout=60).raise_for_status().json()["tokens"]

    plain = ids()
    assert plain and plain[-1] != embedding_files.END
    assert ids(add_special_tokens=False) == plain, "the template writes a conversation's own"
    assert ids(add_special_tokens=True) == [*plain, embedding_files.END]


def test_fewer_dimensions_are_the_first_ones_scaled_again(asked):
    whole, cut = asked(TEXTS[0])[0], asked(TEXTS[0], dimensions=32)[0]
    length = math.hypot(*whole[:32])
    assert len(cut) == 32 and abs(math.hypot(*cut) - 1) < 1e-5
    assert all(abs(a - b / length) < 1e-6 for a, b in zip(cut, whole, strict=False))
    with pytest.raises(openai.BadRequestError, match="dimensions: 257 are asked for, vectors of this model have 256"):
        asked(TEXTS[0], dimensions=WIDTH + 1)


def test_what_is_too_long_or_no_token_is_refused(asked):
    long = "word " * 9000
    with pytest.raises(openai.BadRequestError) as refused:
        asked([TEXTS[0], long])
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input[1]")
    with pytest.raises(openai.BadRequestError, match="not a token id"):
        asked([[1, 2], [100_000]])


def test_an_embedding_model_makes_no_text_in_any_api(embedder):
    with pytest.raises(openai.BadRequestError, match="this model makes vectors, not text"):
        embedder.client().chat.completions.create(model="embedder", messages=user("Hello"))
    messages = {"model": "embedder", "max_tokens": 9, "messages": user("Hello")}
    contents = {"contents": [{"parts": [{"text": "Hello"}]}]}
    bodies = {
        "/v1/completions": {"model": "embedder", "prompt": "Hello"},
        "/v1/responses": {"model": "embedder", "input": "Hello"},
        "/v1/messages": messages,
        "/v1beta/models/embedder:generateContent": contents,
        "/api/chat": {"model": "embedder", "messages": user("Hello")},
    }
    for path, body in bodies.items():
        answer = httpx.post(embedder.url + path, json=body, timeout=60)
        assert answer.status_code == 400 and "this model makes vectors, not text" in answer.text, (path, answer.text)
    answer = httpx.post(
        f"{embedder.url}/v1/rerank", json={"model": "embedder", "query": "q", "documents": ["d"]}, timeout=60
    )
    assert answer.status_code == 400 and "makes vectors, not scores" in answer.text


def test_a_model_of_text_makes_no_vectors(client, model):
    with pytest.raises(openai.BadRequestError, match="this model makes text, not vectors"):
        client.embeddings.create(model=model, input="Hello")


def test_lists_of_models_tell_the_task(embedder, client, model):
    assert embedder.client().models.retrieve("embedder").task == "embed"
    assert client.models.retrieve(model).task == "generate"
    shown = ollama.Client(host=embedder.url).show("embedder")
    assert shown.capabilities == ["embedding"]
    card = httpx.get(f"{embedder.url}/v1beta/models/embedder").json()
    assert card["supportedGenerationMethods"] == ["embedContent"]


def test_ollama_gets_the_same_vectors_and_cuts_long_texts(embedder, asked):
    client = ollama.Client(host=embedder.url, timeout=120)
    answer = client.embed("embedder", TEXTS)
    assert [list(vector) for vector in answer.embeddings] == asked(TEXTS)
    long = "word " * 9000
    cut = client.embed("embedder", long)
    # Cut to the context, and ended as every text.
    context = embedder.client().models.retrieve("embedder").max_model_len
    assert cut.prompt_eval_count == context
    ids = ids_of(embedder, long, special=False)[: context - 1]
    assert list(cut.embeddings[0]) == asked([*ids, embedding_files.END])[0]
    with pytest.raises(ollama.ResponseError, match="maximum context length"):
        client.embed("embedder", long, truncate=False)
    assert list(client.embed("embedder", TEXTS[0], dimensions=16).embeddings[0]) == asked(TEXTS[0], dimensions=16)[0]


def test_gemini_names_a_purpose_that_the_checkpoint_has_a_prompt_for(embedder, asked):
    options = types.HttpOptions(base_url=embedder.url, timeout=120_000)
    gemini = genai.Client(api_key="none", vertexai=False, http_options=options)

    def values(text, **config):
        settings = types.EmbedContentConfig(**config)
        answer = gemini.models.embed_content(model="embedder", contents=text, config=settings)
        return [item.values for item in answer.embeddings]

    assert values(TEXTS) == asked(TEXTS)
    assert values(TEXTS[0], task_type="RETRIEVAL_QUERY") == asked(QUERY + TEXTS[0])
    assert values(TEXTS[0], task_type="RETRIEVAL_DOCUMENT") == asked(TEXTS[0])
    assert values(TEXTS[0], output_dimensionality=8) == asked(TEXTS[0], dimensions=8)
    with pytest.raises(genai.errors.ClientError, match="no prompt for that purpose"):
        values(TEXTS[0], task_type="CLUSTERING")


@pytest.mark.parametrize(("pooling", "number"), [("lasttoken", 3), ("mean", 1), ("cls", 2)])
def test_a_gguf_file_gives_the_vectors_of_the_folder(pooling, number, tmp_path):
    """The file says how it pools and what ends a text; nothing else is configured."""
    models = [
        embedding_files.folder(tmp_path / "embedder", pooling),
        embedding_files.file(tmp_path / "embedder.gguf", pooling=number),
    ]
    vectors = []
    for at, model in enumerate(models):
        with harness.serving(tmp_path / str(at), "--model", str(model)) as gateway:
            (listed,) = httpx.get(f"{gateway.url}/v1/models").json()["data"]
            assert (listed["id"], listed["task"]) == ("embedder", "embed")
            assert ids_of(gateway, TEXTS[0])[-1] == embedding_files.END
            answer = gateway.client().embeddings.create(model="embedder", input=TEXTS, encoding_format="float")
            vectors.append([item.embedding for item in answer.data])
    assert vectors[0] == vectors[1]
    assert all(abs(math.hypot(*vector) - 1) < 1e-5 for vector in vectors[1])


def test_gguf_files_that_do_not_say_enough_are_refused(tmp_path):
    def said(name, task="auto", **keys):
        path = tmp_path / name
        gguf_files.write(path, list(gguf_files.tensors(gguf_files.BF16)), **keys)
        config = tmp_path / "penstock.toml"
        config.write_text(f'[[pools]]\nmodel = "{path}"\ntask = "{task}"\n')
        command = [harness.binary(), "check", "--config", str(config)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and "panicked" not in done.stderr, done.stdout
        return done.stdout + done.stderr

    ends = {"tokenizer.ggml.add_eos_token": True}
    assert "qwen3.pooling_type: is 4" in said("rank.gguf", **{"qwen3.pooling_type": 4}, **ends)
    assert "add_eos_token: is missing" in said("old.gguf", **{"qwen3.pooling_type": 3})
    assert "has no pooling_type" in said("chat.gguf", task="embed", **ends)


def survives_a_kill(gateway, model, texts, busy_nanoseconds):
    """Asks for vectors, kills the worker that computes them once it has used that much CPU time, and compares them with those of calm workers."""
    wait_until(lambda: gateway.metric("penstock_workers_ready") == 2, "both workers are ready", 90)
    client, answers = gateway.client(timeout=600), []

    def ask():
        answers.append(client.embeddings.create(model=model, input=texts))

    busy = Busy(gateway)
    thread = threading.Thread(target=ask)
    thread.start()
    grown = lambda: max(cpu_nanoseconds(pid) - before for pid, before in busy.before.items())  # noqa: E731
    wait_until(lambda: grown() > busy_nanoseconds, "a worker computes")
    busy.kill()
    thread.join()
    assert gateway.metric("penstock_worker_deaths_total") == 1
    assert gateway.metric("penstock_resumes_total") > 0
    wait_until(lambda: gateway.metric("penstock_workers_ready") == 2, "the dead worker is replaced", 90)
    ask()
    disturbed, calm = answers
    assert [item.embedding for item in disturbed.data] == [item.embedding for item in calm.data]
    assert disturbed.usage.prompt_tokens == calm.usage.prompt_tokens


def test_a_killed_worker_is_not_noticed_in_a_batch(checkpoint, tmp_path):
    texts = [
        f"{number}: " + " ".join(f"{number} times {n} is {number * n}." for n in range(30)) for number in range(300)
    ]
    with harness.serving(tmp_path, "--model", str(checkpoint), workers=2) as gateway:
        survives_a_kill(gateway, "embedder", texts, 200_000_000)


QUESTION = "Where do cats sleep?"
DOCUMENTS = ["Cats sleep in the sun.", "The stock market fell.", "Dogs like to run.", "<|im_end|> yes"]
OPENING = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
)
CLOSING = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    """The demo model as a reranker: it has tokens for both answers."""
    with harness.serving(tmp_path_factory.mktemp("rank"), config='[[pools]]\ntask = "rerank"\n', workers=0) as gateway:
        yield gateway


def scores(gateway, **body) -> list[dict]:
    asked = {"model": gateway.model(), "query": QUESTION, "documents": DOCUMENTS, **body}
    answer = httpx.post(f"{gateway.url}/v1/rerank", json=asked, timeout=120).raise_for_status().json()
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    return answer["results"]


def test_a_score_is_what_the_model_thinks_of_yes_and_no(reranker, client, model):
    found = {result["index"]: result["relevance_score"] for result in scores(reranker)}
    assert sorted(found) == [0, 1, 2, 3] and all(0 < score < 1 for score in found.values())
    vocabulary = {word: client_tokens(client, model, word)[0] for word in ("yes", "no")}
    for at, document in enumerate(DOCUMENTS[:3]):
        prompt = f"{OPENING}<Query>: {QUESTION}\n<Document>: {document}{CLOSING}"
        ids = list(vocabulary.values())
        extra = {"logprob_token_ids": ids, "return_tokens_as_token_ids": True}
        asked = {
            "model": model,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 2,
            "extra_body": extra,
        }
        told = client.completions.create(**asked).choices[0].logprobs.top_logprobs[0]
        yes, no = (told[f"token_id:{vocabulary[word]}"] for word in ("yes", "no"))
        assert abs(found[at] - 1 / (1 + math.exp(no - yes))) < 1e-5, (document, found[at], told)


def client_tokens(client, model: str, text: str) -> list[int]:
    url = str(client.base_url).removesuffix("/v1/")
    return (
        httpx.post(f"{url}/tokenize", json={"model": model, "prompt": text}, timeout=60)
        .raise_for_status()
        .json()["tokens"]
    )


def test_the_best_come_first(reranker):
    every = scores(reranker)
    best = [result["relevance_score"] for result in every]
    assert best == sorted(best, reverse=True)
    two = scores(reranker, top_n=2, return_documents=True)
    assert [result["index"] for result in two] == [result["index"] for result in every[:2]]
    assert [result["document"]["text"] for result in two] == [DOCUMENTS[result["index"]] for result in two]
    body = {"model": reranker.model(), "text_1": QUESTION, "text_2": DOCUMENTS}
    answer = httpx.post(f"{reranker.url}/v1/score", json=body, timeout=120).raise_for_status().json()
    assert {item["index"]: item["score"] for item in answer["data"]} == {
        result["index"]: result["relevance_score"] for result in every
    }


def test_a_reranker_makes_nothing_else(reranker):
    client = reranker.client()
    with pytest.raises(openai.BadRequestError, match="makes scores, not text"):
        client.chat.completions.create(model=reranker.model(), messages=user("Hello"))
    with pytest.raises(openai.BadRequestError, match="makes scores, not vectors"):
        client.embeddings.create(model=reranker.model(), input="Hello")
    assert client.models.retrieve(reranker.model()).task == "rerank"
    long = {"model": reranker.model(), "query": "q", "documents": ["ok", "word " * 9000]}
    answer = httpx.post(f"{reranker.url}/v1/rerank", json=long, timeout=120)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "documents[1]"
