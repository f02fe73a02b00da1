"""Other engines' values of `quantization`: they confirm a checkpoint's, or round a plain one."""

import pytest

from quire.config.args.engine_args import EngineArgs
from quire.config.planning import make_plan
from quire.errors import InvalidParameter
from quire.testing import make_checkpoint
from tests.quantization.coded_checkpoints import FORMATS, write


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("plain"), "tiny", dtype="float32")


CONFIRMED = {
    "gptq-v1": ("gptq", "gptq_marlin", "auto_gptq"),
    "awq": ("awq", "awq_marlin", "auto_awq"),
}


@pytest.mark.parametrize("name", CONFIRMED)
def test_names_of_the_reference_confirm_how_a_checkpoint_is_stored(plain, tmp_path, name):
    write(plain, tmp_path / "model", FORMATS[name])
    folder = str(tmp_path / "model")
    for given in CONFIRMED[name]:
        make_plan(EngineArgs(model=folder, skip_tokenizer_init=True, quantization=given))
    for given in ("gpt_oss_mxfp4", "fp8_per_channel", "int8_per_channel_weight_only", "int8"):
        with pytest.raises(InvalidParameter, match=f"quantization='{given}'.* is quantised with"):
            make_plan(EngineArgs(model=folder, skip_tokenizer_init=True, quantization=given))


def test_names_of_the_reference_round_a_plain_checkpoint(plain):
    args = EngineArgs(model=str(plain), skip_tokenizer_init=True)
    args.quantization = "int8_per_channel_weight_only"
    assert make_plan(args).model.quantization == "int8_weight_only"
    args.quantization = "fp8_per_channel"
    with pytest.raises(InvalidParameter, match="quantization='fp8_per_channel'.*on the CPU"):
        make_plan(args)
