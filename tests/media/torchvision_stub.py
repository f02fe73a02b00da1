"""Stands in for torchvision, which some modules of transformers cannot do without."""

import importlib
import sys
import types

import numpy as np
from PIL import Image


def with_pillow_for_torchvision(monkeypatch):
    """Three classes of transformers know torchvision alone: they get resizing by Pillow."""
    import torch

    # before there is something of that name, so that nobody takes it for the library
    backends = importlib.import_module("transformers.image_processing_backends")

    def resize(images, size, interpolation, antialias):
        assert antialias
        height, width = size
        flat = images.reshape(-1, *images.shape[-3:])
        made = [
            np.asarray(
                Image.fromarray(one.permute(1, 2, 0).numpy()).resize(
                    (width, height), int(interpolation)
                )
            )
            for one in flat
        ]
        stacked = torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2)
        return stacked.reshape(*images.shape[:-2], height, width)

    def pad(images, padding, fill=0, padding_mode="constant"):
        left, top, right, bottom = padding
        assert padding_mode == "constant" and not np.any(fill) and (left, top) == (0, 0)
        return torch.nn.functional.pad(images, (0, right, 0, bottom))

    def normalize(images, mean, std, inplace=False):
        mean = torch.as_tensor(mean, dtype=images.dtype).view(-1, 1, 1)
        std = torch.as_tensor(std, dtype=images.dtype).view(-1, 1, 1)
        return (images - mean) / std

    functional = types.ModuleType("torchvision.transforms.v2.functional")
    functional.resize, functional.pad, functional.normalize = resize, pad, normalize
    functional.InterpolationMode = types.SimpleNamespace(LANCZOS=1, BILINEAR=2, BICUBIC=3)
    functional.grayscale_to_rgb = lambda image: image
    v2 = types.ModuleType("torchvision.transforms.v2")
    v2.functional = functional
    for name, module in {
        "torchvision": types.ModuleType("torchvision"),
        "torchvision.transforms": types.ModuleType("torchvision.transforms"),
        "torchvision.transforms.v2": v2,
        "torchvision.transforms.v2.functional": functional,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(backends, "tvF", functional, raising=False)
    numbers = {number: number for number in range(6)}
    monkeypatch.setattr(backends, "pil_torch_interpolation_mapping", numbers)
    monkeypatch.setattr(backends, "is_torchvision_greater_or_equal", lambda version: True)
    checks = importlib.import_module("transformers.utils.import_utils")
    monkeypatch.setitem(checks.BACKENDS_MAPPING, "torchvision", (lambda: True, ""))
