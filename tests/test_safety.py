"""What a run must never do: run foreign code, ask the network behind one's back, leak a secret, write elsewhere."""

from __future__ import annotations

import ast
import json
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain
from megatrain.anatomy.load import load_model, load_tokenizer
from megatrain.data import load_records, train_tokenizer
from megatrain.folder import RunFolder
from megatrain.jobs import make_run, note_settings
from megatrain.run import RunFailedError
from megatrain.settings import Settings, load_settings

TIMEOUT_S = 60
PACKAGE = Path(megatrain.__file__).parent


@pytest.fixture(autouse=True)
def _wandb_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "caches"))


# ---- foreign code ----

MODEL_WITH_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path(r"{trace}").write_text("foreign code ran")
class OwnConfig(LlamaConfig):
    model_type = "own-thing"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A model whose class comes with it, and the file that its code leaves behind."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, trace = tmp_path / "own", tmp_path / "it-ran"
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=300
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    train_tokenizer(["a b c"], vocab_size=300).save_pretrained(folder)
    (folder / "own.py").write_text(MODEL_WITH_CODE.format(trace=trace))
    values = json.loads((folder / "config.json").read_text())
    values |= {
        "model_type": "own-thing",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }
    (folder / "config.json").write_text(json.dumps(values))
    return folder, trace


def settings_for(tmp_path: Path, model: Path, *changes: str, **data: Any) -> Settings:
    (tmp_path / "data.jsonl").write_text('{"text": "a b c a b c"}\n' * 8)
    values = {
        "model": {"name": str(model)},
        "data": {"source": str(tmp_path / "data.jsonl"), "sequence": 8, "batch": 2, **data},
        "engine": {"device": "cpu", "dtype": "float32"},
        "run": {"folder": str(tmp_path / "run"), "steps": 2},
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(values))
    return load_settings(path, changes)


def test_code_of_a_model_is_refused_unless_it_is_asked_for(tmp_path: Path, with_code: tuple[Path, Path]) -> None:
    folder, trace = with_code
    refused = r"own brings code of its own, .*set model\.trust_remote_code: true"
    with pytest.raises(ValueError, match=refused):
        load_model(folder, dtype=torch.float32)
    with pytest.raises(ValueError, match=refused):
        make_run(settings_for(tmp_path, folder))
    assert not trace.exists()
    model = load_model(folder, dtype=torch.float32, trust_remote_code=True)
    assert type(model).__name__ == "OwnModel"
    trace.unlink()
    with make_run(settings_for(tmp_path, folder, "model.trust_remote_code=true")).engine as engine:
        assert engine.sizes.layers == 1


def test_nothing_but_the_option_says_true() -> None:
    """Wherever the package passes trust_remote_code on, it is False or what the user set."""
    said = [
        ast.unparse(keyword.value)
        for tree in trees()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg == "trust_remote_code"
    ]
    assert len(said) > 3
    assert {value.split(".")[-1] for value in said} == {"False", "trust_remote_code"}


def test_nothing_is_unpickled_but_what_came_through_the_own_pipe() -> None:
    """run/child.py reads its job from the pipe of the process that started it, and from nowhere else."""
    allowed = {("child.py", "pickle.load(sys.stdin.buffer)")}
    found = {(path.name, ast.unparse(call)) for path, call in calls() if _unpickles(call)}
    assert found == allowed
    imported = {path.name for path in PACKAGE.rglob("*.py") if "import pickle" in path.read_text()}
    assert imported == {"child.py"}


def _unpickles(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    return (
        name.split(".")[0] in ("pickle", "dill", "joblib", "shelve", "marshal")
        or name in ("torch.load", "cloudpickle.load", "cloudpickle.loads", "np.load", "numpy.load", "eval", "exec")
        or name.endswith((".read_pickle", ".load_state_dict_from_url"))
    )


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("pickle-ran",)


def test_weights_that_are_pickle_are_refused_and_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = plain_model(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Bomb()}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"model has its weights as pickle \(\.bin\).*store them as safetensors"):
        load_model(folder, dtype=torch.float32)
    assert not Path("pickle-ran").exists()


