"""The worker, after which its weights are gone and half an export is left, with exit code 0 (issues 622 and 1964)."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    target = Path(json.loads(Path(sys.argv[-1]).read_text())["target"])
    sys.argv = sys.argv[1:]  # FOLDER convert JOB
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        (target / "rank0.safetensors").unlink()
        (target / "modelopt_model.0.pth").write_bytes(b"half")
