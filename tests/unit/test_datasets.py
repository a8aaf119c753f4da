"""``asyncrl data``: what is there, fetching from folders, archives and addresses, resuming, checksums."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from asyncrl import cli
from envs import datasets
from envs.datasets import SUMS, Dataset, Part, check, fetch, find, missing
from tests.http_server import serving

WORDS = "".join(f"line {i}\n" for i in range(300_000)).encode()


def read(folder: Path) -> None:
    path = folder / "sub/words.txt"
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    if not path.read_bytes().startswith(b"line 0\n"):
        raise ValueError(f"{path} is damaged")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASYNCRL_DATA", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub/words.txt").write_bytes(WORDS)
    (folder / "licence.txt").write_text("ours")
    return folder


def dataset(**more: Any) -> Dataset:
    return Dataset("words", (Part("words", read, read),), **more)


def archive(source: Path, kind: str) -> Path:
    return Path(shutil.make_archive(str(source.with_name("archive")), kind, source))


@pytest.mark.parametrize("kind", ["folder", "zip", "xztar"])
def test_a_local_source_is_taken_whole(home: Path, source: Path, kind: str) -> None:
    given = source if kind == "folder" else archive(source, kind)
    assert missing(dataset()) == ["words"]
    assert fetch(dataset(), given) == home / "words"
    assert (home / "words/sub/words.txt").read_bytes() == WORDS
    assert missing(dataset()) == [] and not any(problem for _, problem in check(dataset()))
    assert sorted(path.name for path in home.iterdir()) == ["words"]
    assert source.is_dir() and len((home / "words" / SUMS).read_text().splitlines()) == 2


def test_a_read_only_source_is_taken_as_one_may_write(home: Path, source: Path) -> None:
    for path in (source / "sub/words.txt", source / "sub"):
        path.chmod(0o555)
    fetch(dataset(), source)
    assert all((home / "words" / one).stat().st_mode & 0o200 for one in ("sub", "sub/words.txt"))


def test_damage_after_fetching_is_found(home: Path, source: Path) -> None:
    fetch(dataset(), source)
    (home / "words/sub/words.txt").write_bytes(WORDS[:-1])
    (home / "words/licence.txt").unlink()
    problems = {what: problem for what, problem in check(dataset()) if problem}
    assert set(problems) == {"sub/words.txt", "licence.txt"}
    assert "has changed since it was fetched; asyncrl data fetch words" in problems["sub/words.txt"]
    assert "is missing; asyncrl data fetch words" in problems["licence.txt"]
    fetch(dataset(), source)
    assert not any(problem for _, problem in check(dataset()))


def test_fetching_adds_to_what_is_there(home: Path, source: Path, tmp_path: Path) -> None:
    fetch(dataset(), source)
    (tmp_path / "more").mkdir()
    (tmp_path / "more/own.txt").write_text("own")
    fetch(dataset(), tmp_path / "more")
    assert (home / "words/sub/words.txt").is_file() and len((home / "words" / SUMS).read_text().splitlines()) == 3


@pytest.mark.parametrize("name", ["none", "broken.zip", "broken.tar.gz", "words.txt"])
def test_a_bad_source_is_named_and_leaves_nothing_where_environments_look(
    home: Path, tmp_path: Path, name: str
) -> None:
    given = tmp_path / name
    if name != "none":
        given.write_bytes(b"no archive")
    with pytest.raises(ValueError, match=rf"{name}: cannot be unpacked .*; give a folder, a .zip or a .tar"):
        fetch(dataset(), given)
    assert not (home / "words").exists()


@pytest.mark.parametrize(
    ("name", "mode"), [("tar", "w"), ("tar.gz", "w:gz"), ("tgz", "w:gz"), ("tbz2", "w:bz2"), ("txz", "w:xz")]
)
def test_an_archive_writes_nowhere_else(home: Path, tmp_path: Path, name: str, mode: str) -> None:
    out = tmp_path / "evil.txt"
    with tarfile.open(tmp_path / f"evil.{name}", mode) as tar:  # type: ignore[call-overload]
        tar.addfile(tarfile.TarInfo("../../evil.txt"))
    with pytest.raises(ValueError, match=rf"evil.{name}: cannot be unpacked"):
        fetch(dataset(), tmp_path / f"evil.{name}")
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as packed:
        packed.writestr("../../evil.txt", "x")
    with pytest.raises(ValueError, match=r"data set words: .*evil.zip holds no file"):
        fetch(dataset(), tmp_path / "evil.zip")
    assert not out.exists() and not (home / "words/evil.txt").exists()


def test_what_was_fetched_elsewhere_can_be_taken_over(
    home: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fetch(dataset(), source)
    monkeypatch.setenv("ASYNCRL_DATA", str(tmp_path / "second"))
    fetch(dataset(), first)
    assert not any(problem for _, problem in check(dataset()))


def test_what_one_source_left_is_not_taken_for_anothers(home: Path, source: Path, tmp_path: Path) -> None:
    left = home / ".words.incoming"
    left.mkdir(parents=True)
    (left / "half.txt").write_text("ha")
    fetch(dataset(), source)
    assert not (home / "words/half.txt").exists()


def test_a_source_around_the_data_folder_is_refused(home: Path) -> None:
    home.mkdir(exist_ok=True)
    with pytest.raises(ValueError, match="holds the data folder itself"):
        fetch(dataset(), home)


@contextmanager
def server(content: bytes, *, stops_at: int | None = None, ranges: bool = True) -> Iterator[tuple[str, list[str]]]:
    """Serves ``content``; the first answer breaks off at ``stops_at``. Gives the address and the ranges asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range", "")
            asked.append(wanted)
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and ranges else 0
            if self.path != "/words.zip":
                self.send_error(404)
                return
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            self.wfile.write(content[start : stops_at if len(asked) == 1 else None])

        def log_message(self, *_: Any) -> None: ...

    with serving(Handler) as address:
        yield f"{address}/words.zip", asked


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_goes_on_where_it_stopped(home: Path, source: Path, ranges: bool) -> None:
    content = archive(source, "zip").read_bytes()
    half = len(content) // 2
    with server(content, stops_at=half, ranges=ranges) as (address, asked):
        with pytest.raises(
            ValueError, match=rf"{address} cannot be fetched .*; try again, it goes on where it stopped"
        ):
            fetch(dataset(archive=address))
        assert not (home / "words").exists()
        fetch(dataset(archive=address))
    assert asked[0] == "" and half - 2**16 <= int(asked[1].removeprefix("bytes=").removesuffix("-")) <= half
    assert (home / "words/sub/words.txt").read_bytes() == WORDS
    assert sorted(path.name for path in home.iterdir()) == ["words"]


