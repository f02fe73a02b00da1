"""Weight updates of an engine: the same bits as a start with these weights, one state after each
failure.
"""

import gc
import random
import socket
import threading
from multiprocessing.shared_memory import SharedMemory
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import ReduceOp

from quire.distributed.named_tensors import bytes_of, metas_of
from quire.distributed.shared_buffer import SharedBuffer
from quire.distributed.trainer_group import PyNcclCommunicator, StatelessProcessGroup
from quire.engine.client.control_state import ControlState
from quire.engine.wire.control_calls import Utility
from quire.errors import InvalidParameter, LoadError, WeightMismatch, WeightUpdateError
from quire.executor.weight_transfer import incoming
from quire.testing import make_checkpoint
from tests.executor.worker_cores import open_core, requests, same_bits, serve

BFLOAT = {"dtype": "bfloat16"}
SHAPE = {"num_hidden_layers": 3, "vocab_size": 384}


@pytest.fixture(scope="module", params=["qwen2", "qwen3_moe"])
def folders(request, tmp_path_factory):
    """Two checkpoints of one shape, with biases and tied heads, or with experts."""
    base = tmp_path_factory.mktemp(request.param)
    shape = SHAPE | {"tie_word_embeddings": request.param == "qwen2"}
    return [make_checkpoint(base / str(s), shape, request.param, seed=s) for s in (0, 1)]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def opened(folder, num_workers=1, backend="ipc", **wishes):
    return open_core(folder, num_workers, weight_transfer_config={"backend": backend}, **wishes)


@pytest.fixture
def core(folders):
    """An engine with the first one's weights, whose trainer shares memory."""
    made = opened(folders[0])
    made.init_weight_transfer_engine({})
    yield made
    made.shutdown()


def answers(folder, num_workers=1, **wishes):
    made = open_core(folder, num_workers, **wishes)
    found = serve(made), made.compute_weight_checksums()
    made.shutdown()
    return found


def send(core, pairs):
    """Send tensors in one buffer."""
    pairs = list(pairs)
    buffer = SharedBuffer(sum(tensor.nbytes for _, tensor in pairs))
    at = 0
    for _, tensor in pairs:
        buffer.write(at, tensor)
        at += tensor.nbytes
    try:
        core.update_weights(described(pairs) | {"ipc_handles": buffer.handle()})
    finally:
        buffer.close()


def described(pairs):
    return {
        "names": [name for name, _ in pairs],
        "dtype_names": [str(tensor.dtype) for _, tensor in pairs],
        "shapes": [list(tensor.shape) for _, tensor in pairs],
    }


def begin(core):
    future = core.start_weight_update()
    while not future.done():
        core.step()
    future.result()


def update(core, pairs, version="new", pieces=5):
    begin(core)
    pairs = list(pairs)
    for start in range(0, len(pairs), pieces):
        send(core, pairs[start : start + pieces])
    core.prepare_weight_update()
    core.commit_weight_update(version)


@pytest.mark.parametrize(
    "wishes",
    [{}, BFLOAT | {"quantization": "int8"}, BFLOAT | {"quantization": "int4"},
     BFLOAT | {"enable_lora": True, "max_lora_rank": 8}],
    ids=str,
)  # fmt: skip
def test_an_update_gives_the_bits_of_a_start_with_its_weights(folders, wishes):
    before, _ = answers(folders[0], **wishes)
    right, sums = answers(folders[1], **wishes)
    core = opened(folders[0], **wishes)
    core.init_weight_transfer_engine({})
    assert same_bits(serve(core), before)
    pairs = list(tensors_of(folders[1]).items())
    random.Random(3).shuffle(pairs)
    update(core, pairs)
    assert core.compute_weight_checksums() == sums
    assert same_bits(serve(core), right)
    assert core.get_weight_version() == "new"
    update(core, tensors_of(folders[0]).items(), None)
    assert same_bits(serve(core), before)
    core.shutdown()


def test_several_workers_take_their_parts(folders):
    if "qwen2" not in str(folders[0]):
        pytest.skip("experts are not cut over workers")
    right, sums = answers(folders[1], 2)
    core = opened(folders[0], 2)
    core.init_weight_transfer_engine({})
    update(core, reversed(tensors_of(folders[1]).items()))
    assert core.compute_weight_checksums() == sums and len({name[:15] for name in sums}) == 2
    assert same_bits(serve(core), right)
    core.shutdown()


