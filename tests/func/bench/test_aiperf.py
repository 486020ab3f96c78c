"""The external check: AIPerf and our client on one server of known times, at a load that both hold.

Slow, and only where AIPerf is installed (docs/benchmarks.md says how); ``AIPERF`` names its program.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.client import AGREED_SLOTS, aiperf, mock, our_closed_loop
from pipeline.bench.workers import client

PROGRAM = Path(os.environ.get("AIPERF", Path(__file__).parents[3] / ".venv-aiperf/bin/aiperf"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROGRAM.exists(), reason="needs AIPerf in .venv-aiperf"),
]


def test_percentiles_agree(tmp_path: Path) -> None:
    """TTFT is spread over 20 to 60 ms, TPOT is 5 ms; each tool adds what it needs to notice a token."""
    with client() as workers, mock(spread_ms=40) as url:
        ours = our_closed_loop(workers, 8, AGREED_SLOTS, url)["percentiles"]
        theirs = aiperf(PROGRAM, url, tmp_path, 100, AGREED_SLOTS)["percentiles"]
    for name, truth in (("ttft_ms", 40.0), ("tpot_ms", 5.0), ("e2e_ms", 40.0 + 15 * 5)):
        assert ours[name]["p50"] == pytest.approx(truth, rel=0.2)
        assert ours[name]["p50"] == pytest.approx(theirs[name]["p50"], rel=0.15)
        assert ours[name]["p90"] == pytest.approx(theirs[name]["p90"], rel=0.25)
