"""The graph file: YAML with places, sizes, --set, secrets, schema; and a fuzzer that never sees a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from components.common.errors import DynamoBlobError
from graphs.check import check_graph
from graphs.check.run import check_loaded
from graphs.cli.main import main
from graphs.document import parse
from graphs.load import examine, read_graph
from graphs.spec import json_schema, parse_size

GRAPHS = sorted((Path(__file__).resolve().parents[2] / "graphs").glob("*.yaml"))
DISAGG = next(p for p in GRAPHS if p.stem == "disagg")


@pytest.mark.parametrize("path", GRAPHS, ids=lambda p: p.stem)
def test_shipped_graphs_have_no_finding(path: Path) -> None:
    assert [f for f in check_graph(path) if f.severity == "error"] == []


@pytest.mark.parametrize("path", GRAPHS, ids=lambda p: p.stem)
def test_shipped_graphs_satisfy_the_exported_schema(path: Path) -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    data = yaml.safe_load(path.read_text())
    jsonschema.validate(data, schema)
    data["components"]["frontend"]["lissten"] = "x"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema)


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2**31), ("512 MB", 512_000_000), ("1.5KiB", 1536), ("7", 7), ("64Mi", 64 << 20), ("3B", 3)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "2 gigs", "-1MiB", "1GiB2", "MiB", "2Gib", "1e3"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


def test_values_know_their_line_and_column() -> None:
    d = parse("a:\n  b: 1\n  c: [x, y]\n", "f")
    assert d.data == {"a": {"b": 1, "c": ["x", "y"]}}
    assert (d.place(("a", "b")), d.place(("a", "c", 1)), d.place(("a", "missing"))) == ("f:2:3", "f:3:10", "f:1:1")


def test_yaml_is_1_2_no_is_a_word_and_017_is_seventeen() -> None:
    assert parse("a: no\nb: 017\nc: 0o17\nd: 2026-01-01\ne: ~\nf: .inf\n", "f").data == {
        "a": "no", "b": 17, "c": 15, "d": "2026-01-01", "e": None, "f": float("inf"),
    }  # fmt: skip


def test_set_replaces_adds_and_names_itself_in_errors() -> None:
    graph = read_graph(DISAGG, ["components.decode.replicas=3", "network.base_port=9000"])
    assert (
        graph.spec.components.decode
        and graph.spec.components.decode.replicas == 3
        and graph.spec.network.base_port == 9000
    )
    with pytest.raises(DynamoBlobError) as e:
        read_graph(DISAGG, ["components.decode.replicas=many"])
    assert e.value.where == "--set components.decode.replicas=many"
    with pytest.raises(DynamoBlobError) as e:  # `kv` stands nowhere in the file
        read_graph(DISAGG, ["kv.overlap=true"])
    assert "kv.profile" in e.value.what and e.value.where == "--set kv.overlap=true"


@pytest.mark.parametrize("form", ["model.name.key={}", "a..b={}", "graph='{}", "{}", "network.base_port=*{}"])
def test_a_set_that_is_refused_does_not_repeat_its_value(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    secret = "hf_" + "a" * 30
    assert main(["check", str(DISAGG), "--set", form.format(secret)]) != 0
    out = capsys.readouterr()
    assert "GRAPH-" in out.out + out.err and secret not in out.out + out.err


@pytest.mark.parametrize(
    "item",
    ["novalue", "a..b=1", "=1", "graph.name.x=1", "components.decode.replicas=[", "components.decode.replicas=*x"],
)
def test_a_set_that_cannot_be_meant_is_refused(item: str) -> None:
    with pytest.raises(DynamoBlobError):
        read_graph(DISAGG, [item])


def test_a_secret_in_set_is_refused_without_repeating_it(capsys: pytest.CaptureFixture[str]) -> None:
    secret = "hf_" + "a" * 30
    assert main(["check", str(DISAGG), "--set", f"model.name={secret}"]) == 1
    out = capsys.readouterr()
    assert "GRAPH-SECRET" in out.out and secret not in out.out + out.err
    assert main(["check", str(DISAGG), "--set", f"kv.overlap={secret}"]) == 1
    out = capsys.readouterr()
    assert "GRAPH-SECRET" in out.out and secret not in out.out + out.err


TOKENS = ["graph", "components", "engine", "decode", "replicas", "env", "set", "{}", "[]", "~", "1", "-1", "2GiB", "*a", "&a", "!!int", "|", ">", "'", '"', "\t", "- ", ": ", "? ", "#", "---", "...", "%YAML 1.1", "<<", "\x00", "\ufeff", "é", "{", "[", "0x", "1e999", "=", "\n", "\n  ", "\n    "]  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(st.lists(st.sampled_from(TOKENS) | st.text(max_size=5), max_size=40).map("".join))
def test_fuzz_any_text_gives_findings_or_a_coded_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert check_graph(path), "random text is no sound graph"


def leaves(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    if isinstance(value, dict):
        return [(*path,), *(x for k, v in value.items() for x in leaves(v, (*path, k)))]
    return [path]


SOUND = yaml.safe_load(DISAGG.read_text())
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.just({}),
    st.just([]),
    st.just({"a": 1}),
    st.just([None]),
    st.just("0" * 64),
)


@settings(max_examples=120, deadline=None)
@given(st.sampled_from([p for p in leaves(SOUND) if p]), ODD)
def test_fuzz_any_value_anywhere_is_judged_without_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, where: tuple[str, ...], value: object
) -> None:
    data = json.loads(json.dumps(SOUND))
    node = data
    for key in where[:-1]:
        node = node[key]
    node[where[-1]] = value
    path = tmp_path_factory.getbasetemp() / "odd.yaml"
    path.write_text(yaml.safe_dump(data, allow_unicode=True))
    try:
        graph, findings = examine(path)
    except DynamoBlobError:
        return
    if graph is None:
        assert findings
    else:
        check_loaded(graph)


def test_deep_and_large_files_are_refused(tmp_path: Path) -> None:
    for text in ("[" * 3000, "a: " + "{a: " * 200 + "1" + "}" * 200, "x: [" + "1," * 30_000 + "1]", "#" * (2 << 20)):
        path = tmp_path / "big.yaml"
        path.write_text(text)
        assert {f.code for f in check_graph(path)} <= {"GRAPH-YAML", "GRAPH-UNREADABLE"}


def test_the_cli_never_shows_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "g.yaml").write_text("graph: [")
    calls = [
        ["serve", str(tmp_path / "g.yaml")],
        ["check", str(tmp_path)],
        ["plan"],
        ["nonsense"],
        ["scale", "x"],
        ["plan", "--diff", "a.json", "b.json"],
        ["status", "--state", str(tmp_path)],
        ["logs", "--state", str(tmp_path)],
    ]
    for call in calls:
        assert main(call) == 1, call
        out = capsys.readouterr()
        assert "Traceback" not in out.err + out.out
        first = (out.err or out.out).splitlines()[0]
        assert first.split(":")[0].replace("-", "").replace(" ", "").isupper(), first


def test_help_of_a_verb_by_either_spelling(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["help", "serve"], ["serve", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith("usage: dynamo serve ")
