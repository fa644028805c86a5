"""Publishing: once, in parallel, resumable, deduplicated, bounded; adopting what is in Blob already."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from blake3 import blake3

from components.common.errors import DynamoBlobError
from components.common.registry import upload
from components.common.registry.headers import tensor_index
from components.common.registry.layout import check_names, split_release
from components.common.registry.manifest import Manifest, canonical_json
from components.common.registry.progress import Progress
from components.common.registry.publish import adopt, publish_directory
from components.common.registry.release import load
from components.common.registry.verify import verify_content
from components.common.storage.azurite import log_records
from tests.registry_store import PROVENANCE, REPOSITORY, Registry, write_model


def publish(r: Registry, directory: Path, version: str = "1", **options: object) -> object:
    return publish_directory(
        r.publisher, r.layout.container, directory, "m", version, key=r.publisher_key, provenance=PROVENANCE, **options
    )  # type: ignore[arg-type]


def puts(r: Registry) -> list[str]:
    prefix = f"/weights/{r.layout.container}/"
    return [
        f"{x['path'].removeprefix(prefix)}{'?' + x['comp'] if x['comp'] else ''}"
        for x in log_records(r.store.log)
        if x["method"] == "PUT" and x["path"].startswith(prefix) and x["status"] == 201
    ]


def test_manifest_names_every_byte(registry: Registry, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", floats=1000)
    (directory / "sub").mkdir()
    (directory / "sub" / "vocab.txt").write_text("a b c")
    (directory / "empty.txt").touch()
    (directory / ".git").mkdir()
    (directory / ".git" / "secret").write_text("no")
    done = publish(registry, directory, range_bytes=1024)
    m: Manifest = done.manifest  # type: ignore[attr-defined]
    assert [f.path for f in m.files] == [
        "config.json",
        "empty.txt",
        "model.safetensors",
        "sub/vocab.txt",
        "tokenizer.json",
    ]
    for f in m.files:
        data = (directory / f.path).read_bytes()
        assert (f.size, f.blake3, f.sha256) == (len(data), blake3(data).hexdigest(), hashlib.sha256(data).hexdigest())
        assert f.ranges == tuple(blake3(data[i : i + 1024]).hexdigest() for i in range(0, len(data), 1024))
        assert registry.serving.get(registry.layout.container, f.blob) == data
    assert [(t.name, t.dtype, t.shape) for t in m.tensors] == [("a", "F32", (500,)), ("b", "F32", (500,))]
    raw = (directory / "model.safetensors").read_bytes()
    assert raw[m.tensors[1].begin : m.tensors[1].end][:4] == struct.pack("<f", 500 / 7)
    stored = load(registry.serving, registry.layout, "m", "1")
    assert stored.manifest == m and stored.manifest_bytes == m.canonical() and stored.digest == m.digest()


def test_second_publish_of_the_same_content_changes_nothing(registry: Registry, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    first = publish(registry, directory)
    again = publish(registry, directory)
    assert (again.digest, again.uploaded) == (first.digest, 0)  # type: ignore[attr-defined]
    assert sum(p.startswith("releases/") for p in puts(registry)) == 2


def test_other_content_under_the_same_version_is_refused(registry: Registry, tmp_path: Path) -> None:
    publish(registry, write_model(tmp_path / "a", note="a"))
    with pytest.raises(DynamoBlobError) as caught:
        publish(registry, write_model(tmp_path / "b", note="b"))
    assert caught.value.code == "REGISTRY-VERSION-TAKEN" and "note.txt" in caught.value.why
    with pytest.raises(DynamoBlobError, match="provenance or format differ"):
        publish_directory(
            registry.publisher, registry.layout.container, tmp_path / "a", "m", "1", key=registry.publisher_key
        )


def test_versions_share_objects(registry: Registry, tmp_path: Path) -> None:
    publish(registry, write_model(tmp_path / "a", note="a", floats=10_000))
    done = publish(registry, write_model(tmp_path / "b", note="bb", floats=10_000), "2")
    assert done.uploaded == 2 and done.skipped == sum(f.size for f in done.manifest.files) - 2  # type: ignore[attr-defined]


def test_an_interrupted_publish_goes_on_where_it_stopped(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "_ONE_PUT", 0)  # every file in blocks
    directory = write_model(tmp_path / "m", floats=25_000)
    staged: list[str] = []

    def die_at_third_block(call: str) -> None:
        if call.startswith("stage"):
            staged.append(call)
            if len(staged) >= 8:
                raise KeyboardInterrupt

    account = registry.store.account("publisher", container=registry.layout.container)
    account.hook = die_at_third_block
    with pytest.raises(KeyboardInterrupt):
        publish_directory(
            account,
            registry.layout.container,
            directory,
            "m",
            "1",
            key=registry.publisher_key,
            provenance=PROVENANCE,
            range_bytes=10_000,
            parallel=1,
        )
    with pytest.raises(DynamoBlobError, match="REGISTRY-RELEASE-INCOMPLETE"):
        load(registry.serving, registry.layout, "m", "1")
    before = sum("?block" in p and "blocklist" not in p for p in puts(registry))
    done = publish(registry, directory, range_bytes=10_000)
    after = sum("?block" in p and "blocklist" not in p for p in puts(registry)) - before
    blocks = sum(len(f.ranges) for f in done.manifest.files)  # type: ignore[attr-defined]
    assert before == 7 and before + after == blocks and done.resumed  # type: ignore[attr-defined]
    assert verify_content(registry.serving, registry.layout, done.manifest).problems == []  # type: ignore[attr-defined]


def test_a_file_that_changes_meanwhile_is_refused(registry: Registry, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    account = registry.store.account("publisher", container=registry.layout.container)
    account.hook = lambda call: (
        (directory / "config.json").write_text('{"model_type": "other"}') if "manifest.json" in call else None
    )
    with pytest.raises(DynamoBlobError, match="REGISTRY-SOURCE-CHANGED"):
        publish_directory(account, registry.layout.container, directory, "m", "1", key=registry.publisher_key)
    with pytest.raises(DynamoBlobError, match="REGISTRY-RELEASE-INCOMPLETE"):
        load(registry.serving, registry.layout, "m", "1")


def test_progress_tells_bytes_and_rate(registry: Registry, tmp_path: Path) -> None:
    told: list[Progress] = []
    publish(registry, write_model(tmp_path / "m", floats=50_000), progress=told.append)
    last = {p.phase: p for p in told}
    assert last["hash"].done == last["hash"].total == last["upload"].done > 200_000 and last["upload"].rate > 0


def test_adopt_pins_what_is_in_blob_and_copies_nothing(registry: Registry, tmp_path: Path) -> None:
    directory, c = write_model(tmp_path / "m", floats=5000), registry.layout.container
    box = f"{c}-src"
    registry.root.ensure_container(box)
    for p in directory.iterdir():
        registry.root.put(box, f"models/x/{p.name}", p.read_bytes())
    registry.root.put(box, "models/xy/other", b"not of it")
    done = adopt(
        registry.publisher,
        c,
        f"az://{box}/models/x",
        "m",
        "1",
        key=registry.publisher_key,
        provenance=PROVENANCE,
        range_bytes=4096,
    )
    local = publish(registry, directory, "2", range_bytes=4096)
    assert (
        done.manifest.weights_digest == local.manifest.weights_digest
        and done.manifest.tensors == local.manifest.tensors
    )  # type: ignore[attr-defined]
    assert {(f.container, f.blob) for f in done.manifest.files} == {
        (box, f"models/x/{p.name}") for p in directory.iterdir()
    }
    assert verify_content(registry.serving, registry.layout, done.manifest).bytes == sum(
        f.size for f in done.manifest.files
    )
    registry.root.put(box, "models/x/config.json", b'{"model_type": "evil!"}')
    with pytest.raises(DynamoBlobError, match="REGISTRY-OBJECT-CORRUPT"):
        verify_content(registry.serving, registry.layout, done.manifest).raise_first()


@pytest.mark.parametrize("uri", ["az://", "http://x/y", "az:///x", "az://c/p?sig=1"])
def test_adopt_refuses_other_addresses(registry: Registry, uri: str) -> None:
    with pytest.raises(DynamoBlobError, match="REGISTRY-NAME"):
        adopt(registry.publisher, registry.layout.container, uri, "m", "1")


def test_nothing_to_publish(registry: Registry, tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "nope"):
        with pytest.raises(DynamoBlobError, match="REGISTRY-EMPTY"):
            publish(registry, directory)


@pytest.mark.parametrize("name", ["", "../x", "a/b/c", "-a", "a b", "a\n", "x" * 200, "é", "a//b"])
def test_names_that_could_leave_their_place(name: str) -> None:
    with pytest.raises(DynamoBlobError, match="REGISTRY-NAME"):
        check_names(name)


def test_release_names_are_read_back() -> None:
    assert split_release("releases/org/m/1.0/manifest.json") == ("org/m", "1.0") and split_release(
        "releases/m/1/manifest.json"
    ) == ("m", "1")
    assert split_release("releases/m/1/manifest.sig") is None and split_release("objects/ab") is None


def safetensors(header: object, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"1234", "a header needs 8"),
        (safetensors({}, length=2**40), "header of"),
        (safetensors(b"not json"), "header"),
        (safetensors([]), "not an object"),
        (safetensors({"a": F32}), "ends at byte"),
        (safetensors({"a": F32}, bytes(9)), "ends at byte"),
        (safetensors({"a": F32, "b": F32}, bytes(8)), "overlap"),
        (safetensors({"a": F32 | {"data_offsets": [8, 16]}}, bytes(16)), "hole"),
        (safetensors({"a": F32 | {"shape": [3]}}, bytes(8)), "for shape"),
        (safetensors({"a": F32 | {"dtype": "F31"}}, bytes(8)), "unknown dtype"),
        (safetensors({"a": F32 | {"shape": [-1, -2]}}, bytes(8)), "negative"),
        (safetensors({"a": {"dtype": "F32"}}, bytes(8)), "header"),
        (
            safetensors(b'{"a": ' + json.dumps(F32).encode() + b', "a": ' + json.dumps(F32).encode() + b"}", bytes(8)),
            "twice",
        ),
    ],
)
def test_unsound_safetensors_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(DynamoBlobError) as caught:
        tensor_index("x.safetensors", len(data), lambda at, n: data[at : at + n])
    assert caught.value.code == "REGISTRY-SAFETENSORS" and why in caught.value.why


def test_canonical_json_is_one_string_per_value() -> None:
    assert canonical_json({"b": 1, "a": ["é"]}) == '{"a":["é"],"b":1}\n'.encode()


@pytest.mark.slow
def test_memory_is_bounded_by_ranges_in_flight(registry: Registry, tmp_path: Path) -> None:
    """A file of 1 GiB is published and verified within 300 MiB on top of the interpreter."""
    directory = tmp_path / "m"
    directory.mkdir()
    with (directory / "model.gguf").open("wb") as f:
        for _ in range(16):
            f.write(os.urandom(2**20) * 64)
    script = (
        "import sys; from pathlib import Path\n"
        "def peak(): return int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])\n"
        "from components.common.storage.account import Account; from components.common.storage.config import AccountConfig\n"
        "from components.common.registry.publish import publish_directory; from components.common.registry.verify import verify_content\n"
        "from components.common.registry.layout import Layout\n"
        "a = Account(AccountConfig.model_validate_json(sys.argv[1])); base = peak()\n"
        "d = publish_directory(a, sys.argv[2], Path(sys.argv[3]), 'big', '1')\n"
        "v = verify_content(a, Layout(sys.argv[2]), d.manifest); assert not v.problems and v.bytes == 2**30\n"
        "print(peak() - base)\n"
    )
    argv = [
        sys.executable,
        "-c",
        script,
        registry.root.config.model_dump_json(),
        registry.layout.container,
        str(directory),
    ]
    out = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert out.returncode == 0, out.stderr[-2000:]
    assert int(out.stdout.split()[-1]) < 300 * 1024, f"{out.stdout} KiB"
