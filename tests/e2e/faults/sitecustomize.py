"""Put on PYTHONPATH by a test: the learner's next update raises once the named file exists."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

MODULE = "asyncrl.learner.rank"


class _Fault(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            update = module.LearnerRank.update

            def faulty(self: Any, batch: Any) -> Any:
                if Path(os.environ["ASYNCRL_TEST_FAULT"]).exists():
                    raise ArithmeticError("planted in the learner")
                return update(self, batch)

            module.LearnerRank.update = faulty

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "ASYNCRL_TEST_FAULT" in os.environ:
    sys.meta_path.insert(0, _Fault())
