"""The data sets that environments read and that do not come with the package: where each lies, whether it is whole, how
it gets there. Behind ``asyncrl data``.

Invariants: what is fetched lies in a folder of its own until it is whole, and only then where environments look; a
checksum of every fetched file is kept beside them (``SHA256SUMS``) and compared by ``check``. Nothing of one source is
taken for another's; only a download from the Hub goes on with what an earlier one left. Whether a data set is
complete is asked of the environment's own reader, so there is one opinion of it. Archives are unpacked by the standard
library's safe filter: nothing lands outside the folder.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import requests
from rich.progress import Progress

from asyncrl.track.aside import write_atomic
from envs.data_home import data_folder

SUMS = "SHA256SUMS"
TIMEOUT_S = 30.0
"""Longest a download may stand still."""


class Part(NamedTuple):
    name: str
    find: Callable[[Path], object]
    """Whether it is there, quickly; raises ValueError."""
    read: Callable[[Path], object]
    """Whether it is whole; raises ValueError, ImportError where the environment's packages are not there, or
    RuntimeError where a service does not answer."""
    fetched: bool = True
    """Whether fetching brings it."""


class Dataset(NamedTuple):
    name: str
    parts: tuple[Part, ...]
    hub: tuple[str, tuple[str, ...]] | None = None
    """Data set repository on the Hugging Face Hub, and the files wanted of it."""
    archive: str | None = None
    """Address of an archive."""
    by_hand: str = ""
    """What to do where it cannot be fetched from here."""

    @property
    def folder(self) -> Path:
        return data_folder(self.name)


def datasets() -> dict[str, Dataset]:
    return {one.name: one for one in (_alfworld(), _searchqa(), _webshop())}


def find(name: str) -> Dataset:
    """Raises ValueError: there is no such data set."""
    known = datasets()
    if name not in known:
        raise ValueError(f"data set {name!r}: not known; known: {', '.join(known)}")
    return known[name]


def missing(dataset: Dataset) -> list[str]:
    """Parts that are not there."""
    return [part.name for part in dataset.parts if _problem(part.find, dataset.folder)]


def check(dataset: Dataset, fetched: bool = False) -> Iterator[tuple[str, str]]:
    """(part or file, problem) for everything that is looked at, or all that fetching brings; the problem is empty where
    there is none."""
    for part in dataset.parts:
        if fetched and not part.fetched:
            continue
        yield part.name, _problem(part.read, dataset.folder)
    sums = _sums(dataset.folder)
    for line in sums:
        wanted, _, file = line.partition("  ")
        path = dataset.folder / file
        if not path.is_file():
            yield file, f"{path} is missing; asyncrl data fetch {dataset.name}"
        elif _digest(path) != wanted:
            yield file, f"{path} has changed since it was fetched; asyncrl data fetch {dataset.name}"
    if sums:
        yield f"{len(sums)} files compared with their checksums", ""


def fetch(dataset: Dataset, source: Path | None = None) -> Path:
    """Bring a data set into its folder, over what is there; gives the folder.

    Args:
        source: a local folder or archive (.zip, .tar, .tar.gz, .tar.xz); None asks the official source by HTTP.

    Raises:
        ValueError: the source is not there, is damaged, or cannot be had by HTTP; the message says what to do.
    """
    folder = dataset.folder
    incoming = folder.with_name(f".{folder.name}.incoming")
    if source is not None and incoming.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{source}: holds the data folder itself; give the data set's own folder")
    if source is not None or dataset.hub is None:
        shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir(parents=True, exist_ok=True)
    if source is not None:
        _unpack(source, incoming)
    elif dataset.hub is not None:
        _from_hub(*dataset.hub, incoming)
    elif dataset.archive is not None:
        archive = incoming.with_name(f".{folder.name}.{dataset.archive.rpartition('/')[2]}")
        _download(dataset.archive, archive)
        try:
            _unpack(archive, incoming)
        finally:
            archive.unlink()  # a damaged one must not be gone on with
    else:
        raise ValueError(f"data set {dataset.name}: {dataset.by_hand}")
    shutil.rmtree(incoming / ".cache", ignore_errors=True)  # the hub client's own notes
    sums = {file: digest for digest, _, file in (line.partition("  ") for line in _sums(folder))}
    (incoming / SUMS).unlink(missing_ok=True)  # of a folder that was fetched elsewhere
    files = sorted(path for path in incoming.rglob("*") if path.is_file())
    if not files:
        raise ValueError(f"data set {dataset.name}: {source or dataset.hub or dataset.archive} holds no file")
    for path in files:
        file = path.relative_to(incoming)
        sums[file.as_posix()] = _digest(path)
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, folder / file)
    write_atomic(folder / SUMS, "".join(f"{digest}  {file}\n" for file, digest in sorted(sums.items())))
    shutil.rmtree(incoming)
    return folder


def _problem(look: Callable[[Path], object], folder: Path) -> str:
    try:
        look(folder)
    except (ValueError, ImportError, RuntimeError) as error:
        return str(error)
    return ""


def _sums(folder: Path) -> list[str]:
    path = folder / SUMS
    return path.read_text().splitlines() if path.is_file() else []


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpack(source: Path, into: Path) -> None:
    try:
        if source.is_dir():
            for path in filter(Path.is_file, source.rglob("*")):  # its content alone: it may be read-only
                target = into / path.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        elif source.suffix.lower() == ".zip":  # whose unpacker has no filter and passes names that lead outside over
            shutil.unpack_archive(source, into)
        else:
            shutil.unpack_archive(source, into, filter="data")
    except Exception as error:  # each kind of archive has its own ways to be damaged
        raise ValueError(f"{source}: cannot be unpacked ({error}); give a folder, a .zip or a .tar file") from error


def _from_hub(repository: str, files: tuple[str, ...], into: Path) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        snapshot_download(repository, repo_type="dataset", allow_patterns=list(files), local_dir=into)
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ValueError(
            f"data set repository {repository} cannot be fetched ({error!s:.300}); try again, it goes on where it "
            "stopped, or fetch its files by hand and give their folder with --from"
        ) from error


def _download(address: str, path: Path) -> None:
    """Into ``path``; what is there already is taken as its beginning."""
    have = path.stat().st_size if path.exists() else 0
    try:
        headers = {"Range": f"bytes={have}-"} if have else {}
        with requests.get(address, stream=True, timeout=TIMEOUT_S, headers=headers) as answer, Progress() as progress:
            if answer.status_code == requests.codes.requested_range_not_satisfiable:
                return  # all of it is there
            answer.raise_for_status()
            have = have if answer.status_code == requests.codes.partial_content else 0
            size = have + int(answer.headers.get("Content-Length", 0))
            bar = progress.add_task(path.name, total=size or None, completed=have)
            with path.open("ab" if have else "wb") as file:
                for piece in answer.iter_content(2**16):
                    file.write(piece)
                    progress.advance(bar, len(piece))
        if size and path.stat().st_size < size:
            raise requests.ConnectionError(f"{path.stat().st_size} of {size} bytes came")
    except requests.RequestException as error:
        raise ValueError(
            f"{address} cannot be fetched ({error!s:.300}); try again, it goes on where it stopped, or fetch it by "
            "hand and give the file with --from"
        ) from error


def _searchqa() -> Dataset:
    from envs.searchqa.questions import HUB, PARTS, TEST, TRAIN, find_file, load

    def part(name: str) -> Part:
        find = partial(find_file, name=name)
        return Part(name, find, lambda folder: load(find(folder), PARTS[name].rows))

    def search(folder: Path, asks: bool) -> object:
        from envs.searchqa.client import Service, find_retriever, shared

        where = find_retriever(folder)
        return shared(Service(where)).ask("who asks", 1) if asks else where

    wanted = (*TRAIN, *TEST)
    parts = *map(part, wanted), Part("retriever", partial(search, asks=False), partial(search, asks=True), False)
    return Dataset("searchqa", parts, hub=(HUB, tuple(PARTS[name].files[0] for name in wanted)))


def _webshop() -> Dataset:
    def small(folder: Path, whole: bool) -> object:
        from envs.webshop.catalogue import find_files, load

        files = find_files(folder, "small")
        return load(files) if whole else files

    return Dataset(
        "webshop",
        (Part("small", partial(small, whole=False), partial(small, whole=True)),),
        by_hand="its files lie on a file host that only a browser reaches: run setup.sh of github.com/princeton-nlp/"
        "WebShop, then: asyncrl data fetch webshop --from FOLDER",
    )


def _alfworld() -> Dataset:
    from envs.alfworld.tasks import COUNTS, TYPES, find_games, game_file

    def part(name: str) -> Part:
        first = f"{name}/{TYPES[1]}/0"
        return Part(name, find_games, lambda folder: game_file(find_games(folder), first))

    return Dataset(
        "alfworld",
        tuple(map(part, COUNTS)),
        archive="https://github.com/alfworld/alfworld/releases/download/0.4.2/json_2.1.3_tw-pddl.zip",
    )
