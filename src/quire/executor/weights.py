"""Loading of a worker's weights, at the start and after sleep, and saving of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.distributed.expert_exchange import ExpertExchange
from quire.distributed.worker_group import WorkerGroup
from quire.environment import read_environment
from quire.executor.packed_file import packed_file
from quire.executor.platform import Platform
from quire.executor.weight_transfer.session import OpenUpdate
from quire.executor.worker import SaveWeights
from quire.executor.worker_config import WorkerConfig
from quire.models import find_family, read_spec
from quire.models.cutting.stages import memory_places
from quire.models.decoder import DecoderModel
from quire.models.drafting.network import DraftNetwork
from quire.models.formats import read_storage
from quire.models.loading.load_formats import open_files
from quire.models.loading.options import AdapterRoom, ModelOptions
from quire.models.loading.packed_weights import PackedWeights
from quire.models.loading.weight_placement import WeightPlacement
from quire.models.loading.weights import check_weights, load_model, save_sharded_state
from quire.models.spec import Decoder, PipelineStage
from quire.ops import Ops
from quire.runner.model import RunnableModel
from quire.runner.residence import OpenFiles

if TYPE_CHECKING:
    from quire.executor.weight_transfer.engines import WeightTransferEngine
    from quire.executor.weight_transfer.snapshots import Snapshots
    from quire.models.updates.plan import UpdatePlan
    from quire.models.updates.update import WeightUpdate


def make_loader(
    config: WorkerConfig,
    platform: Platform,
    exchange: ExpertExchange | None,
    group: WorkerGroup | None,
    room: AdapterRoom | None,
    network: DraftNetwork | None,
    stored: PackedWeights | None,
    stage: PipelineStage | None = None,
) -> Callable[[], RunnableModel]:
    """Return the function that loads the weights, at the start and after sleep: of a `stage` those
    of its layers. `stored` has those that were packed before.
    """
    if config.model.is_foreign:
        from quire.models.foreign.load import load_foreign_model  # few models are transformers'

        assert exchange is None and group is None, "one core, one worker"
        return partial(
            load_foreign_model,
            Path(config.model.model_folder),
            config.model.hf_config,
            platform.ops,
            dtype=config.torch_dtype,
            device=platform.device,
            load_format=config.weights_format,
            seed=config.weights_seed,
        )
    given, named = _arguments(config, platform, exchange, group, room, network, stored, stage)
    return partial(load_model, *given, **named)


def make_updater(
    config: WorkerConfig,
    platform: Platform,
    model: RunnableModel,
    exchange: ExpertExchange | None,
    group: WorkerGroup | None,
    room: AdapterRoom | None,
    network: DraftNetwork | None,
    stage: PipelineStage | None = None,
    has_encoders: bool = False,
) -> OpenUpdate | None:
    """Return the function that begins an update of the model, which `make_loader` has loaded; None
    for a model of transformers. has_encoders: see `UpdatePlan`.
    """
    if not isinstance(model, DecoderModel):
        return None

    plans: list[UpdatePlan] = []

    def begin(*, is_repair: bool) -> WeightUpdate:
        from quire.models.updates.plan import UpdatePlan  # few engines have new weights
        from quire.models.updates.update import WeightUpdate

        if not plans:
            given, named = _arguments(config, platform, exchange, group, room, network, None, stage)
            named |= {"writer": platform.writer, "has_encoders": has_encoders}
            plans.append(UpdatePlan(model, *given, **named))
        return WeightUpdate(plans[0], is_repair=is_repair)

    return begin


def make_transfer(
    config: WorkerConfig, platform: Platform, model: RunnableModel, rank: int
) -> Callable[[], WeightTransferEngine] | None:
    """Return the function that makes what receives a trainer's weights; None: the engine was
    started without it. `rank`: the worker's number in its core.
    """
    plan = config.parallel.weight_transfer
    if plan is None:
        return None
    from quire.executor.weight_transfer.backends import find_engine  # few engines have a trainer

    kind = find_engine(plan.backend)
    size = config.parallel.mesh.world_size

    def make() -> WeightTransferEngine:
        engine = kind(plan, config.plan, platform.device.torch, model)
        engine.rank = plan.core * size + rank
        return engine

    return make


def checkpoint_files(config: WorkerConfig) -> OpenFiles | None:
    """The function that opens the files of a worker's weights; None: they are in none."""
    if config.model.is_foreign or config.weights_format in ("dummy", "sharded_state"):
        return None
    decoder = read_spec(config.model.hf_config, config.model.pooler)
    return partial(open_files, config.weights_format, Path(config.model.model_folder), decoder)


