"""Checkpoints as people have them: Hub ids, revisions, pickles, GGUF, dtypes, tied weights, what lies beside them."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import gguf
import huggingface_hub.constants
import pytest
import torch
from helpers import llama, randomize, relative
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from kvfold.checkpoint.loading import Access, load, weight_files
from kvfold.cli import main
from kvfold.model import KvfoldError

MODEL = "herons/tiny-llama"
COMMITS = {"main": "a" * 40, "v1": "b" * 40, "refs/pr/3": "c" * 40}
TOKEN = "hf_aSecretThatMustNotShow"
COMMANDS = ("analyze", "convert", "evaluate", "generate")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text_file: Path) -> Any:
    """Run a command on a model, small; returns its exit status and what it printed (output, errors)."""
    extra = {
        "analyze": [],
        "convert": [tmp_path / "out", "--method", "svd"],
        "evaluate": ["--text", text_file, "--window", 64, "--windows", 2],
        "generate": ["--prompt", "Sentence", "--max-new-tokens", 8],
    }

    def run_it(command: str, model: object, *options: object) -> tuple[Any, str, str]:
        arguments = [command, model, *extra[command], *options]
        monkeypatch.setattr("sys.argv", ["kvfold", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main()
        return (exit_.value.code, *capsys.readouterr())

    return run_it


@pytest.fixture
def works(run: Any) -> Any:
    """Run a command that must succeed without a word on standard error; returns what it printed."""

    def check(*arguments: object) -> str:
        status, out, error = run(*arguments)
        assert (status, error) == (0, "")
        return out

    return check


@pytest.fixture
def fails(run: Any, tmp_path: Path) -> Any:
    """Run a command that must fail with one line, which is returned, and no folder left behind."""

    def check(*arguments: object, says: str, leaves: bool = False) -> str:
        status, _, error = run(*arguments)
        assert status not in (0, None)
        assert error.count("\n") == 1
        assert error.startswith("kvfold: ")
        assert says in error
        assert "unexpected" not in error
        assert (tmp_path / "out").exists() is leaves
        return error

    return check


@pytest.fixture
def copy_of(source: Path, tmp_path: Path) -> Path:
    """A copy of the source that may be changed."""
    return Path(shutil.copytree(source, tmp_path / "model"))


@pytest.fixture
def other(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A checkpoint of the source's shape with other weights."""
    folder = tmp_path / "other"
    randomize(llama(), seed=7).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def hub_cache(home: Path, revisions: dict[str, Path]) -> Path:
    """Lay out a Hub cache by hand, as a download would: blobs, links to them, and refs to commits."""
    root = home / "hub" / f"models--{MODEL.replace('/', '--')}"
    (root / "blobs").mkdir(parents=True)
    for revision, folder in revisions.items():
        ref = root / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(COMMITS[revision])
        snapshot = root / "snapshots" / COMMITS[revision]
        snapshot.mkdir(parents=True)
        for file in folder.iterdir():
            blob = root / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
            shutil.copyfile(file, blob)
            (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob.name))
    return root


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Put revisions of ``MODEL`` into a cache of this process' own, with the Hub out of reach."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return lambda **revisions: hub_cache(tmp_path / "home", revisions)


