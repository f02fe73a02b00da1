"""The API for models that pool: vectors, labels and scores."""
