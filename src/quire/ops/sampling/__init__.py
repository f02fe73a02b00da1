"""The operations on logits, from grammar masks to the draw."""