def spoiled(pairs, fault):
    """(pairs, error, words) of a trainer with a fault in the tensor of a layer's keys."""
    name = next(n for n, _ in pairs if n.endswith("layers.1.self_attn.k_proj.weight"))
    place = [n for n, _ in pairs].index(name)
    tensor = pairs[place][1]
    nan = tensor.clone()
    nan.view(-1)[7] = float("nan")
    other = {
        "missing": ([], WeightMismatch, "did not come"),
        "doubled": ([(name, tensor)] * 2, WeightMismatch, f"{name} came twice"),
        "shape": ([(name, tensor[:-1])], WeightMismatch, "shape"),
        "NaN": ([(name, nan)], LoadError, "NaN"),
        "type": ([(name, tensor.to(torch.int32))], LoadError, "came as I32"),
        "name": ([(name, tensor), ("model.other", tensor)], WeightMismatch, "model.other is not"),
    }
    new, error, words = other[fault]
    return [*pairs[:place], *new, *pairs[place + 1 :]], error, words


FAULTS = ("missing", "doubled", "shape", "NaN", "type", "name")


@pytest.mark.parametrize("fault", FAULTS)
def test_an_update_that_fails_half_way_ends_in_refusals(core, folders, fault):
    before = core.compute_weight_checksums()
    pairs, error, words = spoiled(list(tensors_of(folders[1]).items()), fault)
    pairs.sort(key=lambda pair: "layers.1." in pair[0])  # the others have been written
    with pytest.raises(error, match=words):
        update(core, pairs)
    assert core.compute_weight_checksums() != before
    with pytest.raises(WeightUpdateError, match="No update is under way"):
        core.prepare_weight_update()
    ends = serve(core).ends
    assert len(ends) == 7
    assert all("a mixture of two versions" in end.message for end in ends.values())
    with pytest.raises(WeightMismatch, match="Send all"):
        update(core, list(tensors_of(folders[1]).items())[:4])
    assert core.refusal is not None
    update(core, tensors_of(folders[1]).items())
    assert core.refusal is None
    assert same_bits(serve(core), answers(folders[1])[0])


@pytest.mark.parametrize("fault", FAULTS[1:])
def test_an_update_that_fails_before_anything_is_written_changes_nothing(core, folders, fault):
    before = core.compute_weight_checksums()
    right = serve(core)
    pairs, error, words = spoiled(list(tensors_of(folders[1]).items()), fault)
    pairs = [pair for pair in pairs if "layers.1.self_attn" in pair[0] or "other" in pair[0]]
    with pytest.raises(error, match=words):
        update(core, pairs)
    assert core.compute_weight_checksums() == before
    assert core.refusal is None
    assert same_bits(serve(core), right)


def test_files_repair_a_mixture(core, folders):
    right = serve(core)
    begin(core)
    send(
        core, [p for p in tensors_of(folders[1]).items() if "layers.0." in p[0] or "embed" in p[0]]
    )
    core.abandon_weight_update("the trainer is gone")
    assert core.refusal is not None
    core.collective_rpc("reload_weights")
    assert core.refusal is None
    assert same_bits(serve(core), right)


def test_a_trainer_that_never_finishes_is_ended_by_a_reload(core):
    right = serve(core)
    begin(core)
    core.add_request(requests()[0])
    assert not core.step().token_ids  # nothing is scheduled meanwhile
    core.collective_rpc("reload_weights")
    while core.has_work:
        core.step()
    begin(core)
    core.abandon_weight_update("over")
    assert same_bits(serve(core), right)


