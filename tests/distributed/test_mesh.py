"""Places of workers, and the layers of stages."""

import pytest

from quire.distributed.mesh import MESH_GROUPS, Mesh, layers_of_stages


def test_ranks_count_workers_of_a_stage_first_then_stages_then_copies():
    mesh = Mesh(tp=2, pp=3, dp=2)
    places = [mesh.place(rank, core) for core in range(2) for rank in range(6)]
    assert [place.global_rank for place in places] == list(range(12))
    assert [(p.dp_rank, p.pp_rank, p.tp_rank) for p in places[5:8]] == [
        (0, 2, 1), (1, 0, 0), (1, 0, 1),
    ]  # fmt: skip
    assert mesh.world_size == 6 and mesh.sampling_rank == 4
    assert [p.rank for p in places if p.samples] == [4, 4]
    assert [p.rank for p in places[:6] if p.is_driver] == [0, 2, 4]
    assert [p.rank for p in places[:6] if p.is_first_stage] == [0, 1]
    assert [p.rank for p in places[:6] if p.is_last_stage] == [4, 5]


def test_groups_have_the_members_of_the_reference():
    place = Mesh(tp=2, pp=3, dp=2).place(3, 1)  # the second worker of the second stage
    assert {name: place.group(name) for name in MESH_GROUPS} == {
        "world": [6, 7, 8, 9, 10, 11],
        "tp": [8, 9],
        "pp": [7, 9, 11],
        "dp": [3, 9],
        "ep": [2, 3, 8, 9],
    }
    with pytest.raises(KeyError):
        place.group("pcp")


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        (12, 4, (3, 3, 3, 3)),
        (13, 4, (3, 3, 4, 3)),
        (14, 4, (3, 4, 4, 3)),
        (15, 4, (4, 4, 4, 3)),
        (7, 2, (4, 3)),
        (3, 3, (1, 1, 1)),
        (5, 1, (5,)),
    ],
)
def test_what_is_left_over_goes_to_the_stages_before_the_last(layers, stages, sizes):
    assert layers_of_stages(layers, stages) == sizes
