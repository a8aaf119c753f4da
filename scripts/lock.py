"""Write a lock file: the exact versions, in this interpreter's environment, of everything the project needs.

    .venv/bin/python scripts/lock.py cpu > requirements-cpu.lock

Reads pyproject.toml, follows the installed packages' own requirements, and leaves out LEFT_OUT. The result is meant
for ``pip install --no-deps -r``.
"""

from __future__ import annotations

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

EXTRAS = ("scienceworld", "dev")
"""Extras of the project that every lock file holds, beside the one named on the command line."""


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


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] not in ("cpu", "gpu"):
        sys.exit(__doc__)
    project = tomllib.loads(Path("pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    roots = [*project["project"]["dependencies"], *extras[sys.argv[1]], *project["build-system"]["requires"]]
    for extra in EXTRAS:
        roots += extras[extra]
    print(f"# Made by scripts/lock.py {sys.argv[1]}; installed by scripts/setup.sh with --no-deps. Do not edit.")
    for name, version in sorted(closure(roots).items()):
        print(f"{name}=={version}")


if __name__ == "__main__":
    main()