def test_a_trainer_that_leaves_the_group_ends_the_update(folders):
    port = free_port()
    core = opened(folders[0], backend="nccl")
    right = serve(core)

    def trainer():
        group = StatelessProcessGroup.create("127.0.0.1", port, 0, 2, store_timeout=30)
        PyNcclCommunicator(group, "cpu").destroy()

    thread = threading.Thread(target=trainer)
    thread.start()
    core.init_weight_transfer_engine(
        {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
    )
    thread.join()
    begin(core)
    with pytest.raises(WeightUpdateError, match="is gone"):
        core.update_weights(described(tensors_of(folders[1]).items()))
    assert core.refusal is None
    assert same_bits(serve(core), right)
    core.shutdown()


@pytest.mark.parametrize("shapes", [[[True]], [[1.5]], [[-1]], [None], [["3"]], ["3"], "3", None])
def test_shapes_that_are_none_are_refused(shapes):
    with pytest.raises(InvalidParameter, match="shapes"):
        metas_of(["a"], ["float32"], shapes)


@pytest.mark.parametrize("size", [1 << 45, 1 << 62])
def test_sizes_that_nobody_has_memory_for_end_the_update(size):
    with pytest.raises(WeightUpdateError, match="no memory"):
        incoming.Rooms(torch.device("cpu")).take(0, size)


def test_whole_weights_that_are_not_sent_stay(core, folders, caplog):
    new = tensors_of(folders[1])
    chosen = [(n, t) for n, t in new.items() if "layers.1.self_attn.o_proj" in n]
    before = core.compute_weight_checksums()
    update(core, chosen)
    after = core.compute_weight_checksums()
    assert {n for n in after if after[n] != before[n]} == {"dp0:pp0:pcp0:tp0:layers.1.attn.o"}
    assert "weights were not sent, and stay" in caplog.text


def test_names_need_no_prefix(core, folders):
    update(core, [(n.removeprefix("model."), t) for n, t in tensors_of(folders[1]).items()])
    assert same_bits(serve(core), answers(folders[1])[0])


def test_a_tied_head_may_come_if_it_is_the_embedding(core, folders):
    new = tensors_of(folders[1])
    if "lm_head.weight" in new:
        pytest.skip("the head is a weight of its own")
    table = new["model.embed_tokens.weight"]
    update(core, [*new.items(), ("lm_head.weight", table.clone())])
    with pytest.raises(WeightMismatch, match="tie_word_embeddings"):
        update(core, [("lm_head.weight", table + 1), *new.items()])
    with pytest.raises(WeightMismatch, match="tie_word_embeddings"):
        update(core, [*new.items(), ("lm_head.weight", table + 1)])


def test_the_order_of_calls_is_held(core, folders):
    with pytest.raises(WeightUpdateError, match="No update is under way"):
        core.update_weights({})
    with pytest.raises(WeightUpdateError, match="No update is under way"):
        core.prepare_weight_update()
    begin(core)
    with pytest.raises(WeightUpdateError, match="open already"):
        core.start_weight_update()
    with pytest.raises(WeightUpdateError, match="updating the weights"):
        core.init_weight_transfer_engine({})
    with pytest.raises(WeightUpdateError, match="finish it first"):
        core.shutdown_weight_transfer_engine()
    core.abandon_weight_update("over")
    assert core.refusal is None
    core.shutdown_weight_transfer_engine()
    begin(core)
    with pytest.raises(WeightUpdateError, match="No trainer is connected"):
        send(core, list(tensors_of(folders[1]).items())[:1])
    with pytest.raises(WeightUpdateError, match="no network that drafts"):
        core.start_weight_update(is_draft=True).result()


def test_without_the_option_nothing_is_begun(folders):
    core = open_core(folders[0], 1)
    with pytest.raises(WeightUpdateError, match="weight_transfer_config"):
        core.init_weight_transfer_engine({})
    future = core.start_weight_update()
    with pytest.raises(WeightUpdateError, match="weight_transfer_config"):
        future.result()
    serve(core)
    core.shutdown()


@pytest.mark.parametrize("packed", [True, False, "in the update"])
def test_a_process_group_carries_the_weights(folders, packed, monkeypatch):
    if packed != "in the update":  # else tensors of this size are not given to the model by rows
        monkeypatch.setattr(incoming, "LEAST_BY_ROWS", 1)
    port = free_port()
    pairs = list(tensors_of(folders[1]).items())
    core = opened(folders[0], backend="nccl")
    given = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
    failures = []

    def trainer():
        try:
            group = StatelessProcessGroup.create("127.0.0.1", port, 0, 2, store_timeout=30)
            communicator = PyNcclCommunicator(group, "cpu")
            for _, tensor in pairs if not packed else ():
                communicator.broadcast(tensor, 0)
            if packed:
                communicator.broadcast(torch.cat([bytes_of(tensor) for _, tensor in pairs]), 0)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=trainer)
    thread.start()
    core.init_weight_transfer_engine(given | ({"packed": True} if packed is True else {}))
    begin(core)
    extra = {"packed": True} if packed == "in the update" else {}
    core.update_weights(described(pairs) | extra)
    core.prepare_weight_update()
    core.commit_weight_update()
    thread.join()
    assert not failures
    assert same_bits(serve(core), answers(folders[1])[0])
    core.shutdown()


