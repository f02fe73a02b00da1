import pytest

from quire.bench import machine_limits


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache folder of its own, and limits that are measured in no time."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(machine_limits, "_READ_BYTES", 2 << 20)
    monkeypatch.setattr(machine_limits, "_LARGEST", 64)
    monkeypatch.setattr(machine_limits, "_ROUNDS", 10)
    return tmp_path