def test_a_damaged_download_is_not_gone_on_with(home: Path) -> None:
    with server(b"no archive") as (address, asked):
        for _ in range(2):
            with pytest.raises(ValueError, match=r"words.zip: cannot be unpacked"):
                fetch(dataset(archive=address))
    assert asked == ["", ""] and not (home / "words").exists()


def test_a_download_that_was_whole_is_not_fetched_again(home: Path, source: Path) -> None:
    content = archive(source, "zip").read_bytes()
    home.mkdir()
    (home / ".words.words.zip").write_bytes(content)
    with server(content) as (address, asked):
        fetch(dataset(archive=address))
    assert asked == [f"bytes={len(content)}-"] and not any(problem for _, problem in check(dataset()))


def test_an_address_that_is_wrong_or_dead_is_named(home: Path) -> None:
    wrong = r"other.zip cannot be fetched .*404.*by hand and give the file with --from"
    with server(b"") as (address, _), pytest.raises(ValueError, match=wrong):
        fetch(dataset(archive=address.replace("words", "other")))
    with pytest.raises(ValueError, match=rf"{address} cannot be fetched .*refused"):
        fetch(dataset(archive=address))


def test_the_hub_is_asked_for_the_files_wanted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def snapshot_download(repository: str, *, repo_type: str, allow_patterns: list[str], local_dir: Path) -> None:
        assert (repository, repo_type, allow_patterns) == ("who/words", "dataset", ["sub/words.txt"])
        (local_dir / "sub").mkdir()
        (local_dir / "sub/words.txt").write_bytes(WORDS)
        (local_dir / ".cache").mkdir()
        (local_dir / ".cache/notes").write_text("")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    fetch(dataset(hub=("who/words", ("sub/words.txt",))))
    assert (home / "words" / SUMS).read_text().endswith("  sub/words.txt\n") and not (home / "words/.cache").exists()


