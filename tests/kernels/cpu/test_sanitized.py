"""The C++ code by itself: under AddressSanitizer and UBSan, and what its object files export."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LEVEL = re.compile(r"_(portable|avx2|avx_vnni\w*|avx512(?:_vnni|_bf16|_emulated)?)\.dir/")
BUILD_TYPE = "None"  # the flags are those of the option alone

pytestmark = pytest.mark.skipif(
    not (shutil.which("cmake") and shutil.which("g++") and shutil.which("nm")),
    reason="needs cmake and g++",
)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sanitized")
    options = ["-DQUIRE_SANITIZE=ON", f"-DCMAKE_BUILD_TYPE={BUILD_TYPE}"]
    subprocess.run(["cmake", "-S", ROOT, "-B", folder, *options], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", folder, "-j2"], check=True, capture_output=True)
    return folder


def test_programs_fit_the_kernels_that_they_call():
    """In seconds, where the build under the sanitizers takes minutes and is left to `--full`."""
    sources = sorted((ROOT / "csrc/tests").glob("*.cpp"))
    assert len(sources) >= 7
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
    command = ["g++", "-std=c++20", "-fsyntax-only", *warnings, f"-I{ROOT / 'csrc'}", *sources]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    "program",
    [
        "quire_attention_test",
        "quire_experts_test",
        "quire_kernel_test",
        "quire_lora_test",
        "quire_product_test",
        "quire_sample_test",
        "quire_state_test",
    ],
)
def test_kernels_touch_no_memory_but_theirs(build, program):
    result = subprocess.run([build / program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "portable: passed" in result.stdout


@pytest.mark.full
def test_kernel_files_share_no_inline_code(build):
    """What an AVX-512 file defines for others to share, the linker may give to everybody."""
    objects = [path for path in build.rglob("csrc/kernels/*.o") if "quire_native" not in str(path)]
    assert objects
    for path in objects:
        level = LEVEL.search(str(path))[1]
        listing = subprocess.run(
            ["nm", "--defined-only", "-C", path], check=True, capture_output=True, text=True
        ).stdout
        for line in listing.splitlines():
            _, kind, name = line.split(" ", 2)
            if kind in "WVu" and not name.startswith("DW.ref."):
                assert f"quire::{level}::" in name, f"{path.name} for {level} shares {name}"
