"""The way of every HTTP request: sockets, bounds, keys, bodies, errors, the request log."""
