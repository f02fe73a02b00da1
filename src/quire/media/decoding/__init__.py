"""Decodes pictures, in processes of their own kind."""
