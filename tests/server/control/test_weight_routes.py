"""A trainer updates a server over HTTP."""

import json

import httpx
import pytest
from safetensors.torch import load_file

from quire.distributed.named_tensors import TensorMeta
from quire.errors import WeightUpdateError
from quire.testing import make_checkpoint
from quire.trainers.clients import HTTPWeightSyncClient
from quire.trainers.senders import IPCTrainerInitInfo, WeightTransferTrainerFactory
from tests.server.serve_process import SMALL, serving

SHAPE = {"num_hidden_layers": 2, "vocab_size": 320}
KEY = {"Authorization": "Bearer key"}


class Tensors(dict):
    """A source of tensors by name."""

    def metadata(self):
        return [TensorMeta(n, t.dtype, tuple(t.shape)) for n, t in self.items()]

    def __iter__(self):
        return iter(self.items())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return [make_checkpoint(base / str(s), SHAPE, "qwen3", s, "float32") for s in (0, 1)]


@pytest.fixture(scope="module")
def running(folders):
    config = json.dumps({"backend": "ipc"})
    options = ("--enable-admin", "--api-key", "key", "--weight-transfer-config", config)
    with serving(str(folders[0]), *options, *SMALL) as served:
        yield served


@pytest.fixture
def client(running):
    with running.client(headers=KEY) as made:
        yield made


def answer(client, num_tokens=6):
    body = {"prompt": "abc", "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
            "logprobs": 1}  # fmt: skip
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["logprobs"]["token_logprobs"]


def test_a_server_follows_its_trainer(running, client, folders):
    assert client.get("/get_world_size").json() == {"world_size": 1}
    assert client.get("/weight_info").json() == {"weight_version": "default"}
    sums = client.post("/weight_checker", json={"action": "checksum"}).json()["checksums"]
    before = answer(client)
    sync = HTTPWeightSyncClient(running.url, api_key="key")
    senders = [
        WeightTransferTrainerFactory.trainer_init(
            IPCTrainerInitInfo(),
            client=sync,
            source=Tensors(load_file(folder / "model.safetensors")),
        )
        for folder in folders
    ]
    senders[1].send_weights("one")
    assert client.get("/weight_info").json() == {"weight_version": "one"}
    compared = client.post("/weight_checker", json={"action": "compare", "baseline": sums}).json()
    assert not compared["match"] and len(compared["mismatches"]) > 8
    assert answer(client) != before
    with httpx.stream(
        "POST", f"{running.url}/v1/completions", headers=KEY, timeout=60,
        json={"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "stream": True},
    ) as reply:  # fmt: skip
        lines = (line for line in reply.iter_lines() if line.startswith("data: {"))
        next(lines)
        client.post("/pause?mode=keep")
        senders[0].send_weights("zero")
        client.post("/resume")
        assert json.loads(list(lines)[-1][6:])["choices"][0]["finish_reason"] == "length"
    compared = client.post("/weight_checker", json={"action": "compare", "baseline": sums}).json()
    assert compared == {"match": True, "mismatches": []}
    assert answer(client) == before
    for sender in senders:
        sender.shutdown()


def test_states_and_faults_are_replies(running, client):
    assert client.post("/update_weights", json={"update_info": []}).status_code == 400
    assert client.post("/update_weights", json={"update_info": {"names": []}}).status_code == 409
    connected = client.post("/init_weight_transfer_engine", json={"init_info": {}})
    assert connected.status_code == 200, connected.text
    pieces, kind = iter([b'{"is_checkpoint_format":', b"0}"]), {"Content-Type": "application/json"}
    chunked = client.post("/start_weight_update", content=pieces, headers=kind)
    assert chunked.status_code == 400
    assert client.post("/finish_weight_update").status_code == 409
    assert client.post("/start_weight_update", json={"extra": 1}).status_code == 200
    again = client.post("/start_weight_update")
    assert again.status_code == 409 and "open already" in again.text
    body = {"names": ["x"], "dtype_names": ["float32"], "shapes": [[1]], "ipc_handles": []}
    assert client.post("/update_weights", json={"update_info": body}).status_code == 400
    assert client.post("/finish_weight_update").status_code == 409
    renamed = client.post("/update_weight_version", json={"new_version": "other"}).json()
    assert renamed["success"] and client.get("/weight_info").json()["weight_version"] == "other"
    for action, parameter in (("reset", "action"), ("compare", "baseline")):
        refused = client.post("/weight_checker", json={"action": action})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, parameter)
    assert client.post("/start_draft_weight_update").status_code == 409
    assert answer(client)
    with pytest.raises(WeightUpdateError, match="401"):
        HTTPWeightSyncClient(running.url).start_weight_update()
    assert client.post("/shutdown_weight_transfer_engine").status_code == 200
