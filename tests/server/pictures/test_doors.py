"""Pictures through every door: the same picture gives the same ids and the same answer."""

import base64
import json

import pytest

from quire.encodable import to_json
from quire.media.digests import picture_digest
from quire.server.batch.direct_call import post
from tests.models.vision.spoken import IMAGE_ID
from tests.server.pictures.pictured import (
    GREEDY,
    PUBLIC,
    Web,
    chat,
    data_url,
    image,
    ok,
    png,
    served,
    text,
)

PATH = "/v1/chat/completions"
ROWS = 16
ONE, OTHER = png(1), png(2, width=25, height=50)


async def answered(http, path, body):
    reply = await http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_chat_sees_pictures_from_everywhere(folder, tmp_path):
    (tmp_path / "one.png").write_bytes(ONE)
    web = Web({"a.example": [PUBLIC]}, {"http://a.example/one.png": ok(ONE)})

    async def use(http, engine):
        path = "/v1/chat/completions"
        urls = [data_url(ONE), "http://a.example/one.png", f"file://{tmp_path}/one.png"]
        bodies = [chat(text("w1"), image(url), return_token_ids=True) for url in urls]
        found = [await answered(http, path, body) for body in bodies]
        contents = [each["choices"][0]["message"]["content"] for each in found]
        assert len(set(contents)) == 1 and contents[0]
        ids = found[0]["prompt_token_ids"]
        assert ids == [IMAGE_ID] * ROWS + [5, 13] and len(ids) == found[0]["usage"]["prompt_tokens"]
        details = found[0]["usage"]["prompt_tokens_details"]
        assert details["multimodal_tokens"] == ROWS
        plain = {"type": "image_url", "image_url": urls[0]}
        assert (await answered(http, path, chat(text("w1"), plain)))["choices"][0]["message"][
            "content"
        ] == contents[0]
        other = await answered(http, path, chat(text("w1"), image(data_url(OTHER)), logprobs=True))
        same = await answered(http, path, chat(text("w1"), image(urls[0]), logprobs=True))
        assert other["choices"][0]["logprobs"] != same["choices"][0]["logprobs"]
        spoken = await answered(http, path, chat(text("w1")))
        assert "multimodal_tokens" not in spoken["usage"]["prompt_tokens_details"]

    served(use, folder, web=web, allowed_local_media_path=str(tmp_path))
    assert web.asked == ["http://a.example/one.png"]


def test_several_pictures_stand_where_they_are_among_the_texts(folder):
    async def use(http, engine):
        parts = [text("w1"), image(data_url(ONE)), text("w2"), image(data_url(OTHER)), text("w3")]
        body = {**chat(*parts), "stream": True, "stream_options": {"include_usage": True}}
        reply = await http.post("/v1/chat/completions", json=body)
        events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
        said = json.loads(events[-1])["usage"]
        assert said["prompt_tokens"] == 2 * ROWS + 4 and said["completion_tokens"] == 4
        counted = await answered(http, "/tokenize", {"messages": body["messages"]})
        picture = [IMAGE_ID] * ROWS
        assert counted["tokens"] == [5, *picture, 6, *picture, 7, 13]
        whole = await answered(http, "/v1/chat/completions", chat(*parts))
        swapped = parts[:1] + parts[3:4] + parts[2:3] + parts[1:2] + parts[4:]
        other = await answered(http, "/v1/chat/completions", chat(*swapped, logprobs=True))
        same = await answered(http, "/invocations", chat(*parts, logprobs=True))
        line = await post(http._transport.app, PATH, to_json(chat(*parts)), "a")
        assert json.loads(line.body)["choices"] == whole["choices"], "a line of a batch"
        streamed = "".join(
            json.loads(event)["choices"][0]["delta"].get("content", "")
            for event in events
            if json.loads(event)["choices"]
        )
        assert streamed == whole["choices"][0]["message"]["content"]
        assert same["choices"][0]["message"] == whole["choices"][0]["message"]
        assert same["choices"][0]["logprobs"] != other["choices"][0]["logprobs"]
        shown = await answered(http, "/v1/chat/completions/render", chat(*parts))
        assert shown["token_ids"] == counted["tokens"]

    served(use, folder, interleave_mm_strings=True)


def test_templates_that_loop_over_parts_place_pictures_themselves(folder):
    template = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}<image> "
        "{% else %}{{ p.text }} {% endif %}{% endfor %}w9 {% endfor %}"
    )

    async def use(http, engine):
        body = chat(text("w1"), image(data_url(ONE)), text("w2"))
        counted = await answered(http, "/tokenize", {"messages": body["messages"]})
        assert counted["tokens"] == [5, *[IMAGE_ID] * ROWS, 6, 13]

    served(use, folder, chat_template=template)


def anthropic_image(data):
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def test_all_dialects_make_the_same_prompt(folder):
    web = Web({"a.example": [PUBLIC]}, {"http://a.example/one.png": ok(ONE)})
    block = {"type": "image", "source": {"type": "url", "url": "http://a.example/one.png"}}

    async def use(http, engine):
        said = await answered(http, "/v1/chat/completions", chat(text("w1"), image(data_url(ONE))))
        content = said["choices"][0]["message"]["content"]
        for shown in (anthropic_image(ONE), block):
            asked = {"messages": [{"role": "user", "content": [shown, text("w1")]}]}
            counted = await answered(http, "/v1/messages/count_tokens", asked)
            assert counted["input_tokens"] == ROWS + 2
            reply = await answered(
                http, "/v1/messages", {**asked, "max_tokens": 4, "temperature": 0}
            )
            assert (
                reply["usage"]["input_tokens"] + reply["usage"].get("cache_read_input_tokens", 0)
                == ROWS + 2
            )
            assert "w" in reply["content"][0]["text"]
        part = {"type": "input_image", "image_url": data_url(ONE), "detail": "auto"}
        item = {"role": "user", "content": [part, {"type": "input_text", "text": "w1"}]}
        keep = {key: value for key, value in GREEDY.items() if key != "max_tokens"}
        reply = await answered(
            http, "/v1/responses", {"input": [item], "max_output_tokens": 4, **keep}
        )
        assert reply["output"][-1]["content"][0]["text"] == content
        assert reply["usage"]["input_tokens"] == ROWS + 2
        more = {"input": "w2", "previous_response_id": reply["id"], "max_output_tokens": 1}
        later = await answered(http, "/v1/responses", {**more, **keep})
        assert later["usage"]["input_tokens"] == ROWS + 2 + 4 + 1 + 2, "the picture is still there"

    served(use, folder, web=web)
    assert web.asked == ["http://a.example/one.png"] * 2


