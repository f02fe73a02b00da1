"""New weights for a model that is loaded: by the names of a checkpoint, in any order, a layer at a
time.
"""
