"""Recipes: small YAML files in ``recipes/`` that say how a checkpoint is quantised."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pipeline.config import STRICT, load_typed
from pipeline.errors import ConfigError, QuantizationError

RECIPES = Path("recipes")
BACKENDS = ("onnxruntime", "tensorrt", "tensorrt_llm", "vllm")


@dataclass(frozen=True)
class Recipe:
    """How weights, activations and the KV cache are quantised, and which modules.

    ``include`` and ``exclude`` hold globs over module paths (``model.layers.0.mlp.down_proj``); without ``include``
    every linear layer but the logits head. ``alpha`` is SmoothQuant's migration strength. ``samples``: so many of the
    calibration samples instead of all (AWQ runs each layer a dozen times). ``backends`` names what can compile or
    serve the result, ``min_sm`` and ``max_sm`` the GPUs that have its kernels.
    """

    __pydantic_config__ = STRICT
    description: str
    weights: Literal["int8", "fp8", "int4"]
    activations: Literal["int8", "fp8", "none"]
    algorithm: Literal["smoothquant", "max", "awq"]
    kv_cache: Literal["none", "fp8"] = "none"
    alpha: float = 1.0
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    samples: int | None = None
    backends: tuple[Literal["onnxruntime", "tensorrt", "tensorrt_llm", "vllm"], ...] = ()
    min_sm: int | None = None
    max_sm: int | None = None

    def __post_init__(self) -> None:
        wanted = {"int8": "int8", "fp8": "fp8", "int4": "none"}[self.weights]
        if self.activations != wanted:
            raise ValueError(f"activations: {self.weights} weights go with {wanted}")
        if self.algorithm == "smoothquant" and self.weights != "int8":
            raise ValueError("algorithm: smoothquant goes with int8")
        if (self.algorithm == "awq") != (self.weights == "int4"):
            raise ValueError("algorithm: awq goes with int4, and int4 with awq")
        if not 0 <= self.alpha <= 1:
            raise ValueError("alpha: must be between 0 and 1")
        if self.samples is not None and self.samples < 1:
            raise ValueError("samples: must be at least 1, or null for all")
        if None not in (self.min_sm, self.max_sm) and self.min_sm > self.max_sm:  # type: ignore[operator]
            raise ValueError("max_sm: must not be below min_sm")

    def identity(self) -> dict[str, Any]:
        """What of the recipe changes the scales: not its words, nor where it runs."""
        words = ("description", "backends", "min_sm", "max_sm")
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items()
            if key not in words
        }

    def why_left_out(self, module: str) -> str | None:
        """Why the linear layer at this path stays in high precision; None when the recipe promises to quantise it."""
        for pattern in self.exclude:
            if fnmatchcase(module, pattern):
                return f"excluded by {pattern}"
        if self.include and not any(fnmatchcase(module, pattern) for pattern in self.include):
            return "not in include"
        for pattern in _left_alone(self._base()):
            if fnmatchcase(f"{module}.weight_quantizer", pattern):
                return f"ModelOpt leaves {pattern} alone"
        return None

    def promises(self, module: str) -> bool:
        """Whether the recipe says that the linear layer at this path is quantised."""
        return self.why_left_out(module) is None

    def check_patterns(self, modules: Iterable[str]) -> None:
        """Raises QuantizationError for a glob that matches none of these paths (of a model's modules)."""
        names = list(modules)
        for key in ("include", "exclude"):
            for pattern in getattr(self, key):
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise QuantizationError(
                        f"recipe: `{key}: {pattern}` matches no module of this model",
                        "correct or remove the pattern; a promise that nothing keeps gives an engine that is "
                        "not what its name says",
                    )

    def modelopt_config(self) -> dict[str, Any]:
        """The configuration for ``modelopt.torch.quantization.quantize`` (0.47: a list, later entries win)."""
        import modelopt.torch.quantization as mtq

        config: dict[str, Any] = copy.deepcopy(self._base())
        entries = config["quant_cfg"]
        # A recipe speaks of linear layers; by default ModelOpt would quantise the inputs of LayerNorm as well.
        entries.append({"quantizer_name": "*", "parent_class": "nn.LayerNorm", "enable": False})
        if self.include:
            general = [entry for entry in entries if entry["quantizer_name"].startswith("*") and entry.get("cfg")]
            place = entries.index(general[0])
            for entry in general:
                entries.remove(entry)
            entries[place:place] = [
                entry | {"quantizer_name": f"{pattern}.{entry['quantizer_name']}"}
                for entry in general
                for pattern in self.include
            ]
        if self.kv_cache == "fp8":
            entries += copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])
        entries += [{"quantizer_name": f"{pattern}.*", "enable": False} for pattern in self.exclude]
        if self.algorithm == "smoothquant":
            config["algorithm"] = {"method": "smoothquant", "alpha": self.alpha}
        return config

    def _base(self) -> dict[str, Any]:
        import modelopt.torch.quantization as mtq

        bases: dict[str, dict[str, Any]] = {
            "int8": mtq.INT8_DEFAULT_CFG,
            "fp8": mtq.FP8_DEFAULT_CFG,
            "int4": mtq.INT4_AWQ_CFG,
        }
        return bases[self.weights]


def _left_alone(config: dict[str, Any]) -> list[str]:
    """The globs of quantizers that ModelOpt's default keeps off (heads, routers, vision towers)."""
    return [
        entry["quantizer_name"]
        for entry in config["quant_cfg"]
        if entry.get("enable") is False
        and "parent_class" not in entry
        and entry["quantizer_name"] not in ("*", "*input_quantizer", "*weight_quantizer")
    ]


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
