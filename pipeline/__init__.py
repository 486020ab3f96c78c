"""Enginegate: calibrate, compile, compare, and promote an engine only on paired evidence."""

__version__ = "0.1.0"