class FakeHub:
    """A Hub with one model on this machine, enough of it for huggingface_hub's client.

    Attributes:
        token: what a request must carry. files: of every commit, name → bytes. seen: (method, path, token) of requests.
        refusal, says: error code and message for another token. moves: main is another commit from the next request on.
    """

    def __init__(self) -> None:
        self.token: str | None = None
        self.files: dict[str, dict[str, bytes]] = {}
        self.seen: list[tuple[str, str, str | None]] = []
        self.refusal, self.says = "GatedRepo", "no"
        self.commits, self.moves = COMMITS.copy(), False

    def put(self, revision: str, folder: Path, **more: bytes) -> None:
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.files[COMMITS[revision]] = files | more

    def fetched(self) -> set[str]:
        """Names of the files whose content was asked for."""
        return {path.split("/", 5)[5] for method, path, _ in self.seen if method == "GET" and "/resolve/" in path}

    def answer(self, method: str, path: str, token: str | None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        self.seen.append((method, path, token))
        if self.token is not None and token != self.token:
            return 401, {"X-Error-Code": self.refusal, "X-Error-Message": self.says}, b""
        if path.startswith(f"/api/models/{MODEL}/revision/"):
            revision = path.split("/revision/")[1]
            commit = self.commits.get(revision, revision)
            if self.moves:
                self.commits["main"] = COMMITS["v1"]
            if commit not in self.files:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b""
            return 200, {}, json.dumps({"id": MODEL, "sha": commit}).encode()
        if path.startswith(f"/api/models/{MODEL}/tree/"):
            files = self.files[path.split("/")[-1]]
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            return 200, {}, json.dumps(entries).encode()
        if path.startswith(f"/{MODEL}/resolve/"):
            commit, name = path.removeprefix(f"/{MODEL}/resolve/").split("/", 1)
            data = self.files[commit].get(name)
            if data is None:
                return 404, {"X-Error-Code": "EntryNotFound"}, b""
            return 200, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}, data
        return 404, {"X-Error-Code": "RepoNotFound"}, b""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A Hub to talk to over HTTP, an empty cache, and no login."""
    fake = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            status, headers, body = fake.answer(self.command, unquote(urlsplit(self.path).path), token)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_GET = do_HEAD = reply

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "home" / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield fake
    server.shutdown()
    server.server_close()


def to_pickle(folder: Path, shards: int = 0, keep: bool = False, **options: Any) -> None:
    """Store a folder's safetensors as ``pytorch_model.bin``, or as shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    if not shards:
        torch.save(tensors, folder / "pytorch_model.bin", **options)
    else:
        names = [f"pytorch_model-{number + 1:05}-of-{shards:05}.bin" for number in range(shards)]
        where = {key: names[index % shards] for index, key in enumerate(sorted(tensors))}
        for name in names:
            torch.save({key: tensors[key] for key in tensors if where[key] == name}, folder / name)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    if not keep:
        (folder / "model.safetensors").unlink()


def embeddings(folder: Path) -> torch.Tensor:
    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"]


class Malice:
    """Unpickled as usual, makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


# Hub ids and revisions


def test_each_revision_is_loaded(cached: Any, source: Path, other: Path) -> None:
    cached(**{"main": source, "v1": other, "refs/pr/3": other})
    for revision, folder in ((None, source), ("main", source), ("v1", other), ("refs/pr/3", other)):
        checkpoint = load(MODEL, access=Access(revision))
        assert torch.equal(checkpoint.model.get_input_embeddings().weight, embeddings(folder))
        assert checkpoint.folder.name == COMMITS[revision or "main"]
        assert checkpoint.tokenizer is not None
    assert torch.equal(load(MODEL, access=Access("b" * 40)).model.lm_head.weight, load(str(other)).model.lm_head.weight)


@pytest.mark.parametrize("command", ["analyze", "evaluate", "generate"])
def test_a_revision_gives_the_figures_of_its_files(
    cached: Any, works: Any, fails: Any, source: Path, other: Path, tmp_path: Path, command: str
) -> None:
    cached(main=source, v1=other)
    figures = []
    for model, *options in ((other,), (MODEL, "--revision", "v1"), (MODEL,)):
        works(command, model, *options, "--json", tmp_path / "figures.json")
        figures.append(without_names(json.loads((tmp_path / "figures.json").read_text())))
    assert figures[0] == figures[1] != figures[2]
    fails(command, MODEL, "--revision", "v9", says="revision 'v9' is not in the local cache")


def without_names(figures: Any) -> Any:
    """The figures of a command without the model's name."""
    if isinstance(figures, dict):
        return {name: without_names(value) for name, value in figures.items() if name not in ("model", "path")}
    return [without_names(value) for value in figures] if isinstance(figures, list) else figures


