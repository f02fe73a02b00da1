"""How an engine core reaches the devices that run its steps."""
