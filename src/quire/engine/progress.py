"""The progress bar of offline generation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self

from quire.outputs import RequestOutput
from quire.pooling_outputs import PoolingRequestOutput


class Progress:
    """A tqdm bar of finished requests with tokens per second; `make_bar`: True, or as `tqdm`."""

    def __init__(self, make_bar: bool | Callable[..., Any], total: int, description: str) -> None:
        self._bar = _bar_maker(make_bar)(total=total, desc=description, dynamic_ncols=True)
        self._start = time.monotonic()
        self._num_input = 0
        self._num_output = 0
        self._num_failed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def tick(self) -> None:
        self._bar.update(1)

    def note(
        self, output: RequestOutput | PoolingRequestOutput[Any], *, is_failed: bool = False
    ) -> None:
        completions = output.outputs if isinstance(output, RequestOutput) else ()
        self._num_input += len(output.prompt_token_ids or ()) * max(len(completions), 1)
        self._num_output += sum(len(completion.token_ids) for completion in completions)
        self._num_failed += is_failed
        seconds = max(time.monotonic() - self._start, 1e-9)
        self._bar.set_postfix_str(
            f"input {self._num_input / seconds:.1f} tokens/s, "
            f"output {self._num_output / seconds:.1f} tokens/s"
            + (f", {self._num_failed} failed" if self._num_failed else ""),
            refresh=False,
        )
        self._bar.update(1)


def _bar_maker(use_tqdm: bool | Callable[..., Any]) -> Callable[..., Any]:
    if callable(use_tqdm):
        return use_tqdm
    from tqdm.auto import tqdm  # 20 ms that a call without a bar need not spend

    maker: Callable[..., Any] = tqdm
    return maker
