"""`/v1/embeddings`, `/pooling` and `/v2/embed` against transformers, through the clients that users
have.
"""

import asyncio
import base64
import json
import sys

import httpx
import numpy as np
import pytest
import torch

from quire.server.pooling.vectors import as_bytes
from tests.pooling import models
from tests.server.pooling.conftest import LONGEST, served

TEXTS = ["The block pool", "once upon a time there was a small model", "3.14159"]
WIDTH = 48


def vector(pair, ids, dimensions=None, *, normalised=True):
    """The last token's hidden state, cut and then normalised."""
    found = models.hidden(pair.model, ids)[-1][:dimensions]
    return (torch.nn.functional.normalize(found, dim=0) if normalised else found).numpy()


def vectors(reply):
    assert reply.status_code == 200, reply.text
    return [item["embedding"] for item in reply.json()["data"]]


def test_the_openai_client(embedder):
    client = embedder.server.openai()
    made = client.embeddings.create(model="tiny", input=TEXTS)  # which asks for base64
    ids = [embedder.ids(text) for text in TEXTS]
    for text_ids, item in zip(ids, made.data, strict=True):
        assert item.embedding == pytest.approx(vector(embedder, text_ids), abs=1e-5)
    assert [item.index for item in made.data] == [0, 1, 2]
    assert made.usage.prompt_tokens == made.usage.total_tokens == sum(map(len, ids))
    plain = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    for one, other in zip(plain.data, made.data, strict=True):
        assert np.float32(one.embedding).tobytes() == np.float32(other.embedding).tobytes()
    short = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=10)
    assert short.data[0].embedding == pytest.approx(vector(embedder, ids[0], 10), abs=1e-5)
    assert np.linalg.norm(short.data[0].embedding) == pytest.approx(1, abs=1e-6)


def test_every_form_of_input_gives_the_same(embedder):
    text = TEXTS[0]
    ids = embedder.ids(text)
    for form in (text, [text], ids, [ids]):
        [found] = vectors(embedder.post("/v1/embeddings", {"model": "tiny", "input": form}))
        assert found == pytest.approx(vector(embedder, ids), abs=1e-5)
    raw = embedder.post("/embeddings", {"input": text, "use_activation": False})
    assert vectors(raw)[0] == pytest.approx(vector(embedder, ids, normalised=False), rel=1e-4)
    pooled = embedder.post("/pooling", {"input": [text], "task": "embed"}).json()
    assert pooled["data"][0]["object"] == "pooling"
    assert pooled["data"][0]["data"] == pytest.approx(vector(embedder, ids), abs=1e-5)


def test_conversations(embedder):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids = embedder.ids("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n")
    for fields in ({"messages": talk}, {"messages": [talk]}, {"input": talk}, {"input": [talk]}):
        [found] = vectors(embedder.post("/v1/embeddings", fields))
        assert found == pytest.approx(vector(embedder, ids), abs=1e-5)
    both = [talk, talk[:1]]
    assert len(vectors(embedder.post("/v1/embeddings", {"messages": both}))) == 2


def test_truncation(embedder):
    ids = embedder.ids(TEXTS[1])
    for side, kept in (("left", ids[-3:]), ("right", ids[:3]), (None, ids[:3])):
        for given in (TEXTS[1], ids):
            body = {"input": given, "truncate_prompt_tokens": 3, "truncation_side": side}
            reply = embedder.post("/v1/embeddings", body)
            assert vectors(reply)[0] == pytest.approx(vector(embedder, kept), abs=1e-5)
            assert reply.json()["usage"]["prompt_tokens"] == 3


