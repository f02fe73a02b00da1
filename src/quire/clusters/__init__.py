"""Processes on the machines of a Ray cluster, which are started and ended as those of this machine.

Ray is an extra: it is imported by ray_cluster.py and ray_process.py alone, when they are used.
"""
