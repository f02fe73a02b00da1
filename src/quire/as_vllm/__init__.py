"""Importing this makes `vllm` a name for Quire, so that a program written for vLLM runs unchanged.

`python -m quire.as_vllm PROGRAM ARGS...` runs a program, and the Python processes that it starts,
in this way; `import quire.as_vllm` as a program's first line does the same for one process. Without
one of the two nothing answers to the name. table.py has what is served, variables.py what becomes
of the environment variables.
"""

from quire.as_vllm.finder import install

install()
