"""One plugin of each kind; pyproject.toml names them. Nothing is imported before it is needed."""
