"""The places of pictures in a prompt: a placeholder becomes a run of tokens whose embeddings the
encoder's rows replace, with the tokens around and between that the model knows.

The rules are those of transformers' processor classes, by whose names checkpoints ask for them.
"""
