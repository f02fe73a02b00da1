"""Processes, their environment and their random numbers, as `vllm.utils` has them."""

from __future__ import annotations

import os


def update_environment_variables(envs: dict[str, str]) -> None:
    """Set variables of this process."""
    os.environ.update(envs)


def kill_process_tree(pid: int) -> None:
    """Kill a process and all that it started, the youngest first."""
    import psutil

    try:
        parent = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return
    for process in (*reversed(parent.children(recursive=True)), parent):
        try:
            process.kill()
        except psutil.NoSuchProcess:  # it has ended meanwhile
            continue


def set_random_seed(seed: int | None) -> None:
    """Seed `random`, numpy and torch in this process; engines have a seed of their own."""
    if seed is None:
        return
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
