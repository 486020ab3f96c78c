"""Loads a checkpoint for calibration: on one device, or spread over GPUs, host and disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import QuantizationError
from pipeline.quantize.memory import free_memory, needed, refuse_if_short
from pipeline.quantize.recipes import Recipe


def load_for_calibration(
    checkpoint: Path,
    kind: str,
    budget: int,
    *,
    device_map: str | dict[str, Any] | None = None,
    local: int = 0,
    processes_here: int = 1,
    trust_remote_code: bool = False,
    offload: Path | None = None,
) -> Any:
    """The model, in the checkpoint's precision on a GPU and in float32 on a CPU, checked to fit beforehand.

    ``kind`` is what the weights become; ``device_map`` is accelerate's, None for the GPU number ``local`` or the CPU;
    ``offload`` is the folder for what fits neither GPUs nor host. Raises QuantizationError when the memory is short.
    """
    # First here, where no model is alive: a plugin of it keeps an ImportError, and with that the frames of whoever
    # imported it first and all that they hold.
    import modelopt.torch.quantization  # noqa: F401
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    dtype = (config.dtype or torch.float32) if cuda else torch.float32
    spread = device_map is not None
    if offload is None:  # a disk takes whatever is left
        need = needed(checkpoint, kind, dtype.itemsize, budget)
        refuse_if_short(need, free_memory(device, spread, processes_here), spread)
    # accelerate reads straight onto a GPU; without a map the host would hold the whole model first.
    place = device_map if spread else ({"": device} if cuda else None)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        **({"device_map": place} if place is not None else {}),
        **({"offload_folder": str(offload)} if spread and offload is not None else {}),
    )
    return model.eval()


def check_offload(model: Any, recipe: Recipe) -> None:
    """Raises QuantizationError for what ModelOpt cannot export from a model that is partly on the host or the disk:
    scales of inputs (SmoothQuant, AWQ) are made equal between q, k and v there, without fetching the weights.
    """
    places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    offloaded = places & ({"disk"} if places <= {"cpu", "disk"} else {"cpu", "disk"})
    if offloaded and recipe.algorithm != "max":
        raise QuantizationError(
            f"the model does not fit the GPUs ({', '.join(sorted(offloaded))} takes the rest), and ModelOpt cannot "
            f"export {recipe.algorithm} from there",
            "use a recipe with `algorithm: max` (fp8, fp8_kv, int8_max), or more GPU memory",
        )
