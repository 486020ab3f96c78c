"""Metrics, one file each: statistics apart from score. ``registry`` is the table of them."""
