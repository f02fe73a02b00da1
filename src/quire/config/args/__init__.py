"""The options of engine and server: their declarations, and the command line made from them."""
