"""params.yaml and policy.yaml are read as DVC reads them, and every mistake is named with file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import load_yaml
from pipeline.errors import ConfigError
from pipeline.params import load_params

SURPRISES = "a: 1e-2\nb: no\nc: 010\nd: 1e3\ne: yes\nf: 0x1f\ng: 12:30\nh: ~\ni: 0o17\n"


def _write(folder: Path, text: str) -> Path:
    path = folder / "params.yaml"
    path.write_text(text)
    return path


def test_values_are_those_that_dvc_sees(tmp_path: Path) -> None:
    from dvc.utils.serialize import parse_yaml

    path = _write(tmp_path, SURPRISES)
    assert load_yaml(path) == parse_yaml(SURPRISES, path)
    assert load_yaml(path)["a"] == 0.01
    assert load_yaml(path)["b"] == "no"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\ncalib:\n  samples: 0\n", ":3: calib.samples: must be at least 1"),
        ("model:\n  chekpoint: x\n", ":2: model.chekpoint: unknown key"),
        ("calib:\n  strata: 0\n", ":2: calib.strata: must be between 1 (none) and 1000"),
        ("data:\n  log_bad_lines: 1\n", ":2: data.log_bad_lines: must be a share from 0"),
        ("data:\n  redact: [email, names]\n", ":2: data.redact: 'names' is none of email, phone, digits"),
        ("data:\n  redact: ['a-b:c']\n", ":2: data.redact: 'a-b:c' is none of"),
        ("data:\n  max_rows: 0\n", ":2: data.max_rows: must be at least 1, or null"),
        ("modle: {}\n", ":1: modle: unknown key"),
        ("calib:\n  samples: 5\n  samples: 6\n", ":3: samples: this key stands twice"),
        ("seed: no\n", ":1: seed: Input should be a valid integer"),
        ("seed: '1'\n", ":1: seed: Input should be a valid integer"),
        ("seed: 1.5\n", ":1: seed:"),
        ("baseline:\n  dtype: int4\n", ":2: baseline.dtype: Input should be 'auto'"),
        ("recipes: [a, a]\n", ":1: recipes: a name stands twice"),
        ("recipes: []\n", ":1: recipes: name at least one"),
        ("prompt:\n  user: hello\n", ":2: prompt.user: the text must hold {source}"),
        ("engine:\n  max_tokens: 20\n", ":2: engine.max_tokens: must exceed eval.max_new_tokens"),
        ("seed: 2020-01-01\n", ":1: seed: datetime.date(2020, 1, 1) is not text"),
        ("seed: .nan\n", ":1: seed: nan is not text"),
        ("seed: [\n", ":2: not YAML"),
        ("1: x\n", ":1: (top level): key 1 is not text"),
    ],
)
def test_mistakes_name_file_line_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_params(path)
    assert str(caught.value).startswith(f"{path}{message}")
    assert "next:" in str(caught.value)


def test_missing_file_and_bad_encoding(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_params(tmp_path / "params.yaml")
    (tmp_path / "params.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_params(tmp_path / "params.yaml")


def test_defaults_and_the_repositorys_own_file() -> None:
    assert load_params(Path("params.yaml")).calib.samples == 256


def test_default_of_calibration_is_ten_thousand(tmp_path: Path) -> None:
    assert load_params(_write(tmp_path, "seed: 3\n")).calib.samples == 10_000
    assert load_params(_write(tmp_path, "")).seed == 17


@given(st.recursive(st.integers() | st.text(max_size=5), lambda c: st.dictionaries(st.text(max_size=5), c, max_size=3)))
def test_any_content_gives_params_or_a_config_error(tmp_path_factory: pytest.TempPathFactory, content: object) -> None:
    from ruamel.yaml import YAML

    path = tmp_path_factory.mktemp("any") / "params.yaml"
    with path.open("w", encoding="utf-8") as file:
        YAML(typ="safe").dump({"model": content}, file)
    try:
        load_params(path)
    except ConfigError as error:
        assert str(error).startswith(f"{path}:")
