"""Processes as a group that exchanges bytes in the memory of GPUs, by NCCL."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor, distributed

from quire.errors import PeersLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class NcclGroup:
    """`size` processes with a GPU each, of which this is number `rank`, as a `ByteGroup`.

    Calls are queued on the current stream of the GPU, and the host does not wait for them: that
    another process is gone shows where results are read, or by the watcher of ranks.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        """Join; the first call waits for all processes. `store` has nothing of an earlier group.

        Raises PeersLost where NCCL is not there or cannot begin.
        """
        self.rank, self.size = rank, size
        nccl: Any = getattr(distributed, "ProcessGroupNCCL", None)  # builds for CPUs have none
        if nccl is None:
            raise PeersLost("This build of torch has no NCCL, which ranks on GPUs exchange by.")
        options = nccl.Options()
        options._timeout = timedelta(seconds=timeout_s)
        try:
            self._group: Any = nccl(store, rank, size, options)
        except RuntimeError as error:
            raise PeersLost(f"The group of GPUs did not begin: {error}") from error

    def all_gather_bytes(self, sent: Tensor) -> Tensor:
        """As `ByteGroup.all_gather_bytes`, in the memory of this rank's GPU."""
        received = sent.new_empty(self.size, len(sent))
        if not len(sent):
            return received
        try:
            self._group._allgather_base(received.view(-1), sent).wait()
        except RuntimeError as error:
            raise PeersLost(f"Another one of the group is gone: {error}") from error
        return received

    def close(self) -> None:
        """End what is under way, here and on the others. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
