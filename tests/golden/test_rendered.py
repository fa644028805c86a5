"""What every shipped graph renders to, word for word. After a change: `python -m tests.golden.rendering`, and read the diff."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from tests.golden import rendering

GRAPHS = rendering.graph_files()


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda g: g.stem)
def test_a_shipped_graph_renders_to_its_golden(graph: Path) -> None:
    same(f"{graph.stem}.yaml", rendering.text_of(graph))


def test_the_older_api_and_the_policies_render_to_their_goldens() -> None:
    same("disagg.v1alpha1.yaml", rendering.text_of(rendering.ROOT / "graphs/disagg.yaml", "v1alpha1"))
    from graphs.render.admission import policies
    from graphs.render.output import to_yaml

    same("admission.yaml", to_yaml(policies()))


def test_no_golden_is_left_of_a_graph_that_is_gone() -> None:
    known = {f"{g.stem}.yaml" for g in GRAPHS} | {"disagg.v1alpha1.yaml", "admission.yaml"}
    assert {p.name for p in (rendering.HERE / "rendered").glob("*.yaml")} == known


def test_rendering_twice_gives_the_same_text() -> None:
    graph = rendering.ROOT / "graphs/disagg.yaml"
    assert rendering.text_of(graph) == rendering.text_of(graph)


def test_nothing_rendered_names_a_machine_path_or_a_secret() -> None:
    for path in (rendering.HERE / "rendered").glob("*.yaml"):
        text = path.read_text()
        for word in ("/work/", "/root", "/tmp/", str(Path.home()) + "/", "sig=", "AccountKey"):
            assert word not in text, (path.name, word)


def same(name: str, text: str) -> None:
    golden = rendering.HERE / "rendered" / name
    assert golden.is_file(), f"no golden {name}: python -m tests.golden.rendering"
    expected = golden.read_text()
    if text != expected:
        diff = "".join(
            difflib.unified_diff(expected.splitlines(True), text.splitlines(True), "golden", "rendered", n=2)
        )
        raise AssertionError(
            f"{name} renders otherwise (python -m tests.golden.rendering writes it anew):\n{diff[:6000]}"
        )
