"""What the node cache gives up when there is no room, without a service around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.common.errors import DynamoBlobError
from components.common.registry.manifest import FileEntry
from components.weights.cache import NodeCache
from tests.faults.releases import MiB, make_release, random_model, tensors_of


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[FileEntry]:
    """Four weight files of one size."""
    root = tmp_path_factory.mktemp("release")
    random_model(root / "model", [{"w": tensors_of(seed, [300_000]).popitem()[1]} for seed in range(4)])
    manifest = make_release(root / "store", root / "model", range_bytes=MiB)
    found = [f for f in manifest.files if f.path.endswith(".safetensors")]
    assert len({f.size for f in found}) == 1 and len(found) == 4
    return found


def use(cache: NodeCache, file: FileEntry) -> None:
    """As a worker would that maps the file and goes; the first one fills it."""
    entry, work = cache.lease(file)
    cache.reserve(entry)
    for index in work:
        assert cache.write(entry, 0, memoryview(bytes(file.size)))
        cache.verified(entry, index)
    assert entry.state == "present"
    cache.release(entry)


def names(cache: NodeCache, files: list[FileEntry]) -> set[str]:
    """Paths of the files that are there, by directory and by status."""
    there = {p.name for p in (cache.directory / "objects").iterdir()}
    found = {f.path for f in files if f.blake3 in there}
    assert len(there) == cache.status()["present"] == len(found)
    assert found == {f.path for f in files if cache.entry(f.blake3) is not None}
    return found


def test_the_file_that_was_not_used_for_longest_goes(tmp_path: Path, files: list[FileEntry]) -> None:
    one, two, three, four = files
    cache = NodeCache(tmp_path / "cache", 3 * one.size)
    for file in (one, two, three):
        use(cache, file)
    assert names(cache, files) == {one.path, two.path, three.path}
    use(cache, one)  # the first to come is now the last used: first in, first out would give it up
    use(cache, four)
    assert names(cache, files) == {one.path, three.path, four.path}
    assert cache.status()["evicted"] == 1 and cache.used == 3 * one.size
    use(cache, two)  # comes back, and now the third is the oldest
    assert names(cache, files) == {one.path, two.path, four.path}
    cache.close()


def test_a_file_in_use_stays_however_old(tmp_path: Path, files: list[FileEntry]) -> None:
    one, two, three, four = files
    cache = NodeCache(tmp_path / "cache", 3 * one.size)
    for file in (one, two, three):
        use(cache, file)
    held, _ = cache.lease(one)
    use(cache, two)
    use(cache, three)
    use(cache, four)
    assert names(cache, files) == {one.path, three.path, four.path}, "the oldest is mapped: the next one goes"
    others = [cache.lease(file)[0] for file in (three, four)]
    with pytest.raises(DynamoBlobError, match="WEIGHTS-CACHE-FULL"):
        cache.lease(two)
    assert names(cache, files) == {one.path, three.path, four.path}
    cache.release(held)
    use(cache, two)
    assert names(cache, files) == {two.path, three.path, four.path}
    for entry in others:
        cache.release(entry)
    cache.close()
