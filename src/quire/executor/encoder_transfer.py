"""Connects encoders to stores of their outputs outside of the engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from quire.config.ec_transfer_config import NAME, ECTransferConfig
from quire.config.plan_parts import ModelPlan
from quire.distributed.ec_connector import (
    ECConnectorBase,
    ECConnectorRole,
    ECExampleConnector,
)
from quire.executor.platform import Platform
from quire.executor.worker_config import WorkerConfig
from quire.models import read_spec
from quire.models.loading.folder_files import PICKLE_PATTERNS
from quire.models.vision.encoder import VisionEncoder
from quire.plugins import class_of_connector
from quire.runner.connected_encoder import ConnectedEncoder
from quire.runner.encoder_outputs import Encoder

_PATTERNS = ("*.safetensors", *PICKLE_PATTERNS)
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def naming_files(
    load: Callable[[], VisionEncoder], model: ModelPlan
) -> Callable[[], VisionEncoder]:
    """`load`, giving each encoder a name of the files that it is from."""

    def named() -> VisionEncoder:
        name = name_of_files(model)  # before, so that files that change meanwhile have another
        made = load()
        made.files_name = name
        return made

    return named


def connected(
    config: WorkerConfig, platform: Platform, encoder: Encoder, vision: VisionEncoder
) -> ConnectedEncoder:
    """The encoder with its connector. Raises InvalidParameter for a class that cannot be used."""
    model = config.model
    assert model.encoder_transfer is not None, "outputs are kept"
    connector = make_connector(model.encoder_transfer)
    decoder = read_spec(model.hf_config, model.pooler)
    width = decoder.dim * (1 + len(vision.spec.deepstack))
    like = torch.empty(width, dtype=config.torch_dtype, device=platform.device.torch)
    return ConnectedEncoder(encoder, connector, lambda: vision.files_name, like)


def make_connector(config: ECTransferConfig) -> ECConnectorBase:
    """The connector of the settings. Raises InvalidParameter."""
    kind: type[ECConnectorBase] = ECExampleConnector
    if config.ec_connector_module_path is not None:
        kind = class_of_connector(
            *(NAME, "ec_connector", config.ec_connector_module_path, config.ec_connector),
            ECConnectorBase,
        )
    return kind(SimpleNamespace(ec_transfer_config=config), ECConnectorRole.WORKER)


def name_of_files(model: ModelPlan) -> str:
    """A name of a model's weights by what its files hold: their sizes, and parts of them. The same
    for copies on other machines.
    """
    about = json.dumps(model.files_key(), sort_keys=True, default=str)
    content = hashlib.sha256(about.encode())
    folder = Path(model.model_folder)
    for file in sorted({file for pattern in _PATTERNS for file in folder.glob(pattern)}):
        size = file.stat().st_size
        content.update(f"{file.name}:{size};".encode())
        with file.open("rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                content.update(stream.read(_SAMPLE_BYTES))
    return content.hexdigest()[:32]
