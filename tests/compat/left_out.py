"""Tests of others that are not run, or that fail by design: files left_out.txt of their folders."""


def read_list(folder):
    """(kind, what, reason) of the lines."""
    lines = (folder / "left_out.txt").read_text(encoding="utf-8").splitlines()
    for line in lines:
        if line and not line.startswith("#"):
            head, _, reason = line.partition(": ")
            kind, _, what = head.partition(" ")
            yield kind, what, reason
