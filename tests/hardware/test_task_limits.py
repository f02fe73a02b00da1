"""What the kernel allows a process that does tasks of clients."""

import subprocess
import sys

import pytest

from quire.hardware.task_limits import OVER_TIME

PROGRAM = """
import sys, threading, time
from quire.hardware.task_limits import cpu_time, limit_memory

def spin(seconds):
    start = time.thread_time()
    while time.thread_time() - start < seconds:
        pass

for task in sys.argv[1].split():
    with cpu_time(1.0):
        {
            "short": lambda: spin(0.6),
            "asleep": lambda: time.sleep(1.5),
            "endless": lambda: spin(30),
            "threads": lambda: [threading.Thread(target=spin, args=(15,)).start() for _ in "ab"],
        }[task]()
        for thread in threading.enumerate()[1:]:
            thread.join()
    print(task, flush=True)
limit_memory(2**26)
try:
    bytearray(2**27)
except MemoryError:
    print("memory")
"""


@pytest.mark.parametrize(
    ("tasks", "done", "code"),
    [
        ("short short short asleep short", ["short"] * 3 + ["asleep", "short", "memory"], 0),
        ("short endless short", ["short"], -OVER_TIME),
        ("threads", [], -OVER_TIME),
    ],
)
def test_the_time_of_each_task_is_limited_by_itself(tasks, done, code):
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, tasks], capture_output=True, text=True, check=False,
        timeout=60,
    )  # fmt: skip
    assert (ran.stdout.split(), ran.returncode) == (done, code), ran.stderr
