"""The parts of gpu_report.py: ceilings, kernels, engines, what conforms, and how it is told."""