def test_the_recipe_records_the_commit(
    cached: Any, works: Any, fails: Any, source: Path, other: Path, tmp_path: Path
) -> None:
    cached(main=source, v1=other)
    works("convert", MODEL, "--revision", "v1")
    out = tmp_path / "out"
    assert json.loads((out / "kvfold.json").read_text())["source"] == {
        "path": MODEL,
        "model_type": "llama",
        "revision": COMMITS["v1"],
    }
    assert COMMITS["v1"] in (out / "README.md").read_text()
    assert torch.equal(embeddings(out), embeddings(other))
    fails("convert", MODEL, "--overwrite", "--revision", "v9", says="revision 'v9' is not in the local", leaves=True)
    for path in out.iterdir():
        assert str(tmp_path) not in path.read_text(errors="ignore"), f"{path.name} tells where the cache is"


def test_the_environment_says_where_the_cache_is(source: Path, other: Path, tmp_path: Path) -> None:
    """As a user has it: HF_HOME and HF_HUB_OFFLINE, nothing changed inside the process."""
    hub_cache(tmp_path, {"main": source, "v1": other})
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-m", "kvfold.cli", "convert", MODEL, "out", "--method", "svd", "--revision", "v1"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment | python_path()
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "out" / "kvfold.json").read_text())["source"]["revision"] == COMMITS["v1"]
    assert torch.equal(embeddings(tmp_path / "out"), embeddings(other))


def python_path() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(__file__).parents[2])}


def test_a_revision_belongs_to_hub_ids_only(
    cached: Any, works: Any, fails: Any, source: Path, other: Path, tmp_path: Path
) -> None:
    cached(main=source, v1=other)
    for command in ("analyze", "convert", "generate"):
        fails(command, source, "--revision", "v1", says="is a local folder and has no revision 'v1'")
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    fails("analyze", tmp_path / "tiny.gguf", "--revision", "v1", says="is a local file and has no revision")
    fails("evaluate", source, other, "--revision", "v1", says="none of the models is a Hub id")
    fails("evaluate", source, tmp_path / "nowhere", "--revision", "v1", says="none of the models is a Hub id")
    works("evaluate", source, MODEL, other, "--revision", "v1", "--json", tmp_path / "mixed.json")
    first, hub, third = (each["perplexity"] for each in json.loads((tmp_path / "mixed.json").read_text())["models"])
    assert first != hub == third


def test_a_cache_that_lacks_what_is_needed(cached: Any, fails: Any, source: Path) -> None:
    root = cached(main=source)
    snapshot = root / "snapshots" / COMMITS["main"]
    (snapshot / "model.safetensors").unlink()
    fails("analyze", MODEL, says="no safetensors weights")
    (snapshot / "config.json").unlink()
    fails("analyze", MODEL, says="has no config.json")
    fails("analyze", "herons/nothing", says="no such folder here; as a Hub id, revision 'main' is not in the local")
    fails("analyze", "no model", says="no such folder here")


# Over the wire: the token, and what is fetched


@pytest.mark.parametrize("command", COMMANDS)
def test_the_token_is_sent_and_shows_nowhere(
    hub: FakeHub, works: Any, fails: Any, source: Path, tmp_path: Path, command: str
) -> None:
    hub.put("main", source)
    hub.token = TOKEN
    assert TOKEN not in fails(command, MODEL, says="gated on the Hub")
    assert TOKEN not in fails(command, MODEL, "--token", f"{TOKEN}x", says="gated on the Hub")
    hub.seen.clear()
    printed = works(command, MODEL, "--token", TOKEN, "--json", tmp_path / "figures.json")
    assert {token for _, path, token in hub.seen if MODEL in path} == {TOKEN}
    assert TOKEN not in printed
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert (tmp_path / "figures.json") in written
    for path in written:
        assert TOKEN.encode() not in path.read_bytes(), f"{path} has the token"
    assert TOKEN not in repr(Access(token=TOKEN))


