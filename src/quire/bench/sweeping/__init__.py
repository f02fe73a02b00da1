"""The parts of `quire bench sweep`: grid, commands, server, report."""
