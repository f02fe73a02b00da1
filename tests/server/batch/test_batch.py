"""Batches through the real app, over a model that follows a script; hostile files."""

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.errors import EngineDeadError, InvalidParameter
from quire.server.batch.lines import URLS, LineChecker, check_input, read_lines
from quire.server.batch.results import open_results
from quire.server.batch.run import BatchRun
from tests.server.scripted_app import make_app

MAX_BYTES = 4096
BODY = {"messages": [{"role": "user", "content": "hello"}]}


def line(name, url="/v1/chat/completions", body=BODY, **other):
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body, **other})


def run(source, target, *, concurrency=4, engine_dies=False, overwrite=False, **app_options):
    async def runs():
        app, engine = make_app("fine", **app_options)
        try:
            with open_results(target, overwrite=overwrite) as results:
                if engine_dies:
                    engine.shutdown()
                checker = LineChecker(MAX_BYTES)
                batch = BatchRun(app, engine, checker, results, lambda: None)
                work = batch.run(read_lines(source, MAX_BYTES), concurrency)
                await asyncio.wait_for(work, 60)
                results.put_in_order()
                return results.num_failed
        finally:
            engine.shutdown()

    return asyncio.run(runs())


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def results_of(target):
    return [json.loads(text) for text in target.read_text().splitlines()]


def test_every_url_is_answered_as_a_client_would_be(files):
    source, target = files
    bodies = [BODY, {"prompt": "hello"}, {"input": "hello"}]
    urls = URLS[:3]  # tests/server/pooling has the others
    source.write_text(
        "\n".join(line(url, url, body) for url, body in zip(urls, bodies, strict=True))
    )
    assert run(source, target) == 0
    chat, text, response = results_of(target)
    assert [chat["custom_id"], text["custom_id"], response["custom_id"]] == [*urls]
    assert all(
        r["error"] is None and r["response"]["status_code"] == 200 for r in results_of(target)
    )
    assert chat["response"]["body"]["choices"][0]["message"]["content"] == "fine"
    assert chat["response"]["body"]["id"] == f"chatcmpl-{chat['response']['request_id']}"
    assert text["response"]["body"]["choices"][0]["text"] == "fine"
    assert response["response"]["body"]["output"][0]["content"][0]["text"] == "fine"


WRONG = {
    "no JSON": ("}{", None, "not a request"),
    "no object": ("[1, 2]", None, "object"),
    "not UTF-8": (b'{"custom_id": "\xff"}', None, "not a request"),
    "deep": ("[" * 4000, None, "not a request"),
    "a number for a name": (line(7), None, "custom_id"),
    "no name": (json.dumps({"method": "POST", "url": URLS[0], "body": BODY}), None, "custom_id"),
    "no body": (json.dumps({"custom_id": "x", "method": "POST", "url": URLS[0]}), "x", "body"),
    "another field": (line("x", more=1), "x", "more"),
    "GET": (line("x").replace("POST", "GET"), "x", "'GET' is not POST"),
    "speech": (line("x", "/v1/audio/speech", {"input": "a"}), "x", "'/v1/audio/speech' is not"),
    "admin": (line("x", "/sleep", {}), "x", "'/sleep' is not served"),
    "query": (line("x", URLS[0] + "?a=1"), "x", "is not served"),
    "bytes": (line("x", body={**BODY, "encoding_format": "bytes"}), "x", "is not JSON"),
    "bytes only": (line("x", body={**BODY, "encoding_format": "bytes_only"}), "x", "use base64"),
    "stream": (line("x", body={**BODY, "stream": True}), "x", "stream is for"),
    "background": (line("x", URLS[2], {"input": "a", "background": True}), "x", "background is"),
    "body is a list": (line("x", body=[1]), "x", "body"),
    "unknown field": (line("x", body={**BODY, "tempreature": 1}), "x", "tempreature"),
    "bad value": (line("x", body={**BODY, "temperature": -1}), "x", "temperature"),
    "unknown model": (line("x", body={**BODY, "model": "other"}), "x", "other"),
    "huge": (line("x", body={**BODY, "user": "u" * MAX_BYTES}), None, f"{MAX_BYTES} bytes"),
    "a name twice": (line("first"), "first", "that of line 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_bad_line_costs_only_itself(files, name):
    source, target = files
    text, custom_id, why = WRONG[name]
    text = text if isinstance(text, bytes) else text.encode()
    source.write_bytes(b"\n".join([line("first").encode(), text, line("last").encode()]))
    assert run(source, target) == 1
    first, bad, last = results_of(target)
    assert [first["custom_id"], bad["custom_id"], last["custom_id"]] == ["first", custom_id, "last"]
    assert first["error"] is None and last["error"] is None
    status = bad["response"]["status_code"]
    assert 400 <= status < 500 and bad["error"]["code"] == str(status)
    assert why in bad["error"]["message"]
    assert bad["response"]["body"]["error"]["message"] == bad["error"]["message"]


def test_ends_of_lines_blank_ones_and_the_mark_of_utf_8(files):
    source, target = files
    source.write_bytes(b"\xef\xbb\xbf" + f"{line('a')}\r\n\r\n   \n{line('b')}".encode())
    assert run(source, target) == 0
    assert [r["custom_id"] for r in results_of(target)] == ["a", "b"]


def test_an_empty_file_has_no_results(files):
    source, target = files
    source.write_bytes(b"\n\n")
    assert run(source, target) == 0 and target.read_bytes() == b""


def test_what_was_cut_off_is_done_again_and_nothing_else(files):
    source, target = files
    source.write_text("\n".join([line("a"), "nonsense", line("b"), line("c")]))
    run(source, target)
    whole = target.read_bytes().splitlines(keepends=True)
    kept = whole[2] + whole[1]  # as they were written, not in order
    target.write_bytes(kept + whole[0][:-40])
    assert run(source, target) == 1
    again = target.read_bytes().splitlines(keepends=True)
    assert again[1:3] == [whole[1], whole[2]]
    assert [r["custom_id"] for r in results_of(target)] == ["a", None, "b", "c"]


def test_a_later_line_of_a_name_stays_wrong_after_an_interruption(files):
    source, target = files
    source.write_text("\n".join([line("a"), line("a")]))
    run(source, target)
    first, second = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(second)
    run(source, target)
    assert [r["error"] is None for r in results_of(target)] == [True, False]
    target.write_bytes(target.read_bytes().splitlines(keepends=True)[0])
    run(source, target)
    assert [r["error"] is None for r in results_of(target)] == [True, False]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("a letter\n", "line 1 is not a result"),
        ('{"id": "batch_req_1"}\n', "line 1 is not a result"),
        ('{"id": "batch_req_1_0123456789abcdef"}\n' * 2, "line 2 is not a result"),
        ('{"id": "batch_req_1_0123456789abcdef"}\n', "line 1 of the input has changed"),
    ],
)
def test_a_file_of_something_else_is_left_alone(files, content, why):
    source, target = files
    source.write_text(line("a"))
    target.write_text(content)
    with pytest.raises(InvalidParameter, match=why):
        run(source, target)
    assert target.read_text() == content
    assert run(source, target, overwrite=True) == 0


