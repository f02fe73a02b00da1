"""One device's steps: rows, batches, KV cache, model and sampler."""
