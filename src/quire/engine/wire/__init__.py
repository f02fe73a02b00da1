"""The messages between a front end and its cores, and how they are encoded and sent."""
