"""Cells of the matrix of ranks: processes that have the bits of one.

`python -m benchmarks.ranks` runs all cells.
"""

from __future__ import annotations

import pytest

from benchmarks.ranks import cells, same
from tests.executor.test_shared_poolers import some
from tests.support.needs import needs_ranks

pytestmark = needs_ranks
CELLS = {
    "drafts of eagle3": "tp 2 x pp 2",
    "mixtral float32 experts recorded": "pp 2",
    "pictures qwen3_vl": "tp 2 x pp 2",
    "pooled bert-relu": "pp 2",
    "format awq": "tp 4",
    "format fp8-blocks": "tp 2 x pp 2",
    "nine heads drafts": "tp 3",
    "llama float32 copies": "dp 2 x tp 2",
    "mixtral float32 copies that share experts": "ep 2",
    "mixtral float32 copies that share experts few blocks": "dp 2 x tp 2 -ep",
    "hostile deepseek_v3 copies that share experts": "dp 2 x tp 2 -ep",
}


@pytest.mark.parametrize("name", some(CELLS, {"mixtral float32 experts recorded"}))
def test_a_cell_has_the_bits_of_one_rank(name, tmp_path):
    """Or where its plan says that it has bits of its own, always these."""
    (cell,) = (cell for cell in cells(tmp_path) if cell.name == name)
    sizes = cell.sizes[CELLS[name]]
    found = cell.ask(**sizes)
    assert same(found, cell.ask(**sizes) if cell.has_own(**sizes) else cell.ask())