def test_two_runs_do_not_share_a_file(files):
    source, target = files
    source.write_text(line("a"))
    with (
        open_results(target, overwrite=False),
        pytest.raises(InvalidParameter, match="another run"),
    ):
        run(source, target)


def test_a_file_that_is_none_is_refused(tmp_path):
    with pytest.raises(InvalidParameter, match="must be a file"):
        check_input(tmp_path)
    with pytest.raises(InvalidParameter, match="No such file"):
        run(tmp_path / "in", tmp_path / "nowhere" / "out")


def test_a_link_stays_a_link_and_a_device_is_refused(files, tmp_path):
    source, target = files
    source.write_text("\n".join([line("a"), line("b")]))
    target.symlink_to(tmp_path / "real")
    run(source, target)
    first, second = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(second)
    run(source, target)
    assert target.is_symlink() and [r["custom_id"] for r in results_of(target)] == ["a", "b"]
    with pytest.raises(InvalidParameter, match="must be a file"):
        run(source, Path("/dev/null"))


def test_a_full_queue_is_waited_for(files):
    source, target = files
    source.write_text("\n".join(line(str(number)) for number in range(12)))
    assert run(source, target, concurrency=6, queue=(5, 10_000)) == 0
    assert len(results_of(target)) == 12


def test_a_request_that_no_queue_can_hold_is_a_result(files):
    source, target = files
    source.write_text("\n".join([line("a", body={**BODY, "n": 9}), line("b")]))
    assert run(source, target, queue=(5, 10_000)) == 1
    big, small = results_of(target)
    assert big["response"]["status_code"] == 503 and small["error"] is None


def test_a_dead_engine_writes_no_results(files):
    source, target = files
    source.write_text("\n".join([line("a"), line("b")]))
    with pytest.raises(EngineDeadError):
        run(source, target, engine_dies=True)
    assert target.read_bytes() == b""
    assert run(source, target) == 0


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.binary(max_size=30)
        | st.sampled_from([line("a").encode(), line("b").encode(), line("c")[:-9].encode(), b"{}"])
        | st.dictionaries(
            st.sampled_from(["custom_id", "method", "url", "body", "\ud800"]),
            st.none() | st.text(max_size=3) | st.sampled_from([BODY, "POST", URLS[1]]),
        ).map(lambda fields: json.dumps(fields).encode())
    ),
    st.integers(1, 5),
    st.integers(0, 10_000),
)
def test_any_file_gives_one_result_a_line_and_again_after_any_cut(files, parts, crowd, cut):
    source, target = files
    source.write_bytes(b"\n".join(parts))
    want = sum(1 for text in source.read_bytes().split(b"\n") if text.strip())
    run(source, target, concurrency=crowd, overwrite=True)
    first = target.read_bytes()
    assert len(results_of(target)) == want
    target.write_bytes(first[: cut % (len(first) + 1)])
    run(source, target, concurrency=crowd)
    names = [(r["id"], r["custom_id"], r["response"]["status_code"]) for r in results_of(target)]
    assert names == [
        (r["id"], r["custom_id"], r["response"]["status_code"])
        for r in map(json.loads, first.splitlines())
    ]