def test_the_token_of_the_environment(
    hub: FakeHub, works: Any, source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.put("main", source)
    hub.token = TOKEN
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    works("analyze", MODEL, "--token", "")  # as an unset variable gives it
    monkeypatch.delenv("HF_TOKEN")
    shutil.rmtree(tmp_path / "home")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text(TOKEN)
    works("analyze", MODEL)


def test_refusals_of_the_hub_are_one_line_without_the_token(hub: FakeHub, fails: Any, source: Path) -> None:
    hub.put("main", source)
    fails("generate", "herons/nothing", says="herons/nothing: no such folder here, and no such Hub id")
    fails("generate", MODEL, "--revision", "v9", says=f"{MODEL}: no revision 'v9' on the Hub")
    hub.token, hub.refusal = "another", "RepoNotFound"
    fails("generate", MODEL, "--token", TOKEN, says="log in or give --token")
    hub.refusal, hub.says = "Unheard", f"what is {TOKEN}?"
    assert TOKEN not in fails("generate", MODEL, "--token", TOKEN, says="what is ***?")
    for broken in (f"{TOKEN}\n", f"{TOKEN} ", "ключ"):
        assert TOKEN not in fails("generate", MODEL, "--token", broken, says="the Hub token holds")


def test_only_what_is_read_is_fetched(hub: FakeHub, works: Any, copy_of: Path, tmp_path: Path) -> None:
    """Not the same weights in other forms."""
    (copy_of / "original").mkdir()
    (copy_of / "original" / "consolidated.00.pth").write_bytes(b"big")
    (copy_of / "onnx").mkdir()
    (copy_of / "onnx" / "model.onnx").write_bytes(b"big")
    (copy_of / "USE_POLICY.md").write_text("be kind")
    to_pickle(copy_of, keep=True)
    shutil.copyfile(copy_of / "model.safetensors", copy_of / "consolidated.safetensors")
    hub.put("main", copy_of)
    works("convert", MODEL)
    expected = {"config.json", "generation_config.json", "model.safetensors", "LICENSE", "USE_POLICY.md"}
    assert hub.fetched() == expected | {"tokenizer.json", "tokenizer_config.json"}
    assert (tmp_path / "out" / "USE_POLICY.md").read_text() == "be kind"
    assert (tmp_path / "out" / "LICENSE").read_text() == "as you like it"


def test_all_files_are_of_one_commit(hub: FakeHub, source: Path, other: Path) -> None:
    hub.put("main", source)
    hub.put("v1", other)
    hub.moves = True
    checkpoint = load(MODEL)
    assert checkpoint.folder.name == COMMITS["main"]
    assert torch.equal(checkpoint.model.get_input_embeddings().weight, embeddings(source))
    assert load(MODEL).folder.name == COMMITS["v1"]


def test_shards_of_a_hub_id(hub: FakeHub, works: Any, fails: Any, source: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(sharded, max_shard_size="40KB")
    hub.put("v1", sharded)
    checkpoint = load(MODEL, access=Access("v1"))
    assert len(weight_files(checkpoint.folder)) > 1
    assert torch.equal(checkpoint.model.get_input_embeddings().weight, embeddings(source))


def test_an_unknown_family_is_refused_before_its_weights_are_fetched(hub: FakeHub, fails: Any, copy_of: Path) -> None:
    entries = json.loads((copy_of / "config.json").read_text()) | {"model_type": "mystery"}
    (copy_of / "config.json").write_text(json.dumps(entries))
    hub.put("main", copy_of)
    fails("analyze", MODEL, says="'mystery' is not supported")
    assert "config.json" in hub.fetched()
    assert "model.safetensors" not in hub.fetched()


def test_what_was_fetched_once_is_used_offline(
    hub: FakeHub, works: Any, fails: Any, source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.put("main", source, **{"weights.onnx": b"never fetched"})
    works("analyze", MODEL)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.seen.clear()
    works("analyze", MODEL)
    (snapshot,) = (tmp_path / "home" / "hub").glob("models--*/snapshots/*")
    (snapshot / "LICENSE").unlink()
    works("analyze", MODEL)
    works("analyze", MODEL, "--revision", snapshot.name)
    (snapshot / "model.safetensors").unlink()
    fails("analyze", MODEL, says="some of its files are not in the local cache")
    assert not hub.seen


# Pickles


@pytest.mark.parametrize("form", ["one file", "shards", "old format"])
@pytest.mark.parametrize("place", ["folder", "hub"])
def test_pickles_are_read_when_allowed(
    hub: FakeHub, works: Any, fails: Any, copy_of: Path, source: Path, tmp_path: Path, form: str, place: str
) -> None:
    old = {"_use_new_zipfile_serialization": False} if form == "old format" else {}
    to_pickle(copy_of, shards=3 if form == "shards" else 0, **old)
    hub.put("main", copy_of)
    model = MODEL if place == "hub" else str(copy_of)
    for command in COMMANDS:
        line = fails(command, model, says="only pickled weights (pytorch_model.bin)")
        assert "code that runs" in line
        assert "--allow-pickle" in line
    assert not any(name.endswith(".bin") for name in hub.fetched())
    works("convert", model, "--allow-pickle")
    assert torch.equal(embeddings(tmp_path / "out"), embeddings(source))
    works("convert", source, "--overwrite", "--json", tmp_path / "expected.json")
    found = load(model, access=Access(allow_pickle=True)).model.state_dict()
    expected = load(str(source)).model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_the_recipe_has_the_hash_of_the_pickles(works: Any, copy_of: Path, tmp_path: Path) -> None:
    to_pickle(copy_of, shards=2)
    works("convert", copy_of, "--allow-pickle")
    content = b"".join(path.read_bytes() for path in sorted(copy_of.glob("*.bin")))
    found = json.loads((tmp_path / "out" / "kvfold.json").read_text())["source"]["sha256"]
    assert found == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("allow", [[], ["--allow-pickle"]])
def test_safetensors_are_taken_where_there_are_both(
    works: Any, copy_of: Path, other: Path, tmp_path: Path, allow: list[str]
) -> None:
    to_pickle(other, keep=True)
    shutil.copyfile(other / "pytorch_model.bin", copy_of / "pytorch_model.bin")
    works("convert", copy_of, *allow)
    assert torch.equal(embeddings(tmp_path / "out"), embeddings(copy_of))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("form", ["torch.save", "unknown dtype", "old format", "plain pickle", "newer pickle"])
def test_a_pickle_that_would_run_code_is_refused(fails: Any, copy_of: Path, tmp_path: Path, form: str) -> None:
    to_pickle(copy_of)
    file = copy_of / "pytorch_model.bin"
    content = torch.load(file) | {"lm_head.weight": Malice(tmp_path / "ran")}
    if form.endswith("pickle"):
        file.write_bytes(pickle.dumps(content["lm_head.weight"], protocol=2 if form == "plain pickle" else 4))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=form != "old format")
    if form == "unknown dtype":  # which transformers then reads off the pickle, before the weights
        entries = json.loads((copy_of / "config.json").read_text())
        del entries["dtype"]
        (copy_of / "config.json").write_text(json.dumps(entries))
    line = fails("convert", copy_of, "--allow-pickle", says="they were not loaded")
    assert "hold posix.mkdir, which is not a tensor" in line or form == "newer pickle"
    assert not (tmp_path / "ran").exists()
    with suppress(RuntimeError):  # the plain ones run before they turn out to hold no weights
        torch.load(file, weights_only=False)
    assert (tmp_path / "ran").exists(), "read without care it does run"


def test_setting_torch_to_trust_pickles_changes_nothing(
    fails: Any, copy_of: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(Malice(tmp_path / "ran"), copy_of / "pytorch_model.bin")
    (copy_of / "model.safetensors").unlink()
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    fails("convert", copy_of, "--allow-pickle", says="they were not loaded")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("no pickle at all", "damaged, or something else than tensors"),
        ("", "cannot be loaded"),
        ("PK\x03\x04 cut short", "cannot be loaded"),
        ([1, 2], "cannot be loaded"),
        ({"model": {"lm_head.weight": torch.ones(320, 48)}}, "30 tensors are missing"),
    ],
)
def test_pickles_that_hold_no_weights(fails: Any, copy_of: Path, content: Any, says: str) -> None:
    to_pickle(copy_of)
    file = copy_of / "pytorch_model.bin"
    if isinstance(content, str):
        file.write_text(content)
    else:
        torch.save(content, file)
    fails("convert", copy_of, "--allow-pickle", says=says)


def test_no_pickle_by_the_back_door(fails: Any, copy_of: Path) -> None:
    """Names that a checkpoint's own files give its weights do not get pickles read without leave."""
    tensors = load_file(copy_of / "model.safetensors")
    to_pickle(copy_of)
    file = (copy_of / "pytorch_model.bin").rename(copy_of / "adapter_model.bin")
    entries = json.loads((copy_of / "config.json").read_text())
    (copy_of / "config.json").write_text(json.dumps(entries | {"transformers_weights": file.name}))
    fails("convert", copy_of, says="transformers_weights")
    (copy_of / "config.json").write_text(json.dumps(entries))
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file.name)}
    (copy_of / "model.safetensors.index.json").write_text(json.dumps(index))
    fails("convert", copy_of, says="names adapter_model.bin, which is not a safetensors file")
    fails("convert", copy_of, "--allow-pickle", says="names adapter_model.bin, which is not a safetensors file")


