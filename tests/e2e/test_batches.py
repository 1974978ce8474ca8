"""Files and batches: what the official SDK sees, and what a killed gateway leaves."""

import json
import socket
import time

import httpx
import openai
import pytest
from test_admin import admin as command
from test_memory import memory

from harness import serving, two_tenants, user, wait_until

LINES = 1000
ENDED = ("completed", "failed", "expired", "cancelled")


def lines(count: int, model: str, **body) -> bytes:
    """Requests for chat completions, one a line."""
    out = []
    for number in range(count):
        request = {"model": model, "messages": user(f"Say {number}."), "max_tokens": 2, "temperature": 0, **body}
        line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": request}
        out.append(json.dumps(line))
    return ("\n".join(out) + "\n").encode()


def begin(client, content: bytes, **options):
    uploaded = client.files.create(file=("requests.jsonl", content), purpose="batch")
    options = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **options}
    return client.batches.create(input_file_id=uploaded.id, **options)


def until(client, batch_id: str, condition, what: str, seconds: float = 300.0):
    def look():
        batch = client.batches.retrieve(batch_id)
        return batch if condition(batch) else None

    return wait_until(look, what, seconds, 0.05)


def ended(client, batch_id: str, seconds: float = 300.0):
    return until(client, batch_id, lambda batch: batch.status in ENDED, "the batch ends", seconds)


