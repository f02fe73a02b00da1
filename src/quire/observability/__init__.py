"""An engine's metrics and their exposition."""