def test_information_that_is_not_known_is_named(folders, core):
    with pytest.raises(InvalidParameter, match="Invalid init_info"):
        core.init_weight_transfer_engine({"colour": 1})
    core.init_weight_transfer_engine({"packed": False})
    begin(core)
    with pytest.raises(InvalidParameter, match="Invalid update_info"):
        core.update_weights({"names": [], "dtype_names": [], "shapes": [], "colour": 1})


@pytest.mark.parametrize(
    "handle",
    [["/etc/passwd", 0, 8], ["quire-weights-" + "0" * 16, 0, 8], ["../x", 0, 8], [1], "x",
     ["quire-weights-" + "0" * 16, -8, 8]],
    ids=str,
)  # fmt: skip
def test_handles_name_memory_of_trainers_alone(core, handle):
    begin(core)
    info = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2]]}
    with pytest.raises(InvalidParameter, match="ipc_handles"):
        core.update_weights(info | {"ipc_handles": [{"quire:host": handle}]})
    assert core.refusal is None


def load(core, pairs):
    model = core.executor.driver_worker.model_runner.model
    return model.load_weights(pairs)


def test_load_weights_of_the_model_takes_one_tensor_at_a_time(folders):
    core = open_core(folders[0], 1)
    before = serve(core)
    for folder in (folders[1], folders[0], folders[1]):
        for name, tensor in tensors_of(folder).items():
            mine = tensor.clone()
            assert load(core, [(name, mine)]) == {name}
            mine.zero_()
    assert same_bits(serve(core), answers(folders[1])[0])
    assert not same_bits(serve(core), before)
    core.shutdown()


@pytest.fixture
def no_collector():
    """Only counts of references free objects."""
    gc.disable()
    yield
    gc.enable()


