"""How a model's forward pass is run: eagerly, recorded, or as captured graphs."""