def test_a_missing_pickled_shard(fails: Any, copy_of: Path) -> None:
    to_pickle(copy_of, shards=2)
    (copy_of / "pytorch_model-00002-of-00002.bin").unlink()
    fails("convert", copy_of, "--allow-pickle", says="shard pytorch_model-00002-of-00002.bin is missing")


def test_an_adapter_beside_the_weights(fails: Any, copy_of: Path) -> None:
    (copy_of / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "herons/elsewhere"}))
    fails("convert", copy_of, says="PEFT adapter")


def test_tables_that_old_checkpoints_store(works: Any, copy_of: Path, source: Path, tmp_path: Path) -> None:
    """Rotary frequencies, which once were buffers of every layer, are passed over."""
    to_pickle(copy_of)
    tensors = torch.load(copy_of / "pytorch_model.bin")
    tensors |= {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(3)}
    torch.save(tensors, copy_of / "pytorch_model.bin")
    works("convert", copy_of, "--allow-pickle")
    assert torch.equal(embeddings(tmp_path / "out"), embeddings(source))


# What is stored: dtypes, tied weights, GGUF


def stored(folder: Path) -> dict[str, torch.dtype]:
    """The dtype of every tensor in a folder's safetensors."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {key: file.get_tensor(key).dtype for key in file.keys()}  # noqa: SIM118 (it is no dictionary)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["safetensors", "pickle", "config without dtype", "pickle and config without dtype"])
def test_the_stored_dtype_is_kept(works: Any, copy_of: Path, tmp_path: Path, dtype: torch.dtype, form: str) -> None:
    llama().to(dtype).save_pretrained(copy_of)
    assert set(stored(copy_of).values()) == {dtype}
    if "config" in form:
        entries = json.loads((copy_of / "config.json").read_text())
        assert entries.pop("dtype") == str(dtype).removeprefix("torch.")
        (copy_of / "config.json").write_text(json.dumps(entries))
    if "pickle" in form:
        to_pickle(copy_of)
    works("convert", copy_of, "--allow-pickle")
    assert set(stored(tmp_path / "out").values()) == {dtype}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == dtype


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("form", ["safetensors", "pickle"])
def test_tied_and_untied_embeddings(works: Any, copy_of: Path, tmp_path: Path, tied: bool, form: str) -> None:
    llama(tie_word_embeddings=tied).save_pretrained(copy_of)
    if form == "pickle":  # in which both names of the one tensor are stored
        tensors = load_file(copy_of / "model.safetensors")
        torch.save({"lm_head.weight": tensors["model.embed_tokens.weight"]} | tensors, copy_of / "pytorch_model.bin")
        (copy_of / "model.safetensors").unlink()
    works("convert", copy_of, "--allow-pickle")
    out = tmp_path / "out"
    assert ("lm_head.weight" in stored(out)) is not tied
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.tie_word_embeddings is tied
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) is tied
    expected = load(str(copy_of), access=Access(allow_pickle=True)).model
    assert torch.equal(model.lm_head.weight, expected.lm_head.weight)
    assert torch.equal(model.model.embed_tokens.weight, expected.model.embed_tokens.weight)


def test_weights_that_are_said_to_be_tied_and_are_not(works: Any, copy_of: Path, tmp_path: Path) -> None:
    entries = json.loads((copy_of / "config.json").read_text()) | {"tie_word_embeddings": True}
    (copy_of / "config.json").write_text(json.dumps(entries))
    works("convert", copy_of)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not model.config.tie_word_embeddings
    tensors = load_file(copy_of / "model.safetensors")
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
    assert torch.equal(model.model.embed_tokens.weight, tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("place", ["folder", "hub"])
def test_a_config_that_names_its_weights(
    hub: FakeHub, works: Any, copy_of: Path, source: Path, tmp_path: Path, place: str
) -> None:
    (copy_of / "model.safetensors").rename(copy_of / "consolidated.safetensors")
    entries = json.loads((copy_of / "config.json").read_text())
    (copy_of / "config.json").write_text(json.dumps(entries | {"transformers_weights": "consolidated.safetensors"}))
    hub.put("main", copy_of)
    works("convert", MODEL if place == "hub" else copy_of)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out") is not None
    assert torch.equal(embeddings(tmp_path / "out"), embeddings(source))
    if place == "folder":
        found = json.loads((tmp_path / "out" / "kvfold.json").read_text())["source"]["sha256"]
        assert found == hashlib.sha256((copy_of / "consolidated.safetensors").read_bytes()).hexdigest()


def write_gguf(model: Any, tokenizer: PreTrainedTokenizerFast, path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Store a Llama as llama.cpp does, queries and keys with their rotary pairs side by side.

    Its matrices are rounded to ``kind`` in ``model``, too.
    """
    config = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads["attn_q"])
    writer.add_head_count_kv(heads["attn_k"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].get)
    tokens += [f"<unused{index}>" for index in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["merges"]])
    writer.add_bos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        name = names.get_name(key, try_suffixes=(".weight",))
        data = tensor.numpy()
        if data.ndim == 1:
            writer.add_tensor(name, data)
            continue
        for part, count in heads.items():
            if f".{part}." in name:
                data = data.reshape(count, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
        tensor.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
@torch.no_grad()
def test_gguf_files(
    works: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, ids: torch.Tensor, kind: str
) -> None:
    model = llama(hidden_size=64, intermediate_size=96, num_attention_heads=8)
    write_gguf(model, tokenizer, tmp_path / "tiny.gguf", gguf.GGMLQuantizationType[kind])
    works("convert", tmp_path / "tiny.gguf", "--cache-fraction", 1)
    out = tmp_path / "out"
    folded = AutoModelForCausalLM.from_pretrained(out)
    assert relative(folded(ids).logits, model(ids).logits) < 1e-5
    assert set(stored(out).values()) == {torch.float32}
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    text = "Sentence 3 tells of cats."
    assert AutoTokenizer.from_pretrained(out)(text).input_ids == tokenizer(text).input_ids
    works("convert", tmp_path / "tiny.gguf", "--overwrite", "--dtype", "bfloat16")
    assert set(stored(out).values()) == {torch.bfloat16}
    source = json.loads((out / "kvfold.json").read_text())["source"]
    assert source["sha256"] == hashlib.sha256((tmp_path / "tiny.gguf").read_bytes()).hexdigest()


# What lies beside the weights


TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "several"])
def test_the_tokenizer_and_its_chat_template_come_along(works: Any, copy_of: Path, tmp_path: Path, place: str) -> None:
    if place == "tokenizer_config.json":
        entries = json.loads((copy_of / place).read_text()) | {"chat_template": TEMPLATE}
        (copy_of / place).write_text(json.dumps(entries))
    else:
        (copy_of / "chat_template.jinja").write_text(TEMPLATE)
    if place == "several":
        (copy_of / "additional_chat_templates").mkdir()
        (copy_of / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (copy_of / "tokenizer.model").write_bytes(b"of sentencepiece")
    works("convert", copy_of)
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"of sentencepiece"
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (copy_of, tmp_path / "out"))
    text = "Sentence 3 tells of cats."
    assert after(text).input_ids == before(text).input_ids
    assert after.special_tokens_map == before.special_tokens_map
    assert (after.padding_side, after.model_max_length) == (before.padding_side, before.model_max_length)
    chat = [{"role": "user", "content": "Hello"}]
    assert after.apply_chat_template(chat, tokenize=False) == "[user] Hello"
    if place == "several":
        assert after.get_chat_template("tool_use") == "tools"


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 5], "max_length": 300},
        {"do_sample": False, "temperature": 0.6, "top_p": 0.9},  # as Llama 2 was published; it is not quite valid
    ],
)
def test_generation_settings_come_along(works: Any, copy_of: Path, tmp_path: Path, settings: dict) -> None:
    (copy_of / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "pad_token_id": 1} | settings))
    works("convert", copy_of)
    before, after = (
        GenerationConfig.from_pretrained(folder).to_dict() | {"transformers_version": ""}
        for folder in (copy_of, tmp_path / "out")
    )
    assert after == before
    assert settings.items() <= after.items()


