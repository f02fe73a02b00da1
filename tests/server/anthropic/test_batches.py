"""`/v1/messages/batches` through the official client."""

import time

import anthropic
import pytest


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0) as made:
        yield made


def one(name, text="hello", **fields):
    params = {"model": "", "max_tokens": 6, "messages": [{"role": "user", "content": text}]}
    return {"custom_id": name, "params": {**params, **fields}}


def ended(client, id):
    deadline = time.monotonic() + 60
    while (batch := client.messages.batches.retrieve(id)).processing_status != "ended":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return batch


def test_every_request_gets_its_own_result(client):
    wrong = one("wrong", max_tokens=-1)
    good = [one(f"r{number}", f"x = {number}", temperature=0) for number in range(20)]
    made = client.messages.batches.create(requests=[*good, wrong])
    batch = ended(client, made.id)
    assert (batch.request_counts.succeeded, batch.request_counts.errored) == (20, 1)
    assert batch.request_counts.processing == 0
    lines = client.messages.batches.results(made.id)
    results = {line.custom_id: line.result for line in lines}
    assert results["wrong"].type == "errored"
    assert results["wrong"].error.error.type == "invalid_request_error"
    for request in (good[0], good[-1]):
        fields = {name: request["params"][name] for name in ("max_tokens", "messages")}
        alone = client.messages.create(
            model="quire-embedded", **fields, extra_body={"temperature": 0}
        )
        assert results[request["custom_id"]].message.content == alone.content


def test_a_cancelled_batch_ends_with_a_result_for_each(client, server):
    long = {"max_tokens": 3000, "stop_sequences": ["never-to-be-seen"]}
    made = client.messages.batches.create(requests=[one(f"r{i}", **long) for i in range(40)])
    assert client.messages.batches.cancel(made.id).processing_status == "canceling"
    batch = ended(client, made.id)
    counts = batch.request_counts
    assert counts.canceled > 20
    assert counts.canceled + counts.succeeded + counts.errored == 40
    assert len(list(client.messages.batches.results(made.id))) == 40
    deadline = time.monotonic() + 20
    while server.get("/load").json()["server_load"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.get("/load").json()["server_load"] == 0


def test_batches_are_listed_and_deleted(client):
    ids = [ended(client, client.messages.batches.create(requests=[one("a")]).id).id
           for _ in range(3)]  # fmt: skip
    assert [batch.id for batch in client.messages.batches.list(limit=3).data] == ids[::-1]
    assert client.messages.batches.list(limit=2, after_id=ids[2]).data[0].id == ids[1]
    assert client.messages.batches.list(limit=2, before_id=ids[1]).data[0].id == ids[2]
    assert client.messages.batches.list(limit=1, before_id=ids[0]).data[0].id == ids[1]
    for name in ("after_id", "before_id"):
        with pytest.raises(anthropic.BadRequestError, match=f"{name}=.*one of the batches"):
            client.messages.batches.list(**{name: "msgbatch_unknown"})
    assert client.messages.batches.delete(ids[0]).id == ids[0]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(ids[0])


@pytest.mark.parametrize("requests", [[], [one("a"), one("a")], [{"custom_id": "a"}]])
def test_anything_but_a_batch_is_refused(client, requests):
    with pytest.raises(anthropic.BadRequestError):
        client.messages.batches.create(requests=requests)


def test_batches_belong_to_their_key(guarded):
    headers = [{"Authorization": f"Bearer {key}"} for key in ("first-key", "second-key")]
    made = guarded.post("/v1/messages/batches", {"requests": [one("a")]}, headers=headers[0])
    path = f"/v1/messages/batches/{made.json()['id']}"
    assert guarded.get(path, headers=headers[0]).status_code == 200
    assert guarded.get(path, headers=headers[1]).status_code == 404
