"""Who gets how many tokens in which blocks: pure decisions, integers in and integers out."""
