"""More and fewer cores over HTTP, between completions."""

import pytest

from tests.server.conftest import KEYS

pytestmark = pytest.mark.slow

KEY = {"Authorization": f"Bearer {KEYS[0]}"}


def completion(server):
    body = {"model": "", "prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}
    reply = server.post("/v1/completions", body, headers=KEY)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


def test_cores_come_and_go(guarded):
    before = completion(guarded)
    for size in (2, 1):
        reply = guarded.post("/scale_elastic_ep", {"new_data_parallel_size": size}, headers=KEY)
        assert reply.status_code == 200, reply.text
        message = f"Scaled to {size} data parallel engines"
        assert reply.json() == {"message": message, "data_parallel_size": size}
        plan = guarded.get("/server_info", headers=KEY).json()["plan"]
        assert plan["data_parallel_size"]["value"] == size
        state = guarded.post("/is_scaling_elastic_ep", {}, headers=KEY)
        assert state.json() == {"is_scaling_elastic_ep": False}
        assert completion(guarded) == before


@pytest.mark.parametrize("body", [{}, {"new_data_parallel_size": 0}, {"new": 2}])
def test_sizes_that_cannot_be_are_refused(guarded, body):
    assert guarded.post("/scale_elastic_ep", body, headers=KEY).status_code == 400
