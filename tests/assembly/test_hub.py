"""A model is fetched whole from a hub, or what stands in the way is said on one line."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.assembly.hub import COMMIT, OTHER_COMMIT, REPO, Hub, Odd, Request

from engine.assembly.errors import AssemblyError
from engine.assembly.model_config import locate

FILES = {
    "config.json": b'{"architectures": ["Any"]}',
    "generation_config.json": b'{"eos_token_id": 2}',
    "model-00001-of-00002.safetensors": b"1" * 3_000_000,
    "model-00002-of-00002.safetensors": b"2" * 1000,
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {f"layers.{i}": f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}}
    ).encode(),
    "tokenizer.json": b"{}",
}
NOT_READ = {"README.md": b"#", "pytorch_model.bin": b"0", "original/params.pth": b"0"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    with Hub({**FILES, **NOT_READ}) as found:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)  # before the library asks again
        yield found


def answering(body: object, status: int = 200, code: str = "", where: str = "/api/models/") -> Odd:
    def odd(request: Request) -> bool:
        if not request.path.startswith(where):
            return False
        request.answer(body, status, code)
        return True

    return odd


def refused(path: str, download: bool = True) -> str:
    with pytest.raises(AssemblyError) as raised:
        locate(path, download=download)
    (problem,) = raised.value.problems
    assert problem.startswith(f"model.path={path}: ") and "\n" not in problem
    return problem.removeprefix(f"model.path={path}: ")


def test_a_model_comes_whole_and_once(hub: Hub, tmp_path: Path) -> None:
    folder = locate(REPO, download=True)
    assert folder == tmp_path / "models--org--tiny" / "snapshots" / COMMIT
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == FILES
    asked = len(hub.asked)
    assert locate(REPO, download=True) == locate(REPO) == folder and len(hub.asked) == asked


def test_a_revision_has_a_folder_of_its_own(hub: Hub) -> None:
    assert locate(f"{REPO}@v2", download=True).name == OTHER_COMMIT
    assert locate(f"{REPO}@{OTHER_COMMIT}").name == locate(f"{REPO}@v2").name
    assert refused(REPO, download=False).endswith(f"fetch it with 'hf download {REPO}' (engine serve does so itself)")
    said = refused(f"{REPO}@nope")
    assert said.endswith(f"{hub.url}/{REPO} has no revision 'nope': expected a branch, a tag or a whole commit hash")


def test_a_connection_that_breaks_goes_on_where_it_broke(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.breaks_after = 1_000_000
    folder = locate(REPO, download=True)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == FILES
    assert [asked for _, _, asked in hub.asked if asked] == ["bytes=1000000-"]


@pytest.mark.parametrize(
    ("late", "is_listed"),
    [
        ("model-00001-of-00002.safetensors", True),
        ("model-00002-of-00002.safetensors", False),
        ("model.safetensors.index.json", False),
        ("generation_config.json", True),
        ("config.json", False),
    ],
)
def test_what_an_interrupted_download_left_out_comes_with_the_next(
    late: str, is_listed: bool, hub: Hub, tmp_path: Path
) -> None:
    """``is_listed``: the library has noted what the repository holds; older ones do not."""
    hub.odd.append(answering({"error": "busy"}, 500, where=f"/{REPO}/resolve/{COMMIT}/{late}"))
    assert "answers with status 500" in refused(REPO)
    hub.odd.clear()
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / COMMIT
    there = {file.name for file in snapshot.iterdir()}
    if not is_listed:
        for listing in tmp_path.glob("*/trees/*"):
            listing.unlink()
    if late.endswith("index.json"):
        (snapshot / "model-00002-of-00002.safetensors").unlink(missing_ok=True)
    assert "has only a part of it; fetch it with" in refused(REPO, download=False)
    hub.asked.clear()
    folder = locate(REPO, download=True)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == FILES
    fetched = {path.rpartition("/")[2] for method, path, _ in hub.asked if method == "GET" and "/resolve/" in path}
    assert fetched == FILES.keys() - there and late in fetched, "what is there is not fetched again"


def test_a_renamed_repository_is_found_by_its_former_name(hub: Hub) -> None:
    hub.former = "org/old"
    folder = locate("org/old", download=True)
    assert {file.name for file in folder.iterdir()} == set(FILES)
    assert locate("org/old") == folder


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (answering({}, 401, "GatedRepo"), "{hub}/org/tiny is gated: accept its terms there, and log in"),
        (answering({}, 403, "GatedRepo"), "{hub}/org/tiny is gated, and the account that you are logged in with has"),
        (answering({}, 401, "GatedRepo", "/org"), "{hub}/org/tiny is gated: accept its terms there, and log in"),
        (answering({}, 401, "RepoNotFound"), "{hub} has no model org/tiny, or a private one: check the name, or"),
        (answering({}, 403), "{hub} answers with status 403; log in with 'hf auth login' or set HF_TOKEN"),
        (answering({}, 500), "{hub} answers with status 500; try again"),
        (answering(b"<html>Sign in</html>"), "{hub} does not answer as a hub does (JSONDecodeError: Expecting value"),
        (answering(b'{"sha": "aaaa'), "{hub} does not answer as a hub does (JSONDecodeError: Unterminated string"),
        (answering([1]), "{hub} does not answer as a hub does (TypeError: "),
        (answering({}), "{hub} does not answer as a hub does ("),
        (answering(b"<html>", where="/org"), "{hub} does not answer as a hub does (FileMetadataError: "),
    ],
)  # fmt: skip
def test_an_odd_answer_is_one_line_with_what_would_help(answer: Odd, says: str, hub: Hub) -> None:
    hub.odd.append(answer)
    assert refused(REPO).startswith("cannot be downloaded: " + says.format(hub=hub.url))


def test_a_repository_that_is_not_there_and_a_name_that_is_none(hub: Hub) -> None:
    assert f"{hub.url} has no model org/other, or a private one" in refused("org/other")
    assert "Repo id must use alphanumeric chars" in refused("org/na me")


@pytest.mark.parametrize(
    ("left", "says"),
    [
        ("*.safetensors", "has no *.safetensors; weights in other formats are not read: choose a repository or"),
        ("config.json", "has no config.json; expected the layout of Hugging Face"),
    ],
)
def test_a_repository_without_safetensors_or_without_a_config_says_so(left: str, says: str, hub: Hub) -> None:
    hub.files = {
        name: content for name, content in hub.files.items() if not Path(name).match(left) and "index" not in name
    }
    assert says in refused(REPO)


@pytest.mark.parametrize("way", ["HF_HUB_OFFLINE", "a hub that is gone"])
def test_without_a_network_a_cached_model_serves_and_any_other_is_refused(
    way: str, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    folder = locate(REPO, download=True)
    if way == "HF_HUB_OFFLINE":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        said = f"cannot be downloaded: HF_HUB_OFFLINE is set, and {tmp_path} does not have all of it; unset it, or copy"
    else:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        said = "cannot be downloaded: http://127.0.0.1:9 is not reached (ConnectError: [Errno 111] Connection refused)"
    assert locate(REPO, download=True) == folder
    assert refused("org/other").startswith(said)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert refused(REPO).startswith(said)