def make_snapshots(config: WorkerConfig, rank: int) -> Snapshots | None:
    """Make what keeps updated weights for a core that restarts; None: nothing does."""
    plan = config.parallel.weight_transfer
    if plan is None or not plan.snapshots:
        return None
    from quire.executor.weight_transfer.snapshots import Snapshots

    return Snapshots(read_environment().cache_dir / "updated", f"{plan.core}-{rank}")


def _arguments(
    config: WorkerConfig,
    platform: Platform,
    exchange: ExpertExchange | None,
    group: WorkerGroup | None,
    room: AdapterRoom | None,
    network: DraftNetwork | None,
    stored: PackedWeights | None,
    stage: PipelineStage | None,
) -> tuple[tuple[Path, Decoder, Ops], dict[str, Any]]:
    """The arguments of `load_model`."""
    decoder = read_spec(config.model.hf_config, config.model.pooler)
    return (Path(config.model.model_folder), decoder, platform.ops), {
        "dtype": config.torch_dtype,
        "kv_dtype": config.kv_dtype,
        "device": platform.device.torch,
        "load_format": config.weights_format,
        "weights_folder": config.weights_folder,
        "seed": config.weights_seed,
        "max_model_len": config.max_len,
        "family": find_family(config.model.hf_config, config.model.pooler),
        "storage": read_storage(config.model.hf_config),
        "options": ModelOptions(
            recipe=config.recipe,
            spread=exchange,
            group=group,
            stage=stage,
            first_layer=0 if stage is None else memory_places(decoder, stage).start,
            aux_layers=_aux_layers(config, network, stage),
            keeps_experts=config.reports_experts,
            make_placement=_placement_maker(config, platform),
            adapter_room=room,
            stored=stored,
        ),
    }


def make_checker(
    config: WorkerConfig, platform: Platform, group: WorkerGroup | None
) -> Callable[[], None]:
    """Return the function that raises LoadError where the loader would, as far as it shows before
    weights are read. A model of transformers shows nothing.
    """
    if config.model.is_foreign:
        return lambda: None
    return partial(
        check_weights,
        Path(config.model.model_folder),
        read_spec(config.model.hf_config, config.model.pooler),
        kv_dtype=config.kv_dtype,
        **_files(config, platform, group),
    )


def stored_weights(
    config: WorkerConfig,
    platform: Platform,
    exchange: ExpertExchange | None,
    group: WorkerGroup | None,
) -> PackedWeights | None:
    """The packed weights of earlier starts; None where none are kept."""
    if platform.codec is None or exchange is not None or group is not None:
        return None
    find_path = partial(packed_file, config.model, config.parallel)
    if find_path() is None:
        return None
    return PackedWeights(find_path, platform.codec, config.model.packed_weights_bytes)


def make_saver(
    config: WorkerConfig,
    platform: Platform,
    group: WorkerGroup | None,
    stage: PipelineStage | None = None,
) -> SaveWeights | None:
    """Return the function that writes the worker's part of the weights; None for a model of
    transformers, whose weights are not parts of a decoder.
    """
    if config.model.is_foreign:
        return None
    return partial(
        save_sharded_state,
        Path(config.model.model_folder),
        read_spec(config.model.hf_config, config.model.pooler),
        seed=config.weights_seed,
        stage=stage,
        **_files(config, platform, group),
    )


def _files(config: WorkerConfig, platform: Platform, group: WorkerGroup | None) -> dict[str, Any]:
    """Ways of reading the files of a worker's weights, as arguments of `check_weights` and
    `save_sharded_state`.
    """
    return {
        "device": platform.device.torch,
        "load_format": config.weights_format,
        "family": find_family(config.model.hf_config, config.model.pooler),
        "storage": read_storage(config.model.hf_config),
        "recipe": config.recipe,
        "group": group,
    }


def _aux_layers(
    config: WorkerConfig, network: DraftNetwork | None, stage: PipelineStage | None
) -> tuple[int, ...]:
    """The layers whose input a pass returns: for what drafts, or for what is written to files. Of a
    stage those that it has, counted from its first.
    """
    layers = () if network is None else network.aux_layers
    if config.sampling.hidden_states is not None:
        layers = config.sampling.hidden_states.layers
    if stage is None:
        return layers
    # the output of the last layer has the number of one more, which no other stage has
    end = stage.last + stage.is_last
    return tuple(layer - stage.first for layer in layers if stage.first <= layer < end)


def _placement_maker(
    config: WorkerConfig, platform: Platform
) -> Callable[[], WeightPlacement] | None:
    """Return the function that makes what keeps weights on the host; None: none are there."""
    offload = config.model.offload
    if offload is None:
        return None
    from quire.runner.offloaded_weights import OffloadedWeights  # few engines offload

    assert platform.driver is not None, "weights are offloaded from a device with its own memory"
    return partial(
        OffloadedWeights,
        *(platform.driver, offload.layers, offload.num_buffers, offload.weights),
    )