def test_pictures_that_tools_return_follow_as_the_user_s(folder):
    use_block = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t"}
    asked = {
        "messages": [
            {"role": "user", "content": "w1"},
            {"role": "assistant", "content": [use_block]},
            {
                "role": "user",
                "content": [
                    {**result, "content": [text("w2"), anthropic_image(ONE)]},
                    text("w3"),
                ],
            },
        ],
    }
    call = {"id": "t", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    as_chat = [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t", "content": [text("w2"), image(data_url(ONE))]},
        {"role": "user", "content": "w3"},
    ]

    async def use(http, engine):
        tokens = (await answered(http, "/tokenize", {"messages": as_chat}))["tokens"]
        at = tokens.index(IMAGE_ID)
        assert tokens[at:] == [*[IMAGE_ID] * ROWS, 7, 13] and 6 in tokens[:at]
        counted = await answered(http, "/v1/messages/count_tokens", asked)
        assert counted["input_tokens"] == len(tokens)

    served(use, folder)


def test_ids_stand_for_pictures_that_the_same_caller_has_sent(folder):
    async def use(http, engine):
        path, alice = "/v1/chat/completions", {"Authorization": "Bearer alice"}
        bob = {"Authorization": "Bearer bob"}

        async def ask(part, who, **more):
            body = chat(text("w1"), part, logprobs=True, **more)
            return await http.post(path, json=body, headers=who)

        named = {"type": "image_url", "image_url": None, "uuid": "x"}
        first = await ask(image(data_url(ONE), uuid="x"), alice)
        again = await ask(named, alice)
        assert again.json()["choices"] == first.json()["choices"]
        for who, more in ((bob, {}), (alice, {"cache_salt": "y"})):
            refused = await ask(named, who, **more)
            assert refused.status_code == 400
            words = "Cache miss for image at index 0 but data is not provided."
            assert refused.json()["error"]["message"] == words
        other = await ask(image(data_url(OTHER), uuid="x"), bob)
        assert other.json()["choices"] != first.json()["choices"], "the data decide"
        assert (await ask(named, alice)).json()["choices"] == first.json()["choices"]
        await http.post("/reset_mm_cache", headers=alice)
        assert (await ask(named, alice)).status_code == 400

    served(use, folder, keys=("alice", "bob"))


def test_the_cache_of_processed_pictures_is_counted(folder):
    async def use(http, engine):
        for _ in range(3):
            await answered(http, "/v1/chat/completions", chat(image(data_url(ONE))))
        metrics = (await http.get("/metrics")).text
        assert 'vllm:mm_cache_queries_total{model_name="tiny"} 3.0' in metrics
        assert 'vllm:mm_cache_hits_total{model_name="tiny"} 2.0' in metrics
        await http.post("/reset_encoder_cache")

    served(use, folder)


def test_options_of_media_need_the_operator_s_trust(folder):
    body = chat(image(data_url(ONE)), mm_processor_kwargs={"image_mean": [0.1, 0.2, 0.3]})

    async def refused(http, engine):
        reply = await http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 400 and "--trust-request-mm-kwargs" in reply.text

    async def taken(http, engine):
        path = "/v1/chat/completions"
        changed = await answered(http, path, {**body, "logprobs": True})
        plain = await answered(http, path, chat(image(data_url(ONE)), logprobs=True))
        assert changed["choices"] != plain["choices"]

    served(refused, folder)
    served(taken, folder, server_args={"trust_request_mm_kwargs": True})


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"use_beam_search": True, "n": 2}, "use_beam_search"),
    ],
)
def test_what_does_not_go_with_pictures_is_refused_by_name(folder, more, words):
    async def use(http, engine):
        given = {key: value for key, value in GREEDY.items() if key != "logit_bias"}
        body = {**chat(image(data_url(ONE))), **given, **more}
        body.pop("logit_bias")
        reply = await http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == words

    served(use, folder)


def test_text_alone_says_what_it_cannot_take(folder):
    async def use(http, engine):
        reply = await http.post("/v1/chat/completions", json=chat(image(data_url(ONE))))
        assert reply.status_code == 400
        assert 'messages[0].content[0].type="image_url"' in reply.json()["error"]["message"]

    served(use, folder, language_model_only=True)


def test_the_digest_is_that_of_programs(folder):
    """So that a picture is encoded once, whoever sends it."""

    async def use(http, engine):
        seen = []
        core = engine.front_end.client.inner
        add = core.add_request
        core.add_request = lambda request: (seen.append(request), add(request))
        await answered(http, "/v1/chat/completions", chat(image(data_url(ONE))))
        [item] = seen[0].media.items
        values = engine.front_end.inputs.pictures._loader.settings.processor
        assert item.digest == picture_digest(ONE, values)
        assert seen[0].media.sources[item.digest].nbytes == len(ONE), "a journal keeps the file"

    served(use, folder)
