"""Whether weights are in memory or in mapped files."""

import pytest

from quire.config.args.engine_args import EngineArgs
from quire.config.resolve.resolve import resolve
from quire.errors import InvalidParameter, LoadError
from tests.config.plans import GIB, H200, make_machine, make_model

DISK = {"weights_folder": "/cache/weights", "free_disk_bytes": 100 * GIB}
LARGE = {"num_parameters": 20 * GIB, "checkpoint_dtype": "bfloat16"}


def plan_of(model=(), machine=(), **args):
    args = EngineArgs(model="m", **{"max_num_seqs": 4, "max_model_len": 2048, **args})
    return resolve(args, make_model(**dict(model)), make_machine(**dict(machine)))


def test_weights_that_fit_are_in_memory():
    assert plan_of(machine=DISK).model.weights_folder is None


def test_weights_that_do_not_fit_are_mapped_and_the_plan_says_so():
    plan = plan_of(LARGE, DISK)
    assert plan.model.weights_folder == "/cache/weights"
    assert "12.00 GiB of memory are too few" in plan.reasons["weights_folder"]
    assert any("read from the disk in every step" in note for note in plan.notes)
    assert plan.memory.num_blocks > 100
    fixed = plan_of(LARGE, DISK, num_gpu_blocks_override=90)
    assert fixed.model.weights_folder == "/cache/weights"


def test_mmap_is_a_wish():
    plan = plan_of(machine=DISK, load_format="mmap")
    assert plan.model.weights_folder == "/cache/weights" and plan.model.load_format == "safetensors"
    assert "load_format=mmap" in plan.reasons["weights_folder"]


OBSTACLES = {
    "no disk": ({**DISK, "free_disk_bytes": 0}, "/cache/weights is not on a disk"),
    "too small": ({**DISK, "free_disk_bytes": 43 * GIB}, "has 43.00 GiB free, and they take 44"),
    "address space": ({**DISK, "memory_limit_source": "ulimit -v"}, "ulimit -v counts mapped"),
}


@pytest.mark.parametrize("case", OBSTACLES)
def test_what_cannot_be_mapped_is_refused_with_the_reason(case):
    machine, says = OBSTACLES[case]
    with pytest.raises(LoadError, match=f"load_format='mmap' is not possible: .*{says}"):
        plan_of(LARGE, machine, load_format="mmap")
    with pytest.raises(LoadError, match=f"No memory is left .* cannot be mapped, .*{says}"):
        plan_of(LARGE, machine)


def test_a_gpu_reads_its_own_memory():
    args = EngineArgs(model="m", load_format="mmap")
    with pytest.raises(InvalidParameter, match="load_format='mmap'.*mapped weights are for CPUs"):
        resolve(args, make_model(), H200)
