"""Keys of config.json that no family reads: their meaning, and which of them describe text.
Free of torch.
"""
