"""How a model is cut: over workers that share its layers, or between layers."""
