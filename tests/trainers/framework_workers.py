"""Methods that frameworks add to workers (`worker_extension_cls`), as they call the engine there.

Each class names the file that its calls are from. Where a framework's own tensors lie in a GPU's
memory, these lie in the host's: shared memory in place of CUDA's IPC, gloo in place of NCCL.
"""

from __future__ import annotations

import json
import math
from multiprocessing import shared_memory
from typing import Any

import torch
import zmq


class OpenRLHFWorker:
    """openrlhf 0.11.2, trainer/ray/vllm_worker_wrap.py and utils/distributed_util.py, but for what
    it asserts of torch's default group and of the worker's model_config.
    """

    def init_process_group(
        self, master_address, master_port, rank_offset, world_size, group_name, backend, use_ray
    ):
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        assert group_name and not use_ray
        group = StatelessProcessGroup.create(
            host=master_address, port=master_port, rank=self.rank + rank_offset,
            world_size=world_size,
        )  # fmt: skip
        self._model_update_group = PyNcclCommunicator(group, device=self.device)

    def update_weight(self, name, dtype, shape, empty_cache=False):
        dtype = getattr(torch, dtype)
        weight = torch.empty(shape, dtype=dtype)
        self._model_update_group.broadcast(weight, src=0, stream=None)
        self.model_runner.model.load_weights(weights=[(name, weight)])


class VerlWorker:
    """verl 0.9.1, workers/rollout/vllm_rollout/utils.py and bucketed_weight_transfer.py."""

    def update_weights_from_ipc(self, peft_config=None, base_sync_done=False, use_shm=False):
        assert use_shm and self.device is not None
        assert self.local_rank == 0
        socket = zmq.Context.instance().socket(zmq.REP)
        socket.connect(peft_config["socket"] if peft_config else "")
        shared = shared_memory.SharedMemory(name=socket.recv_json()["name"])
        socket.send(b"")
        is_last = False
        while not is_last:
            message = socket.recv_json()
            buffer = torch.frombuffer(shared.buf, dtype=torch.uint8)
            weights = [
                (name, buffer[at : at + size].view(getattr(torch, kind)).view(shape))
                for name, kind, shape, at, size in message["bucket"]
            ]
            # whose tensors would be written without load_weights
            assert not dict(self.model_runner.model.named_buffers())
            self.model_runner.model.load_weights(weights)
            del weights, buffer
            is_last = message["is_last"]
            socket.send(b"")
        shared.close()
        socket.close()
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        assert self.model_runner.vllm_config.speculative_config is None
        assert getattr(self.model_runner, "drafter", None) is None
        config = self.model_runner.vllm_config.model_config
        process_weights_after_loading(self.model_runner.model, config, self.device)
        return len(dict(self.model_runner.model.named_parameters(remove_duplicate=False)))


class PrimeWorker:
    """prime-rl, inference/vllm/worker."""

    def init_broadcaster(self):
        self._has_broadcaster = True

    def liveness_probe(self):
        return self._has_broadcaster

    def update_weights_from_path(self, folder):
        from vllm.model_executor.model_loader import DefaultModelLoader, get_model_loader
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = self.model_runner.model
        loader = get_model_loader(self.load_config)
        assert isinstance(loader, DefaultModelLoader)
        source = DefaultModelLoader.Source(folder, revision=None, prefix="", fall_back_to_pt=True)
        initialize_layerwise_reload(model)
        model.load_weights(loader._get_weights_iterator(source))
        finalize_layerwise_reload(model, self.model_runner.model_config)


class NemoWorker:
    """NeMo-RL, models/generation/vllm/vllm_backend.py."""

    def report_device_id(self):
        return f"host-{self.rank}"

    def bind_numa(self):
        return True

    def prepare_refit_info(self, state):
        self._refit = json.loads(state)

    def update_weights_via_ipc_zmq(self, address):
        socket = zmq.Context.instance().socket(zmq.REP)
        socket.connect(address)
        while (first := socket.recv()) != b"end":
            name = first.decode()
            kind, shape = self._refit[name]
            socket.send(b"")
            data = torch.frombuffer(bytearray(socket.recv()), dtype=getattr(torch, kind))
            self.model_runner.model.load_weights([(name, data.view(shape))])
            socket.send(b"")
        socket.send(b"")
        socket.close()
        return True

    def init_collective(self, rank_prefix, ip, port, world_size, train_world_size):
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        rank = train_world_size + rank_prefix + self.local_rank
        group = StatelessProcessGroup.create(ip, port, rank, world_size)
        self._collective = PyNcclCommunicator(group, device=self.device)

    def update_weights_from_collective(self):
        """What was announced, in buffers of two tensors."""
        left = list(self._refit.items())
        while left:
            batch, left = left[:2], left[2:]
            sizes = [getattr(torch, kind).itemsize * math.prod(shape) for _, (kind, shape) in batch]
            buffer = torch.empty(sum(sizes), dtype=torch.uint8)
            self._collective.broadcast(buffer, src=0)
            parts = buffer.split(sizes)
            self.model_runner.model.load_weights(
                (name, part.view(getattr(torch, kind)).view(shape))
                for (name, (kind, shape)), part in zip(batch, parts, strict=True)
            )
        return True

    def cleanup(self):
        self._refit: Any = None
