"""Torch's kernels for `meta` are not registered by a start, and all of them are with the first
tensor there, however it is made.
"""

import subprocess
import sys

import pytest

REGISTERED = """
import sys
def registered():
    return sorted(torch._C._dispatch_get_registrations_for_dispatch_key("Meta"))
def is_late():
    return "activate_meta" not in vars(sys.modules["torch._meta_registrations"])
"""

LATE = f"""
from quire.start_up import quick_imports
with quick_imports():
    import torch
{REGISTERED}
assert is_late()
"""

USES = {
    "empty": "torch.empty(3, device='meta')",
    "strided": "torch.empty_strided((3, 4), (4, 1), device='meta')",
    "moved": "torch.zeros(3).to('meta')",
    "module": "with torch.device('meta'): torch.nn.Linear(3, 4)",
    "emptied": "torch.nn.Linear(3, 4).to_empty(device='meta')",
    "values": "torch.tensor([1.0], device='meta')",
    "fake": (
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "FakeTensorMode().from_tensor(torch.zeros(3))"
    ),
    "traced": "torch.export.export(torch.nn.Linear(3, 4), (torch.zeros(2, 3),))",
    "name": "from torch._meta_registrations import meta_index_Tensor",
    "module_of_torch": "import torch.utils._content_store",
    "threads": """
import threading
def use():
    x = torch.empty(3, 3, device="meta")
    shapes.append(torch.linalg.cholesky_ex(x)[0].shape)
shapes = []
threads = [threading.Thread(target=use) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert shapes == [(3, 3)] * 8
""",
}


def run(program: str) -> str:
    command = [sys.executable, "-W", "error::UserWarning", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def after_uses():
    """Name of the use -> the operations that have a kernel after it, all of one process's forks."""
    program = f"""{LATE}
import os
before = registered()
for name, use in {USES!r}.items():
    child = os.fork()
    if child == 0:
        exec(use)
        assert not is_late()
        print(name, *registered(), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
assert is_late() and registered() == before
"""
    return {name: names for name, *names in map(str.split, run(program).splitlines())}


@pytest.fixture(scope="module")
def at_once():
    return run(f"import torch\n{REGISTERED}\nassert not is_late()\nprint(*registered())").split()


@pytest.mark.parametrize("use", USES)
def test_the_first_use_registers_all_kernels(after_uses, at_once, use):
    assert set(at_once) <= set(after_uses[use])  # tracing brings more


def test_a_start_and_a_request_need_none():
    run(
        f"""{LATE}
from quire import LLM, SamplingParams
with LLM() as llm:
    llm.generate("one", SamplingParams(max_tokens=4))
assert is_late()
"""
    )


def test_modules_are_read_as_usual():
    run(f"""{LATE}
import inspect
module = sys.modules["torch._meta_registrations"]
inspect.getmodule(lambda: 0)
assert not hasattr(module, "__wrapped__") and is_late()
assert callable(module.activate_meta) and not is_late()
assert torch._meta_registrations is sys.modules["torch._meta_registrations"] is not module
assert "def activate_meta" in inspect.getsource(torch._meta_registrations)
assert not hasattr(module, "none_of_this_name")
assert not any("late" in str(finder).lower() for finder in sys.meta_path)
""")


def test_what_needs_them_may_be_within_the_block_and_blocks_within_blocks():
    run(f"""{REGISTERED}
from quire.start_up import quick_imports
def num_finders():
    return sum("late" in str(finder).lower() for finder in sys.meta_path)
with quick_imports():
    with quick_imports():
        import torch
    assert is_late() and num_finders() == 1
    torch.empty(3, device="meta")
    assert not is_late() and num_finders() == 0
assert not is_late()
""")
