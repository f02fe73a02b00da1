"""Ways to run a model's forward pass: eagerly, recorded, or as captured graphs."""
