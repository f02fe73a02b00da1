"""The methods of `LLM` and `AsyncLLM` by which trainers give an engine new weights.

An update has two phases over cores: each checks that it has all weights, and only when all have
said so does each compute with them. Where one fails, the update of all is given up.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from quire.engine.wire.control_calls import AwaitedFace, BlockingFace, Utility, first, verb
from quire.errors import WeightUpdateError
from quire.params.weight_transfer import (
    WeightTransferUpdateRequest,
    init_info_of,
    require_checkpoint_format,
    update_info_of,
)

UPDATED = "updated weights"
"""The name by which the last update is remembered, for a core that restarts."""

SPOILED = "spoiled weights"
"""The same of one that has ended on some of the cores and not, or not certainly, on others."""


def _same(versions: Sequence[str]) -> str:
    if len(set(versions)) > 1:
        raise WeightUpdateError(
            f"The cores have weights of several versions: {', '.join(versions)}."
        )
    return versions[0]


def _merged(sums: Sequence[Mapping[str, str]]) -> dict[str, str]:
    return {name: digest for each in sums for name, digest in each.items()}


class WeightVerbs:
    """The verbs of every face. A request may be a dict with its field, too."""

    @verb(is_repeatable=False)
    def init_weight_transfer_engine(self, request: Any) -> Utility[None]:
        """Have the workers meet a trainer, which waits for them. The `init_info` of the
        `WeightTransferInitRequest` has what the backend of `weight_transfer_config` needs.

        Raises WeightUpdateError without that option, and during an update.
        """
        return Utility("init_weight_transfer_engine", (init_info_of(request),))

    @verb(is_repeatable=False)
    def shutdown_weight_transfer_engine(self) -> Utility[None]:
        """Have the workers leave the trainer. Raises WeightUpdateError during an update."""
        return Utility("shutdown_weight_transfer_engine")

    @verb(is_repeatable=False)
    def start_weight_update(self, is_checkpoint_format: bool = True) -> Utility[None]:
        """Begin an update. Requests that run wait until it has ended, and new ones queue; pause
        first to end them, or to forget their K/V. Done when the device is idle.

        Raises WeightUpdateError where an update is open, and while the weights are asleep,
        NotBuiltYet for tensors of another format than the checkpoint's.
        """
        require_checkpoint_format(is_checkpoint_format)
        return Utility("start_weight_update", (False,))

    @verb("start_weight_update", is_repeatable=False)
    def start_draft_weight_update(self) -> Utility[None]:
        """Begin an update of the network that drafts, whose tensors have the names of its own
        checkpoint.

        Raises WeightUpdateError where there is none, or the backend has no such updates.
        """
        return Utility("start_weight_update", (True,))

    @verb("update_weights", is_repeatable=False)
    def _receive_weights(self, info: dict[str, Any] | list[dict[str, Any]]) -> Utility[None]:
        return Utility("update_weights", (info,))

    @verb("prepare_weight_update", combine=first, is_repeatable=False)
    def _prepare_weight_update(self) -> Utility[int]:
        return Utility("prepare_weight_update")

    @verb(
        "commit_weight_update",
        is_repeatable=False,
        keeps=lambda *_: UPDATED,
        drops=lambda *_: (SPOILED,),
        replay=lambda version=None, _=False, token="", *__: (version, True, token),
    )
    def _commit_weight_update(self, weight_version: str | None) -> Utility[None]:
        return Utility("commit_weight_update", (weight_version, False, secrets.token_hex(16)))

    @verb("abandon_weight_update", combine=any)
    def _abandon_weight_update(self, reason: str) -> Utility[bool]:
        return Utility("abandon_weight_update", (reason,))

    @verb("spoil_weights", keeps=lambda *_: SPOILED)
    def _spoil_weights(self, reason: str, is_draft: bool = False) -> Utility[None]:
        return Utility("spoil_weights", (reason, is_draft))

    @verb("is_updating_weights", combine=all)
    def _is_updating_weights(self) -> Utility[bool]:
        return Utility("is_updating_weights")

    @verb(combine=_same)
    def get_weight_version(self) -> Utility[str]:
        """The version of the weights: "default" until an update has named another."""
        return Utility("get_weight_version")

    @verb(keeps=lambda *_: "weight version")
    def set_weight_version(self, weight_version: str) -> Utility[None]:
        """Name the weights; outputs have the name from now on."""
        return Utility("set_weight_version", (weight_version,))

    @verb("set_weight_version", keeps=lambda *_: "weight version")
    def update_weight_version(self, version: str) -> Utility[None]:
        """The same as `set_weight_version`."""
        return Utility("set_weight_version", (version,))

    @verb(combine=_merged)
    def compute_weight_checksums(self) -> Utility[dict[str, str]]:
        """SHA-256 of every weight as it is kept: rounded, packed and cut as the workers have it.
        The key is "dp0:pp0:pcp0:tp0:" and the weight's name.
        """
        return Utility("compute_weight_checksums")


class BlockingWeightMethods(WeightVerbs, BlockingFace):
    """Methods of `LLM` and `LLMEngine`."""

    def update_weights(self, request: WeightTransferUpdateRequest | dict[str, Any]) -> None:
        """Receive some of the weights, by the names of the model's checkpoint, in any order; the
        trainer sends them meanwhile.

        Without `start_weight_update` it is an update by itself. Raises what says why weights do not
        fit; then the update is over on all cores.
        """
        info = update_info_of(request)
        alone = not self._is_updating_weights()
        if alone:
            self.start_weight_update()
        try:
            self._receive_weights(info)
        except Exception as error:
            self._give_up(error)
            raise
        if alone:
            self.finish_weight_update()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update: requests go on, with the new weights, and with `weight_version` in their
        outputs. Raises WeightMismatch where a weight is missing a part; then the update is over.
        """
        try:
            # two calls: no core uses the new weights before all of them have come to every core
            self._prepare_weight_update()
        except Exception as error:
            self._give_up(error)
            raise
        self._commit_weight_update(weight_version)

    def _give_up(self, error: Exception) -> None:
        self._abandon_weight_update(str(error) or type(error).__name__)


class AwaitedWeightMethods(WeightVerbs, AwaitedFace):
    """Methods of `AsyncLLM`."""

    async def update_weights(self, request: WeightTransferUpdateRequest | dict[str, Any]) -> None:
        """Receive some of the weights, by the names of the model's checkpoint, in any order; the
        trainer sends them meanwhile.

        Without `start_weight_update` it is an update by itself. Raises what says why weights do not
        fit; then the update is over on all cores.
        """
        info = update_info_of(request)
        alone = not await self._is_updating_weights()
        if alone:
            await self.start_weight_update()
        try:
            await self._receive_weights(info)
        except Exception as error:
            await self._abandon_weight_update(str(error) or type(error).__name__)
            raise
        if alone:
            await self.finish_weight_update()

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update: requests go on, with the new weights, and with `weight_version` in their
        outputs. Raises WeightMismatch where a weight is missing a part; then the update is over.
        """
        try:
            # two calls, as in `BlockingWeightMethods`
            await self._prepare_weight_update()
        except Exception as error:
            await self._abandon_weight_update(str(error) or type(error).__name__)
            raise
        await self._commit_weight_update(weight_version)
