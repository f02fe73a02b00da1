"""Platforms of plugins: the device and the ops of the workers."""

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import PluginError
from quire.executor.platform import active_platform_plugin

GROUP = "vllm.platform_plugins"
SOURCE = """
    from dataclasses import replace
    opened = []
    def probe(): return "acme.open_platform"
    def other(): return "acme:open_platform"
    def absent(): return None
    def raises(): raise OSError("no driver")
    def theirs(): return "builtins.type"
    def wrong(): return "acme:fails"
    def fails(config): raise OSError("no driver")
    def open_platform(config):
        from quire.executor.platform import open_own_platform
        platform = open_own_platform(config)
        own = platform.ops.logits
        opened.append(config.parallel.device)
        return replace(platform, ops=platform.ops.replace(logits=lambda *a, **n: -own(*a, **n)))
"""
PARAMS = SamplingParams(temperature=0, max_tokens=1, logprobs=20)


def test_its_ops_compute(packages, caplog):
    """It negates the logits, so the order of tokens is turned around."""
    options = {"enforce_eager": True, "dtype": "float32", "max_logprobs": -1}
    points = {GROUP: {"acme": "probe", "absent": "absent", "raises": "raises"}}
    packages.install("acme", SOURCE, points)
    every = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    [found] = LLM(**options).generate("The sun", every)
    import acme

    assert acme.opened == ["cuda" if torch.cuda.is_available() else "cpu"]
    assert "Platform plugin raises is left out: OSError: no driver" in caplog.text
    packages.forget()
    import os

    os.remove(packages.folder / "acme-1.0.dist-info" / "entry_points.txt")
    [usual] = LLM(**options).generate("The sun", every)
    chances = usual.outputs[0].logprobs[0]
    least = min(chances, key=lambda token: chances[token].logprob)
    assert found.outputs[0].token_ids[0] == least


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"a": "probe", "b": "other"}, "platform plugins a, b are all active: name one"),
        ({"a": "theirs"}, "that were written for vLLM have no counterpart"),
        ({"a": "wrong"}, "Platform plugin a: acme:fails failed: OSError: no driver"),
    ],
)
def test_one_that_cannot_be_used_is_said(packages, members, why):
    packages.install("acme", SOURCE, {GROUP: members})
    with pytest.raises(PluginError, match=why):
        LLM()


def test_the_environment_chooses_one(packages, monkeypatch):
    packages.install("acme", SOURCE, {GROUP: {"a": "probe", "b": "other"}})
    monkeypatch.setenv("VLLM_PLUGINS", "b")
    assert active_platform_plugin() == ("b", "acme:open_platform")
