"""Two cores that exchange K/V, one of which computes prompts and the other goes on."""

from __future__ import annotations

import time

from quire.engine.wire.messages import EngineCoreRequest
from quire.params import SamplingParams
from tests.engine.core.kv_tier_scene import OUTPUT, Ask, open_core

FIRST_LEG = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip


def peer_config(role="kv_both", policy="recompute", **extra):
    own = {"port": 0, "kv_recompute_threshold": 0, "kv_load_timeout": 3, **extra}
    return {
        "kv_connector": "NixlConnector", "kv_role": role, "kv_load_failure_policy": policy,
        "kv_connector_extra_config": own,
    }  # fmt: skip


class Peer(Ask):
    """A core with a connector, and the requests that it is sent."""

    def __init__(self, model, config=None, **options):
        options = {"num_gpu_blocks_override": 64, "max_num_seqs": 4, **options}
        super().__init__(open_core(model, kv_transfer_config=config or peer_config(), **options))

    def send(self, handle, ids, params=None, max_tokens=OUTPUT, salt=None):
        extra = None if params is None else {"kv_transfer_params": params}
        own = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, extra_args=extra
        )
        self.core.add_request(
            EngineCoreRequest(handle, ids, own, seed=0, arrival_time=0.0, cache_salt=salt)
        )

    def first_leg(self, ids, params=None, salt=None):
        """Compute a prompt; returns the params of the output."""
        self.handle += 1
        self.send(self.handle, ids, params or FIRST_LEG, max_tokens=1, salt=salt)
        found = {}
        while self.core.scheduler.requests:
            for part in self.core.step().parts:
                found[part.handle] = part.params
        return found.get(self.handle)

    def second_leg(self, ids, params, salt=None):
        """The answer to a prompt, whose K/V may be elsewhere."""
        self.handle += 1
        self.send(self.handle, ids, params, salt=salt)
        return self.run()[self.handle]

    @property
    def server(self):
        return self.connector.server

    @property
    def connector(self):
        return self.core.executor.worker.connected._connector

    @property
    def num_leased(self):
        return self.core.scheduler.connections.num_leased

    def settle(self, timeout_s=5.0):
        end = time.monotonic() + timeout_s
        while self.num_leased and time.monotonic() < end:
            self.core.step()
        return self.num_leased
