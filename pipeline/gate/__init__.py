"""The gate: a pure function from records, policy and manifests to a verdict.

Nothing in this package reads a file, a clock, a GPU or the network (``policy.load_policy`` alone opens the
file that it is given). Start at ``verdict.decide``.
"""
