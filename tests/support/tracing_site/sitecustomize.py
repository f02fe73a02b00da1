"""Traces which functions the main thread of a process calls between SIGUSR1 and SIGUSR2, and writes
them to TRACE_FOLDER; not those that TRACE_LEFT_OUT names, nor what they call. Python imports it by
this name at the start of every process that finds it.
"""

import json
import os
import signal
import sys

if "TRACE_FOLDER" in os.environ:
    called: dict[str, set[str]] = {}
    left_out = set(os.environ.get("TRACE_LEFT_OUT", "").split())
    num_left_out = 0  # frames on the stack

    def note(frame, event, argument):
        global num_left_out
        if num_left_out or frame.f_code.co_qualname in left_out:
            num_left_out += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call":
            called.setdefault(frame.f_code.co_filename, set()).add(frame.f_code.co_qualname)

    def begin(*_):
        sys.setprofile(note)

    def end(*_):
        sys.setprofile(None)
        path = os.path.join(os.environ["TRACE_FOLDER"], str(os.getpid()))
        with open(path + ".part", "w") as file:
            json.dump({name: sorted(functions) for name, functions in called.items()}, file)
        os.rename(path + ".part", path)

    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)
