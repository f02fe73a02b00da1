"""The worker's side of weight updates: sessions, and the ways that tensors come."""