def test_long_inputs_are_embedded_in_pieces(embedder):
    [ids] = models.prompts(lengths=(LONGEST,))
    parts = [vector(embedder, part) for part in (ids[:160], ids[160:320], ids[320:])]
    mean = np.average(parts, axis=0, weights=[160, 160, 80])
    reply = embedder.post("/v1/embeddings", {"input": [ids, ids[:5]]})
    found, short = vectors(reply)
    assert found == pytest.approx(mean / np.linalg.norm(mean), abs=1e-5)
    assert short == pytest.approx(vector(embedder, ids[:5]), abs=1e-5)
    assert reply.json()["usage"]["prompt_tokens"] == LONGEST + 5
    error = embedder.post("/v1/embeddings", {"input": [*ids, 5]}).json()["error"]
    assert error["code"] == "context_length_exceeded" and str(LONGEST) in error["message"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_numbers_are_rounded_as_torch_rounds_them(dtype):
    kinds = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    kind = kinds.get(dtype) or getattr(torch, dtype)
    bits = torch.randint(-(2**31), 2**31, (60_000,), generator=torch.Generator().manual_seed(1))
    hostile = bits.to(torch.int32).view(torch.float32)
    ties = torch.arange(-2048, 2048).float()
    small = torch.linspace(-500, 500, 20_001)
    numbers = torch.cat([hostile[hostile.isfinite()], ties, ties / 2**20, small, small / 1000])
    if dtype == "fp8_e4m3":  # releases of torch differ in what they make of larger ones
        large = numbers[numbers.abs() > 448].numpy()
        assert {code & 0x7F for code in as_bytes(large, dtype, "little")} == {0x7E}
        numbers = numbers[numbers.abs() <= 448]
    wanted = numbers.to(kind)
    signed = {1: np.int8, 2: np.int16, 4: np.int32}[wanted.element_size()]
    right = wanted.view(getattr(torch, np.dtype(signed).name)).numpy()
    found = np.frombuffer(
        as_bytes(numbers.numpy(), dtype, "little"), f"<{np.dtype(signed).str[1:]}"
    )
    same = found == right
    assert same.all(), (numbers[~same][:5], found[~same][:5], right[~same][:5])
    swapped = found.astype(found.dtype.newbyteorder(">"))
    assert as_bytes(numbers.numpy(), dtype, "big") == swapped.tobytes()


def test_vectors_as_bytes(embedder):
    right = np.float32([vector(embedder, embedder.ids(text)) for text in TEXTS])
    body = {"input": TEXTS, "encoding_format": "bytes"}
    reply = embedder.post("/v1/embeddings", body)
    assert reply.headers["content-type"] == "application/octet-stream"
    assert np.frombuffer(reply.content, np.float32) == pytest.approx(right.ravel(), abs=1e-5)
    said = json.loads(reply.headers["metadata"])
    assert said["usage"]["prompt_tokens"] == sum(len(embedder.ids(text)) for text in TEXTS)
    for index, item in enumerate(said["data"]):
        part = reply.content[item["start"] : item["end"]]
        assert item["shape"] == [WIDTH] and item["index"] == index
        assert np.frombuffer(part, np.float32) == pytest.approx(right[index], abs=1e-5)
    swapped = {
        **body,
        "encoding_format": "bytes_only",
        "embed_dtype": "float16",
        "endianness": "big",
    }
    reply = embedder.post("/v1/embeddings", swapped)
    assert "metadata" not in reply.headers
    assert np.frombuffer(reply.content, ">f2") == pytest.approx(right.ravel(), abs=1e-3)
    packed = {"input": TEXTS[0], "encoding_format": "base64", "embed_dtype": "bfloat16"}
    [text] = vectors(embedder.post("/v1/embeddings", packed))
    bits = np.frombuffer(base64.b64decode(text), np.uint16).astype(np.uint32) << 16
    assert bits.view(np.float32) == pytest.approx(right[0], abs=4e-3)


def test_coheres_form(embedder):
    kinds = ["float", "base64", "ubinary", "binary"]
    body = {"model": "tiny", "texts": TEXTS[:2], "input_type": "search_query"}
    reply = embedder.post("/v2/embed", {**body, "embedding_types": kinds}).json()
    ids = [embedder.ids("query: " + text) for text in TEXTS[:2]]
    assert list(reply["embeddings"]) == kinds and reply["texts"] == TEXTS[:2]
    billed = {"input_tokens": sum(map(len, ids)), "image_tokens": 0}
    assert reply["meta"]["billed_units"] == billed
    for place, text_ids in enumerate(ids):
        right = vector(embedder, text_ids)
        found = {kind: reply["embeddings"][kind][place] for kind in kinds}
        assert found["float"] == pytest.approx(right, abs=1e-5)
        exact = np.frombuffer(base64.b64decode(found["base64"]), "<f4")
        assert exact.tolist() == found["float"]
        bits = [int(number >= 0) for number in found["float"]]
        unsigned = [int("".join(map(str, bits[i : i + 8])), 2) for i in range(0, WIDTH, 8)]
        assert found["ubinary"] == unsigned
        assert found["binary"] == [byte - 128 for byte in unsigned]
    parts = {"inputs": [{"content": [{"type": "text", "text": "The block "},
                                     {"type": "text", "text": "pool"}]}]}  # fmt: skip
    short = embedder.post("/v2/embed", {**parts, "output_dimension": 8}).json()
    right = vector(embedder, embedder.ids(TEXTS[0]), 8)
    assert short["embeddings"]["float"][0] == pytest.approx(right, abs=1e-5)
    for truncate, kept in (("END", slice(0, 2)), ("START", slice(-2, None))):
        body = {"texts": [TEXTS[1]], "truncate": truncate, "max_tokens": 2}
        [found] = embedder.post("/v2/embed", body).json()["embeddings"]["float"]
        right = vector(embedder, embedder.ids(TEXTS[1])[kept])
        assert found == pytest.approx(right, abs=1e-5)
    error = embedder.post("/v2/embed", {"texts": [TEXTS[1]], "truncate": "NONE", "max_tokens": 2})
    assert error.json()["error"]["code"] == "context_length_exceeded"
    error = embedder.post("/v2/embed", {"texts": ["a"], "input_type": "image"}).json()["error"]
    assert error["param"] == "input_type" and error["message"] == (
        "Unsupported input_type 'image'. The model's are search_query, search_document."
    )


DEEP = "[" * 100_000 + "]" * 100_000
LONG = "many words " * 200
TOO_LONG = [
    ("/score", {"queries": ["a", LONG], "documents": ["b", "c"]}, "queries[1]", "max_model_len"),
    ("/score", {"data_1": LONG, "data_2": ["b", "c"]}, "data_1", "max_model_len"),
    ("/score", {"text_1": "a", "text_2": ["b", LONG]}, "text_2[1]", "max_model_len"),
    ("/rerank", {"query": LONG, "documents": ["b"]}, "query", "max_model_len"),
    ("/v2/embed", {"texts": ["a", LONG], "truncate": "NONE"}, "texts[1]", "max_model_len"),
    (
        "/v2/embed",
        {"texts": ["many words"], "truncate": "NONE", "max_tokens": 2},
        "texts",
        "max_tokens is 2 tokens",
    ),
    (
        "/v2/embed",
        {"inputs": [{"content": [{"text": t}]} for t in ("a", LONG)], "truncate": "NONE"},
        "inputs[1]",
        "max_model_len",
    ),
    ("/v1/embeddings", {"input": ["a", LONG]}, "input[1]", "max_embed_len'] is 400 tokens"),
]


@pytest.mark.parametrize(("path", "body", "param", "bound"), TOO_LONG, ids=range(len(TOO_LONG)))
def test_a_text_that_is_too_long_is_named_with_its_bound(embedder, path, body, param, bound):
    reply = embedder.post(path, body)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["code"] == "context_length_exceeded"
    assert error["param"] == param and bound in error["message"], error


HOSTILE = [
    ("{}", "input"),
    ('{"input": []}', "input"),
    ('{"input": [[]]}', "input"),
    ('{"input": ["a", 1]}', "input"),
    ('{"input": ["a", [1]]}', "input"),
    ('{"input": [true]}', "input"),
    ('{"input": [1.5]}', "input"),
    ('{"input": {"a": "b"}}', "input"),
    ('{"input": null}', "input"),
    ('{"input": ""}', "input"),
    ('{"input": ["a", ""]}', "input[1]"),
    ('{"input": ["a", "b"], "messages": []}', "input"),
    ('{"messages": []}', "messages"),
    ('{"messages": [{"role": "user"}, "a"]}', "messages"),
    ('{"input": [-1]}', "input"),
    ('{"input": [[5], [320]]}', "input[1]"),
    (f'{{"input": [{2**63}]}}', "input"),
    (f'{{"input": [{10**40}]}}', None),
    (f'{{"input": {DEEP}}}', None),
    ('{"input": "a", "dimensions": NaN}', None),
    ('{"input": "a", "dimensions": 1e999}', None),
    ('{"input": "a", "dimensions": 0}', "dimensions"),
    ('{"input": "a", "dimensions": 49}', "dimensions"),
    ('{"input": "a", "dimensions": -5}', "dimensions"),
    ('{"input": "a", "dimensions": 1000000000000}', "dimensions"),
    ('{"input": "a", "dimensions": "8"}', "dimensions"),
    ('{"input": "a", "normalize": true}', "normalize"),
    ('{"input": "a", "encoding_format": "hex"}', "encoding_format"),
    ('{"input": "a", "encoding_format": "float", "embed_dtype": "float16"}', "embed_dtype"),
    ('{"input": "a", "endianness": "big"}', "endianness"),
    ('{"input": "a", "embed_dtype": "int4"}', "embed_dtype"),
    ('{"input": "a", "padding": "longest"}', "padding"),
    ('{"input": "a", "temperature": 1}', "temperature"),
    ('{"input": "a", "truncate_prompt_tokens": -2}', "truncate_prompt_tokens"),
    ('{"input": "a", "truncate_prompt_tokens": 161}', "truncate_prompt_tokens"),
    ('{"input": "a", "truncate_prompt_tokens": 0}', "truncate_prompt_tokens"),
    ('{"input": "a", "truncation_side": "middle"}', "truncation_side"),
    ('{"input": "a", "cache_salt": ""}', "cache_salt"),
    ('{"input": "a", "chat_template": "{{ 1 }}", "messages": null}', None),
    ('{"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}', "chat_template"),
    ('{"input": "\\ud800"}', None),
    ('{"input": "a', None),
]


@pytest.mark.parametrize(("body", "param"), HOSTILE, ids=range(len(HOSTILE)))
def test_what_cannot_be_is_refused_in_a_sentence(embedder, body, param):
    headers = {"content-type": "application/json"}
    with embedder.server.client() as client:
        reply = client.post("/v1/embeddings", content=body, headers=headers)
    error = reply.json()["error"]
    assert reply.status_code == 400, reply.text
    assert len(error["message"]) < 400 and error["message"].endswith((".", "?"))
    if param is not None:
        name = param.partition("[")[0].replace("_", " ")
        assert error["param"] == param and name in error["message"].replace("_", " "), error


def test_one_that_fails_costs_only_its_own_request(embedder):
    async def run():
        async with httpx.AsyncClient(base_url=embedder.server.url, timeout=60) as client:
            bodies = [
                {"input": [f"text {i}"] * 3 + ([""] if i % 3 == 0 else [])} for i in range(15)
            ]
            return await asyncio.gather(
                *(client.post("/v1/embeddings", json=body) for body in bodies)
            )

    replies = asyncio.run(run())
    right = vectors(embedder.post("/v1/embeddings", {"input": "text 1"}))
    assert [reply.status_code for reply in replies] == [400, 200, 200] * 5
    assert vectors(replies[1]) == right * 3, "the same bits alone and in a crowd"


def metric(pair, name, **labels):
    """The sum of a metric's lines with these labels."""
    lines = [line for line in pair.get("/metrics").text.splitlines() if line.startswith(name)]
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(float(line.split()[-1]) for line in lines if all(one in line for one in wanted))


def rss(pair):
    with open(f"/proc/{pair.server.process.pid}/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ten_thousand_inputs_leave_room_for_others(embedder):
    """The queue holds 64, so that a request whose inputs were all in it would be refused."""
    inputs = [f"text number {i}" for i in range(10_000)]
    before = rss(embedder)

    async def run():
        async with httpx.AsyncClient(base_url=embedder.server.url, timeout=120) as client:
            large = asyncio.create_task(client.post("/v1/embeddings", json={"input": inputs}))
            answered = 0
            while not large.done():
                small = await client.post("/v1/embeddings", json={"input": "a"})
                answered += small.status_code == 200 and not large.done()
            return await large, answered

    reply, answered = asyncio.run(run())
    data = reply.json()["data"]
    assert [item["index"] for item in data] == list(range(10_000))
    for place in (0, 4_999, 9_999):
        right = vector(embedder, embedder.ids(inputs[place]))
        assert data[place]["embedding"] == pytest.approx(right, abs=1e-5)
    assert answered > 5, "others are answered meanwhile"
    assert rss(embedder) - before < 2**26


def test_a_client_that_disconnects_ends_its_inputs(embedder):
    before = metric(embedder, "vllm:request_success_total")

    async def run():
        async with httpx.AsyncClient(base_url=embedder.server.url) as client:
            body = {"input": [[5, 6, 7 + i % 100] * 20 for i in range(10_000)]}
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/embeddings", json=body, timeout=httpx.Timeout(60, read=0.5))
        while (await asyncio.to_thread(embedder.get, "/load")).json()["server_load"]:
            await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(run(), 60))
    ended = metric(embedder, "vllm:request_success_total")
    assert before < ended < before + 10_000
    assert embedder.post("/v1/embeddings", {"input": "a"}).status_code == 200
    assert metric(embedder, "vllm:request_success_total") - ended <= 1 + 2 * 16, "none is left"


def test_what_is_counted(embedder):
    before = {reason: metric(embedder, "vllm:request_success_total", finished_reason=reason)
              for reason in ("stop", "length")}  # fmt: skip
    tokens = metric(embedder, "vllm:prompt_tokens_total")
    assert embedder.post("/v1/embeddings", {"input": [[5, 6], [7]]}).status_code == 200
    assert (
        metric(embedder, "vllm:request_success_total", finished_reason="stop") == before["stop"] + 2
    )
    assert metric(embedder, "vllm:prompt_tokens_total") == tokens + 3
    assert metric(embedder, "vllm:generation_tokens_total") == 0


def test_a_timeout_ends_a_request(embedder):
    reply = embedder.post("/v1/embeddings", {"input": [[5] * 160] * 2000, "timeout_s": 0.05})
    assert reply.status_code == 504 and "timeout_s" in reply.json()["error"]["message"]


def test_what_the_model_cannot_do_is_not_there(embedder):
    for path in (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/classify",
    ):
        reply = embedder.post(path, {"input": "a"})
        assert reply.status_code == 501, path
        assert "serves the pooling task 'embed'" in reply.text
    paths = embedder.get("/openapi.json").json()["paths"]
    assert {"/v1/embeddings", "/v2/embed", "/pooling", "/score", "/rerank", "/tokenize"} <= {*paths}
    assert not {"/v1/completions", "/v1/messages", "/classify"} & {*paths}
    for task, text in {
        "token_embed": "Try switching the model's pooling_task via --pooler-config.task token_",
        "classify": "Unsupported task: 'classify'. This model can do embed, token_embed.",
        "plugin": "No IOProcessor plugin installed.",
    }.items():
        asked = embedder.post("/pooling", {"input": "a", "task": task}).json()["error"]
        assert asked["param"] == "task" and asked["message"].startswith(text)
    [card] = embedder.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 160)
    reply = embedder.post("/v1/embeddings", {"model": "other", "input": "a"})
    assert reply.status_code == 404


@pytest.mark.full
def test_long_texts_are_cut_where_the_operator_says_so(embedder_folder):
    with served(*embedder_folder, "--truncate-long-inputs") as pair:
        most = pair.get("/v1/models").json()["data"][0]["max_model_len"]
        text = "word " * most
        reply = pair.post("/v1/embeddings", {"input": text})
        [found] = vectors(reply)
        assert reply.json()["usage"]["prompt_tokens"] == most
        [asked] = vectors(
            pair.post("/v1/embeddings", {"input": text, "truncate_prompt_tokens": -1})
        )
        assert found == asked
