"""What every HTTP request passes: sockets, bounds, keys, bodies, errors, the request log."""
