"""Python imports this at the start of every process that has the folder in PYTHONPATH: the children
of a program that `python -m quire.as_vllm` runs. Another `sitecustomize` behind it runs, too.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec

_FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _FOLDER]

if find_spec("quire") is not None:  # not in an interpreter of another environment
    import quire.as_vllm  # noqa: F401

_next = PathFinder.find_spec("sitecustomize")
if _next is not None and _next.loader is not None:
    _next.loader.exec_module(module_from_spec(_next))
