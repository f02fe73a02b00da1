"""Vision encoders as data: one tower for all families, and the connectors to their decoders."""
