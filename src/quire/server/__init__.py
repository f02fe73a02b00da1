"""The HTTP server and what only it needs: OpenAI-like schemas, output parsing, pages.

Layer 5 of the package: it speaks to the engine's client and never imports torch.
"""
