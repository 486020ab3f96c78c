"""Servers under load: what is sent when (``load``), how it is sent (``drive``, ``workers``), what was seen beside it
(``telemetry``), and what the numbers are (``measure``); then what they mean: ``fleet``, ``recommend``, ``diagnose``.

``run`` puts the first four together for one server; the stage ``bench`` does so for every arm.
"""