def results(client, file_id: str | None) -> list[dict]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_batch_survives_kills_of_the_gateway(tmp_path):
    """1,000 requests; the gateway is killed on the way, twice. No line is lost, none is doubled."""
    with serving(tmp_path, "--access-log", "off") as gateway:
        client = gateway.client()
        batch = begin(client, lines(LINES, gateway.model()), metadata={"night": "1"})
        assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"night": "1"})
        for done in (LINES // 5, LINES // 2):
            until(client, batch.id, lambda now, done=done: now.request_counts.completed >= done, f"{done} lines ran")
            gateway.process.kill()
            gateway.process.wait()
            gateway.start()
        final = ended(client, batch.id)
        assert final.status == "completed", final
        assert (final.request_counts.total, final.request_counts.completed, final.request_counts.failed) == (
            LINES,
            LINES,
            0,
        )
        assert final.error_file_id is None and final.completed_at >= final.in_progress_at >= final.created_at
        answers = results(client, final.output_file_id)
        assert [answer["custom_id"] for answer in answers] == [f"line-{number}" for number in range(LINES)]
        assert len({answer["id"] for answer in answers}) == LINES
        assert {answer["response"]["status_code"] for answer in answers} == {200}
        assert all(answer["response"]["body"]["object"] == "chat.completion" for answer in answers)
        # What ran once more after a kill said the same: the requests are greedy.
        live = client.chat.completions.create(
            model=gateway.model(), messages=user("Say 500."), max_tokens=2, temperature=0
        )
        assert answers[500]["response"]["body"]["choices"][0]["message"]["content"] == live.choices[0].message.content
        assert gateway.metric("penstock_store_errors_total") == 0


def test_errors_have_a_file_of_their_own(gateway, client, model):
    content = lines(2, model) + lines(1, "no-such-model").replace(b"line-0", b"line-2")
    content += lines(1, model, max_tokens=-1).replace(b"line-0", b"line-3")
    final = ended(client, begin(client, content).id)
    assert (final.status, final.request_counts.completed, final.request_counts.failed) == ("completed", 2, 2)
    errors = results(client, final.error_file_id)
    assert [error["response"]["status_code"] for error in errors] == [404, 400]
    assert errors[0]["response"]["body"]["error"]["code"] == "model_not_found"
    assert errors[1]["response"]["body"]["error"]["param"] == "max_tokens"


def test_a_wrong_file_fails_with_its_lines(client, model):
    content = lines(2, model).replace(b"line-1", b"line-0") + b"{}\n"
    final = ended(client, begin(client, content).id)
    assert final.status == "failed" and final.failed_at and final.output_file_id is None
    assert [(error.code, error.line) for error in final.errors.data] == [
        ("duplicate_custom_id", 2),
        ("missing_required_parameter", 3),
    ]


def test_a_cancelled_batch_keeps_what_it_has(client, model):
    # Three that end at once, and 600 000 tokens.
    content = lines(400, model, max_tokens=1500, ignore_eos=True).replace(b'"line-', b'"long-')
    batch = begin(client, lines(3, model) + content)
    until(client, batch.id, lambda now: now.request_counts.completed >= 3, "some lines ran")
    assert client.batches.cancel(batch.id).status == "cancelling"
    final = ended(client, batch.id)
    assert final.status == "cancelled" and final.cancelled_at >= final.cancelling_at
    counts = final.request_counts
    assert 3 <= counts.completed < 403 and counts.completed + counts.failed == 403
    assert len(results(client, final.output_file_id)) == counts.completed
    errors = results(client, final.error_file_id)
    assert len(errors) == counts.failed and errors[-1]["error"]["code"] == "batch_cancelled"
    with pytest.raises(openai.NotFoundError):
        client.batches.cancel("batch_unknown")


def test_files_come_back_as_they_were(client):
    content = bytes(range(256)) * 4096
    uploaded = client.files.create(file=('a "b".bin', content), purpose="user_data")
    assert (uploaded.bytes, uploaded.filename, uploaded.purpose) == (len(content), 'a "b".bin', "user_data")
    assert client.files.content(uploaded.id).read() == content
    assert client.files.retrieve(uploaded.id) == uploaded
    deleted = client.files.delete(uploaded.id)
    assert deleted.deleted and deleted.id == uploaded.id
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(uploaded.id)
    kept = client.files.create(
        file=("b", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert kept.expires_at == kept.created_at + 3600


def test_lists_have_pages(client, model):
    made = [client.files.create(file=(f"{number}", b"x"), purpose="evals").id for number in range(5)]
    for order, want in (("asc", made), ("desc", made[::-1])):
        assert [file.id for file in client.files.list(purpose="evals", order=order, limit=2)] == want
    first = begin(client, lines(1, model))
    second = begin(client, lines(1, model))
    listed = [batch.id for batch in client.batches.list(limit=1)]
    assert listed[:2] == [second.id, first.id] and len(listed) == len(set(listed))
    for query in ("limit=0", "limit=x", "order=up"):
        assert httpx.get(f"{client.base_url}files?{query}", timeout=30).status_code == 400


def test_one_key_never_sees_anothers(tmp_path):
    with two_tenants(tmp_path, bob='models = ["nothing-*"]') as (gateway, alice, bob):
        model = alice.models.list().data[0].id
        batch = begin(alice, lines(1, model))
        final = ended(alice, batch.id)
        assert final.status == "completed" and final.request_counts.completed == 1
        attempts = [
            lambda: bob.files.retrieve(batch.input_file_id),
            lambda: bob.files.content(final.output_file_id),
            lambda: bob.files.delete(batch.input_file_id),
            lambda: bob.batches.retrieve(batch.id),
            lambda: bob.batches.cancel(batch.id),
            lambda: bob.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
            ),
        ]
        for attempt in attempts:
            with pytest.raises(openai.NotFoundError):
                attempt()
        assert list(bob.files.list()) == [] and list(bob.batches.list()) == []
        assert list(bob.files.list(after=batch.input_file_id)) == []
        # Bob's own batch runs with Bob's rights, not the gateway's.
        denied = ended(bob, begin(bob, lines(1, model)).id)
        (error,) = results(bob, denied.error_file_id)
        assert error["response"]["body"]["error"]["code"] == "model_not_found"
        nobody = gateway.client(api_key="sk-nobody")
        with pytest.raises(openai.AuthenticationError):
            nobody.files.list()


def test_a_full_store_refuses_and_goes_on(tmp_path):
    with serving(tmp_path, config="[store]\nbytes_max = 2097152\n") as gateway:
        client = gateway.client()
        kept = client.files.create(file=("kept", b"k" * 500_000), purpose="user_data")
        with pytest.raises(openai.APIStatusError) as caught:
            client.files.create(file=("large", b"x" * 4_000_000), purpose="user_data")
        assert caught.value.status_code == 507 and caught.value.code == "storage_full"
        assert caught.value.response.headers["x-should-retry"] == "false"
        # Nothing of it is left, and what was there is whole.
        assert [file.id for file in client.files.list()] == [kept.id]
        assert client.files.content(kept.id).read() == b"k" * 500_000
        client.files.create(file=("fits", b"f" * 500_000), purpose="user_data")
        assert client.chat.completions.create(model=gateway.model(), messages=user("Hi"), max_tokens=2).choices


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"content-type": "application/json"}, b"{}", 415),
        ({"content-type": "multipart/form-data; boundary=B"}, b"--B--", 400),
        ({"content-type": "multipart/form-data; boundary=B"}, b"nothing", 400),
    ],
)
def test_uploads_that_are_none(gateway, headers, body, status):
    answer = httpx.post(f"{gateway.url}/v1/files", headers=headers, content=body, timeout=30)
    assert answer.status_code == status and answer.json()["error"]["message"]


