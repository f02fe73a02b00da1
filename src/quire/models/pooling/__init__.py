"""Pooling models: what their files say of the pooler, and the pooler itself."""
