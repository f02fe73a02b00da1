"""An engine core in a process of its own: starting, serving, watching and ending it."""
