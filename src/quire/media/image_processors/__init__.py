"""Image processors in numpy and Pillow, each a function of the JSON that a checkpoint has for it.

They give what the classes of transformers with a `Pil` at the end of their name give, one picture
at a time and without padding to a batch.
"""
