"""Draft networks: what guesses a model's next tokens from its hidden states."""
