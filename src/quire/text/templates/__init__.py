"""The environment that chat templates run in, its bounds, and the forms that a template writes."""
