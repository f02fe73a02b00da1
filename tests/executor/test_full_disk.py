"""A full disk: errors of writing name the file, and cost no request but those that write."""

import errno
import os

import pytest

from quire import LLM, SamplingParams
from quire.errors import LoadError
from quire.executor import profiler
from quire.file_errors import naming
from quire.models.loading import sharded_state

ARGS = {"dtype": "float32", "num_gpu_blocks_override": 60, "max_model_len": 64}


def no_space():
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_error_without_a_name_gets_one_and_keeps_its_class():
    with pytest.raises(OSError, match=r"No space left on device: '/a'") as caught, naming("/a"):
        raise no_space()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/a")
    with pytest.raises(BrokenPipeError, match="/a"), naming("/a"):
        raise OSError(errno.EPIPE, "Broken pipe")
    for other in (OSError("no number"), FileNotFoundError(errno.ENOENT, "not there", "/b")):
        with pytest.raises(OSError) as caught, naming("/a"):
            raise other
        assert caught.value is other


def test_weights_that_do_not_fit_name_their_file(tmp_path, monkeypatch):
    def save(tensors, file, metadata):
        raise sharded_state.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(sharded_state, "save_file", save)
    with LLM(**ARGS) as llm:
        with pytest.raises(LoadError, match="No space left on device") as caught:
            llm.save_sharded_state(str(tmp_path / "weights"))
        assert str(tmp_path / "weights") in str(caught.value)


def write_nothing(trace, file):
    with open(file, "w") as stream:
        stream.write("a part")
    raise no_space()


@pytest.mark.parametrize("most", [0, 2], ids=["when it is stopped", "after a step"])
def test_a_trace_that_does_not_fit_names_its_file_and_fails_no_request(tmp_path, monkeypatch, most):
    monkeypatch.setattr(profiler.torch.profiler.profile, "export_chrome_trace", write_nothing)
    config = {"profiler": "torch", "torch_profiler_dir": str(tmp_path), "max_iterations": most}
    with LLM(profiler_config=config, **ARGS) as llm:
        for _ in range(2):
            llm.start_profile()
            [output] = llm.generate("a", SamplingParams(max_tokens=6), use_tqdm=False)
            assert output.outputs[0].finish_reason == "length"
            with pytest.raises(OSError, match="No space left on device") as caught:
                llm.stop_profile()
            assert str(caught.value.filename).startswith(str(tmp_path))
            assert list(tmp_path.iterdir()) == [], "no part of a file is left"
            llm.stop_profile()
