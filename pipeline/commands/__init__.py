"""One module a command: ``register(subparsers)`` declares it, ``run(args) -> int`` does it.

A command parses, calls the library and prints; heavy imports live inside ``run``, so ``--help`` is instant.
"""