def test_licences_come_along(works: Any, copy_of: Path, tmp_path: Path) -> None:
    files = {"LICENSE": "as you like it", "LICENSE.txt": "too", "NOTICE": "made here", "USE_POLICY.md": "be kind"}
    for name, text in files.items():
        (copy_of / name).write_text(text)
    (copy_of / "LICENSES").mkdir()
    (copy_of / "optimizer.pt").write_bytes(b"not to be copied")
    works("convert", copy_of)
    assert {name: (tmp_path / "out" / name).read_text() for name in files} == files
    assert not (tmp_path / "out" / "optimizer.pt").exists()


# Converted already


def test_a_folded_checkpoint_is_told_by_its_recipe(fails: Any, folded: Path, source: Path, tmp_path: Path) -> None:
    for command in ("convert", "analyze"):
        fails(
            command,
            folded,
            says=f"{folded} is folded already (calibrated, span all, cache fraction 0.5, from {source}): give its",
        )
    copy = Path(shutil.copytree(folded, tmp_path / "copy"))
    for damaged in ("{", "[]", "{}", json.dumps({"source": {"path": "x"}, "cache_fraction": "half"})):
        (copy / "kvfold.json").write_text(damaged)
        fails("convert", copy, says="is folded already: give its source")
    (copy / "kvfold.json").unlink()
    fails("convert", copy, says="is folded already: give its source")


def test_a_folded_checkpoint_on_the_hub(cached: Any, works: Any, fails: Any, folded: Path) -> None:
    cached(main=folded)
    fails("convert", MODEL, says=f"{MODEL} is folded already (calibrated, span all")
    works("evaluate", MODEL)
    works("generate", MODEL)


def test_an_access_is_checked_before_anything_is_read() -> None:
    with pytest.raises(KvfoldError, match="none of the models"):
        Access("v1").each(["./here", "/there"])
    assert Access("v1").each(["./here", MODEL]) == [Access(), Access("v1")]
    assert Access(allow_pickle=True).each(["./here"]) == [Access(allow_pickle=True)]
