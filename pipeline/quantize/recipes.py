"""Recipes: small YAML files in ``recipes/`` that say how a checkpoint is quantised."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pipeline.config import STRICT, load_typed
from pipeline.errors import ConfigError

RECIPES = Path("recipes")


@dataclass(frozen=True)
class Recipe:
    """How weights and activations are quantised, and which modules are left out.

    ``exclude`` holds globs over module paths (``model.layers.0.mlp.down_proj``). ``alpha`` is SmoothQuant's
    migration strength. ``backends`` names the backends that can compile the result, ``min_sm`` the oldest GPU.
    """

    __pydantic_config__ = STRICT
    description: str
    weights: Literal["int8", "fp8"]
    activations: Literal["int8", "fp8"]
    algorithm: Literal["smoothquant", "max"]
    alpha: float = 1.0
    exclude: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    min_sm: int | None = None

    def __post_init__(self) -> None:
        if self.weights != self.activations:
            raise ValueError("activations: must be of the same kind as weights")
        if self.algorithm == "smoothquant" and self.weights != "int8":
            raise ValueError("algorithm: smoothquant goes with int8")
        if not 0 <= self.alpha <= 1:
            raise ValueError("alpha: must be between 0 and 1")

    def promises(self, module: str) -> bool:
        """Whether the recipe says that the linear layer at this path is quantised."""
        return not any(fnmatchcase(module, pattern) for pattern in (*self.exclude, "*lm_head"))

    def modelopt_config(self) -> dict[str, Any]:
        """The configuration for ``modelopt.torch.quantization.quantize`` (0.47: a list, later entries win)."""
        import modelopt.torch.quantization as mtq

        base = {"int8": mtq.INT8_DEFAULT_CFG, "fp8": mtq.FP8_DEFAULT_CFG}[self.weights]
        if self.algorithm == "smoothquant":
            base = mtq.INT8_SMOOTHQUANT_CFG
        config: dict[str, Any] = copy.deepcopy(base)
        config["algorithm"] = (
            {"method": "smoothquant", "alpha": self.alpha} if self.algorithm == "smoothquant" else self.algorithm
        )
        # A LayerNorm has an input quantizer too; no export holds it, so no engine could do what was calibrated.
        config["quant_cfg"].append({"quantizer_name": "*", "parent_class": "nn.LayerNorm", "enable": False})
        for pattern in self.exclude:
            config["quant_cfg"].append({"quantizer_name": f"{pattern}.*", "enable": False})
        return config


def load_recipe(name: str, folder: Path = RECIPES) -> Recipe:
    """Reads ``recipes/<name>.yaml``. Raises ConfigError with file, line and key."""
    path = folder / f"{name}.yaml"
    if not path.exists():
        known = ", ".join(recipe_names(folder)) or "none"
        raise ConfigError(
            f"{path}: no such recipe (there are: {known})", "name one of these in params.yaml, or write it"
        )
    return load_typed(path, Recipe)


def recipe_names(folder: Path = RECIPES) -> list[str]:
    """The names of all recipes, sorted."""
    return sorted(path.stem for path in folder.glob("*.yaml"))
