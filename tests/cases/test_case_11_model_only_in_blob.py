"""Case 11 (vllm#22843, #18016, #18083; ray#62962): config and tokenizer could not be read from an object URI.

The model's directory exists only in the store: published, approved, removed from this disk. Configuration,
tokenizer, chat template and the model's own code must all resolve from what the worker makes of it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from components.common.engine.config import EngineArgs, WorkerConfig
from components.common.engine.remote_code import check_remote_code
from components.common.errors import DynamoBlobError
from components.common.loading.config import ReleaseConfig, TrustConfig, WeightsConfig
from components.common.loading.files import materialise_small_files
from components.common.registry.approve import approve
from components.common.registry.publish import publish_directory
from tests.faults.services import REPOSITORY
from tests.registry_store import PROVENANCE, Registry, registry  # noqa: F401
from tools.tiny_model import build

MODELS = REPOSITORY / ".state" / "models"
CODE = """
from transformers import LlamaConfig

class OddConfig(LlamaConfig):
    model_type = "odd"
    marker = "code of the release"
"""
READ = """
import json, sys
from transformers import AutoConfig, AutoTokenizer
out = []
for path in sys.argv[1:]:
    config = AutoConfig.from_pretrained(path, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    out.append({"marker": getattr(config, "marker", ""), "hidden": config.hidden_size, "text": text, "ids": tokenizer("Hello world")["input_ids"]})
print(json.dumps(out))
"""


def source(directory: Path, *, code: bool, auto_map: str = "configuration_odd.OddConfig") -> Path:
    """A real small model, with code of its own if asked; `auto_map` names the class."""
    model = MODELS / "tiny-full"
    build("full", model, MODELS / "smollm2-135m-instruct")
    shutil.copytree(model, directory)
    if code:
        config = json.loads((directory / "config.json").read_text())
        config |= {"model_type": "odd", "auto_map": {"AutoConfig": auto_map}}
        (directory / "config.json").write_text(json.dumps(config))
        (directory / "configuration_odd.py").write_text(CODE)
    return directory


def published(r: Registry, directory: Path, *, says: bool, allow: bool) -> str:
    """Publish `directory` as m 1, approve it, and remove it from this disk; the manifest's digest."""
    provenance = {**PROVENANCE, **({"remote_code": True} if says else {})}
    done = publish_directory(
        r.publisher, r.layout.container, directory, "m", "1", key=r.publisher_key, provenance=provenance
    )
    approve(
        r.approver, r.layout, "m", "1", r.approver_key, publisher_keys=(r.publisher_key.public,), allow=("remote-code",) if allow else ()
    )  # fmt: skip
    shutil.rmtree(directory)
    return done.manifest.digest()


def weights(r: Registry, work: Path, trust: TrustConfig | None = None) -> WeightsConfig:
    return WeightsConfig(
        release=ReleaseConfig(model="m", version="1", container=r.layout.container), account=r.serving.config, trust=trust or r.trust,
        root=str(work / "root"),
    )  # fmt: skip


def worker(w: WeightsConfig, **extra: Any) -> WorkerConfig:
    return WorkerConfig(
        name="aggregated-0", role="aggregated", served_model="m", namespace="n", component="backend", run_dir="/nowhere", weights=w,
        engine=EngineArgs(extra=extra),
    )  # fmt: skip


def read(tmp_path: Path, *paths: Path) -> list[dict[str, Any]]:
    """What transformers makes of the directories, in a process that has nothing but them."""
    done = subprocess.run(
        [sys.executable, "-c", READ, *map(str, paths)], cwd=tmp_path, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return list(json.loads(done.stdout.splitlines()[-1]))  # transformers says more before


def test_config_tokenizer_template_and_code_resolve(registry: Registry, tmp_path: Path) -> None:  # noqa: F811
    published(registry, source(tmp_path / "source", code=True), says=True, allow=True)
    w = weights(registry, tmp_path)
    path = materialise_small_files(w)
    check_remote_code(worker(w, trust_remote_code=True), path)
    model = MODELS / "tiny-full"
    found, wanted = read(tmp_path, path, model)
    assert found["marker"] == "code of the release"
    assert found["hidden"] == json.loads((model / "config.json").read_text())["hidden_size"]
    assert (found["text"], found["ids"]) == (wanted["text"], wanted["ids"]) and "Hi" in found["text"]
    assert not list(path.rglob("*.safetensors")), "weights never lie on this disk"


@pytest.mark.parametrize(("says", "allow"), [(False, True), (True, False)])
def test_code_needs_the_release_and_the_approver(registry: Registry, tmp_path: Path, says: bool, allow: bool) -> None:  # noqa: F811
    with pytest.raises(DynamoBlobError) as e:
        published(registry, source(tmp_path / "source", code=True), says=says, allow=allow)
    assert e.value.code == "REGISTRY-CHECK-FAILED" and "remote" in str(e.value)
    with pytest.raises(DynamoBlobError) as e:
        materialise_small_files(weights(registry, tmp_path))
    assert e.value.code == "REGISTRY-UNAPPROVED"


def test_the_worker_refuses_code_that_nobody_allowed(registry: Registry, tmp_path: Path) -> None:  # noqa: F811
    """Without approvals in the plan the release's own word is not enough, and without its word nothing is."""
    publish_directory(
        registry.publisher, registry.layout.container, source(tmp_path / "source", code=True), "m", "1", key=registry.publisher_key,
        provenance={**PROVENANCE, "remote_code": True},
    )  # fmt: skip
    signed = weights(registry, tmp_path, registry.trust.model_copy(update={"require": "signature"}))
    path = materialise_small_files(signed)
    with pytest.raises(DynamoBlobError) as e:
        check_remote_code(worker(signed, trust_remote_code=True), path)
    assert e.value.code == "WEIGHTS-REMOTE-CODE" and "no approver" in e.value.why
    check_remote_code(worker(signed), path)  # nothing runs without the word in the profile
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "provenance": PROVENANCE}))
    with pytest.raises(DynamoBlobError, match="does not say that it brings code"):
        check_remote_code(worker(weights(registry, tmp_path), trust_remote_code=True), path)


def test_code_of_another_repository_is_never_fetched(registry: Registry, tmp_path: Path) -> None:  # noqa: F811
    published(
        registry, source(tmp_path / "source", code=True, auto_map="someone/else--configuration_odd.OddConfig"), says=True, allow=True
    )  # fmt: skip
    w = weights(registry, tmp_path)
    path = materialise_small_files(w)
    with pytest.raises(DynamoBlobError) as e:
        check_remote_code(worker(w, trust_remote_code=True), path)
    assert e.value.code == "WEIGHTS-REMOTE-CODE" and "someone/else--" in e.value.why
