"""Matrix products with float and integer weights."""
