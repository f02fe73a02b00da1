"""A module of transformers whose weights go to an engine, step after step, by every way."""

import base64
import os
import pickle
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing import reductions
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams
from quire.distributed import host_broadcasts
from quire.distributed.named_tensors import TensorMeta
from quire.distributed.shared_buffer import SharedBuffer
from quire.errors import InvalidParameter, LoadError, WeightUpdateError
from quire.executor.weight_transfer import memory_engine
from quire.testing import make_checkpoint
from quire.trainers.clients import LocalWeightSyncClient
from quire.trainers.earlier import (
    IPCTrainerSendWeightsArgs,
    IPCWeightTransferEngine,
    NCCLTrainerSendWeightsArgs,
    NCCLWeightTransferEngine,
)
from quire.trainers.senders import (
    IPCTrainerInitInfo,
    NCCLTrainerInitInfo,
    WeightTransferTrainerFactory,
    while_engine,
)
from quire.trainers.sources import ModuleSource, described, layerwise_groups, share_parameters

SHAPE = {"num_hidden_layers": 2, "vocab_size": 300}
PROMPT = list(range(3, 20))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), SHAPE, "qwen3", dtype="float32")


@pytest.fixture
def module(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def opened(folder, backend, **wishes):
    return LLM(
        str(folder), skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 22, max_model_len=64,
        weight_transfer_config={"backend": backend}, dtype="float32", **wishes,
    )  # fmt: skip


def train(module, seed):
    """A step of a trainer, as far as weights tell."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.02)


def check(llm, module):
    """The engine's log-probabilities are those of the module, but for rounding."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
    [output] = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    ids = output.outputs[0].token_ids
    with torch.no_grad():
        logits = module(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    theirs = logits.log_softmax(-1)[range(len(ids)), ids]
    mine = [next(iter(one.values())).logprob for one in output.outputs[0].logprobs]
    assert torch.allclose(torch.tensor(mine), theirs, atol=2e-4)
    return output.outputs[0]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_a_sender_keeps_an_engine_at_its_module(folder, module, backend):
    llm = opened(folder, backend)
    small = 1 << 16  # several buffers
    info = {
        "nccl": NCCLTrainerInitInfo("127.0.0.1", free_port(), 2, packed_buffer_size_bytes=small),
        "ipc": IPCTrainerInitInfo(packed_buffer_size_bytes=small),
    }[backend]
    sender = WeightTransferTrainerFactory.trainer_init(
        info, client=LocalWeightSyncClient(llm), source=ModuleSource(module)
    )
    for step in range(3):
        train(module, step)
        sender.send_weights(f"step {step}")
        assert check(llm, module).weight_versions == [(0, 6, f"step {step}")]
    sender.shutdown()


def test_shared_parameters_are_read_where_they_are(folder, module, monkeypatch):
    llm = opened(folder, "ipc")
    buffer = share_parameters(module)
    written = []
    monkeypatch.setattr(SharedBuffer, "write", lambda *given: written.append(given))
    sender = WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(packed=False),
        client=LocalWeightSyncClient(llm),
        source=ModuleSource(module),
    )
    for step in range(2):
        train(module, step)  # in place, as optimizers do
        sender.send_weights()
        check(llm, module)
    assert not written
    monkeypatch.undo()
    module.lm_head.weight.data = module.lm_head.weight.data.clone()  # no longer there
    train(module, 2)
    sender.send_weights()
    check(llm, module)
    sender.shutdown()
    buffer.close()


def test_a_group_goes_on_after_a_tensor_that_did_not_fit(folder, module):
    llm = opened(folder, "nccl")
    sender = WeightTransferTrainerFactory.trainer_init(
        NCCLTrainerInitInfo("127.0.0.1", free_port(), 2),
        client=LocalWeightSyncClient(llm),
        source=ModuleSource(module),
    )
    train(module, 1)
    first = next(module.parameters())
    kept = first.data.clone()
    first.data[0] = torch.nan
    with pytest.raises(LoadError, match="NaN"):
        sender.send_weights()
    first.data = kept
    sender.send_weights()
    check(llm, module)


@pytest.mark.parametrize("is_near", [True, False])
def test_what_the_engine_refuses_reaches_the_sender_at_once(folder, module, is_near, monkeypatch):
    """Whether the engine does not come to the group, or does not take what was announced."""
    if not is_near:  # by gloo, as between hosts
        monkeypatch.setattr(host_broadcasts, "host_id", lambda: secrets.token_bytes(8))
    llm = opened(folder, "nccl")
    info = NCCLTrainerInitInfo("127.0.0.1", free_port(), 2)
    client, source = LocalWeightSyncClient(llm), ModuleSource(module)
    llm.start_weight_update()
    with pytest.raises(WeightUpdateError, match="A trainer is updating the weights"):
        WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    llm.collective_rpc("reload_weights")
    sender = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    sender.send_weights("one")
    group, communicator = sender._communicator.group, sender._communicator

    def refuse():
        raise WeightUpdateError("No update is under way")

    with pytest.raises(WeightUpdateError, match="No update is under way"):
        while_engine(refuse, lambda: group.meet("nowhere"), group.give_up)
    with pytest.raises(WeightUpdateError, match="No update is under way"):
        most = torch.zeros(1 << 20)
        while_engine(
            refuse,
            lambda: [communicator.broadcast(most, 0) for _ in range(99)],
            communicator.give_up,
        )
    with pytest.raises(WeightUpdateError, match="make another"):
        sender.send_weights("two")
    sender.shutdown()
    again = WeightTransferTrainerFactory.trainer_init(
        NCCLTrainerInitInfo("127.0.0.1", free_port(), 2), client=client, source=source
    )
    again.send_weights("three")
    assert check(llm, module).weight_versions == [(0, 6, "three")]
    again.shutdown()


class ActorDied(Exception):
    """What Ray raises of an engine that is gone."""


class GoneClient:
    """Of an engine that has ended since it met the trainer."""

    def init_weight_transfer_engine(self, init_info):
        pass

    def shutdown_weight_transfer_engine(self):
        raise ActorDied


def test_a_trainer_leaves_engines_that_are_gone(module):
    sender = WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(), client=GoneClient(), source=ModuleSource(module)
    )
    sender.shutdown()


