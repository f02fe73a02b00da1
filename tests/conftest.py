"""No test talks to a model hub: the libraries are told so before they are imported."""

import os

from hypothesis import HealthCheck, settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A busy machine is no failure: examples may take as long as they take.
settings.register_profile(
    "patient",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("patient")


def pytest_addoption(parser):
    parser.addoption(
        "--all-kernel-cases", action="store_true", help="every case of every Triton kernel"
    )
