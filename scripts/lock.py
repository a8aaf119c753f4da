r"""Print a lock file for ``pip install --no-deps -r``: the exact version of everything the project needs.

For CPU machines, from the environment that this interpreter runs in, where everything works together:

    .venv/bin/python scripts/lock.py > requirements-cpu.lock

For GPU machines, from pip's own resolution, which needs no GPU and downloads next to nothing:

    pip install --dry-run --ignore-installed --report report.json \
        '.[gpu,scienceworld,webshop,searchqa,dev]' setuptools==78.1.1
    .venv/bin/python scripts/lock.py report.json > requirements-gpu.lock

For the games that are compiled, what they need beside the first:

    .venv/bin/pip install --dry-run --report report.json -c requirements-cpu.lock '.[alfworld,textworld]'
    .venv/bin/python scripts/lock.py report.json > requirements-games.lock
"""

from __future__ import annotations

import json
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LEFT_OUT = {
    # The builds that PyPI serves are for CUDA: beside a CPU torch they fail at import, and vLLM and transformers with
    # them. Nothing here needs images or sound from them.
    "torchvision",
    "torchaudio",
    "torchcodec",
    # Of no use without a GPU; xgrammar asks for it.
    "triton",
}

EXTRAS = ("cpu", "scienceworld", "webshop", "searchqa", "dev")


def closure(roots: list[str]) -> dict[str, str]:
    """Canonical name -> exact version of all that ``roots`` need here."""
    pinned: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    queue = [(Requirement(root), "") for root in roots]
    while queue:
        requirement, extra = queue.pop()
        name = canonicalize_name(requirement.name)
        if name in LEFT_OUT or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
            continue
        try:
            found = distribution(name)
        except PackageNotFoundError:
            sys.exit(f"{requirement} is needed but not installed here")
        pinned[name] = found.version
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                queue += [(Requirement(line), wanted) for line in found.requires or ()]
    return pinned


def installed() -> dict[str, str]:
    project = tomllib.loads(Path("pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    return closure(
        [
            *project["build-system"]["requires"],
            *project["project"]["dependencies"],
            *(requirement for extra in EXTRAS for requirement in extras[extra]),
        ]
    )


def resolved(report: str) -> dict[str, str]:
    found = [item["metadata"] for item in json.loads(Path(report).read_text())["install"]]
    return {canonicalize_name(item["name"]): item["version"] for item in found if item["name"] != "asyncrl"}


def main() -> None:
    if len(sys.argv) > 2:
        sys.exit(__doc__)
    pinned = resolved(sys.argv[1]) if len(sys.argv) == 2 else installed()
    print("# Made by scripts/lock.py, installed by scripts/setup*.sh. Do not edit.")
    for name, version in sorted(pinned.items()):
        print(f"{name}=={version}")


if __name__ == "__main__":
    main()
