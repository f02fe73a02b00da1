"""What an engine tells about itself: metrics and their exposition."""
