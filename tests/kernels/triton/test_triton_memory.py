"""The watch over Triton's interpreter reports what a GPU punishes, and the kernels do none of it on
tensors of more than 2^31 elements either. Small tensors: test_triton_ops.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.needs import needs_triton

HERE = Path(__file__).parent
BETWEEN, WITHIN, OUTSIDE = "programs race", "threads of a program race", "out of bounds"
SAME = "programs write the same value to one place"

PLANTED = {
    "read what another program writes": BETWEEN,
    "lost update": BETWEEN,
    "atomic and plain": BETWEEN,
    "through memory": WITHIN,
    "stored before it is loaded": WITHIN,
    "in place, several threads a lane": WITHIN,
    "several values in one place": WITHIN,
    "behind the end": OUTSIDE,
    "before the start": OUTSIDE,
    "no memory at all": OUTSIDE,
    "blocks overlap": BETWEEN,
    "blocks overlap, same value": SAME,
    "outputs overlap": BETWEEN,
    "a byte of a word": BETWEEN,
    "a grid too large": "no GPU has a grid of (1, 65536, 1)",
}
TWINS = (
    "read what it writes itself",
    "a counter for each program",
    "atomic counter",
    "through memory, barrier",
    "stored before it is loaded, barrier",
    "in place, a thread a lane",
    "one value in one place",
    "up to the end",
    "blocks lie apart",
    "outputs lie apart",
    "the byte behind a word",
    "a grid as large",
)
BIG = (
    "attention_reads_the_last_block",
    "a_prompt_takes_no_room_for_shares_of_keys",
    "keys_are_kept_in_the_last_block",
    "latents_of_the_last_block",
    "latents_are_kept_in_the_last_block",
    "products_of_many_heads",
    "tokens_of_many_rows",
    "edits_of_the_last_row",
    "products_of_many_outputs",
    "products_with_the_last_expert",
    "rows_and_elements",
    "sum_of_choices",
)

pytestmark = needs_triton


@pytest.fixture(scope="module")
def planted(run_triton_script):
    return run_triton_script(HERE / "triton_planted.py", interpret=True, is_watched=False)


@pytest.fixture(scope="module")
def big(run_triton_script):
    return run_triton_script(HERE / "triton_big.py", interpret=True, is_watched=False)


@pytest.mark.parametrize("name", PLANTED, ids=lambda name: f"triton-{name}")
def test_reports(planted, name):
    assert PLANTED[name] in planted["said"][name].splitlines()[0]
    assert planted["said"][name] in planted["faults"]


@pytest.mark.parametrize("name", TWINS, ids=lambda name: f"triton-{name}")
def test_lets_pass(planted, name):
    assert planted["said"][name] is None


def test_programs_run_in_another_order_each_time(planted):
    one, other = planted["orders"]
    assert sorted(one) == sorted(other) == list(range(20))
    assert len({tuple(one), tuple(other), tuple(range(20))}) == 3


def test_says_who_did_what_where(planted):
    assert planted["said"]["blocks overlap"].count("writes at triton_planted.py:") >= 2
    assert "bytes 2000 .. 2511 of argument 0, which has 2400" in planted["said"]["behind the end"]


@pytest.mark.full
@pytest.mark.parametrize("check", BIG, ids=lambda check: f"triton-{check}")
def test_large_tensors(big, check):
    assert big[check] is None


def test_fails_a_script_that_hides_a_fault(tmp_path, run_triton_script):
    script = tmp_path / "hides.py"
    script.write_text(
        "import triton, triton.language as tl, torch\n"
        "@triton.jit\n"
        "def one(x):\n"
        "    tl.store(x + tl.program_id(0) // 2, tl.program_id(0))\n"
        "try:\n"
        "    one[(4,)](torch.zeros(2, dtype=torch.int32))\n"
        "except Exception:\n"
        "    print('{}')\n"
    )
    with pytest.raises(AssertionError, match=BETWEEN):
        run_triton_script(script, interpret=True)
