"""Providers of ops: implementations that are faster than the definitions in quire.ops.

A provider is a module here with a function `implementations(facts)`; ops/select.py loads it by
name. `cpu` binds the native code of csrc/ (quire._native).
"""
