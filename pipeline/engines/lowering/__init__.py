"""From a checkpoint and a quantised checkpoint to an ONNX graph that a compiler takes: export, Q/DQ."""
