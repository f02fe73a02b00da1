"""One worker per device: the target of `collective_rpc` and `apply_model`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from quire.distributed.world import of_worker
from quire.errors import EngineError, InvalidParameter, NotBuiltYet
from quire.executor.profiler import Profiler
from quire.executor.weight_transfer.session import WorkerWeights
from quire.executor.weight_transfer.worker_methods import WeightMethods, WorkerViews
from quire.executor.worker_config import WorkerFacts
from quire.models.adapters.weights import AdapterWeights
from quire.models.loading.load_formats import open_files
from quire.models.loading.packed_weights import PackedWeights
from quire.models.loading.readers.named_tensors import NamedTensors
from quire.models.loading.source import locate_adapter
from quire.models.spec import Decoder
from quire.params import RequestParams
from quire.params.weight_transfer import config_changes, require_checkpoint_format
from quire.runner.block_transfers import BlockTransfers
from quire.runner.model import RunnableModel
from quire.runner.residence import WEIGHTS, Residence
from quire.runner.runner import ModelRunner, NoTokens, Step
from quire.runner.warm_up import run_first_steps
from quire.step.faults import RowFailures
from quire.step.plan import StepPlan
from quire.step.transfers import TransferReport

if TYPE_CHECKING:
    from quire.distributed.expert_exchange import Rounds
    from quire.distributed.kv_connector.base import KVConnectorBase_V1
    from quire.executor.adapter_support import AdapterSupport
    from quire.executor.kv_tier.connected_ranks import ConnectedRank
    from quire.executor.kv_tier.connected_worker import ConnectedWorker

T = TypeVar("T")

_NEW_ENGINE = "Start a new engine."


class SaveWeights(Protocol):
    """Writes a worker's weights into a folder, and returns the files."""

    def __call__(
        self, target: Path, *, pattern: str | None = None, max_size: int | None = None
    ) -> list[Path]: ...


