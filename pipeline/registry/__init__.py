"""From a PROMOTE verdict to a registered version.

``promoted``: the stage that copies an engine with its verdict to ``engines/promoted/``. ``promote``: the command
that checks everything again and writes a GTO tag. Nothing else puts an engine under a version.
"""
