"""The head of rows that pool their prompt."""