class Worker(WeightMethods, WorkerViews):
    """A device with its runner."""

    model_runner: ModelRunner
    facts: WorkerFacts
    rank: int
    launch: Callable[..., Step | NoTokens]
    """launch(plan) starts a step on this device, see `ModelRunner.launch`."""
    needs_host_ids: Callable[[RequestParams], bool]
    _residence: Residence
    _save: SaveWeights | None
    _profiler: Profiler | None
    _adapters: AdapterSupport | None
    _stored: PackedWeights | None

    def __init__(
        self,
        runner: ModelRunner,
        residence: Residence,
        facts: WorkerFacts,
        rank: int = 0,
        *,
        save: SaveWeights | None,
        profiler: Profiler | None = None,
        adapters: AdapterSupport | None = None,
        stored: PackedWeights | None = None,
        weights: WorkerWeights | None = None,
        place: tuple[int, int, int] = (0, 1, 1),
        folder: Path | None = None,
    ) -> None:
        """`save` writes the worker's weights; None: the model is one of transformers. `profiler`
        None: profiling is not possible. `adapters` None: the engine has none. `stored`: packed
        weights that are kept for later starts; None: none are. `weights` None: the model's are
        those of the start. `place`: the number of the core, and of the workers that share a layer
        and that run the model. `folder`: the model's.
        """
        self.model_runner = runner
        self.facts = facts
        self.rank = rank
        self._residence = residence
        self._save = save
        self._profiler = profiler
        self._adapters = adapters
        self._stored = stored
        self.connect: Callable[[Any], tuple[KVConnectorBase_V1, ConnectedWorker]] | None = None
        """Makes the connector of a plan; None: there is none."""
        self.connected: ConnectedWorker | None = None
        self.connected_rank: ConnectedRank | None = None
        """This rank's half of a connector; None: there is none, or the engine has no ranks."""
        self.rounds: Rounds | None = None
        """Rounds of cores that share experts, where this is a rank; None: it takes no part."""
        self.origin: Callable[[], list[str]] | None = None
        """Names what the tokens depend on; see `name_origin`."""
        self.weights = weights or WorkerWeights(runner.model, None, None)
        self.dp_rank, self.tp_size, self.world_size = place
        self._folder = folder
        self._files_at_start = self.weights.files
        self._note_files()
        self._launch = runner.launch if profiler is None else self._launch_profiled
        self.launch = self._launch
        self.weights.on_pending = self._settle_at_launch
        self.needs_host_ids = runner.needs_host_ids

    @property
    def device(self) -> torch.device:
        """Device of the model and of the tensors of steps."""
        return self.model_runner.device.torch

    @property
    def local_rank(self) -> int:
        """The same as `rank`, also where the workers of a core are on several machines."""
        return self.rank

    def idle_round(self, is_unfinished: bool, is_ending: bool) -> tuple[bool, bool]:
        """Make a round without rows, as a rank of a core that shares experts; `is_ending`: see
        `Rounds`. Returns what `Rounds.idle_round` does, and whether all cores end.
        """
        rounds = self.rounds
        assert rounds is not None, "the core shares experts"
        rounds.is_ending = is_ending
        return rounds.idle_round(is_unfinished), rounds.all_end

    def name_origin(self) -> list[str]:
        """The root of this worker's K/V, and the name of the model; see `RootParts.origin`."""
        assert self.origin is not None, "a builder has made the worker"
        return self.origin()

    def take_transfers(self) -> TransferReport:
        """Return what has become of the transfers of plans since the last time."""
        return self._transfers.take_report()

    def wait_for_transfers(self, timeout_s: float) -> None:
        """Wait until there is something to take, at most for `timeout_s`."""
        self._transfers.wait(timeout_s)

    def settle_transfers(self) -> None:
        """Return when no transfer is under way; loads that wait for files have failed."""
        self._transfers.settle()

    def forget_tier(self, keeps_files: bool) -> None:
        """Forget what the tier has; no transfer is under way. keeps_files: see
        `BlockTransfers.forget`.
        """
        self._transfers.forget(keeps_files=keeps_files)

    @property
    def _transfers(self) -> BlockTransfers:
        found = self.model_runner.transfers
        assert found is not None, "there is no tier"
        return found

    def open_connector(self, plan: Any) -> tuple[KVConnectorBase_V1, ConnectedWorker]:
        """Make the connector of a plan: the scheduler's half, and this worker's."""
        assert self.connect is not None, "there is no connector"
        first, self.connected = self.connect(plan)
        return first, self.connected

    def call_connector(self, method: str, args: list[Any]) -> Any:
        """Call this rank's half of a connector: a method of `ConnectedRank`."""
        assert self.connected_rank is not None, "there is a connector"
        return getattr(self.connected_rank, method)(*args)

    def close(self) -> None:
        if self.connected_rank is not None:
            self.connected_rank.close()
        if self.model_runner.transfers is not None:
            self.model_runner.transfers.close()
        if self._profiler is not None:
            self._profiler.stop()
        if self._stored is not None:
            self._stored.close()
        self.weights.close()

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a method or function for this worker, whose place `get_world_group` gives."""
        with of_worker(self.rank, self.world_size):
            return function(*args, **kwargs)

    def get_model(self) -> RunnableModel:
        return self.model_runner.model

    def apply_model(self, func: Callable[[RunnableModel], Any]) -> Any:
        """Return func(model), which may inspect or modify the model."""
        return func(self.get_model())

    def run_first_steps(self) -> None:
        """Run what the first requests would wait for; where kernels are compiled it has run."""
        if self.facts.has_own_memory:
            return
        spec, runner = self.get_model().spec, self.model_runner
        pooler = spec.pooler if isinstance(spec, Decoder) else None
        run_first_steps(
            runner,
            max_len=runner.rows.token_ids.shape[1],
            tasks=() if pooler is None else pooler.tasks,
            generates=pooler is None or pooler.also_generates,
        )

    def kv_cache_bytes(self) -> int:
        """The memory of this worker's KV cache in bytes; 0 while it is released."""
        return self.model_runner.kv_cache.nbytes

    def sleep(self, tags: list[str], keep_weights: bool = False) -> None:
        """Release the memory of "weights", "kv_cache" or both; no step may be in flight.
        keep_weights: keep them in host memory.
        """
        if self.model_runner.media is not None:
            self.model_runner.media.clear()
        if WEIGHTS in tags:
            # first: a snapshot that is being written reads the memory that is given up
            self.weights.released()
        self._residence.release(tags, keep_weights=keep_weights)

    def wake_up(self, tags: list[str]) -> None:
        """Restore the memory: kept weights are copied back, others loaded as at the start; the KV
        cache is empty.
        """
        before = self._residence.loaded_at
        self._residence.restore(tags)
        if self._residence.loaded_at != before:
            self._note_files()
        # the memory is another one than before
        if self.connected is not None:
            self.connected.register()

    def _settle_at_launch(self) -> None:
        """Have the next step end what `load_weights` has begun on the model."""

        def launch(plan: StepPlan, *given: Any, **named: Any) -> Step | NoTokens:
            try:
                self.weights.settle()
            except EngineError as error:
                if plan.num_tokens:
                    rows = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]
                    raise RowFailures(dict.fromkeys(rows, str(error))) from error
                return self._launch(plan, *given, **named)  # the rows change
            self.launch = self._launch
            return self._launch(plan, *given, **named)

        # instead of a look in every step, which nearly no engine needs
        self.launch = launch

    def reload_weights(
        self,
        weights_iterator: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor] | None = None,
        weights_path: str | Path | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        """Load the checkpoint again, in place of the present weights; or that of the folder
        `weights_path`, from now on; or the tensors of `weights_iterator`, which have the names,
        shapes and types of a checkpoint, all of them, and are copied.

        Raises LoadError if they do not fit the model; then the present weights stay. Raises
        NotBuiltYet for tensors of another format, and for other weights of a model of transformers.
        """
        require_checkpoint_format(is_checkpoint_format)
        self.weights.released()  # a snapshot that is being written holds the old ones in memory
        self._reload(weights_iterator, weights_path)
        self.weights.replaced()
        if weights_iterator is None:
            self._note_files()
        else:
            self.weights.are_of(None)

    def update_config(
        self, overrides: Mapping[str, Mapping[str, Any]], is_restored: bool = False
    ) -> None:
        """Change what `reload_weights` reads from now on: `load_config` with `load_format`, and
        `model_config` with `model`, a folder. is_restored: by a core before this one, which may
        have read them, so they are read now.

        Raises InvalidParameter for anything else, NotBuiltYet for weights that files do not have by
        their names, and for a model of transformers.
        """
        load_format, folder = config_changes(overrides)
        spec = self.get_model().spec
        if not isinstance(spec, Decoder) or self._folder is None:
            raise NotBuiltYet("method", "update_config with model_impl=transformers", _NEW_ENGINE)
        self._folder = folder or self._folder
        self._residence.read_from(partial(open_files, load_format, self._folder, spec))
        if is_restored:
            self.reload_weights()

    def _note_files(self) -> None:
        """The weights were read from files again."""
        files = self._residence.files or self._files_at_start
        self.weights.are_of(files, self._residence.loaded_at)

    def _reload(
        self,
        weights_iterator: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor] | None,
        weights_path: str | Path | None,
    ) -> None:
        if weights_iterator is None and weights_path is None:
            self._residence.reload_weights()
            return
        if weights_iterator is not None and weights_path is not None:
            allowed = "it cannot be given with weights_iterator"
            raise InvalidParameter("weights_path", str(weights_path), allowed, "Leave one out.")
        spec = self.get_model().spec
        if not isinstance(spec, Decoder):
            value = "reload_weights of other weights with model_impl=transformers"
            raise NotBuiltYet("method", value, _NEW_ENGINE)
        if weights_path is not None:
            self._residence.reload_weights(partial(open_files, "auto", Path(weights_path), spec))
            self._folder = Path(weights_path)
            return
        assert weights_iterator is not None
        given = (
            weights_iterator.items() if isinstance(weights_iterator, Mapping) else weights_iterator
        )
        pairs = list(given)
        self._residence.reload_weights(lambda: NamedTensors(pairs), stays_open=False)

    def save_sharded_state(
        self, path: str, pattern: str | None = None, max_size: int | None = None
    ) -> list[str]:
        """Write this worker's part of the weights into a folder, for load_format="sharded_state";
        returns the files. `max_size`: bytes of a file at most; `pattern` None: the only names.

        Raises InvalidParameter for another pattern, NotBuiltYet for a quantised checkpoint or a
        model of transformers, LoadError for what cannot be read or written.
        """
        if self._save is None:
            value = "save_sharded_state with model_impl=transformers"
            raise NotBuiltYet("method", value, "Keep the checkpoint.")
        return [str(f) for f in self._save(Path(path), pattern=pattern, max_size=max_size)]

    def profile(
        self,
        is_start: bool = True,
        prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> str | None:
        """Start a trace of this worker's steps, or end it and give its file's path; the numbers of
        steps stand in place of those of `profiler_config`.

        Raises InvalidParameter if the engine was made without `profiler_config`, or if a trace is
        already running (for a start) or not running (for an end).
        """
        if self._profiler is None:
            raise InvalidParameter(
                "profiler_config", None, "the engine was made without it",
                'Pass profiler_config={"profiler": "torch", "torch_profiler_dir": FOLDER}.',
            )  # fmt: skip
        if is_start:
            self._profiler.start(prefix, self.rank, delay_iterations, max_iterations)
            return None
        path = self._profiler.stop()
        return None if path is None else str(path)

    def read_adapter(self, folder: str) -> int:
        """Read and keep the adapter in a folder; returns its number, which follows from its
        contents. Steps may run meanwhile. Raises RequestError subclasses that say what is wrong
        with it.
        """
        adapters = self.model_runner.adapters
        assert self._adapters is not None and adapters is not None, "adapters are not enabled"
        return adapters.keep(self._adapters.read(locate_adapter(Path(folder))))

    def check_adapter(self, folder: str) -> None:
        """Raise what `read_adapter` raises, as far as it shows before values are read."""
        assert self._adapters is not None, "adapters are not enabled"
        self._adapters.check(locate_adapter(Path(folder)))

    def keep_adapter(self, adapter: AdapterWeights) -> int:
        """Keep an adapter that fits the model; returns its number."""
        assert self.model_runner.adapters is not None, "adapters are not enabled"
        return self.model_runner.adapters.keep(adapter)

    def drop_adapter(self, number: int) -> None:
        """Forget a kept adapter; a slot that has it still does."""
        assert self.model_runner.adapters is not None, "adapters are not enabled"
        self.model_runner.adapters.drop(number)

    def check_health(self) -> None:
        """Do nothing: a worker that answers is healthy."""

    def get_supported_tasks(self) -> tuple[str, ...]:
        """The kinds of requests that the model supports."""
        return self.model_runner.heads.tasks

    def _launch_profiled(self, plan: StepPlan, *given: Any, **named: Any) -> Step | NoTokens:
        assert self._profiler is not None
        with self._profiler.step(plan.step_id, plan.num_tokens):
            return self.model_runner.launch(plan, *given, **named)