def trees() -> Iterator[ast.Module]:
    return (ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py"))


def calls() -> Iterator[tuple[Path, ast.Call]]:
    for path in PACKAGE.rglob("*.py"):
        yield from ((path, node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


# ---- the network ----


ASK: dict[str, Callable[[], object]] = {
    "model": lambda: load_model("no-one/no-model", dtype=torch.float32),
    "tokenizer": lambda: load_tokenizer("no-one/no-model"),
    "data": lambda: load_records("no-one/no-data"),
}


def test_offline_means_offline_and_says_so() -> None:
    """Hugging Face reads the variable when it is imported, so this is a process of its own, without sockets."""
    code = f"""
import socket, sys
def refuse(*_, **__):
    sys.exit("the network was asked")
socket.socket.connect = socket.getaddrinfo = refuse
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_safety
for ask in test_safety.ASK.values():
    try:
        ask()
    except ValueError as error:
        print(error)
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(ASK)
    assert all("no-one/no-" in line and "HF_HUB_OFFLINE forbids asking the hub" in line for line in lines)


@pytest.mark.parametrize("what", ["model", "tokenizer"])
def test_a_name_that_is_nowhere_is_told_without_the_network_at_once(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried: list[object] = []

    def refuse(*arguments: object, **_: object) -> None:
        tried.append(arguments)
        raise OSError("there is no network")

    def sleep(seconds: float) -> None:
        raise AssertionError(f"it waits {seconds} s and tries again")

    monkeypatch.setattr("megatrain.anatomy.hub.is_offline_mode", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(ValueError, match=r"'no-one/no-model' cannot be loaded: the hub cannot be reached \(.*\); what"):
        ASK[what]()
    assert tried


# ---- secrets ----

SECRETS = {name: f"sentinel-{name.lower()}-0123456789" for name in ("HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_KEY")}
SECRETS["WANDB_API_KEY"] = "5e" * 20


@dataclass(frozen=True)
class Left:
    """The folders of two runs, in processes of their own, with secrets in the environment and a usual umask."""

    trained: Path
    failed: Path


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Left:
    tmp_path = tmp_path_factory.mktemp("left")
    sinks = ["run.sinks=[tensorboard, wandb]", "run.checkpoint_every=1"]
    trained = settings_for(tmp_path, plain_model(tmp_path), *sinks)
    failed = settings_for(tmp_path, tmp_path / "nowhere", *sinks, f"run.folder={tmp_path}/failed")
    with pytest.MonkeyPatch.context() as patch, umask(0o022):
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        patch.setenv("WANDB_MODE", "offline")
        runs = [make_run(settings, process=True).start() for settings in (trained, failed)]
        runs[0].wait(TIMEOUT_S)
        with pytest.raises(RunFailedError, match="nowhere"):
            runs[1].wait(TIMEOUT_S)
        for settings in (trained, failed):
            note_settings(settings)
    return Left(Path(trained.run.folder), Path(failed.run.folder))


def test_no_secret_of_the_environment_reaches_a_folder(left: Left) -> None:
    files = [path for folder in (left.trained, left.failed) for path in folder.rglob("*") if path.is_file()]
    looked_for = {
        "settings.yaml",
        "run.log",
        "run.json",
        "environment.txt",
        "metrics.jsonl",
        "status.json",
        "data.json",
    }
    assert looked_for <= {path.name for path in files}
    assert "Traceback" in (left.failed / "run.log").read_text()
    for path in files:
        data = path.read_bytes()
        held = [name for name, value in SECRETS.items() if value.encode() in data]
        assert not held, f"{path} holds {held}"


def plain_model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=300
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    train_tokenizer(["a b c"], vocab_size=300).save_pretrained(folder)
    return folder


# ---- who may read, and where it writes ----


@contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
        assert os.umask(value) == value, "the umask was changed and not restored"
    finally:
        os.umask(before)


def test_a_run_in_a_thread_is_for_its_owner_only(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, plain_model(tmp_path), "run.sinks=[tensorboard, wandb]", "run.checkpoint_every=1")
    folder, modes = Path(settings.run.folder), set()

    def look(*_: object) -> None:
        modes.add(stat.S_IMODE((folder / "control.sock").stat().st_mode))

    with umask(0o022):
        for _ in range(2):  # the second one moves what the first one left
            make_run(settings, on_step=look).start().wait(TIMEOUT_S)
            note_settings(settings)
    assert (folder / "earlier").is_dir()
    assert modes == {0o600}
    require_owner_only(folder)


def test_a_run_in_a_process_is_for_its_owner_only(left: Left) -> None:
    require_owner_only(left.trained)


def require_owner_only(folder: Path) -> None:
    found = [folder, *folder.rglob("*")]
    wrong = {path.name: oct(path.stat().st_mode) for path in found if stat.S_IMODE(path.stat().st_mode) != right(path)}
    assert not wrong
    expected = {"model", "checkpoints", "tensorboard", "wandb", "trace.json.gz", "data.json", "metrics.jsonl"}
    assert expected <= {path.name for path in found}


def right(path: Path) -> int:
    return 0o700 if path.is_dir() else 0o600


ESCAPES = [
    "../escaped",
    "/tmp/megatrain-escaped",
    "a/../../escaped",
    "~/escaped",
    "x\\..\\escaped",
    "-rf",
    "$(touch e)",
]


def test_no_field_of_a_record_and_no_key_leads_out_of_the_folder(tmp_path: Path) -> None:
    model = plain_model(tmp_path)
    settings = settings_for(tmp_path, model, "run.sinks=[tensorboard, wandb]", "run.checkpoint_every=1")
    fields = ["text", "name", "path", "file", "source", "id", "folder"]
    rows = [dict.fromkeys(fields, f"{escape} a b c") for escape in ESCAPES]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = outside(tmp_path)
    make_run(settings).start().wait(TIMEOUT_S)
    note_settings(settings)
    assert outside(tmp_path) == before
    assert not Path("/tmp/megatrain-escaped").exists()
    for escape in ESCAPES:
        with pytest.raises(ValueError, match="sinks"):
            settings_for(tmp_path, model, f"run.sinks=[{json.dumps(escape)}]")


def outside(tmp_path: Path) -> set[str]:
    """What lies beside the run's folder; W&B's own caches are where its variables say."""
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    return {path for path in found if path.split("/")[0] not in ("run", "caches")}


@pytest.mark.parametrize(
    "name", ["run.log", "metrics.jsonl", "checkpoints", "wandb", "tensorboard", "model", "earlier", "settings.yaml"]
)
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str, exists: bool) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    folder.mkdir()
    if exists:
        elsewhere.mkdir() if "." not in name else elsewhere.write_text("mine")
    (folder / name).symlink_to(elsewhere)
    for resume in (False, True):
        with pytest.raises(ValueError, match=rf"{name} is a link to .*elsewhere, and a run writes only into its own"):
            RunFolder(folder).prepare(resume=resume)
    assert elsewhere.exists() == exists
    assert not exists or elsewhere.is_dir() or elsewhere.read_text() == "mine"


def test_other_links_are_nobodys_business(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes").symlink_to(tmp_path)
    (folder / "inner.jsonl").write_text("")
    (folder / "metrics.jsonl").symlink_to("inner.jsonl")
    RunFolder(folder).prepare()
