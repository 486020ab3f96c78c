"""What runs inside TensorRT-LLM's own environment: ``python FOLDER COMMAND``.

That environment has Python 3.10 or 3.12 and its own torch and transformers, and lacks everything of ours. So this
folder imports the standard library, torch and safetensors, and TensorRT-LLM itself inside functions; ``runtime.py``
copies it to where that environment can see it, as the package ``enginegate_worker``. A command's answer is JSON on
the last line that it prints, behind ``MARK``.
"""

MARK = "enginegate-worker:"  # TensorRT-LLM prints lines of its own
REFUSED = 3  # the exit code for input that cannot be used; the answer holds the message and the next step
