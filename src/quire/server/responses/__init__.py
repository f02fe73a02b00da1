"""OpenAI's Responses API: an answer as a list of items, kept for a while to be asked for again."""
