"""The parts of outputs that a front end keeps, by their kinds."""
