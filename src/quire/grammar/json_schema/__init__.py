"""JSON schemas, unfolded to a form that libraries enforce whole, or refused by their place."""
