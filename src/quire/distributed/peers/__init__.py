"""K/V between engines: blocks that one engine keeps for a while, and another one pulls."""
