from __future__ import annotations

import pytest

from pipeline.registry.git import artifact_name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Shop.Translator-int8_mixed", "shop-translator-int8_mixed"),
        ("Ünïcode", "n-code"),
        ("--", "engine"),
        ("a b//c", "a-b-c"),
        ("-x-", "x"),
    ],
)
def test_names_that_gto_takes(text: str, name: str) -> None:
    from gto.constants import check_string_is_valid

    assert artifact_name(text) == name
    assert check_string_is_valid(name)
