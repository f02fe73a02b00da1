"""Batches: requests from a file, answered by the app in this process, results in another file."""
