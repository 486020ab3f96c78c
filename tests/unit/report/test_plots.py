from __future__ import annotations

from xml.etree import ElementTree

from pipeline.report.plots import Row, forest, histogram, layers


def row(value: float, lower: float, upper: float, label: str = "BLEU") -> Row:
    return Row(label, "note", value, lower, upper, "ok", "text", "title")


def of_class(svg: str, name: str) -> list[ElementTree.Element]:
    return [element for element in ElementTree.fromstring(svg).iter() if name in element.get("class", "").split()]


def test_a_dot_lies_in_the_zone_it_belongs_to() -> None:
    svg = forest([row(-0.5, -0.9, -0.1), row(-1.5, -2.0, -1.1)])
    budget = float(of_class(svg, "budget")[0].get("x1", ""))
    inside, outside = (float(dot.get("cx", "")) for dot in of_class(svg, "dot"))
    assert outside < budget < inside
    zone = of_class(svg, "zone-ok")[0]
    assert float(zone.get("x", "")) == budget
    assert budget < float(of_class(svg, "zero")[0].get("x1", ""))


def test_an_interval_ends_where_its_bounds_are() -> None:
    svg = forest([row(0.0, -1.0, 0.0)])
    budget, zero = (float(of_class(svg, name)[0].get("x1", "")) for name in ("budget", "zero"))
    line = of_class(svg, "interval")[0]
    assert (float(line.get("x1", "")), float(line.get("x2", ""))) == (budget, zero)


def test_what_lies_beyond_the_plot_gets_an_arrow() -> None:
    svg = forest([row(-20.0, -30.0, -10.0)])
    assert [element.tag.split("}")[-1] for element in of_class(svg, "dot")] == ["polygon", "polygon"]


def test_labels_are_escaped() -> None:
    assert "<b>" not in forest([row(0, -1, 1, label="<b>&")])
    assert "<b>" not in layers([("<b>", 0, 1.0)], "<b>")


def test_histogram_heights_are_shares() -> None:
    svg = histogram({"calibration": {"0": 30, "8": 10}, "evaluation": {"0": 1}}, 8)
    heights = [float(bar.get("height", "")) for bar in of_class(svg, "series-0") + of_class(svg, "series-1")]
    full = heights[2]
    assert abs(heights[0] - 0.75 * full) < 0.1
    assert abs(heights[1] - 0.25 * full) < 0.1


def test_long_texts_are_binned_wider() -> None:
    svg = histogram({"calibration": {str(start): 1 for start in range(0, 8192, 8)}}, 8)
    assert len(of_class(svg, "series-0")) <= 49


def test_layers_on_a_logarithmic_axis() -> None:
    svg = layers([("q", 0, 1.0), ("q", 1, 10.0), ("q", 2, 100.0), ("zero", 3, 0.0)], "amax")
    heights = [float(dot.get("cy", "")) for dot in of_class(svg, "kind-0")]
    assert abs((heights[0] - heights[1]) - (heights[1] - heights[2])) < 0.2
    assert of_class(svg, "kind-1") == []
    assert layers([("q", 0, 1.0)], "one layer")
