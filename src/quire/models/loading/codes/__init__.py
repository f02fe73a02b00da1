"""From the tensors in which files store codes to weights."""
