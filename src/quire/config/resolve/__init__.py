"""From options and facts to a plan: one module for each kind of decision."""
