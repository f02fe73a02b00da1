"""Keys of config.json that no family reads: meaning, and those about text. Free of torch."""