def test_ranks_that_do_not_send_take_part_in_gathering(module):
    sender = WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(rank=1), client=None, source=ModuleSource(module)
    )
    sender.send_weights()
    sender.shutdown()
    with pytest.raises(InvalidParameter, match="NCCLTrainerInitInfo"):
        WeightTransferTrainerFactory.trainer_init({}, client=None, source=ModuleSource(module))


def test_the_functions_of_earlier_releases_send_without_a_session(folder, module):
    llm = opened(folder, "nccl")
    port = free_port()
    info = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
    group = while_engine(
        lambda: llm.init_weight_transfer_engine({"init_info": info | {"rank_offset": 1}}),
        lambda: NCCLWeightTransferEngine.trainer_init(info),
    )
    for packed in (True, False):
        train(module, int(packed))
        source = ModuleSource(module)
        metas = source.metadata()
        body = {
            "names": [meta.name for meta in metas],
            "dtype_names": [meta.dtype_name for meta in metas],
            "shapes": [list(meta.shape) for meta in metas],
            "packed": packed,
        }
        while_engine(
            lambda body=body: llm.update_weights({"update_info": body}),
            lambda packed=packed, source=source: NCCLWeightTransferEngine.trainer_send_weights(
                iter(source), NCCLTrainerSendWeightsArgs(group, packed=packed)
            ),
        )
        check(llm, module)


def test_shared_memory_of_earlier_releases(folder, module):
    llm = opened(folder, "ipc")
    llm.init_weight_transfer_engine({"init_info": {}})
    train(module, 5)
    IPCWeightTransferEngine.trainer_send_weights(
        iter(ModuleSource(module)), IPCTrainerSendWeightsArgs("local", llm)
    )
    check(llm, module)
    with pytest.raises(InvalidParameter, match="http, ray or local"):
        IPCWeightTransferEngine.trainer_send_weights(iter([]), {"mode": "post"})


def test_what_the_engine_says_reaches_the_trainer(folder, module):
    llm = opened(folder, "ipc")
    source = ModuleSource(module, prefix="other.")
    sender = WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(), client=LocalWeightSyncClient(llm), source=source
    )
    with pytest.raises(ValueError, match="other.model.embed_tokens.weight is not a weight"):
        sender.send_weights()
    check(llm, module)
    with pytest.raises(WeightUpdateError, match="No update is under way"):
        llm.finish_weight_update()
    sender.shutdown()