def test_an_operator_sees_and_cancels_the_batches_of_keys(tmp_path):
    with serving(tmp_path) as gateway:
        admin = httpx.Client(
            base_url=(gateway.state / "admin.url").read_text().split()[0],
            headers={"authorization": f"Bearer {(gateway.state / 'admin.key').read_text().strip()}"},
            timeout=30,
        )
        client = gateway.client()
        batch = begin(client, lines(200, gateway.model(), max_tokens=4000, ignore_eos=True))
        until(client, batch.id, lambda now: now.status == "in_progress", "it runs")
        (seen,) = admin.get("/admin/v1/batches?open=true").raise_for_status().json()["data"]
        assert (seen["id"], seen["key"], seen["requests"], seen["cancellable"]) == (batch.id, "", 200, True)
        assert seen["input_bytes"] > 1000 and seen["endpoint"] == "/v1/chat/completions"
        (file,) = admin.get("/admin/v1/files").raise_for_status().json()["data"]
        assert (file["id"], file["name"], file["in_use"]) == (batch.input_file_id, "requests.jsonl", True)
        assert admin.delete(f"/admin/v1/files/{file['id']}").status_code == 409
        # The same on a terminal.
        assert json.loads(command(gateway, "batches", "--open", "--json"))[0]["id"] == batch.id
        assert (
            batch.id in command(gateway, "batches") and command(gateway, "batches", "--key", "none") == "no batches\n"
        )
        row = command(gateway, "files", "list").splitlines()[1]
        assert row.startswith(batch.input_file_id) and "requests.jsonl" in row and row.endswith("yes")
        assert "cancel it, or wait" in command(gateway, "files", "delete", batch.input_file_id, check=False)
        assert command(gateway, "batches", "cancel", batch.id) == f"{batch.id} is cancelling\n"
        final = ended(client, batch.id)
        assert final.status == "cancelled" and final.request_counts.total == 200
        assert admin.post(f"/admin/v1/batches/{batch.id}/cancel").status_code == 200, "it has been cancelled before"
        seen = admin.get(f"/admin/v1/batches/{batch.id}").json()
        assert not seen["cancellable"] and seen["output_bytes"] > 0 and seen["ended_at"] >= seen["created_at"]
        shown = json.loads(command(gateway, "batches", "show", batch.id, "--json"))
        assert (shown["status"], shown["ended_at"]) == ("cancelled", seen["ended_at"])
        assert json.loads(command(gateway, "files", "show", batch.input_file_id, "--json"))["in_use"] is False
        assert command(gateway, "files", "delete", batch.input_file_id) == f"{batch.input_file_id} is deleted\n"
        assert "There is no" in command(gateway, "files", "show", batch.input_file_id, check=False)
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(batch.input_file_id)


def test_lines_that_wait_have_no_text_in_memory(tmp_path):
    """32 lines of each batch stand in line for 8 slots. Their texts would be 248 MiB, that of the lines that run is 8 MiB."""
    batches, each, mebibyte = 8, 31, 1 << 20
    # A provider that takes connections and never answers.
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        provider = f'id = "up"\nbase_url = "http://127.0.0.1:{silent.getsockname()[1]}/v1"\nkey_env = "KEY_UP"\nmodels = ["m"]\n'
        config = f"[[providers]]\n{provider}"
        with serving(tmp_path, config=config, env={"KEY_UP": "k"}, workers=0) as gateway:
            client, pid = gateway.client(), gateway.process.pid
            content = lines(each, "m", messages=user("x" * (mebibyte - 4096)))
            uploaded = client.files.create(file=("requests.jsonl", content), purpose="batch")
            before = memory(pid)
            asked = {"input_file_id": uploaded.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            made = [client.batches.create(**asked) for _ in range(batches)]
            for batch in made:
                until(client, batch.id, lambda now: now.status == "in_progress", "the batch runs")
            wait_until(lambda: gateway.metric("penstock_batch_lines_running") == 8, "eight lines run")

            def grown() -> int:
                return (memory(pid) - before) // mebibyte

            # For as long as it took to read all of them, before lines waited without their texts.
            ends = time.monotonic() + 3
            while time.monotonic() < ends:
                assert grown() < 96, f"{grown()} MiB"
