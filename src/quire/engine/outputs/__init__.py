"""What a front end keeps of the parts of outputs, by their kinds."""
