"""compose: conf/ with overrides -> params.yaml, which DVC and the stages read.

`python -m pipeline.compose [overrides]` writes the file only when its content changes, so that nothing re-runs for free.
"""

from __future__ import annotations

import sys

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.core.artifacts import atomic_path
from pipeline.core.errors import PipelineError
from pipeline.stage import CONF_DIR, PROJECT_ROOT


def composed(overrides: list[str]) -> str:
    """The YAML text of the configuration with `overrides`, every interpolation resolved.

    Raises `PipelineError` when an override or a file in conf/ is at fault.
    """
    try:
        with initialize_config_dir(CONF_DIR, version_base="1.3"):
            cfg = compose("config", overrides=overrides)
        OmegaConf.resolve(cfg)
    except (HydraException, OmegaConfBaseException) as error:
        line = " ".join(str(error).split())
        raise PipelineError(
            f"The configuration cannot be composed: {line}", "correct the override or the file in conf/."
        ) from None
    return OmegaConf.to_yaml(cfg)


def main() -> None:
    try:
        text = composed(sys.argv[1:])
    except PipelineError as error:
        sys.exit(f"error: {error}")
    path = PROJECT_ROOT / "params.yaml"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        with atomic_path(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
        print(f"params.yaml composed from conf/ {' '.join(sys.argv[1:])}")


if __name__ == "__main__":
    main()
