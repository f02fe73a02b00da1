"""What the plan of a model that runs through transformers refuses."""

import pytest

from quire.config.args.engine_args import EngineArgs
from quire.config.resolve.resolve import resolve
from quire.errors import LoadError, NotBuiltYet
from tests.config.plans import H200, LAPTOP, make_machine, make_model
from tests.config.test_mapping import DISK, LARGE

IMPL = {"model_impl": "transformers", "model_impl_reason": "model_impl was given"}


def plan_of(model=(), machine=LAPTOP, **args):
    args = EngineArgs(model="m", **{"max_num_seqs": 4, "max_model_len": 2048, **args})
    return resolve(args, make_model(**IMPL, **dict(model)), machine)


@pytest.mark.parametrize("load_format", ["pt", "mistral", "runai_streamer", "sharded_state"])
def test_files_that_transformers_does_not_read_are_refused(load_format):
    says = f"load_format='{load_format} with model_impl=transformers'.* with the model's safetens"
    with pytest.raises(NotBuiltYet, match=says):
        plan_of(load_format=load_format)


@pytest.mark.parametrize("found", ["pt", "mistral"])
def test_files_that_auto_finds_are_refused_as_well(found):
    with pytest.raises(NotBuiltYet, match=f"'{found} with model_impl=transformers'"):
        plan_of({"weights_format": found})


def test_weights_are_not_mapped():
    for machine in (make_machine(**DISK), H200):
        with pytest.raises(NotBuiltYet, match=r"'mmap with .* Use 'auto': its weights are in mem"):
            plan_of(machine=machine, load_format="mmap")
    with pytest.raises(LoadError, match=r"No memory is left .* of transformers are not mapped"):
        plan_of(LARGE, make_machine(**DISK))


@pytest.mark.parametrize("load_format", ["auto", "hf", "safetensors", "dummy"])
def test_other_formats_are_planned(load_format):
    plan = plan_of(load_format=load_format)
    assert plan.model.load_format == ("dummy" if load_format == "dummy" else "safetensors")
    assert plan.model.weights_folder is None
