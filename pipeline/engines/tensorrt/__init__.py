"""TensorRT: one code for full TensorRT (8.6, 10, 11: package ``tensorrt``) and TensorRT for RTX.

    lowering/ (plain graph, Q/DQ, verifier) -> builder.py (plan) -> plan.py (guard) -> executor.py (decoding)

    library.py   which TensorRT is here, and what it can do (features by attribute, SMs, precisions)
    graph.py     the decoder graph with fixed KV buffers that is exported for this backend
    profiles.py  optimisation profiles from the graph's own dynamic axes
    builder.py   ONNX -> plan, with timing cache, memory limits, progress
    plan.py      ``engine.json`` beside the plan, and the checks before a plan is deserialised
    inspect.py   what ``enginegate show`` prints about an engine
    device.py, executor.py   the runtime: device memory and CUDA graphs, decoding

Interface between building and running (both sides keep to it):

* An engine folder holds ``model.plan``, ``engine.json`` (``plan.Description``), ``tokenizer/``, ``manifest.json``.
* ``graph.export_decoder(model, target, max_tokens=..., opset=...) -> dict`` writes ``model.onnx`` and its data with
  ``lowering.trace.trace``; what it returns becomes ``cache.json`` beside them and then ``cache`` in ``engine.json``.
  Axes are named, and ``profiles.ranges`` has a row for each name. MatMuls are named after modules (``trace`` does it).
* ``executor.TensorRTExecutor(folder, max_batch=..., max_tokens=...)`` asks ``device.py`` for the SM of the GPU and
  calls ``plan.open_plan(folder, sm)``, which refuses before it deserialises and returns
  ``(Description, ICudaEngine, Library)``.
* ``library.py``, ``profiles.py``, ``builder.py``, ``plan.py``, ``executor.py`` and ``device.py`` import nothing but
  the bindings, NumPy and ``cuda-python``, and run on Python 3.10 too (TensorRT 8.6 has no wheel for a newer one).
"""
