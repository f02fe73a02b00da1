"""Standard streams that are closed. test_main.py has the reader that goes."""

import subprocess
import sys

import pytest

QUIRE = f"{sys.executable} -m quire"


def shell(line):
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("command", ["generate x --max-tokens 1", "--version"])
def test_a_closed_output_is_one_line_and_code_1(command):
    code, _, err = shell(f"{QUIRE} {command} >&-")
    assert (code, err) == (1, "quire: error: standard output is closed\n")


def test_a_server_goes_on_without_streams():
    """Nothing else gets their numbers: what a child process prints would go there."""
    line = f"{QUIRE} serve --explain --max-model-len 128 <&- >&- 2>&-"
    assert shell(line) == (0, "", "")
    code = (
        "import os; from quire.cli import main; found = [main._open_standard_streams()]; "
        "found += [os.readlink(f'/proc/self/fd/{n}') for n in range(3)]; "
        "os.write(9, repr(found).encode())"
    )
    found = shell(f'{sys.executable} -c "{code}" 9>&1 <&- >&- 2>&-')
    assert found == (0, "[False, '/dev/null', '/dev/null', '/dev/null']", "")