def test_groups_are_those_of_layers():
    names = ["model.embed.weight", "model.layers.0.a", "model.layers.10.a", "model.layers.0.b"]
    assert layerwise_groups([*names, "norm"]) == [
        [names[0]], [names[1], names[3]], [names[2]], ["norm"]
    ]  # fmt: skip


@pytest.mark.full
def test_memory_goes_with_a_trainer_that_closes_nothing_and_not_with_its_forks():
    program = """if True:
        import os, sys
        from quire.distributed.shared_buffer import SharedBuffer
        buffer = SharedBuffer(8)
        if os.fork() == 0:
            sys.exit()
        os.wait()
        print(buffer._path, buffer._path.exists())
    """
    [line] = subprocess.check_output([sys.executable, "-c", program], text=True).splitlines()
    path, exists = line.split()
    assert exists == "True" and not Path(path).exists()


def test_pickled_handles_are_read_where_that_is_allowed(folder, module, monkeypatch):
    llm = opened(folder, "ipc")
    llm.init_weight_transfer_engine({"init_info": {}})
    train(module, 1)
    pairs = [(name, p.detach()) for name, p in module.named_parameters()]
    buffer = SharedBuffer(sum(tensor.nbytes for _, tensor in pairs))
    at, handles = 0, []
    for _, tensor in pairs:
        handles.append(buffer.write(at, tensor))
        at += tensor.nbytes
    update = described([TensorMeta(n, t.dtype, tuple(t.shape)) for n, t in pairs])
    update["is_checkpoint_format"] = True  # as an older form has it here

    def send(value, **more):
        pickled = base64.b64encode(pickle.dumps(value)).decode()
        llm.update_weights({"update_info": update | {"ipc_handles_pickled": pickled} | more})

    before = llm.compute_weight_checksums()
    with pytest.raises(InvalidParameter, match="QUIRE_ALLOW_INSECURE_SERIALIZATION=1"):
        send(handles)
    monkeypatch.setenv("QUIRE_ALLOW_INSECURE_SERIALIZATION", "1")
    for value, more, words in (
        (os.getcwd, {}, "posix.getcwd, which no such value"),
        (torch.nn.Linear(1, 1), {}, "torch.nn"),
        (handles[1:], {}, "one for each"),
        (handles, {"ipc_handles": handles}, "with ipc_handles"),
        (handles, {"ipc_handles_pickled": "$"}, "base64"),
        (handles, {"ipc_handles_pickled": "gAR9"}, "cannot be read"),
        ([{"GPU-1": reductions_pair()}] * len(handles), {}, "shared with an engine on that GPU"),
    ):
        with pytest.raises(InvalidParameter, match=words):
            send(value, **more)
    assert llm.compute_weight_checksums() == before
    send(handles)
    check(llm, module)
    buffer.close()


def reductions_pair():
    """A pair of `reduce_tensor` for a tensor of a GPU."""
    given = (torch.Tensor, torch.Size([2]), (1,), 0, torch.UntypedStorage, torch.bfloat16, 0, b"h")
    return reductions.rebuild_cuda_tensor, given


def test_a_pair_of_a_gpu_is_opened_on_the_workers_own(monkeypatch):
    """A function stands in for torch's, since no GPU is here."""
    opened_with = []

    def rebuild_cuda_tensor(*given):
        opened_with.append(given)
        return torch.arange(2)

    rebuild_cuda_tensor.__module__ = reductions.__name__
    rebuild_cuda_tensor.__qualname__ = "rebuild_cuda_tensor"
    properties = SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 7)
    _, given = reductions_pair()
    found = memory_engine._of_gpu({"GPU-1": (rebuild_cuda_tensor, given)}, torch.device("cuda"))
    assert found.tolist() == [0, 1] and opened_with == [(*given[:6], 7, b"h")]
    for handle in (
        {"GPU-2": (rebuild_cuda_tensor, given)},
        {"GPU-1": (os.getcwd, given)},
        {"GPU-1": ["rebuild_cuda_tensor", given]},
        {"GPU-1": (rebuild_cuda_tensor, 1)},
    ):
        with pytest.raises(InvalidParameter, match="ipc_handles"):
            memory_engine._of_gpu(handle, torch.device("cuda"))
