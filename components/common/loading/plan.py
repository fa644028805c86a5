"""Where every byte of a release goes: ranges (what is fetched and verified) and segments (what is allocated).

A *segment* is a stretch of one file that holds whole tensors in one buffer. Ranges and tensors do not
share borders, so a range may touch several segments: one of them receives it (its home, whose buffer extends
over the whole range), the others get their part by copy. The home is the first it touches, or of two small
segments the one with the larger part: then at most half a range per segment is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from components.common.errors import DynamoBlobError
from components.common.registry.manifest import FileEntry, Manifest, TensorEntry

SEGMENT_BYTES = 64 * 2**20
_ALIGN = 4096

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(slots=True, eq=False)
class Segment:
    """Bytes [begin, end) of `file`; the buffer reaches from the begin of its first home range to `stop`, the end of
    its last, where these lie outside."""

    file: FileEntry
    begin: int
    end: int
    tensors: list[TensorEntry]
    stop: int = 0
    index: int = 0
    waiting: int = 0  # ranges that still miss
    lead: int = 0  # offset of `begin` in the buffer: keeps the file's alignment, so that views of tensors stay aligned
    mapped: bool = False  # the buffer is a mapping of the whole file

    def __post_init__(self) -> None:
        self.lead = self.begin % _ALIGN

    def receive(self, begin: int, end: int) -> None:
        """Make room for a whole range that touches the segment."""
        if begin < self.begin:
            self.lead = self.begin - begin + begin % _ALIGN
        self.stop = max(self.stop, end)

    @property
    def capacity(self) -> int:
        return self.lead + max(self.stop, self.end) - self.begin


@dataclass(slots=True, eq=False)
class RangeJob:
    """Range `index` of `file`: bytes [begin, end). `home` receives it, `others` get their part by copy."""

    file: FileEntry
    index: int
    begin: int
    end: int
    digest: str
    home: Segment
    others: list[Segment] = field(default_factory=list)


def is_weights(path: str) -> bool:
    return path.endswith(".safetensors")


def weight_files(manifest: Manifest) -> list[FileEntry]:
    return [f for f in manifest.files if is_weights(f.path)]


def small_files(manifest: Manifest) -> list[FileEntry]:
    return [f for f in manifest.files if not is_weights(f.path)]


def check_budget(manifest: Manifest, budget: int) -> None:
    """Refuse before the first byte what can never fit. Raises WEIGHTS-BUDGET."""
    for t in manifest.tensors:
        need = t.end - t.begin + 2 * manifest.range_bytes
        if need > budget:
            raise DynamoBlobError(
                "WEIGHTS-BUDGET", "a tensor is larger than the memory budget of the loader", where=f"{t.file}: {t.name}",
                why=f"it needs {need} bytes ({t.end - t.begin} + two ranges of {manifest.range_bytes}), the budget is {budget} bytes",
                do="raise weights.budget_bytes", need_bytes=need, budget_bytes=budget,
            )  # fmt: skip


def check_index(manifest: Manifest) -> None:
    """The tensor index must lie inside its files and agree with shapes. Raises WEIGHTS-INDEX."""
    sizes = {f.path: f.size for f in manifest.files}
    last: dict[str, int] = {}
    for t in manifest.tensors:
        count = 1
        for n in t.shape:
            count *= n
        bad = ""
        if t.file not in sizes or not is_weights(t.file):
            bad = "it names a file that is not a safetensors file of the release"
        elif not last.get(t.file, 8) <= t.begin <= t.end <= sizes[t.file]:
            bad = f"bytes {t.begin}-{t.end} overlap another tensor or leave the file of {sizes[t.file]} bytes"
        elif t.dtype not in ITEM_BYTES:
            bad = f"dtype {t.dtype} is not supported"
        elif count * ITEM_BYTES[t.dtype] != t.end - t.begin:
            bad = f"shape {list(t.shape)} of {t.dtype} is not {t.end - t.begin} bytes"
        if bad:
            raise DynamoBlobError(
                "WEIGHTS-INDEX",
                "the manifest's tensor index is not valid",
                where=f"{t.file}: {t.name}",
                why=bad,
                do="publish the release again",
            )
        last[t.file] = t.end
    for f in manifest.files:
        if -(-f.size // manifest.range_bytes) != len(f.ranges):
            raise DynamoBlobError(
                "WEIGHTS-INDEX",
                "the manifest has a wrong number of range digests",
                where=f.path,
                why=f"{len(f.ranges)} for {f.size} bytes",
                do="publish the release again",
            )


def plan_file(
    file: FileEntry, tensors: Sequence[TensorEntry], range_bytes: int, segment_bytes: int
) -> tuple[list[Segment], list[RangeJob]]:
    """Segments and ranges of one file, both in file order. Every byte belongs to exactly one range."""
    segments = _segments(file, tensors, segment_bytes)
    jobs: list[RangeJob] = []
    at = 0
    for index, digest in enumerate(file.ranges):
        begin, end = index * range_bytes, min(file.size, (index + 1) * range_bytes)
        while segments[at].end <= begin:
            at += 1
        touched = [segments[at]]
        for s in segments[at + 1 :]:
            if s.begin >= end:
                break
            touched.append(s)
        home = _home(touched, end, range_bytes, segment_bytes)
        home.receive(begin, end)
        for s in touched:
            s.waiting += 1
        jobs.append(RangeJob(file, index, begin, end, digest, home, [s for s in touched if s is not home]))
    return segments, jobs


def _home(touched: list[Segment], end: int, range_bytes: int, segment_bytes: int) -> Segment:
    """The second of two, if more of the range is its: 8 MiB less to copy where a file's header shifts all borders.

    The first then needs the second's memory to become complete, so both must fit a budget (of four segments) at once.
    """
    if len(touched) == 2 and min(end, touched[1].end) - touched[1].begin > range_bytes // 2:
        both = sum(s.end - s.begin + 2 * range_bytes + _ALIGN for s in touched)
        if both <= 4 * segment_bytes:
            return touched[1]
    return touched[0]


def _segments(file: FileEntry, tensors: Iterable[TensorEntry], segment_bytes: int) -> list[Segment]:
    """Whole tensors packed up to `segment_bytes`; together they cover the file (header and gaps included)."""
    out = [Segment(file, 0, 0, [])]
    for t in tensors:
        current = out[-1]
        if current.tensors and t.end - current.begin > segment_bytes:
            current.end = t.begin
            out.append(Segment(file, t.begin, t.end, [t]))
        else:
            current.tensors.append(t)
            current.end = t.end
    out[-1].end = file.size
    return [s for s in out if s.end > s.begin or s.tensors] or out