def in_shared_memory(memory, pairs):
    """The tensors as views of the memory of another process."""
    data, at = torch.frombuffer(memory.buf[:], dtype=torch.uint8), 0
    for name, tensor in pairs:
        view = data[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        at += tensor.nbytes
        yield name, view.copy_(tensor)


@pytest.mark.parametrize("wishes", [{}, BFLOAT | {"quantization": "int8"}], ids=str)
def test_memory_that_tensors_came_in_can_be_closed(folders, wishes, no_collector):
    """verl's receiver closes it before it acknowledges, and its sender waits for that."""
    core = open_core(folders[0], 1, **wishes)
    model = core.executor.driver_worker.model_runner.model
    pairs = list(tensors_of(folders[1]).items())
    random.Random(3).shuffle(pairs)
    nan = pairs[0][0], torch.full_like(pairs[0][1], float("nan"))
    kept = dict(model.named_buffers())
    for bucket in ([nan], pairs[:9], pairs[9:]):
        memory = SharedMemory(create=True, size=sum(tensor.nbytes for _, tensor in bucket))
        try:
            found = model.load_weights(
                pair for pair in in_shared_memory(memory, bucket) if pair[0] not in kept
            )
        except LoadError as error:
            assert bucket == [nan] and "has NaN" in str(error)
        else:
            assert bucket != [nan] and found == {name for name, _ in bucket}
        memory.close()  # BufferError where somebody has a view
        memory.unlink()
    core.shutdown()


def test_a_step_refuses_weights_that_lack_a_part(folders):
    core = open_core(folders[0], 1)
    pairs, _, _ = spoiled(list(tensors_of(folders[1]).items()), "missing")
    load(core, pairs)
    ends = serve(core).ends
    assert all("did not come" in end.message for end in ends.values()) and len(ends) == 7
    load(core, tensors_of(folders[1]).items())
    assert same_bits(serve(core), answers(folders[1])[0])
    core.shutdown()


def test_what_was_cached_before_is_not_found_after(core, folders):
    def hits():
        core.scheduler.counters.prefix_hits = 0
        serve(core)
        return core.scheduler.counters.prefix_hits

    hits()
    assert hits() > 0
    update(core, tensors_of(folders[1]).items())
    first = hits()
    assert first < hits()
    load(core, tensors_of(folders[0]).items())
    assert hits() == first


def test_a_sum_is_the_one_reduction():
    communicator = PyNcclCommunicator(SimpleNamespace(rank=0, world_size=1), "cpu")
    assert communicator.all_reduce(torch.ones(2), ReduceOp.SUM).tolist() == [1, 1]
    with pytest.raises(InvalidParameter, match="op"):
        communicator.all_reduce(torch.ones(2), ReduceOp.MAX)


def test_an_update_that_ends_on_some_workers_alone_leaves_a_mixture(folders, monkeypatch):
    if "qwen2" not in str(folders[0]):
        pytest.skip("experts are not cut over workers")
    core = opened(folders[0], 2)
    core.init_weight_transfer_engine({})
    begin(core)
    pairs = list(tensors_of(folders[1]).items())
    send(core, pairs)
    second = core.executor.workers[1].weights

    def fail():  # as a stage does that has got a half of its first weight
        second._update.is_torn = False
        raise WeightMismatch("A part did not come.")

    with monkeypatch.context() as patched:
        patched.setattr(second, "finish", fail)
        with pytest.raises(WeightMismatch, match="A part"):
            core.prepare_weight_update()
    assert "a mixture of two versions" in core.refusal
    for worker in core.executor.workers:
        with pytest.raises(WeightMismatch, match="Send all"):
            part = worker.weights._begin()
            part.finish()
    update(core, pairs)
    assert same_bits(serve(core), answers(folders[1], 2)[0])
    core.shutdown()


def test_weights_do_not_fall_asleep_during_an_update(core):
    begin(core)
    with pytest.raises(WeightUpdateError, match="being updated"):
        core.sleep(2)
    core.abandon_weight_update("over")
    core.sleep(2).result()
    with pytest.raises(WeightUpdateError, match="asleep"):
        core.start_weight_update()
    core.wake_up()


def test_an_update_by_name_is_not_forgotten_by_a_core_that_restarts(core, folders):
    begin(core)
    send(core, tensors_of(folders[1]).items())
    assert core.collective_rpc("finish_weight_update", None, (), {"weight_version": "new"})
    assert core.get_weight_version() == "new" and core.refusal is None
    call = Utility("collective_rpc", ("finish_weight_update", None, ["new"], {}))
    state = ControlState()
    state.note(call, None)
    [again] = state.replay()
    core.collective_rpc(*again.args)
    assert "after its weights were updated to the version 'new'" in core.refusal
    state.note(Utility("collective_rpc", ("reload_weights", None, [], {})), None)
    assert not state.replay()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_core_takes_updated_weights_from_a_snapshot(folders, num_workers, tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    if num_workers > 1 and "qwen2" not in str(folders[0]):
        pytest.skip("experts are not cut over workers")
    config = {"weight_transfer_config": {"backend": "ipc", "snapshots": True}}
    first, second = (open_core(folders[0], num_workers, **config) for _ in range(2))
    first.init_weight_transfer_engine({})
    begin(first)
    send(first, tensors_of(folders[1]).items())
    first.prepare_weight_update()
    token = f"{num_workers:032x}"
    first.commit_weight_update("new", False, token)
    first.collective_rpc("settle_snapshot")
    second.commit_weight_update("new", True, token)
    assert second.refusal is None and second.get_weight_version() == "new"
    assert same_bits(serve(second), answers(folders[1], num_workers)[0])
    begin(first)  # other weights are on their way
    first.abandon_weight_update("over")
    second.commit_weight_update("new", True, token)
    assert "its snapshot was not complete" in second.refusal
    with pytest.raises(WeightUpdateError, match="token"):
        second.commit_weight_update("new", True, "../x")
    first.shutdown()
    second.shutdown()
