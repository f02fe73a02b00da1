"""What keys of config.json mean where a family does not read them, and which of them describe text.
Free of torch.
"""