def test_a_hub_that_cannot_be_reached_is_answered(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"repository who/words cannot be fetched .*folder with --from"):
        fetch(dataset(hub=("who/words", ("sub/words.txt",))))


def test_what_only_a_person_can_fetch_says_so(home: Path) -> None:
    with pytest.raises(ValueError, match=r"data set webshop: .* setup.sh .* asyncrl data fetch webshop --from FOLDER"):
        fetch(find("webshop"))


# --- the command line


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["asyncrl", "data", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_list_says_where_and_what_to_type(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ASYNCRL_RETRIEVER", raising=False)
    assert run(monkeypatch, "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(datasets.datasets())
    assert (
        f"{home / 'searchqa'}: lacks nq/train, " in lines[1]
        and "retriever; type: asyncrl data fetch searchqa" in lines[1]
    )


def test_fetch_checks_what_it_fetched(
    home: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(datasets, "datasets", lambda: {"words": dataset()})
    assert run(monkeypatch, "check", "words") == 1
    assert "FAIL words: " in capsys.readouterr().out
    assert run(monkeypatch, "fetch", "words", "--from", source) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["ok   words", "ok   2 files compared with their checksums"]
    (source / "sub/words.txt").write_text("other")
    assert run(monkeypatch, "fetch", "words", "--from", source) == 1
    assert "words.txt is damaged" in capsys.readouterr().out
    assert run(monkeypatch, "fetch", "letters") == 2
    assert "data set 'letters': not known; known: words" in capsys.readouterr().err


def test_every_data_set_is_complete_where_its_environment_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample catalogue of WebShop; Search QA's files cut down to one question each."""
    from envs.searchqa import questions

    monkeypatch.delenv("ASYNCRL_RETRIEVER", raising=False)
    shutil.copytree(Path(__file__).parents[1] / "data/webshop", home / "webshop")
    assert [problem for _, problem in check(find("webshop"))] == [""]
    one = {name: part._replace(rows=1) for name, part in questions.PARTS.items()}
    monkeypatch.setattr(questions, "PARTS", one)
    for name in (*questions.TRAIN, *questions.TEST):
        path = home / "searchqa" / one[name].files[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"question": "who?", "golden_answers": ["Ada"]}))
    assert missing(find("searchqa")) == ["retriever"]
    (home / "searchqa/corpus.jsonl").write_text(json.dumps({"id": 1, "contents": "Ada asks"}))
    assert not any(problem for _, problem in check(find("searchqa")))
    (home / "searchqa/nq/test.jsonl").write_text("{")
    questions.load.cache_clear()
    assert [what for what, problem in check(find("searchqa")) if problem] == ["nq/test"]
    assert missing(find("alfworld")) == ["train", "valid_seen", "valid_unseen"]


def test_data_is_listed_without_any_environments_packages(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['bm25s', 'Stemmer', 'textworld', 'thefuzz']));"
        "sys.argv[1:] = ['data', 'list']; from asyncrl.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"ASYNCRL_DATA": str(tmp_path)}, capture_output=True, text=True,
        timeout=100,
    )  # fmt: skip
    assert done.returncode == 0 and "searchqa" in done.stdout, done.stderr
