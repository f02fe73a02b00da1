"""Routes for programs that control an engine, which are with those of admin.py."""
