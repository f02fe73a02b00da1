"""Adapters over HTTP: a real server, the embedded model and the trained adapters of tests/lora."""

import json
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.serve_process import SMALL, command_of, serving

ADAPTERS = Path(__file__).parents[1] / "lora" / "adapters"
PROMPT = "def add(a, b):"
ALLOWED = {"QUIRE_ALLOW_RUNTIME_LORA_UPDATING": "1"}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A folder of adapters that a request may name, and one that cannot be used."""
    folder = tmp_path_factory.mktemp("library")
    for name in ("shout", "comment"):
        shutil.copytree(ADAPTERS / name, folder / name)
        config = json.loads((folder / name / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = "quire-embedded"
        (folder / name / "adapter_config.json").write_text(json.dumps(config))
    shutil.copytree(folder / "shout", folder / "broken")
    (folder / "broken" / "adapter_model.safetensors").write_bytes(b"\x08" + b"\0" * 40)
    shutil.copytree(folder / "shout", folder / "foreign")
    config["base_model_name_or_path"] = "another/model"
    (folder / "foreign" / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def server(library):
    environ = {**ALLOWED, "QUIRE_LORA_RESOLVER_CACHE_DIR": str(library)}
    modules = ("--lora-modules", f"fixed={ADAPTERS / 'shout'}")
    with serving(
        "--enable-lora", "--max-loras", "2", *modules, environ=environ, basis=SMALL
    ) as running:
        yield running


def complete(server, model, *, max_tokens=12, **more):
    body = {
        "model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, **more
    }  # fmt: skip
    return server.post("/v1/completions", body)


def text_of(server, model):
    reply = complete(server, model)
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == model
    return reply.json()["choices"][0]["text"]


def load(server, name, path, **more):
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more})


def unload(server, name):
    return server.post("/v1/unload_lora_adapter", {"lora_name": name})


def test_a_request_chooses_an_adapter_by_its_model(server):
    base, shout = text_of(server, "quire-embedded"), text_of(server, "fixed")
    assert base != shout
    client = server.openai()
    chat = client.chat.completions.create(
        model="fixed", messages=[{"role": "user", "content": "hello"}], max_tokens=8, temperature=0
    )
    assert chat.model == "fixed"
    response = client.responses.create(model="fixed", input="hello", max_output_tokens=16)
    assert response.model == "fixed"
    message = server.post(
        "/v1/messages",
        {"model": "fixed", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]},
    )
    assert message.json()["model"] == "fixed"
    streamed = client.completions.create(
        model="fixed", prompt=PROMPT, max_tokens=12, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == shout


def test_models_are_listed_with_their_parents(server):
    cards = {card["id"]: card for card in server.get("/v1/models").json()["data"]}
    card = cards["fixed"]
    assert card["parent"] == "quire-embedded" and card["root"] == str(ADAPTERS / "shout")
    assert card["max_model_len"] is None and cards["quire-embedded"]["parent"] is None
    assert server.get("/v1/models/fixed").json() == card
    assert server.get("/v1/models/none").status_code == 404


def test_loading_and_unloading(server):
    reply = load(server, "mine", ADAPTERS / "comment")
    assert (reply.status_code, reply.text) == (
        200, "Success: LoRA adapter 'mine' added successfully."
    )  # fmt: skip
    mine = text_of(server, "mine")
    again = load(server, "mine", ADAPTERS / "shout")
    assert again.status_code == 400 and "has already been loaded" in again.text
    assert again.json()["error"]["type"] == "InvalidUserInput"
    assert load(server, "mine", ADAPTERS / "shout", load_inplace=True).status_code == 200
    assert text_of(server, "mine") == text_of(server, "fixed") != mine
    reply = unload(server, "mine")
    assert (reply.status_code, reply.text) == (
        200, "Success: LoRA adapter 'mine' removed successfully."
    )  # fmt: skip
    assert complete(server, "mine").status_code == 404
    assert unload(server, "mine").status_code == 404


def test_loads_of_one_name_from_two_folders_at_once_have_one_winner(server):
    folders = [ADAPTERS / ("shout" if n % 2 else "comment") for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda folder: load(server, "raced", folder), folders))
    [winner] = [n for n, reply in enumerate(replies) if reply.status_code == 200]
    for n, reply in enumerate(replies):
        if n != winner:
            assert reply.status_code == 400 and "has already been loaded" in reply.text
    card = server.get("/v1/models/raced").json()
    assert card["root"] == str(folders[winner])
    assert (text_of(server, "raced") == text_of(server, "fixed")) == bool(winner % 2)
    assert unload(server, "raced").status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "a"}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "quire-embedded", "lora_path": "/a"}, 400, "conflicts with a served base"),
        ({"lora_name": "a", "lora_path": "/no/such/folder"}, 404, "There is no LoRA adapter"),
        ({"lora_name": "a", "lora_path": "someone/on-the-hub"}, 404, "someone/on-the-hub was not"),
        ({"lora_name": "a", "lora_path": "/dev/zero"}, 404, "There is no LoRA adapter"),
        ({"lora_name": "a", "lora_path": "~nosuchuser/a"}, 404, "/~nosuchuser/a"),
        ({"lora_name": "a", "lora_path": "/" + "x" * 5000}, 400, "at most 4096 characters"),
        ({"lora_name": "a", "lora_path": "/" + "x" * 4000}, 400, "xxx"),
        ({"lora_name": "a", "lora_path": "/tmp\0/a"}, 400, "names the adapter's folder"),
        ({"lora_name": "a", "lora_path": "/\udcff"}, 400, ""),
        ({"lora_name": 3, "lora_path": "/a"}, 400, "lora_name"),
        ({"lora_name": "a", "lora_path": ["/a"]}, 400, "lora_path"),
        ({"lora_name": "a", "lora_path": "/a", "load_inplace": 7}, 400, "load_inplace"),
        ({"lora_name": "a", "lora_path": "/a", "trust_remote_code": True}, 400, "trust_remote"),
        ([], 400, ""),
    ],
    ids=range(16),
)
def test_hostile_bodies(server, body, status, text):
    with server.client() as client:
        data = json.dumps(body).encode()
        kind = {"content-type": "application/json"}
        reply = client.post("/v1/load_lora_adapter", content=data, headers=kind)
    assert reply.status_code == status, reply.text
    assert text in reply.json()["error"]["message"]
    assert server.get("/health").status_code == 200


def test_a_bad_adapter_is_a_400_and_the_server_goes_on(server, library, tmp_path):
    reply = load(server, "bad", library / "broken")
    assert reply.status_code == 400, reply.text
    assert "bad" not in server.get("/v1/models").text
    folder = tmp_path / "later"
    shutil.copytree(ADAPTERS / "comment", folder)
    assert load(server, "later", folder).status_code == 200
    (folder / "adapter_model.safetensors").write_bytes(b"\x08" + b"\0" * 40)
    reply = complete(server, "later")
    assert reply.status_code == 400 and "the LoRA adapter 'later'" in reply.text, reply.text
    assert unload(server, "later").status_code == 200
    text_of(server, "fixed")


def test_a_folder_that_is_overwritten_gives_no_stale_answer(server, tmp_path):
    folder = tmp_path / "changing"
    shutil.copytree(ADAPTERS / "comment", folder)
    assert load(server, "changing", folder).status_code == 200
    before = text_of(server, "changing")
    for file in (ADAPTERS / "shout").iterdir():
        shutil.copy(file, folder / file.name)
    assert text_of(server, "changing") == text_of(server, "fixed") != before
    unload(server, "changing")


# the folder of adapters


def test_a_name_in_the_folder_is_loaded_when_it_is_asked_for(server, library):
    assert text_of(server, "shout") == text_of(server, "fixed")
    cards = {card["id"]: card for card in server.get("/v1/models").json()["data"]}
    assert cards["shout"]["root"] == str(library / "shout")


@pytest.mark.parametrize(
    "name",
    ["../adapters/shout", "..", ".", "/etc", "shout/../comment", "shout/", "a\0b", "x" * 5000,
     "foreign", "none", "%2e%2e/shout", "C:shout", ".hidden", "shout\n"],
    ids=range(14),
)  # fmt: skip
def test_other_names_find_nothing(server, name):
    reply = complete(server, name)
    assert reply.status_code == 404, reply.text
    assert "does not exist" in reply.json()["error"]["message"]


def test_one_that_is_there_and_broken_is_a_400(server):
    reply = complete(server, "broken")
    assert reply.status_code == 400
    assert "was found but could not be loaded" in reply.json()["error"]["message"]


# deaths and metrics


def test_streams_go_on_with_their_adapters_when_the_core_is_killed(server):
    """And the restarted core has the adapters of the server again."""
    whole = {
        name: complete(server, name, max_tokens=300, ignore_eos=True).json()["choices"][0]["text"]
        for name in ("fixed", "quire-embedded")
    }
    found, begun = {}, threading.Barrier(3)

    def read(name):
        client = server.openai()
        chunks = client.completions.create(
            model=name, prompt=PROMPT, max_tokens=300, temperature=0, stream=True,
            extra_body={"ignore_eos": True, "cache_salt": "another"},
        )  # fmt: skip
        parts = []
        for chunk in chunks:
            parts.append(chunk.choices[0].text if chunk.choices else "")
            if len(parts) == 3:
                begun.wait(60)
        found[name] = "".join(parts)

    threads = [threading.Thread(target=read, args=(name,)) for name in whole]
    for thread in threads:
        thread.start()
    begun.wait(60)
    server.core().kill()
    for thread in threads:
        thread.join(120)
    assert found == whole
    server.line_with(r"Running 2 requests again")


def test_metrics_name_the_adapters(server):
    assert 'vllm:lora_requests_info{max_lora="2"' in server.get("/metrics").text


def test_without_leave_nothing_is_loaded(library):
    with serving("--enable-lora", environ={"QUIRE_LORA_RESOLVER_CACHE_DIR": str(library)}) as plain:
        for reply in (load(plain, "a", library / "shout"), unload(plain, "a")):
            assert reply.status_code == 404
            assert "QUIRE_ALLOW_RUNTIME_LORA_UPDATING=1" in reply.text
        assert complete(plain, "shout").status_code == 404


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--lora-modules", f"a={ADAPTERS / 'shout'}"], "LoRA is not enabled"),
        (["--enable-lora", "--lora-modules", "a=/no/such/folder"], "There is no LoRA adapter in"),
        (["--enable-lora", "--lora-modules", "a"], "it is NAME=PATH, or JSON"),
        (
            ["--enable-lora", "--lora-modules", f"quire-embedded={ADAPTERS / 'shout'}"],
            "the model has this name itself",
        ),
    ],
    ids=["not enabled", "not there", "no form", "the model's name"],
)
def test_modules_that_cannot_be_served_stop_the_start(flags, text):
    done = subprocess.run(
        command_of(*flags), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode not in (0, -9) and text in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_every_api_server_has_the_modules():
    modules = ("--lora-modules", f"fixed={ADAPTERS / 'shout'}")
    with serving("--enable-lora", "--api-server-count", "2", *modules) as servers:
        for _ in range(6):  # connections of their own, so that both answer
            assert "fixed" in servers.get("/v1/models").text
            assert complete(servers, "fixed").status_code == 200
