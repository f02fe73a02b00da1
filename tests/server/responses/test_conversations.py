"""Conversations, counted inputs and compaction, through the official client."""

import openai
import pytest

from tests.server.serve_process import serving


@pytest.fixture(scope="module")
def client(server):
    with server.openai() as made:
        yield made


def respond(client, given, **fields):
    return client.responses.create(
        model="", input=given, max_output_tokens=8, temperature=0, **fields
    )


def texts(items):
    return [part.text for item in items for part in item.content]


def test_a_response_goes_on_from_its_conversation_and_is_added_to_it(client):
    talk = client.conversations.create(metadata={"a": "b"})
    assert client.conversations.retrieve(talk.id).metadata == {"a": "b"}
    first = respond(client, "x = 1", conversation=talk.id)
    assert first.conversation.id == talk.id
    second = respond(client, "y = 2", conversation={"id": talk.id})
    by_hand = respond(
        client,
        [
            {"role": "user", "content": "x = 1"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "y = 2"},
        ],
    )
    assert second.output_text == by_hand.output_text
    assert second.usage.input_tokens == by_hand.usage.input_tokens > first.usage.input_tokens
    items = client.conversations.items.list(talk.id, order="asc")
    right = ["x = 1", first.output_text, "y = 2", second.output_text]
    assert texts(items.data) == right
    with client.responses.stream(model="", input="z", conversation=talk.id) as events:
        *_, end = events  # the text may end by itself, or be as long as the model takes
    last = end.response
    assert len(client.conversations.items.list(talk.id).data) == 6
    assert last.conversation.id == talk.id


def test_a_conversation_s_size_is_bounded(client, server):
    long = [{"role": "user", "content": "x" * 9_000_000}]
    talk = client.conversations.create(items=long)
    with pytest.raises(openai.APIStatusError, match="may have 16777216 ") as caught:
        client.conversations.items.create(talk.id, items=long)
    assert caught.value.status_code == 413
    assert len(client.conversations.items.list(talk.id).data) == 1
    respond(client, "x = 1", conversation=client.conversations.create().id)
    made = [client.conversations.create(items=long).id for _ in range(8)]
    left = [server.get(f"/v1/conversations/{id}").status_code for id in [talk.id, *made]]
    assert left == [404, 404, *[200] * 7]
    for id in made:
        if server.get(f"/v1/conversations/{id}").is_success:
            client.conversations.delete(id)
    with pytest.raises(openai.BadRequestError, match="metadata"):
        client.conversations.create(metadata={"a": "b" * 513})


def test_a_conversation_that_reaches_the_server_s_bound_stays_as_it_is():
    """Every way of adding to it is refused then; what it has is still there, and can be used."""
    with serving("--max-stored-bytes", "6000") as server, server.openai() as client:
        item = {"role": "user", "content": "x" * 400}
        talk = client.conversations.create(items=[item])
        num_items = 1
        with pytest.raises(openai.APIStatusError) as caught:
            while num_items < 50:
                client.conversations.items.create(talk.id, items=[item])
                num_items += 1
        assert caught.value.status_code == 413 and "--max-stored-bytes" in str(caught.value)
        assert 5 < num_items < 20
        long = {"role": "user", "content": "x" * 1200}
        for background in (False, True):
            with pytest.raises(openai.APIStatusError) as caught:
                respond(client, [long], conversation=talk.id, background=background)
            assert caught.value.status_code == 413
        kept = client.conversations.items.list(talk.id, order="asc", limit=100).data
        assert texts(kept) == ["x" * 400] * num_items
        client.conversations.items.delete(kept.pop().id, conversation_id=talk.id)
        respond(client, "a", conversation=talk.id)
        added = client.conversations.items.list(talk.id, order="asc", limit=100).data
        assert texts(added)[: len(kept)] == texts(kept) and len(added) == len(kept) + 2
        while len(added) > 4:
            client.conversations.items.delete(added.pop(0).id, conversation_id=talk.id)
        client.conversations.items.create(talk.id, items=[item])
        assert len(client.conversations.items.list(talk.id).data) == 5


def test_items_come_and_go(client):
    talk = client.conversations.create(items=[{"role": "user", "content": "a"}])
    added = client.conversations.items.create(
        talk.id, items=[{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    )
    assert texts(added.data) == ["b", "c"]
    one = client.conversations.items.retrieve(added.data[0].id, conversation_id=talk.id)
    assert one.content[0].text == "b"
    client.conversations.items.delete(one.id, conversation_id=talk.id)
    left = client.conversations.items.list(talk.id, order="asc").data
    assert texts(left) == ["a", "c"]
    assert client.conversations.update(talk.id, metadata={"k": "v"}).metadata == {"k": "v"}
    assert client.conversations.delete(talk.id).deleted
    for use in (
        lambda: client.conversations.retrieve(talk.id),
        lambda: client.conversations.items.list(talk.id),
        lambda: respond(client, "a", conversation=talk.id),
        lambda: client.conversations.items.retrieve("x", conversation_id="conv_none"),
    ):
        with pytest.raises(openai.NotFoundError):
            use()


def test_what_a_conversation_cannot_have_is_refused(client):
    talk = client.conversations.create()
    with pytest.raises(openai.BadRequestError, match="computer_call"):
        client.conversations.items.create(talk.id, items=[{"type": "computer_call"}])
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        respond(client, "a", conversation=talk.id, previous_response_id="resp_1")
    assert client.conversations.items.list(talk.id).data == []


def test_conversations_belong_to_their_key(guarded):
    headers = [{"Authorization": f"Bearer {key}"} for key in ("first-key", "second-key")]
    made = guarded.post("/v1/conversations", {}, headers=headers[0]).json()
    paths = f"/v1/conversations/{made['id']}"
    assert guarded.get(paths, headers=headers[0]).status_code == 200
    assert guarded.get(paths, headers=headers[1]).status_code == 404


def test_an_input_is_counted_as_it_is_run(client):
    counted = client.responses.input_tokens.count(
        model="", input="def add(a, b):", instructions="Be short."
    )
    run = respond(client, "def add(a, b):", instructions="Be short.")
    assert counted.input_tokens == run.usage.input_tokens
    assert counted.object == "response.input_tokens"


def test_a_compacted_conversation_goes_on(client):
    before = [
        {"role": "user", "content": "x = 1"},
        {"role": "assistant", "content": "fine"},
        {"role": "user", "content": "y = 2"},
    ]
    short = client.responses.compact(model="", input=before, extra_body={"max_output_tokens": 16})
    *users, item = [one.model_dump(exclude_none=True, warnings=False) for one in short.output]
    assert [user["content"][0]["text"] for user in users] == ["x = 1", "y = 2"]
    assert item["type"] == "compaction"
    assert 1 <= short.usage.output_tokens <= 16
    after = respond(client, [*users, item, {"role": "user", "content": "z = 3"}])
    alone = respond(client, [*users, {"role": "user", "content": "z = 3"}])
    assert after.usage.input_tokens > alone.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="encrypted_content"):
        respond(client, [{"type": "compaction", "encrypted_content": "AAAA"}])
