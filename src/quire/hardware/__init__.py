"""This machine: cores, memory, CPU features, GPUs. No torch."""
