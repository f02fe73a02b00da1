"""The cooperation of engine cores: the group in which they exchange bytes, and shared experts."""
