"""Fetches what a request names: data, http(s) and file URLs, within limits and from nowhere else
than a stranger may read.
"""
