"""The caller's side of an engine: text to token ids and back, without torch."""
