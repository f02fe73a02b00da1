"""What this machine offers: cores, memory, CPU features, GPUs. No torch."""
