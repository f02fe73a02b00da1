"""Between an engine core and the devices that run its steps."""
