"""Speculation: guesses of a row's next tokens, and their verification.

`Drafting` is what the head of generating rows uses; it has a `Drafter`.
"""
